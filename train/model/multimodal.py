"""Multimodal models, of which only the text model is read: its names in files, and its modules' names in PEFT.

Source: transformers, its classes ...ForConditionalGeneration and its key mappings of files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from msgspec import Struct

from wgrad.device.errors import WgradError
from wgrad.train.files.decode import convert, show
from wgrad.train.model.families import FAMILIES


@dataclass(frozen=True)
class Multimodal:
    """A multimodal architecture.

    Attributes:
        model_type: model_type of its config.json.
        texts: Architecture in FAMILIES by model_type of text_config. The first is the default.
        text_defaults: Defaults of text_config that differ from the family's.
        outer: Values that override text_config's, unless config.json has them next to text_config.
        inner_tie: Whether tie_word_embeddings of text_config counts too.
        flat: Whether config.json may have text_config's keys at its top level instead.
        in_peft: Prefix in transformers and PEFT of the text model's modules. It is "model." if AutoModelForCausalLM
            loads only the text model.
        experts_files: Names of experts in files, a key of `expert_files.LAYOUTS`, if they differ from the family's.
        balanced: Whether transformers adds a load-balancing loss of the text model's experts.
        text_keys: Places of text_config in config.json, as keys from outside to inside; the first that is there counts.
        renamed: Keys of text_config with other names in the family, and those names.
        other_types: Further values of `model_type` of the architecture.
        auto: Class of transformers that loads the model.
        task: The Hub's name of what the model does.
    """

    model_type: str
    texts: Mapping[str, str]
    text_defaults: Mapping[str, Any] = field(default_factory=dict)
    outer: Mapping[str, Any] = field(default_factory=dict)
    inner_tie: bool = False
    flat: bool = False
    in_peft: str = "model.language_model."
    experts_files: str = ""
    balanced: bool = False
    text_keys: tuple[tuple[str, ...], ...] = (("text_config",),)
    renamed: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    other_types: tuple[str, ...] = ()
    auto: str = "AutoModelForImageTextToText"
    task: str = "image-text-to-text"


_EVERY = {family.model_type: name for name, family in FAMILIES.items()}
_QWEN25 = {
    **{"vocab_size": 152_064, "hidden_size": 8192, "intermediate_size": 29_568, "num_hidden_layers": 80},
    **{"num_attention_heads": 64, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0},
    "max_window_layers": 80,
}
_QWEN3_MOE = {
    **{"intermediate_size": 5632, "num_attention_heads": 16, "num_key_value_heads": 16, "rope_theta": 500_000.0},
    **{"max_position_embeddings": 128_000, "num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408},
}
_GLM_4V = {"max_position_embeddings": 32_768, "rms_norm_eps": 1e-5, "partial_rotary_factor": 1.0}
_BIASED = {"attention_bias": True}  # whatever the file says
_TIED = {"tie_word_embeddings": True}
_OMNI: dict[str, Any] = {
    "text_keys": (("thinker_config", "text_config"),),
    "in_peft": "thinker.model.language_model.",
    "auto": "AutoModelForMultimodalLM",
    "task": "any-to-any",
}
_SOUND: dict[str, Any] = {"auto": "AutoModelForMultimodalLM", "task": "audio-text-to-text"}
_FLAMINGO: dict[str, Any] = {"inner_tie": True, "auto": "AutoModelForSeq2SeqLM", "task": "audio-text-to-text"}
_VOXTRAL = {
    **{"vocab_size": 131_072, "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 30},
    **{"num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5},
    "rope_theta": 100_000_000.0,
}
_GLM_ASR = {
    **{"vocab_size": 59_264, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28},
    **{"num_attention_heads": 16, "num_key_value_heads": 4, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5},
}
_GLM_OCR = {
    **{"vocab_size": 59_392, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 16},
    **{"num_attention_heads": 16, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "partial_rotary_factor": 1.0},
}
_PADDLE_OCR = {
    **{"vocab_size": 103_424, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 18},
    **{"num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 131_072},
    **{"rms_norm_eps": 1e-5, "rope_theta": 500_000.0},
}
_DOCLING = {
    **{"vocab_size": 133_800, "hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 28},
    **{"num_attention_heads": 16, "num_key_value_heads": 4, "max_position_embeddings": 32_768, "rms_norm_eps": 1e-5},
    **{"embedding_multiplier": 12.0, "logits_scaling": 4.0, "residual_multiplier": 0.263},
    "attention_multiplier": 0.015625,
}
_QWEN25_OMNI = {
    **{"vocab_size": 152_064, "hidden_size": 3584, "intermediate_size": 18_944, "num_hidden_layers": 28},
    **{"num_attention_heads": 28, "num_key_value_heads": 4, "rope_theta": 1_000_000.0},
}
_QWEN3_OMNI = {
    **{"vocab_size": 3584, "intermediate_size": 18_944, "num_hidden_layers": 28, "num_attention_heads": 28},
    **{"rope_theta": 1_000_000.0, "norm_topk_prob": True},
}
_QWEN3 = {"max_position_embeddings": 128_000, "rope_theta": 500_000.0, "use_sliding_window": False}


def _text_first(first: str) -> dict[str, str]:
    """Return all families as possible text models, with `first` as the default."""
    return {first: _EVERY[first], **_EVERY}


MULTIMODAL = {
    "Gemma3ForConditionalGeneration": Multimodal("gemma3", {"gemma3_text": "Gemma3ForCausalLM"}),
    "Gemma3nForConditionalGeneration": Multimodal("gemma3n", {"gemma3n_text": "Gemma3nForCausalLM"}),
    "Gemma4ForConditionalGeneration": Multimodal("gemma4", {"gemma4_text": "Gemma4ForCausalLM"}),
    "Gemma4UnifiedForConditionalGeneration": Multimodal(
        "gemma4_unified", {"gemma4_unified_text": "Gemma4UnifiedForCausalLM"}
    ),
    "AyaVisionForConditionalGeneration": Multimodal("aya_vision", _text_first("cohere2"), outer=_TIED),
    "Cohere2VisionForConditionalGeneration": Multimodal("cohere2_vision", _text_first("cohere2"), outer=_TIED),
    "Exaone4_5_ForConditionalGeneration": Multimodal("exaone4_5", _text_first("exaone4")),
    "Idefics3ForConditionalGeneration": Multimodal("idefics3", _text_first("llama"), in_peft="model.text_model."),
    "Lfm2VlForConditionalGeneration": Multimodal("lfm2_vl", _text_first("lfm2"), outer=_TIED),
    "Llama4ForConditionalGeneration": Multimodal("llama4", {"llama4_text": "Llama4ForCausalLM"}, in_peft="model."),
    "Mistral3ForConditionalGeneration": Multimodal("mistral3", _text_first("mistral"), outer=_TIED),
    "LlavaForConditionalGeneration": Multimodal("llava", _text_first("llama"), inner_tie=True),
    "LlavaNextForConditionalGeneration": Multimodal("llava_next", _text_first("llama")),
    "LlavaOnevisionForConditionalGeneration": Multimodal("llava_onevision", _text_first("qwen2"), inner_tie=True),
    "InternVLForConditionalGeneration": Multimodal("internvl", _text_first("qwen2"), outer=_TIED),
    "Qwen2VLForConditionalGeneration": Multimodal(
        "qwen2_vl", {"qwen2_vl_text": "Qwen2ForCausalLM"}, _QWEN25, inner_tie=True, flat=True
    ),
    "Qwen2_5_VLForConditionalGeneration": Multimodal(
        "qwen2_5_vl", {"qwen2_5_vl_text": "Qwen2ForCausalLM"}, _QWEN25, inner_tie=True, flat=True
    ),
    "Qwen2_5OmniForConditionalGeneration": Multimodal(
        "qwen2_5_omni", {"qwen2_5_omni_text": "Qwen2ForCausalLM"}, _QWEN25_OMNI, **_OMNI
    ),
    "Qwen2_5OmniThinkerForConditionalGeneration": Multimodal(
        "qwen2_5_omni_thinker", {"qwen2_5_omni_text": "Qwen2ForCausalLM"}, _QWEN25_OMNI
    ),
    "Qwen3OmniMoeForConditionalGeneration": Multimodal(
        "qwen3_omni_moe", {"qwen3_omni_moe_text": "Qwen3MoeForCausalLM"}, _QWEN3_OMNI, balanced=True, **_OMNI
    ),
    "Qwen3OmniMoeThinkerForConditionalGeneration": Multimodal(
        "qwen3_omni_moe_thinker", {"qwen3_omni_moe_text": "Qwen3MoeForCausalLM"}, _QWEN3_OMNI, balanced=True
    ),
    "Qwen3VLForConditionalGeneration": Multimodal("qwen3_vl", {"qwen3_vl_text": "Qwen3ForCausalLM"}, _QWEN3),
    "Qwen3VLMoeForConditionalGeneration": Multimodal(
        "qwen3_vl_moe",
        {"qwen3_vl_moe_text": "Qwen3MoeForCausalLM"},
        _QWEN3_MOE,
        outer={"norm_topk_prob": True},
        experts_files="qwen3_vl",
        balanced=True,
    ),
    "Qwen3_5ForConditionalGeneration": Multimodal("qwen3_5", {"qwen3_5_text": "Qwen3_5ForCausalLM"}, in_peft="model."),
    "Qwen3_5MoeForConditionalGeneration": Multimodal(
        "qwen3_5_moe", {"qwen3_5_moe_text": "Qwen3_5MoeForCausalLM"}, in_peft="model.", balanced=True
    ),
    "DeepseekVLForConditionalGeneration": Multimodal("deepseek_vl", _text_first("llama"), outer=_TIED),
    "Glm4vForConditionalGeneration": Multimodal(
        "glm4v", {"glm4v_text": "Glm4ForCausalLM"}, _GLM_4V, _BIASED, inner_tie=True
    ),
    "Glm46VForConditionalGeneration": Multimodal(
        "glm46v", {"glm4v_text": "Glm4ForCausalLM"}, _GLM_4V, _BIASED, other_types=("glmga",)
    ),
    "Glm4vMoeForConditionalGeneration": Multimodal(
        "glm4v_moe",
        {"glm4v_moe_text": "Glm4MoeForCausalLM"},
        {
            "vocab_size": 151_424,
            "max_position_embeddings": 65_536,
            "attention_bias": True,
            "router_aux_loss_coef": 0.0001,
        },
        inner_tie=True,
        balanced=True,
    ),
    "GlmOcrForConditionalGeneration": Multimodal(
        "glm_ocr",
        {"glm_ocr_text": "Glm4ForCausalLM"},
        _GLM_OCR,
        outer={"attention_bias": False},
        inner_tie=True,
    ),
    "GotOcr2ForConditionalGeneration": Multimodal(
        "got_ocr2", _text_first("qwen2"), outer=_TIED, other_types=("pp_chart2table",)
    ),
    "Idefics2ForConditionalGeneration": Multimodal("idefics2", _text_first("mistral"), in_peft="model.text_model."),
    "JanusForConditionalGeneration": Multimodal("janus", _text_first("llama"), outer=_TIED),
    "Kimi_K25ForConditionalGeneration": Multimodal(
        "kimi_k25", _text_first("deepseek_v3") | {"kimi_k2": "DeepseekV3ForCausalLM"}, outer=_TIED
    ),
    "Lfm3VlForConditionalGeneration": Multimodal("lfm3_vl", _text_first("lfm3"), outer=_TIED),
    "LightOnOcrForConditionalGeneration": Multimodal("lighton_ocr", _text_first("qwen3"), outer=_TIED),
    "LlavaNextVideoForConditionalGeneration": Multimodal("llava_next_video", _text_first("llama"), inner_tie=True),
    "MiniCPMV4_6ForConditionalGeneration": Multimodal("minicpmv4_6", _text_first("qwen3_5_text")),
    "MiniCPMV4_7ForConditionalGeneration": Multimodal("minicpmv4_7", _text_first("qwen3_5_text")),
    "Ovis2ForConditionalGeneration": Multimodal("ovis2", _text_first("qwen2"), outer=_TIED),
    "QianfanOCRForConditionalGeneration": Multimodal("qianfan_ocr", _text_first("qwen3")),
    "VideoLlama3ForConditionalGeneration": Multimodal("video_llama_3", _text_first("qwen2"), inner_tie=True),
    "VipLlavaForConditionalGeneration": Multimodal("vipllava", _text_first("llama")),
    "SmolVLMForConditionalGeneration": Multimodal("smolvlm", _text_first("llama"), in_peft="model.text_model."),
    "DeepseekVLHybridForConditionalGeneration": Multimodal("deepseek_vl_hybrid", _text_first("llama"), outer=_TIED),
    "DeepseekOcr2ForConditionalGeneration": Multimodal(
        "deepseek_ocr2", {"deepseek_ocr2_text": "DeepseekV2ForCausalLM"}, outer={"use_mla": False}
    ),
    "FastVlmForConditionalGeneration": Multimodal("fast_vlm", _text_first("qwen2"), inner_tie=True),
    "Granite4VisionForConditionalGeneration": Multimodal(
        "granite4_vision", {"granite4_vision_text": "GraniteForCausalLM"}
    ),
    "GraniteDoclingForConditionalGeneration": Multimodal(
        "granite_docling",
        {"granite_docling_text": "GraniteForCausalLM"},
        _DOCLING,
        outer=_TIED,
        in_peft="model.text_model.",
    ),
    "HunYuanVLForConditionalGeneration": Multimodal(
        "hunyuan_vl", {"hunyuan_vl_text": "HunYuanDenseV1ForCausalLM"}, outer=_TIED, inner_tie=True, flat=True
    ),
    "HyperCLOVAXVisionV2ForConditionalGeneration": Multimodal(
        "hyperclovax_vision_v2", _text_first("hyperclovax"), outer=_TIED
    ),
    "MiniCPMOcrForConditionalGeneration": Multimodal("minicpm_ocr", _text_first("qwen3_5_text"), outer=_TIED),
    "PaddleOCRVLForConditionalGeneration": Multimodal(
        "paddleocr_vl",
        {"paddleocr_vl_text": "LlamaForCausalLM"},  # ERNIE 4.5 whose heads are rotated as in Llama
        _PADDLE_OCR,
        outer=_TIED,
        inner_tie=True,
        flat=True,
        renamed={"use_bias": ("attention_bias", "mlp_bias")},
    ),
    "PerceptionLMForConditionalGeneration": Multimodal("perception_lm", _text_first("llama"), inner_tie=True),
    "VideoLlavaForConditionalGeneration": Multimodal("video_llava", _text_first("llama")),
    "NemotronH_Omni_Reasoning_V3": Multimodal(
        "nemotron_h_omni",
        {"nemotron_h": "NemotronHForCausalLM"},
        in_peft="language_model.model.",
        text_keys=(("text_config",), ("llm_config",)),
        task="any-to-any",
    ),
    "AudioFlamingo3ForConditionalGeneration": Multimodal("audioflamingo3", _text_first("qwen2"), **_FLAMINGO),
    "MusicFlamingoForConditionalGeneration": Multimodal("musicflamingo", _text_first("qwen2"), **_FLAMINGO),
    "FunAsrNanoForConditionalGeneration": Multimodal("fun_asr_nano", _text_first("qwen3"), outer=_TIED, **_SOUND),
    "GlmAsrForConditionalGeneration": Multimodal("glmasr", _text_first("llama"), _GLM_ASR, outer=_TIED, **_SOUND),
    "GraniteSpeechForConditionalGeneration": Multimodal(
        "granite_speech", _text_first("granite"), outer=_TIED, **_SOUND
    ),
    "GraniteSpeechPlusForConditionalGeneration": Multimodal(
        "granite_speech_plus", _text_first("granite"), outer=_TIED, **_SOUND
    ),
    "MossTranscribeDiarizeForConditionalGeneration": Multimodal(
        "moss_transcribe_diarize", _text_first("qwen3"), outer=_TIED, **_SOUND
    ),
    "Qwen2AudioForConditionalGeneration": Multimodal("qwen2_audio", _text_first("qwen2"), inner_tie=True, **_SOUND),
    "Qwen3ASRForConditionalGeneration": Multimodal(
        "qwen3_asr",
        _text_first("qwen3") | {"qwen3_asr_text": "Qwen3ForCausalLM"},
        outer=_TIED,
        text_keys=(("text_config",), ("thinker_config", "text_config")),
        **_SOUND,
    ),
    "VibeVoiceAsrForConditionalGeneration": Multimodal("vibevoice_asr", _text_first("qwen2"), inner_tie=True, **_SOUND),
    "VoxtralForConditionalGeneration": Multimodal("voxtral", _text_first("llama"), _VOXTRAL, inner_tie=True, **_SOUND),
}


class _TextFile(Struct):
    text_config: dict[str, Any]


class _LlmFile(Struct):
    llm_config: dict[str, Any]


class _OmniFile(Struct):
    thinker_config: dict[str, Any]


_ROPES = {"mrope": "default", "xdrope": "dynamic"}  # rotary embeddings of images' positions, and those of text
_PARTS = {kind.__struct_fields__[0]: kind for kind in (_TextFile, _LlmFile, _OmniFile)}


def text_config(raw: Mapping[str, Any], architecture: str, where: str) -> dict[str, Any]:
    """Return the config.json that the text model of a multimodal model would have alone.

    Raises:
        WgradError: text_config is missing, or its model_type is not supported.
    """
    whole = MULTIMODAL[architecture]
    *around, last = next((keys for keys in whole.text_keys if keys[0] in raw), whole.text_keys[0])
    for key in around:
        quantized = {name: raw[name] for name in ("quantization_config",) if name in raw}
        raw, where = getattr(convert(raw, _PARTS[key], where), key) | quantized, f"{where}: {key}"
    if whole.flat and last not in raw:
        inner = {key: value for key, value in raw.items() if key not in ("model_type", "architectures")}
    else:
        inner = getattr(convert(raw, _PARTS[last], where), last)
    kind = inner.get("model_type", next(iter(whole.texts)))
    if not isinstance(kind, str) or kind not in whole.texts:
        known = ", ".join(whole.texts) if len(whole.texts) < 4 else "that of a supported architecture"
        raise WgradError(
            f"{where}: text_config: model_type {show(kind)} is not supported in {architecture}: use {known}"
        )
    part = whole.texts[kind]
    outer = dict(whole.outer) | {key: raw[key] for key in ("tie_word_embeddings", "quantization_config") if key in raw}
    tied = inner.get("tie_word_embeddings") if whole.inner_tie and not outer.get("tie_word_embeddings") else None
    # Otherwise tie_word_embeddings next to text_config decides.
    kept = {key: _as_text(key, value) for key, value in inner.items() if key != "tie_word_embeddings"}
    for key, names in whole.renamed.items():
        kept |= dict.fromkeys(names, kept.pop(key)) if key in kept else {}
    kept = {**whole.text_defaults, **kept, **outer}
    if tied is not None:
        kept["tie_word_embeddings"] = tied
    return kept | {"architectures": [part], "model_type": FAMILIES[part].model_type}


def _as_text(key: str, value: Any) -> Any:
    """Return a value of text_config, with rotary embeddings that are equal on text."""
    if key not in ("rope_scaling", "rope_parameters") or not isinstance(value, dict):
        return value
    kind = value.get("rope_type", value.get("type"))
    return value | {"rope_type": _ROPES[kind]} if isinstance(kind, str) and kind in _ROPES else value
