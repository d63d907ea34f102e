"""Tiny checkpoints and data, made without any model library."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from tests.conftest import wgpu_sibling
from tests.train.tiny_models import VOCAB, random_weights, tiny_config
from wgrad.train.commands.cli import main
from wgrad.train.data.tokenizer import Tokenizer as LoadedTokenizer
from wgrad.train.data.tokenizer import load_tokenizer
from wgrad.train.files.safetensors_files import from_arrays, read_entries, write_safetensors

SENTENCES = [
    "the quick brown fox jumps over the lazy dog",
    "a journey of a thousand miles begins with a single step",
    "all that glitters is not gold",
    "better late than never, they say",
    "the early bird catches the worm in the morning",
    "still waters run deep below the bridge",
    "when in doubt, leave it out of the soup",
    "an apple a day keeps the doctor away from here",
]


def write_checkpoint(
    folder: Path, config: dict[str, Any], weights: dict[str, np.ndarray], dtype: str = "float32", shards: int = 1
) -> Path:
    """Write a model folder in Hugging Face layout, with a byte-level tokenizer of VOCAB entries."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**config, "torch_dtype": dtype}))
    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    cast = {name: value.astype(kind) for name, value in weights.items()}
    if shards == 1:
        write_safetensors(folder / "model.safetensors", from_arrays(cast))
    else:
        names = list(cast)
        index: dict[str, str] = {}
        for i in range(shards):
            file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
            part = {n: cast[n] for n in names[i::shards]}
            write_safetensors(folder / file, from_arrays(part))
            index |= dict.fromkeys(part, file)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    (folder / "tokenizer.json").write_text(_tokenizer())
    special = {"tokenizer_class": "TokenizersBackend", "bos_token": None, "eos_token": "<|end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(special))
    return folder


@cache
def _tokenizer() -> str:
    """Return the text of tokenizer.json."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES * 4, trainer)
    return tokenizer.to_str(pretty=True)


@pytest.fixture(scope="session", autouse=True)
def signals_as_in_a_terminal() -> None:
    """Handle signals as in a terminal: in a shell's background or under nohup they are ignored, and runs keep that."""
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if name == "SIGINT" else signal.SIG_DFL)


MakeCheckpoint = Callable[..., Path]


@pytest.fixture
def short_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the samples before and after a run, which take nearly half of a run of two steps.

    This is not for tests that compare with a run in another process, whose samples are not shortened.
    """
    monkeypatch.setattr("wgrad.train.plan.lengths.SAMPLE_TOKENS", 6)


@pytest.fixture
def make_checkpoint(tmp_path: Path) -> MakeCheckpoint:
    """Return make_checkpoint(architecture, dtype=, shards=, seed=, name=, **config), which writes a random model."""

    def make(
        architecture: str = "LlamaForCausalLM",
        *,
        dtype: str = "float32",
        shards: int = 1,
        seed: int = 0,
        name: str = "model",
        **changes: Any,
    ) -> Path:
        config = tiny_config(architecture, **changes)
        return write_checkpoint(tmp_path / name, config, random_weights(config, seed), dtype, shards)

    return make


@pytest.fixture
def whole_run(make_checkpoint: MakeCheckpoint, text_data: Path, tmp_path: Path, capsys: Any) -> Callable[[Any], Path]:
    """Return whole_run(options_for), which makes a folder with model/, data.jsonl, and an undisturbed run in whole/.

    options_for: returns the words of a command, given this folder and the run's output folder.
    """

    def run(options_for: Callable[[Path, Path], list[str]]) -> Path:
        sizes = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "num_hidden_layers": 1}
        make_checkpoint(hidden_size=16, intermediate_size=24, **sizes)
        assert main(options_for(tmp_path, tmp_path / "whole")) == 0
        capsys.readouterr()
        return tmp_path

    return run


def few_steps(folder: Path, out: Path, steps: int, save_steps: int) -> list[str]:
    """Return the words of a finetune command of so many steps on the model and data of `whole_run`."""
    text = (
        f"finetune --model {folder / 'model'} --data {folder / 'data.jsonl'} --out {out} --device cpu --lora-r 2 "
        f"--max-length 24 --max-steps {steps} --save-steps {save_steps} --logging-steps 1 "
        "--learning-rate 5e-3 --gradient-accumulation-steps 1"
    )
    return text.split()


@pytest.fixture
def make_config() -> Callable[..., dict[str, Any]]:
    """Return make_config(architecture, **changes), which gives the config.json of a tiny model."""
    return tiny_config


@pytest.fixture
def text_data(tmp_path: Path) -> Path:
    """Write a JSONL file of 32 short texts and return its path."""
    return write_text_data(tmp_path)


def write_text_data(folder: Path) -> Path:
    path = folder / "data.jsonl"
    texts = [f"{a}; {b}" for i, a in enumerate(SENTENCES) for b in SENTENCES[i % 4 : i % 4 + 4]]
    path.write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    return path


# ---- tokenizers and data files alone, without a model ------------------------------------------
PROVERBS = Path(__file__).parents[2] / "examples" / "data" / "proverbs.txt"
SPECIAL = ["<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>"]
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture(scope="session")
def tokenizer_json() -> str:
    """Return a tokenizer.json: byte-level BPE with 400 tokens and no post-processor."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(PROVERBS.read_text().split("\n"), trainer)
    return backend.to_str()


