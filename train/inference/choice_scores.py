"""Log-likelihoods of the choices of questions, many in a batch, and how often the likeliest choice is right.

As in lm-eval 0.4.13, acc takes the choice with the largest log-likelihood, acc_norm with the largest per character.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from wgrad.autograd.tensor import no_grad
from wgrad.train.data.choices import Choice, Question
from wgrad.train.data.packing import Batch, Document, make_batch, pack_documents
from wgrad.train.model.model import Model
from wgrad.train.model.model_inputs import Inputs
from wgrad.train.options.finetune_config import RunOptions
from wgrad.train.step.objectives import write_batch


@dataclass(frozen=True)
class ChoiceBatch:
    """Rows of choices. spans: each choice with its row and the columns of its tokens' losses."""

    batch: Batch
    spans: list[tuple[Choice, int, slice]]


def choice_batches(questions: Sequence[Question], config: RunOptions, pad_id: int) -> list[ChoiceBatch]:
    """Return batches [batch_size, seq_len] of choices, packed if the options say so; equal choices are scored once.

    A choice keeps its last seq_len + 1 tokens, the last of which is only predicted.
    """
    choices = list(dict.fromkeys(choice for question in questions for choice in question.choices))
    lengths = [len(_inputs(choice, config)) for choice in choices]
    numbers = pack_documents(lengths, config.max_length) if config.packs else [[i] for i in range(len(choices))]
    rows, size = [[choices[i] for i in row] for row in numbers], config.batch_size
    return [_batch(rows[first : first + size], config, pad_id) for first in range(0, len(rows), size)]


def _inputs(choice: Choice, config: RunOptions) -> tuple[int, ...]:
    return choice.ids[-config.max_length - 1 : -1]


def _batch(rows: Sequence[Sequence[Choice]], config: RunOptions, pad_id: int) -> ChoiceBatch:
    documents: list[list[Document]] = []
    spans = []
    for number, row in enumerate(rows):
        documents.append([])
        end = 0
        for choice in row:
            ids = np.array(_inputs(choice, config), np.int32)
            documents[-1].append(Document(ids, np.zeros(len(ids), bool)))
            end += len(ids)
            spans.append((choice, number, slice(end - choice.count, end)))
    batch = make_batch(documents, config.batch_size, config.max_length, pad_id)
    for choice, number, place in spans:
        batch.targets[number, place] = choice.ids[-choice.count :]
    return ChoiceBatch(batch, spans)


def log_likelihoods(
    model: Model, batches: Sequence[ChoiceBatch], progress: Callable[[int], None] | None = None
) -> dict[Choice, float]:
    """Return the sum of the log-probabilities of each choice's tokens; NaN if logits are not finite."""
    device, found = model.device, dict[Choice, float]()
    inputs = Inputs.empty(model, *batches[0].batch.ids.shape)
    for number, part in enumerate(batches, start=1):
        write_batch(device, inputs, part.batch, part.batch.targets)
        with no_grad():
            losses = device.download(model.token_losses(inputs).data).reshape(part.batch.ids.shape)
        for choice, row, place in part.spans:
            found[choice] = -float(losses[row, place].sum(dtype=np.float64))
        if progress is not None:
            progress(number)
    return found


@dataclass(frozen=True)
class Accuracy:
    """acc, acc_norm: shares of questions; with the standard errors of these means (None for a single question)."""

    acc: float
    acc_stderr: float | None
    acc_norm: float
    acc_norm_stderr: float | None


def accuracy(questions: Sequence[Question], scores: Mapping[Choice, float]) -> Accuracy:
    """Return the accuracy. scores: `log_likelihoods` of all choices; on a tie the first choice is taken."""
    right, right_norm = [], []
    for question in questions:
        values = np.array([scores[choice] for choice in question.choices])
        lengths = np.array([float(choice.characters) for choice in question.choices])
        right.append(int(np.argmax(values)) == question.answer)
        right_norm.append(int(np.argmax(values / lengths)) == question.answer)
    return Accuracy(*_mean(right), *_mean(right_norm))


def _mean(right: Sequence[bool]) -> tuple[float, float | None]:
    values = np.array(right, np.float64)
    error = float(values.std(ddof=1) / np.sqrt(len(values))) if len(values) > 1 else None
    return float(values.mean()), error
