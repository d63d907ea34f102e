"""A GGUF file alone as a base model.

Hyper-parameters, tokenizer and template are those of the files from which it was made, and texts are split into words
as llama.cpp splits them.
"""

from __future__ import annotations

import json
import os
import shutil
import unicodedata
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import gguf
import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from tests.families.common import LLAMA3
from tests.families.table import FAMILY_ROWS, of_families
from tests.train.conftest import SENTENCES, VOCAB, random_weights, tiny_config, write_checkpoint
from tests.train.gguf_writer import permuted
from tests.train.llama_cpp_oracle import IN_GGUF, SIZES, in_llama_cpp, log_probabilities, their_log_probabilities
from tests.train.peft_oracle import our_logits, random_adapter, random_ids
from tests.train.tiny_models import as_in_files, name_in_files
from wgrad.autograd.reference import ReferenceDevice
from wgrad.device.errors import WgradError
from wgrad.train.commands.cli import main
from wgrad.train.data.gguf_pieces import by_lines, scores_of, space_prefix
from wgrad.train.data.gguf_tokenizer import write_tokenizer
from wgrad.train.data.tokenizer import load_tokenizer
from wgrad.train.files import gguf_files
from wgrad.train.files.gguf_files import header_digest
from wgrad.train.files.gguf_metadata import read_metadata
from wgrad.train.model import load_streamed
from wgrad.train.model.adapter_files import save_adapter
from wgrad.train.model.expert_keys import ExpertsFile
from wgrad.train.model.families import FAMILIES
from wgrad.train.model.gguf_model import GgufModel
from wgrad.train.model.gguf_write import save_gguf
from wgrad.train.model.load_config import load_model_config
from wgrad.train.model.lora import LoraConfig, linear_modules
from wgrad.train.model.model_files import ModelFiles
from wgrad.train.model.weights import WeightSpec
from wgrad.train.step import find_model as module
from wgrad.train.step.build import build_frozen
from wgrad.train.step.find_model import find_model

pytestmark = pytest.mark.oracle

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|end|>{% endfor %}"
TEXTS = ["the early bird", " two  spaces\n\nand lines", "it's 1234 o'clock, ça và?", "日本 🦊<|end|>x", ""]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(module, "cache_folder", lambda name: tmp_path / "cache" / name)
    return tmp_path / "cache"


@pytest.fixture
def written(tmp_path: Path) -> Callable[..., tuple[Path, Path]]:
    """Return written(architecture, **config), which writes a checkpoint, and its GGUF file in another folder."""

    def make(architecture: str = "LlamaForCausalLM", **changes: Any) -> tuple[Path, Path]:
        raw = in_llama_cpp(architecture, **changes)
        weights = random_weights(raw)
        folder = write_checkpoint(tmp_path / "model", raw, weights)
        names = {"tokenizer_class": "TokenizersBackend", "eos_token": "<|end|>", "chat_template": TEMPLATE}
        (folder / "tokenizer_config.json").write_text(json.dumps(names))
        files, config = ModelFiles(folder), load_model_config(folder)
        path = tmp_path / "alone" / "tiny.gguf"
        path.parent.mkdir()

        def value(spec: WeightSpec) -> np.ndarray:
            path = spec.name.removesuffix("weight")
            of_heads = [value for name, value in weights.items() if name.startswith(f"{path}norms.")]
            whole = np.stack(of_heads) if of_heads else weights[name_in_files(spec.name, raw)]
            return as_in_files(spec.name, whole, raw)

        save_gguf(path, GgufModel(config, files, "float32"), value, write_tokenizer)
        return folder, path

    return make


CASES = of_families(lambda row: ({}, *row.gguf_cases, *row.read_gguf), IN_GGUF)


@pytest.mark.parametrize(("architecture", "changes"), CASES)
def test_the_model_is_the_one_that_was_written(architecture: str, changes: dict[str, Any], written: Any) -> None:
    beside, path = written(architecture, **changes)
    folder = find_model(str(path))
    theirs, ours = load_model_config(beside), load_model_config(folder)
    own = changes.get("rope_scaling") == LLAMA3  # by the tensor of its factors, then
    row, family = FAMILY_ROWS[architecture], FAMILIES[architecture]
    expected = row.as_in_gguf(replace(theirs, rope=ours.rope, architecture=row.read_as or architecture))
    dense = {name: other for name, other in FAMILIES.items() if not issubclass(other.keys, ExpertsFile)}
    first = next((name for name, other in dense.items() if other.gguf == theirs.gguf), architecture)
    told = family.gguf_key or family.gguf_flag
    if first != architecture and theirs.experts is None and not told:  # of the same arithmetic
        names = {key: getattr(ours, key) for key in ("interleaved", "gate_up_proj", "down_proj")}
        expected = replace(expected, architecture=first, **names)
    if theirs.per_layer:  # with a row for every token
        expected = replace(expected, per_layer=replace(theirs.per_layer, vocabulary=VOCAB))
    assert ours == expected
    assert ours.rope == theirs.rope or own
    ids = random_ids()
    found, wanted = (
        our_logits(build_frozen(c, f, ReferenceDevice(), positions=64, adapter=None, quantize=False), ids)
        for f, c in ((folder, ours), (beside, theirs))
    )
    limit = 2e-6 * max(10.0, np.abs(wanted).max())  # A of Mamba-2 is rounded once more in the file
    np.testing.assert_allclose(found, wanted, atol=1e-4 if own else limit)
    for text in TEXTS:
        assert load_tokenizer(folder).encode(text) == load_tokenizer(beside).encode(text), text
    assert load_tokenizer(folder).template_text == TEMPLATE
    assert load_tokenizer(folder).eos_id == load_tokenizer(beside).eos_id
    times = {p: p.stat().st_mtime_ns for p in folder.iterdir()}
    assert find_model(str(path.parent)) == folder and times == {p: p.stat().st_mtime_ns for p in folder.iterdir()}


