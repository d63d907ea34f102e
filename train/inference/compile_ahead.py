"""Before weights are read for inference: compiling shaders, checking operators, and deciding by dry runs whether
weights are streamed, and how many layers' or experts stay on the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from wgrad.device.contract import Device
from wgrad.device.errors import DoesNotFit, OutOfMemory
from wgrad.train.model.expert_slots import SPARE_SLOTS, CannotKeep
from wgrad.train.model.model_config import ModelConfig
from wgrad.train.step.checked import check_operators
from wgrad.train.step.memory import limit_bytes
from wgrad.train.step.resident import head_bytes, keeps_head, layer_bytes, plannable
from wgrad.train.step.room import free_room
from wgrad.train.step.search import planned_beside
from wgrad.train.terminal.progress import Display


class Placing(NamedTuple):
    """The place of weights. stream: "on" or "off", as in --stream-weights. resident: layers that stay on the device.
    slots: experts of each layer that stay, those used last; then all other weights stay, too."""

    stream: str
    resident: int = 0
    slots: int = 0


def compile_ahead(
    device: Device,
    stream_weights: str,
    memory_limit: str | None,
    model: ModelConfig,
    run: Callable[[Any, Placing], object],
    display: Display,
    rows: int = 0,
) -> Placing:
    """Compile and check all kernels, and return the place of weights; with --stream-weights auto "on" if they do not
    fit otherwise.

    run: launches every kernel that will be needed, on a dry device with the weights placed so. rows: sequences that are
    decoded at once; 0: none.

    Raises:
        OutOfMemory: streamed weights do not fit either.
    """
    auto, limit = stream_weights == "auto", limit_bytes(memory_limit)
    placing = Placing("off" if auto else stream_weights)
    room = limit or (device.facts.get("memory_bytes") if auto else None)

    def run_dry(placing: Placing, room: int | None) -> Any:
        dry = device.dry_run()
        if dry is not None:
            dry.limit_memory(room)
            run(dry, placing)
        return dry

    while True:
        with display.phase("compiling", unit="shaders") as phase:
            try:
                dry = run_dry(placing, room)
            except OutOfMemory:
                if (auto or placing.resident) and not device.shared_memory:
                    placing = Placing("on")
                dry = run_dry(placing, limit)
            if dry is not None and placing == Placing("on") and not device.shared_memory:
                most = limit or (free_room(device).limit if auto else None)
                if limit is None and most is not None and dry.memory().peak_reserved_bytes > plannable(most):
                    most = None  # not even streamed weights fit into what is free: as in training, the driver decides
                if most is not None:
                    search = _with_slots(placing, model, most, run_dry, rows) if model.experts and rows else None
                    placing, dry = search or _with_most_resident(placing, dry, model, most, run_dry)
                device.limit_memory(most)
            if dry is not None:
                device.prepare(dry, phase.update)
        if not check_operators(device, dry, display):
            if placing.slots and model.experts:
                kept = f"{placing.slots} of {model.experts.count} experts of each layer, and all else"
                display.say(f"weights: {kept}, stay on the device")
            elif placing.resident:
                layers = model.num_hidden_layers
                head = " and the head" * keeps_head(placing.resident, model)
                display.say(f"weights: those of {placing.resident} of {layers} layers{head} stay on the device")
            return placing


RunDry = Callable[[Placing, int | None], Any]


def _with_most_resident(
    placing: Placing, dry: Any, model: ModelConfig, limit: int, run_dry: RunDry
) -> tuple[Placing, Any]:
    """Return the dry run in which the weights of as many layers stay on the device as the limit allows.

    placing, dry: those with all layers streamed.
    """
    free, each = limit - dry.memory().peak_reserved_bytes, layer_bytes(dry.host_memory().peak_bytes, model)
    free -= head_bytes(1, model)

    def planned(resident: int) -> tuple[Placing, Any] | None:
        return _fitting(placing._replace(resident=resident), limit, run_dry)

    return planned_beside((placing, dry), int(free / each), planned, model.num_hidden_layers)


def _with_slots(
    placing: Placing, model: ModelConfig, limit: int, run_dry: RunDry, rows: int
) -> tuple[Placing, Any] | None:
    """Return the dry run in which as many experts of each layer stay on the device as the limit allows, and all other
    weights; None if the least number does not fit, or experts cannot be kept one by one.

    rows: as in `compile_ahead`.
    """
    assert model.experts is not None
    least, count = SPARE_SLOTS * rows * model.experts.chosen, model.experts.count
    found = _fitting(placing._replace(slots=least), limit, run_dry) if least < count else None
    if found is None:
        return None
    _, dry = found
    each = max(dry.host_memory().peak_bytes - 2 * model.vocab_size * model.table_width, 1) / count

    def planned(more: int) -> tuple[Placing, Any] | None:
        return _fitting(placing._replace(slots=least + more), limit, run_dry)

    guess = int((limit - dry.memory().peak_reserved_bytes) / each)
    return planned_beside(found, guess, planned, count - 1 - least)


def _fitting(placing: Placing, limit: int, run_dry: RunDry) -> tuple[Placing, Any] | None:
    try:
        return placing, run_dry(placing, plannable(limit))
    except (DoesNotFit, CannotKeep):
        return None
