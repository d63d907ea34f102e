"""The configuration of a fine-tuning run: names, types, defaults, help and rules in one place.

The command line's options (`cli_options.py`), the keys of the YAML file and `OUT/config.yaml` all derive from
`FinetuneConfig`: the option of field `seq_len` is `--seq-len`, its key in the file `seq_len` (or `seq-len`).
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import os
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from wgrad.autograd.errors import WgradError
from wgrad.train.decode import read_yaml
from wgrad.train.files import write_text
from wgrad.train.input_files import expand_path
from wgrad.train.option_text import check_text

CONFIG_FILE = "config.yaml"
CONFIG_FORMAT = 1  # of OUT/config.yaml; a file that a person wrote need not name it
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def option(
    default: Any, text: str, *, choices: tuple[Any, ...] = (), metavar: str = "", group: str = "training"
) -> Any:
    """A field with what the command line and the error messages need to know about it."""
    metadata = {"help": text, "choices": choices, "metavar": metavar, "group": group}
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True)
class FinetuneConfig:
    """Everything that decides a run. Raises WgradError, naming the option, where a value breaks its rule."""

    model: str = option(
        "",
        "checkpoint in Hugging Face layout: a folder, or a hub id such as org/name",
        metavar="DIR_OR_HUB_ID",
        group="files",
    )
    data: str = option(
        "",
        "training data: JSONL with text, prompt + completion or messages; or plain text (.txt)",
        metavar="FILE",
        group="files",
    )
    out: str = option(
        "", "output folder: adapter, metrics.jsonl, loss.svg, config.yaml, checkpoints", metavar="DIR", group="files"
    )
    eval_data: str | None = option(
        None, "held-out data in a file of its own; --eval-fraction is then not used", metavar="FILE", group="files"
    )
    adapter: str | None = option(
        None,
        "start from this PEFT adapter instead of a new one (rank, alpha, targets are its own)",
        metavar="DIR",
        group="files",
    )
    resume: bool = option(
        False, "go on from the newest checkpoint in --out; options not given are those of the run", group="files"
    )

    rank: int = option(16, "rank r of the adapters", metavar="R", group="adapter")
    alpha: float = option(32.0, "lora_alpha: the adapter is scaled by alpha / r", metavar="A", group="adapter")
    dropout: float = option(0.0, "dropout on the adapter's input", metavar="P", group="adapter")
    target_modules: tuple[str, ...] = option(
        PROJECTIONS, "projections that get an adapter", metavar="NAME", group="adapter"
    )
    rslora: bool = option(False, "scale by alpha / sqrt(r) instead of alpha / r", group="adapter")
    full: bool = option(False, "train all parameters instead of adapters; saves a whole checkpoint", group="adapter")
    double_quant: bool = option(
        True, "quantise the scales of the NF4 blocks too (4.127 bits a weight instead of 4.5)", group="adapter"
    )
    block_size: int = option(
        64, "weights in one NF4 block", choices=(32, 64, 128, 256, 512, 1024, 2048, 4096), metavar="N", group="adapter"
    )

    lr: float = option(2e-4, "peak learning rate", metavar="LR")
    schedule: str = option("cosine", "learning rate after the warm-up", choices=("cosine", "linear", "constant"))
    warmup: float = option(0.03, "warm-up: a share of all steps where below 1, else a number of steps", metavar="W")
    weight_decay: float = option(0.0, "decoupled weight decay (AdamW) of matrices", metavar="D")
    max_grad_norm: float = option(1.0, "gradients are scaled down to this norm; 0: never", metavar="G")
    batch_size: int = option(1, "rows in one forward and backward", metavar="B")
    accumulate: int = option(8, "batches of which one optimiser step is made", metavar="N")
    seq_len: int = option(1024, "tokens in a row; longer examples are truncated", metavar="T")
    epochs: int = option(1, "passes over the data", metavar="N")
    max_steps: int | None = option(None, "stop after this many optimiser steps, whatever --epochs says", metavar="N")
    packing: bool = option(True, "put several short documents in one row; each still sees only itself")
    loss_on: str = option(
        "completion", "tokens that count: completions and assistant turns, or all", choices=("completion", "all")
    )
    eval_fraction: float = option(0.05, "share of the data held out to measure the loss before and after", metavar="F")
    seed: int = option(0, "seed of data order, split, adapter start and dropout", metavar="N")

    compute: str = option(
        "float32",
        "type of activations (bfloat16: on HIP); products accumulate in float32 either way",
        choices=("float32", "float16", "bfloat16"),
        group="machine",
    )
    device: str = option(
        "auto", "auto, hip, wgpu, wgpu:<number or part of the adapter's name>, cpu", metavar="DEVICE", group="machine"
    )
    checkpointing: bool | None = option(
        None,
        "keep only each layer's input and compute it again in the backward (default: where it is needed)",
        group="machine",
    )
    save_every: int = option(100, "steps between checkpoints; 0: none", metavar="N", group="machine")
    log_every: int = option(10, "steps between reports; each waits for the device", metavar="N", group="machine")
    profile: bool = option(False, "measure each kernel and print a table at the end", group="machine")
    sample_prompt: str | None = option(
        None, "text to continue before and after, to see what was learnt", metavar="TEXT", group="machine"
    )

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = _coerce(field.name, getattr(self, field.name))
            if isinstance(value, str):  # in the group of files each is a path
                is_path = field.metadata["group"] == "files"
                value = (expand_path if is_path else check_text)(value, flag(field.name))
            object.__setattr__(self, field.name, value)
        _validate(self)

    def to_dict(self) -> dict[str, Any]:
        """Field names to plain values (a tuple becomes a list), in the order of declaration."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(self).items()}

    def to_yaml(self) -> str:
        """The text of config.yaml; `--config` reads it back to an equal configuration."""
        unused = unused_options(self.to_dict())
        values = {"format": CONFIG_FORMAT} | {k: v for k, v in self.to_dict().items() if k not in unused}
        return yaml.safe_dump(values, sort_keys=False, allow_unicode=True, default_flow_style=None, width=10**6)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write config.yaml into `folder`, atomically."""
        write_text(os.path.join(folder, CONFIG_FILE), self.to_yaml())

    def summary(self) -> str:
        """The resolved configuration for people: one `name value` a line, grouped, changed values marked."""
        width = max(len(f.name) for f in dataclasses.fields(self))
        lines, group = [], ""
        for field in dataclasses.fields(self):
            if field.metadata["group"] != group:
                group = field.metadata["group"]
                lines.append(f"{group}:")
            value = getattr(self, field.name)
            mark = "" if value == field.default or field.name in ("model", "data", "out") else "   (set)"
            lines.append(f"  {field.name:<{width}}  {_show(value)}{mark}")
        return "\n".join(lines)


# An option that is set, what it leaves without effect, and why.
_UNUSED = (
    ("adapter", ("rank", "alpha", "target_modules", "rslora"), "--adapter brings its own"),
    ("full", ("rank", "alpha", "target_modules", "rslora"), "--full trains all parameters, not an adapter"),
    ("full", ("double_quant", "block_size"), "--full quantises nothing"),
    ("eval_data", ("eval_fraction",), "--eval-data is what is held out"),
)


def unused_options(values: Mapping[str, Any]) -> dict[str, str]:
    """Options without effect beside the others of `values`, each with the reason."""
    return {name: reason for key, names, reason in _UNUSED if values.get(key) for name in names}


def _show(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return " ".join(value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def flag(name: str) -> str:
    """The command line's spelling of a field's name."""
    return "--" + name.replace("_", "-")


@functools.cache  # reading the hints takes a millisecond, and the parser asks for each of 35 fields
def field_type(name: str) -> tuple[type, bool]:
    """-> (bool | int | float | str | tuple, may be None) of a field."""
    hint = typing.get_type_hints(FinetuneConfig)[name]
    optional = isinstance(hint, types.UnionType)
    if optional:
        hint = next(h for h in typing.get_args(hint) if h is not type(None))
    return typing.get_origin(hint) or hint, optional


def _coerce(name: str, value: Any) -> Any:
    """Value of the field's own type, from what YAML or a caller gives (1 for 1.0, 2e-4 as text, a list for a tuple)."""
    kind, optional = field_type(name)
    if value is None and optional:
        return None
    if kind is tuple:
        items = value.replace(",", " ").split() if isinstance(value, str) else value
        if isinstance(items, (list, tuple)) and all(isinstance(item, str) for item in items):
            return tuple(dict.fromkeys(items))
        raise WgradError(f"{flag(name)}: expected a list of names, got {value!r}: for example [q_proj, v_proj]")
    if kind is bool and isinstance(value, bool):
        return value
    if kind is str and isinstance(value, (str, os.PathLike)):
        return os.fspath(value)
    if kind in (int, float) and not isinstance(value, bool):
        try:  # YAML 1.1 reads 2e-4 as text: 2.0e-4 would be a number
            number = float(value)
            if kind is float and math.isfinite(number):
                return number
            if kind is int and number == int(number):
                return int(number)
        except (TypeError, ValueError, OverflowError):
            pass
    words = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
    raise WgradError(f"{flag(name)}: expected {words[kind]}, got {value!r}")


