"""Tokenizers of every kind, and of every class of transformers that rebuilds what tokenizer.json says."""

from __future__ import annotations

import json
from functools import cache
from random import Random
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from tests.fuzz.base import CHAT, FINETUNE, GENERATE, KINDS, SPECIAL, VOCAB, dump
from tests.fuzz.case import Case, Files, Special
from tests.fuzz.values import hostile, mutate_json, mutate_value, write_json
from wgrad.train.data.tokenizer_classes import CLASSES

_LETTERS = [
    *"abcdefghijklmnopqrstuvwxyz",
    "th",
    "he",
    "in",
    "the",
    "\u2581",
    "\u2581t",
    "\u2581th",
    "##a",
    "##th",
    "##e",
]
_MERGES = [("t", "h"), ("th", "e"), ("i", "n"), ("\u2581", "t"), ("\u2581t", "h")]
_SETTINGS: dict[str, tuple[Any, ...]] = {
    "add_prefix_space": (True, False, None, 1),
    "legacy": (True, False, None),
    "unk_token": ("<unk>", "<s>", None, {"content": "<unk>"}, {}, {"content": None}, [], 1, ""),
    "bos_token": ("<s>", None, {"content": "<s>", "lstrip": True}, {}, "nope", ""),
    "eos_token": ("</s>", None, {"content": "</s>", "rstrip": True, "single_word": True}, ["</s>"]),
    "pad_token": ("<pad>", None, "[PAD]", {"content": "<pad>", "normalized": "x"}),
    "add_bos_token": (True, False, None, "x"),
    "add_eos_token": (True, False, None),
    "clean_up_tokenization_spaces": (True, False),
    "model_max_length": (1, 0, -1, 1e30, 10**30, "x", None),
    "extra_special_tokens": ({"image": "<i>"}, {}, [], ["<a>"], {"a": 1}, {"a": {"content": "<b>"}}),
    "additional_special_tokens": (["<x>"], [{"content": "<y>"}], [None], "x", [""]),
    "added_tokens_decoder": (
        {"0": {"content": "<s>", "special": True}},
        {"x": {"content": "a"}},
        {"0": {}},
        [],
        {"-1": {"content": "a"}},
    ),
    "split_special_tokens": (True, False),
    "auto_map": ({}, {"AutoTokenizer": ["x", None]}),
    "prefix_token": ("<PRE>", None, {}),
    "use_default_system_prompt": (True, False),
    "chat_template": (None, "", [], [{"name": "default", "template": CHAT}], [{"name": "x"}], [{}], {"default": CHAT}),
}


def _vocabulary(*first: str) -> dict[str, int]:
    texts = dict.fromkeys([*first, *SPECIAL, "<unk>", *_LETTERS, *(f"<0x{n:02X}>" for n in range(256))])
    return {text: number for number, text in enumerate(list(texts)[:VOCAB])}


@cache
def _tokenizers() -> tuple[bytes, ...]:
    """tokenizer.json of each kind of model."""
    vocab = _vocabulary()
    pieces = Tokenizer(models.BPE(vocab, _MERGES, byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    pieces.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    pieces.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    scored = Tokenizer(models.Unigram([(text, -float(n)) for text, n in vocab.items()], unk_id=5, byte_fallback=True))
    scored.pre_tokenizer, scored.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    words = Tokenizer(models.WordPiece(vocab, unk_token="<unk>"))
    words.normalizer, words.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    words.decoder = decoders.WordPiece()
    whole = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    whole.pre_tokenizer = pre_tokenizers.Whitespace()
    octets = Tokenizer(
        models.BPE({t: n for n, t in enumerate(SPECIAL + sorted(pre_tokenizers.ByteLevel.alphabet()))}, [])
    )
    split = pre_tokenizers.Split(r"\p{N}", "isolated")
    octets.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    octets.decoder = decoders.ByteLevel()
    made = (pieces, scored, words, whole, octets)
    for one in made:
        one.add_special_tokens(SPECIAL)
    return tuple(one.to_str().encode() for one in made)


def _model_changed(rng: Random, text: bytes) -> bytes:
    """tokenizer.json with its model's vocabulary, merges or scores changed."""
    value = json.loads(text)
    model = value["model"]
    for _ in range(rng.choice((1, 1, 2))):
        key = rng.choice(sorted(model))
        if isinstance(model[key], list) and model[key]:
            at = rng.randrange(len(model[key]))
            odd: tuple[Any, ...] = (
                "a b",
                "a b c",
                "ab",
                ["a", "b"],
                ["a"],
                [],
                ["a", "b", "c"],
                ["zz", "yy"],
                ["a", 1.0],
                [1, "a"],
                hostile(rng),
            )
            model[key][at] = rng.choice(odd)
        elif isinstance(model[key], dict):
            name = rng.choice(sorted(model[key]))
            chance = rng.random()
            if chance < 0.4:
                del model[key][name]
            else:
                model[key][name] = rng.choice((0, 1, 10**9, 2**32 - 1, 2**32, -1, 1.5, "0", None))
        else:
            model[key] = rng.choice(
                (None, True, False, 0, 1, 0.5, 1.0, "<unk>", "nope", "", "##", "\u2581", hostile(rng))
            )
    if rng.random() < 0.2:
        model[rng.choice(("dropout", "unk_id", "byte_fallback", "ignore_merges", "end_of_word_suffix", "type"))] = (
            rng.choice((None, True, 0.5, 1, 10**9, "x", "</w>", "BPE", "Unigram"))
        )
    return write_json(rng, value)


def vocabulary_case(rng: Random, groups: Any) -> Case:
    """A tokenizer of any kind, with a class and settings in tokenizer_config.json that may or may not fit."""
    text = rng.choice(_tokenizers())
    chance = rng.random()
    if chance < 0.35:
        text = _model_changed(rng, text)
    elif chance < 0.5:
        text = mutate_json(rng, text)
    declared = rng.choice((*sorted(CLASSES), *sorted(CLASSES), "PreTrained", "TokenizersBackend", "Bert", "T5", ""))
    config: dict[str, Any] = {
        "tokenizer_class": f"{declared}Tokenizer{rng.choice(('', '', 'Fast'))}",
        "chat_template": CHAT,
    }
    for key in rng.sample(sorted(_SETTINGS), rng.choice((0, 1, 2, 2, 4))):
        config[key] = rng.choice(_SETTINGS[key])
    if rng.random() < 0.15:
        config = mutate_value(rng, config)
    if rng.random() < 0.2 and isinstance(config, dict):
        config.pop("tokenizer_class", None)
    files: Files = {"model/tokenizer.json": text, "model/tokenizer_config.json": write_json(rng, config)}
    kind = rng.choice(sorted(KINDS.values()))  # it may choose the class
    if rng.random() < 0.5:
        kept = json.loads(groups["model" if kind == "llama" else kind]["model/config.json"])
        kept |= {"tokenizer_class": f"{rng.choice(sorted(CLASSES))}Tokenizer"} if rng.random() < 0.5 else {}
        files["model/config.json"] = dump(kept)
    else:
        kind = "llama"
    if rng.random() < 0.3:
        files["model/special_tokens_map.json"] = Special("absent")
    words = rng.choice(
        (
            [*GENERATE, "the a\u00e9\n x"],
            [*GENERATE, "in", "--chat"],
            [*FINETUNE, "--max-steps", "1", "--max-length", "64"],
        )
    )
    return Case(list(words), ["model" if kind == "llama" else kind, "data"], files)
