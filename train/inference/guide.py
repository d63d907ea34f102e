"""Grammars that constrain an answer, with the package llguidance: JSON schemas, regular expressions, Lark and GBNF."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from wgrad.device.errors import WgradError
from wgrad.train.data.tokenizer import Tokenizer

# Added to the logits of forbidden tokens. It is finite, since infinite logits are an error, and 3,000 times the highest
# temperature of `sample_settings`, so that such a token weighs exactly 0.
MASKED = np.float32(-3e38)
_ROWS = np.where(np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"), 0, MASKED)
_OF_BYTE = _ROWS.astype(np.float32)  # [256, 8]: biases for the bits of each byte of a mask
# Without a limit, small models would write blanks forever.
_BLANKS = {"whitespace_pattern": r"[ \n\t]{0,16}"}
# Values of a schema's `format` that llguidance knows; JSON Schema calls others annotations.
_FORMATS = {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid", "unknown"}
_VALUES = ("const", "enum", "default", "examples")  # keys of a schema that hold values, not schemas
_NAMED = ("properties", "patternProperties", "$defs", "definitions")  # keys that hold schemas by name


def json_rule(schema: Mapping[str, Any]) -> str:
    """Return a rule of a Lark grammar for a JSON schema. Raises WgradError if it is nested too deep."""
    own = schema.get("x-guidance")
    own = own if isinstance(own, dict) else {}
    try:
        return f"%json {json.dumps({**_known_formats(schema), 'x-guidance': {**_BLANKS, **own}})}"
    except RecursionError:
        raise WgradError("the schema is nested too deep: use fewer levels, or $ref") from None


def _known_formats(schema: Any) -> Any:
    """Return a JSON schema without the formats that llguidance does not know."""
    if isinstance(schema, list):
        return [_known_formats(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    found = dict[str, Any]()
    for name, value in schema.items():
        if name in _NAMED and isinstance(value, Mapping):
            found[name] = {key: _known_formats(item) for key, item in value.items()}
        elif name != "format" or not isinstance(value, str) or value in _FORMATS:
            found[name] = value if name in _VALUES else _known_formats(value)
    return found


def json_grammar(schema: Mapping[str, Any]) -> str:
    """Return the grammar of the values of a JSON schema."""
    return f"start: {json_rule(schema)}"


class Guide:
    """The state of an answer's grammar. after: text that ends a part without constraints; "" if there is none."""

    def __init__(self, matcher: Any, tokenizer: Tokenizer, vocab_size: int, after: str = "") -> None:
        self._matcher, self._vocab_size = matcher, vocab_size
        self._after, self._free = after, tokenizer.decode_stream(skip_special_tokens=False)
        self._seen = ""
        self._mask, self._bias = b"", np.zeros(0, np.float32)
        self.ended = False  # whether the answer is complete

    @property
    def active(self) -> bool:
        """Return whether the grammar constrains the next token."""
        return not self._after

    @property
    def error(self) -> str:
        """Return why the grammar failed, or ""."""
        text: str = self._matcher.get_error()
        return text.partition("\n")[0]

    def add(self, token: int) -> bool:
        """Take the next token. Returns whether the answer is complete."""
        if self._after:
            self._seen = (self._seen + self._free.add(token))[-len(self._after) - 64 :]
            if self._after in self._seen:
                self._after = ""
            return False
        self._matcher.consume_token(token)
        self.ended = bool(self._matcher.is_stopped())
        return self.ended

    def bias(self) -> np.ndarray:
        """Return float32 [V] to add to the logits of the next token; the same array if nothing has changed."""
        mask = self._matcher.compute_bitmask()
        if mask != self._mask:
            self._mask = mask
            bits = _OF_BYTE[np.frombuffer(mask, np.uint8)].reshape(-1)[: self._vocab_size]
            self._bias = np.full(self._vocab_size, MASKED, np.float32)
            self._bias[: len(bits)] = bits
        return self._bias


class Grammars:
    """Guides for the tokens of a model. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._lock, self._tokens = threading.Lock(), None

    def guides(self, grammar: str, after: Sequence[str]) -> list[Guide]:
        """Return a guide of a grammar of llguidance for each answer. after: for each, see `Guide`.

        Raises:
            WgradError: the grammar is wrong, or llguidance is missing.
        """
        library = _library()
        with self._lock:
            if self._tokens is None:
                self._tokens = self._tokenizer.for_grammars(library.LLTokenizer, self._vocab_size)
        matcher = library.LLMatcher(self._tokens, grammar, log_level=0)
        if error := matcher.get_error():
            raise _refused(error)
        if self._is_empty(matcher.deep_copy()):
            raise WgradError("no text fits it: correct it")
        return [Guide(matcher.deep_copy(), self._tokenizer, self._vocab_size, end) for end in after]

    def _is_empty(self, matcher: Any) -> bool:
        """Return whether a matcher at its beginning allows no text, not even an empty one."""
        mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little"))
        assert self._tokens is not None
        return not matcher.is_accepting() and {*allowed.tolist()} <= {*self._tokens.eos_tokens}


def is_installed() -> bool:
    """Return whether grammars can be used."""
    try:
        _library()
    except WgradError:
        return False
    return True


def _library() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise WgradError("llguidance is not installed: pip install 'wgrad[guided]'") from error
    return llguidance


def _refused(error: str) -> WgradError:
    """Return the error for a grammar. error: llguidance's message, without the lines that quote a generated grammar."""
    lines = [line.strip() for line in error.splitlines() if not re.match(r"\s*(\d+ \||\^|$)", line)]
    return WgradError(f"llguidance refuses it: {re.sub(r'^at .*?: ', '', ' '.join(lines))[:300]}")


def lark_of(text: str) -> str:
    """Return a grammar in Lark's or GBNF's syntax in the form of llguidance. Raises WgradError."""
    try:
        found: str = _library().grammar_from("grammar", text)
    except ValueError as error:
        raise _refused(str(error)) from error
    return found


def regex_grammar(pattern: str) -> str:
    """Return the grammar of the texts that a regular expression matches entirely."""
    found: str = _library().LLMatcher.grammar_from_regex(pattern)
    return found