_RULES: tuple[tuple[str, str, typing.Callable[[Any], bool]], ...] = (
    ("rank", "must be at least 1", lambda v: v >= 1),
    ("alpha", "must be above 0", lambda v: v > 0),
    ("dropout", "must be at least 0 and below 1", lambda v: 0 <= v < 1),
    ("target_modules", "must name at least one module", lambda v: len(v) > 0),
    ("lr", "must be above 0", lambda v: v > 0),
    ("warmup", "must be a share below 1 or a whole number of steps", lambda v: 0 <= v < 1 or v == int(v) >= 1),
    ("weight_decay", "must not be negative", lambda v: v >= 0),
    ("max_grad_norm", "must not be negative (0: no clipping)", lambda v: v >= 0),
    ("batch_size", "must be at least 1", lambda v: v >= 1),
    ("accumulate", "must be at least 1", lambda v: v >= 1),
    ("seq_len", "must be at least 2 (one token predicts the next)", lambda v: v >= 2),
    ("epochs", "must be at least 1", lambda v: v >= 1),
    ("max_steps", "must be at least 1", lambda v: v is None or v >= 1),
    ("eval_fraction", "must be at least 0 and below 1", lambda v: 0 <= v < 1),
    ("seed", "must be between 0 and 4294967295", lambda v: 0 <= v < 2**32),
    ("save_every", "must not be negative (0: no checkpoints)", lambda v: v >= 0),
    ("log_every", "must be at least 1", lambda v: v >= 1),
)


