"""Train a small GPT on letters, on any GPU: the Book of Proverbs in examples/data, or a text file of your own.

    python examples/tiny_gpt.py [DEVICE] [FILE]

Architecture of GPT-2 (Radford et al., 2019): learned positions, norms in front, a tied output layer.
"""

import sys
from pathlib import Path

import numpy as np

import wgrad
from wgrad import Tensor
from wgrad import functional as F

TEXT = Path(__file__).parent / "data" / "proverbs.txt"


class TinyGPT:
    """Parameters by name, and the functions of them."""

    def __init__(self, vocab: int, layers: int = 4, width: int = 128, heads: int = 4, context: int = 64) -> None:
        self.layers, self.heads, self.context = layers, heads, context
        shapes = {"tokens": (vocab, width), "positions": (context, width)}
        for i in range(layers):
            shapes |= {f"{i}.qkv": (width, 3 * width), f"{i}.proj": (width, width)}
            shapes |= {f"{i}.up": (width, 4 * width), f"{i}.down": (4 * width, width)}
        self.p = {name: wgrad.randn(*shape, scale=0.05, requires_grad=True) for name, shape in shapes.items()}
        for name in [f"{i}.{norm}" for i in range(layers) for norm in ("norm1", "norm2")] + ["norm"]:
            self.p[name] = wgrad.ones(width, requires_grad=True)
            self.p[name + ".bias"] = wgrad.zeros(width, requires_grad=True)

    def norm(self, x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, self.p[name], self.p[name + ".bias"], 1e-5)

    def attention(self, x: Tensor, i: int) -> Tensor:
        batch, context, width = x.shape
        qkv = (x @ self.p[f"{i}.qkv"]).reshape(batch, context, 3, self.heads, width // self.heads)
        q, k, v = (part.squeeze(2) for part in qkv.split(1, 2))
        return F.causal_attention(q, k, v).reshape(x.shape) @ self.p[f"{i}.proj"]

    def logits(self, ids: Tensor) -> Tensor:
        """[batch, context] -> [batch, context, vocab]"""
        x = self.p["tokens"][ids] + self.p["positions"]
        for i in range(self.layers):
            x = x + self.attention(self.norm(x, f"{i}.norm1"), i)
            x = x + (self.norm(x, f"{i}.norm2") @ self.p[f"{i}.up"]).gelu() @ self.p[f"{i}.down"]
        return self.norm(x, "norm") @ self.p["tokens"].T

    def loss(self, ids: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.logits(ids).flatten(1).reshape(targets.size, -1), targets.reshape(-1))


def main(device: str = "auto", file: str | Path = TEXT, steps: int = 400, batch: int = 16, letters: int = 200) -> float:
    wgrad.set_default_device(device)
    text = Path(file).read_text(encoding="utf-8")
    alphabet = sorted(set(text))
    data = np.array([alphabet.index(c) for c in text], np.int32)
    model = TinyGPT(len(alphabet))
    optimizer = wgrad.AdamW(model.p.values(), lr=2e-3)
    rng = np.random.default_rng(0)

    @wgrad.compile
    def step(ids: Tensor, targets: Tensor) -> Tensor:
        loss = model.loss(ids, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    @wgrad.compile
    def predict(ids: Tensor) -> Tensor:
        with wgrad.no_grad():
            return model.logits(ids)

    for i in range(steps):
        starts = rng.integers(0, len(data) - model.context - 1, (batch, 1))
        places = starts + np.arange(model.context)
        loss = step(data[places], data[places + 1])
        if i % 50 == 0 or i == steps - 1:
            print(f"step {i}: loss {loss.item():.3f}")

    written = [alphabet.index("\n")]
    while len(written) < letters:
        window = np.zeros((1, model.context), np.int32)
        recent = written[-model.context :]
        window[0, : len(recent)] = recent
        odds = np.exp(predict(window).numpy()[0, len(recent) - 1].astype(float) / 0.7)
        written.append(rng.choice(len(alphabet), p=odds / odds.sum()))
    print("".join(alphabet[n] for n in written))
    return loss.item()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "auto", sys.argv[2] if len(sys.argv) > 2 else TEXT)
