"""Classes that transformers rebuilds from vocabulary and merges, whatever else tokenizer.json holds: the same ids and
texts; and every class of the installed package is one that is rebuilt here, refused, or read as the file stands."""

from __future__ import annotations

import importlib
import itertools
import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from tests.tools import oracle_package
from tests.train.tokenizer_oracle import once
from wgrad.device.errors import WgradError
from wgrad.train.data import tokenizer_classes
from wgrad.train.data.tokenizer import load_tokenizer
from wgrad.train.model.families import FAMILIES, FORCED_TOKENIZERS, TOKENIZERS
from wgrad.train.model.multimodal import MULTIMODAL

transformers = oracle_package("transformers")

pytestmark = pytest.mark.oracle

PROVERBS = Path(__file__).parents[2] / "examples" / "data" / "proverbs.txt"
# With merges of digits and of decomposed letters, which a class may keep from meeting.
MORE = unicodedata.normalize("NFD", "déjà vu, naïve cafés, Ängström; हिन्दी में लिखो हिन्दी. ")
LINES = [
    *PROVERBS.read_text(encoding="utf-8").split("\n")[:200],
    *[MORE, "1234 2024 12,345.67 in 2024", "I'LL don't"] * 40,
]
NAMED = ["<unk>", "<s>", "</s>", "<pad>", "<|user|>"]
# What the classes name themselves.
DEFAULTS = ["<|endoftext|>", "<|padding|>", "<bos>", "<eos>", "<mask>", "<UNK>", "<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>"]
DEFAULTS += ["<PAD>", "<CLS>", "<SEP>", "<MASK_TOKEN>", "▁<PRE>", "▁<MID>", "▁<SUF>", "▁<EOT>"]
TEXTS = [
    "", " x", "  two  spaces ", "a\nb\n\n c\t d\r\n", "<s> a </s> b", "a<|user|>b <s>c", "<unk> x<pad>",
    "naïve 知恵 → 🜁", "A wise man will hear, 1234 in 2024", "▁a ▁ b", "   ", "</s>", MORE,
    unicodedata.normalize("NFC", MORE), "I'LL say it's 12345 don't", "x<|endoftext|> y<|padding|>",
    "<bos> a<eos><mask> b", " <PRE> a ▁<SUF>b ▁<MID>", "<BOS_TOKEN>a <|END_OF_TURN_TOKEN|> b<CLS> c<SEP>",
]  # fmt: skip


