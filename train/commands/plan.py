"""`wgrad plan`: the memory of a run by parts, and the longest sequences and largest batches that fit."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from wgrad.autograd.select_device import gpu_elsewhere, select_device
from wgrad.device.contract import Device
from wgrad.device.errors import WgradError
from wgrad.train.model.load_config import load_model_config
from wgrad.train.model.model_config import ModelConfig
from wgrad.train.model.model_files import open_files, opened_once
from wgrad.train.options.finetune_config import RunOptions
from wgrad.train.options.option_text import size
from wgrad.train.plan.fit import MOST_ROWS, Fit, modes, words
from wgrad.train.plan.lengths import PROMPT_TOKENS, beyond_positions, within_positions
from wgrad.train.plan.plan import Plan, training_needs
from wgrad.train.plan.rates import Rates, not_cached, rates_of
from wgrad.train.plan.settle import line, mode_of, plan_as_run
from wgrad.train.step.activations import recomputed_layers
from wgrad.train.step.compute import choose_compute, round_products
from wgrad.train.step.find_model import find_model
from wgrad.train.step.room import room_of
from wgrad.train.terminal.output import harmless, make_console
from wgrad.train.terminal.progress import Display


def run_plan(config: RunOptions, as_json: bool) -> int:
    """Print the table, or one JSON object, to standard output, and everything else to standard error.

    No weights are read.

    Returns:
        The exit status.

    Raises:
        WgradError: Model or device is missing, or the run does not fit its limit.
    """
    if not config.model:
        raise WgradError("--model is required: give the model that the run is of")
    display = Display(make_console("stderr"))
    device = select_device(config.device, training_needs(config))
    if device.dry_run() is None and config.device != "auto":
        raise WgradError(
            "--device: NumPy computes in main memory, which is not planned: leave --device out, and give --vram to "
            "plan for a GPU that is elsewhere"
        )
    run_device = device.description
    if device.dry_run() is None:  # a run takes NumPy, which has no kernels to plan
        device = gpu_elsewhere(device.reason)
    display.say(f"device: {device.description} ({device.reason})")
    compute = choose_compute(config.compute, device)
    for text in [*compute.lines, *round_products(config, device)]:
        display.say(text)
    config = replace(config, compute=compute.dtype)
    if config.data:
        display.say(
            "note: no data is read: sequences count as --max-length, which a run shortens to what all its data fits in"
        )
    with TemporaryDirectory(prefix="wgrad-plan-") as scratch:
        return _plan(config, find_model(config.model, scratch=Path(scratch)), device, run_device, display, as_json)


@opened_once()
def _plan(config: RunOptions, folder: Path, device: Device, run_device: str, display: Display, as_json: bool) -> int:
    """Plan for `device`, and print. run_device: description of the device that a run takes here."""
    _, model_config, _ = open_files(folder, load_model_config(folder))
    config, shortened = within_positions(config, model_config)
    if note := shortened or beyond_positions(config.max_length, model_config):
        display.say(note)
    limit = room_of(config, device).limit
    show = _keep_quiet if as_json else _show
    most = "" if limit is None else ", then the most that fits"
    display.say(f"planning: first the run, then speed against memory{most}; no weights are read")
    with display.phase("planning the run"):
        plan = plan_as_run(config, model_config, folder, device, PROMPT_TOKENS)
    assert plan is not None
    found = {"device": device.description, "run_device": run_device, **described(plan, model_config)}
    found |= {"limit_bytes": limit, "fits": [], "lacks": sorted(device.lacks)}
    found["tokens_per_step"] = plan.config.tokens_per_step
    show(memory_table(found, plan, model_config))
    with display.phase("planning speed against memory"):
        fit = Fit(config.with_batch(plan.config.batch_size), model_config, folder, device, PROMPT_TOKENS, limit or 0)
        rates = rates_of(device, config.compute)
        found["tokens_per_second"] = round(found["tokens_per_step"] / fit.seconds(plan, rates)) if rates else None
        found["curve"] = curve(fit, plan)
    show(curve_table(found["curve"]))
    if limit is None:
        show("this device does not say how much memory it has: --vram SIZE tells what fits in so much")
    else:
        show(fits_heading(limit, config.max_length))
        least = replace(plan.config, keep_dequantized=config.keep_dequantized)
        fit = replace(fit, config=least, peaks={})
        before: tuple[int, int] = 0, 0  # modes come with falling memory
        for mode in modes(config, device):
            with display.phase(f"planning the most with {words(mode)}"):
                before = fit.longest_rows(mode, before[0]), fit.largest_batch(mode, before[1])
            found["fits"].append({**mode, **dict(zip(("longest_seq_len", "largest_batch_size"), before))})
            show(fits_line(found["fits"][-1], model_config))
    for remark in not_cached():
        display.say(f"note: {remark}")
    if as_json:
        print(json.dumps(found))
    return 0


def _show(text: str) -> None:
    print(harmless(text), flush=True)  # what comes next takes seconds


def _keep_quiet(text: str) -> None:
    pass


def curve(fit: Fit, chosen: Plan) -> list[dict[str, Any]]:
    """Return points of speed against memory, the least memory first.

    Each has the options that choose it, `peak_bytes`, `tokens_per_second` (None: the device's speed is not known) and
    `relative_speed`, compared with the fastest. chosen: plan of the run, which is one of the points.
    """
    plans, rates = fit.curve(chosen), rates_of(fit.device, fit.config.compute)
    seconds = [fit.seconds(plan, rates or Rates()) for plan in plans]
    tokens = fit.config.tokens_per_step
    return [
        {
            **mode_of(plan.config),
            "peak_bytes": plan.peak_bytes,
            "tokens_per_second": round(tokens / taken) if rates else None,
            "relative_speed": round(min(seconds) / taken, 3),
        }
        for plan, taken in zip(plans, seconds)
    ]


def described(plan: Plan, model_config: ModelConfig) -> dict[str, Any]:
    """Return the options that determine memory, and the bytes of each part."""
    config = plan.config
    names = (
        "compute",
        "batch_size",
        "gradient_accumulation_steps",
        "max_length",
        "offload_activations",
        "stream_weights",
        "resident_layers",
    )
    trained, dequantized = plan.optimizer_bytes // 2, plan.dequantized.nbytes
    parts = {
        "weights": plan.held_bytes - plan.optimizer_bytes - (trained if config.full else 2 * trained) - dequantized,
        "dequantized": dequantized,
        "adapter": 0 if config.full else trained,
        "gradients": trained,
        "optimizer": plan.optimizer_bytes,
        "activations": plan.activation_bytes,
    }
    options = {name: getattr(config, name) for name in names}
    recomputed, layers = recomputed_layers(config, model_config), model_config.num_hidden_layers
    options["gradient_checkpointing"] = bool(recomputed) if recomputed in (0, layers) else recomputed
    options["keep_dequantized"] = plan.dequantized.count if dequantized else False
    of_host = {"main_memory_bytes": plan.host_bytes, "decoding_copy_bytes": plan.token_bytes}
    return {"options": options, "bytes": parts, "peak_bytes": plan.peak_bytes, **of_host}


_PARTS = {
    "weights": "weights",
    "dequantized": "dequantized weights",
    "adapter": "adapter",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "activations": "activations and scratch",
}


def memory_table(found: dict[str, Any], plan: Plan, model_config: ModelConfig) -> str:
    """Return the batch that was chosen and the memory of the run, for people. found: the JSON object."""
    config, limit = plan.config, found["limit_bytes"]
    mode = mode_of(config) | {"gradient_checkpointing": found["options"]["gradient_checkpointing"]}
    lines = [line(config, mode, limit)] if config.chooses_batch and limit is not None else []
    return "\n".join([*lines, *_memory_lines(found, plan, model_config.num_hidden_layers)])


def curve_table(points: list[dict[str, Any]]) -> str:
    """Return speed against memory, for people."""
    lines = [f"{'speed against memory, by prediction':<78}{'at most':>12}{'speed':>16}"]
    for point in points:
        speed = point["tokens_per_second"]
        said = f"{100 * point['relative_speed']:.0f} %" if speed is None else f"{speed:,} tokens/s"
        lines.append(f"  {words(point):<76}{size(point['peak_bytes']):>12}{said:>16}")
    return "\n".join(lines)


def fits_heading(limit: int, max_length: int) -> str:
    """Return the heading of the lines of `fits_line`."""
    return f"{'within ' + size(limit):<44}{'--max-length, one sequence':>28}{f'--batch-size, of {max_length}':>24}"


def fits_line(entry: dict[str, Any], model_config: ModelConfig) -> str:
    """Return what is the most that fits with some options, for people. entry: of the JSON object."""
    longest, largest = entry["longest_seq_len"], entry["largest_batch_size"]
    all_there_are = " (all positions)" if longest == model_config.positions else ""
    cells = (f"{longest or 'none'}{all_there_are}", f"{largest or 'none'}{' or more' * (largest == MOST_ROWS)}")
    return f"  {words(entry):<42}{cells[0]:>28}{cells[1]:>24}"


def _memory_lines(found: dict[str, Any], plan: Plan, layers: int) -> list[str]:
    """Return the lines about the memory of the run, by parts."""
    config, recomputed = plan.config, found["options"]["gradient_checkpointing"]
    how = f"of {recomputed} of {layers} layers"
    if isinstance(recomputed, bool):
        how = "on" if recomputed else "off"
    if config.resident_layers:
        how += f", weights of {config.resident_layers} of {layers} layers on the device"
    rows = f"{config.rows} x {config.max_length} tokens"
    lines = [f"memory of a run, a micro-batch of {rows}, {config.compute}, checkpointing {how}:"]
    lines += [f"  {text:<24}{size(found['bytes'][name]):>12}" for name, text in _PARTS.items() if found["bytes"][name]]
    running = sum(found["bytes"].values())
    if plan.peak_bytes > running:
        lines.append(f"  {'more, while loading':<24}{size(plan.peak_bytes - running):>12}")
    lines.append(f"  {'at most':<24}{size(plan.peak_bytes):>12}")
    if plan.host_bytes:
        lines.append(f"  {'and of main memory':<24}{size(plan.host_bytes):>12}")
    if plan.token_bytes:
        lines.append(f"  {'read for a new token':<24}{size(plan.token_bytes):>12}, from main memory, in decoding")
    if found["lacks"]:
        lines.append(f"this device lacks operators that the run does not need: {', '.join(found['lacks'])}")
    return [*lines, "not counted: compiled shaders, and what the driver keeps for itself"]
