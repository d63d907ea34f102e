"""Tokenizing samples into ids and a loss mask."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from wgrad.train.data.samples import Sample, of_line, parse_record
from wgrad.train.data.text_windows import WINDOW, Encoded, pieces
from wgrad.train.data.tokenizer import Tokenizer
from wgrad.train.options.finetune_config import RunOptions

_SAMPLES_AT_ONCE = 512  # passed to the tokenizer together, which uses all cores
_CHARACTERS_AT_ONCE = 1 << 14


@dataclass(frozen=True)
class SampleTokens:
    """A sample as tokens: ids int32 [n] and loss_mask bool [n] of the first `limit`, and the length of the whole."""

    sample: Sample
    ids: np.ndarray
    loss_mask: np.ndarray
    length: int


def encode_record(
    record: Mapping[str, Any], config: RunOptions, tokenizer: Tokenizer, name: str
) -> tuple[np.ndarray, np.ndarray]:
    """Return ids int32 [n] and loss_mask bool [n] of a record, as in a run with these options.

    Raises:
        WgradError: the record cannot be used; the error begins with `name`.
    """
    sample = parse_record(dict(record), name, 1, config.loss_on, tokenizer)
    part = next(encode_samples(iter([sample]), config.max_length, tokenizer))
    with of_line(name, 1):
        tokenizer.check_ids(part.ids)
    return part.ids, part.loss_mask


def encode_samples(samples: Iterator[Sample], limit: int, tokenizer: Tokenizer) -> Iterator[SampleTokens]:
    """Yield the tokens of each sample, in order; reads ahead only as many samples as are tokenized together."""
    for group in _groups(samples):
        for sample, encoded in zip(group, _encode(group, tokenizer)):
            yield _tokens(sample, encoded, limit, tokenizer)


def _groups(samples: Iterator[Sample]) -> Iterator[list[Sample]]:
    """Yield groups of samples, in order, that are tokenized together."""
    group: list[Sample] = []
    length = 0
    for sample in samples:
        if group and (len(group) == _SAMPLES_AT_ONCE or length + len(sample.text) > _CHARACTERS_AT_ONCE):
            yield group
            group, length = [], 0
        group.append(sample)
        length += len(sample.text)
    if group:
        yield group


def _encode(group: Sequence[Sample], tokenizer: Tokenizer) -> Iterator[Iterator[Encoded]]:
    """Yield the tokens of each sample, a long one in several parts."""
    short = [sample for sample in group if len(sample.text) <= WINDOW]
    whole = iter(tokenizer.encode_batch([s.text for s in short if s.whole]))
    chat = iter(tokenizer.encode_batch([s.text for s in short if not s.whole], add_special_tokens=False))
    for sample in group:
        if len(sample.text) <= WINDOW:
            yield iter([next(whole if sample.whole else chat)])
        else:
            yield _encode_long(sample, tokenizer)


def _encode_long(sample: Sample, tokenizer: Tokenizer) -> Iterator[Encoded]:
    parts = tokenizer.encode_stream(pieces(sample.text))
    return tokenizer.framed(parts) if sample.whole else parts


def _tokens(sample: Sample, parts: Iterator[Encoded], limit: int, tokenizer: Tokenizer) -> SampleTokens:
    """Join the tokens of the parts; after a text eos is added, and counts for the loss."""
    ids, learned = list[int](), list[bool]()
    length, last = 0, None
    for part in parts:
        if len(ids) < limit:
            ids += part.ids
            learned += _learned(sample, part)
        length += len(part.ids)
        last = part.ids[-1] if part.ids else last
    if sample.framed and tokenizer.bos_id is not None and not (length and ids[0] == tokenizer.bos_id):
        ids.insert(0, tokenizer.bos_id)
        learned.insert(0, False)
        length += 1
    if (sample.whole or sample.framed) and tokenizer.eos_id is not None:
        if last != tokenizer.eos_id:
            ids.append(tokenizer.eos_id)
            learned.append(True)
            length += 1
        elif len(ids) == length:
            learned[-1] = True
    return SampleTokens(sample, np.array(ids[:limit], np.int32), np.array(learned[:limit], bool), length)


def _learned(sample: Sample, part: Encoded) -> list[bool]:
    """Return for each token of a part whether it shares a character with a span."""
    if sample.spans == [(0, len(sample.text))]:  # all of it, with tokens that have no characters
        return [True] * len(part.ids)
    offsets = np.asarray(part.offsets, np.int64).reshape(-1, 2)
    learned = np.zeros(len(part.ids), bool)
    for start, end in sample.spans:
        learned |= (offsets[:, 0] < end) & (offsets[:, 1] > start)
    return learned.tolist()
