"""The importance matrix of `--imatrix`: mean squares of each projection's inputs, measured on data on the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from wgrad.autograd.tensor import Tensor, no_grad
from wgrad.device.contract import Array
from wgrad.device.errors import UnusableResult, WgradError
from wgrad.train.commands.evaluate import build_measured
from wgrad.train.data.data import load_data
from wgrad.train.data.packing import Document, make_batch, pack_documents
from wgrad.train.files.imatrix_file import Imatrix, load_imatrix
from wgrad.train.inference.open_model import open_model
from wgrad.train.model.gguf_experts import parts_in_gguf, tensor_names
from wgrad.train.model.gguf_latent import BY_HEAD_PARTS
from wgrad.train.model.gguf_linear import order_of
from wgrad.train.model.lora import linear_modules
from wgrad.train.model.model import Model
from wgrad.train.model.model_config import ModelConfig
from wgrad.train.model.model_inputs import Inputs
from wgrad.train.model.stacks import GATE_UP, QKV, parts_of
from wgrad.train.options.config_yaml import read_config_file
from wgrad.train.options.finetune_config import CONFIG_FILE, RunOptions
from wgrad.train.options.merge_config import OF_THE_RUN, MergeConfig
from wgrad.train.plan.lengths import within_positions
from wgrad.train.plan.plan import training_needs
from wgrad.train.run.evaluation import eval_subset
from wgrad.train.run.session import row_length
from wgrad.train.step.objectives import write_batch

TOKENS = 1 << 17  # most tokens of the data to measure on
AT_ONCE = 2048  # tokens of a batch


def find_imatrix(args: MergeConfig) -> Imatrix | None:
    """Read the importance matrix that --imatrix names, or measure it on data. None: the option is not given."""
    if args.imatrix is None:
        return None
    if args.imatrix.endswith(".gguf"):
        return load_imatrix(Path(args.imatrix))
    return _measured(_options(args))


def _options(args: MergeConfig) -> RunOptions:
    """Return the options of the run that made the adapter, for its data or another file."""
    path, data = Path(args.adapter, CONFIG_FILE), args.imatrix
    if not path.is_file() and data == OF_THE_RUN:
        raise WgradError(f"--imatrix: {args.adapter} has no {CONFIG_FILE} that names its data: give a file with data")
    values: dict[str, Any] = read_config_file(path) if path.is_file() else {}
    of_run = {name for name in RunOptions().to_dict() if name in values}
    values = {name: value for name, value in values.items() if name in of_run}
    if data != OF_THE_RUN:
        values |= {"data": (data,), "eval_data": (), "eval_fraction": 0.0}
    values |= {"adapter": args.adapter, "device": args.device, "compute": "float32", "batch_size": 1}
    values |= {"lr_sweep": (), "memory_limit": None, **({"model": args.model} if args.model else {})}
    return replace(RunOptions(**values), eval_tokens=TOKENS)


def _measured(options: RunOptions) -> Imatrix:
    opened = open_model(options, needs=training_needs(options))
    options, _ = within_positions(opened.args, opened.config)
    with opened.display.phase("reading and tokenizing", unit="%") as phase:
        data = load_data(options, opened.tokenizer, phase.update)
    config = replace(options, max_length=row_length(options, data))
    documents = [part for example in eval_subset(data.train, config) for part in example.parts]
    length, pad = config.max_length, opened.tokenizer.pad_id or 0
    packed = pack_documents([len(document) for document in documents], length)
    rows, size = [[documents[i] for i in row] for row in packed], max(AT_ONCE // length, 1)
    built = build_measured(
        replace(opened, args=config), lambda built: Squares(built.model, size, length, pad).add(rows[:1])
    )
    squares = Squares(built.model, size, length, pad)
    with opened.display.phase("importance matrix", len(rows), "sequences") as phase:
        for done in range(0, len(rows), size):
            phase.update(done)
            squares.add(rows[done : done + size])
    means = by_gguf_names(opened.config, squares.means())
    if not all(np.isfinite(mean).all() for mean in means.values()):
        raise UnusableResult("--imatrix: the activations are not finite: base model or adapter are damaged")
    return Imatrix(means, " ".join(config.data), squares.tokens)


def by_gguf_names(config: ModelConfig, means: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the means of columns by GGUF tensor names, in GGUF's order of columns. means: by module path."""
    names, shapes, found = tensor_names(config), linear_modules(config), dict[str, np.ndarray]()
    for module in means.keys() & shapes.keys():
        axis, order = order_of(config, module) or ("", None)
        mean = means[module] if order is None or axis == "rows" else means[module][order]
        parts = parts_in_gguf(config, f"{module}.weight", shapes[module]) or [f"{module}.weight"]
        # Parts that are split by heads have other columns, for which nothing was measured.
        found |= {names[part]: mean for part in parts if part in names and not part.endswith(BY_HEAD_PARTS)}
    return found


class Squares:
    """Sums of squares of each projection's inputs over tokens.

    Args:
        model: Model to watch.
        size: Sequences of a batch.
        length: Tokens of a sequence.
        pad: Token id of padding.
    """

    def __init__(self, model: Model, size: int, length: int, pad: int = 0) -> None:
        self._model, self._device, self.tokens = model, model.device, 0
        self._size, self._length, self._pad = size, length, pad
        self._sums: dict[str, Array] = {}
        self._last: tuple[Array, Array] | None = None

    def add(self, rows: Sequence[Sequence[Document]]) -> None:
        """Run sequences of documents, at most `size` of them, and add the squares of their inputs."""
        model, device, size, length = self._model, self._device, self._size, self._length
        inputs, batch = Inputs.empty(model, size, length), make_batch(rows, size, length, self._pad)
        write_batch(device, inputs, batch, batch.targets)
        ends = np.zeros(size, np.int32)  # padding follows
        ends[: len(rows)] = [sum(map(len, row)) for row in rows]
        counts = device.upload((np.arange(length) < ends[:, None]).astype(np.float32).reshape(1, -1))
        before, model.watch = model.watch, self._seen(counts)
        try:
            with no_grad(), device.borrowing():
                model.hidden(inputs)
        finally:
            model.watch, self._last = before, None
        self.tokens += batch.num_tokens

    def _seen(self, counts: Array) -> Callable[[str, Tensor], None]:
        device = self._device

        def seen(module: str, given: Tensor) -> None:
            x = given.data
            if self._last is None or self._last[0] is not x:  # q, k and v have one input
                self._last = x, device.gemm(counts, device.mul(x, x))
            if module in self._sums:
                device.add(self._sums[module], self._last[1], out=self._sums[module])
            else:
                self._sums[module] = device.add(self._last[1], device.zeros(self._last[1].shape))

        return seen

    def means(self) -> dict[str, np.ndarray]:
        """Return the mean squares, float32 [inputs], by module path."""
        found = dict[str, np.ndarray]()
        for module, sums in self._sums.items():
            mean = self._device.download(sums)[0] / np.float32(max(self.tokens, 1))
            parts = parts_of(module) if module.endswith((QKV, GATE_UP)) else [module]
            found |= dict.fromkeys([module, *parts], mean)
        return found
