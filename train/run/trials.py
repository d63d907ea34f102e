"""`wgrad sweep`: a run for each combination of options, a table, and the best run. The same call resumes."""

from __future__ import annotations

import gc
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import msgspec

from wgrad.device.errors import DeviceError, DeviceLost, UnusableResult, WgradError
from wgrad.device.files import make_folder, write_json
from wgrad.train.files.decode import read_json
from wgrad.train.options.finetune_config import CONFIG_FILE, RunOptions
from wgrad.train.options.options import flag, show
from wgrad.train.options.resolve import resolve_config, resolve_options
from wgrad.train.options.sweep_options import OF_NO_SWEEP, Vary, trials_of
from wgrad.train.output.previous_run import RESULTS_FILE
from wgrad.train.run.caller import PythonCaller
from wgrad.train.run.finetune import run_finetune
from wgrad.train.terminal.interrupts import Interrupted
from wgrad.train.terminal.output import say

TRIALS_FILE, FORMAT = "trials.json", 1
# Options that change what the held-out loss measures.
_OF_THE_MEASURE = ("data", "eval_data", "eval_fraction", "eval_tokens", "seed", "max_length", "loss_on", "objective",
                   "beta", "label_smoothing", "chat_template", "columns")  # fmt: skip


class _Results(msgspec.Struct):
    """The part of a trial's results.json that the table shows."""

    steps: int | None = None
    seconds: float | None = None
    held_out_loss_after: float | None = None


def run_sweep(
    given: Mapping[str, Any], varied: Sequence[Vary], count: int | None, caller: PythonCaller | None = None
) -> list[dict[str, Any]]:
    """Run every combination of options and return a row of results for each.

    Args:
        given: Options of all runs, by name.
        varied: Options that differ, with their values.
        count: Combinations to draw at random; None: all.
        caller: Arguments of a Python caller; None: the command line.

    Raises:
        WgradError: An option is wrong, or --out holds a sweep of other options.
        UnusableResult: No run has a held-out loss.
        Interrupted: The sweep was asked to end; the same command resumes it.
    """
    caller = caller or PythonCaller()

    def tell(line: str, stream: Literal["stdout", "stderr"] = "stdout") -> None:
        if not caller.silent:
            say(line, stream)

    base = resolve_options(dict(given))
    for name in ("model", "data", "out"):
        if not getattr(base, name):
            raise WgradError(f"{flag(name)} is required: give it, or set '{name}' in a --config file")
    if refused := [name for name in OF_NO_SWEEP if getattr(base, name)]:
        raise WgradError(f"{flag(refused[0])}: has no place in a sweep, which runs again where it ended: leave it out")
    trials = trials_of(varied, count, base.seed)
    if count is not None and len(trials) < count:
        only = "is only 1 combination" if len(trials) == 1 else f"are only {len(trials)} different combinations"
        tell(f"note: --trials {count}: there {only} of the values of --vary: each runs once", "stderr")
    configs = [_options(given, trial, base.out, number) for number, trial in enumerate(trials, start=1)]
    for config in configs:  # a mistake in the last one is reported before the first one runs
        resolve_config(config)
    out = make_folder(base.out)
    _check_same(out, base, trials)
    if different := [one.name for one in varied if one.name in _OF_THE_MEASURE]:
        tell(f"note: held-out losses with different {different[0]} cannot be compared", "stderr")
    rows: list[dict[str, Any]] = []
    for number, (trial, config) in enumerate(zip(trials, configs), start=1):
        tell(f"trial {number} of {len(trials)}: {_words(trial)}")
        found = _try(config, number, len(trials), caller)
        if found["error"]:
            tell(f"note: trial {number} failed: {found['error']}", "stderr")
        rows.append({"folder": Path(config["out"]).name, "options": trial, **found})
        _write(out, base, trials, rows)
    for line in table(rows):
        tell(line)
    if not any(row["held_out_loss"] is not None for row in rows):
        raise UnusableResult(f"no trial has a held-out loss: {out / TRIALS_FILE} says why")
    return rows


