"""Multimodal models, of which the text part is read: where their files have it, and what PEFT calls its modules.

Source: transformers, Gemma3ForConditionalGeneration and its key mapping of files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from msgspec import Struct

from wgrad.train.files.decode import convert
from wgrad.train.model.families import FAMILIES

# Architecture and its model type -> that of the text part.
TEXT_PARTS = {
    "Gemma3ForConditionalGeneration": ("gemma3", "Gemma3ForCausalLM"),
    "Qwen3_5ForConditionalGeneration": ("qwen3_5", "Qwen3_5ForCausalLM"),
}
# What stands before the names of the text part: in files (transformers writes the first two), and in PEFT's adapters.
_IN_FILES = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
}
_IN_PEFT = "model.language_model."
_IN_PEFT_BEFORE = "language_model."  # transformers 4.51 and older
# Parts of the whole model that are not the text's, by how their names begin.
_BESIDE_TEXT = (
    "vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.", "model.visual.",
    "mtp.",
)  # fmt: skip


class _File(Struct):
    text_config: dict[str, Any]


def text_config(raw: Mapping[str, Any], architecture: str, where: str) -> dict[str, Any]:
    """config.json of the text part of a model of TEXT_PARTS, as if it were a model of its own. WgradError."""
    inner = convert(raw, _File, where).text_config
    outer = {key: raw[key] for key in ("tie_word_embeddings", "quantization_config") if key in raw}
    kept = {key: value for key, value in inner.items() if key != "tie_word_embeddings"}  # the outer one is what counts
    part = TEXT_PARTS[architecture][1]
    return kept | outer | {"architectures": [part], "model_type": FAMILIES[part].model_type}


def text_name(name: str) -> str:
    """A tensor's name in a file as the text part alone has it; others stay as they are."""
    for prefix, own in _IN_FILES.items():
        if name.startswith(prefix):
            return own + name.removeprefix(prefix)
    return name


def is_beside_text(name: str) -> bool:
    """Return whether a tensor of a multimodal model is of another part than the text's."""
    return name.startswith(_BESIDE_TEXT)


def name_in_peft(module: str) -> str:
    """PEFT's name of a module of the text part in the whole model, whose head is next to it."""
    return _IN_PEFT + module.removeprefix("model.") if module.startswith("model.") else module


def namer_of(names: Iterable[str]) -> Callable[[str], str]:
    """-> from a module of the text part to its name in the adapter that has these names of tensors."""
    names = list(names)
    if any(name.startswith(_IN_PEFT) for name in names):
        return name_in_peft
    if any(name.startswith(_IN_PEFT_BEFORE) for name in names):
        return lambda module: _IN_PEFT_BEFORE + module
    return lambda module: module