@pytest.fixture
def make_tokenizer(tokenizer_json: str, tmp_path: Path) -> Callable[..., Path]:
    """Return make(name="tokenizer", bos_in_json=False, **tokenizer_config), which writes a tokenizer's folder."""

    def make(name: str = "tokenizer", bos_in_json: bool = False, **config: Any) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        backend = Tokenizer.from_str(tokenizer_json)
        if bos_in_json:
            backend.post_processor = processors.TemplateProcessing(
                single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 0)]
            )
        backend.save(str(folder / "tokenizer.json"))
        defaults = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "chat_template": CHATML}
        (folder / "tokenizer_config.json").write_text(json.dumps(defaults | config))
        return folder

    return make


@pytest.fixture
def tokenizer(make_tokenizer: Callable[..., Path]) -> LoadedTokenizer:
    """Return the tokenizer of `make_tokenizer`, whose tokenizer.json adds <s>."""
    return load_tokenizer(make_tokenizer(bos_in_json=True))


@pytest.fixture
def write_lines(tmp_path: Path) -> Callable[..., str]:
    """Return write(*objects, name="data.jsonl"), which writes a JSONL file; text is written unchanged."""

    def write(*lines: Any, name: str = "data.jsonl") -> str:
        path = tmp_path / name
        path.write_text("".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines), encoding="utf-8")
        return str(path)

    return write


def scale_last_norm(folder: Path, factor: float) -> None:
    """Scale a model's last norm, so that its weights stay finite, but its activations do not."""
    path = folder / "model.safetensors"
    arrays = {name: entry.array() for name, entry in read_entries(path, "--model").items()}
    arrays["model.norm.weight"] = arrays["model.norm.weight"] * np.float32(factor)
    write_safetensors(path, from_arrays(arrays))


def discrete_sibling() -> Any:
    """Return a new wgpu device that claims to be a discrete GPU."""
    device = wgpu_sibling()
    device.shared_memory = False
    return device


@pytest.fixture
def card(wgpu_device: Any) -> Any:
    return discrete_sibling()


def choose_card(monkeypatch: pytest.MonkeyPatch, facts: Mapping[str, Any] = MappingProxyType({})) -> None:
    """Let each command open a new `discrete_sibling`. facts: what it says of itself in place of the driver's facts."""

    def chosen(spec: str, needs: Any = None, kernels: bool = False) -> Any:
        device = discrete_sibling()
        device.reason = "as a GPU with memory of its own"
        device.facts = {**device.facts, **facts}
        return device

    monkeypatch.setattr("wgrad.train.run.session.select_device", chosen)
    monkeypatch.setattr("wgrad.train.commands.plan.select_device", chosen)


def distance(a: np.ndarray, b: np.ndarray) -> float:
    """Return |a - b| / |b|."""
    return float(np.linalg.norm(np.asarray(a, np.float64) - b) / np.linalg.norm(b))
