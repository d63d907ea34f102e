"""--report-to: send a run's metrics to other tools too. A failing tool does not end the run."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from wgrad.device.errors import WgradError
from wgrad.device.files import write_json
from wgrad.train.files.decode import read_json
from wgrad.train.files.input_files import exists, one_line
from wgrad.train.output.callbacks import Callback, EvaluationReport, StepReport
from wgrad.train.output.reporters import KINDS, ReportedRun, Reporter

REPORTS_FILE = "reports.json"  # the run's id in each tool


def check_installed(names: Sequence[str]) -> None:
    """Raise WgradError if the package of a tool is not installed."""
    for name in names:
        module, package, _ = KINDS[name]
        if importlib.util.find_spec(module) is None:
            raise WgradError(f"--report-to: {name} needs a package that is not installed: pip install {package}")


class Reports(Callback):
    """Context manager that reports a run to other tools.

    A tool that cannot begin raises WgradError; one that fails later is reported once and then left out.

    Args:
        names: Tools to report to.
        out: Folder of the run.
        config: Options of the run.
        done: Steps done before the run was resumed; None: it begins.
        say: Prints a line.
        is_main_process: Whether this rank reports; another one starts with `take_over`.
    """

    def __init__(
        self,
        names: Sequence[str],
        out: str,
        config: Mapping[str, Any],
        done: int | None,
        say: Callable[[str], None],
        is_main_process: bool = True,
    ) -> None:
        self._names, self._out, self._config, self._say = names, Path(out), config, say
        self._done, self._measured = done, set[int]()
        self._open: dict[str, Reporter] = {}
        if is_main_process:
            for name in names:
                try:
                    self._begin(name)
                except Exception as error:
                    self.close(ok=False)
                    raise WgradError(
                        f"--report-to: {name} cannot begin: {_reason(error)}: mend that, or leave it out"
                    ) from error

    def _begin(self, name: str) -> None:
        path = self._out / REPORTS_FILE
        ids: dict[str, str] = {}
        if self._done is not None and exists(path, "--out"):
            ids = read_json(path, dict[str, str], "--out", "remove it: the reports then begin anew")
        kind = KINDS[name][2]
        self._open[name] = kind(ReportedRun(self._out, self._config, self._done, ids.get(name)))
        known = {name: reporter.id for name, reporter in self._open.items() if reporter.id is not None}
        if known:
            write_json(path, ids | known)

    def take_over(self) -> None:
        """Start reporting, because the rank that did was lost."""
        for name in self._names:
            self._guarded(name, lambda name=name: self._begin(name))  # type: ignore[misc]

    def on_step(self, report: StepReport) -> None:
        self._done = report.step
        values = {"loss": report.loss, "lr": report.lr, "grad_norm": report.grad_norm, "tokens": report.tokens}
        values |= {"tokens_per_second": report.tokens_per_second, **report.metrics}
        self._log("train", report.step, values)

    def on_evaluation(self, report: EvaluationReport) -> None:
        if report.step not in self._measured:  # the best step is evaluated again at the end
            self._measured.add(report.step)
            self._log("eval", report.step, {"loss": report.loss, **report.metrics})

    def _log(self, group: str, step: int, values: Mapping[str, float | None]) -> None:
        """Send the values that are finite numbers to all tools."""
        numbers = {f"{group}/{k}": float(v) for k, v in values.items() if v is not None and math.isfinite(v)}
        for name, reporter in [*self._open.items()] if numbers else ():
            self._guarded(name, lambda log=reporter.log: log(step, numbers))  # type: ignore[misc]

    def _guarded(self, name: str, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # any error of another library
            self._open.pop(name, None)
            after = "before the first step" if not self._done else f"after step {self._done}"
            self._say(f"note: --report-to {name} failed {after} ({_reason(error)}): it gets no more, the run goes on")

    def close(self, ok: bool) -> None:
        """End all reports. ok: whether the run finished."""
        for name, reporter in [*self._open.items()]:
            self._guarded(name, lambda close=reporter.close: close(ok))  # type: ignore[misc]
        self._open.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(ok=kind is None)


def _reason(error: Exception) -> str:
    return one_line(str(error)) or type(error).__name__
