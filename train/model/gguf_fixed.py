"""Properties of architectures that are fixed in llama.cpp's code and have no key in GGUF files.

Source: github.com/ggml-org/llama.cpp, src/llama-model.cpp and src/models.
"""

from __future__ import annotations

from wgrad.train.model.gguf_llama4 import LLAMA_4
from wgrad.train.model.gguf_mamba import GRANITE_HYBRID, NEMOTRONS
from wgrad.train.model.gguf_shared_keys import SHARING

# One of so many layers has no window.
ONE_FULL_OF = {"gemma2": 2, "gemma3": 6, "olmo2": 4, "cohere2": 4, "gpt-oss": 2, "afmoe": 4, "exaone-moe": 4}
GGUF_LARGEST = {"gemma2": 46, "gemma3": 62}  # layers of the models that scale scores by hidden size / heads
EXAONE_32B = (64, 4)  # layers of the one EXAONE 4 with windows; every 4th layer has none
GRANITE = ("granite", "granitemoe", GRANITE_HYBRID)
UNROUNDED = ("gpt-oss",)  # trained with an unrounded yarn range; llama.cpp rounds it for all architectures
LONGROPE = ("phi3", "minicpm3")  # may have longrope's factors
# May have a factor for each rotary frequency, into which scaling as Llama 3's is written.
FREQUENCIES = ("llama", LLAMA_4, "mistral3", *GRANITE, "exaone4", "exaone-moe", "arcee", "apertus")
# Heads of hidden size / heads elements.
USUAL_WIDTH = (
    "qwen2", "qwen2moe", "olmo", "olmo2", "olmoe", "phi2", "phi3", "stablelm", "starcoder2", "exaone4", "nemotron",
    "chatglm", "command-r", "cohere2", "lfm2", "lfm2moe",
)  # fmt: skip
ROTATE_IN_WINDOWS = ("cohere2", "exaone4", "exaone-moe", "afmoe")  # layers without a window have no rotary embeddings
ACTIVATIONS = {
    **dict.fromkeys(("gemma", "gemma2", "gemma3", *SHARING, "phi2", "starcoder2", "gpt2", "starcoder"), "gelu_tanh"),
    "apertus": "xielu",
    **dict.fromkeys(("gptneox", "falcon"), "gelu"),  # in llama.cpp the tanh form, whatever a model has
    **dict.fromkeys(("arcee", "nemotron", "jais2", *NEMOTRONS), "relu2"),
}
# Parts of names of the modules whose biases llama.cpp does not load, by architecture.
UNBIASED = {
    **dict.fromkeys(("cohere2", "command-r", "olmo", "exaone4", "hunyuan-dense", "hunyuan-moe", "afmoe"), ("_proj.",)),
    LLAMA_4: ("_proj.",),
    "seed_oss": ("o_proj.", "mlp."),
    **dict.fromkeys(("qwen3next", "qwen35", "qwen35moe", "lfm2", "dots1", "apertus"), ("_proj.",)),
    **dict.fromkeys(("qwen3", "qwen3moe", "smollm3", "olmo2", "olmoe", "ernie4_5", "arcee"), ("_proj.",)),
    **dict.fromkeys(("gemma", "gemma2", "gemma3", *SHARING, "deepseek2", "mistral4", "minicpm3"), ("_proj.",)),
    "ernie4_5-moe": ("_proj.", "lm_head."),
    "glm4": ("mlp.",),
    "falcon": (".self_attention.", ".mlp."),
}