def _validate(config: FinetuneConfig) -> None:
    for field in dataclasses.fields(config):
        value, choices = getattr(config, field.name), field.metadata["choices"]
        if choices and value not in choices:
            listed = ", ".join(map(str, choices))
            raise WgradError(f"{flag(field.name)}: must be one of {listed}; got {value!r}{_nearest(value, choices)}")
    for name, rule, holds in _RULES:
        value = getattr(config, name)
        if not holds(value):
            raise WgradError(f"{flag(name)}: {rule}; got {_show(value)}")
    if config.full and config.adapter:
        raise WgradError("--adapter: --full trains all parameters and has no adapter: give only one of the two")
    if config.full and config.dropout:
        raise WgradError(f"--dropout: works on adapters, and --full trains all parameters; got {config.dropout:g}")


def _nearest(word: Any, words: typing.Iterable[Any]) -> str:
    """' (did you mean ...?)' or nothing."""
    close = difflib.get_close_matches(str(word), [str(w) for w in words], n=1, cutoff=0.5)
    return f" (did you mean {close[0]}?)" if close else ""


def config_from_mapping(values: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Field names to values from a YAML mapping; `source` is named in the error for a key that is none."""
    names = [f.name for f in dataclasses.fields(FinetuneConfig)]
    result: dict[str, Any] = {}
    for key, value in values.items():
        name = str(key).replace("-", "_")
        if name not in names:
            raise WgradError(f"{source}: unknown key {key!r}{_nearest(name, names) or ': see wgrad finetune --help'}")
        if name in result:
            raise WgradError(f"{source}: {name!r} is given twice: remove one")
        result[name] = value
    return result


def read_config_file(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Field names to values from a YAML file. Raises WgradError: not there, not YAML, not a mapping, unknown key."""
    source = os.fspath(path)
    values = read_yaml(path, "--config")
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise WgradError(f"--config: {source}: expected lines like 'rank: 16', got a {type(values).__name__}")
    written = values.pop("format", CONFIG_FORMAT)
    if written != CONFIG_FORMAT:
        raise WgradError(
            f"--config: {source}: format must be {CONFIG_FORMAT}; got {written!r}: it is of another version of wgrad: "
            "write the options anew"
        )
    return config_from_mapping(values, f"--config: {source}")
