"""The tools of --report-to: one class each, which opens a run there and hands on numbers of a step.

A class imports its library when it is made; none is needed otherwise. `id` is what the tool knows the run by, where a
resumed run has to name it; None where the folder says it. Sources: the documentation of each library's Python API.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from wgrad.device.files import make_folder

PROJECT = "wgrad"  # where the tool's own variable names none


@dataclass(frozen=True)
class ReportedRun:
    """out: its folder, after which it is named. config: its options. done: steps behind it, None where it begins; id:
    what the reporter of its begin had."""

    out: Path
    config: Mapping[str, Any]
    done: int | None
    id: str | None

    @property
    def name(self) -> str:
        return self.out.resolve().name


class Reporter(Protocol):
    id: str | None

    def __init__(self, run: ReportedRun) -> None: ...

    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self, ok: bool) -> None: ...


class TensorBoard:
    """Event files in OUT/tensorboard. Written at once and by this thread: tensorboardX's own SummaryWriter waits for
    ever on a thread that a full disk has ended, and loses what is queued when the process is killed."""

    id: str | None = None

    def __init__(self, run: ReportedRun) -> None:
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto import event_pb2, summary_pb2

        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        first = 0 if run.done is None else run.done + 1
        # Readers take files in the order of their names, which begin with the second.
        self._writer = EventsWriter(str(make_folder(run.out / "tensorboard") / "events"), f".{first:09d}")
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._add(first, session_log=start)  # takes back what is there of this step and later ones

    def _add(self, step: int, **content: Any) -> None:
        self._writer.write_event(self._event(wall_time=time.time(), step=step, **content))
        self._writer.flush()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        entries = [self._summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._add(step, summary=self._summary(value=entries))

    def close(self, ok: bool) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run of W&B (WANDB_PROJECT, WANDB_ENTITY, WANDB_MODE and its other variables apply), its files in OUT/wandb."""

    def __init__(self, run: ReportedRun) -> None:
        import wandb

        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=run.name,
            id=run.id,
            resume="allow" if run.id else None,
            config=dict(run.config),
            dir=str(run.out),
            settings=wandb.Settings(console="off"),  # what is printed is the terminal's
        )
        self.id: str | None = self._run.id

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self, ok: bool) -> None:
        self._run.finish(exit_code=0 if ok else 1)


class Trackio:
    """A run of trackio (TRACKIO_PROJECT, TRACKIO_SPACE_ID and its other variables apply)."""

    def __init__(self, run: ReportedRun) -> None:
        import trackio

        # By its name alone trackio knows a run: the second tells it from one of another folder.
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
    """A run of MLflow (MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME and its other variables apply)."""

    def __init__(self, run: ReportedRun) -> None:
        import mlflow

        self._mlflow = mlflow
        given = {"run_id": run.id} if run.id else {"run_name": run.name}
        self.id: str | None = mlflow.start_run(**given).info.run_id
        if not run.id:  # a parameter cannot be changed
            mlflow.log_params({name: str(value)[:500] for name, value in run.config.items()})

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._mlflow.log_metrics(dict(values), step=step, run_id=self.id)

    def close(self, ok: bool) -> None:
        self._mlflow.end_run("FINISHED" if ok else "FAILED")


# Option value -> the module that must be there, what installs it, and the class.
KINDS: dict[str, tuple[str, str, type[Reporter]]] = {
    "tensorboard": ("tensorboardX", "'wgrad[tensorboard]'", TensorBoard),
    "wandb": ("wandb", "wandb", WeightsAndBiases),
    "trackio": ("trackio", "trackio", Trackio),
    "mlflow": ("mlflow", "mlflow", MLflow),
}
