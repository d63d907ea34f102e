"""The tools of --report-to: a class for each, which opens a run there and logs numbers.

A class imports its library when it is instantiated; otherwise none is needed. `id` identifies the run for the tool when
it is resumed; None: the folder does. Sources: the documentation of each library's Python API.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from wgrad.device.files import make_folder

PROJECT = "wgrad"  # default project, unless the tool's own variable names one


@dataclass(frozen=True)
class ReportedRun:
    """A run to report."""

    out: Path  # its folder, after which it is named
    config: Mapping[str, Any]  # its options
    done: int | None  # steps done before it was resumed; None: it begins
    id: str | None  # `Reporter.id` of its first start

    @property
    def name(self) -> str:
        return os.path.basename(os.path.realpath(self.out))


class Reporter(Protocol):
    id: str | None

    def __init__(self, run: ReportedRun) -> None: ...

    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self, ok: bool) -> None: ...


class TensorBoard:
    """Event files in OUT/tensorboard, written at once and by this thread.

    tensorboardX's own SummaryWriter waits forever for a thread that a full disk has ended, and loses queued events when
    the process is killed.
    """

    id: str | None = None

    def __init__(self, run: ReportedRun) -> None:
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto import event_pb2, summary_pb2

        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        first = 0 if run.done is None else run.done + 1
        # Readers sort files by name, which begins with the time in seconds; this suffix orders equal times.
        self._writer = EventsWriter(str(make_folder(run.out / "tensorboard") / "events"), f".{first:09d}")
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._add(first, session_log=start)  # discards earlier events from this step on

    def _add(self, step: int, **content: Any) -> None:
        self._writer.write_event(self._event(wall_time=time.time(), step=step, **content))
        self._writer.flush()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        entries = [self._summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._add(step, summary=self._summary(value=entries))

    def close(self, ok: bool) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run of W&B, with its files in OUT/wandb. WANDB_PROJECT, WANDB_MODE and its other variables apply."""

    def __init__(self, run: ReportedRun) -> None:
        import wandb

        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=run.name,
            id=run.id,
            resume="allow" if run.id else None,
            config=dict(run.config),
            dir=str(run.out),
            settings=wandb.Settings(console="off"),  # do not capture the terminal's output
        )
        self.id: str | None = self._run.id

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self, ok: bool) -> None:
        self._run.finish(exit_code=0 if ok else 1)


class Trackio:
    """A run of trackio. TRACKIO_PROJECT, TRACKIO_SPACE_ID and its other variables apply."""

    def __init__(self, run: ReportedRun) -> None:
        import trackio

        # trackio identifies a run by its name alone: the time separates runs of folders with the same name.
        self.id: str | None = run.id or f"{run.name}-{int(time.time())}"
        self._run = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", PROJECT),
            name=self.id,
            resume="allow" if run.id else "never",
            config=dict(run.config),
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self, ok: bool) -> None:
        self._run.finish()


class MLflow:
    """A run of MLflow. MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME and its other variables apply."""

    def __init__(self, run: ReportedRun) -> None:
        import mlflow

        self._mlflow = mlflow
        given = {"run_id": run.id} if run.id else {"run_name": run.name}
        self.id: str | None = mlflow.start_run(**given).info.run_id
        if not run.id:  # parameters cannot be changed later
            mlflow.log_params({name: str(value)[:500] for name, value in run.config.items()})

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._mlflow.log_metrics(dict(values), step=step, run_id=self.id)

    def close(self, ok: bool) -> None:
        self._mlflow.end_run("FINISHED" if ok else "FAILED")


# For each tool: the module that it needs, the package that has it, and the class.
KINDS: dict[str, tuple[str, str, type[Reporter]]] = {
    "tensorboard": ("tensorboardX", "'wgrad[tensorboard]'", TensorBoard),
    "wandb": ("wandb", "wandb", WeightsAndBiases),
    "trackio": ("trackio", "trackio", Trackio),
    "mlflow": ("mlflow", "mlflow", MLflow),
}
