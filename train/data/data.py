"""Training data: reading records or plain text into documents of token ids with a loss mask.

`data_files.py` describes the kinds of files, `record_documents.py` how records become documents. Plain text (.txt, .md)
is one stream of tokens, cut into pieces of seq_len. All data is read and checked before training starts. Neither a
file nor the tokenizer's output for it (some 200 bytes per character) is in memory whole: see `text_windows.py`.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from wgrad.device.errors import WgradError
from wgrad.device.shown import counted
from wgrad.train.data.data_files import DataFile, Progress, list_data, open_data
from wgrad.train.data.documents import (
    ChosenDocuments,
    Documents,
    JoinedDocuments,
    StreamDocuments,
)
from wgrad.train.data.given_records import Records, given_records, refuse_placeholder
from wgrad.train.data.mix import Mix, describe
from wgrad.train.data.named_templates import ENDLESS
from wgrad.train.data.packing import Example
from wgrad.train.data.record_documents import SHOWN, Tally, read_records
from wgrad.train.data.template_process import shared_process
from wgrad.train.data.tokenizer import Tokenizer
from wgrad.train.files.input_files import one_line
from wgrad.train.options.data_sources import STDIN, Source, sources_of
from wgrad.train.options.finetune_config import RunOptions
from wgrad.train.options.record_names import columns_of


@dataclass(frozen=True)
class Dataset:
    """Documents to train on and documents held out, with notes for the user about how they were read."""

    train: Sequence[Any]  # Document, or Pair
    held_out: Sequence[Any]
    examples: int  # both together
    tokens: int  # of all examples, after truncation
    truncated: int  # examples that were longer than seq_len
    cut_tokens: int  # tokens that truncation removed
    left_out: int = 0  # examples without a token in the loss after truncation; not counted in `examples`
    bad_lines: int = 0  # lines that could not be used
    remarks: tuple[str, ...] = ()  # the kinds of the files, the first bad lines
    mix: Mix | None = None  # of `train`, if sources have weights
    turns: str = ""  # of conversations: how many turns of each role are trained on and read

    def summary(self) -> str:
        """Return one line for the user."""
        examples, tokens = counted(len(self.train), "example"), counted(self.tokens, "token")
        line = f"{examples} to train on, {len(self.held_out)} held out, {tokens}"
        if self.truncated:
            line += f"; {self.truncated} truncated to --max-length (lost {counted(self.cut_tokens, 'token')})"
        if self.left_out:
            line += f"; {self.left_out} left out (what is trained on begins beyond --max-length)"
        if self.bad_lines:
            line += f"; {counted(self.bad_lines, 'bad line')} skipped"
        return line


def load_data(
    config: RunOptions,
    tokenizer: Tokenizer,
    progress: Progress | None = None,
    given: Mapping[str, Records] | None = None,
    stdin: Path | None = None,
    evaluates: bool = False,
) -> Dataset:
    """Read --data (and --eval-data), tokenize, truncate to seq_len, and split.

    The split holds out max(1, round(eval_fraction * n)) of n documents, chosen by the seed alone; with --eval-data or a
    fraction of 0 it holds out none. Bad lines are skipped, counted and listed; with --on-bad-line stop, or if most
    lines are bad, the first one is an error.

    Args:
        progress: called with the percentage of a file that is read, and 100; not called for standard input.
        given: records, by the placeholder that an option has instead of a file.
        stdin: a copy of standard input.
        evaluates: --data is to be evaluated on too. Of a folder or data set with splits, held-out data is the split for
            validation, else for tests.

    Raises:
        WgradError: the data cannot be used; the error names file and line.
    """
    sources = sources_of(config.data)
    if STDIN in config.eval_data and STDIN in [source.path for source in sources]:
        raise WgradError("--eval-data: standard input is --data already: give a file")
    tally = Tally()
    try:
        records = given or {}

        def load(path: str, option: str, held_out: bool) -> Sequence[Example]:
            return _load_file(path, option, config, tokenizer, tally, progress, records, stdin, held_out)

        parts = [load(source.path, "--data", evaluates) for source in sources]
        documents = _joined(parts)
        train: Sequence[Example]
        held_out: Sequence[Example]
        if config.eval_data:
            train = documents
            held_out = _joined([load(path, "--eval-data", True) for path in config.eval_data])
        else:
            train, held_out = _split(documents, config, tally.bad_lines)
        tally.notes += _endless(config, tokenizer, tally)
    finally:
        shared_process().close()  # no more templates to render
    mix, line = _mix(sources, [len(part) for part in parts], documents, train)
    tokens = sum(map(len, train)) + sum(map(len, held_out))
    return Dataset(
        train,
        held_out,
        examples=len(train) + len(held_out),
        tokens=tokens,
        truncated=tally.truncated,
        cut_tokens=tally.cut_tokens,
        left_out=tally.left_out,
        bad_lines=tally.bad_lines,
        remarks=(*tally.notes, *line, *tally.skipped()),
        mix=mix,
        turns=_turns(tally.turns),
    )


def _endless(config: RunOptions, tokenizer: Tokenizer, tally: Tally) -> list[str]:
    """Return a note if answers are trained on and the model's own chat template does not end them; else none."""
    learns_answers = any(learned for _, learned in tally.turns)
    is_endless = learns_answers and config.chat_template is None and tokenizer.turn_end_id is None
    return [f"note: the model's chat template {ENDLESS}"] if is_endless else []


def _turns(turns: Counter[tuple[str, bool]]) -> str:
    """Describe how many turns of each role are trained on and only read; "" if there are none."""
    found = []
    for is_learned, what in ((True, "trained on"), (False, "read")):
        counts = Counter({role: count for (role, learned), count in turns.items() if learned == is_learned})
        shown = [f"{count} {one_line(ascii(role)[1:-1], 40)}" for role, count in counts.most_common(SHOWN)]
        more = [f"{len(counts) - SHOWN} more roles"] if len(counts) > SHOWN else []
        found.append(f"{', '.join(shown + more) or 'none'} {what}")
    return f"turns: {'; '.join(found)}" if turns else ""