def test_phi_2_with_q_k_and_v_in_one_tensor_is_the_same_model(written: Any, tmp_path: Path) -> None:
    """Its first converters wrote them so; llama.cpp reads both forms."""
    _, path = written("PhiForCausalLM")
    (tmp_path / "stacked").mkdir()
    other = tmp_path / "stacked/tiny.gguf"
    reader, writer = gguf.GGUFReader(path), gguf.GGUFWriter(other, "phi2")
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            inner = field.types[1] if len(field.types) > 1 else None
            writer.add_key_value(name, field.contents(), field.types[0], inner)
    arrays = {tensor.name: tensor.data for tensor in reader.tensors}
    for name, value in arrays.items():
        if "attn_q." in name:
            parts = [arrays[name.replace("attn_q", part)] for part in ("attn_q", "attn_k", "attn_v")]
            writer.add_tensor(name.replace("attn_q", "attn_qkv"), np.concatenate(parts))
        elif "attn_k." not in name and "attn_v." not in name:
            writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    config, ids = load_model_config(find_model(str(path))), random_ids(seed=2)
    assert load_model_config(find_model(str(other))) == config
    found, wanted = (
        our_logits(build_frozen(config, find_model(str(p)), ReferenceDevice(), positions=64, quantize=False), ids)
        for p in (other, path)
    )
    np.testing.assert_array_equal(found, wanted)
    theirs = [their_log_probabilities(p, ids, None) for p in (other, path)]
    np.testing.assert_allclose(theirs[0], theirs[1], atol=1e-3)
    np.testing.assert_allclose(theirs[0], log_probabilities(found), atol=0.02)


def with_tensors(path: Path, arrays: dict[str, np.ndarray], without: str = "-", **numbers: int) -> Path:
    """Write a copy of a file with other tensors in a new folder.

    without: ending of keys that are left out. numbers: other values of keys of its architecture.
    """
    other = path.parents[1] / "other/tiny.gguf"
    other.parent.mkdir()
    reader = gguf.GGUFReader(path)
    architecture = reader.fields["general.architecture"].contents()
    writer, over = gguf.GGUFWriter(other, architecture), {f"{architecture}.{key}": n for key, n in numbers.items()}
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name not in ("general.architecture", *over) and not name.endswith(without):
            inner = field.types[1] if len(field.types) > 1 else None
            writer.add_key_value(name, field.contents(), field.types[0], inner)
    for key, number in over.items():
        writer.add_uint32(key, number)
    for name, array in arrays.items():
        writer.add_tensor(name, np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return other


def logits_of(path: Path, ids: np.ndarray | None = None) -> np.ndarray:
    folder = find_model(str(path))
    model = build_frozen(load_model_config(folder), folder, ReferenceDevice(), positions=64, quantize=False)
    return our_logits(model, random_ids() if ids is None else ids)


def test_gate_and_up_of_experts_in_one_tensor_are_the_same_model(written: Any) -> None:
    """Newer converters write them so."""
    _, path = written("Qwen3_5MoeForCausalLM")
    arrays = {tensor.name: np.array(tensor.data) for tensor in gguf.GGUFReader(path).tensors}
    for layer in range(2):
        both = [arrays.pop(f"blk.{layer}.ffn_{half}_exps.weight") for half in ("gate", "up")]
        arrays[f"blk.{layer}.ffn_gate_up_exps.weight"] = np.concatenate(both, axis=1)
    np.testing.assert_array_equal(logits_of(with_tensors(path, arrays)), logits_of(path))


def test_latent_attention_is_read_from_older_and_newer_files(written: Any, tmp_path: Path, caplog: Any) -> None:
    """Older files have kv_b_proj unchanged. Merging one writes a newer file, which llama.cpp reads."""
    sizes = {"qk_nope_head_dim": 32, "kv_lora_rank": 32, "v_head_dim": 20}
    sizes |= {"n_routed_experts": 2, "n_group": 1, "topk_group": 1}  # of which all are chosen, whatever is rounded
    _, path = written("DeepseekV3ForCausalLM", **sizes)
    arrays = {tensor.name: np.array(tensor.data) for tensor in gguf.GGUFReader(path).tensors}
    for layer in range(2):
        k, v = (arrays.pop(f"blk.{layer}.attn_{part}_b.weight") for part in "kv")
        assert (k.shape, v.shape) == ((4, 32, 32), (4, 20, 32))
        whole = np.concatenate([k.swapaxes(1, 2), v], axis=1).reshape(4 * 52, 32)
        arrays[f"blk.{layer}.attn_kv_b.weight"] = whole
    lengths = {"attention.head_count_kv": 4, "attention.key_length": 38, "attention.value_length": 20}
    other = with_tensors(path, arrays, without="_mla", **lengths)
    np.testing.assert_array_equal(logits_of(other), logits_of(path))
    config = load_model_config(find_model(str(path)))
    assert load_model_config(find_model(str(other))) == config
    lora = LoraConfig(r=2, alpha=2.0, target_modules=("kv_b_proj",))
    save_adapter(tmp_path / "adapter", lora, random_adapter(lora, linear_modules(config)), str(other))
    words = ["--onto", "dequantized", "--format", "gguf", "--quantize", "q8_0", "--no-compare", "--device", "cpu"]
    assert main(["merge", "--adapter", f"{tmp_path}/adapter", "--out", f"{tmp_path}/merged", *words]) == 0
    assert "Duplicated key" not in caplog.text  # of the older file's lengths and those that are written
    merged = tmp_path / "merged/model.gguf"
    kinds = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(merged).tensors}
    assert kinds["blk.1.attn_k_b.weight"] == kinds["blk.1.attn_v_b.weight"] == "Q8_0"
    adapted = build_frozen(
        config,
        find_model(str(other)),
        ReferenceDevice(),
        positions=64,
        adapter=str(tmp_path / "adapter"),
        quantize=False,
    )
    ids = random_ids(seed=4)
    wanted, found = (log_probabilities(x) for x in (our_logits(adapted, ids), logits_of(merged, ids)))
    assert np.abs(found - wanted).max() < 0.7  # of test_oracle_merge_gguf.KINDS
    assert np.abs(their_log_probabilities(merged, ids, None) - found).max() < 0.4


