"""`wgrad.finetune`: a run from Python, with the options of the command."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from wgrad.device.errors import WgradError
from wgrad.train.data.given_records import PLACEHOLDERS, Records, records_of
from wgrad.train.library.results import FinetuneResult, read_results
from wgrad.train.library.signature import Paths, check_names, takes
from wgrad.train.options.finetune_config import RunOptions
from wgrad.train.options.resolve import resolve_config
from wgrad.train.output.callbacks import Callback, Callbacks, StepReport
from wgrad.train.run.caller import PythonCaller
from wgrad.train.run.finetune import run_finetune


@dataclass(frozen=True, kw_only=True)
class Arguments(RunOptions):
    """The options of a run as a caller may give them, and what only Python can give. It is never made: type checkers go
    by it."""

    model: Paths = ""  # type: ignore[assignment]
    out: Paths = ""  # type: ignore[assignment]
    adapter: Paths | None = None  # type: ignore[assignment]
    chat_template: Paths | None = None  # type: ignore[assignment]
    data: Paths | Iterable[Any] = ""  # type: ignore[assignment]
    columns: Mapping[str, str] | Iterable[str] | str = ()  # type: ignore[assignment]
    eval_data: Paths | Iterable[Any] | None = None  # type: ignore[assignment]
    config: Paths | None = None
    callbacks: Iterable[Callback | Callable[[StepReport], Any]] = ()
    progress: bool = False


@takes(Arguments)
def finetune(**given: Any) -> FinetuneResult:
    """Fine-tune a model -> what came of it; the adapter is in `out`.

    The arguments are the options of `wgrad finetune` (`wgrad finetune --help` says what each does), and
        data, eval_data   instead of a file: an iterable of records as its lines would be, such as a list; a table of
                          pandas, polars or pyarrow; or a data set of the package datasets (of several splits, train).
                          It is read once, whole, before the first step
        config            a YAML file of options; what is given here beats it
        callbacks         wgrad.Callback objects, or functions of each step's StepReport
        progress          print what the command prints
    Nothing is printed otherwise. Signals are answered as the command answers them: Ctrl-C saves after the step and
    raises KeyboardInterrupt; resume=True goes on.

    Raises WgradError, with the command's message: a mistake of the caller or a limit of the machine (UnusableResult:
    nothing usable was learnt); DeviceError: the device refused or was lost; what a callback raises.
    """
    check_names(given, [field.name for field in fields(Arguments)], "finetune")
    options = dict(given)
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
    config = resolve_config(options)
    if config.ranks is not None:
        raise WgradError(
            "--ranks: starts the command anew under mpirun, which a function cannot: leave it out and start this "
            "script with mpirun, or use the command wgrad finetune"
        )
    if config.lr_sweep:
        raise WgradError("--lr-sweep: comes to no result that a function returns: use the command wgrad finetune")
    try:
        run_finetune(config, PythonCaller(records, callbacks, silent=not progress))
    finally:
        gc.collect()  # what was on the device, of which circles of Python objects may still hold a part
    return read_results(config.out)


def _is_path(value: Any) -> bool:
    """A path, None, or a list of paths: an option like any other."""
    if isinstance(value, (list, tuple)):
        return bool(value) and all(isinstance(item, (str, os.PathLike)) for item in value)
    return value is None or isinstance(value, (str, os.PathLike))
