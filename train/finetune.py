"""`wgrad finetune`: from a configuration to an adapter (or with --full a whole checkpoint) in the output folder."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

from wgrad.autograd.errors import WgradError
from wgrad.train.adapter import WEIGHTS_FILE
from wgrad.train.build import TrainableModel
from wgrad.train.checkpoint_files import TrainingState, check_info, drop_later, has_checkpoints, load_state, save_state
from wgrad.train.config import FinetuneConfig
from wgrad.train.files import make_folder, remove_leftovers
from wgrad.train.generate import Sampling, generate_text
from wgrad.train.loop import Run, Trainer
from wgrad.train.metrics import MetricsFile
from wgrad.train.optim import AdamW
from wgrad.train.output import say
from wgrad.train.packing import eval_batches
from wgrad.train.progress import TrainingProgress
from wgrad.train.result import RESULTS_FILE, save_session_adapter, write_result
from wgrad.train.session import SAMPLE_TOKENS, Session, build_session, open_session, run_info
from wgrad.train.weights import SINGLE_FILE


def run_finetune(config: FinetuneConfig) -> int:
    """Train as `config` says. -> 0. Raises WgradError (or a device's error) with a message for the user."""
    if _already_done(config):
        return 0
    session = open_session(config)
    state = load_state(config.out) if config.resume else None
    if config.resume and state is None:
        session.say(f"note: {config.out} has no checkpoint to resume from: the run begins anew")
    return _run(session, state)


def _already_done(config: FinetuneConfig) -> bool:
    """True where a finished run is asked to resume. WgradError where an old run would be overwritten."""
    out = Path(config.out)
    finished = [name for name in (RESULTS_FILE, WEIGHTS_FILE, SINGLE_FILE) if (out / name).exists()]
    if config.resume:
        if RESULTS_FILE in finished:
            say(f"{out}: this run is finished: nothing to resume")
            return True
        return False
    if finished:
        raise WgradError(f"--out: {out} already holds a finished run ({finished[0]}): choose another folder")
    if has_checkpoints(out):
        raise WgradError(f"--out: {out} holds an unfinished run: go on with --resume, or choose another folder")
    return False


def _run(session: Session, state: TrainingState | None) -> int:
    config, stream = session.config, session.stream
    built = build_session(session)
    optimizer = AdamW(
        built.parameters,
        weight_decay=config.weight_decay,
        max_grad_norm=config.max_grad_norm,
        scale_loss=config.compute == "float16",
    )
    trainer = Trainer(built.model, optimizer, config)
    info = run_info(session)
    if state is not None:
        _restore(session, optimizer, state, info)
    make_folder(config.out)
    remove_leftovers(config.out)
    config.save(config.out)
    held_out = eval_batches(session.data.held_out, config, session.tokenizer.pad_id or 0)
    results = state.info["results"] if state is not None else {}
    if state is None:
        results |= _measure(session, trainer, built, held_out, "before")

    def save(done: int) -> None:
        extra = {"results": results, "stream": stream.state(), **info}
        adapter = None if config.full else (lambda folder: save_session_adapter(session, built, folder))
        save_state(config.out, done, optimizer.state_arrays(), extra, adapter)

    _start_profile(session)
    done = stream.step
    session.say(f"training: {stream.total_steps - done} steps, {len(stream.documents)} documents")
    begun = time.monotonic()
    with MetricsFile(config.out, done) as metrics:
        with TrainingProgress(stream.total_steps, done, config.log_every, session.console) as progress:
            run = Run(trainer, stream, metrics, progress, save)
            run.train()
        results["seconds"] = results.get("seconds", 0.0) + time.monotonic() - begun
        results |= _measure(session, trainer, built, held_out, "after")
        write_result(session, built, metrics, results, run.skipped)
    return 0


def _start_profile(session: Session) -> None:
    """--profile: from here on each kernel is timed (which costs some speed)."""
    if session.config.profile:
        profile = getattr(session.device, "profile", None)
        if profile is None:
            session.say(f"note: --profile has no effect: {session.device.description} has no kernels to time")
        else:
            profile(True)


def _restore(session: Session, optimizer: AdamW, state: TrainingState, info: dict[str, Any]) -> None:
    check_info(state, info)
    session.stream.restore(state.step, state.info["data"])
    try:
        optimizer.load_state_arrays(state.arrays)
    except (KeyError, ValueError) as error:
        raise WgradError(f"--resume: {state.path} is of another run ({error}): choose another --out") from error
    drop_later(session.config.out, state.step)
    session.say(f"resuming from {state.path}")


def _measure(
    session: Session, trainer: Trainer, built: TrainableModel, held_out: list[Any], when: str
) -> dict[str, Any]:
    """Held-out loss and a sample, printed and returned as results."""
    results: dict[str, Any] = {}
    if held_out:
        loss = trainer.evaluate(held_out)
        results[f"held_out_loss_{when}"] = loss if math.isfinite(loss) else None
        session.say(f"held-out loss {when}: {loss:.4f} (perplexity {math.exp(min(loss, 700)):.2f})")
    text = generate_text(built.model, session.tokenizer, session.prompt, SAMPLE_TOKENS, Sampling())
    results[f"sample_{when}"] = text
    session.say(f"sample {when}: {session.tokenizer.decode(session.prompt)!r} -> {text!r}")
    return results
