"""The last lines of `finetune --profile`: the three largest costs, and what would reduce each."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping

SHOWN = 3
_FEWER = "recompute fewer layers (--gradient-checkpointing N), where memory allows"
_NONE = "no option"

# What a cost is called and what reduces it, by the first word of its kernels' names.
_MATMUL = "matmuls", _FEWER
_DECODE = "decoding of frozen weights", "--keep-dequantized, where memory allows, or a larger --batch-size"
_LOSS = "loss over the vocabulary", "no option; it grows with the tokens and with the base model's vocabulary"
_PASSES = "passes over activations (norms, elementwise)", _FEWER
COSTS = {
    "gemm": _MATMUL,
    "gemv": _MATMUL,
    "linear": _MATMUL,
    "attention": ("attention", "a smaller --max-length: it grows with the square of a sequence"),
    "quantize": _DECODE,
    "loss": _LOSS,
    "log": _LOSS,
    "softmax": _LOSS,
    "optimizer": ("optimizer", "more --gradient-accumulation-steps, or a smaller --lora-r"),
    **dict.fromkeys(("norm", "activation", "elementwise", "fused", "rope", "dropout", "reduce"), _PASSES),
}


def largest_costs(times: Mapping[str, float], idle: str = "", recomputes: bool = True) -> list[str]:
    """Return a line for each of the largest costs.

    Args:
        times: seconds, or another unit, by kernel.
        idle: why the GPU's tensor cores are not used and what to do; empty where they are, or there are none.
        recomputes: whether any layer is recomputed.
    """
    sums: dict[tuple[str, str], float] = defaultdict(float)
    for kernel, spent in times.items():
        found = re.match("[a-z]+", kernel)
        name, advice = COSTS.get(found[0] if found else "", ("other kernels", _NONE))
        if advice == _FEWER and not recomputes:
            advice = _NONE
        sums[name, idle if idle and name == _MATMUL[0] else advice] += spent
    total = sum(sums.values()) or 1.0
    largest = sorted(sums.items(), key=lambda item: -item[1])[:SHOWN]
    return [f"{spent / total:.0%} {name}; to reduce: {advice}" for (name, advice), spent in largest]
