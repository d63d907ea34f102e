"""`wgrad finetune`: from a configuration to an adapter (or with --full a whole model) in the output folder."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

import wgrad
from wgrad.device.errors import UnusableResult, WgradError
from wgrad.train.options.finetune_config import CONFIG_FILE, FinetuneConfig, RunOptions
from wgrad.train.options.options import flag
from wgrad.train.ranks.alike import check_alike, table
from wgrad.train.ranks.deal import even_shares
from wgrad.train.ranks.launch import REQUEST
from wgrad.train.ranks.start import open_world
from wgrad.train.ranks.world import World
from wgrad.train.run.build import build_optimizer, wants_recompute
from wgrad.train.run.checkpoints import Checkpoints, TrainingState, check_info
from wgrad.train.run.evaluation import Evaluation
from wgrad.train.run.loop import Run, not_finite, what_to_try
from wgrad.train.run.memory_advice import SMALLER_MODEL, advising, for_parameters, for_steps
from wgrad.train.run.metrics import MetricsFile
from wgrad.train.run.outlets import Outlets
from wgrad.train.run.previous_run import RESULTS_FILE, Previous, previous_run
from wgrad.train.run.result import save_session_adapter, say_done, write_results, write_trained
from wgrad.train.run.schedule import learning_rate
from wgrad.train.run.session import Session, build_session, memory_line, open_session, prepare_session, run_info
from wgrad.train.run.trainer import Trainer
from wgrad.train.terminal.interrupts import Interrupted, Interrupts
from wgrad.train.terminal.output import say
from wgrad.train.terminal.progress import TrainingProgress


def run_finetune(config: FinetuneConfig) -> int:
    """Train as `config` says, with the other ranks if this process is one of several. -> 0. Raises WgradError or a
    device's error, with a message for the user; Interrupted; RankFailure."""
    with open_world() as world:
        return _run(config, world)


def _run(config: FinetuneConfig, world: World) -> int:
    begun = time.monotonic()
    request = () if world.alone or REQUEST is None else (int(REQUEST),)
    with Interrupts(say, request) as interrupts, world.sharing_errors(), Outlets(config.out, world) as outlets:
        previous = world.by_first(lambda: _open(config, outlets), "the output folder")
        if previous.finished:
            if world.speaks:
                say(f"{config.out}: this run is finished: nothing to resume; more --max-steps or --epochs prolong it")
            return 0
        checkpoints = Checkpoints(config.out)
        state = world.by_first(checkpoints.load, "the checkpoint") if config.resume else None
        for path, reason in checkpoints.damaged.items():
            outlets.display.say(f"note: {path} is damaged ({reason}): the one before it is used")
        session = open_session(config, world, outlets.display)
        session.say(config.summary())
        interrupts.answer = session.say
        if config.resume and state is None and (outlets.folder.path / CONFIG_FILE).exists():
            session.say(f"note: {config.out} has no checkpoint to resume from: the run begins anew")
        with advising(for_steps(config, wants_recompute(session.config, session.model_config))):
            _Finetuning(session, world, outlets, checkpoints, interrupts, previous, state, begun).run()
    return 0


def _open(config: FinetuneConfig, outlets: Outlets) -> Previous:
    outlets.open()
    if outlets.folder.left_by:
        say(f"note: {config.out} was left locked by {outlets.folder.left_by}, which is no more: taken over")
    return previous_run(config)


