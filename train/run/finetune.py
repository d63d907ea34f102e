"""`wgrad finetune`: from a configuration to an adapter (or with --full a whole model) in the output folder."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from wgrad.device.errors import UnusableResult, WgradError
from wgrad.train.options.finetune_config import CONFIG_FILE, FinetuneConfig
from wgrad.train.run.build import build_optimizer, wants_recompute
from wgrad.train.run.checkpoints import Checkpoints, TrainingState, check_info
from wgrad.train.run.evaluation import Evaluation
from wgrad.train.run.loop import Run, not_finite, what_to_try
from wgrad.train.run.memory_advice import SMALLER_MODEL, advising, for_parameters, for_steps
from wgrad.train.run.metrics import MetricsFile
from wgrad.train.run.out_folder import OutFolder
from wgrad.train.run.previous_run import Previous, previous_run
from wgrad.train.run.result import save_session_adapter, say_done, write_results, write_trained
from wgrad.train.run.schedule import learning_rate
from wgrad.train.run.session import Session, build_session, memory_line, open_session, prepare_session, run_info
from wgrad.train.run.trainer import Trainer
from wgrad.train.terminal.interrupts import Interrupted, Interrupts
from wgrad.train.terminal.output import say
from wgrad.train.terminal.progress import TrainingProgress


def run_finetune(config: FinetuneConfig) -> int:
    """Train as `config` says. -> 0. Raises WgradError or a device's error, with a message for the user; Interrupted."""
    begun = time.monotonic()
    with Interrupts(say) as interrupts, OutFolder(config.out) as folder:
        if folder.left_by:
            say(f"note: {config.out} was left locked by {folder.left_by}, which is no more: taken over")
        previous = previous_run(config)
        if previous.finished:
            say(f"{config.out}: this run is finished: nothing to resume; more --max-steps or --epochs prolong it")
            return 0
        checkpoints = Checkpoints(config.out)
        state = checkpoints.load() if config.resume else None
        for path, reason in checkpoints.damaged.items():
            say(f"note: {path} is damaged ({reason}): the one before it is used")
        session = open_session(config)
        session.say(config.summary())
        interrupts.answer = session.say
        if config.resume and state is None and (folder.path / CONFIG_FILE).exists():
            session.say(f"note: {config.out} has no checkpoint to resume from: the run begins anew")
        with advising(for_steps(config, wants_recompute(session.config, session.model_config))):
            _Finetuning(session, checkpoints, interrupts, previous, state, begun).run()
    return 0


