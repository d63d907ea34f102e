"""Training data: JSONL or plain text -> documents of token ids with a mark on each token that is to be learnt.

A JSONL line is one of
    {"text": "..."}                              every token counts
    {"prompt": "...", "completion": "..."}       the completion counts
    {"messages": [{"role": ..., "content": ...}]}  what the assistant says counts; the tokenizer's chat template is used
and prompt and completion may themselves be lists of messages. Plain text (.txt, .md) is one stream of tokens, cut
into pieces of seq_len. Everything is read and checked before anything is trained; an error names file and line.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from wgrad.autograd.errors import WgradError
from wgrad.train.chat import Span
from wgrad.train.config import FinetuneConfig
from wgrad.train.packing import Document
from wgrad.train.tokenizer import Encoded, Tokenizer

_TEXT_SUFFIXES = (".txt", ".md", ".text")
_ENCODE_AT_ONCE = 512  # lines given to the tokenizer together: it works on all cores


@dataclass(frozen=True)
class Dataset:
    """Documents to train on and documents held out, with what a user should know about how they came about."""

    train: list[Document]
    held_out: list[Document]
    examples: int  # documents in all
    tokens: int  # their tokens, after truncation
    truncated: int  # examples that were longer than seq_len
    cut_tokens: int  # tokens that they lost

    def summary(self) -> str:
        """One line for people."""
        line = f"{len(self.train)} examples to train on, {len(self.held_out)} held out, {self.tokens} tokens"
        if self.truncated:
            line += f"; {self.truncated} truncated to --seq-len (lost {self.cut_tokens} tokens)"
        return line


@dataclass(frozen=True)
class _Sample:
    """A line as text: characters in `spans` are to be learnt. `whole`: bos and eos are the tokenizer's business here
    (not the template's)."""

    text: str
    spans: list[Span]
    whole: bool
    source: str


def load_data(config: FinetuneConfig, tokenizer: Tokenizer) -> Dataset:
    """Read --data (and --eval-data), tokenise, truncate to seq_len, split. Raises WgradError naming file and line.

    The split takes max(1, round(eval_fraction * n)) of n documents, chosen by the seed alone; with --eval-data or a
    fraction of 0 none are taken from the training data.
    """
    documents, truncated, cut = _load_file(config.data, "--data", config, tokenizer)
    if config.eval_data:
        held_out, more_truncated, more_cut = _load_file(config.eval_data, "--eval-data", config, tokenizer)
        train, truncated, cut = documents, truncated + more_truncated, cut + more_cut
    else:
        train, held_out = _split(documents, config)
    tokens = sum(map(len, train)) + sum(map(len, held_out))
    return Dataset(train, held_out, len(train) + len(held_out), tokens, truncated, cut)


def _split(documents: list[Document], config: FinetuneConfig) -> tuple[list[Document], list[Document]]:
    if config.eval_fraction == 0:
        return documents, []
    number = max(1, round(config.eval_fraction * len(documents)))
    if number >= len(documents):
        raise WgradError(
            f"--eval-fraction: {config.eval_fraction:g} of {len(documents)} example(s) in {config.data} leaves none to "
            "train on: give more data, --eval-data FILE, or --eval-fraction 0"
        )
    # The last word tells this generator from the one that orders the epochs.
    generator = np.random.Generator(np.random.PCG64([config.seed, 0, 1]))
    chosen = set(generator.permutation(len(documents))[:number].tolist())
    train = [d for i, d in enumerate(documents) if i not in chosen]
    return train, [documents[i] for i in sorted(chosen)]


def _load_file(path: str, option: str, config: FinetuneConfig, tokenizer: Tokenizer) -> tuple[list[Document], int, int]:
    """-> documents, number truncated, tokens cut."""
    text = _read(path, option)
    if not text.strip():
        raise WgradError(f"{option}: {path} is empty: give a file with at least one example")
    if _is_plain_text(path, text, option):
        return _cut_stream(text, path, option, config.seq_len, tokenizer), 0, 0
    documents: list[Document] = []
    truncated = cut = 0
    samples = list(_parse_lines(text, path, config.loss_on, tokenizer))
    for start in range(0, len(samples), _ENCODE_AT_ONCE):
        for sample, encoded in _encode(samples[start : start + _ENCODE_AT_ONCE], tokenizer):
            document = _to_document(sample, encoded, tokenizer)
            lost = max(0, len(document) - config.seq_len)
            if lost:
                limit = config.seq_len
                document = Document(document.ids[:limit], document.counts[:limit], document.source)
            if document.num_targets == 0:
                raise WgradError(_no_target(sample, lost, config.seq_len))
            documents.append(document)
            truncated, cut = truncated + bool(lost), cut + lost
    return documents, truncated, cut


def _no_target(sample: _Sample, lost: int, seq_len: int) -> str:
    if lost:
        return (
            f"{sample.source}: no token to learn is left after truncation to {seq_len} tokens: "
            "raise --seq-len, or shorten what comes before the completion"
        )
    return f"{sample.source}: no token to learn (a single token has nothing to be predicted from): remove the line"


def _read(path: str, option: str) -> str:
    try:
        data = Path(path).read_bytes()
    except FileNotFoundError as error:
        raise WgradError(f"{option}: no such file: {path}") from error
    except OSError as error:
        raise WgradError(f"{option}: cannot read {path}: {error.strerror}") from error
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise WgradError(
            f"{path}:{line}: not UTF-8 (byte 0x{data[error.start]:02x}): convert the file to UTF-8"
        ) from error


def _is_plain_text(path: str, text: str, option: str) -> bool:
    """By the name's ending; where that says nothing, by the first character."""
    suffix = os.path.splitext(path)[1].lower()
    if suffix in _TEXT_SUFFIXES:
        return True
    if suffix != ".jsonl" and text.lstrip().startswith("["):
        raise WgradError(f"{option}: {path} is a JSON array; expected one object a line (jq -c '.[]' FILE converts it)")
    return suffix not in (".jsonl", ".json", ".ndjson") and not text.lstrip().startswith("{")


# ---- plain text --------------------------------------------------------------------------------
def _cut_stream(text: str, path: str, option: str, seq_len: int, tokenizer: Tokenizer) -> list[Document]:
    """Pieces of the one stream, each predicting every one of its tokens exactly once.

    Where the tokenizer puts bos in front, each piece starts with it; else it starts with the last token of the
    piece before. Newlines are kept as they are, but for \\r\\n, which becomes \\n.
    """
    ids = tokenizer.encode(text.replace("\r\n", "\n"))
    if ids and ids[-1] == tokenizer.eos_id:
        ids = ids[:-1]  # a stream that is cut anywhere has no end worth learning
    has_bos = tokenizer.bos_id is not None and bool(ids) and ids[0] == tokenizer.bos_id
    stream = np.asarray(ids, np.int32)
    pieces = []
    for at in range(1, len(stream), seq_len - 1):
        first = stream[:1] if has_bos else stream[at - 1 : at]
        piece = np.concatenate([first, stream[at : at + seq_len - 1]])
        pieces.append(Document(piece, np.ones(len(piece), bool), f"{path}: token {at}"))
    if not pieces:
        raise WgradError(f"{option}: {path} has {len(ids)} token(s): at least 2 are needed to learn from")
    return pieces


# ---- JSONL -------------------------------------------------------------------------------------
def _parse_lines(text: str, path: str, loss_on: str, tokenizer: Tokenizer) -> Iterator[_Sample]:
    # Not splitlines(): U+2028 and its like are allowed inside a JSON string.
    for number, line in enumerate(text.rstrip().split("\n"), start=1):
        source = f"{path}:{number}"
        if not line.strip():
            raise WgradError(f"{source}: empty line: remove it (only the end of the file may be blank)")
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            place = f" at column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
            what = getattr(error, "msg", str(error))
            raise WgradError(f"{source}: not valid JSON: {what}{place}: expected one object a line") from error
        if not isinstance(value, dict):
            raise WgradError(f"{source}: expected a JSON object, got {_type_name(value)}")
        try:
            yield _sample(value, source, loss_on, tokenizer)
        except WgradError as error:
            message = str(error)
            raise error if message.startswith((source, "--")) else WgradError(f"{source}: {message}") from error


def _sample(value: dict[str, Any], source: str, loss_on: str, tokenizer: Tokenizer) -> _Sample:
    if "messages" in value:
        return _chat_sample(_messages(value["messages"], "messages"), 0, source, loss_on, tokenizer)
    if "prompt" in value and "completion" in value:
        prompt, completion = value["prompt"], value["completion"]
        if isinstance(prompt, list) and isinstance(completion, list):
            before = _messages(prompt, "prompt")
            turns = before + _messages(completion, "completion")
            return _chat_sample(turns, len(before), source, loss_on, tokenizer)
        prompt = _text(prompt, "prompt", may_be_empty=True)
        text = prompt + _text(completion, "completion")
        return _Sample(text, [(0 if loss_on == "all" else len(prompt), len(text))], True, source)
    if "text" in value:
        text = _text(value["text"], "text")
        return _Sample(text, [(0, len(text))], True, source)
    keys = ", ".join(map(repr, value)) or "none"
    raise WgradError(f"needs 'text', 'prompt' and 'completion', or 'messages'; it has {keys}")


def _chat_sample(turns: list[dict], first: int, source: str, loss_on: str, tokenizer: Tokenizer) -> _Sample:
    """first: number of the first turn that may count."""
    learn = [i for i, turn in enumerate(turns) if i >= first and turn["role"] == "assistant"]
    if loss_on == "all":
        text = tokenizer.chat_template.render(turns)
        return _Sample(text, [(0, len(text))], False, source)
    if not learn:
        raise WgradError("no turn of the assistant, so nothing to learn: add one, or give --loss-on all")
    text, spans = tokenizer.chat_template.render_with_spans(turns, learn)
    return _Sample(text, spans, False, source)


def _messages(value: Any, name: str) -> list[dict]:
    if not isinstance(value, list) or not value:
        raise WgradError(f"{name!r} must be a list of messages that is not empty; got {_type_name(value)}")
    for number, message in enumerate(value, start=1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise WgradError(f"{name!r}: message {number} must be an object with 'role' and 'content'")
        if message.get("tool_calls") is None:
            _text(message.get("content"), f"content of message {number}", may_be_empty=message["role"] != "assistant")
    return value


def _text(value: Any, name: str, *, may_be_empty: bool = False) -> str:
    if not isinstance(value, str):
        raise WgradError(f"{name!r} must be text; got {_type_name(value)}")
    if not value and not may_be_empty:
        raise WgradError(f"{name!r} is empty: fill it, or remove the line")
    return value


def _type_name(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number") if value != [] else "an empty list"


# ---- text -> tokens ----------------------------------------------------------------------------
def _encode(samples: Sequence[_Sample], tokenizer: Tokenizer) -> Iterator[tuple[_Sample, Encoded]]:
    whole = iter(tokenizer.encode_batch([s.text for s in samples if s.whole]))
    chat = iter(tokenizer.encode_batch([s.text for s in samples if not s.whole], add_special_tokens=False))
    for sample in samples:
        yield sample, next(whole if sample.whole else chat)


def _to_document(sample: _Sample, encoded: Encoded, tokenizer: Tokenizer) -> Document:
    """A token counts where it shares a character with a span; eos is added after a text and counts."""
    ids = list(encoded.ids)
    counts = np.full(len(ids), sample.spans == [(0, len(sample.text))])  # all of it: tokens of no character too
    offsets = np.asarray(encoded.offsets, np.int64).reshape(-1, 2)
    for start, end in sample.spans:
        counts |= (offsets[:, 0] < end) & (offsets[:, 1] > start)
    if sample.whole and tokenizer.eos_id is not None:
        if ids and ids[-1] == tokenizer.eos_id:
            counts[-1] = True
        else:
            ids.append(tokenizer.eos_id)
            counts = np.append(counts, True)
    return Document(np.asarray(ids, np.int32), counts, sample.source)
