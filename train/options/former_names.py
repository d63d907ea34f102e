"""Former names of options, from before they took those of Hugging Face; accepted for one release, with a note.

Files of earlier runs (config.yaml, checkpoints) can be read with these names in all later versions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

# Former name: current name.
FORMER = {
    "rank": "lora_r",
    "alpha": "lora_alpha",
    "dropout": "lora_dropout",
    "rslora": "use_rslora",
    "dora": "use_dora",
    "init": "init_lora_weights",
    "lora_plus": "loraplus_lr_ratio",
    "lr": "learning_rate",
    "schedule": "lr_scheduler_type",
    "warmup": "warmup_steps",
    "accumulate": "gradient_accumulation_steps",
    "seq_len": "max_length",
    "checkpointing": "gradient_checkpointing",
    "offload_checkpoints": "offload_activations",
    "eval_every": "eval_steps",
    "save_every": "save_steps",
    "log_every": "logging_steps",
    "early_stop": "early_stopping_patience",
    "int8_products": "int8_matmul",
}


def current_name(name: str, fields: Iterable[str]) -> str:
    """Return the current name of an option, if it is one of `fields`; other names are returned unchanged."""
    fields = set(fields)
    return FORMER[name] if name not in fields and FORMER.get(name) in fields else name


def with_current_names(values: Mapping[str, Any], fields: Iterable[str]) -> dict[str, Any]:
    """Return values by the current names of their options."""
    fields = set(fields)
    return {current_name(name, fields): value for name, value in values.items()}