@dataclass
class _Finetuning:
    """A run whose model, data and place in the data are known."""

    session: Session
    checkpoints: Checkpoints
    interrupts: Interrupts
    previous: Previous
    state: TrainingState | None
    counted: float  # time.monotonic() up to which results["seconds"] goes

    def run(self) -> None:
        session, stream = self.session, self.session.stream
        # What an adapter is to be (rank, scale) is the checkpoint's word: the folder of --adapter may have changed.
        begun = session.config
        adapter = str(self.state.path) if self.state is not None and begun.adapter else begun.adapter
        config = replace(begun, adapter=adapter, seq_len=session.row_tokens)
        plan = prepare_session(session, config)
        if plan is not None:
            config = replace(config, stream_weights=plan.config.stream_weights)
        with advising(SMALLER_MODEL):
            self.built = build_session(session, config)
        session.say(memory_line(session, plan, self.built))
        with advising(for_parameters(config)):
            self.optimizer = build_optimizer(config, self.built.parameters)
        self.trainer = Trainer(self.built.model, self.optimizer, config)
        self.info = run_info(session)
        if self.state is not None:
            self._restore(self.state)
        begun.save(begun.out)
        evaluation = Evaluation(session, self.trainer, self.built)
        self.results: dict[str, Any] = self.state.info["results"] if self.state is not None else {}
        if self.state is None:
            self.results |= evaluation.measure("before")
        _start_profile(session)
        done = stream.step
        session.say(f"training: {stream.total_steps - done} steps, {len(stream.documents)} documents")
        with MetricsFile(config.out, done) as metrics:
            self._train(metrics, done)
            self.results |= evaluation.measure("after")
            self._count_seconds()
            write_results(session, metrics, self.results, self.optimizer.skipped())
        say_done(session, self.results, self.optimizer.skipped(), plan)

    def _restore(self, state: TrainingState) -> None:
        session = self.session
        check_info(state, self.info)
        session.stream.restore(state.step, state.info["data"])
        try:
            self.optimizer.load_state_arrays(state.arrays)
        except (KeyError, ValueError) as error:
            raise WgradError(f"--resume: {state.path} is of another run ({error}): choose another --out") from error
        session.say(f"resuming from {state.path}")
        before, now = state.info["schedule"], _schedule(session)
        if before != now:
            total, config = session.stream.total_steps, session.config
            ended = f", prolonged from {self.previous.ended_at}" if self.previous.ended_at else ""
            first = min(state.step, total - 1)
            session.say(
                f"schedule: {total} steps in all{ended} (was {before['steps']}); {config.schedule} from a peak of "
                f"{config.lr:g}; step {first + 1} has learning rate {learning_rate(config, first, total):.2e}"
            )

    def _train(self, metrics: MetricsFile, done: int) -> None:
        """The steps that are left, then at once what they were for: the result, and a checkpoint of the last step."""
        session, stream, interrupts = self.session, self.session.stream, self.interrupts
        progress = TrainingProgress(
            stream.total_steps,
            done,
            session.config.log_every,
            display=session.display,
            memory=lambda: session.device.memory().reserved_bytes,
        )
        with interrupts.steps():
            with progress:
                run = Run(self.trainer, stream, metrics, progress, self._save, interrupts)
                try:
                    run.train()
                    self._check_result()
                    with interrupts.writing(), session.display.phase("saving the result"):
                        metrics.sync()
                        write_trained(session, self.built)
                        self._save(stream.total_steps)
                finally:
                    run.say()
            if interrupts.asked is not None:
                raise Interrupted(
                    interrupts.asked,
                    f"interrupted after the last step: what was trained is in {session.out}; --resume measures the "
                    "held-out loss",
                )

    def _save(self, done: int) -> None:
        session = self.session
        arrays = self.optimizer.state_arrays()
        if not np.isfinite(arrays["parameters"]).all():
            raise not_finite(done, session.config)
        self._count_seconds()
        extra = {
            "results": self.results,
            "schedule": _schedule(session),
            **self.info,
        }
        adapter = None if session.config.full else (lambda folder: save_session_adapter(session, self.built, folder))
        with self.interrupts.writing(), session.display.phase("saving a checkpoint"):
            self.checkpoints.save(done, arrays, extra, adapter)

    def _count_seconds(self) -> None:
        """Bring the run's time up to now: of all its parts, from the first loading on."""
        now = time.monotonic()
        self.results["seconds"] = self.results.get("seconds", 0.0) + now - self.counted
        self.counted = now

    def _check_result(self) -> None:
        """UnusableResult where the last step leaves nothing that is worth a file."""
        total, config = self.session.stream.total_steps, self.session.config
        if not self.optimizer.finite():
            raise not_finite(total, config)
        if not self.optimizer.applied():
            raise UnusableResult(
                f"all {total} steps were skipped, because no gradient was finite: nothing was learnt, and no result is "
                f"written: {what_to_try(config)}"
            )


def _schedule(session: Session) -> dict[str, Any]:
    """What decides the learning rate of a step; kept in checkpoints, so that a change can be told."""
    config = session.config
    return {
        "steps": session.stream.total_steps,
        "lr": config.lr,
        "schedule": config.schedule,
        "warmup": config.warmup,
    }


def _start_profile(session: Session) -> None:
    """--profile: from here on each kernel is timed (which costs some speed)."""
    if session.config.profile:
        if not session.device.profile():
            session.say(f"note: --profile has no effect: {session.device.description} has no kernels to time")
