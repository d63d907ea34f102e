"""Milliseconds of a training step of an MLP and of the GPT in examples/tiny_gpt.py, next to torch eager.

    python bench/bench_autograd.py [--device NAME] [--steps 100] [--only gpt] [--out FILE]

`eager` runs the step's Python each time, `compiled` replays it (wgrad.compile). Each step uploads its batch and ends
with AdamW; the loss is not read. All of it is float32. With torch and CUDA the same step runs there in eager mode, from
the same parameters, and the difference of the losses after five steps is the column `error`.
"""

# mypy: disable-error-code="misc,no-redef"
from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from common import WARM_SECONDS, Report, has_cuda

import wgrad
from wgrad import Tensor
from wgrad import functional as F
from wgrad.autograd.bench.timing import Time, median_spread
from wgrad.device.contract import Device

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import tiny_gpt  # type: ignore[import-not-found]  # noqa: E402

Step = Callable[..., Any]
Batches = Callable[[int], tuple[np.ndarray, np.ndarray]]
ROUNDS = 5  # of --steps each, of which the median counts
CHECKED = 5  # steps after which losses are compared
MLPS = {"mlp 64": (64, 256), "mlp 1024": (1024, 4096)}  # width of the hidden layers, rows of a batch
GPTS = {"gpt 4x128": (4, 128, 64, 16), "gpt 6x384": (6, 384, 256, 16)}  # layers, width, context, sequences


def mlp_loss(p: dict[str, Any], x: Any, y: Any, lib: Any) -> Any:
    for i in range(2):
        x = (x @ p[f"w{i}"] + p[f"b{i}"]).relu()
    return lib.cross_entropy(x @ p["w2"] + p["b2"], y)


def mlp(width: int, rows: int) -> tuple[dict[str, Tensor], Step, Step, Batches]:
    sizes = [(width, width), (width, width), (width, 10)]
    p = {f"w{i}": wgrad.randn(m, n, scale=(2 / m) ** 0.5, requires_grad=True) for i, (m, n) in enumerate(sizes)}
    p |= {f"b{i}": wgrad.zeros(n, requires_grad=True) for i, (_, n) in enumerate(sizes)}

    def batch(seed: int) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng(seed)
        return rng.standard_normal((rows, width), np.float32), rng.integers(0, 10, rows).astype(np.int32)

    def theirs(tp: Any, x: Any, y: Any, torch: Any) -> Any:
        return mlp_loss(tp, x, y.long(), torch.nn.functional)

    return p, lambda x, y: mlp_loss(p, x, y, F), theirs, batch


def gpt(layers: int, width: int, context: int, sequences: int) -> tuple[dict[str, Tensor], Step, Step, Batches]:
    model = tiny_gpt.TinyGPT(65, layers, width, width // 32, context)

    def batch(seed: int) -> tuple[np.ndarray, np.ndarray]:
        ids = np.random.default_rng(seed).integers(0, 65, (sequences, context + 1)).astype(np.int32)
        return ids[:, :-1].copy(), ids[:, 1:].copy()

    def theirs(p: Any, ids: Any, targets: Any, torch: Any) -> Any:
        return torch_gpt_loss(p, ids.long(), targets.long(), torch, layers, model.heads)

    return model.p, model.loss, theirs, batch


def torch_gpt_loss(p: Any, ids: Any, targets: Any, torch: Any, layers: int, heads: int) -> Any:
    """TinyGPT.loss in torch."""
    nn = torch.nn.functional

    def norm(x: Any, name: str) -> Any:
        return nn.layer_norm(x, x.shape[-1:], p[name], p[name + ".bias"], 1e-5)

    x = p["tokens"][ids] + p["positions"]
    for i in range(layers):
        qkv = (norm(x, f"{i}.norm1") @ p[f"{i}.qkv"]).reshape(*ids.shape, 3, heads, -1)
        q, k, v = (qkv[:, :, part].transpose(1, 2) for part in range(3))
        attended = nn.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + attended @ p[f"{i}.proj"]
        x = x + nn.gelu(norm(x, f"{i}.norm2") @ p[f"{i}.up"], approximate="tanh") @ p[f"{i}.down"]
    return nn.cross_entropy((norm(x, "norm") @ p["tokens"].T).flatten(0, 1), targets.flatten())


def timed(step: Step, batch: Batches, wait: Callable[[], Any], steps: int) -> tuple[Time, float]:
    """Time of a step, of ROUNDS after a warm-up, and the loss after CHECKED steps."""
    batches = [batch(i) for i in range(8)]
    loss = 0.0
    for i in range(CHECKED):
        loss = float(step(*batches[i % 8]).item())

    def round_of(count: int) -> float:
        start = time.perf_counter()
        for i in range(count):
            step(*batches[i % 8])
        wait()
        return (time.perf_counter() - start) / count

    warm = time.perf_counter() + WARM_SECONDS
    while time.perf_counter() < warm:
        round_of(1)
    return median_spread([round_of(steps) for _ in range(ROUNDS)]), loss


def training_step(loss_of: Step, optimizer: Any, put: Callable[[np.ndarray], Any] = lambda x: x) -> Step:
    def step(x: Any, y: Any) -> Any:
        loss = loss_of(put(x), put(y))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return step


def measure(name: str, make: Callable[[], Any], device: Device, torch: Any, steps: int) -> Iterator[dict[str, Any]]:
    params, _, _, _ = make()
    start = {key: x.numpy() for key, x in params.items()}
    found: dict[str, float] = {}
    for way in ("eager", "compiled"):
        params, loss_of, theirs, batch = make()
        for key, x in params.items():
            device.write(x.data, start[key])
        optimizer = wgrad.AdamW(params.values(), lr=1e-3)
        step: Any = training_step(loss_of, optimizer, wgrad.tensor)
        if way == "compiled":
            step = wgrad.compile(training_step(loss_of, optimizer))
        took, found[way] = timed(step, batch, device.synchronize, steps)
        launches = step.launches if way == "compiled" else None
        row = {"name": name, "way": f"wgrad {way}", "ms": 1000 * took.seconds, "spread": took.spread}
        yield row | {"launches": launches}
    if torch is not None:
        tp = {key: torch.tensor(x, device="cuda", requires_grad=True) for key, x in start.items()}
        other = torch.optim.AdamW(list(tp.values()), lr=1e-3)
        step = training_step(
            lambda x, y: theirs(tp, x, y, torch), other, lambda x: torch.from_numpy(x).to("cuda", non_blocking=True)
        )
        took, loss = timed(step, batch, torch.cuda.synchronize, steps)
        error = max(abs(found[way] - loss) for way in found)
        row = {"name": name, "way": "torch eager", "ms": 1000 * took.seconds, "spread": took.spread}
        yield row | {"error": error}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--only", default="", help="part of a name")
    parser.add_argument("--tiny", action="store_true", help="sizes that time nothing")
    parser.add_argument("--out")
    args = parser.parse_args()
    wgrad.set_default_device(args.device)
    device = wgrad.zeros(1).device
    torch = None
    if has_cuda():
        import torch
    cases: dict[str, Callable[[], Any]] = {n: lambda s=s: mlp(*s) for n, s in MLPS.items()}
    cases |= {n: lambda s=s: gpt(*s) for n, s in GPTS.items()}
    if args.tiny:
        cases = {"mlp 8": lambda: mlp(8, 16), "gpt 1x32": lambda: gpt(1, 32, 8, 2)}
    report = Report("autograd", device, args.out)
    for name, make in cases.items():
        if args.only in name:
            for row in measure(name, make, device, torch, args.steps):
                report.row(**row)


if __name__ == "__main__":
    main()