@dataclass
class _Finetuning:
    """A run whose model, data and place in the data are known."""

    session: Session
    world: World
    outlets: Outlets
    checkpoints: Checkpoints
    interrupts: Interrupts
    previous: Previous
    state: TrainingState | None
    counted: float  # time.monotonic() up to which results["seconds"] goes

    def run(self) -> None:
        session, stream, world = self.session, self.session.stream, self.world
        self.info = run_info(session)
        self._compare_ranks()
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
        self.trainer = Trainer(self.built.model, self.optimizer, config, world)
        if self.state is not None:
            self._restore(self.state)
        self._compare_starts()
        world.by_first(lambda: begun.save(begun.out), CONFIG_FILE)
        evaluation = Evaluation(session, self.trainer, self.built)
        self.results: dict[str, Any] = self.state.info["results"] if self.state is not None else {}
        if self.state is None:
            self.results |= evaluation.measure("before")
        _start_profile(session)
        done = stream.step
        session.say(f"training: {stream.total_steps - done} steps, {len(stream.documents)} documents")
        with MetricsFile(config.out, done, writes=world.speaks) as metrics:
            self.outlets.metrics = metrics
            self._train(metrics, done)
            self.results |= evaluation.measure("after")
            self._count_seconds()
            skipped = self.optimizer.skipped()
            world.by_first(lambda: write_results(session, metrics, self.results, skipped), RESULTS_FILE)
        say_done(session, self.results, skipped, plan)

    def _compare_ranks(self) -> None:
        """WgradError where a rank was started for another run; else the table of ranks."""
        session, world = self.session, self.world
        if world.alone:
            return
        config, info = session.config, self.info
        if config.accumulate < world.size:
            raise WgradError(
                f"--accumulate: a step of {config.accumulate} micro-batches cannot be shared by {world.size} ranks: "
                f"give --accumulate {world.size} or more (with a smaller --batch-size the step stays as large), or "
                "start fewer ranks"
            )
        kinds = ("adapter", "training")
        same = [f for f in fields(RunOptions) if not f.metadata["path"] and f.metadata["group"] in kinds]
        values = {flag(f.name): getattr(config, f.name) for f in same} | {"--save-every": config.save_every}
        values |= info["run"] | {"the training data": info["data"], "wgrad": wgrad.__version__}
        check_alike(world, values)
        for line in table(world, session.device.description, even_shares(config.accumulate, world.size)):
            session.say(line)
        if not world.tolerant:
            session.say("note: a lost rank ends this run, which then goes on from its last checkpoint with --resume")

    def _compare_starts(self) -> None:
        """WgradError where a rank begins with other numbers, as of another --adapter or checkpoint."""
        if not self.world.alone:
            digest = hashlib.blake2b(digest_size=16)
            for array in self.optimizer.state_arrays().values():
                digest.update(array.tobytes())
            check_alike(self.world, {"--adapter or --resume": digest.hexdigest()})

    def _restore(self, state: TrainingState) -> None:
        session = self.session
        check_info(state, self.info)
        session.stream.restore(state.step, state.info["data"])
        try:
            self.optimizer.load_state_arrays(state.arrays)
        except (KeyError, ValueError) as error:
            raise WgradError(f"--resume: {state.path} is of another run ({error}): choose another --out") from error
        if self.trainer.diloco is not None:
            self.trainer.diloco.restore(state.arrays)
        self.trainer.data_parallel.shares.restore(state.info.get("shares", {}))
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
                    self.world.steps_begin()
                    run.train()
                    self.world.steps_end()
                    self._check_result()
                    with interrupts.writing(), session.display.phase("saving the result"):
                        metrics.sync()
                        self.world.by_first(lambda: write_trained(session, self.built), "the result")
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
        if self.trainer.diloco is not None:
            self.trainer.diloco.share_moments()
        self.world.by_first(lambda: self._save_here(done), "a checkpoint")

    def _save_here(self, done: int) -> None:
        session = self.session
        arrays = self.optimizer.state_arrays()
        if self.trainer.diloco is not None:
            arrays |= self.trainer.diloco.arrays()
        if not np.isfinite(arrays["parameters"]).all():
            raise not_finite(done, session.config)
        self._count_seconds()
        extra = {
            "results": self.results,
            "shares": {str(rank): seconds for rank, seconds in self.trainer.data_parallel.shares.seconds.items()},
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