def _options(given: Mapping[str, Any], trial: Mapping[str, Any], out: str, number: int) -> dict[str, Any]:
    values = "-".join(f"{name}={show(value)}" for name, value in trial.items())
    folder = f"{number:03d}-{re.sub(r'[^A-Za-z0-9=._-]+', '_', values)[:80]}"
    return {**given, **trial, "out": str(Path(out, folder))}


def _try(config: dict[str, Any], number: int, of: int, caller: PythonCaller) -> dict[str, Any]:
    """Run one trial, or resume it, and return its results."""
    folder = Path(config["out"])
    found: dict[str, Any] = {"held_out_loss": None, "steps": None, "seconds": None, "error": None}
    if not (folder / RESULTS_FILE).exists():
        try:
            own = replace(caller, callbacks=caller.callbacks.again())
            run_finetune(resolve_config({**config, "resume": (folder / CONFIG_FILE).exists()}), own)
        except Interrupted as asked:
            message = f"interrupted in trial {number} of {of}: the same command goes on"
            raise Interrupted(asked.number, message) from None
        except DeviceLost:
            raise
        except (WgradError, DeviceError) as error:  # the other trials may work
            return found | {"error": str(error)}
        finally:
            gc.collect()  # free the device's memory
    results = read_json(folder / RESULTS_FILE, _Results, "--out", f"remove {folder}: the trial then runs again")
    kept = {"steps": results.steps, "seconds": results.seconds}
    return found | kept | {"held_out_loss": results.held_out_loss_after}


def _compared_options(base: RunOptions) -> dict[str, Any]:
    """Return the options that a resumed sweep must share."""
    return {name: value for name, value in base.to_dict().items() if name not in ("out", "resume", "device")}


def _check_same(out: Path, base: RunOptions, trials: list[dict[str, Any]]) -> None:
    """Raise WgradError if the folder holds a sweep of other options or values."""
    path = out / TRIALS_FILE
    if not path.exists():
        _write(out, base, trials, [])
        return
    before = read_json(path, dict[str, Any], "--out")
    options: Any = before.get("options")
    options = options if isinstance(options, dict) else {}
    now = _compared_options(base)
    name = next((name for name in now if options.get(name) != now[name]), None)
    if name is not None or before.get("trials") != _plain(trials):
        what = f"another {name}" if name is not None else "other values of --vary or --trials"
        raise WgradError(f"--out: {out} holds a sweep with {what}: give another --out, or the same options")


def _plain(trials: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: list(v) if isinstance(v, tuple) else v for k, v in trial.items()} for trial in trials]


def _write(out: Path, base: RunOptions, trials: list[dict[str, Any]], rows: list[dict[str, Any]]) -> None:
    runs = [{**row, "options": _plain([row["options"]])[0]} for row in rows]
    best = best_of(rows)
    found = {"format": FORMAT, "options": _compared_options(base), "trials": _plain(trials), "runs": runs}
    write_json(out / TRIALS_FILE, found | {"best": None if best is None else best["folder"]})


def best_of(rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Return the row with the lowest held-out loss (the first of equal ones); None: no row has one."""
    measured = [row for row in rows if row["held_out_loss"] is not None]
    return min(measured, key=lambda row: row["held_out_loss"]) if measured else None


def table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the table of trials for people, and the best one."""
    names = list(rows[0]["options"]) if rows else []
    best = best_of(rows)
    cells = [["trial", *names, "held-out loss", "steps", "seconds"]]
    for number, row in enumerate(rows, start=1):
        loss, seconds = row["held_out_loss"], row["seconds"]
        shown = "failed" if row["error"] else "-" if loss is None else f"{loss:.4f}"
        mark = " (best)" if row is best else ""
        values = [show(row["options"][name]) for name in names]
        cells.append(
            [str(number), *values, shown + mark, show(row["steps"]), "-" if seconds is None else f"{seconds:.0f}"]
        )
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths)) for line in cells]
    return lines + ([f"best: {best['folder']} ({_words(best['options'])})"] if best else [])


def _words(trial: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {show(value)}" for name, value in trial.items())
