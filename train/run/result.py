"""Results of a run in its folder: the adapter (or with --full a whole model), loss.svg and results.json."""

from __future__ import annotations

import shlex
import shutil
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from wgrad.autograd.matrix_units import left_idle
from wgrad.device.files import write_json, write_text
from wgrad.device.shown import counted
from wgrad.train.data.tokenizer_source import find_source, save_tokenizer
from wgrad.train.files.hub import is_hub_id
from wgrad.train.model.adapter_files import save_adapter
from wgrad.train.model.qat import QAT_MIXES
from wgrad.train.model.save_model import save_full
from wgrad.train.model.weights import whole_modules
from wgrad.train.options.finetune_config import RunOptions
from wgrad.train.options.option_text import size
from wgrad.train.output.card_use import Contents
from wgrad.train.output.loss_curve import LOSS_CURVE_FILE, save_loss_curve
from wgrad.train.output.metrics import MetricsFile
from wgrad.train.output.model_card import CARD_FILE, Card, is_own_card
from wgrad.train.output.previous_run import PROFILE_FILE, RESULTS_FILE, RESULTS_FORMAT
from wgrad.train.plan.plan import Plan
from wgrad.train.run.largest_costs import largest_costs
from wgrad.train.run.session import Session
from wgrad.train.step.activations import recomputed_layers
from wgrad.train.step.build import TrainableModel
from wgrad.train.terminal.progress import duration


def write_trained(session: Session, built: TrainableModel) -> None:
    """Write the adapter or model, and its tokenizer."""
    source = find_source(session.folder, session.config.adapter)
    if session.config.full:
        save = partial(save_tokenizer, session.tokenizer, source)
        save_full(session.out, session.folder, built.model.weights, built.model.config, save)
    else:
        save_tokenizer(session.tokenizer, source, session.out)
        save_session_adapter(session, built, session.out)


def save_session_adapter(session: Session, built: TrainableModel, folder: Path, flat: np.ndarray | None = None) -> None:
    """Write the adapter in PEFT's format. flat: parameters in a checkpoint's order; None: the current ones."""
    lora, arrays = built.adapter(flat)
    model = built.model.config
    if model.experts is not None:  # to PEFT, names such as up_proj are those of the experts
        modules = [
            name.removesuffix(".lora_A") for name, a in arrays.items() if name.endswith(".lora_A") and a.ndim == 2
        ]
        lora = lora.renamed({module: module for module in modules})
    save_adapter(folder, lora, arrays, session.config.model, model.in_peft, whole_modules(model), model.text_of)


def write_results(session: Session, metrics: MetricsFile, results: dict[str, Any], skipped: int) -> None:
    """Write loss.svg, the profile, the model card, and last results.json, which marks the folder as complete."""
    config, stream = session.config, session.stream
    points = {0: results.get("held_out_loss_before"), **metrics.held_out()}
    points.setdefault(results["result_step"], results.get("held_out_loss_after"))
    curve = [(step, loss) for step, loss in sorted(points.items()) if loss is not None]
    title = f"{Path(config.model).name} on {', '.join(Path(path).name for path in config.data)}"
    save_loss_curve(session.out / LOSS_CURVE_FILE, metrics.of_steps(), curve, title)
    write_profile(session)
    _write_card(session, results)
    length = {"steps": stream.step, "max_steps": config.max_steps, "epochs": config.epochs}
    measured = {"skipped_steps": skipped, "peak_bytes": session.device.memory().peak_bytes}
    write_json(session.out / RESULTS_FILE, {"format": RESULTS_FORMAT, **results, **length, **measured})


def _write_card(session: Session, results: dict[str, Any]) -> None:
    """Write the model card, unless the user has edited it."""
    config = session.config
    if is_own_card(session.out / CARD_FILE):
        kind = "model" if config.full else "adapter"
        on_hub, contents = is_hub_id(config.model), Contents.of(session.out)
        card = Card(kind, config.model, on_hub, config.to_dict(), results, curve=True, contents=contents)
        write_text(session.out / CARD_FILE, card.text())


def start_profile(session: Session) -> None:
    """Time each kernel from here on, with --profile (which costs some speed)."""
    if session.config.profile and not session.device.profile():
        session.say(f"note: --profile has no effect: {session.device.description} has no kernels to time")


def write_profile(session: Session) -> None:
    """Write the table of kernel times, if they were measured, of the steps since the run was last started."""
    if table := session.device.profile_table():
        write_text(session.out / PROFILE_FILE, table + "\n")


def say_done(session: Session, results: dict[str, Any], skipped: int, plan: Plan | None) -> None:
    """Print the last lines of a run."""
    config = session.config
    if skipped:
        session.say(f"note: {counted(skipped, 'step was', 'steps were')} skipped because a gradient was not finite")
    what, peak = "model" if config.full else "adapter", size(session.device.memory().peak_bytes)
    if plan is not None:
        peak += f" (expected {size(plan.peak_bytes)})"
    session.say(f"done in {duration(results['seconds'])}, peak memory {peak}: {what} in {session.out}")
    table = session.device.profile_table()
    if table:
        session.say(table)
        recomputes = recomputed_layers(replace(config, **session.mode), session.model_config) > 0
        for line in largest_costs(session.device.profile_times(), left_idle(session.device), recomputes):
            session.say(line)


def next_commands(config: RunOptions, chats: bool, in_gguf: bool = True) -> list[str]:
    """Return the commands to try after a run: talk to the result, and take it to another program.

    Args:
        config: Options of the run.
        chats: whether the model has a chat template.
        in_gguf: whether it can be written as a GGUF file.
    """
    result = ["--model" if config.full else "--adapter", config.out]
    talk = ["chat", *result] if chats else ["generate", *result, "--prompt", "Once upon a time"]
    if config.lora_variant:  # the commands do not know it
        return []
    commands = [talk] if config.full or not in_gguf else [talk, ["export", "ollama", *result]]
    if config.qat:
        commands[1:] = [
            ["merge", *result, "--out", f"{config.out}-gguf", "--format", "gguf", "--quantize", QAT_MIXES[config.qat]]
        ]
    heads = ("next: ", "      ")
    return [f"{head}{shlex.join([*_program(), *words])}" for head, words in zip(heads, commands)]


def _program() -> list[str]:
    """Return the words by which a shell finds wgrad, which may be in an environment that is not activated."""
    if shutil.which("wgrad"):
        return ["wgrad"]
    started = sys.argv[0]
    return [started] if Path(started).stem == "wgrad" else [sys.executable, "-m", "wgrad"]
