"""Text parts of multimodal models: files of both versions, and adapters that PEFT loads on the whole model."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.tools import oracle_package
from tests.train.conftest import distance, random_weights, tiny_config, write_checkpoint
from tests.train.model_oracle import full_model, make_inputs
from tests.train.peft_oracle import our_logits, random_adapter, random_ids, save_random_lora, their_base, their_logits
from wgrad.autograd.reference import ReferenceDevice
from wgrad.device.errors import WgradError
from wgrad.train.commands.cli import main
from wgrad.train.files.safetensors_files import from_arrays, read_entries, write_safetensors
from wgrad.train.model.adapter_files import load_adapter, save_adapter
from wgrad.train.model.balance import Balance
from wgrad.train.model.load_config import load_model_config, parse_model_config
from wgrad.train.model.lora import LoraConfig, linear_modules
from wgrad.train.model.model_files import ModelFiles
from wgrad.train.model.multimodal import MULTIMODAL, Multimodal
from wgrad.train.model.multimodal_names import name_in_peft
from wgrad.train.output.card_use import Contents
from wgrad.train.step.build import build_frozen

torch = oracle_package("torch")
transformers = oracle_package("transformers")
peft = oracle_package("peft")

pytestmark = pytest.mark.oracle

WHOLE = "Gemma3ForConditionalGeneration"
VISION: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
VISION |= {"image_size": 28, "patch_size": 14, "model_type": "siglip_vision_model"}
IMAGES = ("model.vision_tower.", "model.multi_modal_projector.")
PREFIXES = {4: "language_model.model.", 5: "model.language_model."}  # of files, by the version that wrote them


def write_multimodal(folder: Path, version: int = 4) -> Path:
    ids = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    text = tiny_config("Gemma3ForCausalLM", sliding_window=7, query_pre_attn_scalar=24, **ids)
    text |= {"num_hidden_layers": 3, "sliding_window_pattern": 3, "tie_word_embeddings": True}
    raw: dict[str, Any] = {"architectures": [WHOLE], "model_type": "gemma3", "mm_tokens_per_image": 4}
    raw |= {"text_config": {**text, "model_type": "gemma3_text", "architectures": None}, "vision_config": VISION}
    raw |= {"image_token_index": 299, "boi_token_index": 298, "eoi_token_index": 297}
    whole = transformers.Gemma3ForConditionalGeneration(transformers.Gemma3Config.from_dict(raw)).state_dict()
    weights = {PREFIXES[version] + n.removeprefix("model."): a for n, a in random_weights(text).items()}
    for name, value in whole.items():
        if name.startswith(IMAGES):
            weights[name.removeprefix("model.") if version == 4 else name] = value.numpy()
    return write_checkpoint(folder, raw, weights)


def logits(folder: Path, adapter: Path | None = None) -> np.ndarray:
    config, name = load_model_config(folder), str(adapter) if adapter else None
    model = build_frozen(config, folder, ReferenceDevice(), positions=64, adapter=name, quantize=False)
    return our_logits(model, random_ids())


def near(ours: np.ndarray, theirs: Any) -> None:
    plain = their_logits(theirs, random_ids())
    true = their_logits(theirs.double(), random_ids())
    assert distance(ours, true) <= 3 * distance(plain, true)


@pytest.mark.parametrize("version", PREFIXES)
def test_logits_of_the_text_part_equal_transformers(version: int, tmp_path: Path) -> None:
    folder = write_multimodal(tmp_path / "model", version)
    config = load_model_config(folder)
    assert (config.architecture, config.text_of, config.windows) == ("Gemma3ForCausalLM", WHOLE, (7, 7, 0))
    theirs = their_base(folder)
    assert type(theirs).__name__ == WHOLE
    near(logits(folder), theirs)


SIGLIP = {key: value for key, value in VISION.items() if key != "model_type"}
QWEN_VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 48}
MROPE = {"rope_type": "default", "type": "mrope", "mrope_section": [2, 2, 2]}
GROWING = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 7, "llama_4_scaling_beta": 0.4}
# transformers has the head outside of the text part here, and leaves out logit_scale: 0.25 in Aya Vision's files.
COHERE = {"logit_scale": 1.0, "tie_word_embeddings": True, "sliding_window": 7, "sliding_window_pattern": 2}
OLD_QWEN_VISION = {"depth": 1, "embed_dim": 16, "hidden_size": 48, "num_heads": 2, "mlp_ratio": 2}
SIGLIP2 = {**VISION, "model_type": "siglip2_vision_model", "num_patches": 4}
EXAONE_VISION = {**QWEN_VISION, "num_key_value_heads": 1}
GLM_ROPE = {"type": "default", "mrope_section": [1, 1, 1]}
PERCEIVER = {"resampler_n_latents": 2, "resampler_n_heads": 2, "resampler_head_dim": 8, "num_key_value_heads": 1}
VQ = {"embed_dim": 4, "num_embeddings": 8, "base_channels": 32, "latent_channels": 32, "channel_multiplier": [1]}
XDROPE = {"type": "xdrope", "alpha": 3.0, "factor": 1.0, "xdrope_section": [2, 2, 1, 1]}
GRANITE = {"logits_scaling": 3.0, "embedding_multiplier": 2.0, "residual_multiplier": 0.4, "attention_multiplier": 0.2}
SAM = {"hidden_size": 16, "output_channels": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28}
SAM |= {"patch_size": 14, "window_size": 2, "mlp_dim": 32}
SAM_OF_DEEPSEEK = {**SAM, "model_type": "sam_vision_model", "global_attn_indexes": [0]}
OCR_ENCODER = {**SIGLIP, "num_key_value_heads": 1, "layer_types": ["full_attention"]}
CLIP = {**SIGLIP, "model_type": "clip_vision_model", "projection_dim": 16}
RADIO = {**SIGLIP, "model_type": "radio", "video_temporal_patch_size": 2}
SOUND = {**SIGLIP, "num_mel_bins": 8, "max_source_positions": 8}
TOKENS_OF_SOUND = {"hidden_size": 8, "num_filters": 2, "downsampling_ratios": [2], "depths": [1, 1], "kernel_size": 3}
TOKENS_OF_SOUND |= {"model_type": "vibevoice_acoustic_tokenizer_encoder"}
WHISPER = {"d_model": 16, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 32, "num_mel_bins": 8}
ASR = {"pad_token_id": 0, "eos_token_id": 1, "tie_word_embeddings": False}
CONFORMER = {"input_dim": 8, "num_layers": 1, "hidden_dim": 16, "num_heads": 2, "dim_head": 8, "output_dim": 6}
QFORMER = {**SIGLIP, "model_type": "blip_2_qformer", "encoder_hidden_size": 16}
# Of each architecture the text part, what the whole config.json holds, and which names its files have.
OTHERS: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "mistral3": (
        "MistralForCausalLM",
        {"tie_word_embeddings": True},
        {"vision_config": {**SIGLIP, "model_type": "pixtral", "head_dim": 8}},
        "old",
    ),
    "mistral3 of ministral3": (
        "Ministral3ForCausalLM",
        {"rope_parameters": {**GROWING, "rope_theta": 500.0}, "rope_theta": None},
        {"vision_config": {**SIGLIP, "model_type": "pixtral", "head_dim": 8}, "tie_word_embeddings": False},
        "new",
    ),
    "llava": ("LlamaForCausalLM", {"tie_word_embeddings": True}, {"vision_config": VISION}, "old"),
    "internvl": (
        "Qwen2ForCausalLM",
        {},
        {"vision_config": {**SIGLIP, "model_type": "internvl_vision"}, "tie_word_embeddings": False},
        "old",
    ),
    "qwen2_5_vl": ("Qwen2ForCausalLM", {"rope_scaling": MROPE}, {"vision_config": QWEN_VISION}, "flat"),
    "qwen2_5_vl nested": ("Qwen2ForCausalLM", {"rope_scaling": MROPE}, {"vision_config": QWEN_VISION}, "new"),
    "qwen3_vl": (
        "Qwen3ForCausalLM",
        {"rope_scaling": {**MROPE, "mrope_interleaved": True}},
        {"vision_config": {**QWEN_VISION, "deepstack_visual_indexes": [0]}},
        "new",
    ),
    "gemma4": (
        "Gemma4ForCausalLM",
        {"pad_token_id": 0},
        {"vision_config": {**SIGLIP, "head_dim": 8, "position_embedding_size": 16}, "tie_word_embeddings": True},
        "new",
    ),
    "gemma4_unified": (
        "Gemma4UnifiedForCausalLM",
        {"pad_token_id": 0},
        {"vision_config": {"mm_embed_dim": 16, "mm_posemb_size": 4, "patch_size": 2}, "tie_word_embeddings": True},
        "new",
    ),
    "qwen2_vl": ("Qwen2ForCausalLM", {"rope_scaling": MROPE}, {"vision_config": OLD_QWEN_VISION}, "flat"),
    "qwen3_vl_moe": (
        "Qwen3MoeForCausalLM",
        {"rope_scaling": {**MROPE, "mrope_interleaved": True}, "norm_topk_prob": True, "head_dim": 12},
        {"vision_config": {**QWEN_VISION, "deepstack_visual_indexes": [0]}},
        "new",
    ),
    "llava_next": ("LlamaForCausalLM", {}, {"vision_config": VISION, "image_grid_pinpoints": [[28, 28]]}, "old"),
    "llava_onevision": ("Qwen2ForCausalLM", {}, {"vision_config": VISION, "image_grid_pinpoints": [[28, 28]]}, "old"),
    "aya_vision": ("Cohere2ForCausalLM", COHERE, {"vision_config": VISION}, "old"),
    "cohere2_vision": ("Cohere2ForCausalLM", COHERE, {"vision_config": VISION}, "new"),
    "lfm2_vl": ("Lfm2ForCausalLM", {"tie_word_embeddings": True}, {"vision_config": SIGLIP2}, "new"),
    "exaone4_5": (
        "Exaone4ForCausalLM",
        {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]},
        {"vision_config": EXAONE_VISION},
        "new",
    ),
    "deepseek_vl": ("LlamaForCausalLM", {}, {"vision_config": VISION, "tie_word_embeddings": False}, "new"),
    "glm4v": (
        "Glm4ForCausalLM",
        {"rope_scaling": GLM_ROPE, "partial_rotary_factor": 0.5},
        {"vision_config": QWEN_VISION},
        "new",
    ),
    "glm4v whole heads": (
        "Glm4ForCausalLM",
        {"rope_parameters": {"rope_theta": 500.0, "mrope_section": [2, 2, 2]}, "rope_theta": None},
        {"vision_config": QWEN_VISION},
        "new",
    ),
    "glm46v": (
        "Glm4ForCausalLM",
        {"rope_scaling": GLM_ROPE, "partial_rotary_factor": 0.5},
        {"vision_config": {**QWEN_VISION, "model_type": "glm4v_vision"}},
        "new",
    ),
    "glm4v_moe": (
        "Glm4MoeForCausalLM",
        {"rope_scaling": GLM_ROPE, "partial_rotary_factor": 0.5, "attention_bias": True},
        {"vision_config": QWEN_VISION},
        "new",
    ),
    "idefics2": (
        "MistralForCausalLM",
        {},
        {"vision_config": SIGLIP, "perceiver_config": {"hidden_size": 48, "resampler_depth": 1, **PERCEIVER}},
        "new",
    ),
    "janus": (
        "LlamaForCausalLM",
        {"tie_word_embeddings": True},
        {"vision_config": {**SIGLIP, "projection_dim": 16}, "vq_config": VQ},
        "new",
    ),
    "kimi_k25": (
        "DeepseekV3ForCausalLM",
        {},
        {"vision_config": SIGLIP, "projection_hidden_size": 16, "tie_word_embeddings": False},
        "old",
    ),
    "lfm3_vl": (
        "Lfm3ForCausalLM",
        {"tie_word_embeddings": True},
        {"vision_config": {**SIGLIP, "num_key_value_heads": 1, "layer_types": ["conv"]}, "projector_hidden_size": 16},
        "new",
    ),
    "lighton_ocr": (
        "Qwen3ForCausalLM",
        {},
        {"vision_config": {**SIGLIP, "model_type": "pixtral", "head_dim": 8}, "tie_word_embeddings": False},
        "new",
    ),
    "llava_next_video": (
        "LlamaForCausalLM",
        {"tie_word_embeddings": True},
        {"vision_config": VISION, "image_grid_pinpoints": [[28, 28]]},
        "old",
    ),
    "minicpmv4_6": ("Qwen3_5ForCausalLM", {}, {"vision_config": SIGLIP, "insert_layer_id": 0}, "new"),
    "minicpmv4_7": ("Qwen3_5ForCausalLM", {}, {"vision_config": SIGLIP, "insert_layer_id": 0}, "new"),
    "ovis2": (
        "Qwen2ForCausalLM",
        {"tie_word_embeddings": True},
        {
            "vision_config": {**SIGLIP, "vocab_size": 20},
            "hidden_size": 48,
            "visual_indicator_token_ids": [1, 2, 3, 4, 5],
        },
        "new",
    ),
    "qianfan_ocr": (
        "Qwen3ForCausalLM",
        {},
        {"vision_config": {**SIGLIP, "image_size": [28, 28], "patch_size": [14, 14]}},
        "new",
    ),
    "got_ocr2": (
        "Qwen2ForCausalLM",
        {"tie_word_embeddings": True},
        {
            "vision_config": {
                "hidden_size": 16,
                "output_channels": 8,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "image_size": 28,
                "patch_size": 14,
                "window_size": 2,
                "mlp_dim": 32,
            }
        },
        "new",
    ),
    "video_llama_3": ("Qwen2ForCausalLM", {}, {"vision_config": SIGLIP}, "new"),
    "vipllava": ("LlamaForCausalLM", {}, {"vision_config": VISION, "vision_feature_layer": [0]}, "old"),
    "idefics3": ("LlamaForCausalLM", {}, {"vision_config": SIGLIP, "tie_word_embeddings": False}, "new"),
    "smolvlm": ("LlamaForCausalLM", {}, {"vision_config": SIGLIP, "tie_word_embeddings": False}, "new"),
    "glmga": (
        "Glm4ForCausalLM",
        {"rope_scaling": GLM_ROPE, "partial_rotary_factor": 0.5},
        {"vision_config": {**QWEN_VISION, "model_type": "glm4v_vision"}},
        "new",
    ),
    "glm_ocr": (
        "Glm4ForCausalLM",
        {"rope_scaling": GLM_ROPE, "partial_rotary_factor": 0.5, "attention_bias": False},
        {"vision_config": {**QWEN_VISION, "patch_size": 2}},
        "new",
    ),
    "pp_chart2table": ("Qwen2ForCausalLM", {}, {"vision_config": SAM, "tie_word_embeddings": False}, "old"),
    "deepseek_vl_hybrid": (
        "LlamaForCausalLM",
        {},
        {"vision_config": VISION, "high_res_vision_config": {**SAM_OF_DEEPSEEK}, "tie_word_embeddings": False},
        "new",
    ),
    "deepseek_ocr2": (
        "DeepseekV2ForCausalLM",
        {"mlp_layer_types": ["dense", "sparse"], "use_mla": False, "num_key_value_heads": 2, "n_group": None},
        {"vision_config": {"sam_config": SAM, "encoder_config": OCR_ENCODER}},
        "model.",
    ),
    "fast_vlm": ("Qwen2ForCausalLM", {"tie_word_embeddings": True}, {"vision_config": VISION}, "new"),
    "perception_lm": (
        "LlamaForCausalLM",
        {},
        {"vision_config": {**VISION, "model_args": {"embed_dim": 16}}},
        "new",
    ),
    "granite4_vision": (
        "GraniteForCausalLM",
        GRANITE,
        {"vision_config": {**VISION, "hidden_size": 64}, "downsample_rate": "1/2", "deepstack_layer_map": [[0, 0]]},
        "new",
    ),
    "granite_docling": (
        "GraniteForCausalLM",
        {**GRANITE, "pad_token_id": 0},
        {
            "vision_config": {**SIGLIP, "out_hidden_size": 48, "deepstack_visual_indexes": [0], "scale_factor": 2},
            "density_router_hidden_size": 4,
            "tie_word_embeddings": False,
        },
        "new",
    ),
    "hunyuan_vl": (
        "HunYuanDenseV1ForCausalLM",
        {"rope_scaling": XDROPE, "tie_word_embeddings": True},
        {"vision_config": {**SIGLIP, "text_hidden_size": 48}},
        "flat",
    ),
    "hyperclovax_vision_v2": (
        "HyperCLOVAXForCausalLM",
        {},
        {"vision_config": {**QWEN_VISION, "model_type": "qwen2_5_vl"}, "tie_word_embeddings": False},
        "model.language_model.model.",
    ),
    "minicpm_ocr": (
        "Qwen3_5ForCausalLM",
        {},
        {"vision_config": SIGLIP, "insert_layer_id": 0, "tie_word_embeddings": False},
        "new",
    ),
    "paddleocr_vl": (
        "LlamaForCausalLM",
        {"rope_scaling": MROPE, "use_bias": False},
        {"vision_config": SIGLIP, "tie_word_embeddings": False},
        "flat",
    ),
    "paddleocr_vl biased": (
        "LlamaForCausalLM",
        {"rope_scaling": MROPE, "use_bias": True, "attention_bias": True, "mlp_bias": True},
        {"vision_config": SIGLIP, "tie_word_embeddings": False},
        "new",
    ),
    "video_llava": ("LlamaForCausalLM", {}, {"vision_config": CLIP}, "old"),
    "nemotron_h_omni": (
        "NemotronHForCausalLM",
        {},
        {"vision_config": RADIO, "vision_hidden_size": 16, "projector_hidden_size": 16},
        "language_model.backbone.",
    ),
    "audioflamingo3": ("Qwen2ForCausalLM", {}, {"audio_config": SOUND}, "old"),
    "musicflamingo": (
        "Qwen2ForCausalLM",
        {},
        {"audio_config": {**SOUND, "model_type": "audioflamingo3_encoder"}},
        "old",
    ),
    "fun_asr_nano": (
        "Qwen3ForCausalLM",
        {"tie_word_embeddings": True},
        {
            "audio_config": {**SIGLIP, "num_timestamp_prediction_layers": 1},
            "adaptor_config": {**SIGLIP, "hidden_size": 48, "intermediate_size": 12},
        },
        "new",
    ),
    "glmasr": (
        "LlamaForCausalLM",
        {},
        {"audio_config": {**SIGLIP, "num_mel_bins": 8}, "tie_word_embeddings": False},
        "old",
    ),
    # transformers leaves out logits_scaling here, which Granite has.
    "granite_speech": (
        "GraniteForCausalLM",
        {**GRANITE, "logits_scaling": 1.0, "tie_word_embeddings": True},
        {"encoder_config": CONFORMER, "projector_config": QFORMER, "has_lora_adapter": False},
        "old",
    ),
    "granite_speech_plus": (
        "GraniteForCausalLM",
        {**GRANITE, "logits_scaling": 1.0},
        {
            "encoder_config": CONFORMER,
            "projector_config": QFORMER,
            "has_lora_adapter": False,
            "tie_word_embeddings": False,
        },
        "old",
    ),
    "moss_transcribe_diarize": ("Qwen3ForCausalLM", {}, {"audio_config": SOUND, "tie_word_embeddings": False}, "new"),
    "qwen2_audio": ("Qwen2ForCausalLM", {}, {"audio_config": WHISPER}, "old"),
    "qwen3_asr": (
        "Qwen3ForCausalLM",
        {},
        {"audio_config": {**WHISPER, "output_dim": 48, "downsample_hidden_size": 8}, **ASR},
        "new",
    ),
    "vibevoice_asr": (
        "Qwen2ForCausalLM",
        {},
        {
            "acoustic_tokenizer_encoder_config": TOKENS_OF_SOUND,
            "semantic_tokenizer_encoder_config": TOKENS_OF_SOUND,
            "acoustic_tokenizer_chunk_size": 8,
        },
        "old",
    ),
    "voxtral": ("LlamaForCausalLM", {}, {"audio_config": {**SOUND, "intermediate_size": 64}}, "old"),
}


# PEFT does not load its own adapters: transformers' names of published files put another "language_model." into theirs.
PEFT_CANNOT = ("DeepseekOcr2ForConditionalGeneration",)


def write_other(folder: Path, case: str) -> tuple[Path, Multimodal]:
    """Write a model, and return its folder and its entry."""
    architecture, changes, raw, files = OTHERS[case]
    kind = case.partition(" ")[0]
    known = next(whole for whole in MULTIMODAL.values() if kind in (whole.model_type, *whole.other_types))
    inside = known.in_peft
    text = tiny_config(architecture, **changes)
    own = next(iter(known.texts)) if len(known.texts) == 1 else text["model_type"]
    nested = {**text, "model_type": own, "architectures": None}
    ids = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    raw = {"model_type": kind, **(nested | {"model_type": kind} if files == "flat" else {"text_config": nested}), **raw}
    raw = ids | {"image_token_index": 299, "image_token_id": 299, "video_token_id": 298} | raw
    auto = getattr(transformers, known.auto)
    whole = auto.from_config(transformers.CONFIG_MAPPING[kind].from_dict(json.loads(json.dumps(raw))))
    raw["architectures"] = [type(whole).__name__]
    own_names = {"old": "language_model.model.", "flat": "model.", "new": inside}.get(files, files)
    weights = {}
    for name, value in random_weights({**text, "rope_scaling": None}).items():
        value = value.swapaxes(1, 2) if kind == "qwen3_vl_moe" and value.ndim == 3 else value  # [experts, in, out]
        outer = own_names.removesuffix("model.").removesuffix("backbone.") if files not in ("flat", "new") else ""
        head = outer if name.startswith("lm_head.") else ""
        weights[head + (own_names + name.removeprefix("model.") if name.startswith("model.") else name)] = value
    for name, value in whole.state_dict().items():
        if not name.startswith((inside, "lm_head.", "language_model.lm_head.")):
            weights[name if files == "new" else name.removeprefix("model.")] = value.numpy()
    return write_checkpoint(folder, raw, weights), known


def whole_base(folder: Path, auto: str) -> Any:
    """Return the model that a class of transformers loads. auto: name of that class."""
    options = {"experts_implementation": "eager"} if load_model_config(folder).experts else {}  # the only in float64
    return getattr(transformers, auto).from_pretrained(folder, dtype=torch.float32, **options)


def thinker_of(model: Any) -> Any:
    """Return the part of an Omni model that gives logits; other models as they are."""
    return getattr(model, "thinker", model)


def exchange_adapters(folder: Path, tmp_path: Path, modules: str, auto: str) -> np.ndarray:
    """Compare logits, an adapter that PEFT made, and one that it loads, which is left in tmp_path/ours.

    Args:
        folder: A multimodal model.
        tmp_path: Folder of the adapters.
        modules: Regular expression of the modules that PEFT adapts.
        auto: Class of transformers that loads the model.

    Returns:
        Our logits with the adapter.
    """
    config = load_model_config(folder)
    theirs = whole_base(folder, auto)
    assert type(theirs).__name__ == config.text_of
    near(logits(folder), thinker_of(theirs))
    settings = peft.LoraConfig(r=4, lora_alpha=9, target_modules=modules)
    adapted = save_random_lora(peft.get_peft_model(theirs.float(), settings), tmp_path / "theirs")
    plain = logits(folder, tmp_path / "theirs")
    assert distance(plain, logits(folder)) > 0.1
    near(plain, thinker_of(adapted.base_model.model))
    lora, arrays = load_adapter(tmp_path / "theirs", linear_modules(config))
    save_adapter(tmp_path / "ours", lora, arrays, str(folder), config.in_peft, text_of=config.text_of)
    if config.text_of not in PEFT_CANNOT:
        again = peft.PeftModel.from_pretrained(whole_base(folder, auto), tmp_path / "ours")
        near(plain, thinker_of(again.base_model.model))
    assert Contents.of(tmp_path / "ours").auto_class == Contents.of(folder).auto_class == auto
    assert Contents.of(tmp_path / "ours").task == MULTIMODAL[config.text_of].task
    return plain


@pytest.mark.parametrize("case", OTHERS)
def test_text_parts_of_other_models_take_and_give_peft_adapters(case: str, tmp_path: Path) -> None:
    """Compare logits, an adapter that PEFT made, and one that it loads."""
    folder, known = write_other(tmp_path / "model", case)
    config = load_model_config(folder)
    assert config.architecture == OTHERS[case][0] and config.text_of

    mlp = "" if config.experts else "|mlp[.]up"  # which PEFT takes for the experts'
    inside = known.in_peft.replace(".", "[.]")
    modules = rf"{inside}layers[.]\d[.](((self_attn|mixer)[.](q|o){mlp})_proj|feed_forward[.]w3)"
    exchange_adapters(folder, tmp_path, modules, known.auto)
    beside = {entry.name.removeprefix("model.") for entry in ModelFiles(folder).beside_text()}
    assert beside and not any(".layers.0.self_attn.q_proj.w" in name and "language" in name for name in beside)


OMNI_VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 48}
OMNI_AUDIO = {"d_model": 16, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 32, "output_dim": 48}
OMNI: dict[str, tuple[str, dict[str, Any], str]] = {
    "qwen2_5_omni": ("Qwen2ForCausalLM", {"rope_scaling": MROPE}, "Qwen2_5OmniForConditionalGeneration"),
    "qwen3_omni_moe": (
        "Qwen3MoeForCausalLM",
        {"rope_scaling": MROPE, "norm_topk_prob": True, "head_dim": 12},
        "Qwen3OmniMoeForConditionalGeneration",
    ),
}


def write_omni(folder: Path, kind: str, thinker: bool) -> Path:
    """Write a model whose files have the names of published ones, or its thinker alone, as transformers saves it."""
    architecture, changes, outer = OMNI[kind]
    text = tiny_config(architecture, **changes)
    vision = {**OMNI_VISION, **({"deepstack_visual_indexes": [0]} if kind == "qwen3_omni_moe" else {})}
    raw: dict[str, Any] = {
        "text_config": {**text, "model_type": f"{kind}_text", "architectures": None},
        "vision_config": vision,
        "audio_config": {**OMNI_AUDIO, "downsample_hidden_size": 8},
    }
    inner = transformers.CONFIG_MAPPING[f"{kind}_thinker"].from_dict(json.loads(json.dumps(raw)))
    whole = transformers.AutoModelForImageTextToText.from_config(inner)
    state = whole.state_dict()
    for name, value in random_weights(text).items():
        own = name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name
        state[own].copy_(torch.tensor(value))
    whole.save_pretrained(folder)
    saved = read_entries(folder / "model.safetensors", "")
    if thinker:
        return write_checkpoint(folder, json.loads((folder / "config.json").read_text()), arrays_of(saved))
    raw = {"architectures": [outer], "model_type": kind, "enable_audio_output": False, "thinker_config": raw}
    bare = {name.removeprefix("thinker."): value for name, value in arrays_of(saved).items()}
    arrays = {f"thinker.{name.replace('model.language_model.', 'model.')}": value for name, value in bare.items()}
    arrays = {name.replace("thinker.model.visual", "thinker.visual"): value for name, value in arrays.items()}
    arrays = {name.replace("thinker.model.audio_t", "thinker.audio_t"): value for name, value in arrays.items()}
    torch.save({}, folder / "spk_dict.pt")  # voices, which transformers wants
    return write_checkpoint(folder, raw, {**arrays, "talker.codec_head.weight": np.zeros((2, 3), np.float32)})


def arrays_of(entries: Any) -> dict[str, np.ndarray]:
    return {name: np.array(entry.array(), np.float32) for name, entry in entries.items()}


@pytest.mark.parametrize("thinker", [False, True])
@pytest.mark.parametrize("kind", OMNI)
def test_the_thinker_of_an_omni_model_takes_and_gives_peft_adapters(kind: str, thinker: bool, tmp_path: Path) -> None:
    """Adapters have the names of the class that AutoModel loads: the whole model, or its thinker alone."""
    folder = write_omni(tmp_path / "model", kind, thinker)
    config = load_model_config(folder)
    auto = "AutoModelForImageTextToText" if thinker else "AutoModelForMultimodalLM"
    # Not q_proj, which PEFT takes for that of sound in a model with experts.
    modules = rf"{config.in_peft.replace('.', '[.]')}layers[.]\d[.]self_attn[.]o_proj"
    plain = exchange_adapters(folder, tmp_path, modules, auto)
    words = f"merge --adapter {tmp_path}/ours --out {tmp_path}/out --device cpu --onto original --no-compare"
    assert main(words.split()) == 0
    merged = whole_base(tmp_path / "out", auto)
    assert {name_in_peft(name, config.in_peft) for name in ("lm_head", "model.norm")} <= {*dict(merged.named_modules())}
    near(plain, thinker_of(merged))
    before, after = (read_entries(path / "model.safetensors", "") for path in (folder, tmp_path / "out"))
    assert before.keys() == after.keys()


def test_the_text_of_llama_4_is_the_same_within_the_whole(tmp_path: Path) -> None:
    """Its names are those of published files. Alone, PEFT names it like any LLaMA."""
    text = tiny_config("Llama4ForCausalLM")
    weights = random_weights(text)
    alone = write_checkpoint(tmp_path / "alone", text, weights)
    raw = {"architectures": ["Llama4ForConditionalGeneration"], "model_type": "llama4", "text_config": text}
    named = {f"language_model.{name}": value for name, value in weights.items()}
    named["vision_model.class_embedding"] = np.zeros(3, np.float32)
    folder = write_checkpoint(tmp_path / "whole", raw, named)
    np.testing.assert_array_equal(logits(folder), logits(alone))
    near(logits(alone), their_base(alone))
    assert not parse_model_config(text | {"attn_temperature_tuning": False}).plain_growth[0]
    with pytest.raises(WgradError, match="attention_chunk_size must be a multiple of 64, .* got 40"):
        parse_model_config(text | {"attention_chunk_size": 40})


@pytest.mark.parametrize("case", ["qwen3_vl_moe", "glm4v_moe", "kimi_k25", "internvl of experts"])
def test_the_whole_models_class_decides_on_a_load_balancing_loss(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GLM-4.5V's has one, which GLM-4.5 has not. InternVL's has none of any text model."""
    architecture, changes, raw, files = OTHERS[case.partition(" ")[0]]
    architecture = "Qwen3MoeForCausalLM" if case.endswith(" of experts") else architecture
    asked = {"output_router_logits": True, "router_aux_loss_coef": 0.7}
    monkeypatch.setitem(OTHERS, case, (architecture, changes | asked, raw, files))
    folder, known = write_other(tmp_path, case)
    ids = random_ids(rows=2)
    given = torch.tensor(ids.astype(np.int64))
    with torch.no_grad():
        wanted = float(whole_base(folder, known.auto)(given, labels=given, use_cache=False).loss)
    device = ReferenceDevice()
    model, _ = full_model(folder, device)
    experts = model.config.experts
    assert experts is not None and (experts.balance > 0) == ("moe" in case)
    model.balance = Balance(experts.balance, experts, ids.size, device) if experts.balance else None
    targets = np.full_like(ids, -100)
    targets[:, :-1] = ids[:, 1:]
    found = float(model.loss(make_inputs(device, ids, targets)).numpy()[0]) / targets[:, :-1].size
    assert found == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("case", ["qwen3_vl_moe", "nemotron_h_omni"])
def test_experts_are_merged_as_published_files_have_them(case: str, tmp_path: Path) -> None:
    """Those have each of Nemotron's experts by itself, within the whole model's names."""
    folder, known = write_other(tmp_path / "model", case)
    config = load_model_config(folder)
    lora = LoraConfig(r=2, alpha=4.0, target_modules=("q_proj",))
    save_adapter(tmp_path / "lora", lora, random_adapter(lora, linear_modules(config)), str(folder), config.in_peft)
    words = f"merge --adapter {tmp_path}/lora --out {tmp_path}/out --device cpu --onto original --no-compare"
    assert main(words.split()) == 0
    before, after = (read_entries(path / "model.safetensors", "") for path in (folder, tmp_path / "out"))
    same = {name for name in before.keys() & after.keys() if before[name].shape == after[name].shape}
    changed = {name for name in same if not np.array_equal(before[name].array(), after[name].array())}
    assert changed and {".".join(name.split(".")[-2:]) for name in changed} == {"q_proj.weight"}
    others = {re.sub(r"experts\.\d+", "experts.N", name) for name in before.keys() ^ after.keys()}
    layer = "language_model.backbone.layers.2.mixer.experts."
    parts = [f"{part}_proj" for part in ("up", "down")] if case == "nemotron_h_omni" else []
    assert others == {f"{layer}{name}" for part in parts for name in (part, f"N.{part}.weight")}
    near(logits(folder, tmp_path / "lora"), whole_base(tmp_path / "out", known.auto))


def test_text_is_read_from_the_places_of_older_files(tmp_path: Path) -> None:
    """Qwen3-ASR's files of transformers 4 have a thinker, as those of Omni models; Nemotron Omni's an llm_config."""
    folder, _ = write_other(tmp_path / "new", "qwen3_asr")
    raw = json.loads((folder / "config.json").read_text())
    inner = {key: raw.pop(key) for key in ("text_config", "audio_config", "tie_word_embeddings")}
    raw["thinker_config"] = inner | {"text_config": inner["text_config"] | {"model_type": "qwen3_asr_text"}}
    weights = arrays_of(read_entries(folder / "model.safetensors", ""))
    named = {"thinker." + name.replace("language_model.", ""): value for name, value in weights.items()}
    old = write_checkpoint(tmp_path / "old", raw, named)
    np.testing.assert_array_equal(logits(old), logits(folder))
    raw = json.loads((write_other(tmp_path / "omni", "nemotron_h_omni")[0] / "config.json").read_text())
    config, raw["llm_config"] = parse_model_config(raw), raw.pop("text_config")
    assert parse_model_config(raw) == config


def test_a_run_and_its_adapter_merged(text_data: Path, tmp_path: Path, capsys: Any) -> None:
    folder, out = write_multimodal(tmp_path / "model"), tmp_path / "out"
    words = (
        f"--model {folder} --data {text_data} --out {out} --device cpu "
        f"--max-length 24 --max-steps 3 --learning-rate 0.05"
    )
    assert main(["finetune", *words.split(), "--target-modules", "q_proj=2", "v_proj", "down_proj"]) == 0
    assert f"note: of {WHOLE} only the text part is read and trained" in capsys.readouterr().out
    theirs = peft.PeftModel.from_pretrained(their_base(folder), out)
    adapted = {name for name, _ in theirs.named_parameters() if "lora_" in name}
    assert adapted and not any("vision" in name for name in adapted)
    written = read_entries(out / "adapter_model.safetensors", "")
    assert {name.replace(".default", "") for name in adapted} == set(written)
    assert json.loads((out / "adapter_config.json").read_text())["auto_mapping"]["base_model_class"] == WHOLE
    base = logits(folder)
    assert distance(logits(folder, out), base) > 0.01
    near(logits(folder, out), theirs)
    (code,) = re.findall(r"With PEFT:\n\n```python\n(.*?)```", (out / "README.md").read_text(), re.DOTALL)
    made: dict[str, Any] = {}
    exec(code.replace("BASE_MODEL", str(folder)).replace("OWNER/NAME", str(out)), made)
    near(logits(folder, out), made["model"])

    merged = tmp_path / "merged"
    assert main(f"merge --adapter {out} --out {merged} --device cpu --onto original --no-compare".split()) == 0
    before, after = (read_entries(path / "model.safetensors", "") for path in (folder, merged))
    assert list(sorted(before)) == list(sorted(after))
    changed = {n for n in before if not np.array_equal(before[n].array(), after[n].array())}
    parts = {name.split(".")[-2] for name in changed}
    assert parts == {"q_proj", "v_proj", "down_proj"} and all(name.startswith(PREFIXES[4]) for name in changed)
    kept = peft.PeftModel.from_pretrained(their_base(folder), out).merge_and_unload()
    ours = their_base(merged)
    assert type(ours).__name__ == WHOLE
    assert distance(their_logits(ours, random_ids()), their_logits(kept, random_ids())) < 1e-6
    assert main(f"export --adapter {out} --gguf-lora {tmp_path}/a.gguf".split()) == 0


def test_embedding_and_head_trained_whole_are_read_by_peft(text_data: Path, tmp_path: Path) -> None:
    folder, out, merged = write_multimodal(tmp_path / "model"), tmp_path / "out", tmp_path / "merged"
    words = (
        f"--model {folder} --data {text_data} --out {out} --device cpu "
        f"--max-length 24 --max-steps 3 --learning-rate 0.02"
    )
    words += " --target-modules q_proj=2 --train-embeddings --train-head --no-sample"
    assert main(["finetune", *words.split()]) == 0
    assert distance(logits(folder, out), logits(folder)) > 0.01
    near(logits(folder, out), peft.PeftModel.from_pretrained(their_base(folder), out))
    assert main(f"merge --adapter {out} --out {merged} --device cpu --onto original --no-compare".split()) == 0
    assert distance(their_logits(their_base(merged), random_ids()), logits(folder, out)) < 1e-5


def test_an_adapter_that_peft_made_is_read_unless_it_adapts_images(tmp_path: Path) -> None:
    folder = write_multimodal(tmp_path / "model", 5)
    torch.manual_seed(0)
    layers = r"model\.language_model\.layers\.\d+\.(self_attn\.(k|o)_proj|mlp\.up_proj)"
    patterns = {"rank_pattern": {"model.language_model.layers.1.self_attn.k_proj": 3}, "alpha_pattern": {"up_proj": 7}}
    for name, targets in (("text", layers), ("both", ["q_proj"])):
        settings = peft.LoraConfig(r=4, lora_alpha=9, target_modules=targets, **patterns)
        theirs = save_random_lora(peft.get_peft_model(their_base(folder), settings), tmp_path / name)
        if name == "text":
            assert distance(logits(folder, tmp_path / name), logits(folder)) > 0.1
            near(logits(folder, tmp_path / name), theirs)
    with pytest.raises(
        WgradError, match=r"adapts model.vision_tower.* which is of the part for images.*: merge it with PEFT"
    ):
        load_adapter(tmp_path / "both", linear_modules(load_model_config(folder)))


def test_what_has_no_part_for_images_is_not_merged(tmp_path: Path, capsys: Any) -> None:
    folder, out = write_multimodal(tmp_path / "model"), tmp_path / "out"
    text = {n: e.array() for n, e in read_entries(folder / "model.safetensors", "").items() if "language" in n}
    write_checkpoint(folder, json.loads((folder / "config.json").read_text()), text)
    theirs = peft.get_peft_model(their_base(folder), peft.LoraConfig(r=2, target_modules=r"model\.language.*\.q_proj"))
    theirs.save_pretrained(tmp_path / "adapter")
    assert main(f"merge --adapter {tmp_path}/adapter --model {folder} --out {out} --device cpu".split()) == 2
    assert "has only the text part of a multimodal model: use --format gguf, or name" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize("name", ["PaliGemmaForConditionalGeneration", "MllamaForConditionalGeneration"])
def test_others_are_refused(name: str) -> None:
    with pytest.raises(WgradError, match=rf"architecture {name} is not supported: use a model of .*{WHOLE}"):
        parse_model_config({"architectures": [name], "text_config": {}})
    with pytest.raises(WgradError, match=r"^config.json: text_config must be"):
        parse_model_config({"architectures": [WHOLE], "text_config": 3})
    for key, name in (
        ("llm_config", "NemotronH_Omni_Reasoning_V3"),
        ("thinker_config", "Qwen3ASRForConditionalGeneration"),
    ):
        with pytest.raises(WgradError, match=rf"^config.json: {key} must be"):
            parse_model_config({"architectures": [name], key: 3})
    with pytest.raises(WgradError, match=r"^config.json: text_config: hidden_size must be"):
        parse_model_config({"architectures": [WHOLE], "text_config": {"hidden_size": 0}})


