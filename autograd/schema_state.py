"""The schema of what has no gradient and changes or picks what lies on the device: optimiser, sampling, storage.

The rest, and how errors read: `schema.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from wgrad.autograd.schema_args import Args
from wgrad.device.contract import HYPER_SIZE, STATE_SIZE, Array, Device


def grad_norm(device: Device, g: Array) -> None:
    Args("grad_norm", device).array("g", g, "n", "f32", "pass the flat gradient buffer")


def clip(device: Device, norm: Array, hyper: Array, state: Array, loss_scale: Array) -> None:
    args = Args("clip", device).array("norm", norm, "2", "f32", "pass what grad_norm returns")
    args.array("hyper", hyper, str(HYPER_SIZE), "f32").array("state", state, str(STATE_SIZE), "f32")
    args.array("loss_scale", loss_scale, "1", "f32")


def adamw(device: Device, arrays: dict[str, Array], decay_elements: int) -> None:
    """arrays: p, g, exp_avg, exp_avg_sq, hyper, state."""
    args = Args("adamw", device)
    for name in ("p", "g", "exp_avg", "exp_avg_sq"):
        args.array(name, arrays[name], "n", "f32", "all four are flat buffers of one size")
    args.array("hyper", arrays["hyper"], str(HYPER_SIZE), "f32").array("state", arrays["state"], str(STATE_SIZE), "f32")
    args.rule(
        0 <= decay_elements <= args.size["n"],
        f"decay_elements must be between 0 and n = {args.size['n']}, got {decay_elements}; "
        "decayed parameters come first in the buffer",
    )


def sample(device: Device, logits: Array, uniform: Array, temperature: float, top_k: int, top_p: float) -> None:
    args = Args("sample", device).array("logits", logits, "V", "f32", "one row of logits")
    args.array("uniform", uniform, "1", "f32")
    args.rule(temperature >= 0, f"temperature must be 0 (greedy) or positive, got {temperature}")
    args.rule(top_k >= 0, f"top_k must be 0 (off) or positive, got {top_k}")
    args.rule(0 < top_p <= 1, f"top_p must be in (0, 1], got {top_p}; 1 is off")


def write(array: Array, host: Any) -> None:
    """The host's array for one on the device."""
    shape, dtype = getattr(host, "shape", None), getattr(host, "dtype", None)
    Args("write").rule(
        shape is not None and tuple(shape) == tuple(array.shape) and dtype == array.dtype,
        f"host must be a NumPy array like the one on the device, {array.dtype} {list(array.shape)}, got "
        f"{type(host).__name__ if shape is None else f'{dtype} {list(shape)}'}; reshape or cast it",
    )


def copy(src: Array, out: Array) -> None:
    Args("copy").rule(
        int(src.size) == int(out.size) and src.dtype == out.dtype,
        f"out must have the size and dtype of src, {src.dtype} {list(src.shape)}, got {out.dtype} {list(out.shape)}",
    )


def view(array: Array, shape: Sequence[int], offset: int) -> None:
    args, size = Args("view"), math.prod(shape)
    args.rule(
        offset >= 0 and offset % 64 == 0, f"offset must be a multiple of 64 elements, got {offset}; pad the buffer"
    )
    args.rule(
        offset + size <= int(array.size),
        f"shape {list(shape)} at offset {offset} must fit into {int(array.size)} elements, got {offset + size}",
    )
