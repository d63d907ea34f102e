"""Names of a multimodal model's text part: of its tensors in files, and of its modules in adapters."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from wgrad.train.model.families import FAMILIES
from wgrad.train.model.multimodal import MULTIMODAL, Multimodal

# Prefixes of the text model's tensors in files (transformers writes the first three), with those of the text model
# alone. The next ones are prefixes of its modules in adapters.
_IN_FILES = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "language_model.backbone.": "backbone.",
    "model.language_model.model.": "model.",
    "model.language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
    "model.text_model.": "model.",
    "thinker.model.language_model.": "model.",
    "thinker.model.": "model.",
    "thinker.lm_head.": "lm_head.",
}
_IN_PEFT = tuple({whole.in_peft: None for whole in MULTIMODAL.values() if whole.in_peft != "model."})
_OTHERS_IN_PEFT = tuple({family.in_peft: None for family in FAMILIES.values() if family.in_peft != "model."})
_IN_PEFT_BEFORE = "language_model."  # transformers 4.51 and older
# Beginnings of names that do not belong to the text model, with or without "model." in front.
_BESIDE_TEXT = (
    *("vision_tower.", "multi_modal_projector.", "visual.", "vision_model.", "connector.", "mtp."),
    *("audio_tower.", "embed_vision.", "embed_audio.", "vision_embedder.", "image_newline"),
    *("aligner.", "generation_", "vqmodel.", "mm_projector.", "vision_encoder.", "vision_projection.", "merger."),
    *("visual_embeddings_table.", "projector.", "mlp1.", "talker.", "token2wav.", "code2wav."),
    *("high_res_vision_", "image_tower.", "video_tower.", "mlp_AR.", "vit.", "layerwise_projectors."),
    *(
        "view_sep",
        "sam_model.",
        "qwen2_model.",
        "spatial_projectors.",
        "density_router.",
        "vision_final_layernorm.",
        "vision_projector.",
    ),
    *("encoder.", "sound_encoder.", "sound_projection.", "acoustic_tokenizer_encoder.", "semantic_tokenizer_encoder."),
)


def text_name(name: str) -> str:
    """Return the name in the text model alone of a tensor of a file. Other names are returned unchanged."""
    for prefix, own in _IN_FILES.items():
        if name.startswith(prefix):
            return own + name.removeprefix(prefix)
    return name


def is_beside_text(name: str) -> bool:
    """Return whether a tensor of a multimodal model does not belong to its text model."""
    return name.removeprefix("thinker.").removeprefix("model.").startswith(_BESIDE_TEXT)


def name_in_peft(module: str, prefix: str) -> str:
    """Return PEFT's name of a module. prefix: `ModelConfig.in_peft`, of which the head has what "model." follows."""
    if prefix.endswith(".h."):  # layers have another name than "layers"
        prefix, module = prefix.removesuffix("h."), module.replace("model.layers.", "model.h.", 1)
    outer = prefix.partition("model.")[0] if "model." in prefix else ""
    return prefix + module.removeprefix("model.") if module.startswith("model.") else outer + module


def whole_by_name(name: str) -> Multimodal | None:
    """Return a multimodal architecture whose text model has a module of this name in an adapter; None: there is none.

    Architectures share such names: the first that `MULTIMODAL` lists is returned.
    """
    outer = (whole for whole in MULTIMODAL.values() if whole.in_peft in _IN_PEFT)
    return next((whole for whole in outer if name.startswith(whole.in_peft)), None)


def whole_of(architecture: str) -> Multimodal | None:
    """Return a multimodal architecture; None: transformers loads only its text model, or it is not multimodal."""
    whole = MULTIMODAL.get(architecture)
    return None if whole is None or whole.in_peft == "model." else whole


def namer_of(names: Iterable[str]) -> Callable[[str], str]:
    """Return a function from a module of the decoder to its name in an adapter. names: the adapter's tensors."""
    names = list(names)
    for prefix in (*_IN_PEFT, *_OTHERS_IN_PEFT):
        if any(name.startswith(prefix) for name in names):
            return lambda module: name_in_peft(module, prefix)
    if any(name.startswith(_IN_PEFT_BEFORE) for name in names):
        return lambda module: _IN_PEFT_BEFORE + module
    return lambda module: module