def test_layers_that_predict_several_tokens_at_once_are_left_out(written: Any, tmp_path: Path) -> None:
    """These layers are left out, also of a merged file."""
    _, path = written("Qwen3_5ForCausalLM")
    arrays = {tensor.name: np.array(tensor.data) for tensor in gguf.GGUFReader(path).tensors}
    arrays |= dict.fromkeys(("blk.2.attn_norm.weight", "blk.2.nextn.enorm.weight"), np.ones(64, np.float32))
    other = with_tensors(path, arrays, block_count=3, nextn_predict_layers=1)
    config, folder = load_model_config(find_model(str(path))), find_model(str(other))
    assert load_model_config(folder) == replace(config, extra_layers=1)
    np.testing.assert_array_equal(logits_of(other), logits_of(path))
    lora = LoraConfig(r=2, alpha=2.0, target_modules=("q_proj",))
    save_adapter(tmp_path / "adapter", lora, random_adapter(lora, linear_modules(config)), str(other))
    words = ["--onto", "dequantized", "--format", "gguf", "--no-compare", "--device", "cpu"]
    assert main(["merge", "--adapter", f"{tmp_path}/adapter", "--out", f"{tmp_path}/merged", *words]) == 0
    assert load_model_config(find_model(str(tmp_path / "merged/model.gguf"))) == config


def test_a_layer_of_nemotron_3_that_predicts_several_tokens_is_left_out(written: Any) -> None:
    _, path = written("NemotronHForCausalLM")
    arrays = {tensor.name: np.array(tensor.data) for tensor in gguf.GGUFReader(path).tensors}
    arrays |= dict.fromkeys(("blk.4.attn_norm.weight", "blk.4.nextn.enorm.weight"), np.ones(64, np.float32))
    other, longer = with_tensors(path, arrays, block_count=5, nextn_predict_layers=1), path.parent / "longer.gguf"
    reader = gguf.GGUFReader(other)
    lists = {f"nemotron_h_moe.{key}": None for key in ("attention.head_count_kv", "feed_forward_length")}
    with_keys(other, longer, {key: [*reader.fields[key].contents(), 2] for key in lists})
    config = load_model_config(find_model(str(path)))
    assert load_model_config(find_model(str(longer))) == replace(config, extra_layers=1)
    np.testing.assert_array_equal(logits_of(longer), logits_of(path))


WORDS = "I'LL it'll print 12345 to 日本;\n\n  ok =1, x  (y)"


