"""`wgrad eval --choices`: multiple-choice accuracy of a model, and also with an adapter.

Log-likelihoods, acc and acc_norm equal lm-eval's (tests/train/test_eval_choices.py).
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from wgrad.device.shown import counted
from wgrad.train.commands.evaluate import build_measured, not_finite
from wgrad.train.data.choices import Choice, Question, read_questions
from wgrad.train.data.packing import ROW_STEP
from wgrad.train.inference.choice_scores import accuracy, choice_batches, log_likelihoods
from wgrad.train.inference.open_model import Opened, open_model
from wgrad.train.options.choice_options import ChoiceOptions
from wgrad.train.options.finetune_config import RunOptions
from wgrad.train.plan.lengths import within_positions
from wgrad.train.plan.plan import training_needs
from wgrad.train.run.session import refuse_quantized_anew
from wgrad.train.terminal.output import harmless, say


def run_choices(config: RunOptions, options: ChoiceOptions, as_json: bool) -> int:
    """Print the table, or one JSON object, to standard output, and everything else to standard error.

    Returns:
        The exit status.

    Raises:
        WgradError: Model, options or questions cannot be used.
        UnusableResult: A log-likelihood is not finite; no table is printed.
    """
    opened = open_model(config, needs=training_needs(config))
    (config, shortened), display = within_positions(opened.args, opened.config), opened.display
    refuse_quantized_anew(config, opened.files, opened.config)
    with display.phase("reading and tokenizing", unit="%") as phase:
        questions, notes = read_questions(options, opened.tokenizer, config.max_length, config.seed, phase.update)
    for note in filter(None, (opened.head_note and f"note: {opened.head_note}", *notes, shortened)):
        say(note, "stderr")
    choices = [choice for question in questions for choice in question.choices]
    truncated = sum(len(choice.ids) > config.max_length + 1 for choice in choices)
    config = replace(config, max_length=_row_length(choices, config))
    scores = _measure(replace(opened, args=config), questions)
    if not all(math.isfinite(value) for values in scores.values() for value in values.values()):
        raise not_finite("likelihood of a choice")
    how = {"shots": options.shots, "chat": options.chat}
    result = {"choices": options.choices, "questions": len(questions), **how, "truncated": truncated}
    result |= {name: asdict(accuracy(questions, values)) for name, values in scores.items()}
    print(json.dumps(result) if as_json else harmless(_table(result)))
    return 0


def _row_length(choices: Sequence[Choice], config: RunOptions) -> int:
    """Return the tokens of a sequence: --max-length, or fewer if no sequence would ever be filled."""
    lengths = [min(len(choice.ids) - 1, config.max_length) for choice in choices]
    longest = sum(lengths) if config.packs else max(lengths)
    return min(config.max_length, -(-longest // ROW_STEP) * ROW_STEP)


def _measure(opened: Opened[RunOptions], questions: Sequence[Question]) -> dict[str, dict[Choice, float]]:
    """Return the log-likelihoods of all choices for "base", and for "adapter" if there is one."""
    config = opened.args
    batches = choice_batches(questions, config, opened.tokenizer.pad_id or 0)
    model = build_measured(opened, lambda built: log_likelihoods(built.model, batches[:1])).model

    def scores(name: str) -> dict[Choice, float]:
        with opened.display.phase(f"choices by the {name}", len(batches), "batches") as phase:
            return log_likelihoods(model, batches, phase.update)

    adapted = {"adapter": scores("adapter")} if config.adapter else {}
    with model.without_adapter():
        return {"base": scores("base"), **adapted}


def _table(result: dict[str, Any]) -> str:
    before = f", {result['shots']} shots before each" if result["shots"] else ""
    before += ", in the chat template" if result["chat"] else ""
    cut = f", {result['truncated']} choices cut to --max-length" if result["truncated"] else ""
    lines = [f"{result['choices']}: {counted(result['questions'], 'question')}{before}{cut}; +- is the standard error"]
    lines.append(f"{'':8} {'acc':>17} {'acc_norm':>17}")
    for name in ("base", "adapter"):
        if entry := result.get(name):
            shown = (_shown(entry[metric], entry[f"{metric}_stderr"]) for metric in ("acc", "acc_norm"))
            lines.append(f"{name:8} " + " ".join(f"{text:>17}" for text in shown))
    return "\n".join(lines)


def _shown(value: float, error: float | None) -> str:
    return f"{value:.4f}" if error is None else f"{value:.4f} +- {error:.4f}"
