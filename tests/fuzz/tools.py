"""Files of and for other tools: their configurations, importance matrices, Modelfiles."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import gguf
import numpy as np

from tests.fuzz.base import CHAT, FFN, HIDDEN, dump
from tests.fuzz.case import Case, Files
from tests.fuzz.texts import mutate_template
from tests.fuzz.values import hostile, mutate_bytes, mutate_json, write_json
from tests.fuzz.weights import mutate_gguf
from tests.fuzz.words import ROLE_TEMPLATES, YAML_LINES, YAML_VALUES

_AXOLOTL: dict[str, Any] = {
    "base_model": "model", "load_in_4bit": True, "adapter": "qlora", "sequence_len": 64, "sample_packing": True,
    "datasets": [{"path": "org/set", "split": "train", "type": "chat_template", "field_messages": "conversation"}],
    "val_set_size": 0.1, "lora_r": 8, "lora_alpha": 16, "lora_target_modules": ["q_proj"], "micro_batch_size": 2,
    "num_epochs": 3, "optimizer": "paged_adamw_8bit", "learning_rate": "2e-4", "warmup_ratio": 0.1, "bf16": "auto",
    "special_tokens": {"pad_token": "</s>"}, "evals_per_epoch": 4, "rl": "dpo", "chat_template": "chatml",
}  # fmt: skip
_FACTORY: dict[str, Any] = {
    "model_name_or_path": "model", "stage": "dpo", "finetuning_type": "lora", "lora_rank": 8, "lora_target": "all",
    "pref_beta": 0.1, "pref_loss": "orpo", "dataset": "demo", "template": "llama3", "cutoff_len": 64,
    "per_device_train_batch_size": 1, "learning_rate": 5e-6, "num_train_epochs": 3.0, "lr_scheduler_type": "cosine",
    "quantization_bit": 4, "val_size": 0.1, "eval_strategy": "steps", "freeze_vision_tower": True,
}  # fmt: skip
_TRL: dict[str, Any] = {
    "model_name_or_path": "model", "dataset_name": "org/set", "dataset_train_split": "train", "packing": True,
    "datasets": [{"path": "org/set", "split": "train"}], "use_peft": True, "lora_r": 32, "eval_strategy": "no",
    "max_steps": -1, "report_to": "none", "output_dir": "out", "gradient_checkpointing": True, "learning_rate": 1e-4,
}  # fmt: skip
EXPORT = "export ollama --adapter adapter --model model --out exported --device cpu --no-create".split()


def import_case(rng: Random, groups: Any) -> Case:
    """A configuration of axolotl, LLaMA-Factory or TRL."""
    value = dict(rng.choice((_AXOLOTL, _FACTORY, _TRL)))
    if rng.random() < 0.5:
        text = mutate_json(rng, dump(value))  # which is YAML too
    else:
        lines = [f"{name}: {_written(rng, known)}" for name, known in value.items() if rng.random() < 0.8]
        lines.insert(rng.randrange(len(lines) + 1), rng.choice(YAML_LINES))
        text = ("\n".join(lines) + "\n").encode("utf-8", "surrogateescape")
    argv = ["import-config", "theirs.yml", *rng.choice(([], [], ["--from", "axolotl"], ["--from", "trl"]))]
    argv += rng.choice(([], ["--out", "ours.yaml"]))
    return Case(argv, ["model"], {"theirs.yml": mutate_bytes(rng, text) if rng.random() < 0.1 else text})


def _written(rng: Random, value: Any) -> str:
    chance = rng.random()
    if chance < 0.2:
        return str(rng.choice(YAML_VALUES))
    known = hostile(rng) if chance < 0.3 else value
    return write_json(rng, known).decode("utf-8", "surrogateescape")


@cache
def _matrix() -> bytes:
    """An importance matrix as llama-imatrix writes it, for the smallest llama."""
    writer_of = {"attn_q": HIDDEN, "attn_k": HIDDEN, "attn_v": HIDDEN, "attn_output": HIDDEN, "ffn_up": HIDDEN}
    with tempfile.TemporaryDirectory() as folder:
        writer = gguf.GGUFWriter(Path(folder) / "m.gguf", "")
        writer.add_string("general.type", "imatrix")
        writer.add_array("imatrix.datasets", ["a"])
        writer.add_uint32("imatrix.chunk_count", 1)
        writer.add_uint32("imatrix.chunk_size", 64)
        for name, width in (writer_of | {"ffn_gate": HIDDEN, "ffn_down": FFN}).items():
            stem = f"blk.0.{name}.weight"
            writer.add_tensor(f"{stem}.in_sum2", np.linspace(0, 9, width, dtype=np.float32)[None])
            writer.add_tensor(f"{stem}.counts", np.full((1, 1), 64, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return (Path(folder) / "m.gguf").read_bytes()


def imatrix_case(rng: Random, groups: Any) -> Case:
    """llama.cpp's importance matrix, changed, or text that is taken for data."""
    data = mutate_gguf(rng, _matrix()) if rng.random() < 0.9 else mutate_bytes(rng, _matrix())
    kind = rng.choice(("q4_0", "q4_0", "q8_0", "q5_0", "iq4_xs", "mxfp4", "q4_k_m", "f16"))
    return Case([*EXPORT, "--imatrix", "m.gguf", "--quantize", kind], ["model", "adapter"], {"m.gguf": data})


def modelfile_case(rng: Random, groups: Any) -> Case:
    """A chat template of which a Modelfile's TEMPLATE is made, or a TEMPLATE of the user's own."""
    source = rng.choice((CHAT, *ROLE_TEMPLATES))
    files: Files = {"model/chat_template.jinja": mutate_template(rng, source)}
    argv = [*EXPORT, "--quantize", "q8_0"]
    if rng.random() < 0.2:
        own = "{{ .System }}{{ range .Messages }}{{ .Role }}: {{ .Content }}\n{{ end }}"
        files = {"mine.tmpl": mutate_template(rng, own)}
        argv += ["--template", "mine.tmpl"]
    return Case(argv, ["model", "adapter"], files)
