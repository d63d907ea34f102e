"""Text in pieces is the text of the whole: any decoder, any ids, any place to begin."""

from __future__ import annotations

import os.path
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models

from wgrad.train.data.tokenizer import Tokenizer as Ours
from wgrad.train.data.tokenizer import load_tokenizer

OCTETS = [f"<0x{octet:02X}>" for octet in (0xE2, 0x82, 0xAC, 0x41, 0xF0, 0x9F, 0x98, 0x80, 0xEF, 0xBF, 0xBD, 0xFF)]
WORDS = ["\u2581", "\u2581a", "b", "\u2581\u2581", "\ufffd", "日", "ab"]
BYTES = "Ġ a Ã ¢ Ĥ ¬ â ð Ł ĺ Ģ é ï ¿ ½ ¬Ġâ Ċ 日".split()
SPACED = decoders.Replace("\u2581", " ")
KINDS: dict[str, tuple[Any, list[str]]] = {
    "byte level": (decoders.ByteLevel(), BYTES),
    "llama": (
        decoders.Sequence([SPACED, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]),
        OCTETS + WORDS,
    ),
    "gemma": (decoders.Sequence([SPACED, decoders.ByteFallback(), decoders.Fuse()]), OCTETS + WORDS),
    "octets, spaces later": (decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]), OCTETS + WORDS),
    "octets, then one text": (
        decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.Replace("€A", "<"), SPACED]),
        OCTETS + WORDS,
    ),
    "metaspace": (decoders.Metaspace(), WORDS),
    "metaspace, never first": (decoders.Metaspace(prepend_scheme="never"), WORDS),
    "one metaspace": (decoders.Sequence([decoders.Fuse(), decoders.Metaspace()]), WORDS),
    "word pieces": (decoders.WordPiece(), ["##a", "a", ".", "'", "do", "not", "n't", "##s", "'s", "##"]),
    "ends of words": (decoders.BPEDecoder("</w>"), ["a</w>", "b", "</w>", "</w>c"]),
    "ctc": (decoders.CTC(), ["<pad>", "a", "b", "|", "aa"]),
    "no decoder": (None, ["a", "b", " "]),
    "strip each": (decoders.Strip(" ", 1, 0), [" a", "b", "  ", "c "]),
    "an expression": (decoders.Replace(Regex("a+"), "<"), ["a", "aa", "baa", "b"]),
    "an expression over all": (decoders.Sequence([decoders.Fuse(), decoders.Replace(Regex("a+"), "<")]), ["a", "b"]),
    "strip the end": (decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 2)]), [*BYTES, "b", "ĠĠb"]),
}


def make(kind: str) -> Ours:
    decoder, words = KINDS[kind]
    words = [*dict.fromkeys([*words, "<unk>", "<s>"])]
    backend = Tokenizer(models.WordLevel({word: id_ for id_, word in enumerate(words)}, unk_token="<unk>"))
    backend.add_special_tokens(["<s>"])
    backend.add_tokens(["added"])
    if decoder is not None:
        backend.decoder = decoder
    return Ours(backend, {}, {}, kind)


TOKENIZERS = {kind: make(kind) for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
@given(numbers=st.lists(st.integers(0, 2**16), max_size=9), cut=st.integers(0, 9), skip=st.booleans())
@settings(max_examples=150, deadline=None)
def test_pieces_are_the_whole_less_the_prompt(kind: str, numbers: list[int], cut: int, skip: bool) -> None:
    """And what `rest` gives after each id is right, too, were it the last."""
    tokenizer = TOKENIZERS[kind]
    ids = [number % (tokenizer.vocab_size + 1) for number in numbers]  # one is no token's
    if kind == "strip the end":  # the library fails where there is nothing but what it strips
        ids, cut = [BYTES.index("a"), *ids], cut + 1
    before = tokenizer.decode(ids[:cut], skip)
    stream, text = tokenizer.decode_stream(ids[:cut], skip), ""
    for count in range(min(cut, len(ids)), len(ids) + 1):
        whole = tokenizer.decode(ids[:count], skip)
        assert text + stream.rest() == whole[len(os.path.commonprefix([whole, before])) :]
        if count < len(ids):
            text += stream.add(ids[count])


def test_text_is_given_as_soon_as_it_is_sure() -> None:
    """Also a U+FFFD that was written as one, and each octet of a run that is no UTF-8."""
    wanted = {
        "byte level": [("ï", ""), ("¿", ""), ("½", "\ufffd"), ("a", "a"), ("â", ""), ("a", "\ufffda")],
        "llama": [("\u2581a", "a"), ("\ufffd", "\ufffd"), ("<0x41>", ""), ("<0xFF>", "\ufffd\ufffd")]
        + [("<0x41>", "\ufffd"), ("\u2581a", " a"), ("<0x41>", ""), ("b", "Ab")],
        "ends of words": [("b", ""), ("a</w>", "b"), ("b", "a ")],
        "metaspace": [("\u2581a", "a"), ("\u2581a", " a")],
    }
    for kind, steps in wanted.items():
        known, stream = TOKENIZERS[kind]._backend.get_vocab(), TOKENIZERS[kind].decode_stream()
        assert [stream.add(known[token]) for token, _ in steps] == [text for _, text in steps], kind


def test_a_prompt_that_ends_within_a_character_does_not_come_back() -> None:
    for kind, tokens in {"byte level": "aâĤ¬", "llama": ["b", "<0xE2>", "<0x82>", "<0xAC>"]}.items():
        tokenizer = TOKENIZERS[kind]
        a, *ids = (tokenizer._backend.get_vocab()[token] for token in tokens)
        assert tokenizer.decode_after([a, ids[0]], ids[1:]) == "€"
        assert tokenizer.decode_after([a, *ids], [a]) == tokenizer.decode([a])
        assert tokenizer.decode_after([a], ids[:1]) == "\ufffd"  # a part of one at the end is not lost


@pytest.mark.parametrize("text", ["A wise son \ufffd", "broken: \ufffd\ufffd", "\ufffd", "知恵 \U0001f600"])
def test_text_after_any_prompt_is_decoded_alone(text: str) -> None:
    tokenizer = load_tokenizer(Path(__file__).parents[2] / "examples" / "base_model")
    prompt, ids = tokenizer.encode(text), tokenizer.encode(" héareth 知", add_special_tokens=False)
    assert tokenizer.decode_after(prompt, ids) == " héareth 知"
    assert tokenizer.decode_after(prompt, ids[:-1]) == tokenizer.decode([*prompt, *ids[:-1]]).removeprefix(text)
