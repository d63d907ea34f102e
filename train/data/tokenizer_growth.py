"""Bounds on the parts of a tokenizer.json, checked before the tokenizers library reads it.

Thirty rules of a few bytes, each of which doubles a text, would fill any memory. Known tokenizers lengthen a text by
one character, or put a few tokens around it. Other parts are tried out (`tokenizer_trial.py`).
"""

from __future__ import annotations

import base64
import importlib
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from wgrad.train.data.word_cuts import PATTERNS

MOST_GROWTH = 16.0  # characters of the result per character of the text, not counting Unicode normalization
MOST_ADDED = 256  # characters or tokens that are added around each text
_NESTED = ("normalizers", "pretokenizers", "processors", "decoders")
# The most characters that one becomes, if another rule may have written it.
_UNICODE = {"NFC": 3.0, "NFD": 4.0, "NFKC": 18.0, "NFKD": 18.0, "Lowercase": 3.0, "BertNormalizer": 4.0}
_LONGEST_MAPPING = 64  # bytes, of nmt_nfkc's 33
_LONGEST_AFFIX = 256
_MOST_STEPS = 64  # of a normalizer, pre-tokenizer, decoder or post-processor; known ones have 10
_LONGEST_WORD = 1 << 10  # characters of WordPiece's longest word: its time grows with their cube
_LONGEST_PATTERNS = 1 << 13  # characters of all regular expressions together; known ones have 300
MOST_ADDED_BYTES = 3 << 20  # of all added tokens together, each of which takes 80 bytes of memory
_KNOWN_ADDED_BYTES = 1 << 18

# Steps that take time and memory in proportion to the text, unless they have a regular expression of their own.
_LINEAR = frozenset(
    """NFC NFD NFKC NFKD Lowercase Prepend Strip StripAccents BertNormalizer Replace ByteLevel Metaspace Digits
    Whitespace WhitespaceSplit Punctuation BertPreTokenizer CharDelimiterSplit UnicodeScripts Split ByteFallback Fuse
    WordPiece BPEDecoder TemplateProcessing RobertaProcessing BertProcessing""".split()
)


class _Model(msgspec.Struct):
    type: Any = None
    dropout: Any = None
    max_input_chars_per_word: Any = None
    continuing_subword_prefix: str | None = None
    end_of_word_suffix: str | None = None


class _Growing(msgspec.Struct):
    """The parts of a tokenizer.json that can lengthen a text, or cost more than others."""

    added_tokens: list[Any] = []
    normalizer: Any = None
    pre_tokenizer: Any = None
    post_processor: Any = None
    decoder: Any = None
    model: _Model = msgspec.field(default_factory=_Model)


@dataclass
class _Length:
    """Bound on a text's length: n characters become at most growth * n + added."""

    growth: float = 1.0
    added: float = 0.0
    mapped: bool = False  # a rule has written characters that a Unicode rule may decompose
    bytes_mapped: bool = False

    def times(self, factor: float) -> None:
        factor = max(factor, 1.0)
        self.growth *= factor
        self.added *= factor

    @property
    def fits(self) -> bool:
        return self.growth <= MOST_GROWTH and self.added <= MOST_ADDED


def too_long(data: bytes) -> str:
    """Describe the part of a tokenizer.json that could lengthen a text too much; "" if there is none.

    Raises:
        msgspec.MsgspecError: it is not the JSON of a tokenizer.
    """
    parts = msgspec.json.decode(data, type=_Growing)
    if reason := _too_much(parts):
        return reason
    for name in ("continuing_subword_prefix", "end_of_word_suffix"):
        if len(getattr(parts.model, name) or "") > _LONGEST_AFFIX:
            return f"model.{name} has more than {_LONGEST_AFFIX} characters"
    length = _Length()
    for name, value in (("normalizer", parts.normalizer), ("pre_tokenizer", parts.pre_tokenizer)):
        for step in _steps(value):
            _lengthen(length, step)
            if not length.fits:
                return _explain(name, length)
    length = _Length()
    for step in _steps(parts.decoder):
        _lengthen(length, step)
        if not length.fits:
            return _explain("decoder", length)
    length = _Length()
    for step in _steps(parts.post_processor):
        _surround(length, step)
        if not length.fits:
            return _explain("post_processor", length)
    added, growth = _added_bytes(parts), _Length()
    for step in _steps(parts.normalizer):
        _lengthen(growth, step)
    if added * growth.growth > MOST_ADDED_BYTES:
        return f"added_tokens have {added:,} bytes of text (at most {MOST_ADDED_BYTES >> 20} MiB are accepted)"
    return ""


def has_known_cost(data: bytes) -> bool:
    """Return whether every part of a tokenizer.json takes time and memory in proportion to the text.

    Raises:
        msgspec.MsgspecError: it is not the JSON of a tokenizer.
    """
    parts = msgspec.json.decode(data, type=_Growing)
    model = parts.model
    if model.type not in ("BPE", None) or model.dropout or model.continuing_subword_prefix or model.end_of_word_suffix:
        return False
    return _added_bytes(parts) <= _KNOWN_ADDED_BYTES and all(
        _is_linear(step)
        for part in (parts.normalizer, parts.pre_tokenizer, parts.decoder, parts.post_processor)
        for step in _steps(part)
    )


def _is_linear(step: dict[str, Any]) -> bool:
    if step.get("type") not in _LINEAR or (step.get("start"), step.get("stop")) not in ((None, None), (1, 0)):
        return False
    pattern = step.get("pattern")
    source = pattern.get("Regex") if isinstance(pattern, dict) else None
    return source is None or source in PATTERNS


