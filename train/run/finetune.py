"""`wgrad finetune`: train an adapter (or with --full a whole model) into the output folder."""

from __future__ import annotations

import time
from dataclasses import replace

from wgrad.device.errors import WgradError
from wgrad.device.lost import lost_in
from wgrad.device.shown import short
from wgrad.train.model.adapter_config import CONFIG_FILE as ADAPTER_CONFIG
from wgrad.train.options.finetune_config import CONFIG_FILE, FinetuneConfig
from wgrad.train.output.checkpoints import Checkpoints
from wgrad.train.output.previous_run import Previous, previous_run
from wgrad.train.output.reports import check_installed
from wgrad.train.output.run_outputs import RunOutputs
from wgrad.train.ranks.launch import REQUEST
from wgrad.train.ranks.start import open_world
from wgrad.train.ranks.world import World
from wgrad.train.run.caller import PythonCaller
from wgrad.train.run.recovery import Losses
from wgrad.train.run.session import open_session
from wgrad.train.run.whole_run import WholeRun
from wgrad.train.step.activations import recomputes_all
from wgrad.train.step.memory import advising, for_steps
from wgrad.train.terminal.interrupts import Interrupts
from wgrad.train.terminal.output import say_ending


def run_finetune(config: FinetuneConfig, caller: PythonCaller | None = None) -> int:
    """Train as `config` says, together with the other ranks if there are any, and return exit status 0.

    Raises WgradError, DeviceError, Interrupted (its state is saved), RankFailure, and what a callback raises."""
    tell = say_ending if caller is None else None  # a Python caller gets the exception
    caller = caller or PythonCaller()
    caller.hooks.check(config)
    with open_world(tell) as world:
        caller.check_ranks(world.size)
        return _run(config, world, caller)


def _run(config: FinetuneConfig, world: World, caller: PythonCaller) -> int:
    begun = time.monotonic()
    outputs = RunOutputs(config.out, world, caller.silent)
    request = () if world.alone or REQUEST is None else (int(REQUEST),)
    with Interrupts(outputs.say, request, not caller.silent) as interrupts, world.sharing_errors(), outputs:
        previous = world.broadcast(lambda: _open(config, outputs), "the output folder")
        if previous.finished:
            if world.is_main_process:
                more = (
                    "a larger --early-stopping-patience goes on"
                    if previous.stopped
                    else "more --max-steps or --epochs extend it"
                )
                outputs.say(f"{config.out}: this run is finished: nothing to resume; {more}")
            return 0
        checkpoints = Checkpoints(config.out)
        state = world.broadcast(checkpoints.load, "the checkpoint") if config.resume else None
        for path, reason in checkpoints.damaged.items():
            outputs.display.say(f"note: {path} is damaged ({reason}): the one before it is used")
        session = open_session(config, world, outputs.display, caller, state.info.mode if state else None)
        session.say(config.summary())
        interrupts.answer = session.say
        if config.resume and state is None and (outputs.folder.path / CONFIG_FILE).exists():
            session.say(f"note: {config.out} has no checkpoint to resume from: the run begins anew")
        run = WholeRun(session, world, outputs, checkpoints, interrupts, previous, state, begun, caller)
        losses = Losses(config, world)
        with advising(for_steps(config, recomputes_all(replace(config, **session.mode), session.model_config))):
            while (lost := lost_in(run.run)) is not None:
                run = run.after(lost, losses)
    return 0


def _check_model_name(config: FinetuneConfig) -> None:
    """Raise WgradError if an adapter's configuration could not name its base model."""
    try:
        config.model.encode()
    except UnicodeEncodeError as error:
        if not config.full:
            raise WgradError(
                f"--model: {short(config.model)} is not UTF-8, so {ADAPTER_CONFIG} could not name it: rename it, "
                "or give a link to it"
            ) from error


def _open(config: FinetuneConfig, outputs: RunOutputs) -> Previous:
    check_installed(config.report_to)
    _check_model_name(config)
    outputs.open()
    if outputs.folder.left_by:
        outputs.say(f"note: {config.out} was locked by {outputs.folder.left_by}, which has ended: lock taken over")
    return previous_run(config)