@pytest.fixture
def learn(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Tokenizer]:
    """Return learn(cut, lines, special), which trains the tokenizer for `written`.

    It learns merges from whole lines, also across words. Then it gets the pre-tokenizer `cut`.
    """

    def make(cut: Any, lines: list[str], special: tuple[str, ...] = ("<|end|>",), vocabulary: int = VOCAB) -> Tokenizer:
        learner = Tokenizer(models.BPE())
        learner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        trainer = trainers.BpeTrainer(
            vocab_size=vocabulary,
            special_tokens=list(special),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        learner.train_from_iterator(lines * 9, trainer)
        learner.pre_tokenizer = cut
        monkeypatch.setattr("tests.train.conftest._tokenizer", lambda: learner.to_str(pretty=True))
        return learner

    return make


@pytest.mark.parametrize("pre", ["phi-2", "dbrx", "gpt-4o", "stablelm2", "smaug-bpe", "falcon-h1", "pixtral", "lfm2"])
def test_other_names_of_known_cuts(pre: str, written: Any, learn: Any, monkeypatch: Any) -> None:
    """llama.cpp chooses the pre-tokenizer by its name in the file."""
    learn(pre_tokenizers.ByteLevel(add_prefix_space=False), [WORDS])
    monkeypatch.setattr(
        gguf.GGUFWriter, "add_tokenizer_pre", lambda self, _: self.add_string("tokenizer.ggml.pre", pre)
    )
    beside, path = written("PhiForCausalLM")
    tokenizer, compared = load_tokenizer(find_model(str(path))), 0
    assert (tokenizer.encode(WORDS) == load_tokenizer(beside).encode(WORDS)) == (pre == "phi-2")  # GPT-2's own cut
    assert tokenizer.decode(tokenizer.encode("cafe\u0301")) == "cafe\u0301"  # as it is, unlike Qwen's
    for end in range(len(WORDS), 9, -5):
        ids = np.array([tokenizer.encode(WORDS[:end])])
        try:
            theirs = [their_log_probabilities(path, given, None) for given in (WORDS[:end], ids)]
        except LookupError:
            continue
        compared += 1
        np.testing.assert_array_equal(theirs[0], theirs[1], WORDS[:end])
    assert compared > 3


PARTED = [
    WORDS,
    "HTTPServer's SHE'LL 12345 a//b\n\n/c",
    "ab1234567 x\u0301y e\u0301e \u00b2\u00b3 \u00bd",
    "\u30ab\u30bf\u30ab\u30ca\u3072\u3089\u304c\u306a\u6f22\u5b57abc\u6f22",
    "\u0939\u093f\u0928\u094d\u0926\u0940 12 \u0939\u093f\u0928\u094d\u0926\u0940",
    "'sTop don'T \t\t x \r\n\r\n y   ",
    "!abc .def ,GHI (jkl) $x",
    "\u00e9t\u00e9 \u00c9T\u00c9 \u00df\u1e9e \u02b0a \u00aab",
    "  \n  \n a\n",
    "\u2167\u0663\u0664\u0665 1,234.5",
    "camelCase fooBAR it'sX",
]
# The last ones go with make test-all: other names of cuts that the first ones have.
NAMED = ["qwen35", "deepseek-v3", "glm4", "exaone", "exaone4", "hunyuan", "hunyuan-dense", "solar-open", "bailingmoe2"]
NAMED += ["gpt-4o", "tekken"]
# llama.cpp's regular expressions have no classes for capitals and marks. So it cuts words at marks, which the models'
# own patterns, quoted in its source, do not.
CUT_AT_MARKS = ("gpt-4o", "tekken")


@pytest.mark.parametrize("pre", [*NAMED[:4], *(pytest.param(pre, marks=pytest.mark.all) for pre in NAMED[4:])])
def test_words_are_cut_by_the_name_in_the_file(pre: str, written: Any, learn: Any, monkeypatch: Any) -> None:
    learn(pre_tokenizers.ByteLevel(add_prefix_space=False), PARTED, vocabulary=600)
    monkeypatch.setattr(
        gguf.GGUFWriter, "add_tokenizer_pre", lambda self, _: self.add_string("tokenizer.ggml.pre", pre)
    )
    _, path = written(num_hidden_layers=1, vocab_size=600)
    tokenizer, compared = load_tokenizer(find_model(str(path))), 0
    for text in PARTED:
        if pre in CUT_AT_MARKS and any(unicodedata.category(letter)[0] == "M" for letter in text):
            continue
        text = unicodedata.normalize("NFC", text) if pre == "qwen35" else text  # as its tokenizer does
        ids = np.array([tokenizer.encode(text)])
        with suppress(LookupError):
            theirs = [their_log_probabilities(path, given, None, 600, context=128) for given in (text, ids)]
            compared += 1
            np.testing.assert_array_equal(theirs[0], theirs[1], ascii(text))
    assert compared > 6


SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+" + SHORT + "|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*" + SHORT + "|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = O200K.replace(SHORT, "").replace(r"\p{N}{1,3}", r"\p{N}")  # as transformers mends Mistral's files with
LETTERS = (
    "abZ sStTrReEvVlLmMdD''\u2019 \t\n\r/019\u00bd\u00b2\u0663\u2167\u00e9\u00c9\u00df\u1e9e\u017f\u01c5\u02b0\u00aa"
    "\u3042\u65e5\u0301\u0903\u200d\u00a0\u2028\u3000.-_\u00bf\u0130\u0131\u03a3\u03c2\U0001d400\U0001f98a\u0085\x0b\x1c\ufeff\0"
)


@pytest.mark.parametrize(
    ("pre", "pattern", "name"), [("gpt-4o", O200K, "gpt-4o"), ("llama4", O200K, "gpt-4o"), ("tekken", TEKKEN, "tekken")]
)
def test_words_are_cut_as_gpt_4o_cuts_them(
    pre: str, pattern: str, name: str, written: Any, learn: Any, monkeypatch: Any
) -> None:
    """Tokenizers of Phi-4-mini, GPT-OSS and Mistral: what a file says in one word, from a tokenizer.json and back."""
    regex = pytest.importorskip("regex")  # what tiktoken's own description of itself cuts with
    rng = np.random.default_rng(0)
    texts = ["".join(rng.choice(list(LETTERS), rng.integers(1, 15))) for _ in range(2000)]
    split = pre_tokenizers.Split(Regex(pattern), "removed", invert=True)  # as in Phi-4-mini's file
    octets = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    learner = learn(pre_tokenizers.Sequence([split, octets]), [WORDS, "HTTPServer's SHE'LL 12345 a//b"])
    add, names = gguf.GGUFWriter.add_tokenizer_pre, list[str]()

    def name_it(self: Any, name: str) -> None:
        names.append(name)
        add(self, pre)

    monkeypatch.setattr(gguf.GGUFWriter, "add_tokenizer_pre", name_it)
    _, path = written()
    folder = find_model(str(path))
    ours, read, words = (
        load_tokenizer(folder),
        Tokenizer.from_file(str(folder / "tokenizer.json")),
        regex.compile(pattern),
    )
    for text in [*texts, WORDS, "HTTPServer's SHE'LL 12345 a//b\n\n/c"]:
        cut = [text[a:b] for _, (a, b) in read.pre_tokenizer.pre_tokenize_str(text)]
        assert cut == words.findall(text), ascii(text)
        assert ours.encode(text) == learner.encode(text).ids, ascii(text)
    assert names == [name]


@pytest.mark.parametrize(("name", "blanks"), [("Phi-3-mini", 0), ("Phi 4 mini", 2)])
def test_special_tokens_of_phi_3_include_the_blanks_behind(
    name: str, blanks: int, written: Any, learn: Any, monkeypatch: Any
) -> None:
    """Its special tokens include them. No file says so: llama.cpp knows it by the model's name."""
    special = ("<|end|>", "</s>", "<unk>", "<s>", "<|endoftext|>")
    learn(pre_tokenizers.ByteLevel(add_prefix_space=False), [WORDS], special)
    add = gguf.GGUFWriter.add_name
    monkeypatch.setattr(gguf.GGUFWriter, "add_name", lambda self, _: add(self, name))
    _, path = written()
    tokenizer = load_tokenizer(find_model(str(path)))
    text = "the<s> <|end|>\n the bird"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text.replace("\n ", "\n "[:blanks])
    theirs = [their_log_probabilities(path, given, None) for given in (text, np.array(ids))]
    np.testing.assert_array_equal(theirs[0], theirs[1])


def test_a_file_in_place_of_another_is_another_model(written: Any) -> None:
    beside, path = written()
    first = find_model(str(path))
    shutil.rmtree(beside)
    path.unlink()
    path.parent.rmdir()
    _, again = written("Qwen3ForCausalLM")
    assert again == path and find_model(str(path)) != first
    assert load_model_config(find_model(str(path))).architecture == "Qwen3ForCausalLM"


def put_in_place(path: Path, data: bytes) -> None:
    """Replace a file's contents by others of the same size, and keep its modification time."""
    state = path.stat()
    assert len(data) == state.st_size and data != path.read_bytes()
    path.write_bytes(data)
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))


