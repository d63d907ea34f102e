"""Text of token ids as they arrive, in pieces that together equal the tokenizer's decoding of all ids.

A decoder is a chain of steps over token strings. Each step here takes the strings as they arrive, and returns its
output as soon as no later token can change it. The rules are those of the decoders in the tokenizers library; a step
that looks at one token at a time calls the library itself.
"""

from __future__ import annotations

import codecs
import copy
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Self

import tokenizers
from tokenizers import decoders

_OCTET = re.compile(r"<0x([0-9a-fA-F]{2})>")
_UNKNOWN = "\ufffd"  # replaces octets that are not UTF-8


class Piece(NamedTuple):
    """A token string, or the next part of one that grows. opens: the piece begins a token."""

    text: str
    opens: bool = True


class Step:
    """One decoder of a chain. `add` takes the next piece; `rest` returns the output that is due if the stream ends now.

    grows: the output is a single token that grows.
    """

    grows = False

    def add(self, piece: Piece) -> list[Piece]:
        raise NotImplementedError

    def rest(self) -> list[Piece]:
        """Return the output that is due if the stream ends now, without changing the step."""
        return []

    def fork(self) -> Self:
        """An independent copy."""
        return copy.copy(self)


class _EachToken(Step):
    """A decoder of the library that depends only on each token, and on whether it is the first."""

    def __init__(self, decoder: decoders.Decoder, knows_first: bool) -> None:
        self._decoder, self._knows_first, self._first = decoder, knows_first, True

    def add(self, piece: Piece) -> list[Piece]:
        tokens = [piece.text] if self._first or not self._knows_first else ["", piece.text]
        self._first = False
        return [Piece(self._decoder.decode(tokens))]


class _Joined(Step):
    """Tokens with a space between them, as a tokenizer without a decoder writes them."""

    def __init__(self) -> None:
        self._first = True

    def add(self, piece: Piece) -> list[Piece]:
        text, self._first = piece.text if self._first else f" {piece.text}", False
        return [Piece(text)]


class _Distinct(Step):
    """CTC: a token that repeats the one before it is dropped."""

    def __init__(self, decoder: decoders.Decoder) -> None:
        self._decoder, self._before = decoder, ""

    def add(self, piece: Piece) -> list[Piece]:
        same, self._before = piece.text == self._before, piece.text
        text = "" if same else self._decoder.decode([piece.text])
        return [Piece(text)] if text else []


class _WordEnd(Step):
    """BPEDecoder: the end of a word is a space, except in the last token."""

    def __init__(self, suffix: str) -> None:
        self._suffix, self._last = suffix, ""
        self._some = False

    def add(self, piece: Piece) -> list[Piece]:
        given = [Piece(self._last.replace(self._suffix, " "))] if self._some else []
        self._last, self._some = piece.text, True
        return given

    def rest(self) -> list[Piece]:
        return [Piece(self._last.replace(self._suffix, ""))] if self._some else []


class _Octets(Step):
    """ByteFallback: a run of tokens such as <0x41> is one string, or if it is no UTF-8 a U+FFFD for each."""

    def __init__(self) -> None:
        self._run, self._invalid = bytearray(), False
        self._check = codecs.getincrementaldecoder("utf-8")()

    def fork(self) -> Self:
        other = copy.copy(self)
        other._run, other._check = bytearray(self._run), codecs.getincrementaldecoder("utf-8")()
        other._check.setstate(self._check.getstate())
        return other

    def add(self, piece: Piece) -> list[Piece]:
        octet = _OCTET.fullmatch(piece.text)
        if octet is None:
            given = [*self.rest(), piece]
            self._run, self._invalid = bytearray(), False
            self._check.reset()
            return given
        self._run.append(int(octet[1], 16))
        if not self._invalid:
            try:
                self._check.decode(self._run[-1:])
                return []
            except UnicodeDecodeError:  # nothing that follows makes the run valid again
                self._invalid = True
        given = [Piece(_UNKNOWN)] * len(self._run)
        self._run.clear()
        return given

    def rest(self) -> list[Piece]:
        if not self._run:
            return []
        try:
            return [Piece(self._run.decode())]
        except UnicodeDecodeError:
            return [Piece(_UNKNOWN)] * len(self._run)


