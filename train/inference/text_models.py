"""Models that write text: one base on the device, alone and with adapters over it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from typing import Any

import numpy as np

from wgrad.device.contract import Device
from wgrad.train.inference.compile_ahead import Placing, compile_ahead
from wgrad.train.inference.open_model import Opened
from wgrad.train.model.adapter_config import adapter_note
from wgrad.train.model.adapter_files import load_adapter
from wgrad.train.model.adapter_mix import Loaded, first_that_mix, mix
from wgrad.train.model.dora import with_inverses
from wgrad.train.model.lora import Adapter, LoraConfig, adaptable
from wgrad.train.model.model import Mixed, Model
from wgrad.train.options.chat_config import ChatConfig
from wgrad.train.options.generate_config import GenerateConfig
from wgrad.train.options.model_options import LoadOptions
from wgrad.train.options.serve_config import ServeConfig
from wgrad.train.step.build import build_frozen, frozen_adapter


def build_text_models(
    opened: Opened[GenerateConfig] | Opened[ChatConfig] | Opened[LoadOptions] | Opened[ServeConfig],
    adapters: Mapping[str, str | None],
    positions: int,
    run: Callable[[Model], object],
    rows: int = 1,
) -> dict[str, Model]:
    """Compile the shaders and load the models onto the device, with a progress bar for each; return the models by name.

    Args:
        adapters: folders of adapters by name, None for the base alone.
        run: makes a model launch every kernel, and take as much memory, as will be needed.
        rows: sequences that are usually decoded at once.

    Raises:
        WgradError: an adapter or the model cannot be used.
    """
    args, device, display = opened.args, opened.device, opened.display
    known = adaptable(opened.config)
    loaded = {name: load_adapter(folder, *known) if folder else None for name, folder in adapters.items()}

    def build(device: Device, placing: Placing, **options: Any) -> dict[str, Model]:
        precision: dict[str, Any] = {"quantize": args.quantize, "compute": args.compute}
        base = build_frozen(
            opened.config,
            opened.folder,
            device,
            positions=positions,
            stream_weights=placing.stream,
            resident=placing.resident,
            slots=placing.slots,
            **precision,
            **options,
        )
        return mixing_models(base, loaded)

    def run_dry(dry: Device, placing: Placing) -> None:
        for model in build(dry, placing, contents=False).values():
            run(model)

    placing = compile_ahead(device, args.stream_weights, args.memory_limit, opened.config, run_dry, display, rows)
    remarks = list[str]()
    with display.phase(f"loading {'and quantizing ' if args.quantize else ''}weights", unit="tensors") as phase:
        models = build(device, placing, progress=phase.update, remarks=remarks)
    notes = (adapter_note(found[0]) for found in loaded.values() if found)
    for note in filter(None, (*remarks, *notes)):
        display.say(f"note: {note}")
    return models


def mixing_models(base: Model, adapters: Mapping[str, Loaded | None]) -> dict[str, Model]:
    """Return the models by name, each with its adapter or none; those that can mix may be in one batch."""
    models = {name: _adapted(base, *found) if found else base for name, found in adapters.items()}
    mixed = first_that_mix({name: found for name, found in adapters.items() if found})
    if len(models) > 1 and mixed:
        of_all = _with(base, mix([found for name in mixed if (found := adapters[name])], base.device))
        base.mixed = Mixed(of_all, -1)
        for number, name in enumerate(mixed):
            models[name].mixed = Mixed(of_all, number)
    return models


def _adapted(base: Model, lora: LoraConfig, values: Mapping[str, np.ndarray]) -> Model:
    """Return a model of the same weights with an adapter."""
    return _with(base, with_inverses(frozen_adapter(lora, values, base.device), base.weights, base.device))


def _with(base: Model, adapter: Adapter) -> Model:
    """Return a model of the same weights and rotary tables with an adapter."""
    made = copy(base)
    made.adapter, made.mixed = adapter, None
    return made
