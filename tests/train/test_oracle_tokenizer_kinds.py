"""Every kind of tokenizer.json under every class that a configuration declares, against AutoTokenizer."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from tests.tools import oracle_package
from tests.train.tokenizer_oracle import once
from wgrad.train.data.tokenizer import load_tokenizer

transformers = oracle_package("transformers")

pytestmark = pytest.mark.oracle

LINES = (Path(__file__).parents[2] / "examples" / "data" / "proverbs.txt").read_text(encoding="utf-8").split("\n")[:300]
SPECIAL = ["<unk>", "<s>", "</s>", "<pad>", "<|user|>"]
TEXTS = [
    "", "x", " x", "  two  spaces ", "a\nb\n\n c\t d", "<s>a</s>b", "<s> a </s> b", "a<|user|>b",
    " <|user|> b<|user|>c", "<unk> x<pad>", "naïve 知恵 → 🜁", "A wise man will hear, 1234", "▁a ▁ b", "\n",
    "   ", "</s>", "<s><s>  x",
]  # fmt: skip


def sentencepiece(prepend: str) -> Tokenizer:
    """BPE over spaces written as ▁, with bytes for what is unknown, as LLaMA 1 and 2 and Mistral have it."""
    made = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    if prepend == "normalizer":  # as files converted by transformers 4 do
        made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        made.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend, split=False)
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    octets = [f"<0x{i:02X}>" for i in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=SPECIAL + octets, show_progress=False, max_token_length=8
    )
    made.train_from_iterator(LINES, trainer)
    value = json.loads(made.to_str())
    value["added_tokens"] = [token for token in value["added_tokens"] if token["content"] in SPECIAL]
    return Tokenizer.from_str(json.dumps(value))


def unigram() -> Tokenizer:
    made = Tokenizer(models.Unigram())
    made.normalizer = normalizers.NFKC()
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace("▁", "always"), decoders.Metaspace("▁", "always")
    made.train_from_iterator(
        LINES, trainers.UnigramTrainer(vocab_size=400, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False)
    )
    return made


def byte_level(digits: bool) -> Tokenizer:
    made = Tokenizer(models.BPE())
    octets = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), octets]) if digits else octets
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(LINES, trainer)
    return made


KINDS = {
    "prepended by the normalizer": lambda: sentencepiece("normalizer"),
    "prepended always": lambda: sentencepiece("always"),
    "prepended first": lambda: sentencepiece("first"),
    "never prepended": lambda: sentencepiece("never"),
    "unigram": unigram,
    "byte level": lambda: byte_level(False),
    "byte level, digits": lambda: byte_level(True),
}
POST = {
    "nothing": None,
    "bos": processors.TemplateProcessing("<s> $A", "<s> $A $B", [("<s>", 1)]),
    "bos and eos": processors.TemplateProcessing("<s> $A </s>", "<s> $A $B </s>", [("<s>", 1), ("</s>", 2)]),
}
PLAIN = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
OPTIONS: dict[str, dict] = {
    "no more": {},
    "legacy": {"legacy": True},
    "not legacy": {"legacy": False},
    "no space": {"add_prefix_space": False},
    "space": {"add_prefix_space": True},
    "space null, legacy": {"add_prefix_space": None, "legacy": True},
    "bos and eos asked for": {"add_bos_token": True, "add_eos_token": True},
    "no bos asked for": {"add_bos_token": False},
    "no bos": {"bos_token": None},
    "added tokens": {"added_tokens_decoder": {str(i): {"content": text, **PLAIN} for i, text in enumerate(SPECIAL)}},
    "added token, other flags": {
        "added_tokens_decoder": {"2": {"content": "</s>", **PLAIN, "normalized": True, "rstrip": True}}
    },
    "eos as an object": {
        "eos_token": {"__type": "AddedToken", "content": "</s>", "lstrip": False, "normalized": True, "rstrip": False}
        | {"single_word": False}
    },
    "additional": {"additional_special_tokens": ["<|user|>"]},
    "no pad, no unk": {"pad_token": None, "unk_token": None},
}
CLASSES = ("LlamaTokenizer", "LlamaTokenizerFast", "PreTrainedTokenizerFast", None)
MODELS = (None, "llama", "mistral", "smollm3", "qwen3")


@pytest.fixture(scope="module")
def backends() -> dict[str, str]:
    return {name: make().to_str() for name, make in KINDS.items()}


def combinations(kind: str) -> list[tuple]:
    """Every option with every post-processor, the classes and model types in turn, so that each meets each."""
    pairs = itertools.cycle((c, m) for c in CLASSES for m in MODELS if m != "qwen3" or (c or "").startswith("Llama"))
    shift = list(KINDS).index(kind) * 5
    every = [(post, option) for post in POST for option in OPTIONS]
    return [(*pair, *entry) for pair, entry in zip(itertools.islice(pairs, shift, None), every)]


@pytest.mark.parametrize("kind", KINDS)
def test_ids_and_texts_are_those_of_transformers(kind: str, backends: dict[str, str], tmp_path: Path) -> None:
    for number, (declared, model, post, option) in enumerate(combinations(kind)):
        folder = tmp_path / str(number)
        folder.mkdir()
        backend = Tokenizer.from_str(backends[kind])
        if POST[post] is not None:
            backend.post_processor = POST[post]
        backend.save(str(folder / "tokenizer.json"))
        config = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"} | OPTIONS[option]
        config |= {"tokenizer_class": declared} if declared else {}
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        if model:
            (folder / "config.json").write_text(json.dumps({"model_type": model}))
        ours, theirs = load_tokenizer(folder), transformers.AutoTokenizer.from_pretrained(str(folder))
        case = f"{declared} {model} {post} {option}"
        for text, special in itertools.product(TEXTS, (True, False)):
            ids = theirs(text, add_special_tokens=special)["input_ids"]
            assert ours.encode(text, special) == (once(ids, ours) if special else ids), f"{case}: {text!r}"
            for skip in (True, False):
                expected = theirs.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
                assert ours.decode(ids, skip) == expected, f"{case}: {text!r} skip {skip}"


@pytest.mark.parametrize("kind", ["prepended always", "unigram"])
def test_special_tokens_map_and_added_tokens_are_read_as_in_transformers(
    kind: str, backends: dict[str, str], tmp_path: Path
) -> None:
    """The former is not read where the configuration lists added tokens."""
    vocabulary = Tokenizer.from_str(backends[kind]).get_vocab()
    mine = {"model_specific_special_tokens": {"tool_token": min(t for t in vocabulary if t.isalpha() and len(t) == 2)}}
    listed = {"added_tokens_decoder": {"3": {"content": "<pad>", **PLAIN}}}
    more: list[dict] = [{}, listed, mine, mine | {"image_token": "</s>"}, mine | {"add_bos_token": True}]
    for number, (declared, options) in enumerate(itertools.product((CLASSES[0], CLASSES[2]), more)):
        folder = tmp_path / str(number)
        folder.mkdir()
        Tokenizer.from_str(backends[kind]).save(str(folder / "tokenizer.json"))
        config = {"tokenizer_class": declared, "bos_token": "<pad>"} | options
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        eos = {"content": "</s>", "lstrip": False, "normalized": True, "rstrip": False, "single_word": False}
        (folder / "special_tokens_map.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": eos}))
        (folder / "added_tokens.json").write_text(json.dumps({"<|user|>": 4}))
        ours, theirs = load_tokenizer(folder), transformers.AutoTokenizer.from_pretrained(str(folder))
        assert (ours.bos_id, ours.eos_id) == (theirs.bos_token_id, theirs.eos_token_id)
        for text in (*TEXTS, *LINES[:9]):
            assert ours.encode(text) == theirs(text)["input_ids"], text