class _Grown(Step):
    """A step whose output is one token that grows."""

    grows = True

    def __init__(self) -> None:
        self._opens = True

    def _given(self, text: str) -> list[Piece]:
        """Return a piece, even of an empty text if it opens the token, since later steps count tokens."""
        if not text and not self._opens:
            return []
        opens, self._opens = self._opens, False
        return [Piece(text, opens)]


class _ByteLevel(_Grown):
    """The octets of all tokens as UTF-8; a token with a character that is no octet is used unchanged."""

    def __init__(self) -> None:
        super().__init__()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def fork(self) -> Self:
        other = copy.copy(self)
        other._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        other._decoder.setstate(self._decoder.getstate())
        return other

    def add(self, piece: Piece) -> list[Piece]:
        octets = [_OCTET_OF.get(character, -1) for character in piece.text]
        whole = piece.text.encode("utf-8", "surrogatepass") if -1 in octets else bytes(octets)
        return self._given(self._decoder.decode(whole))

    def rest(self) -> list[Piece]:
        pending = bytes(self._decoder.getstate()[0])
        return [Piece(pending.decode("utf-8", "replace"), self._opens)] if pending or self._opens else []


class _Fuse(_Grown):
    def add(self, piece: Piece) -> list[Piece]:
        return self._given(piece.text)


class _Strip(_Grown):
    """Strip on a token that grows: up to `start` characters at its beginning and `stop` at its end."""

    def __init__(self, content: str, start: int, stop: int) -> None:
        super().__init__()
        self._content, self._start, self._stop, self._held = content, start, stop, 0

    def add(self, piece: Piece) -> list[Piece]:
        text = piece.text
        while self._start and text:
            if text[0] != self._content:
                self._start = 0
            else:
                self._start, text = self._start - 1, text[1:]
        text = self._content * self._held + text
        end = len(text.rstrip(self._content))
        self._held = min(len(text) - end, self._stop)
        return self._given(text[: len(text) - self._held])


class _Replace(_Grown):
    """Replace on a token that grows. Text that may begin the pattern is held back."""

    def __init__(self, pattern: str, content: str) -> None:
        super().__init__()
        self._pattern, self._content, self._held = pattern, content, ""

    def add(self, piece: Piece) -> list[Piece]:
        *whole, text = (self._held + piece.text).split(self._pattern)
        most = min(len(text), len(self._pattern) - 1)
        keep = next((n for n in range(most, 0, -1) if self._pattern.startswith(text[-n:])), 0)
        self._held = text[len(text) - keep :]
        return self._given(self._content.join([*whole, text[: len(text) - keep]]))

    def rest(self) -> list[Piece]:
        return [Piece(self._held, self._opens)] if self._held else []


class _Metaspace(_Grown):
    """Metaspace on a token that grows, which is the first and only one."""

    def __init__(self, replacement: str, prepend_scheme: str) -> None:
        super().__init__()
        self._replacement, self._by = replacement, " " if prepend_scheme == "never" else ""

    def add(self, piece: Piece) -> list[Piece]:
        return self._given(piece.text.replace(self._replacement, self._by))


class _AtTheEnd(Step):
    """An unknown decoder and all that follow it: their output is known only at the end."""

    def __init__(self, decoder: decoders.Decoder) -> None:
        self._decoder, self._tokens = decoder, list[str]()

    def fork(self) -> Self:
        other = copy.copy(self)
        other._tokens = list(self._tokens)
        return other

    def add(self, piece: Piece) -> list[Piece]:
        if piece.opens:
            self._tokens.append(piece.text)
        else:
            self._tokens[-1] += piece.text
        return []

    def rest(self) -> list[Piece]:
        return [Piece(self._decoder.decode(self._tokens))]