def byte_level() -> Tokenizer:
    """Its own pre-tokenizer cuts nothing, so tokens reach over digits, marks and spaces."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(False, use_regex=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=800,
        special_tokens=NAMED + DEFAULTS,
        initial_alphabet=alphabet,
        show_progress=False,
        max_token_length=9,
    )
    made.train_from_iterator(LINES, trainer)
    return made


def metaspace() -> Tokenizer:
    made = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    octets = [f"<0x{i:02X}>" for i in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=800, special_tokens=NAMED + DEFAULTS + octets, show_progress=False, max_token_length=9
    )
    made.train_from_iterator(LINES, trainer)
    return made


def unigram() -> Tokenizer:
    made = Tokenizer(models.Unigram())
    made.normalizer = normalizers.NFKC()
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace("▁", "always"), decoders.Metaspace("▁", "always")
    trainer = trainers.UnigramTrainer(
        vocab_size=400, special_tokens=NAMED + DEFAULTS, unk_token="<unk>", show_progress=False
    )
    made.train_from_iterator(LINES, trainer)
    return made


KINDS = {"byte level": byte_level, "metaspace": metaspace, "unigram": unigram}
BOS = processors.TemplateProcessing("<s> $A </s>", "<s> $A $B </s>", [("<s>", 1), ("</s>", 2)])
NAMES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
FLAGS = {"lstrip": False, "normalized": False, "rstrip": True, "single_word": False, "special": True}
OPTIONS: list[dict[str, Any]] = [
    {},
    NAMES,
    NAMES | {"add_prefix_space": True, "legacy": True},
    NAMES | {"add_prefix_space": False, "add_bos_token": True, "add_eos_token": True},
    NAMES
    | {
        "added_tokens_decoder": {
            "2": {"content": "</s>", **FLAGS},
            "4": {"content": "<|user|>", **FLAGS},
            "1": {"content": "<s>", **FLAGS, "special": False},
        }
    },
    {"bos_token": None, "additional_special_tokens": ["<mask>"], "image_token": "<CLS>"},
    {"bos_token": "<s>", "extra_special_tokens": {"audio_token": "<SEP>"}, "prefix_token": "<PAD>"},
]


@pytest.fixture(scope="module")
def backends() -> dict[str, str]:
    """Return tokenizers of each kind, whose only added tokens are <unk> and <|user|>."""
    made = {name: json.loads(make().to_str()) for name, make in KINDS.items()}
    for value in made.values():
        value["added_tokens"] = [token for token in value["added_tokens"] if token["content"] in ("<unk>", "<|user|>")]
    return {name: json.dumps(value) for name, value in made.items()}


def write(folder: Path, backend: str, config: dict, model: dict | None, post: bool = False) -> Path:
    folder.mkdir()
    made = Tokenizer.from_str(backend)
    if post:
        made.post_processor = BOS
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if model is not None:
        (folder / "config.json").write_text(json.dumps(model))
    return folder


def compare(folder: Path, case: str, texts: list[str] = TEXTS) -> None:
    ours, theirs = load_tokenizer(folder), transformers.AutoTokenizer.from_pretrained(str(folder))
    tokens = (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id)
    assert [ours.bos_id, ours.eos_id, ours.pad_id] == [i if i is None or i < ours.vocab_size else None for i in tokens]
    assert ours.special_tokens == {name: str(token) for name, token in theirs.special_tokens_map.items()}, case
    for text, special in itertools.product(texts, (True, False)):
        ids = theirs(text, add_special_tokens=special)["input_ids"]
        assert ours.encode(text, special) == (once(ids, ours) if special else ids), f"{case}: {text!r}"
        for skip in (True, False):
            expected = theirs.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert ours.decode(ids, skip) == expected, f"{case}: {text!r} skip {skip}"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", tokenizer_classes.CLASSES)
def test_a_rebuilt_class_encodes_as_in_transformers(
    name: str, kind: str, backends: dict[str, str], tmp_path: Path
) -> None:
    for number, (post, option) in enumerate(itertools.product((True, False), OPTIONS)):
        config = option | {"tokenizer_class": f"{name}Tokenizer{'Fast' if number % 2 else ''}"}
        folder = write(tmp_path / str(number), backends[kind], config, None, post)
        compare(folder, f"{name} {kind} {post} {option}")


@pytest.mark.parametrize("name", tokenizer_classes.CLASSES)
def test_a_long_text_has_the_ids_of_one_go(name: str, backends: dict[str, str], tmp_path: Path) -> None:
    folder = write(tmp_path / "long", backends["metaspace"], NAMES | {"tokenizer_class": f"{name}Tokenizer"}, None)
    compare(folder, name, [" ".join(LINES)[:20_000]])


DECLARED = (None, "GPT2TokenizerFast", "Qwen2Tokenizer", "LlamaTokenizer", "GemmaTokenizer", "PreTrainedTokenizerFast")
OTHERS = ("PreTrainedTokenizer", "BloomTokenizerFast", "NoSuchTokenizer", "TokenizersBackend")


@pytest.mark.parametrize("kind", ["byte level", "metaspace"])
@pytest.mark.parametrize("model", [None, "llama", "mistral", "qwen2", "qwen3", "smollm3"])
def test_the_class_is_the_one_that_transformers_takes(
    model: str | None, kind: str, backends: dict[str, str], tmp_path: Path
) -> None:
    """By model type and declared class, the latter in either file, and beside code that nobody agreed to run."""
    code: dict[str, Any] = {"auto_map": {"AutoTokenizer": [None, "mine.MyTokenizer"]}}
    texts = [TEXTS[i] for i in (1, 2, 4, 8, 12)]
    cases: list[tuple[dict, dict]] = [
        (NAMES | ({"tokenizer_class": name} if name else {}), {}) for name in (*DECLARED, *OTHERS)
    ]
    cases += [(NAMES, {"tokenizer_class": name}) for name in DECLARED[1:3]]
    cases += [(NAMES | code | {"tokenizer_class": name}, {}) for name in DECLARED[1:]]
    for number, (config, more) in enumerate(cases):
        values = None if model is None and not more else {"model_type": model} | more if model else more
        compare(write(tmp_path / str(number), backends[kind], config, values, True), f"{config} {more}", texts)


def test_a_declared_class_yields_to_the_model_type(backends: dict[str, str], tmp_path: Path) -> None:
    """Granite 3, OLMo 2, Phi-3 and Mixtral declare classes that would cut their texts otherwise."""
    texts = [TEXTS[i] for i in (1, 2, 4, 8, 12)]
    cases = [
        ("granite", "GPT2Tokenizer", "byte level"),
        ("olmo2", "GPT2Tokenizer", "byte level"),
        ("phi3", "LlamaTokenizer", "metaspace"),
        ("mixtral", "LlamaTokenizerFast", "metaspace"),
        ("qwen3_5_moe", "Qwen2Tokenizer", "byte level"),
        ("gemma3_text", None, "metaspace"),
        ("qwen3_moe", None, "byte level"),
        ("idefics2", None, "byte level"),
    ]
    for model, declared, kind in cases:
        config = NAMES | ({"tokenizer_class": declared} if declared else {})
        compare(write(tmp_path / model, backends[kind], config, {"model_type": model}, True), model, texts)


def test_every_model_type_has_the_class_of_transformers() -> None:
    mapping = transformers.models.auto.tokenization_auto
    kinds = {kind for family in FAMILIES.values() for kind in (family.model_type, *family.other_types)}
    kinds |= {kind for whole in MULTIMODAL.values() for kind in (whole.model_type, *whole.other_types)}
    names = {kind: name for kind in kinds if (name := mapping.TOKENIZER_MAPPING_NAMES.get(kind))}
    general = ("TokenizersBackend", "PreTrainedTokenizerFast", "MistralCommonBackend")
    known = {k: "" if n in general else n.removesuffix("Fast").removesuffix("Tokenizer") for k, n in names.items()}
    assert known == TOKENIZERS
    forced = {kind for kind in kinds & mapping.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS if known[kind]}
    assert forced == FORCED_TOKENIZERS


def test_every_class_of_transformers_is_known() -> None:
    mapping = transformers.models.auto.tokenization_auto
    names = {*filter(None, mapping.TOKENIZER_MAPPING_NAMES.values()), *dir(importlib.import_module("transformers"))}
    names = {name.removesuffix("Fast") for name in names if name.removesuffix("Fast").endswith("Tokenizer")}
    names = {name.removesuffix("Tokenizer") for name in names}
    assert names == {*tokenizer_classes.CLASSES, *tokenizer_classes._REFUSED, "PreTrained"}


def test_a_class_that_is_not_built_is_refused(backends: dict[str, str], tmp_path: Path) -> None:
    folder = write(tmp_path / "files", backends["unigram"], {"tokenizer_class": "T5TokenizerFast"}, None)
    with pytest.raises(WgradError, match=r"files: tokenizer_class in tokenizer_config.json must be .*got 'T5Tokenizer"):
        load_tokenizer(folder)
    folder = write(tmp_path / "model", backends["unigram"], {}, {"tokenizer_class": "BertTokenizer"})
    with pytest.raises(WgradError, match=r"model: tokenizer_class in config.json must be .*got 'BertTokenizer'"):
        load_tokenizer(folder)
    for model in ("mistral", "qwen2"):  # for which the declared class is not asked
        config = NAMES | {"tokenizer_class": "BertTokenizer"}
        compare(write(tmp_path / model, backends["byte level"], config, {"model_type": model}), model)


@pytest.mark.parametrize("name", ["Bert", "Roberta", "T5", "XGLM"])
def test_a_refused_class_is_another_tokenizer(name: str, backends: dict[str, str], tmp_path: Path) -> None:
    config = NAMES | {"tokenizer_class": f"{name}Tokenizer"}
    theirs = transformers.AutoTokenizer.from_pretrained(str(write(tmp_path / "a", backends["unigram"], config, None)))
    config = NAMES | {"tokenizer_class": "TokenizersBackend"}  # what the message says to write
    folder = write(tmp_path / "b", backends["unigram"], config, None)
    compare(folder, name)
    ours = load_tokenizer(folder)
    assert [ours.encode(text) for text in TEXTS] != [theirs(text)["input_ids"] for text in TEXTS]
