"""What a run leaves in its folder: the adapter (or with --full a whole checkpoint), loss.svg and results.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from wgrad.train.adapter import save_adapter
from wgrad.train.build import TrainableModel
from wgrad.train.files import write_json
from wgrad.train.full_checkpoint import save_full
from wgrad.train.loss_curve import LOSS_CURVE_FILE, save_loss_curve
from wgrad.train.metrics import MetricsFile
from wgrad.train.progress import duration
from wgrad.train.session import Session, mib

RESULTS_FILE = "results.json"


def write_result(
    session: Session, built: TrainableModel, metrics: MetricsFile, results: dict[str, Any], skipped: int
) -> None:
    """Write what the run was for. results.json comes last: a folder that has it is complete."""
    out, config, stream = session.out, session.config, session.stream
    if config.full:
        save_full(out, session.folder, built.parameters, session.device)
    else:
        save_session_adapter(session, built, out)
    points = [(0, results.get("held_out_loss_before")), (stream.total_steps, results.get("held_out_loss_after"))]
    curve = [(step, loss) for step, loss in points if loss is not None]
    title = f"{Path(config.model).name} on {Path(config.data).name}"
    save_loss_curve(out / LOSS_CURVE_FILE, metrics.records, curve, title)
    memory = session.device.memory()
    write_json(
        out / RESULTS_FILE,
        {**results, "steps": stream.total_steps, "skipped_steps": skipped, "peak_bytes": memory.peak_bytes},
    )
    if skipped:
        session.say(f"note: {skipped} steps were skipped because a gradient was not finite")
    what = "checkpoint" if config.full else "adapter"
    session.say(f"done in {duration(results['seconds'])}, peak memory {mib(memory.peak_bytes)}: {what} in {out}")
    table = getattr(session.device, "profile_table", None)
    if config.profile and table is not None:
        session.say(table())


def save_session_adapter(session: Session, built: TrainableModel, folder: Path) -> None:
    assert built.lora is not None
    arrays = {name: built.parameters.get(name) for name in built.parameters.tensors}
    save_adapter(folder, built.lora, arrays, session.config.model)
