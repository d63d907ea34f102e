"""Turning the records of a file into documents, with notes for the user about those that cannot be used.

`samples.py` and `preferences.py` describe the records, `sample_tokens.py` how they become tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from wgrad.device.errors import WgradError
from wgrad.device.shown import counted
from wgrad.train.data.data_files import DataFile
from wgrad.train.data.documents import Documents, LineDocuments, PairDocuments
from wgrad.train.data.preferences import parse_preference
from wgrad.train.data.record_keys import with_our_names
from wgrad.train.data.sample_tokens import SampleTokens, encode_samples
from wgrad.train.data.samples import BadLine, Sample, of_line, parse_object, parse_record
from wgrad.train.data.tokenizer import Tokenizer
from wgrad.train.files.input_files import one_line
from wgrad.train.options.finetune_config import RunOptions
from wgrad.train.options.record_names import columns_of

SHOWN = 12  # most names in a list for the user
_COUNTED = 1000  # most unread keys that are counted
_LISTED = 5  # most bad lines that are listed


@dataclass
class Tally:
    """Counts over all files that are read."""

    truncated: int = 0  # examples that were longer than seq_len
    cut_tokens: int = 0  # tokens that truncation removed
    left_out: int = 0  # examples without a token in the loss after truncation
    bad_lines: int = 0
    bad: list[str] = field(default_factory=list)  # the first of them
    notes: list[str] = field(default_factory=list)
    turns: Counter[tuple[str, bool]] = field(default_factory=Counter)  # role, whether it counts for the loss

    def skipped(self) -> list[str]:
        """Return a line for each of the first bad lines, and one for the rest."""
        more = self.bad_lines - len(self.bad)
        return [f"skipped {line}" for line in self.bad] + ([f"skipped {more} more"] if more else [])


def read_records(file: DataFile, config: RunOptions, tokenizer: Tokenizer, tally: Tally) -> Documents[Any]:
    """Return the documents of a file's records. Raises WgradError."""
    reader = _Reader(file, config, tokenizer, tally)
    reader.read()
    reader.note()
    reader.check()
    return PairDocuments(reader.documents) if config.objective_kind.records == "pairs" else reader.documents


def samples_of(
    record: bytes | dict[str, Any], name: str, line: int, config: RunOptions, tokenizer: Tokenizer
) -> list[Sample]:
    """Return the samples of a record whose keys have our names.

    Raises:
        BadLine: the record cannot be used.
        WgradError: no record with messages can be used.
    """
    if config.objective_kind.records == "texts":
        return [parse_record(record, name, line, config.loss_on, tokenizer)]
    return parse_preference(record, name, line, config.objective, tokenizer)


