"""A fine-tuning run from its plan to its result."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from wgrad.device.errors import DeviceLost, WgradError
from wgrad.device.shown import counted
from wgrad.train.data.tokenizer_files import TEMPLATE_FILE
from wgrad.train.data.tokenizer_source import save_template
from wgrad.train.options.choices import LORA
from wgrad.train.options.finetune_config import CONFIG_FILE, FinetuneConfig
from wgrad.train.output.callbacks import SaveReport
from wgrad.train.output.checkpoints import Checkpoints, TrainingState, check_info
from wgrad.train.output.metrics import MetricsFile, SamplesFile
from wgrad.train.output.previous_run import RESULTS_FILE, Previous
from wgrad.train.output.reports import Reports
from wgrad.train.output.run_outputs import KeptOut, RunOutputs
from wgrad.train.plan.plan import Plan
from wgrad.train.ranks.world import World
from wgrad.train.run.build_session import build_session, check_session, memory_line, prepare_session
from wgrad.train.run.caller import PythonCaller
from wgrad.train.run.compare_ranks import compare_ranks, compare_starts
from wgrad.train.run.disk_room import check_disk
from wgrad.train.run.evaluation import Evaluation, Measured
from wgrad.train.run.kept_state import KeptState
from wgrad.train.run.loop import Run, check_result, not_finite
from wgrad.train.run.recovery import Losses
from wgrad.train.run.result import (
    next_commands,
    save_session_adapter,
    say_done,
    start_profile,
    write_results,
    write_trained,
)
from wgrad.train.run.schedule import schedule_note, schedule_of
from wgrad.train.run.scheduled import BestSteps, Scheduled
from wgrad.train.run.session import Session, run_info
from wgrad.train.run.sweep import Sweep
from wgrad.train.step.build import build_optimizer
from wgrad.train.step.memory import SMALLER_MODEL, advising, for_parameters
from wgrad.train.step.trainer import Trainer
from wgrad.train.terminal.interrupts import Interrupted, Interrupts
from wgrad.train.terminal.progress import TrainingProgress


@dataclass
class WholeRun:
    """A run whose model and data are open. `run` goes from the plan to the result, `after` from a lost device on."""

    session: Session
    world: World
    outputs: RunOutputs
    checkpoints: Checkpoints
    interrupts: Interrupts
    previous: Previous
    state: TrainingState | None
    counted: float  # time.monotonic() up to which results["seconds"] counts
    caller: PythonCaller
    lost_before: bool = False  # whether its device was lost before
    saved: bool = False  # whether it has saved a checkpoint
    kept: KeptState | None = field(default=None, init=False)

    def run(self) -> None:
        session, world = self.session, self.world
        config, plan = self._plan()
        begun = session.config  # planning may have settled it anew
        self._build(config, plan)
        if config.lr_sweep:
            Sweep(session, self.trainer, Evaluation(session, self.trainer, self.built), self.interrupts).run()
            return
        world.broadcast(lambda: begun.save(begun.out), CONFIG_FILE)
        if begun.chat_template is not None:  # for checkpoints, and for a resumed run when the file is gone
            world.broadcast(lambda: save_template(session.tokenizer, session.out), TEMPLATE_FILE)
        self.kept_out = KeptOut(self.outputs, begun, session.say)
        with ExitStack() as files:
            self._begin(files)
            self._train(session.stream.step)
            skipped = self.optimizer.skipped()
            self._measure_result()
            self._count_seconds()
            world.broadcast(lambda: self._write_results(skipped), RESULTS_FILE)
        self.kept_out.tell()
        say_done(session, self.results, skipped, plan)
        if self.results.get("held_out_loss_after", 0.0) is None:
            session.say(
                "note: the held-out loss is not finite, so this result is of no use: train anew, in another --out and "
                f"with a lower --learning-rate than {begun.learning_rate:g}"
            )
            return
        for line in next_commands(begun, session.tokenizer.has_chat_template, bool(session.model_config.gguf)):
            session.say(line)

    def _build(self, config: FinetuneConfig, plan: Plan | None) -> None:
        """Load the model and build its trainer, in the state of the checkpoint to resume from, if any."""
        session, world = self.session, self.world
        if plan is not None:
            settled = plan.config
            config = replace(config, stream_weights=settled.stream_weights, resident_layers=settled.resident_layers)
            self._check_disk(plan.trained)
        with advising(SMALLER_MODEL):
            self.built = build_session(session, config)
        if plan is None:
            self._check_disk(self.built.parameters.size)
        session.say(memory_line(session, plan, self.built))
        with advising(for_parameters(config)):
            self.optimizer = build_optimizer(config, self.built.parameters)
        self.trainer = Trainer(self.built.model, self.optimizer, config, world, self.caller.hooks.loss, session.say)
        reopens = session.device.reopens or session.device.needs_new_process or not world.alone
        self.kept = KeptState(self.optimizer, self._info_now, session.display.clock, self.lost_before, reopens)
        if self.state is not None:
            self._restore(self.state)
        compare_starts(self.optimizer, world)

    def _begin(self, files: ExitStack) -> None:
        """Open the files and reports of the run until `files` closes, and measure where a new run begins."""
        session, config, stream, state = self.session, self.session.config, self.session.stream, self.state
        callbacks, writes = self.caller.callbacks, self.world.is_main_process
        begun_at = None if state is None else stream.step
        reports = Reports(config.report_to, config.out, config.to_dict(), begun_at, session.say, writes)
        self.outputs.records.append(files.enter_context(reports))
        callbacks.listen(reports)
        samples = None
        if config.sample:
            samples = files.enter_context(SamplesFile(config.out, begun_at, writes=writes))
            self.outputs.records.append(samples)
        self.evaluation = Evaluation(session, self.trainer, self.built, samples, callbacks, self.caller.hooks)
        self.results: dict[str, Any] = state.info.results if state is not None else {}
        before = self._say(self.evaluation.measure(0, "before")) if state is None else None
        self.results |= before.results("before") if before is not None else {}
        start_profile(session)
        left = stream.total_steps - stream.step
        session.say(f"training: {counted(left, 'step')}, {counted(len(stream.documents), 'example')}")
        self.metrics = files.enter_context(MetricsFile(config.out, begun_at, writes=writes))
        self.outputs.records.append(self.metrics)
        if before is not None and before.loss is not None:
            self.metrics.write_held_out(0, before.loss, before.metrics)
        callbacks.listen(self.kept_out)
        for file in (self.metrics, samples):
            if file is not None and file.invalid:
                lines = counted(file.invalid, "line is no record", "lines are no records")
                session.say(f"note: {file.path}: {lines} of a run: left out")
        self.best = BestSteps(config, state.info.held_out if state is not None else ())

    def _plan(self) -> tuple[FinetuneConfig, Plan | None]:
        """Plan the run and check its operators. Return its options, with the adapter to start from, and the plan."""
        session = self.session
        while True:
            self.info = run_info(session, own_loss=self.caller.hooks.loss is not None)
            compare_ranks(session, self.world, self.info, shown=not self.lost_before)
            # A resumed run takes the adapter's rank and scale from its checkpoint, because the folder of --adapter may
            # have changed since. The same goes for the start values of --init-lora-weights.
            begun = session.config
            held = self.state is not None and (begun.adapter or begun.init_lora_weights != LORA)
            adapter = str(self.state.path) if self.state is not None and held else begun.adapter
            config = replace(begun, adapter=adapter, max_length=session.row_tokens, **session.mode)
            plan = prepare_session(session, config)
            if not check_session(session, plan, self.world):
                return config, plan

    def _check_disk(self, trained: int) -> None:
        config, steps = self.session.config, self.session.stream.total_steps - (self.state.step if self.state else 0)
        if note := self.world.broadcast(lambda: check_disk(config, trained, steps), "the output folder"):
            self.session.say(f"note: {note}")

    def _say(self, measured: Measured) -> Measured:
        for line in measured.lines:
            self.session.say(line)
        return measured

    def _measure_result(self) -> None:
        """Measure the run's result; with --keep-best, the best step becomes the result and is saved."""
        session, best, step = self.session, self.best, self.session.stream.step
        short = step < session.stream.total_steps
        keeps, stopped = session.config.best_kept, best.stop and short
        measured = self.evaluation.measure(step, f"at step {step}" if keeps else "after", best.losses.get(step))
        if measured.loss is not None:
            self.metrics.write_held_out(step, measured.loss, measured.metrics)
            if session.config.eval_steps:
                best.losses[step] = measured.loss
        if keeps:
            session.say(measured.lines[0])
            step = self._write_best(step)
            measured = self.evaluation.measure(step, "after", best.losses[step])
        self.results |= self._say(measured).results("after") | {
            "result_step": step,
            "stopped_early": session.config.early_stopping_patience if stopped else None,
            "stopped_by_callback": short and not stopped,
        }

    def _write_best(self, last: int) -> int:
        """Write the best step that has a usable checkpoint, else the last one, and return its number."""
        session, best = self.session, self.best
        step = next((step for step in best.best() if step == last or self._load(step)), last)
        with self.interrupts.writing(), session.display.phase("saving the result"):
            self.world.broadcast(lambda: write_trained(session, self.built), "the result")
            self.world.broadcast(lambda: self.checkpoints.prune(best.kept()), "the best checkpoints")
        session.say(f"best: step {step}, of {len(best.losses)} measured; that is what {session.out} holds")
        return step

    def _load(self, step: int) -> bool:
        """Load the parameters of a checkpoint and return whether it was intact."""
        arrays = self.world.broadcast(lambda: self.checkpoints.arrays_of(step), "the best checkpoint")
        try:
            if arrays is not None:
                self.optimizer.load_state_arrays(arrays)
                return True
        except (KeyError, ValueError):
            pass
        self.session.say(f"note: the checkpoint of step {step} is damaged or gone: the next best step is used")
        return False

    def _restore(self, state: TrainingState) -> None:
        session = self.session
        check_info(state, self.info)
        session.stream.restore(state.step, state.info.data)
        try:
            self.optimizer.load_state_arrays(state.arrays)
        except (KeyError, ValueError) as error:
            raise WgradError(f"--resume: {state.path} is of another run ({error}): choose another --out") from error
        self.trainer.data_parallel.shares.restore(state.info.shares)
        session.say(f"resuming from {state.path}")
        total, ended_at = session.stream.total_steps, self.previous.ended_at
        if note := schedule_note(session.config, total, state.step, state.info.schedule, ended_at):
            session.say(note)

    def _train(self, done: int) -> None:
        """Run the remaining steps, then save the result at once (with --keep-best after the last evaluation), and a
        checkpoint of the last step."""
        session, stream, interrupts = self.session, self.session.stream, self.interrupts
        progress = TrainingProgress(
            stream.total_steps,
            done,
            session.config.logging_steps,
            display=session.display,
            memory=lambda: session.device.memory().reserved_bytes,
        )
        with interrupts.steps():
            with progress:
                alone = self.world.alone  # several ranks end together, at a step
                asked = lambda: alone and interrupts.asked is not None  # noqa: E731
                scheduled = Scheduled(self.evaluation, self.metrics, self.best, asked)
                callbacks = self.caller.callbacks
                between = (scheduled, callbacks, self.kept)
                run = Run(self.trainer, stream, self.metrics, progress, self._save, interrupts, *between)
                try:
                    self.world.steps_begin()
                    run.train()
                    self.world.steps_end()
                    check_result(self.optimizer, stream.step, session.config)
                    with interrupts.writing(), session.display.phase("saving the result"):
                        self.world.broadcast(self.kept_out.check, "the output folder")
                        self.metrics.sync()
                        if not session.config.best_kept:
                            self.world.broadcast(lambda: write_trained(session, self.built), "the result")
                        self._save(stream.step)
                finally:
                    run.say()
            if interrupts.asked is not None:
                where = "saved" if session.config.best_kept else f"in {session.out}"
                what = f"what was trained is {where}; --resume measures the held-out loss"
                raise Interrupted(interrupts.asked, f"interrupted after the last step: {what}")
        if stream.step < stream.total_steps:
            by_callback = f"stopped by a callback after step {stream.step}"
            session.say(self.best.why_stopped() if self.best.stop else by_callback)

    def _save(self, done: int) -> None:
        folder = self.world.broadcast(lambda: self._save_here(done), "a checkpoint")
        self.saved = True
        self.caller.callbacks.save(SaveReport(done, folder))

    def _save_here(self, done: int) -> Path:
        session = self.session
        self.kept_out.check()
        arrays = self.optimizer.state_arrays()
        if not np.isfinite(arrays["parameters"]).all():
            raise not_finite(done, session.config)
        info = self._info_now()
        path = self._save_state(done, arrays, info)
        if self.kept is not None:
            self.kept.saved(path, done, arrays, info)
        return path

    def _info_now(self) -> dict[str, Any]:
        """Return the current contents of trainer.json for a checkpoint."""
        self._count_seconds()
        return {
            "results": dict(self.results),
            "shares": {str(rank): seconds for rank, seconds in self.trainer.data_parallel.shares.seconds.items()},
            "schedule": msgspec.to_builtins(schedule_of(self.session.config, self.session.stream.total_steps)),
            "held_out": self.best.saved(),
            **self.info | {"mode": self.session.mode},
        }

    def _save_state(self, step: int, arrays: dict[str, np.ndarray], info: Mapping[str, Any]) -> Path:
        session, flat = self.session, arrays["parameters"]
        save = None if session.config.full else (lambda to: save_session_adapter(session, self.built, to, flat))
        with self.interrupts.writing(), session.display.phase("saving a checkpoint"):
            path = self.checkpoints.save(step, arrays, info, save, self.best.kept())
        return path

    def after(self, lost: DeviceLost, losses: Losses) -> WholeRun:
        """Return the run to continue with from the newest state, on the reopened device. DeviceLost: it gives up."""
        session, world, step = self.session, self.world, self.session.stream.step
        session.say(f"note: {lost}")
        world.regroup(lost)
        state = world.broadcast(self._newest, "the newest state")
        seconds = getattr(self, "results", {}).get("seconds", 0.0)
        if state is not None:
            state.info.results["seconds"] = seconds
        session.stream.step = 0 if state is None else state.step
        self.outputs.records.clear()
        self.caller.callbacks.forget_listeners()
        for name in ("built", "optimizer", "trainer", "evaluation", "kept"):
            self.__dict__.pop(name, None)
        session.device = losses.reopened(session.device, lost, step, state, session.say)
        counted = self.counted if state is not None else self.counted - seconds
        return replace(self, state=state, counted=counted, lost_before=True)

    def _newest(self) -> TrainingState | None:
        """Return the newest state, saved as a checkpoint; None: the run has to start over."""
        if self.kept is None:
            return self.state
        if not self.kept.enabled:
            return self.checkpoints.load() if self.saved else self.state
        return self.kept.in_checkpoint(self._save_state) or self.state

    def _write_results(self, skipped: int) -> None:
        session = self.session
        if self.kept_out.check():  # somebody removed the folder, and the result with it
            write_trained(session, self.built)
            if not session.config.best_kept:  # else the model holds another step by now
                self._save_here(session.stream.step)
        write_results(session, self.metrics, self.results, skipped)

    def _count_seconds(self) -> None:
        """Add the time since the last call to the run's total, which starts with loading."""
        now = time.monotonic()
        self.results["seconds"] = self.results.get("seconds", 0.0) + now - self.counted
        self.counted = now