def _octets_of_characters() -> dict[str, int]:
    """Return GPT-2's table: printable characters of Latin-1 are their own octets, U+0100 onwards the others."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [octet for octet in range(256) if octet not in plain]
    return {chr(o): o for o in plain} | {chr(0x100 + n): o for n, o in enumerate(others)}


_OCTET_OF = _octets_of_characters()


def octets_of(token: str) -> bytes | None:
    """Return the octets of a token of a byte-level vocabulary, or of one such as <0x41>."""
    octet = _OCTET.fullmatch(token)
    if octet is not None:
        return bytes([int(octet[1], 16)])
    octets = [_OCTET_OF.get(character, -1) for character in token]
    return None if -1 in octets else bytes(octets)


def _library(spec: dict[str, Any] | list[dict[str, Any]]) -> decoders.Decoder:
    made = decoders.Fuse()  # any decoder takes the state of another
    made.__setstate__(json.dumps({"type": "Sequence", "decoders": spec} if isinstance(spec, list) else spec).encode())
    return made


def _flat(spec: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if spec["type"] == "Sequence":
        for inner in spec["decoders"]:
            yield from _flat(inner)
    else:
        yield spec


def _step(spec: dict[str, Any], grows: bool) -> Step | None:
    """Return the step of a decoder; None if its kind is unknown. grows: whether its input is one token that grows."""
    match spec:
        case {"type": "Fuse"}:
            return _Fuse()
        case {"type": "Strip", "content": content, "start": start, "stop": stop} if grows:
            return _Strip(content, start, stop)
        case {"type": "Replace", "pattern": {"String": pattern}, "content": content} if grows and pattern:
            return _Replace(pattern, content)
        case {"type": "Metaspace", "replacement": replacement, "prepend_scheme": scheme} if grows:
            return _Metaspace(replacement, scheme)
        case _ if grows:
            return None
        case {"type": "ByteLevel"}:
            return _ByteLevel()
        case {"type": "ByteFallback"}:
            return _Octets()
        case {"type": "BPEDecoder", "suffix": suffix} if suffix:
            return _WordEnd(suffix)
        case {"type": "CTC"}:
            return _Distinct(_library(spec))
        case {"type": "Strip" | "Replace" | "Metaspace" | "WordPiece" as kind}:
            return _EachToken(_library(spec), knows_first=kind in ("Metaspace", "WordPiece"))
    return None


def steps_of(backend: tokenizers.Tokenizer) -> list[Step]:
    """Return the steps of a tokenizer's decoder in their initial state."""
    if backend.decoder is None:
        return [_Joined()]
    steps, grows = list[Step](), False
    specs = list(_flat(json.loads(backend.decoder.__getstate__())))
    for number, spec in enumerate(specs):
        step = _step(spec, grows)
        if step is None:
            return [*steps, _AtTheEnd(_library(specs[number:]))]
        steps.append(step)
        grows = grows or step.grows
    return steps


class TextStream:
    """The text that ids add to a prompt: decode(prompt + ids) without its common beginning with decode(prompt).

    A character that the prompt begins and the ids complete belongs to the ids.
    """

    def __init__(self, steps: Sequence[Step], token: Callable[[int], str | None], prompt_ids: Iterable[int]) -> None:
        """token: returns the string of an id, or None if it leaves no text."""
        self._steps, self._token, self._said = [step.fork() for step in steps], token, ""
        for id_ in prompt_ids:
            self._add(id_)
        self._said = self._rest()  # the end of decode(prompt), which later ids may keep or change

    def add(self, id_: int) -> str:
        """Add an id, and return the new text that no later id can change."""
        text = self._add(id_)
        new = _behind(text, self._said)
        common = len(text) - len(new)
        self._said = "" if new else self._said[common:]
        return new

    def rest(self) -> str:
        """Return the remaining text if no further id follows, without changing the stream."""
        return _behind(self._rest(), self._said)

    def pieces(self, ids: Iterable[int]) -> Iterator[str]:
        """Yield the text of each id, and finally the rest."""
        for id_ in ids:
            yield self.add(id_)
        yield self.rest()

    def _add(self, id_: int) -> str:
        text = self._token(id_)
        pieces = [] if text is None else [Piece(text)]
        for step in self._steps:
            pieces = [made for piece in pieces for made in step.add(piece)]
        return "".join(piece.text for piece in pieces)

    def _rest(self) -> str:
        pieces = list[Piece]()
        for step in (step.fork() for step in self._steps):
            pieces = [made for piece in pieces for made in step.add(piece)] + step.rest()
        return "".join(piece.text for piece in pieces)


def _behind(text: str, said: str) -> str:
    """Return `text` without its common beginning with `said`."""
    at = next((n for n, (a, b) in enumerate(zip(text, said)) if a != b), min(len(text), len(said)))
    return text[at:]
