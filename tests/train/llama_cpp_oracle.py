"""llama.cpp's probabilities (the package xllamacpp), and small configurations of each family that it loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tests.families.common import VOCAB
from tests.families.table import FAMILY_ROWS
from tests.tools import oracle_package
from tests.train.tiny_models import tiny_config
from wgrad.train.model.families import FAMILIES

llama_cpp = oracle_package("xllamacpp")
SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
IN_GGUF = [name for name, family in FAMILIES.items() if family.gguf]


def in_llama_cpp(architecture: str, **changes: Any) -> dict[str, Any]:
    """Return the config.json of a tiny model that llama.cpp loads."""
    return tiny_config(architecture, **{**SIZES, **FAMILY_ROWS[architecture].in_llama_cpp, **changes})


def their_log_probabilities(
    base: Path, prompt: np.ndarray | str, adapter: Path | None, vocabulary: int = VOCAB, context: int = 64
) -> np.ndarray:
    """llama.cpp's, of every token after a prompt (ids, or a text), float32 [vocabulary]."""
    params = llama_cpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel, params.n_gpu_layers = str(base), context, 1, 0
    params.warmup, params.verbosity, params.cpuparams.n_threads = False, -1, 1
    params.flash_attn_type = llama_cpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.cache_type_k = params.cache_type_v = llama_cpp.ggml_type.GGML_TYPE_F32
    if adapter is not None:
        params.lora_adapters = [llama_cpp.CommonAdapterLoraInfo(str(adapter), 1.0)]
    given = prompt if isinstance(prompt, str) else prompt.reshape(-1).tolist()
    request = {"prompt": given, "n_predict": 1, "temperature": -1, "n_probs": vocabulary}
    answer = llama_cpp.Server(params).handle_completions(request)
    told = answer["choices"][0]["logprobs"]
    if told is None:
        raise LookupError("nothing is told where the likeliest token ends a text or is a part of a character")
    found = told["content"][0]["top_logprobs"]
    values = np.full(vocabulary, np.nan, np.float32)
    values[[entry["id"] for entry in found]] = [entry["logprob"] for entry in found]
    return values


def log_probabilities(logits: np.ndarray) -> np.ndarray:
    """Return the log-probabilities of the last token."""
    last = logits[-1].astype(np.float64)
    return last - last.max() - np.log(np.exp(last - last.max()).sum())