def test_another_file_of_the_same_size_and_time_is_another_model(written: Any) -> None:
    """Its metadata and the factors of its rotary embedding, which are a tensor, tell them apart."""
    _, path = written("LlamaForCausalLM", rope_scaling=LLAMA3, rope_theta=500_000.0)
    found = [find_model(str(path))]
    data = path.read_bytes()
    put_in_place(path, data.replace(b"m.role }}: ", b"m.role }}= "))
    found.append(find_model(str(path)))
    assert load_tokenizer(found[1]).template_text == TEMPLATE.replace(": ", "= ")
    (tensor,) = (t for t in gguf.GGUFReader(path).tensors if t.name == "rope_freqs.weight")
    place = int(tensor.data_offset)
    put_in_place(path, data[:place] + np.float32(3).tobytes() + data[place + 4 :])
    found.append(find_model(str(path)))
    assert len(set(found)) == 3
    put_in_place(path, data)
    assert find_model(str(path)) == found[0]


def split_by_gguf(path: Path, folder: Path, tensors: int, empty_first: bool = False) -> list[Path]:
    """Split a file with the gguf package, as llama-gguf-split does."""
    folder.mkdir()
    writer = gguf.GGUFWriter(None, "llama", split_max_tensors=tensors, small_first_shard=empty_first)
    for entry in read_metadata(path, "--model"):
        if entry.key != "general.architecture":
            writer.add_key_value(entry.key, entry.value, entry.type, entry.sub_type)
    for tensor in gguf.GGUFReader(path).tensors:
        writer.add_tensor(tensor.name, np.array(tensor.data))
    writer.write_header_to_file(folder / "tiny.gguf")
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(folder.glob("*.gguf"))


@pytest.mark.parametrize("empty_first", [False, True])
def test_a_split_file_is_one_model(written: Any, tmp_path: Path, empty_first: bool) -> None:
    """Any part, the folder, and the files next to a config.json give the same logits to the bit."""
    _, path = written(rope_scaling=LLAMA3)
    parts = split_by_gguf(path, tmp_path / "parts", 7, empty_first)
    assert len(parts) > 2
    found = {find_model(str(place)) for place in (*parts, tmp_path / "parts")}
    assert len(found) == 1
    whole, split = find_model(str(path)), found.pop()
    data, digest = parts[-1].read_bytes(), header_digest(parts[0], "--model")
    put_in_place(parts[-1], data.replace(b".weight", b".Weight", 1))  # another model with the same first part
    assert header_digest(parts[0], "--model") != digest
    put_in_place(parts[-1], data)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (whole / name).read_bytes() == (split / name).read_bytes()
    config, ids = load_model_config(whole), random_ids(seed=9)
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(whole / name, tmp_path / "parts")
    folders = whole, split, find_model(str(tmp_path / "parts"))
    wanted, *others = (
        our_logits(build_frozen(config, folder, ReferenceDevice(), positions=64, quantize=False), ids)
        for folder in folders
    )
    for logits in others:
        np.testing.assert_array_equal(logits, wanted)


def test_parts_that_do_not_belong_together_are_refused(written: Any, tmp_path: Path) -> None:
    _, path = written()
    parts = split_by_gguf(path, tmp_path / "parts", 7)
    others = split_by_gguf(path, tmp_path / "others", 6)
    name, count = parts[1].name, len(parts)
    data, key = parts[0].read_bytes(), b"split.tensors.count"
    at = data.index(key) + len(key) + 4  # behind the type
    put_in_place(parts[0], data[:at] + bytes([data[at] + 1]) + data[at + 1 :])
    with pytest.raises(WgradError, match=r"split.tensors.count is \d+, but the parts have \d+ tensors: take all parts"):
        find_model(str(parts[0]))
    put_in_place(parts[0], data)
    aside = parts[1].rename(tmp_path / "aside")
    for place in (parts[0], parts[2], tmp_path / "parts"):
        with pytest.raises(WgradError, match=rf"part 2 of {count} is missing \({name}\): put it next to the others"):
            find_model(str(place))
    shutil.copy(parts[2], parts[1])
    with pytest.raises(WgradError, match=rf"{name}: split.no must be 1 by its name, got 2: take all parts"):
        find_model(str(parts[0]))
    shutil.copy(others[1], parts[1])
    with pytest.raises(WgradError, match=rf"{name}: split.count must be {count} by its name, got {len(others)}: take"):
        find_model(str(parts[0]))
    aside.rename(tmp_path / "tiny-of-two.gguf")
    with pytest.raises(WgradError, match=r"one of the \d parts of a split model: name them as llama.cpp does"):
        find_model(str(tmp_path / "tiny-of-two.gguf"))
    shutil.copy(path, tmp_path / "others")
    with pytest.raises(WgradError, match=r"must have one .gguf model, got 2 \(.*\): keep one, or give its file"):
        find_model(str(tmp_path / "others"))