def _mix(
    sources: Sequence[Source], sizes: Sequence[int], documents: Sequence[Example], train: Sequence[Example]
) -> tuple[Mix | None, list[str]]:
    """Return the mix of the documents to train on (None without weights), and a line about it if there are several
    sources. sizes: number of documents of each source."""
    if len(sources) == 1:
        return None, []
    numbers = train.chosen if isinstance(train, ChosenDocuments) else np.arange(len(documents))
    ends = np.searchsorted(numbers, np.cumsum(sizes))
    counts = np.diff(ends, prepend=0).tolist()
    for source, count in zip(sources, counts):
        if not count:
            raise WgradError(
                f"--data: all of {source.path} is held out: give more of it, --eval-data FILE, or --eval-fraction 0"
            )
    mix = None if sources[0].weight is None else Mix(tuple(counts), tuple(float(s.weight or 0) for s in sources))
    lengths = np.array([len(document) for document in train])
    tokens = [int(part.sum()) for part in np.split(lengths, ends[:-1])]
    return mix, [describe(sources, counts, tokens, mix)]


def _split(
    documents: Sequence[Example], config: RunOptions, skipped: int
) -> tuple[Sequence[Example], Sequence[Example]]:
    """Return the documents to train on, and those held out. skipped: number of invalid lines."""
    if config.eval_fraction == 0:
        return documents, ()
    number = max(1, round(config.eval_fraction * len(documents)))
    if number >= len(documents):
        bad = f" ({counted(skipped, 'invalid line')} skipped: wgrad data show tells why)" if skipped else ""
        raise WgradError(
            f"--data: {' '.join(config.data)} has {counted(len(documents), 'example')}{bad}, and --eval-fraction "
            f"{config.eval_fraction:g} holds out {number}, so none is left to train on: give more data, --eval-data "
            "FILE, or --eval-fraction 0"
        )
    # The last number makes this generator differ from the one that orders the epochs.
    generator = np.random.Generator(np.random.PCG64([config.seed, 0, 1]))
    is_held_out = np.zeros(len(documents), bool)
    is_held_out[generator.permutation(len(documents))[:number]] = True
    train, held_out = np.flatnonzero(~is_held_out), np.flatnonzero(is_held_out)
    return ChosenDocuments(documents, train), ChosenDocuments(documents, held_out)


def _load_file(
    path: str,
    option: str,
    config: RunOptions,
    tokenizer: Tokenizer,
    tally: Tally,
    progress: Progress | None,
    given: Mapping[str, Records],
    stdin: Path | None,
    held_out: bool,
) -> Sequence[Example]:
    """Read the examples of a file, standard input, or a folder of files, either all plain text or none."""
    if path in given:
        return read_records(given_records(path, option, given[path]), config, tokenizer, tally)
    refuse_placeholder(path, option)
    parts: list[Documents[Any]] = []
    first: DataFile | None = None
    names, notes = list_data(path, option, held_out)
    tally.notes += notes
    for name in names:
        with open_data(name, option, progress, stdin, columns_of(config.columns)) as file:
            tally.notes += file.notes
            first = first or file
            if (first.kind == "text") != (file.kind == "text"):
                text, other = (first, file) if first.kind == "text" else (file, first)
                raise WgradError(
                    f"{option}: {path} must hold plain text or records; got both ({text.name} and {other.name}): keep "
                    "each in a folder of its own"
                )
            if file.kind == "text" and config.columns:
                raise WgradError(f"--columns: {file.name} is plain text, which has none: leave it out")
            if file.kind == "text" and config.objective_kind.records != "texts":
                raise WgradError(
                    f"--objective: {config.objective} learns from preferences, and {file.name} is plain text: give "
                    "records (JSON lines, a JSON array, CSV, Parquet), or leave --objective out"
                )
            if file.kind == "text":
                parts.append(_cut_stream(file, config.max_length, tokenizer))
            else:
                parts.append(read_records(file, config, tokenizer, tally))
    return _joined(parts)


def _joined(parts: Sequence[Sequence[Example]]) -> Sequence[Example]:
    return parts[0] if len(parts) == 1 else JoinedDocuments(parts)


# ---- plain text --------------------------------------------------------------------------------
def _cut_stream(file: DataFile, seq_len: int, tokenizer: Tokenizer) -> Documents[Any]:
    """Tokenize plain text as one stream, and cut it into pieces of seq_len. \\r\\n becomes \\n."""
    ids = array("i")
    is_blank = True

    def blocks() -> Iterator[str]:
        nonlocal is_blank
        for block in file.blocks():
            is_blank = is_blank and not block.strip()
            yield block

    for encoded in tokenizer.framed(tokenizer.encode_stream(blocks())):
        ids.extend(encoded.ids)
    if is_blank:
        raise file.empty()
    if ids and ids[-1] == tokenizer.eos_id:
        ids.pop()  # pieces are cut anywhere, so the end of the stream means nothing
    try:
        tokenizer.check_ids(ids)
    except WgradError as error:
        raise WgradError(f"{file.option}: {file.name}: {error}") from error
    if len(ids) < 2:
        tokens = counted(len(ids), "token")
        raise WgradError(f"{file.option}: {file.name} has {tokens}: at least 2 are needed to learn from")
    has_bos = tokenizer.bos_id is not None and ids[0] == tokenizer.bos_id
    return StreamDocuments(file.name, np.frombuffer(ids, np.int32), seq_len, has_bos)