class _Reader:
    """Reader of the records of one file into documents."""

    def __init__(self, file: DataFile, config: RunOptions, tokenizer: Tokenizer, tally: Tally) -> None:
        self.file, self.config, self.tokenizer, self.tally = file, config, tokenizer, tally
        self.documents = LineDocuments(file.name, config.max_length)
        self.columns = columns_of(config.columns)
        self.absent = {ours: theirs for ours, theirs in self.columns.items() if theirs}  # not yet found in a record
        self.in_place = set[str]()  # our names, found in records that lack theirs
        self.lines = self.bad = 0
        self.first: WgradError | None = None  # the reason why the first record was left out
        self.forms: dict[str, None] = {}  # forms that need a note
        self.unread = Counter[str]()  # number of records by a key that is not read
        self.lost_tokens = self.lost_lines = 0  # parts of answers that the template removes
        self.lost_example = ""

    def read(self) -> None:
        # A completion may also follow another, shorter prompt.
        limit = self.config.max_length * (2 if self.config.objective_kind.mismatched else 1)
        parts: list[SampleTokens] = []
        for part in encode_samples(self._samples(), limit, self.tokenizer):
            parts.append(part)
            if part.sample.more:
                continue
            try:
                self._take(parts)
            except BadLine as error:
                self._skip(error)
            parts = []
        self.tally.bad_lines += self.bad

    def _samples(self) -> Iterator[Sample]:
        for line, record in self.file.records():
            if isinstance(record, bytes) and not record.strip():
                continue
            self.lines += 1
            try:
                for sample in self._parse(line, record):
                    if sample.form:
                        self.forms.setdefault(sample.form)
                    if len(self.unread) < _COUNTED:
                        self.unread.update(sample.unread)
                    yield sample
            except BadLine as error:
                self._skip(error)

    def _parse(self, line: int, record: bytes | str | dict[str, Any]) -> list[Sample]:
        """Return the samples of a record under its own names. Raises as `samples_of`."""
        if isinstance(record, str):
            raise BadLine(f"{self.file.name}:{line}: {record}")
        if self.columns:
            with of_line(self.file.name, line):
                record = parse_object(record)
                for ours, theirs in self.columns.items():
                    if theirs in record:
                        self.absent.pop(ours, None)
                    elif ours in record:
                        self.in_place.add(ours)
                record = with_our_names(record, self.columns)
        return samples_of(record, self.file.name, line, self.config, self.tokenizer)

    def _skip(self, error: BadLine) -> None:
        if self.config.on_bad_line == "stop":
            raise error
        self.first, self.bad = self.first or error, self.bad + 1
        if len(self.tally.bad) < _LISTED:
            self.tally.bad.append(str(error))

    def _take(self, parts: Sequence[SampleTokens]) -> None:
        """Add the parts of a record, truncated, to the documents. Raises BadLine."""
        for part in parts:
            with of_line(self.file.name, part.sample.line):
                self.tokenizer.check_ids(part.ids)
        kind = self.config.objective_kind
        if kind.records == "pairs" and not kind.framed:  # TRL: the answers of a pair begin at the same token
            first = min(int(np.argmax(np.append(part.loss_mask, True))) for part in parts)
            for part in parts:
                part.loss_mask[first:] = True
        left_out = self._left_out(parts)
        if left_out is not None:
            self.first = self.first or left_out
            self.tally.left_out += 1
            return
        for part in parts:
            self.documents.add(part.ids, part.loss_mask, part.sample.line, part.sample.label)
        lost = sum(max(part.length - self.config.max_length, 0) for part in parts)
        self.tally.truncated += bool(lost)
        self.tally.cut_tokens += lost
        self.tally.turns.update(turn for part in parts for turn in part.sample.turns)
        removed = [text for part in parts for text in part.sample.lost]
        self.lost_tokens += sum(len(self.tokenizer.encode(text, add_special_tokens=False)) for text in removed)
        self.lost_lines += bool(removed)
        self.lost_example = self.lost_example or (removed[0] if removed else "")

    def _left_out(self, parts: Sequence[SampleTokens]) -> WgradError | None:
        """Return why no token counts for the loss after truncation, or None. Raises BadLine if none did before."""
        seq_len = self.config.max_length
        for part in parts:
            if part.loss_mask[1:seq_len].any():
                continue
            where = f"{self.file.name}:{part.sample.line}: no token to learn"
            if part.length <= seq_len:
                raise BadLine(f"{where} (a single token has nothing to be predicted from): remove the line")
            return WgradError(
                f"{where} is left after truncation to {seq_len} tokens: raise "
                "--max-length, or shorten what comes before the completion"
            )
        return None

    def note(self) -> None:
        name, notes = self.file.name, self.tally.notes
        notes += [f"note: {name} has {form}" for form in (*self.forms, *self.file.remarks)]
        if self.unread:
            notes.append(f"note: {name} has keys that are not read: {_counted(self.unread)}")
        if self.lost_lines:
            notes.append(
                f"note: {name}: the chat template leaves out {counted(self.lost_tokens, 'token')} of "
                f"{counted(self.lost_lines, 'line')}, "
                f"{one_line(ascii(self.lost_example), 60)} for one, so they are not trained on: --chat-template takes "
                "one that keeps them"
            )

    def check(self) -> None:
        """Raise WgradError if the file has no records, most are bad, or none has a column of --columns."""
        if not self.lines:
            raise self.file.empty()
        if self.first and (not self.documents or 2 * self.bad > self.lines):
            what = f"; {self.bad} of {self.lines} lines are bad" if self.bad > 1 else ""
            raise WgradError(f"{self.first}{what}")
        for ours, theirs in self.absent.items():
            if ours not in self.in_place:
                raise WgradError(
                    f"--columns: no record of {self.file.name} has {theirs!r}, given for {ours!r}: check the name"
                )
            self.tally.notes.append(
                f"note: {self.file.name}: no record has {theirs!r} of --columns; its own {ours!r} is read"
            )


def _counted(unread: Counter[str]) -> str:
    """List keys, the most frequent first, each with its number of records."""
    shown = [f"{one_line(repr(key), 60)} ({counted(count, 'line')})" for key, count in unread.most_common(SHOWN)]
    return ", ".join(shown) + (f" and {len(unread) - SHOWN} more" if len(unread) > SHOWN else "")