def test_a_tensor_in_two_parts_is_refused(written: Any, tmp_path: Path) -> None:
    _, path = written()
    parts = split_by_gguf(path, tmp_path / "parts", 7)
    names = [[tensor.name.encode() for tensor in gguf.GGUFReader(part).tensors] for part in parts[:2]]
    first, second = next((a, b) for a in names[0] for b in names[1] if len(a) == len(b))
    put_in_place(parts[1], parts[1].read_bytes().replace(second, first, 1))
    with pytest.raises(WgradError, match=rf"{parts[1].name} has model.layers.\S+, as {parts[0].name} does: "):
        find_model(str(parts[0]))


def test_what_is_kept_goes_with_the_cache(written: Any, own_cache: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(load_streamed, "cache_folder", lambda name: own_cache / name)
    _, path = written()
    folder = find_model(str(path))
    with monkeypatch.context() as patch:
        opened = Mock(wraps=gguf_files.open_reader)
        patch.setattr(gguf_files, "open_reader", opened)
        assert find_model(str(path)) == folder and opened.call_count == 1  # a header takes long to parse
    assert main(["cache", "list"]) == 0
    assert f"configurations and tokenizers in {folder.parent}: 1 GGUF file, " in capsys.readouterr().out
    assert main(["cache", "clear"]) == 0
    assert path.exists() and not folder.exists() and find_model(str(path)) == folder


@pytest.mark.parametrize("is_split", [False, True])
def test_a_run_of_a_file_alone(is_split: bool, written: Any, text_data: Path, tmp_path: Path, capsys: Any) -> None:
    _, path = written(hidden_size=64, num_hidden_layers=1)
    if is_split:  # the first part has only what is said of the model
        path = split_by_gguf(path, tmp_path / "parts", 7, empty_first=True)[1]
    text = f"finetune --model {path} --data {text_data} --out {tmp_path}/out --device cpu --lora-r 2 --max-length 24"
    assert main(f"{text} --max-steps 2 --gradient-accumulation-steps 1".split()) == 0
    config = json.loads((tmp_path / "out/adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(path)
    assert (
        main(
            ["generate", "--adapter", f"{tmp_path}/out", "--prompt", "the", "--device", "cpu", "--max-new-tokens", "2"]
        )
        == 0
    )
    words = ["--onto", "dequantized", "--format", "gguf", "--no-compare", "--device", "cpu"]
    assert main(["merge", "--adapter", f"{tmp_path}/out", "--out", f"{tmp_path}/merged", *words]) == 0
    merged = find_model(str(tmp_path / "merged/model.gguf"))
    assert load_model_config(merged) == load_model_config(find_model(str(path)))


# ---- SentencePiece -----------------------------------------------------------------------------
def write_sentence_piece(path: Path, prefix: bool) -> None:
    """Write a small LLaMA with a vocabulary of pieces and scores."""
    learner = Tokenizer(models.BPE())
    steps: list[Any] = [normalizers.Prepend("▁")] if prefix else []
    learner.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    learner.train_from_iterator(SENTENCES * 4, trainers.BpeTrainer(vocab_size=VOCAB + 100 - 259, show_progress=False))
    by_id = sorted(learner.get_vocab().items(), key=lambda item: item[1])
    letters, joined = ([t for t, _ in by_id if (len(t) == 1) == single] for single in (True, False))
    octets = [f"<0x{i:02X}>" for i in range(256)]
    tokens = ["<unk>", "<s>", "</s>", *octets, *joined, *letters]
    types = [gguf.TokenType.UNKNOWN] + [gguf.TokenType.CONTROL] * 2 + [gguf.TokenType.BYTE] * 256
    types += [gguf.TokenType.NORMAL] * (len(joined) + len(letters))
    scores = [0.0] * 259 + [-float(i) for i in range(len(joined))] + [-1e9] * len(letters)
    raw = tiny_config(**SIZES, vocab_size=len(tokens))
    weights, names = random_weights(raw), gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_context_length(64)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_key_length(16)
    writer.add_value_length(16)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_scores(scores)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_space_prefix(prefix)
    weights["lm_head.weight"][:259] = 0  # never the likeliest: of those llama.cpp tells nothing
    for name, value in weights.items():
        heads = {"q_proj": 4, "k_proj": 2}.get(name.split(".")[-2])
        writer.add_tensor(names.get_name(name, (".weight",)), permuted(value, heads) if heads else value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("prefix", [True, False])
def test_pieces_are_joined_as_llama_cpp_joins_them(prefix: bool, tmp_path: Path) -> None:
    path = tmp_path / "pieces.gguf"
    write_sentence_piece(path, prefix)
    tokenizer = load_tokenizer(find_model(str(path)))
    compared = 0
    for text in [*SENTENCES, *TEXTS[:-1], "</s>the  end", "   ", "thethethe", "a</s> b"]:
        ids = tokenizer.encode(text)
        assert ids[0] == 1
        try:
            theirs = their_log_probabilities(path, text, None, VOCAB + 100)
        except LookupError:
            continue
        compared += 1
        np.testing.assert_array_equal(their_log_probabilities(path, np.array(ids), None, VOCAB + 100), theirs, text)
    assert compared > 8
    assert tokenizer.decode(tokenizer.encode("the early bird, 日本")) == "the early bird, 日本"


HARD = [
    *SENTENCES,
    *("a   b", "  lead and trail  ", "1234567 cafe\u0301", "日本 \U0001f98a\U0001f469\u200d\U0001f680"),
    *("</s>the  end<|turn|> x", "\t\n\n  the", "thethethe", "the\u2581early", "\u00a0\u3000\u200b", "   ", "<0x41>"),
]


def with_pieces(folder: Path, prefix: bool, learned: bool = False) -> tuple[Path, Path]:
    """Write a checkpoint with a tokenizer of pieces, and its GGUF file with the tokenizer as we write it.

    learned: whether its merges are those that training learns, one for each piece.
    """
    write_sentence_piece(folder / "pieces.gguf", prefix)
    raw = json.loads((find_model(str(folder / "pieces.gguf")) / "tokenizer.json").read_text())
    if learned:
        raw["model"]["merges"] = list({"".join(pair): pair for pair in raw["model"]["merges"]}.values())
    size = len(raw["model"]["vocab"])
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
    blanks = [] if prefix else [("\u2581\u2581", False), ("\u2581\u2581\u2581", False)]
    for text, special in [*blanks, ("<|turn|>", True)]:
        added = {"id": raw["model"]["vocab"].setdefault(text, len(raw["model"]["vocab"])), "content": text}
        raw["added_tokens"].append({**added, **flags, "special": special, "normalized": not special})
    config = tiny_config(**SIZES, vocab_size=len(raw["model"]["vocab"]))
    weights = random_weights(config)
    weights["lm_head.weight"][:259] = weights["lm_head.weight"][size:] = 0  # never the likeliest
    model = write_checkpoint(folder / "model", config, weights)
    (model / "tokenizer.json").write_text(json.dumps(raw))
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (model / "tokenizer_config.json").write_text(json.dumps(names))
    path = folder / "alone/written.gguf"
    path.parent.mkdir()
    files = GgufModel(load_model_config(model), ModelFiles(model), "float32")
    save_gguf(path, files, lambda spec: weights[spec.name], write_tokenizer)
    return model, path


@pytest.mark.parametrize(("prefix", "kind"), [(True, "llama"), (False, "llama"), (False, "gemma4")])
def test_pieces_are_written_as_llama_cpp_joins_them(prefix: bool, kind: str, tmp_path: Path) -> None:
    """As scores, or as merges that no scores express."""
    model, path = with_pieces(tmp_path, prefix, learned=kind == "gemma4")
    assert gguf.GGUFReader(path).fields["tokenizer.ggml.model"].contents() == kind
    ours, again, compared = load_tokenizer(model), load_tokenizer(find_model(str(path))), 0
    vocabulary = load_model_config(model).vocab_size
    for text in HARD:
        ids = ours.encode(text)
        assert ids[0] == 1 and again.encode(text) == ids, text
        try:
            theirs = their_log_probabilities(path, text, None, vocabulary)
        except LookupError:
            continue
        compared += 1
        np.testing.assert_array_equal(their_log_probabilities(path, np.array(ids), None, vocabulary), theirs, text)
    assert compared > 13 and again.decode(again.encode("the early bird, 日本")) == "the early bird, 日本"


def test_pieces_have_scores_if_all_their_merges_are_there(tmp_path: Path) -> None:
    """Pieces have scores if all ways to make them are merges, one after another."""
    model, _ = with_pieces(tmp_path, False)
    raw = json.loads((model / "tokenizer.json").read_text())
    assert scores_of(raw) is not None and space_prefix(raw) is False and by_lines(raw)
    merges = raw["model"]["merges"]
    several = next(i for i in range(1, len(merges)) if "".join(merges[i]) == "".join(merges[i - 1]))
    for changed in (merges[:several] + merges[several + 1 :], merges[several:] + merges[:several]):
        assert scores_of({**raw, "model": {**raw["model"], "merges": changed}}) is None
    assert not by_lines({**raw, "model": {**raw["model"], "merges": [*merges, ["\n", "a"]]}})
    cut = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "first", "split": False}
    for changes in ({"pre_tokenizer": cut, "normalizer": None}, {"normalizer": {"type": "NFKC"}}):
        assert space_prefix({**raw, **changes}) is None
    whole: dict[str, Any] = {"pre_tokenizer": cut | {"prepend_scheme": "always"}, "normalizer": None}
    assert space_prefix({**raw, **whole, "added_tokens": []})
    assert space_prefix({**raw, **whole}) is None  # with tokens of blanks
    assert space_prefix({**raw, "model": {**raw["model"], "byte_fallback": False}}) is None


# ---- what is refused ---------------------------------------------------------------------------
def with_keys(path: Path, other: Path, changes: dict[str, Any]) -> None:
    """Write a copy of a file with other values of these keys, or (None) without them."""
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(other, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", *changes):
            continue
        inner = field.types[1] if len(field.types) > 1 else None
        writer.add_key_value(name, field.contents(), field.types[0], inner)
    for key, value in changes.items():
        if value is not None:
            inner = gguf.GGUFValueType.get_type(value[0]) if isinstance(value, list) else None
            writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value), inner)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("LlamaForCausalLM", {"llama.rope.scaling.factor": 4.0}),
        ("LlamaForCausalLM", {"llama.rope.scale_linear": 4.0}),
        ("GraniteForCausalLM", {"granite.attention.scale": None}),
        ("Gemma2ForCausalLM", {"gemma2.attn_logit_softcapping": None, "gemma2.final_logit_softcapping": None}),
    ],
)
def test_keys_that_are_not_there_mean_what_llama_cpp_takes(
    architecture: str, changes: dict[str, Any], written: Any, tmp_path: Path
) -> None:
    gemma = architecture.startswith("Gemma")
    _, path = written(
        architecture, **({"attn_logit_softcapping": 2.0, "final_logit_softcapping": 4.0} if gemma else {})
    )
    other = tmp_path / "other.gguf"
    with_keys(path, other, changes)
    folder = find_model(str(other))
    model = build_frozen(
        load_model_config(folder), folder, ReferenceDevice(), positions=64, adapter=None, quantize=False
    )
    for seed in range(1, 40):
        ids = random_ids(seed=seed)
        with suppress(LookupError):  # llama.cpp tells nothing of these
            theirs, plain = (their_log_probabilities(file, ids, None) for file in (other, path))
            break
    # Its GELU is a table in float16.
    assert np.abs(theirs - log_probabilities(our_logits(model, ids))).max() < (0.02 if gemma else 1e-3)
    assert np.abs(theirs - plain).max() > 0.05  # the keys matter


