"""`wgrad eval`: mean loss and perplexity on a file, of a base model, and also with an adapter.

The model is built and measured as in a run: a run with the same options reports these numbers as its held-out loss
before (base model) and after training (with its adapter).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np

from wgrad.device.contract import Device
from wgrad.device.errors import UnusableResult
from wgrad.device.shown import counted
from wgrad.train.data.data import load_data
from wgrad.train.data.packing import Batch, eval_batches
from wgrad.train.inference.compile_ahead import Placing, compile_ahead
from wgrad.train.inference.open_model import Opened, open_model
from wgrad.train.model.adapter_config import adapter_note
from wgrad.train.options.choices import Stream
from wgrad.train.options.finetune_config import RunOptions
from wgrad.train.plan.lengths import beyond_positions, within_positions
from wgrad.train.plan.plan import training_needs
from wgrad.train.run.evaluation import eval_subset
from wgrad.train.run.session import refuse_quantized_anew, row_length
from wgrad.train.step.build import TrainableModel, build_optimizer, build_trainable
from wgrad.train.step.trainer import Trainer
from wgrad.train.terminal.output import harmless, say


def run_eval(config: RunOptions, as_json: bool) -> int:
    """Print the table, or one JSON object, to standard output, and everything else to standard error.

    Returns:
        The exit status.

    Raises:
        WgradError: Model, options or data cannot be used.
        UnusableResult: After the table, a loss is not finite.
    """
    opened = open_model(config, needs=training_needs(config))
    (config, shortened), display = within_positions(opened.args, opened.config), opened.display
    refuse_quantized_anew(config, opened.files, opened.config)
    with display.phase("reading and tokenizing", unit="%") as phase:
        data = load_data(config, opened.tokenizer, phase.update, evaluates=True)
    documents = eval_subset(data.train, config)
    for note in filter(None, (opened.head_note and f"note: {opened.head_note}", *data.remarks, shortened)):
        say(note, "stderr")
    config = replace(config, max_length=row_length(config, data))
    if note := beyond_positions(config.max_length, opened.config):
        say(note, "stderr")
    batches = eval_batches(documents, config, opened.tokenizer.pad_id or 0)
    losses = _measure(replace(opened, args=config), batches)
    result = {
        "data": " ".join(config.data),
        "examples": len(documents),
        "truncated": data.truncated,
        "tokens": sum(batch.num_targets for batch in batches),
        **{name: _entry(loss) for name, loss in losses.items()},
    }
    print(json.dumps(result) if as_json else harmless(_table(result)))
    if not all(map(math.isfinite, losses.values())):
        raise not_finite("loss")
    return 0


def _measure(opened: Opened[RunOptions], batches: Sequence[Batch]) -> dict[str, float]:
    """Return the mean nats per token of "base", and of "adapter" if there is one."""
    config, display = opened.args, opened.display

    def trainer_of(built: TrainableModel) -> Trainer:
        return Trainer(built.model, build_optimizer(config, built.parameters), config)

    built = build_measured(opened, lambda built: trainer_of(built).evaluate(batches[:1]))
    trainer = trainer_of(built)

    def loss(name: str) -> float:
        with display.phase(f"loss of the {name}", len(batches), "batches") as phase:
            return trainer.evaluate(batches, phase.update)

    losses = {"adapter": loss("adapter")} if config.adapter else {}
    for name, tensor in built.parameters.tensors.items():  # with B = 0, an adapter adds nothing
        if name.endswith(".lora_B"):
            built.parameters.set(name, np.zeros(tensor.shape, np.float32))
    if built.model.adapter:  # except magnitudes (DoRA) and whole weights
        built.model.adapter = None if built.model.adapter.config.dora else replace(built.model.adapter, whole={})
    return {"base": loss("base"), **losses}


def build_measured(opened: Opened[RunOptions], run: Callable[[TrainableModel], object]) -> TrainableModel:
    """Build the model as a run would have it, after compiling its shaders.

    Args:
        opened: Model files, options and device.
        run: Launches every kernel that will be needed, on a dry run of the device.

    Raises:
        WgradError: Options and model do not fit together.
    """
    config, device, display = opened.args, opened.device, opened.display

    def build(device: Device, placing: Placing, **options: Any) -> TrainableModel:
        resident = placing.resident or None
        settled = replace(config, stream_weights=cast(Stream, placing.stream), resident_layers=resident)
        return build_trainable(settled, opened.config, opened.folder, device, positions=config.max_length, **options)

    def run_dry(dry: Device, placing: Placing) -> None:
        run(build(dry, placing, contents=False))

    placing = compile_ahead(device, config.stream_weights, config.memory_limit, opened.config, run_dry, display)
    remarks = list[str]()
    with display.phase(f"loading {'and quantizing ' if config.quantize else ''}weights", unit="tensors") as phase:
        built = build(device, placing, progress=phase.update, remarks=remarks)
    for note in filter(None, (*remarks, adapter_note(built.lora))):
        say(f"note: {note}", "stderr")
    return built


def not_finite(what: str) -> UnusableResult:
    """Return the error for a measurement that is not finite."""
    return UnusableResult(
        f"the {what} is not finite: the weights are damaged, or --compute is too narrow: try --compute float32"
    )


def _entry(loss: float) -> dict[str, float | None]:
    """Return the mean nats per target token, and the perplexity, which is e to that; None if they are not finite."""
    finite = math.isfinite(loss)
    return {"nats": loss if finite else None, "perplexity": math.exp(min(loss, 700)) if finite else None}


def _table(result: dict[str, Any]) -> str:
    cut = f", {result['truncated']} truncated to --max-length" if result["truncated"] else ""
    lines = [f"{result['data']}: {counted(result['examples'], 'example')}{cut}, {result['tokens']} tokens that count"]
    lines.append(f"{'':8} {'nats a token':>14} {'perplexity':>14}")
    for name in ("base", "adapter"):
        if entry := result.get(name):
            numbers = (f"{entry[k]:.4f}" if entry[k] is not None else "not finite" for k in ("nats", "perplexity"))
            lines.append(f"{name:8} " + " ".join(f"{number:>14}" for number in numbers))
    return "\n".join(lines)
