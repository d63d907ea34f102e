"""The fine-tune of `wgrad report-gpu`: a small random model, trained on the GPU and in NumPy."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from wgrad.autograd.select_device import select_device
from wgrad.train.files.safetensors_files import from_arrays, write_safetensors
from wgrad.train.library.finetune import finetune
from wgrad.train.library.results import FinetuneResult
from wgrad.train.model.load_config import parse_model_config
from wgrad.train.model.weights import weight_specs
from wgrad.train.options.config_yaml import read_config_file
from wgrad.train.options.finetune_config import CONFIG_FILE

STEPS, ROWS, TOKENS, LAYERS = 12, 4, 128, 2
# Relative differences of a loss: other orders of summation drift apart over the steps, 16-bit dtypes more.
LIMITS = {"float32": 1e-3, "float16": 2e-2, "bfloat16": 5e-2}
_NOUNS = ("fox", "bridge", "river", "letter", "garden", "engine", "harbour", "lantern")
_VERBS = ("finds", "follows", "paints", "repairs", "remembers")


def compare_runs(spec: str, steps: int = STEPS) -> Iterator[dict[str, Any]]:
    """Train on the device and in NumPy, and yield how much the losses of their steps differ."""
    if spec == "auto":
        spec = select_device(spec, kernels=True).name
    with TemporaryDirectory(prefix="wgrad-report-") as scratch:
        folder = Path(scratch)
        _write_model(folder / "model")
        _write_data(folder / "data.jsonl")
        yield {"set": {"doing": f"training on {spec}"}}
        ours = _train(folder, "gpu", spec, steps)
        losses = [step.loss for step in ours.metrics()]
        yield {"set": {"losses": losses, "seconds_gpu": ours.seconds, "doing": "training in NumPy"}}
        theirs = _train(folder, "cpu", "cpu", steps)
        expected = [step.loss for step in theirs.metrics()]
        compute = str(read_config_file(ours.out / CONFIG_FILE)["compute"])
    worst = max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True))
    limit = LIMITS[compute]
    found = {"losses_cpu": expected, "seconds_cpu": theirs.seconds, "compute": compute, "worst": worst, "limit": limit}
    yield {"set": {**found, "ok": bool(np.isfinite(losses).all() and worst <= limit)}}


def _train(folder: Path, name: str, device: str, steps: int) -> FinetuneResult:
    return finetune(
        model=folder / "model",
        data=folder / "data.jsonl",
        out=folder / name,
        device=device,
        compute="auto",
        max_steps=steps,
        max_length=TOKENS,
        batch_size=ROWS,
        gradient_accumulation_steps=1,
        learning_rate=1e-3,
        eval_fraction=0.0,
        sample=False,
        logging_steps=1,
    )


def _write_model(folder: Path) -> None:
    """Write a Llama with random weights of sizes that suit tensor cores, and a byte-level tokenizer."""
    folder.mkdir()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(alphabet),
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "hidden_act": "silu",
        "max_position_embeddings": 2 * TOKENS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    rng = np.random.default_rng(0)
    weights = {}
    for spec in weight_specs(parse_model_config(raw)):
        value = rng.standard_normal(spec.shape).astype(np.float32)
        weights[spec.name] = 1 + 0.1 * value if spec.kind == "norm" else value / np.float32(spec.shape[-1] ** 0.5)
    write_safetensors(folder / "model.safetensors", from_arrays(weights))


def _write_data(path: Path) -> None:
    rng = np.random.default_rng(1)
    lines = []
    for _ in range(3 * STEPS * ROWS):
        a, b = rng.choice(_NOUNS, 2)
        lines.append(json.dumps({"text": f"The old {a} {rng.choice(_VERBS)} the {b} behind the {rng.choice(_NOUNS)}."}))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
