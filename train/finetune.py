"""`wgrad finetune`: from a configuration to an adapter (or with --full a whole checkpoint) in the output folder."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from wgrad.autograd.errors import UnusableResult, WgradError
from wgrad.train.build import TrainableModel, wants_checkpointing
from wgrad.train.checkpoint_files import Checkpoints, TrainingState, check_info
from wgrad.train.config import CONFIG_FILE, FinetuneConfig
from wgrad.train.generate import Sampling, generate_text
from wgrad.train.interrupts import Interrupted, Interrupts
from wgrad.train.loop import Run, Trainer, not_finite, what_to_try
from wgrad.train.memory_advice import SMALLER_MODEL, advising, for_parameters, for_steps
from wgrad.train.metrics import MetricsFile
from wgrad.train.optim import AdamW
from wgrad.train.out_folder import OutFolder
from wgrad.train.output import say
from wgrad.train.packing import Batch, eval_batches
from wgrad.train.previous_run import Previous, previous_run
from wgrad.train.progress import TrainingProgress
from wgrad.train.result import save_session_adapter, say_done, write_results, write_trained
from wgrad.train.schedule import learning_rate
from wgrad.train.session import SAMPLE_TOKENS, Session, build_session, open_session, run_info


def run_finetune(config: FinetuneConfig) -> int:
    """Train as `config` says. -> 0. Raises WgradError or a device's error, with a message for the user; Interrupted."""
    config.require()
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
        with advising(for_steps(config, wants_checkpointing(config, session.model_config))):
            _Finetuning(session, checkpoints, interrupts, previous, state).run()
    return 0


@dataclass
class _Finetuning:
    """A run whose model, data and place in the data are known."""

    session: Session
    checkpoints: Checkpoints
    interrupts: Interrupts
    previous: Previous
    state: TrainingState | None

    def run(self) -> None:
        session, config, stream = self.session, self.session.config, self.session.stream
        # What an adapter is to be (rank, scale) is the checkpoint's word: the folder of --adapter may have changed.
        adapter = str(self.state.path) if self.state is not None and config.adapter else config.adapter
        with advising(SMALLER_MODEL):
            self.built = build_session(session, replace(config, adapter=adapter))
        with advising(for_parameters(config)):
            self.optimizer = AdamW(
                self.built.parameters,
                weight_decay=config.weight_decay,
                max_grad_norm=config.max_grad_norm,
                scale_loss=config.compute == "float16",
            )
        self.trainer = Trainer(self.built.model, self.optimizer, config)
        self.info = run_info(session)
        if self.state is not None:
            self._restore(self.state)
        config.save(config.out)
        self.held_out = eval_batches(session.data.held_out, config, session.tokenizer.pad_id or 0)
        self.results: dict[str, Any] = self.state.info["results"] if self.state is not None else {}
        if self.state is None:
            self.results |= _measure(session, self.trainer, self.built, self.held_out, "before")
        _start_profile(session)
        done = stream.step
        session.say(f"training: {stream.total_steps - done} steps, {len(stream.documents)} documents")
        with MetricsFile(config.out, done) as metrics:
            self._train(metrics, done)
            self.results |= _measure(session, self.trainer, self.built, self.held_out, "after")
            write_results(session, metrics, self.results, self.optimizer.skipped())
        say_done(session, self.results, self.optimizer.skipped())

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
        self._earlier, self._begun = self.results.get("seconds", 0.0), time.monotonic()
        with interrupts.steps():
            with TrainingProgress(stream.total_steps, done, session.config.log_every, session.console) as progress:
                run = Run(self.trainer, stream, metrics, progress, self._save, interrupts)
                try:
                    run.train()
                    self._check_result()
                    with interrupts.writing():
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
        self.results["seconds"] = self._earlier + time.monotonic() - self._begun
        extra = {
            "results": self.results,
            "stream": session.stream.state(),
            "schedule": _schedule(session),
            **self.info,
        }
        adapter = None if session.config.full else (lambda folder: save_session_adapter(session, self.built, folder))
        with self.interrupts.writing():
            self.checkpoints.save(done, arrays, extra, adapter)

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
        profile = getattr(session.device, "profile", None)
        if profile is None:
            session.say(f"note: --profile has no effect: {session.device.description} has no kernels to time")
        else:
            profile(True)


def _measure(
    session: Session, trainer: Trainer, built: TrainableModel, held_out: list[Batch], when: str
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
