"""The LoRA step of `wgrad bench --against-cpu` in plain torch, on the CPU in bfloat16.

Runs as a program with the sizes as JSON, and prints one JSON object. The weights are not quantized, because torch alone
cannot decode NF4 on a CPU.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Callable
from typing import Any

_EPS = 1e-5


def measure(sizes: dict[str, Any]) -> dict[str, Any]:
    """Time steps of a Llama of these sizes.

    Args:
        sizes: of the shape, with `rank`, `tokens`, `settle`, `samples` and `most_seconds`.

    Returns:
        `samples` in seconds, `losses`, the number of `trainable` parameters, and `compute`.
    """
    torch = importlib.import_module("torch")
    torch.manual_seed(0)
    adapters, loss = _llama(torch, sizes)
    optimizer = torch.optim.AdamW(adapters, lr=1e-4)
    ids = torch.randint(0, sizes["vocab"], (sizes["tokens"],))
    samples, losses = list[float](), list[float]()
    while len(losses) < sizes["settle"] + sizes["samples"]:
        start = time.perf_counter()
        value = loss(ids)
        value.backward()
        torch.nn.utils.clip_grad_norm_(adapters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.item())
        if len(losses) > sizes["settle"]:
            samples.append(time.perf_counter() - start)
            if sum(samples) > sizes["most_seconds"]:
                break
    trainable = sum(adapter.numel() for adapter in adapters)
    return {"samples": samples, "losses": losses, "trainable": trainable, "compute": "bfloat16"}


def _llama(torch: Any, sizes: dict[str, Any]) -> tuple[list[Any], Callable[[Any], Any]]:
    """Return the adapters of a Llama with random weights, and the function from tokens to its loss."""
    functional = torch.nn.functional
    hidden, inner, head = sizes["hidden"], sizes["intermediate"], sizes["head_dim"]
    heads, kv_heads, tokens = sizes["heads"], sizes["kv_heads"], sizes["tokens"]
    adapters: list[Any] = []

    def weight(rows: int, columns: int) -> Any:
        return (0.02 * torch.randn(rows, columns)).bfloat16()

    def linear(rows: int, columns: int) -> Any:
        frozen = weight(rows, columns)
        down = (torch.randn(sizes["rank"], columns) / columns**0.5).requires_grad_()
        up = torch.zeros(rows, sizes["rank"]).requires_grad_()
        adapters.extend((down, up))
        return lambda x: x @ frozen.T + 2 * (x @ down.bfloat16().T) @ up.bfloat16().T

    def norm(x: Any) -> Any:
        return functional.rms_norm(x, (hidden,), eps=_EPS)

    def rotate(x: Any) -> Any:
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat((-second, first), -1) * sin

    angles = torch.outer(torch.arange(tokens), 10000.0 ** (-torch.arange(0, head, 2) / head)).repeat(1, 2)
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
    sides = [(heads * head, hidden), (kv_heads * head, hidden), (kv_heads * head, hidden), (hidden, heads * head)]
    sides += [(inner, hidden), (inner, hidden), (hidden, inner)]
    layers = [[linear(*side) for side in sides] for _ in range(sizes["layers"])]
    embedding = weight(sizes["vocab"], hidden)
    lm_head = embedding if sizes["tied"] else weight(sizes["vocab"], hidden)

    def loss(ids: Any) -> Any:
        x = embedding[ids]
        for q, k, v, o, gate, up, down in layers:
            y = norm(x)
            split = [part.view(tokens, -1, head).transpose(0, 1) for part in (q(y), k(y), v(y))]
            keys, values = (part.repeat_interleave(heads // kv_heads, 0) for part in (rotate(split[1]), split[2]))
            mixed = functional.scaled_dot_product_attention(
                rotate(split[0])[None], keys[None], values[None], is_causal=True
            )
            x = x + o(mixed[0].transpose(0, 1).reshape(tokens, -1))
            y = norm(x)
            x = x + down(functional.silu(gate(y)) * up(y))
        return functional.cross_entropy((norm(x) @ lm_head.T).float()[:-1], ids[1:])

    return adapters, loss


if __name__ == "__main__":
    print(json.dumps(measure(json.loads(sys.argv[1]))))
