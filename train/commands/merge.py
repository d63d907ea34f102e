"""`wgrad merge`: write a model with an adapter merged into its weights."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from wgrad.autograd.select_device import select_device
from wgrad.autograd.tensor import no_grad
from wgrad.device.contract import Device
from wgrad.device.errors import DeviceError, UnusableResult, WgradError
from wgrad.device.formats.nf4 import BLOCK_SIZES
from wgrad.train.commands.importance import find_imatrix
from wgrad.train.data.gguf_tokenizer import changed_keys, write_tokenizer
from wgrad.train.data.tokenizer import Tokenizer, load_tokenizer
from wgrad.train.data.tokenizer_source import TokenizerSource, find_source, save_tokenizer
from wgrad.train.files.decode import read_yaml
from wgrad.train.model.adapter_config import adapter_note, refuse_variant
from wgrad.train.model.adapter_files import load_adapter
from wgrad.train.model.gguf_model import FILE, GgufModel
from wgrad.train.model.inputs import whole_inputs
from wgrad.train.model.load_config import load_model_config
from wgrad.train.model.load_weights import load_frozen
from wgrad.train.model.lora import adaptable
from wgrad.train.model.merge import Merge, save_merged, save_merged_gguf
from wgrad.train.model.model import Model
from wgrad.train.model.model_config import ModelConfig
from wgrad.train.model.model_files import open_files
from wgrad.train.model.qat import QAT_MIXES
from wgrad.train.options.finetune_config import CONFIG_FILE
from wgrad.train.options.merge_config import MergeConfig
from wgrad.train.output.checkpoints import FOLDER as CHECKPOINTS
from wgrad.train.step.build import frozen_adapter
from wgrad.train.step.find_model import base_name, find_base, other_base
from wgrad.train.terminal.output import make_console, say
from wgrad.train.terminal.progress import Display

# Text on which logits are compared: prose, numbers and code.
TEXT = (
    "The harbour lay still in the early light, and the boats that had gone out the evening before were not yet back. "
    "In 1867 the town had 3,412 people; by 1901 there were 18,250 of them.\n"
    "def mean(values):\n    return sum(values) / len(values)\n"
    "Question: What is the capital of France? Answer: Paris. "
)
_TOKENS = 128


@dataclass(frozen=True)
class Difference:
    """Difference of two models' next-token distributions."""

    tokens: int
    divergence: float  # mean Kullback-Leibler divergence in nats
    largest: float  # of a log-probability, among tokens that either model gives at least 0.001
    agree: int  # tokens at which both models have the same likeliest next token

    def __str__(self) -> str:
        return (
            f"KL divergence {self.divergence:.2g} nats, largest difference of a log-probability {self.largest:.2g}, "
            f"the likeliest token is the same at {self.agree} of {self.tokens}"
        )


def difference(a: np.ndarray, b: np.ndarray) -> Difference:
    """Compare two models. a, b: their logits, [T, vocabulary]."""
    p, q = (_log_softmax(x.astype(np.float64)) for x in (a, b))
    likely = np.maximum(p, q) > np.log(1e-3)
    divergence = float((np.exp(p) * (p - q)).sum(axis=1).mean())
    agree = int((p.argmax(axis=1) == q.argmax(axis=1)).sum())
    return Difference(len(a), max(divergence, 0.0), float(np.abs(p - q)[likely].max()), agree)


def _log_softmax(x: np.ndarray) -> np.ndarray:
    x = x - x.max(axis=1, keepdims=True)
    values: np.ndarray = x - np.log(np.exp(x).sum(axis=1, keepdims=True))
    return values


def run_merge(args: MergeConfig, more: Mapping[str, str] | None = None) -> int:
    """Write the merged model and return the exit status.

    Args:
        args: Options of the command.
        more: Contents of further files to write next to a GGUF file, by name.

    Raises:
        WgradError: Adapter, model or path cannot be used.
        UnusableResult: The model is written, but its logits are not finite.
    """
    if os.path.lexists(args.out) and not (Path(args.out).is_dir() and not any(Path(args.out).iterdir())):
        raise WgradError(f"--out: {args.out} is there already: give the name of a new folder")
    device = select_device(args.device)
    say(f"device: {device.description} ({device.reason})", "stderr")
    folder = find_base(args.model, args.adapter)
    files, config, head_note = open_files(folder, load_model_config(folder))
    lora, arrays = load_adapter(args.adapter, *adaptable(config))
    refuse_variant(lora, "--adapter")
    source = find_source(folder, args.adapter)
    tokenizer, tokenizer_note = _tokenizer(source, config)
    for note in filter(None, (other_base(args.model, args.adapter), head_note, adapter_note(lora), tokenizer_note)):
        say(f"note: {note}", "stderr")
    trained = _trained(args)
    merge = Merge(files, config, lora, arrays, args.onto == "original", trained.quantize, *trained.nf4)
    merge.check()
    if note := _other_rounding(args, trained.qat):
        say(f"note: {note}", "stderr")
    imatrix = find_imatrix(args)
    if imatrix is not None:
        say(f"importance matrix: {len(imatrix.means)} weights, by {imatrix.source}", "stderr")
    save = partial(save_tokenizer, tokenizer, source) if tokenizer else source.copy
    display = Display(make_console("stderr"))
    dtype = merge.dtype(args.dtype)
    kind = {"none": dtype.name, "f16": "float16"}.get(args.quantize, args.quantize)
    with display.phase("merging", unit="tensors") as phase:
        if args.format == "gguf":
            in_gguf = GgufModel(merge.merged, files, kind).base is not None
            over = changed_keys(tokenizer, load_tokenizer(folder)) if tokenizer and in_gguf else {}
            texts = more or {}
            save_merged_gguf(merge, args.out, kind, device, save, write_tokenizer, phase.update, over, texts, imatrix)
        else:
            save_merged(merge, args.out, dtype, device, save, phase.update)
    where = args.out if args.format != "gguf" else os.path.join(args.out, FILE)
    base = base_name(args.model, args.adapter)
    say(f"wrote {where}: {base} with {args.adapter} merged onto its {args.onto} weights, in {kind}")
    if args.compare:
        how = "as trained" if trained.qat is None else "without the rounding of --qat"
        _say_comparison(args, merge, device, display, how)
    return 0


