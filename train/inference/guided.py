"""Generation in which the host sees each token before the next is drawn, for grammars and repetition penalties."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from wgrad.device.errors import UnusableResult
from wgrad.train.inference.continuous import Batch
from wgrad.train.inference.generation import generate_ids, not_finite
from wgrad.train.inference.growing import Growing
from wgrad.train.inference.repetition import Repetition
from wgrad.train.model.model import Model
from wgrad.train.options.generate_config import Sampling


class Guides(Protocol):
    """The interface of a `Guide`."""

    @property
    def active(self) -> bool: ...
    @property
    def ended(self) -> bool: ...
    @property
    def error(self) -> str: ...
    def add(self, token: int) -> bool: ...
    def bias(self) -> np.ndarray: ...


class Free:
    """The guide of a text without a grammar."""

    active, ended, error = False, False, ""

    def add(self, token: int) -> bool:
        return False

    def bias(self) -> np.ndarray:
        raise NotImplementedError


class Anything:
    """A guide that forbids nothing, for a dry run."""

    active, ended, error = True, False, ""

    def __init__(self, vocab_size: int) -> None:
        self._bias = np.zeros(vocab_size, np.float32)

    def add(self, token: int) -> bool:
        return False

    def bias(self) -> np.ndarray:
        return self._bias


def guided_tokens(
    model: Model,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampling: Sampling,
    stop_ids: Collection[int],
    guides: Sequence[Guides],
) -> Iterator[tuple[int, int]]:
    """Continue prompts at once, the n-th with the n-th guide and the seed sampling.seed + n.

    Yields the number of a prompt and its next id, up to one of `stop_ids`, which is not yielded.

    Raises:
        UnusableResult: logits are not finite, or a grammar failed.
    """
    batch = Batch(model, len(prompts))
    seeds = (replace(sampling, seed=sampling.seed + number) for number in range(len(prompts)))
    members = [Growing.begin(prompt, max_new_tokens, own) for prompt, own in zip(prompts, seeds)]
    numbers = {one: number for number, one in enumerate(members)}
    counts = [0] * len(prompts)
    batch.join(members)
    vocab, penalty = model.config.vocab_size, sampling.repetition_penalty
    repetitions = [Repetition(penalty, vocab, prompt) for prompt in prompts if penalty != 1]
    drawn: list[list[int]] = [[] for _ in prompts]
    while batch.growing:
        for one in batch.growing:
            guide = guides[numbers[one]]
            one.bias = guide.bias() if guide.active else None
            if repetitions:
                one.factors = repetitions[numbers[one]].factors(drawn[numbers[one]])
        block = batch.queue(1)
        tokens = block.tokens()[0].tolist()
        for part in block.parts:
            one, token = part.sequence, tokens[part.row]
            number = numbers[one]
            counts[number] += 1
            if token < 0:
                raise not_finite(model, counts[number])
            if token in stop_ids:
                batch.leave(one)
                continue
            drawn[number].append(token)
            yield number, token
            if guides[number].add(token):
                if guides[number].error:
                    raise UnusableResult(f"the grammar cannot go on: {guides[number].error}")
                batch.leave(one)
            elif part.read_again:
                again = one.go_on(one.ids)
                numbers[again] = number
                batch.join([again])


def guided_batch(
    model: Model,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampling: Sampling,
    stop_ids: Collection[int],
    guides: Sequence[Guides],
) -> list[list[int]]:
    """Return the ids of each text."""
    texts: list[list[int]] = [[] for _ in prompts]
    for number, token in guided_tokens(model, prompts, max_new_tokens, sampling, stop_ids, guides):
        texts[number].append(token)
    return texts


def text_ids(
    model: Model,
    prompt: Sequence[int],
    max_new_tokens: int,
    sampling: Sampling,
    stop_ids: Collection[int],
    guides: Sequence[Guides] = (),
) -> Iterator[int]:
    """Yield the ids that follow a prompt, in the fastest way. guides: that of the text, or none."""
    if not guides and sampling.repetition_penalty == 1:
        return generate_ids(model, prompt, max_new_tokens, sampling, stop_ids)
    tokens = guided_tokens(model, [prompt], max_new_tokens, sampling, stop_ids, guides or [Free()])
    return (token for _, token in tokens)