def _too_much(parts: _Growing) -> str:
    """Describe steps, regular expressions or tables that are too many or too large; "" if there are none."""
    longest, expressions = parts.model.max_input_chars_per_word, 0
    if isinstance(longest, int) and longest > _LONGEST_WORD:
        return f"model.max_input_chars_per_word is {longest:,} (at most {_LONGEST_WORD:,} is accepted)"
    for name in ("normalizer", "pre_tokenizer", "decoder", "post_processor"):
        steps = list(_steps(getattr(parts, name)))
        if len(steps) > _MOST_STEPS:
            return f"{name} has {len(steps):,} steps (at most {_MOST_STEPS} are accepted)"
        for step in steps:
            pattern = step.get("pattern")
            source = pattern.get("Regex") if isinstance(pattern, dict) else None
            expressions += len(source) if isinstance(source, str) else 0
            if "precompiled_charsmap" in step and not _is_whole(step["precompiled_charsmap"]):
                return f"precompiled_charsmap of {name} is cut off"
    if expressions > _LONGEST_PATTERNS:
        return f"its regular expressions have {expressions:,} characters (at most {_LONGEST_PATTERNS:,} are accepted)"
    return ""


def _added_bytes(parts: _Growing) -> int:
    texts = [token.get("content") for token in parts.added_tokens if isinstance(token, dict)]
    return sum(len(text.encode("utf-8", "replace")) for text in texts if isinstance(text, str))


def _explain(name: str, length: _Length) -> str:
    if length.growth > MOST_GROWTH:
        return f"{name} can make a text {length.growth:.3g} times as long (at most {MOST_GROWTH:g} is accepted)"
    return f"{name} can add {length.added:.3g} characters or tokens to a text (at most {MOST_ADDED} are accepted)"


def _steps(value: Any) -> Iterator[dict[str, Any]]:
    """Yield the steps of a part in order, without the sequences around them."""
    if not isinstance(value, dict):
        return
    inner = [step for name in _NESTED if isinstance(value.get(name), list) for step in value[name]]
    if inner:
        for step in inner:
            yield from _steps(step)
    else:
        yield value


def _lengthen(length: _Length, step: dict[str, Any]) -> None:
    """Apply a step of a normalizer, pre_tokenizer or decoder to the bound on the length.

    Its kind is also recognized by its keys, since older files have no `type`.
    """
    kind = step.get("type")
    if "content" in step and "pattern" in step:
        content = step["content"] if isinstance(step["content"], str) else ""
        width = _width(step["pattern"])
        length.times(len(content) / width if width else 1.0 + len(content))
        length.mapped = length.mapped or not content.isascii()
    elif isinstance(step.get("prepend"), str):
        length.added += len(step["prepend"])
        length.mapped = length.mapped or not step["prepend"].isascii()
    elif "precompiled_charsmap" in step:
        longest = _longest_mapping(step["precompiled_charsmap"])
        length.times(longest if length.mapped or longest > _LONGEST_MAPPING else 1.0)
        length.mapped = True
    elif kind in _UNICODE:
        if length.mapped:
            length.times(_UNICODE[kind])
            length.mapped = False
    elif kind == "ByteLevel" or "add_prefix_space" in step:
        length.times(2.0 if length.bytes_mapped else 1.0)  # each byte of what is not ASCII becomes a character
        length.added += 1
        length.bytes_mapped = length.mapped = True


def _surround(length: _Length, step: dict[str, Any]) -> None:
    """Apply a step of a post-processor to the bound on the length."""
    pieces, special = step.get("single"), step.get("special_tokens")
    if not isinstance(pieces, list):
        length.added += 2  # of BERT and RoBERTa
        return
    texts = 0
    for piece in pieces:
        if isinstance(piece, dict) and isinstance(piece.get("SpecialToken"), dict):
            named = special.get(piece["SpecialToken"].get("id")) if isinstance(special, dict) else None
            ids = named.get("ids") if isinstance(named, dict) else None
            length.added += len(ids) if isinstance(ids, list) else 1
        else:
            texts += 1
    length.times(texts)


def _width(pattern: Any) -> int:
    """Return the fewest characters that a pattern matches; 0 if unknown."""
    if not isinstance(pattern, dict):
        return 0
    if isinstance(pattern.get("String"), str):
        return len(pattern["String"])
    source = pattern.get("Regex")
    if not isinstance(source, str) or len(source) > 1 << 12 or _has_nested_set(source):
        return 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:  # what Python's syntax lacks of Oniguruma's may match nothing at all
            return int(importlib.import_module("re._parser").parse(source).getwidth()[0])
        except (re.error, RecursionError, OverflowError, ImportError, AttributeError):
            return 0


def _has_nested_set(source: str) -> bool:
    """Return whether a set of characters contains another, which Python parses as a longer match."""
    inside = False
    for mark in re.findall(r"\\.|[][]", source, re.DOTALL):
        if mark == "[" and inside:
            return True
        inside = mark == "[" if mark in "[]" else inside
    return False


def _is_whole(encoded: Any) -> bool:
    """Return whether a SentencePiece table has the trie that its first four bytes announce, for which the library
    allocates memory unchecked."""
    try:
        table = base64.b64decode(encoded, validate=False)
    except (ValueError, TypeError):
        return True  # the library refuses it
    return len(table) >= 4 + int.from_bytes(table[:4], "little")


def _longest_mapping(encoded: Any) -> int:
    """Return the most bytes that a character becomes by SentencePiece's table: a trie, then NUL-terminated texts."""
    try:
        table = base64.b64decode(encoded, validate=False)
    except (ValueError, TypeError):
        return 1  # which the library refuses
    begin = 4 + int.from_bytes(table[:4], "little")
    return max(map(len, table[begin:].split(b"\0")), default=1)