def _say_comparison(args: MergeConfig, merge: Merge, device: Device, display: Display, how: str) -> None:
    """Print how the merged model differs from base and adapter. UnusableResult: its logits are not finite."""
    try:
        with display.phase("comparing logits"):
            found = _compare(args, merge, device)
        say(f"merged model compared with base and adapter {how}: {found}")
    except UnusableResult:
        raise
    except (WgradError, DeviceError) as error:  # the model is written, which is what was asked for
        say(f"note: the two could not be compared: {error}", "stderr")


def _tokenizer(source: TokenizerSource, config: ModelConfig) -> tuple[Tokenizer | None, str]:
    """Return the tokenizer and a note; None: it cannot be read here, so that its files are copied unchanged."""
    if source.adapter is None and not (source.base / "tokenizer.json").exists():
        return None, ""
    tokenizer, note = source.load()
    tokenizer.limit(config.vocab_size)
    return tokenizer, note


@dataclass(frozen=True)
class _Trained:
    """Quantization of the base model that an adapter was trained on."""

    quantize: bool = True
    block_size: int = 64
    double_quant: bool = True
    qat: str | None = None

    @property
    def nf4(self) -> tuple[int, bool]:
        return self.block_size, self.double_quant


def _other_rounding(args: MergeConfig, qat: str | None) -> str:
    """Return a note on weights that are rounded in another way than --qat trained for, or ""."""
    if qat is None or (args.quantize, args.imatrix, args.onto) == (QAT_MIXES[qat], None, "dequantized"):
        return ""
    wanted = f"--quantize {QAT_MIXES[qat]}"
    given = f"--quantize {args.quantize}"
    if given == wanted:
        given += " --imatrix" if args.imatrix else f" --onto {args.onto}"
    return f"the adapter was trained with --qat {qat} for {wanted}: {given} makes other weights"


def _trained(args: MergeConfig) -> _Trained:
    """Return the quantization of the options, else of the run's config.yaml, else the default of runs.

    That file is in the adapter's folder, or two folders above if the adapter is a checkpoint.
    """
    folder = Path(args.adapter)
    found: Any = None
    for path in (folder / CONFIG_FILE, folder.parent.parent / CONFIG_FILE):
        if path.is_file() and (path.parent == folder or folder.parent.name == CHECKPOINTS):
            with suppress(WgradError):  # another tool's file of that name
                found = read_yaml(path, "--adapter")
            break
    known = found if isinstance(found, dict) else {}
    size: Any = known.get("block_size")
    double = known.get("double_quant") is not False
    return _Trained(
        known.get("quantize") is not False,
        args.block_size or (size if size in BLOCK_SIZES else _Trained.block_size),
        double if args.double_quant is None else args.double_quant,
        next((qat for qat in QAT_MIXES if qat == known.get("qat")), None),
    )


def _compare(args: MergeConfig, merge: Merge, device: Device) -> Difference:
    ids = np.array(load_tokenizer(args.out).encode(TEXT)[:_TOKENS], np.int32)
    weights = load_frozen(
        merge.files.folder,
        merge.config,
        device,
        quantize=merge.quantize,
        double_quant=merge.double_quant,
        block_size=merge.block_size,
    )
    adapter = frozen_adapter(merge.lora, dict(merge.arrays), device)
    before = _logits(Model(merge.config, weights, device, adapter=adapter, positions=len(ids)), ids)
    del weights, adapter
    config = load_model_config(args.out)
    weights = load_frozen(args.out, config, device, quantize=False)
    after = _logits(Model(config, weights, device, positions=len(ids)), ids)
    for name, values in (("base and adapter", before), ("the merged model", after)):
        if not np.isfinite(values).all():
            raise UnusableResult(
                f"{args.out} is written, but the logits of {name} are not finite (NaN or infinity): the adapter is "
                "damaged or comes of a training that failed: fetch it again, or train it again"
            )
    return difference(before, after)


def _logits(model: Model, ids: np.ndarray) -> np.ndarray:
    row = np.arange(len(ids), dtype=np.int32)[None]
    inputs = whole_inputs(model, ids[None], row, np.zeros_like(row))
    with no_grad():
        return model.device.download(model.logits(model.hidden(inputs).data))
