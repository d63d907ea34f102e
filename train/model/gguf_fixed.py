"""Properties of architectures that llama.cpp has in its code, without a key in GGUF files.

Source: github.com/ggml-org/llama.cpp, src/llama-model.cpp and src/models.
"""

from __future__ import annotations

from wgrad.train.model.gguf_mamba import GRANITE_HYBRID, NEMOTRONS
from wgrad.train.model.gguf_shared_keys import SHARING

# llama.cpp knows layers without a window, and how many layers the models have whose scores go by hidden size.
ONE_FULL_OF = {"gemma2": 2, "gemma3": 6, "olmo2": 4, "cohere2": 4, "gpt-oss": 2, "afmoe": 4, "exaone-moe": 4}
GGUF_LARGEST = {"gemma2": 46, "gemma3": 62}
EXAONE_32B = (64, 4)  # layers of the EXAONE 4 that has windows, and of how many layers one has none
GRANITE = ("granite", "granitemoe", GRANITE_HYBRID)
UNROUNDED = ("gpt-oss",)  # trained with yarn's range as it comes out, which llama.cpp rounds as it does everywhere
LONGROPE = ("phi3", "minicpm3")  # which may have factors of their own
ROTATE_IN_WINDOWS = ("cohere2", "exaone4", "exaone-moe", "afmoe")  # whose other layers have no rotary embeddings
ACTIVATIONS = {
    **dict.fromkeys(("gemma", "gemma2", "gemma3", *SHARING, "phi2", "starcoder2"), "gelu_tanh"),
    "apertus": "xielu",
    **dict.fromkeys(("arcee", "nemotron", "jais2", *NEMOTRONS), "relu2"),
}
# Architectures of which llama.cpp looks for no biases: the parts of names that have none.
UNBIASED = {
    **dict.fromkeys(("cohere2", "command-r", "olmo", "exaone4", "hunyuan-dense", "hunyuan-moe", "afmoe"), ("_proj.",)),
    "seed_oss": ("o_proj.", "mlp."),
    **dict.fromkeys(("qwen3next", "qwen35", "qwen35moe", "lfm2", "dots1", "apertus"), ("_proj.",)),
    "ernie4_5-moe": ("_proj.", "lm_head."),
    "glm4": ("mlp.",),
}
