"""Train a multilayer perceptron on any GPU: two spirals, told apart by 2 x 64 hidden units.

python examples/mlp.py [DEVICE]
"""

import sys

import numpy as np

import wgrad
from wgrad import functional as F


def spirals(n: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Points [n, 2] of two spirals, and which of them each is on."""
    rng = np.random.default_rng(seed)
    kind = np.arange(n) % 2
    angle = 3 * np.pi * np.sqrt(rng.random(n)) + np.pi * kind
    radius = (angle - np.pi * kind) / 9
    return np.stack([radius * np.cos(angle), radius * np.sin(angle)], 1).astype(np.float32), kind.astype(np.int32)


def main(device: str = "auto", steps: int = 300) -> float:
    wgrad.set_default_device(device)
    sizes = [(2, 64), (64, 64), (64, 2)]
    weights = [wgrad.randn(m, n, scale=(2 / m) ** 0.5, requires_grad=True) for m, n in sizes]
    biases = [wgrad.zeros(n, requires_grad=True) for _, n in sizes]
    optimizer = wgrad.AdamW(weights + biases, lr=0.01)

    @wgrad.compile
    def step(x: wgrad.Tensor, y: wgrad.Tensor) -> wgrad.Tensor:
        for w, b in zip(weights[:-1], biases[:-1]):
            x = (x @ w + b).relu()
        loss = F.cross_entropy(x @ weights[-1] + biases[-1], y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    for i in range(steps):
        loss = step(*spirals(256, seed=i))
        if i % 100 == 99:
            print(f"step {i + 1}: loss {loss.item():.3f}")
    return loss.item()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "auto")