@pytest.mark.parametrize("value", [0, None])
@pytest.mark.parametrize("kind", ["gemma2", "gemma3"])
def test_gemma_3_may_have_no_window(kind: str, value: int | None, written: Any, tmp_path: Path) -> None:
    """Files of Gemma 2 have the key."""
    _, path = written(f"{kind.capitalize()}ForCausalLM")
    other, key = tmp_path / "other.gguf", f"{kind}.attention.sliding_window"
    with_keys(path, other, {key: value})
    if kind == "gemma2" and value is None:
        with pytest.raises(WgradError, match=f"{key} must be a whole number, got none"):
            find_model(str(other))
    else:
        assert not any(load_model_config(find_model(str(other))).windows)


def test_keys_that_make_no_model_are_refused(written: Any, tmp_path: Path) -> None:
    _, path = written()

    def refused(message: str, key: str, value: Any = None) -> None:
        """Check that the file with another value of a key, or without it, is refused."""
        other = tmp_path / "other.gguf"
        with_keys(path, other, {key: value})
        with pytest.raises(WgradError, match=f"^--model: .*{message}") as caught:
            find_model(str(other))
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 500
        assert not (tmp_path / "cache").exists()

    refused("llama.block_count must be a whole number, got none", "llama.block_count")
    refused("llama.block_count must be a whole number, got 'two'", "llama.block_count", "two")
    refused("a head_count must be a number above 0", "llama.attention.head_count_kv", [2, 1])
    refused("num_hidden_layers must be", "llama.block_count", 99_999)
    refused("rope.dimension_count 8 is not supported", "llama.rope.dimension_count", 8)
    refused("is one of the 3 parts of a split model: name them", "split.count", 3)
    refused("model 'bert' is not supported: gpt2, llama and gemma4 are", "tokenizer.ggml.model", "bert")
    refused("pre 'viking' is not supported", "tokenizer.ggml.pre", "viking")
    refused("token_type must have an entry for each of 300", "tokenizer.ggml.token_type", [1, 2])
    refused("eos_token_id must be below 300, the number of tokens, got 300", "tokenizer.ggml.eos_token_id", 300)
    refused("tokens make no tokenizer .*out of vocabulary", "tokenizer.ggml.merges", ["zzzz yyyy"])
    refused("rope.scaling.factor must be a number, got none", "llama.rope.scaling.type", "linear")
    refused("llama.expert_used_count must be a whole number", "llama.expert_count", 8)
    refused("llama.expert_count must be 0, got -1", "llama.expert_count", -1)
    refused("feed_forward_length must be a list of whole numbers", "llama.feed_forward_length", [float("inf"), 2.0])
    refused("rope.freq_base must be above 1 and at most 1e15, got inf", "llama.rope.freq_base", float("inf"))
    with_keys(path, tmp_path / "other.gguf", {"llama.block_count": 3})
    folder = find_model(str(tmp_path / "other.gguf"))
    with pytest.raises(
        WgradError, match=r"^--model: \S*/other.gguf has no tensor model.layers.2.input_layernorm.weight:"
    ):
        ModelFiles(folder).check(load_model_config(folder))


@pytest.mark.parametrize(
    ("architecture", "key", "value", "message"),
    [
        ("Jamba", "jamba.attention.head_count_kv", [0, 2, 2, 0], r"above 0 at one of every N .* \[1, 2\] of 4"),
        ("Jamba", "jamba.ssm.inner_size", 100, "a multiple of 64, the embedding's, got 100"),
        ("HYV3", "hy_v3.expert_shared_feed_forward_length", 7, r"a multiple of \d+, got 7"),
        ("Cohere2Moe", "cohere2moe.expert_weights_scale", 2.0, "1, got 2"),
        ("Cohere2Moe", "cohere2moe.expert_weights_norm", False, "true with a softmax, got false"),
    ],
)
def test_keys_of_experts_and_mamba_that_make_no_model_are_refused(
    architecture: str, key: str, value: Any, message: str, written: Any, tmp_path: Path
) -> None:
    _, path = written(f"{architecture}ForCausalLM", **({"num_hidden_layers": 4} if architecture == "Jamba" else {}))
    with_keys(path, tmp_path / "other.gguf", {key: value})
    with pytest.raises(WgradError, match=f"{key} must be {message}: "):
        find_model(str(tmp_path / "other.gguf"))
