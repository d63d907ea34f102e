"""A small chat model and an adapter of it, with a turn's end that no program knows by name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np

from tests.train.conftest import tiny_config, write_checkpoint
from wgrad.train.model.adapter_files import save_adapter
from wgrad.train.model.load_config import load_model_config, parse_model_config
from wgrad.train.model.lora import LoraConfig, linear_modules, lora_shapes
from wgrad.train.model.weights import weight_specs

END = "<turn/>"  # no name that llama.cpp knows
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] }}<turn/>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
OTHER = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}{{ eos_token }}{% endfor %}"
LORA = LoraConfig(r=2, alpha=4.0, target_modules=("q_proj",))


def make_model(folder: Path, always: int | None = None) -> Path:
    """A checkpoint whose tokenizer has END as its last id. always: the only id that the model ever writes."""
    raw = tiny_config(tie_word_embeddings=False)
    weights = {spec.name: np.zeros(spec.shape, np.float32) for spec in weight_specs(parse_model_config(raw))}
    for name, value in weights.items():
        if "norm" in name or "embed" in name:
            value[:] = 1
    weights["lm_head.weight"][299 if always is None else always] = 1
    write_checkpoint(folder, raw, weights)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    model, added = tokenizer["model"], tokenizer["added_tokens"]
    model["vocab"] = {text: id_ for text, id_ in model["vocab"].items() if id_ != 299} | {END: 299}
    model["merges"].pop()  # what made the last one
    added.append({**added[0], "id": 299, "content": END})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


def make_adapter(folder: Path, model: Path, tokenizer: bool = False, template: str | None = None) -> Path:
    """An adapter that changes nothing. tokenizer: the model's is next to it; template: its own."""
    shapes = lora_shapes(LORA, linear_modules(load_model_config(model)), "")
    save_adapter(folder, LORA, {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}, str(model))
    for name in ("tokenizer.json", "tokenizer_config.json") if tokenizer else ():
        shutil.copy(model / name, folder)
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder
