"""The table of model families: the keys of their config.json, and their differences from a plain LLaMA.

A new family needs a class of its keys (family_keys.py), if it has its own, its differences (variants.py), which are
fields of `ModelConfig`, and an entry in FAMILIES.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from wgrad.train.model import delta_net_variants, expert_variants, scored_variants, variants
from wgrad.train.model.afmoe_keys import AfmoeFile
from wgrad.train.model.axk1_keys import AxK1File
from wgrad.train.model.by_heads_keys import FalconFile, GptNeoxFile
from wgrad.train.model.cohere_moe_keys import Cohere2MoeFile
from wgrad.train.model.config_file import ConfigFile
from wgrad.train.model.delta_net_keys import OlmoHybridFile, Qwen3NextFile, Qwen35File, Qwen35MoeFile
from wgrad.train.model.expert_keys import (
    FlexOlmoFile,
    GptOssFile,
    GraniteMoeFile,
    GraniteMoeSharedFile,
    GraniteMoeSwaFile,
    HunYuanMoeFile,
    MellumFile,
    MiniMaxM2File,
    MixtralFile,
    OlmoeFile,
    PhimoeFile,
    Qwen2MoeFile,
    Qwen3MoeFile,
)
from wgrad.train.model.family_keys import (
    Exaone4File,
    Gemma2File,
    Gemma3File,
    GemmaFile,
    GraniteFile,
    GraniteSwaFile,
    HyperClovaXFile,
    LlamaFile,
    MistralFile,
    Olmo2File,
    Olmo3File,
    Phi3File,
    Qwen2File,
    Qwen3File,
    SmolLM3File,
)
from wgrad.train.model.flint_keys import FlintFile, Kolibri1File
from wgrad.train.model.gemma4_keys import Gemma3nFile, Gemma4File, Gemma4UnifiedFile
from wgrad.train.model.hy3_keys import Hy3File
from wgrad.train.model.jamba_keys import FalconMambaFile, JambaFile, MambaFile
from wgrad.train.model.laguna_keys import LagunaFile
from wgrad.train.model.latent_keys import (
    DeepseekV2File,
    DeepseekV3File,
    Glm4MoeLiteFile,
    MiniCpm3File,
    Mistral4File,
    YoutuFile,
)
from wgrad.train.model.layer_norm_keys import (
    ApertusFile,
    ArceeFile,
    Cohere2File,
    CohereFile,
    Jais2File,
    NanoChatFile,
    NemotronFile,
    OlmoFile,
    PhiFile,
    StableLmFile,
    Starcoder2File,
)
from wgrad.train.model.learned_positions_keys import Gpt2File, GptBigCodeFile, GptJFile, GptNeoFile, OptFile
from wgrad.train.model.lfm2_keys import Lfm2File, Lfm2MoeFile
from wgrad.train.model.lfm3_keys import Lfm3File
from wgrad.train.model.llama4_keys import Llama4File
from wgrad.train.model.mamba2_keys import Mamba2File
from wgrad.train.model.mamba_keys import BambaFile, FalconH1File, GraniteHybridFile
from wgrad.train.model.near_llama_keys import (
    CwmFile,
    Ernie45File,
    Glm4File,
    GlmFile,
    HeliumFile,
    HunYuanFile,
    InternLm3File,
    IQuestCoderFile,
    Ministral3File,
    SeedOssFile,
)
from wgrad.train.model.nemotron_h_keys import NemotronHFile
from wgrad.train.model.scored_keys import Dots1File, Ernie45MoeFile, ExaoneMoeFile, Glm4MoeFile, SolarOpenFile


@dataclass(frozen=True)
class Family:
    """An entry of the table.

    Args:
        model_type: Identifies the architecture if a config.json does not name it.
        keys: Class of the keys of its config.json.
        variant: Returns the fields of `ModelConfig` that differ from a plain LLaMA, from the keys.
        gguf: llama.cpp's name of the architecture; "": it cannot be written to GGUF.
        no_gguf: What llama.cpp does instead, if it has the architecture but computes something else.
        title: Its name in the docs; "": the architecture's name.
        gguf_others: llama.cpp's names of models with a part, by the field of `ModelConfig` that has it; the first
            match counts.
        gguf_key: Key that is above `gguf_above` only in this family's files, if families share a name in GGUF.
        gguf_flag: Key that is true only in this family's files, likewise.
        reads_again: See `ModelConfig.read_again_at`.
        other_types: Further values of `model_type` of the architecture.
        in_peft: Prefix of the names of the decoder's modules in transformers; of its layers if it ends with "h.".
    """

    model_type: str
    keys: type[ConfigFile]
    variant: Callable[[Any], dict[str, Any]]
    gguf: str
    title: str = ""
    gguf_others: tuple[tuple[str, str], ...] = ()
    no_gguf: str = ""
    gguf_key: str = ""
    gguf_above: int = 0
    gguf_flag: str = ""
    reads_again: bool = False
    other_types: tuple[str, ...] = ()
    in_peft: str = "model."


# SmolLM and SmolLM2 are LlamaForCausalLM; Qwen2.5 is Qwen2ForCausalLM.
FAMILIES = {
    "LlamaForCausalLM": Family("llama", LlamaFile, variants.llama, "llama", "Llama 1 to 3.3, SmolLM 1 and 2"),
    "Llama4ForCausalLM": Family("llama4_text", Llama4File, Llama4File.variant, "llama4", "Llama 4 Scout, Maverick"),
    "MistralForCausalLM": Family("mistral", MistralFile, variants.mistral, "llama", "Mistral 7B to Large, dense"),
    "MinistralForCausalLM": Family("ministral", MistralFile, variants.mistral, "llama", "Ministral"),
    "Qwen2ForCausalLM": Family(
        "qwen2",
        Qwen2File,
        lambda keys: {"qkv_bias": True, "windows": variants.upper_windows(keys)},
        "qwen2",
        "Qwen 2, 2.5",
    ),
    "Qwen3ForCausalLM": Family(
        "qwen3",
        Qwen3File,
        lambda keys: {**variants.biases(keys), "qk_norm": True, "windows": variants.upper_windows(keys)},
        "qwen3",
        "Qwen 3, dense",
    ),
    "Qwen3NextForCausalLM": Family(
        "qwen3_next", Qwen3NextFile, delta_net_variants.qwen3_next, "qwen3next", "Qwen 3 Next"
    ),
    "Qwen3_5ForCausalLM": Family("qwen3_5_text", Qwen35File, delta_net_variants.qwen3_5, "qwen35", "Qwen 3.5, dense"),
    "Qwen3_5MoeForCausalLM": Family(
        "qwen3_5_moe_text", Qwen35MoeFile, delta_net_variants.qwen3_5_moe, "qwen35moe", "Qwen 3.5, experts"
    ),
    "SmolLM3ForCausalLM": Family("smollm3", SmolLM3File, variants.smollm3, "smollm3", "SmolLM 3"),
    "GemmaForCausalLM": Family("gemma", GemmaFile, variants.gemma, "gemma", "Gemma 1"),
    "Gemma2ForCausalLM": Family("gemma2", Gemma2File, variants.gemma2, "gemma2", "Gemma 2"),
    "Gemma3ForCausalLM": Family("gemma3_text", Gemma3File, variants.gemma3, "gemma3", "Gemma 3"),
    "Gemma3nForCausalLM": Family("gemma3n_text", Gemma3nFile, Gemma3nFile.variant, "gemma3n", "Gemma 3n"),
    "Gemma4ForCausalLM": Family("gemma4_text", Gemma4File, Gemma4File.variant, "gemma4", "Gemma 4"),
    "Gemma4UnifiedForCausalLM": Family(
        "gemma4_unified_text", Gemma4UnifiedFile, Gemma4UnifiedFile.variant, "gemma4", "Gemma 4 without encoders"
    ),
    "GraniteForCausalLM": Family("granite", GraniteFile, variants.granite, "granite", "Granite 3"),
    "Olmo2ForCausalLM": Family("olmo2", Olmo2File, variants.olmo2, "olmo2", "OLMo 2"),
    "Olmo3ForCausalLM": Family(
        "olmo3",
        Olmo3File,
        lambda keys: {**variants.olmo2(keys), "windows": variants.one_full_of(keys, 4)},
        "olmo2",
        "OLMo 3",
        gguf_key="attention.sliding_window",
    ),
    "OlmoHybridForCausalLM": Family("olmo_hybrid", OlmoHybridFile, delta_net_variants.olmo_hybrid, "", "OLMo Hybrid"),
    "PhiForCausalLM": Family("phi", PhiFile, variants.phi, "phi2", "Phi 1, 1.5, 2"),
    "Phi3ForCausalLM": Family("phi3", Phi3File, variants.phi3, "phi3", "Phi 3, 4", reads_again=True),
    "StableLmForCausalLM": Family("stablelm", StableLmFile, variants.stablelm, "stablelm", "StableLM 3B, 2"),
    "Starcoder2ForCausalLM": Family("starcoder2", Starcoder2File, variants.starcoder2, "starcoder2", "StarCoder 2"),
    "Ministral3ForCausalLM": Family("ministral3", Ministral3File, variants.ministral3, "mistral3", "Ministral 3"),
    "CwmForCausalLM": Family("cwm", CwmFile, variants.cwm, "", "CWM"),
    "SeedOssForCausalLM": Family("seed_oss", SeedOssFile, variants.seed_oss, "seed_oss", "Seed-OSS"),
    "Exaone4ForCausalLM": Family("exaone4", Exaone4File, variants.exaone4, "exaone4", "EXAONE 4"),
    "HyperCLOVAXForCausalLM": Family("hyperclovax", HyperClovaXFile, variants.hyperclovax, "granite", "HyperCLOVA X"),
    "VaultGemmaForCausalLM": Family("vaultgemma", Gemma2File, variants.vaultgemma, "", "VaultGemma"),
    "Ernie4_5ForCausalLM": Family("ernie4_5", Ernie45File, variants.ernie45, "ernie4_5", "ERNIE 4.5, dense"),
    "HeliumForCausalLM": Family(
        "helium",
        HeliumFile,
        lambda keys: {"interleaved": True, "qkv_bias": keys.attention_bias, "mlp_bias": keys.mlp_bias},
        "llama",
        "Helium",
    ),
    "InternLM3ForCausalLM": Family("internlm3", InternLm3File, variants.llama, "llama", "InternLM 3"),
    "IQuestCoderForCausalLM": Family("iquestcoder", IQuestCoderFile, variants.llama, "llama", "IQuest-Coder"),
    "GraniteMoeHybridForCausalLM": Family(
        "granitemoehybrid",
        GraniteHybridFile,
        GraniteHybridFile.variant,
        "granite",
        "Granite 4, dense and hybrid",
        gguf_others=(("linear", "granitehybrid"),),
    ),
    "Mamba2ForCausalLM": Family(
        "mamba2", Mamba2File, Mamba2File.variant, "mamba2", "Mamba-2, Codestral Mamba", in_peft="backbone."
    ),
    "JambaForCausalLM": Family("jamba", JambaFile, JambaFile.variant, "jamba", "Jamba"),
    "MambaForCausalLM": Family("mamba", MambaFile, MambaFile.variant, "mamba", "Mamba", in_peft="backbone."),
    "FalconMambaForCausalLM": Family(
        "falcon_mamba",
        FalconMambaFile,
        FalconMambaFile.variant,
        "mamba",
        "FalconMamba",
        gguf_flag="ssm.dt_b_c_rms",
        in_peft="backbone.",
    ),
    "BambaForCausalLM": Family(
        "bamba",
        BambaFile,
        BambaFile.variant,
        "",
        "Bamba",
        no_gguf="rotates each element of a head with another than the model does",
    ),
    "NemotronHForCausalLM": Family(
        "nemotron_h",
        NemotronHFile,
        NemotronHFile.variant,
        "nemotron_h",
        "Nemotron-H, Nemotron 3",
        gguf_others=(("experts", "nemotron_h_moe"),),
    ),
    "FalconH1ForCausalLM": Family("falcon_h1", FalconH1File, FalconH1File.variant, "falcon-h1", "Falcon-H1"),
    "GraniteMoeForCausalLM": Family(
        "granitemoe", GraniteMoeFile, expert_variants.granite_moe, "granitemoe", "Granite 3, experts"
    ),
    "GraniteMoeSharedForCausalLM": Family(
        "granitemoeshared",
        GraniteMoeSharedFile,
        expert_variants.granite_moe,
        "granitemoe",
        "Granite 3, shared expert",
        gguf_key="expert_shared_feed_forward_length",
    ),
    "GraniteMoeSWAForCausalLM": Family(
        "granitemoe_swa",
        GraniteMoeSwaFile,
        expert_variants.granite_moe_swa,
        "granite_swa",
        "Granite with sinks and experts",
    ),
    "GraniteSWAForCausalLM": Family(
        "granite_swa", GraniteSwaFile, variants.granite_swa, "granite_swa", "Granite with sinks"
    ),
    "HunYuanDenseV1ForCausalLM": Family(
        "hunyuan_v1_dense", HunYuanFile, variants.hunyuan, "hunyuan-dense", "HunYuan, dense"
    ),
    "HunYuanMoEV1ForCausalLM": Family(
        "hunyuan_v1_moe", HunYuanMoeFile, expert_variants.hunyuan_moe, "hunyuan-moe", "HunYuan, experts"
    ),
    "HYV3ForCausalLM": Family("hy_v3", Hy3File, Hy3File.variant, "hy_v3", "Hy3"),
    "FlintForCausalLM": Family("flint", FlintFile, FlintFile.variant, "", "Flint"),
    "Kolibri1ForCausalLM": Family("kolibri1", Kolibri1File, Kolibri1File.variant, "", "Kolibri 1"),
    "LagunaForCausalLM": Family("laguna", LagunaFile, LagunaFile.variant, "laguna", "Laguna"),
    "ArceeForCausalLM": Family("arcee", ArceeFile, variants.ungated, "arcee"),
    "Jais2ForCausalLM": Family("jais2", Jais2File, variants.jais2, "jais2", "Jais 2"),
    "NemotronForCausalLM": Family("nemotron", NemotronFile, variants.nemotron, "nemotron"),
    "GlmForCausalLM": Family("glm", GlmFile, variants.glm, "chatglm", "GLM-4 9B"),
    "Glm4ForCausalLM": Family("glm4", Glm4File, variants.glm4, "glm4", "GLM-4 0414"),
    "CohereForCausalLM": Family("cohere", CohereFile, variants.cohere, "command-r", "Command R, R+, Aya (Cohere 1)"),
    "Cohere2ForCausalLM": Family("cohere2", Cohere2File, variants.cohere2, "cohere2", "Command R7B, A (Cohere 2)"),
    "Cohere2MoeForCausalLM": Family(
        "cohere2_moe", Cohere2MoeFile, Cohere2MoeFile.variant, "cohere2moe", "Cohere 2, experts"
    ),
    "ApertusForCausalLM": Family("apertus", ApertusFile, variants.apertus, "apertus"),
    "NanoChatForCausalLM": Family("nanochat", NanoChatFile, variants.nanochat, "", "nanochat"),
    "GPTNeoXForCausalLM": Family(
        "gpt_neox", GptNeoxFile, GptNeoxFile.variant, "gptneox", "GPT-NeoX, Pythia", in_peft="gpt_neox."
    ),
    "GPT2LMHeadModel": Family(
        "gpt2", Gpt2File, Gpt2File.variant, "gpt2", "GPT-2", other_types=("gpt-sw3",), in_peft="transformer.h."
    ),
    "GPTBigCodeForCausalLM": Family(
        "gpt_bigcode", GptBigCodeFile, GptBigCodeFile.variant, "starcoder", "StarCoder 1", in_peft="transformer.h."
    ),
    "GPTJForCausalLM": Family("gptj", GptJFile, GptJFile.variant, "", "GPT-J", in_peft="transformer.h."),
    "GPTNeoForCausalLM": Family(
        "gpt_neo", GptNeoFile, GptNeoFile.variant, "", "GPT-Neo, TinyStories", in_peft="transformer.h."
    ),
    "OPTForCausalLM": Family("opt", OptFile, OptFile.variant, "", "OPT", in_peft="model.decoder."),
    "FalconForCausalLM": Family(
        "falcon", FalconFile, FalconFile.variant, "falcon", "Falcon, Falcon-RW, Falcon 2", in_peft="transformer.h."
    ),
    "OlmoForCausalLM": Family("olmo", OlmoFile, variants.olmo, "olmo", "OLMo 1"),
    "Lfm2ForCausalLM": Family("lfm2", Lfm2File, Lfm2File.variant, "lfm2", "LFM2, dense"),
    "Lfm2MoeForCausalLM": Family("lfm2_moe", Lfm2MoeFile, Lfm2MoeFile.variant, "lfm2moe", "LFM2, experts"),
    "Lfm3ForCausalLM": Family("lfm3", Lfm3File, Lfm3File.variant, "", "LFM3"),
    "Glm4MoeForCausalLM": Family("glm4_moe", Glm4MoeFile, scored_variants.glm4_moe, "glm4moe", "GLM-4.5, 4.6"),
    "SolarOpenForCausalLM": Family("solar_open", SolarOpenFile, scored_variants.solar_open, "glm4moe", "Solar Open"),
    "Dots1ForCausalLM": Family("dots1", Dots1File, scored_variants.dots1, "dots1", "dots.llm1"),
    "ExaoneMoeForCausalLM": Family(
        "exaone_moe", ExaoneMoeFile, scored_variants.exaone_moe, "exaone-moe", "K-EXAONE (EXAONE, experts)"
    ),
    "AfmoeForCausalLM": Family("afmoe", AfmoeFile, AfmoeFile.variant, "afmoe", "Trinity (AfMoE)"),
    "Ernie4_5_MoeForCausalLM": Family(
        "ernie4_5_moe", Ernie45MoeFile, scored_variants.ernie4_5_moe, "ernie4_5-moe", "ERNIE 4.5, experts"
    ),
    "DeepseekV2ForCausalLM": Family(
        "deepseek_v2", DeepseekV2File, DeepseekV2File.variant, "deepseek2", "DeepSeek V2, V2-Lite"
    ),
    "DeepseekV3ForCausalLM": Family(
        "deepseek_v3",
        DeepseekV3File,
        DeepseekV3File.variant,
        "deepseek2",
        "DeepSeek V3, R1, Kimi K2, Moonlight",
        gguf_key="expert_gating_func",
        gguf_above=1,  # sigmoids
        other_types=("kimi_k2",),
    ),
    "AXK1ForCausalLM": Family("axk1", AxK1File, AxK1File.variant, "", "A.X K1"),
    "Glm4MoeLiteForCausalLM": Family(
        "glm4_moe_lite", Glm4MoeLiteFile, Glm4MoeLiteFile.variant, "deepseek2", "GLM-4.7-Flash"
    ),
    "Mistral4ForCausalLM": Family("mistral4", Mistral4File, Mistral4File.variant, "mistral4", "Mistral Small 4"),
    "MiniCPM3ForCausalLM": Family("minicpm3", MiniCpm3File, MiniCpm3File.variant, "minicpm3", "MiniCPM3"),
    "YoutuForCausalLM": Family("youtu", YoutuFile, YoutuFile.variant, "deepseek2", "Youtu-LLM"),
    "MiniMaxM2ForCausalLM": Family("minimax_m2", MiniMaxM2File, expert_variants.minimax_m2, "minimax-m2", "MiniMax-M2"),
    "MixtralForCausalLM": Family("mixtral", MixtralFile, expert_variants.mixtral, "llama"),
    "FlexOlmoForCausalLM": Family("flex_olmo", FlexOlmoFile, expert_variants.flex_olmo, "", "FlexOlmo"),
    "OlmoeForCausalLM": Family("olmoe", OlmoeFile, expert_variants.olmoe, "olmoe", "OLMoE"),
    "GptOssForCausalLM": Family("gpt_oss", GptOssFile, expert_variants.gpt_oss, "gpt-oss", "gpt-oss"),
    "Qwen2MoeForCausalLM": Family(
        "qwen2_moe", Qwen2MoeFile, expert_variants.qwen2_moe, "qwen2moe", "Qwen 1.5 and 2, experts"
    ),
    "Qwen3MoeForCausalLM": Family("qwen3_moe", Qwen3MoeFile, expert_variants.qwen3_moe, "qwen3moe", "Qwen 3, experts"),
    "MellumForCausalLM": Family("mellum", MellumFile, expert_variants.mellum, "mellum", "Mellum 2"),
    "PhimoeForCausalLM": Family(
        "phimoe",
        PhimoeFile,
        expert_variants.phimoe,
        "",
        "Phi 3.5, experts",
        no_gguf="weights the two experts by a softmax over both, and has RMSNorm instead of LayerNorm",
        reads_again=True,
    ),
}

# The tokenizer class that transformers registers for a model type, which it takes if the files declare none. An empty
# name stands for tokenizer.json as it is, which then holds whatever class is declared; other types have no class.
TOKENIZERS = {
    kind: name
    for name, kinds in {
        "Cohere": "aya_vision cohere cohere2",
        "GPT2": "gpt2 gpt_neo gptj hyperclovax_vision_v2 jais2 opt phi starcoder2",
        "GPTNeoX": "falcon_mamba gpt_neox mamba mamba2 olmo olmoe",
        "Gemma": "gemma gemma2 gemma3 gemma3_text gemma3n gemma3n_text",
        "Llama": "idefics2",
        "Qwen2": """audioflamingo3 fun_asr_nano hunyuan_vl internvl lighton_ocr moss_transcribe_diarize ovis2
            qianfan_ocr qwen2 qwen2_5_omni qwen2_5_vl qwen2_audio qwen2_moe qwen2_vl qwen3 qwen3_asr qwen3_moe
            qwen3_next qwen3_omni_moe qwen3_vl qwen3_vl_moe""",
        "Qwen3_5": "qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text",
        "": """ernie4_5 ernie4_5_moe flex_olmo glm glm4 glm4_moe glm4_moe_lite glm4v glm4v_moe glmasr got_ocr2
            gpt_bigcode granite granitemoe granitemoehybrid granitemoeshared hyperclovax internlm3 iquestcoder jamba
            kimi_k25 llava llava_next minicpm3 minicpm_ocr minicpmv4_6 minicpmv4_7 minimax_m2 ministral ministral3
            mistral mistral3 mixtral nemotron olmo2 olmo3 olmo_hybrid paddleocr_vl phi3 phimoe smolvlm stablelm
            vipllava voxtral""",
    }.items()
    for kind in kinds.split()
}
# Model types that have their registered class whatever their files declare.
FORCED_TOKENIZERS = {"hyperclovax_vision_v2", "qwen2", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text"}
