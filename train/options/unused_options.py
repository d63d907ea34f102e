"""Options of a run that have no effect because of others, and why."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from wgrad.train.options.objectives import OBJECTIVES, options_of_others

# An option that is set, the options that then have no effect, and why.
_OF_A_NEW_ADAPTER = (
    "lora_r", "lora_alpha", "target_modules", "use_rslora", "init_lora_weights", "use_dora", "lora_variant",
)  # fmt: skip
_UNUSED = (
    (
        "adapter",
        (*_OF_A_NEW_ADAPTER, "train_embeddings", "train_head"),
        "--adapter brings its own",
    ),
    ("full", (*_OF_A_NEW_ADAPTER, "loraplus_lr_ratio"), "--full trains all parameters, not an adapter"),
    ("full", ("train_embeddings", "train_head"), "--full trains all parameters anyway"),
    ("full", ("quantize", "double_quant", "block_size"), "--full quantizes nothing"),
    ("no_quantize", ("double_quant", "block_size"), "--no-quantize leaves the weights as they are"),
    (
        "full",
        ("stream_weights", "resident_layers", "keep_dequantized", "int8_matmul"),
        "--full has no frozen weights",
    ),
    ("weights_stay", ("resident_layers",), "--stream-weights off keeps all weights on the device"),
    (
        "lr_sweep",
        ("learning_rate", "eval_steps", "early_stopping_patience", "keep_best"),
        "--lr-sweep measures each of its rates at the end",
    ),
    ("lr_sweep", ("sample_prompt",), "--lr-sweep makes no samples"),
    ("lr_sweep", ("report_to",), "--lr-sweep keeps nothing but its table"),
    ("eval_data", ("eval_fraction",), "--eval-data is what is held out"),
)


def unused_options(values: Mapping[str, Any]) -> dict[str, str]:
    """Return the options without effect among `values`, each with the reason."""
    given = {**values, "no_quantize": values.get("quantize") is False}
    given["weights_stay"] = values.get("stream_weights") == "off"
    unused = {name: reason for key, names, reason in _UNUSED if given.get(key) for name in names}
    if objective := values.get("objective"):
        unused |= _of_objective(objective)
    return unused


def _of_objective(name: str) -> dict[str, str]:
    kind = OBJECTIVES[name]
    unused = {} if kind.packs else {"packing": "each sequence holds one completion of a preference or label"}
    if kind.records != "texts":
        unused["loss_on"] = "preferences and labels are of completions"
    return unused | options_of_others(name)
