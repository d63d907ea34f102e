"""Sliding windows in GGUF files, and the rotary embeddings of layers with windows.

llama.cpp fixes by architecture which layers have a window, or reads a list or a period.
Source: github.com/ggml-org/llama.cpp, src/llama-hparams.cpp, src/models.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from wgrad.train.files.gguf_fields import GgufFields
from wgrad.train.files.gguf_traits import GgufTraits
from wgrad.train.model.model_config import ModelConfig
from wgrad.train.model.rope_scaling import RopeConfig

WINDOW, _ROTATION = "attention.sliding_window", "attention.rope_pattern"
_PERIOD = 4  # llama.cpp's default
_KINDS = ("full_attention", "sliding_attention")


def stored_windows(config: ModelConfig) -> tuple[int, ...]:
    """Return each layer's window. Where files do not list layers and no pattern is fixed, 0 replaces windows that no
    sequence exceeds."""
    if _one_full_of(config) or config.gguf_traits.lists_windows:
        return config.windows
    return tuple(window if window < config.max_position_embeddings else 0 for window in config.windows)


def _one_full_of(config: ModelConfig) -> int:
    """Return N if llama.cpp gives every N-th layer no window; 0 if it gives no layer a window, or files say which."""
    traits = config.gguf_traits
    return traits.one_full_of if traits.windowed in (None, config.num_hidden_layers) else 0


def _period(windows: tuple[int, ...]) -> int:
    """Return N if the first of every N layers has no window and the others have the same; 0 if no N fits."""
    window, layers = max(windows), range(len(windows))
    found = (n for n in range(1, len(windows) + 1) if windows == tuple(window if i % n else 0 for i in layers))
    return next(found, 0)


def without_window_place(config: ModelConfig) -> Iterator[str]:
    """Yield the windows, and rotary embeddings of layers with windows, that a GGUF file cannot hold."""
    traits, every, windows = config.gguf_traits, _one_full_of(config), stored_windows(config)
    if traits.shares:
        return
    window = max(windows)
    if traits.full_first and not traits.lists_windows:
        fits = _period(windows) > 0
    elif traits.lists_windows and not every:
        fits = {*windows} <= {0, window}
    else:
        fits = windows == tuple(window if every and (i + 1) % every else 0 for i in range(len(windows)))
    if not fits:
        fixed = every or traits.full_first
        yield f"a sliding window of {window} tokens" + (f" in other layers than {config.gguf} has it" if fixed else "")
    if traits.needs_window and not window:
        yield "no layer with a sliding window"
    if not _fits_local_rope(config, traits):
        yield "rotary embeddings of its own in sliding layers"


def _fits_local_rope(config: ModelConfig, traits: GgufTraits) -> bool:
    local = config.local_rope
    if local is None:
        return True
    if traits.states_local_rope:
        return local.type == "default"
    if traits.one_rope:
        return local == config.rope
    return local == RopeConfig(config.head_dim, config.rope.theta if traits.lists_windows else 10_000.0)


def write_windows(writer: Any, config: ModelConfig) -> None:
    """Write the windows, and which layers have one."""
    traits, windows = config.gguf_traits, stored_windows(config)
    if any(windows) or traits.states_no_window:
        writer.add_sliding_window(max(windows))
    if traits.lists_windows and any(windows):
        writer.add_sliding_window_pattern([window > 0 for window in windows])
    elif traits.full_first and any(windows):
        writer.add_sliding_window_pattern(_period(windows))
    if traits.states_local_rope and config.local_rope is not None:
        writer.add_rope_freq_base_swa(config.local_rope.theta)
        writer.add_rope_dimension_count_swa(config.local_rope.head_dim)
    if traits.lists_rotation:
        writer.add_array(f"{config.gguf}.{_ROTATION}", [bool(rotates) for rotates in config.use_rope])


def keys_of_windows(fields: GgufFields, layers: int, theta: float) -> dict[str, Any]:
    """Return the config.json keys that say which of the layers have a window, and which have none of theta."""
    traits, prefix = fields.traits, fields.architecture + "."
    window, key = fields.get(prefix + WINDOW, int, 0), f"{prefix}{WINDOW}_pattern"
    rotates = fields.whole_numbers(prefix + _ROTATION) if traits.lists_rotation else []
    thetas = {} if all(rotates) else {"layer_rope_theta": [theta if layer else 0.0 for layer in rotates]}
    if not (traits.lists_windows or traits.full_first) or (window <= 0 and traits.one_full_of):
        return {}
    if window <= 0:
        return {"layer_types": [_KINDS[0]] * layers} | thetas
    if fields.is_list(key) or traits.one_full_of:
        slides = [bool(layer) for layer in fields.numbers(key)][:layers]
    else:
        period = fields.get(key, int, _PERIOD)
        full = 0 if traits.full_first else period - 1
        slides = [not period or i % period != full for i in range(layers)]
    return {"sliding_window": window, "layer_types": [_KINDS[layer] for layer in slides] or None} | thetas
