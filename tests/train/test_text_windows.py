"""A long text in windows has the tokens that it has in one go, whatever the tokenizer and the text."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from wgrad.device.errors import WgradError
from wgrad.train.data.text_windows import Encoded, encode_windows

PROVERBS = (Path(__file__).parents[2] / "examples" / "data" / "proverbs.txt").read_text(encoding="utf-8")
SPECIAL = ["<unk>", "<s>", "</s>"]
WINDOW = 3000  # characters; in earnest 65,536


def trained(model, trainer, pre_tokenizer=None, normalizer=None, post_processor=None) -> Tokenizer:
    made = Tokenizer(model)
    if pre_tokenizer is not None:
        made.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        made.normalizer = normalizer
    made.train_from_iterator(PROVERBS.split("\n")[:300], trainer)
    if post_processor is not None:
        made.post_processor = post_processor
    return made


def bpe(**options) -> trainers.BpeTrainer:
    return trainers.BpeTrainer(vocab_size=600, special_tokens=SPECIAL, show_progress=False, **options)


def octets() -> trainers.BpeTrainer:
    return bpe(initial_alphabet=pre_tokenizers.ByteLevel.alphabet())


KINDS = {
    "byte level": lambda: trained(models.BPE(), octets(), pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "byte level, trimmed": lambda: trained(
        models.BPE(), octets(), pre_tokenizers.ByteLevel(), post_processor=processors.ByteLevel(trim_offsets=True)
    ),
    "byte level, composed": lambda: trained(models.BPE(), octets(), pre_tokenizers.ByteLevel(), normalizers.NFC()),
    "whole text": lambda: trained(
        models.BPE(unk_token="<unk>", fuse_unk=True), bpe(max_token_length=9), pre_tokenizers.Metaspace(split=False)
    ),
    "prepended": lambda: trained(
        models.BPE(unk_token="<unk>"),
        bpe(max_token_length=9),
        None,
        normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
    ),
    "unigram": lambda: trained(
        models.Unigram(),
        trainers.UnigramTrainer(vocab_size=400, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False),
        pre_tokenizers.Metaspace(),
        normalizers.NFKC(),
    ),
}


def texts() -> dict[str, str]:
    pick = random.Random(0)
    words = ["<s>", "</s>", " ", "x", "\n", "word "]
    return {
        "prose": PROVERBS[:20000],
        "one letter": "a" * 12000,
        "spaces": " " * 12000,
        "lines": "\n" * 6000 + "x" + "\n" * 6000,
        "runs of spaces": ("x" + " " * 4000 + "y") * 3,
        "blanks": "".join(pick.choice(" \n\t ") for _ in range(12000)),
        "letters": "".join(pick.choice("abcde") for _ in range(12000)),
        "digits": "".join(pick.choice("0123456789") for _ in range(12000)),
        "many scripts": "".join(chr(pick.choice([pick.randrange(32, 1500), 0x4E00 + pick.randrange(4000), 0x301]))
                                for _ in range(9000)),
        "special tokens": "".join(pick.choice(words) for _ in range(6000)),
        "accents": "e\u0301" * 5000,
        "no spaces": PROVERBS[:20000].replace(" ", "").replace("\n", ""),
    }  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_windows_give_the_tokens_of_one_go(kind: str) -> None:
    backend = KINDS[kind]()
    calls: list[int] = []

    def encode(text: str) -> Encoded:
        calls.append(len(text))
        made = backend.encode(text, add_special_tokens=False)
        return Encoded(made.ids, made.offsets)

    for name, text in texts().items():
        whole = encode(text)
        for size in (977, len(text)):  # of the blocks in which the text comes
            calls.clear()
            parts = list(encode_windows((text[i : i + size] for i in range(0, len(text), size)), encode, WINDOW))
            assert [i for part in parts for i in part.ids] == whole.ids, name
            assert [o for part in parts for o in part.offsets] == whole.offsets, name
            if len(whole.ids) > 4000:  # not one token of 6,000 newlines
                assert max(calls) <= 3 * WINDOW, name


def test_what_the_windows_disagree_on_is_made_one_window() -> None:
    """A token's id is its number in its window here, so that no two windows ever agree."""
    sizes: list[int] = []

    def encode(text: str) -> Encoded:
        sizes.append(len(text))
        return Encoded(list(range(len(text))), [(i, i + 1) for i in range(len(text))])

    parts = list(encode_windows(["x" * 40_000], encode, WINDOW))
    assert [i for part in parts for i in part.ids] == list(range(40_000))
    assert sizes[-1] == 40_000 and len(sizes) < 12
    with pytest.raises(WgradError, match="finds no place to cut the text in the .* characters after character 0"):
        list(encode_windows(["x" * 2_000_000], encode, 1 << 17))
    assert max(sizes) <= 1 << 20


@pytest.mark.parametrize("text", ["", "x", "x" * WINDOW, "x" * (WINDOW + 1)])
def test_offsets_go_on_across_the_borders_of_windows(text: str) -> None:
    encode = lambda part: Encoded([1] * len(part), [(i, i + 1) for i in range(len(part))])  # noqa: E731
    parts = list(encode_windows(["", text, ""], encode, WINDOW))
    assert [o for part in parts for o in part.offsets] == [(i, i + 1) for i in range(len(text))]
