"""`wgrad.finetune`: a run from Python, with the options of the command."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from wgrad.device.errors import WgradError
from wgrad.train.data.given_records import PLACEHOLDERS, Records, records_of
from wgrad.train.library.results import FinetuneResult, read_results
from wgrad.train.library.signature import Paths, checked_names, takes
from wgrad.train.options.choices import Auto
from wgrad.train.options.finetune_config import RunOptions
from wgrad.train.options.resolve import resolve_config
from wgrad.train.output.callbacks import Callback, Callbacks, StepReport
from wgrad.train.run.caller import PythonCaller
from wgrad.train.run.finetune import run_finetune
from wgrad.train.step.hooks import Hooks, LossFunction, Metric

_RECORDS = (
    "training data: files or a Hub data set, as for the command; or records: an iterable such as a list, a table of "
    "pandas, polars or pyarrow, or a data set of the package datasets (if it has splits, train). All records are read "
    "before the first step"
)


@dataclass(frozen=True, kw_only=True)
class Arguments(RunOptions):
    """Arguments of `finetune`, for type checkers and help(): the options of a run, with the types that Python callers
    may give, and arguments that only Python has. It is never instantiated."""

    model: Paths = ""  # type: ignore[assignment]
    out: Paths = ""  # type: ignore[assignment]
    adapter: Paths | None = None  # type: ignore[assignment]
    chat_template: Paths | None = None  # type: ignore[assignment]
    data: Paths | Iterable[Any] = field(default="", metadata={"help": _RECORDS})  # type: ignore[assignment]
    columns: Mapping[str, str] | Iterable[str] | str = ()  # type: ignore[assignment]
    eval_data: Paths | Iterable[Any] | None = field(  # type: ignore[assignment]
        default=None, metadata={"help": "held-out data, as data; --eval-fraction is then not used"}
    )
    batch_size: int | Auto = 1  # type: ignore[assignment]
    sample_prompt: str | Iterable[str] = field(  # type: ignore[assignment]
        default=(), metadata={"help": "prompts of the sample (default: the start of a held-out example)"}
    )
    config: Paths | None = field(
        default=None, metadata={"help": "YAML file with options by name; arguments of the call override it"}
    )
    callbacks: Iterable[Callback | Callable[[StepReport], Any]] = field(
        default=(), metadata={"help": "wgrad.Callback objects, or functions that take each step's StepReport"}
    )
    loss: LossFunction | None = field(
        default=None,
        metadata={"help": "loss to use instead of the cross-entropy: a function of a ModelOutput and a TokenBatch that "
                  "returns the sum over the targets as a Tensor of one number"},
    )  # fmt: skip
    metrics: Mapping[str, Metric] | None = field(
        default=None,
        metadata={"help": "metrics of the held-out data, by name: functions of logits float32 [M, V] and targets int32 "
                  "[M] that return one number, or one for each target"},
    )  # fmt: skip
    progress: bool = field(default=False, metadata={"help": "print the output of the command"})


@takes(Arguments)
def finetune(**given: Any) -> FinetuneResult:
    """Fine-tune a model and save the adapter in `out`.

    Prints nothing unless `progress` is true. Ctrl-C saves a checkpoint after the current step and raises
    KeyboardInterrupt; resume=True continues from it.

    Args:
        OPTIONS

    Returns:
        The result of the finished run.

    Raises:
        WgradError: An argument is wrong, or the machine is too small.
        UnusableResult: Training did not lead to finite parameters.
        DeviceError: The device failed or was lost.
    """
    options = checked_names(given, [field.name for field in fields(Arguments)], "finetune")
    caller = split_caller(options)
    config = resolve_config(options)
    if config.ranks is not None:
        raise WgradError(
            "--ranks: starts the command anew under mpirun, which a function cannot: leave it out and start this "
            "script with mpirun, or use the command wgrad finetune"
        )
    if config.lr_sweep:
        raise WgradError("--lr-sweep: comes to no result that a function returns: use the command wgrad finetune")
    try:
        run_finetune(config, caller)
    finally:
        gc.collect()  # free device memory that reference cycles still hold
    return read_results(config.out)


def split_caller(options: dict[str, Any]) -> PythonCaller:
    """Remove the arguments that only Python has from `options`, which then are those of the command."""
    hooks = Hooks(options.pop("loss", None), options.pop("metrics", None))
    callbacks, progress = Callbacks(options.pop("callbacks", ())), options.pop("progress", False)
    if options.get("config") is None:
        options.pop("config", None)
    records = dict[str, Records]()
    for name in PLACEHOLDERS:
        if name in options and not _is_path(options[name]):
            records[PLACEHOLDERS[name]] = records_of(options[name], name)
            options[name] = PLACEHOLDERS[name]
        elif isinstance(options.get(name), (list, tuple)):
            options[name] = [os.fspath(path) for path in options[name]]
    return PythonCaller(records, callbacks, hooks, silent=not progress)


def _is_path(value: Any) -> bool:
    """Return whether a value is a path, None, or a list of paths, as for the command."""
    if isinstance(value, (list, tuple)):
        return bool(value) and all(isinstance(item, (str, os.PathLike)) for item in value)
    return value is None or isinstance(value, (str, os.PathLike))
