"""Settings that fit into a memory size, found by dry runs: the choices of --vram and --gradient-checkpointing auto, the
longest sequences, and the largest batch."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from wgrad.device.contract import Device
from wgrad.device.errors import DoesNotFit, WgradError
from wgrad.train.data.packing import ROW_STEP
from wgrad.train.model.model_config import ModelConfig
from wgrad.train.model.weights import layer_flops
from wgrad.train.options.choices import AUTO
from wgrad.train.options.finetune_config import RunOptions
from wgrad.train.options.option_text import size
from wgrad.train.options.options import flag
from wgrad.train.plan.fastest import least_seconds
from wgrad.train.plan.fewer_layers import Forecast, Shorter
from wgrad.train.plan.keep_layers import cannot_fit, most_kept, without_norms
from wgrad.train.plan.keep_projections import hidden_projections, with_fewer_recomputed, with_gate_up
from wgrad.train.plan.keep_weights import most_dequantized, with_gated, with_weights
from wgrad.train.plan.longest import most_that_fits
from wgrad.train.plan.memory_limit import (
    as_option,
    beyond_limit,
    can_stream,
    fewest_offloaded,
    in_large_chunks,
    in_small_chunks,
)
from wgrad.train.plan.plan import Plan, run_dry
from wgrad.train.plan.rates import Rates, rates_of
from wgrad.train.plan.speed import step_seconds
from wgrad.train.plan.stay_on_device import begin_streamed, least_copied
from wgrad.train.step.activations import (
    RECOMPUTE_ABOVE,
    gate_up_bytes,
    keeps_attention,
    kept_gate_up,
    kept_projections,
    offloaded_layers,
)
from wgrad.train.step.resident import plannable
from wgrad.train.step.room import Room
from wgrad.train.step.search import largest

MOST_ROWS = 1024  # largest batch that is tried

Mode = dict[str, Any]  # options that say where a run keeps weights and activations; None: the default
MODE = ("gradient_checkpointing", "offload_activations", "stream_weights")
OF_RECOMPUTED: Mode = {"keep_attention": None, "keep_projections": None, "keep_gate_up": None}  # if none is recomputed
KINDS = (*OF_RECOMPUTED, "keep_norms", "mlp_chunk", "resident_layers", "keep_gated", "keep_dequantized")


def modes(config: RunOptions, device: Device) -> Iterator[Mode]:
    """Yield the modes that the options of a run allow, the fastest first, the one with the least memory last. They name
    all layers if --gradient-checkpointing and --offload-activations leave the number open."""
    offloaded, streamed = config.offload_activations, config.stream_weights == "on"
    given = config.gradient_checkpointing
    if (config.checkpointing_open or given == 0) and not offloaded and not streamed:
        yield {"gradient_checkpointing": False, "offload_activations": False, "stream_weights": "off"}
    if given == 0:
        return
    recomputed = True if config.checkpointing_open else given
    if device.shared_memory:
        yield {"gradient_checkpointing": recomputed, "stream_weights": "on" if streamed else "off"}
        return
    if not offloaded and not streamed:
        yield {"gradient_checkpointing": recomputed, "offload_activations": False, "stream_weights": "off"}
    if not streamed:
        yield {"gradient_checkpointing": recomputed, "offload_activations": offloaded or True, "stream_weights": "off"}
    if recomputed is True and config.stream_weights != "off" and can_stream(config):
        yield {"gradient_checkpointing": True, "offload_activations": offloaded or True, "stream_weights": "on"}


def words(mode: Mode) -> str:
    """Return a mode as options of the command line."""
    recomputed, offloaded = mode["gradient_checkpointing"], mode.get("offload_activations")
    of_kinds = {kind: as_option(kind, mode[kind]) for kind in KINDS if mode.get(kind) is not None}
    resident = of_kinds.pop("resident_layers", "")
    if not recomputed:
        told = ("keep_norms", False), ("keep_gated", True), ("keep_dequantized", True)
        kinds = [of_kinds[kind] for kind, value in told if kind in of_kinds and bool(mode[kind]) is value]
        return " ".join(["--no-gradient-checkpointing", *kinds])
    said = [as_option("gradient_checkpointing", recomputed)] if recomputed is not True or not offloaded else []
    said += [as_option("offload_activations", offloaded)] if offloaded else []
    streamed = ["--stream-weights on", *[resident] * bool(resident)] if mode["stream_weights"] == "on" else []
    return " ".join([*said, *of_kinds.values(), *streamed])


@dataclass(frozen=True)
class Fit:
    """Plans of a run and of its variations."""

    config: RunOptions
    model_config: ModelConfig
    folder: str | os.PathLike[str]
    device: Device
    prompt_tokens: int
    limit: int  # bytes of the device that the run may take; a little of it stays free
    local_ranks: int = 1  # ranks on this host, which share its main memory
    peaks: dict[int, int] = field(default_factory=dict, compare=False)  # by the number of layers kept
    beyond: set[tuple[str, int]] = field(default_factory=set, compare=False, repr=False)  # runs with limits: no fit
    forecasts: dict[str, Forecast | None] = field(default_factory=dict, compare=False, repr=False)

    @property
    def forecast(self) -> Forecast | None:
        """Forecast of the model; None: its layers do not repeat often enough."""
        if "model" not in self.forecasts:
            shorter = Shorter.of(self.model_config, self.folder)
            made = None if shorter is None else Forecast(shorter, self.folder, self.device, self.prompt_tokens)
            self.forecasts["model"] = made
        return self.forecasts["model"]

    def plan(self, **changes: Any) -> Plan | None:
        """Plan the run with changed options; None: it does not fit."""
        return self._fitting_in_chunks(self.changed(**changes))

    def _fitting_in_chunks(self, config: RunOptions) -> Plan | None:
        """Plan a run below the limit, in chunks of the MLP if it does not fit without; None if it does not fit."""
        found = self.fitting(config)
        chunked = in_small_chunks(config, self.model_config) if found is None else None
        return found if chunked is None else self.fitting(chunked)

    def changed(self, **changes: Any) -> RunOptions:
        """Return the options of the run with these changes."""
        if changes.get("gradient_checkpointing") is False:
            changes = {**OF_RECOMPUTED, **changes}
        return replace(self.config, **changes)

    def of_batch(self, batch: int, mode: Mode) -> RunOptions:
        """Return the options of the run in a mode, with another batch size and as many examples in a step."""
        return self.changed(**mode).with_batch(batch)

    def fitting(self, config: RunOptions) -> Plan | None:
        """Plan a run below the limit; None if it does not fit."""
        key = repr(config), self.limit  # a number of layers may be 1, which equals True
        if key in self.beyond:
            return None
        try:
            return self._below_limit(config)
        except DoesNotFit:
            self.beyond.add(key)
            return None

    def _below_limit(self, config: RunOptions) -> Plan:
        return self._plan(config, plannable(self.limit))

    def _plan(self, config: RunOptions, limit: int | None) -> Plan:
        return run_dry(config, self.model_config, self.folder, self.device, self.prompt_tokens, limit)

    def unlimited(self, config: RunOptions) -> Plan | None:
        """Plan a run without a limit; None: it is beyond another limit of the device."""
        try:
            return self._plan(config, None)
        except DoesNotFit:
            return None

    @property
    def layers(self) -> int:
        return self.model_config.num_hidden_layers

    @property
    def copies_hide(self) -> bool:
        """Return whether copying a layer's input to main memory overlaps with its matmuls, so that it costs no time."""
        config, model = self.config, self.model_config
        tokens = config.rows * config.max_length
        return self.device.copied_alongside(layer_flops(model, tokens)) >= tokens * model.hidden_size * 4

    def choose(self, batches: list[int]) -> Plan:
        """Return the plan that `find` finds. WgradError: none fits."""
        if (found := self.find(batches)) is not None:
            return found
        mode = self.last_mode
        least = replace(self.config.with_batch(batches[0]), **mode)
        chosen = f"{flag('batch_size')} {least.batch_size} {words(mode)}"
        raise beyond_limit(least, self.device, self.layers, self._plan, chosen)

    def find(self, batches: list[int]) -> Plan | None:
        """Return a plan of the fastest mode in which one of the batch sizes (rising) fits; None: none fits.

        It has the largest batch that fits, with as few layers recomputed and offloaded as possible.
        """
        if self.config.gradient_checkpointing == AUTO and len(batches) > 1:
            return self._fastest(batches)
        for mode in self.modes:
            if cannot_fit(self, mode, batches[0]):
                continue
            plan = partial(self._plan_batch, batches, mode)
            found = begin_streamed(self, mode, batches) or plan(len(batches))
            if found is None and (count := largest(plan, len(batches) - 1, self.limit)):
                found = plan(count)
            if found is not None:
                chosen = with_fewer_recomputed(self, self._refined(found, mode))
                chosen = with_gate_up(self, in_large_chunks(chosen, chosen.config, self.fitting))
                room = plannable(self.limit) - chosen.peak_bytes
                return with_weights(self, chosen, room) if self.weights_open else chosen
        return None

    def _fastest(self, batches: list[int]) -> Plan | None:
        """Return the plan of the batch size with the fastest predicted step (the largest of equals), keeping as much
        as fits; None: none fits."""
        best, least, config = None, math.inf, self.config
        rates = rates_of(self.device, config.compute) or Rates()
        cut = {n: config.with_batch(n) for n in batches}
        bounds = least_seconds(self, cut, rates)
        for batch in sorted(batches, key=lambda n: (bounds[n], -n)):
            chosen = best.config.batch_size if best is not None else 0
            if bounds[batch] > least or (bounds[batch] == least and batch < chosen):
                continue
            found = replace(self, config=cut[batch], peaks={}).find([batch])
            seconds = math.inf if found is None else self.seconds(found, rates)
            if found is not None and (seconds < least or (seconds == least and batch > chosen)):
                best, least = found, seconds
        return best

    def seconds(self, plan: Plan, rates: Rates) -> float:
        """Predict the seconds of a step of a plan."""
        return self.step_seconds(plan.config, rates)

    def step_seconds(self, config: RunOptions, rates: Rates) -> float:
        """Predict the seconds of a step of a run whose choices are settled."""
        return step_seconds(config, self.model_config, self.device, rates)

    def curve(self, chosen: Plan) -> list[Plan]:
        """Return a few plans of the run, from the least memory to the most, whatever the limit is.

        Plans within the limit are made under it, because it changes where arrays lie in memory. chosen: plan of the
        run, which replaces an equal one.
        """
        config, layers = self.config, self.layers
        points = [replace(config, **self.last_mode), *[chosen.config] * bool(chosen.config.resident_layers)]
        if points[0].gradient_checkpointing:
            points.append(base := replace(config, **next(m for m in self.modes if m["gradient_checkpointing"])))
            if config.gradient_checkpointing == AUTO and not self.modes[0]["gradient_checkpointing"]:
                thin = without_norms(base)
                shares = sorted({max(layers * n // 4, 1) for n in range(1, 5)})
                points += [*(self.keeping(thin, kept) for kept in shares), replace(config, **self.modes[0])]
                if self.weights_open and any(chosen.dequantized.sizes):
                    points.append(replace(points[-1], keep_dequantized=True))
                    points += [replace(points[-1], keep_gated=True)] * bool(chosen.config.keep_gated)
        found = (chosen if point == chosen.config else self._as_run(point) for point in dict.fromkeys(points))
        return [plan for plan in found if plan is not None]

    def _as_run(self, config: RunOptions) -> Plan | None:
        """Plan under the limit that the options set; without a limit if there is none, or it is too low."""
        return (self.fitting(config) if config.limit is not None else None) or self.unlimited(config)

    def freely(self) -> Plan | None:
        """Return a plan of the fastest mode, if it stays within the limit without enforcing it; else None."""
        return with_gated(self, self._with_weights(), self._below)

    def _with_weights(self) -> Plan | None:
        """Return the plan of `freely`, with as many weights dequantized as fit."""
        config = replace(self.config, **self.modes[0])
        if not self.weights_open:
            return self._below(config)
        whole = self.unlimited(replace(config, keep_dequantized=True))
        if whole is None:
            return self._below(config)
        if not whole.dequantized.nbytes:  # matmuls decode weights themselves
            return self._if_below(replace(whole, config=config))
        if self._if_below(whole) or not (found := self._below(config)):
            return self._if_below(whole)
        return most_dequantized(found, self.limit - found.reserved_bytes, self._below)

    def _below(self, config: RunOptions) -> Plan | None:
        """Plan without enforcing the limit; None: it exceeds the limit."""
        return self._if_below(self.unlimited(config))

    def _if_below(self, plan: Plan | None) -> Plan | None:
        return plan if plan is not None and plan.reserved_bytes <= self.limit else None

    @property
    def weights_open(self) -> bool:
        """Return whether wgrad chooses which weights are kept dequantized."""
        config = self.config
        automatic = config.keep_dequantized is None and config.gradient_checkpointing == AUTO
        return automatic and not config.full and not self.device.shared_memory

    def resumed(self, before: Mode) -> Plan | None:
        """Plan the run in the mode that it had before; None: it does not fit, or contradicts the options."""
        given = {name: getattr(self.config, name) for name in (*MODE, *KINDS)}
        open_values = {name: {None} if name == "keep_dequantized" else {AUTO, False, None} for name in given}
        if any(value not in open_values[name] and before.get(name, value) != value for name, value in given.items()):
            return None
        try:
            return self.plan(**before)
        except (WgradError, TypeError):  # a damaged file
            return None

    @property
    def modes(self) -> list[Mode]:
        """`modes`, without those that are no faster than one with less memory."""
        found, config = list(modes(self.config, self.device)), self.config
        if config.gradient_checkpointing != AUTO or config.offload_activations or not self.copies_hide:
            return found
        found = [m for m in found if not m["gradient_checkpointing"] or m.get("offload_activations")]
        # Attention outputs are offloaded at no cost either.
        keeping = {"keep_attention": True} if config.keep_attention is None else {}
        kept = hidden_projections(self)
        ways = [keeping | {"keep_projections": kept}] * bool(kept) + [keeping]
        plain = [not m["gradient_checkpointing"] or m["stream_weights"] == "on" for m in found]
        return [m | way for m, alone in zip(found, plain) for way in ([{}] if alone else ways)]

    @property
    def last_mode(self) -> Mode:
        """Mode with the least memory."""
        return self.modes[-1]

    def described(self, plan: Plan | None, room: Room, recomputed: int) -> str:
        """Return a line for people about kept and recomputed activations. recomputed: layers, the same on all ranks."""
        kept, layers = self.layers - recomputed, self.layers
        whose = f"all {layers} layers" if kept == layers else f"{kept} of {layers} layers" if kept else "no layer"
        norms = self.config.keep_norms if plan is None else plan.config.keep_norms
        said = f"activations: those of {whose} are kept" + " but for norm outputs" * (norms is False and kept > 0)
        if plan is not None and plan.config.stream_weights == "on":
            said = f"weights: those of {plan.config.resident_layers or 0} of {layers} layers stay on the device; {said}"
        if recomputed:
            config = self.config if plan is None else plan.config
            offloaded = min(offloaded_layers(config, self.model_config), recomputed)
            what = "inputs and attention outputs" if keeps_attention(config, self.model_config) else "inputs"
            if kept_projections(config, self.model_config):
                what = "inputs, attention outputs and projections"
            said += f", {recomputed} recomputed" + f" ({what} of {offloaded} offloaded)" * (offloaded > 0)
        if plan is None:
            planned, change = self.device.dry_run() is not None, "--gradient-checkpointing N changes that"
            if planned and room.limit is not None:
                return f"{said}: {room.words}, and they do not fit ({change})"
            words = room.words if room.limit is None else f"{room.words} is not planned for on this device"
            options = f"--vram SIZE or {change}" if planned else change
            return f"{said}: {words}, and they may take up to {size(RECOMPUTE_ABOVE)} ({options})"
        taken, weights = size(plan.reserved_bytes), plan.dequantized
        if weights.nbytes:
            whole = weights.count == len(weights.sizes)
            number = f"all {weights.count}" if whole else f"{weights.count} of {len(weights.sizes)}"
            said += f"; weights: {number} are kept dequantized ({size(weights.nbytes)})"
        if weights.nbytes and not recomputed:
            less = "gate times up is recomputed" if plan.config.keep_gated else "fewer weights are"
            other = f"with less, {less}" if weights.count == len(weights.sizes) else "more memory keeps more"
        elif not recomputed:
            other = f"with less than {taken}, layers are recomputed"
        elif len(self.peaks) > 1:
            (few, lowest), (many, highest) = min(self.peaks.items()), max(self.peaks.items())
            other = f"{size((highest - lowest) // (many - few))} more keep another layer"
            if 0 < kept_gate_up(plan.config, self.model_config) < recomputed:
                other = f"{size(int(gate_up_bytes(plan.config, self.model_config)))} more keep another gate and up"
        elif plan.config.stream_weights == "on":
            other = "with more memory, more weights stay"
        else:
            other = "more memory keeps some"
        return f"{said}: the run takes {taken} of {size(self.limit)} ({room.words}); {other}"

    def _refined(self, found: Plan, mode: Mode) -> Plan:
        """Return a plan with as few layers recomputed, then as few offloaded as fit. found: a plan of the mode."""
        left_open = bool(mode.get("offload_activations")) and not self.config.offload_activations
        streamed = mode["stream_weights"] == "on"
        if streamed and not self.device.shared_memory:
            return least_copied(self, found, left_open)
        if self.config.gradient_checkpointing == AUTO and mode["gradient_checkpointing"]:
            plan = most_kept(self, found) if not left_open or self.copies_hide else found
            if plan is not found:
                return plan
        return fewest_offloaded(found, self.layers, self.fitting) if left_open else found

    def keeping(self, config: RunOptions, kept: int) -> RunOptions:
        """Return options that keep the activations of the last `kept` layers, and offload as many inputs as before, but
        at most those of the other layers."""
        recomputed, offloaded = self.layers - kept, config.offload_activations
        if not recomputed:
            return replace(config, gradient_checkpointing=False, offload_activations=False, **OF_RECOMPUTED)
        offloaded = recomputed if offloaded is True else min(offloaded, recomputed)
        return replace(config, gradient_checkpointing=recomputed, offload_activations=offloaded)

    def _plan_batch(self, batches: list[int], mode: Mode, number: int) -> Plan | None:
        return self._fitting_in_chunks(self.of_batch(batches[number - 1], mode))

    def longest_rows(self, mode: Mode, before: int = 0) -> int:
        """Return the tokens of the longest sequence that fits, up to the model's positions; 0: none fits.

        before: the same of a mode with more memory, if it is known.
        """
        most = self.model_config.positions

        def rows(steps: int) -> Mode:
            return {"batch_size": 1, "max_length": min(ROW_STEP * steps, most), **mode}

        return min(ROW_STEP * self._foreseen(rows, -(-most // ROW_STEP), -(-before // ROW_STEP)), most)

    def largest_batch(self, mode: Mode, before: int = 0) -> int:
        """Return the largest batch that fits, up to MOST_ROWS; 0: none fits. before: as for `longest_rows`."""
        return self._foreseen(lambda rows: {"batch_size": rows, **mode}, MOST_ROWS, before)

    def _foreseen(self, options: Callable[[int], Mode], most: int, before: int) -> int:
        return most_that_fits(self, options, most, before)