@pytest.mark.parametrize(
    "targets", [["k_proj", "up_proj"], r"language_model\.model\.layers\.\d+\.(self_attn\.k|mlp\.up)_proj"]
)
def test_an_adapter_by_the_names_of_older_versions(targets: Any, tmp_path: Path) -> None:
    """In transformers 4.51 and older, the text part was `language_model.model`."""
    folder, new, old = write_multimodal(tmp_path / "model", 5), tmp_path / "new", tmp_path / "old"
    settings = peft.LoraConfig(r=4, lora_alpha=9, target_modules=r"model\.language_model.*\.(k|up)_proj")
    theirs = save_random_lora(peft.get_peft_model(their_base(folder), settings), new)
    old.mkdir()
    entries = read_entries(new / "adapter_model.safetensors", "")
    renamed = {n.replace("model.language_model.", "language_model.model."): e.array() for n, e in entries.items()}
    assert all(name.startswith("base_model.model.language_model.model.layers.") for name in renamed)
    write_safetensors(old / "adapter_model.safetensors", from_arrays(renamed))
    raw = json.loads((new / "adapter_config.json").read_text())
    (old / "adapter_config.json").write_text(json.dumps(raw | {"target_modules": targets}))
    near(logits(folder, old), theirs)
    if isinstance(targets, list):  # which PEFT looks for by today's names
        near(logits(folder, old), peft.PeftModel.from_pretrained(their_base(folder), old))
