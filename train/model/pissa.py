"""PiSSA: adapters that start as the largest singular values of their weights, which the frozen weights then lack.

The frozen weight is W - s B0 A0, quantized like W. An adapter for the original W is the change s (B A - B0 A0), which
is plain LoRA of twice the rank whose second half is the start.
Source: PiSSA (arXiv 2404.02948); names and the conversion to plain LoRA are PEFT's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from wgrad.device.errors import WgradError
from wgrad.device.host_matmul import host_matmul
from wgrad.device.openblas import one_blas_thread
from wgrad.train.model.lora import LoraConfig, is_whole

PISSA = "pissa"
MORE = 8  # additional columns of the randomized decomposition

Arrays = dict[str, np.ndarray]


class PissaStart:
    """The start values of an adapter, computed weight by weight as these are read.

    Args:
        shapes: Shapes of the adapter's matrices, as `lora.lora_shapes` returns them.
        kind: "pissa" for an exact decomposition, or "pissa_niter_N" for N rounds of a randomized one (arXiv 0909.4061).
        seed: Seed of the randomized decomposition.
        known: Start of a resumed run, which keeps it bit by bit.

    Attributes:
        lora: The adapter's configuration.
        values: `<module>.lora_A` and `.lora_B`, float32, zeros until the weight has been read.
    """

    def __init__(
        self,
        lora: LoraConfig,
        shapes: Mapping[str, tuple[int, ...]],
        kind: str,
        seed: int,
        known: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        self.lora, self._known = lora, known
        self._rounds = int(kind.rpartition("_")[2]) if kind != PISSA else None
        self._seeds = {name: (2, number) for number, name in enumerate(shapes)}
        self._seed = seed
        self.values: Arrays = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}

    def residual(self, module: str, weight: np.ndarray) -> np.ndarray:
        """Decompose a weight [out, in], and return the weight to freeze instead of it, in its dtype.

        Raises:
            WgradError: The decomposition does not converge.
        """
        a_name, b_name = f"{module}.lora_A", f"{module}.lora_B"
        if a_name not in self.values:
            return weight
        wide, scaling = weight.astype(np.float32), self.lora.scaling_of(module)
        if self._known is not None:
            a, b = self._known[a_name], self._known[b_name]
        else:
            try:
                u, s, vt = self._decompose(wide, self.values[a_name].shape[0], a_name)
            except np.linalg.LinAlgError as error:
                raise WgradError(
                    f"--init-lora-weights: {module} has no singular values ({error}): use --init-lora-weights lora"
                ) from error
            root = np.sqrt(s / np.float32(scaling))
            a, b = root[:, None] * vt, u * root
        self.values[a_name], self.values[b_name] = np.ascontiguousarray(a), np.ascontiguousarray(b)
        values: np.ndarray = (wide - np.float32(scaling) * host_matmul(b, a)).astype(weight.dtype)
        return values

    def _decompose(self, weight: np.ndarray, rank: int, name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the largest singular values and their vectors: [out, rank], [rank], [rank, in]."""
        if self._rounds is None:
            u, s, vt = np.linalg.svd(weight, full_matrices=False)
        else:
            width = min(rank + MORE, *weight.shape)
            seeds = np.random.SeedSequence(self._seed, spawn_key=self._seeds[name])
            start = np.random.Generator(np.random.PCG64(seeds)).standard_normal((weight.shape[1], width), np.float32)
            with one_blas_thread():
                q = np.linalg.qr(host_matmul(weight, start))[0]
                for _ in range(self._rounds):
                    q = np.linalg.qr(host_matmul(weight, np.linalg.qr(host_matmul(weight.T, q))[0]))[0]
                u, s, vt = np.linalg.svd(host_matmul(q.T, weight), full_matrices=False)
                u = q @ u
        return u[:, :rank], s[:rank], vt[:rank]

    def as_lora(self, arrays: Mapping[str, np.ndarray]) -> tuple[LoraConfig, Arrays]:
        """Return the trained change as plain LoRA of twice the rank, for the original weights."""
        scale = math.sqrt(2) if self.lora.rslora else 2
        lora = replace(
            self.lora,
            r=2 * self.lora.r,
            alpha=scale * self.lora.alpha,
            rank_pattern={pattern: 2 * rank for pattern, rank in self.lora.rank_pattern.items()},
            alpha_pattern={pattern: scale * alpha for pattern, alpha in self.lora.alpha_pattern.items()},
        )
        joined = {}
        for name, value in arrays.items():
            if is_whole(name):
                joined[name] = value
                continue
            is_a, start = name.endswith(".lora_A"), self.values[name]
            joined[name] = np.concatenate([value, start if is_a else -start], axis=0 if is_a else 1)
        return lora, joined


def start_within(arrays: Mapping[str, np.ndarray]) -> Arrays:
    """Return the start values within a checkpoint's adapter, which are the second half of `PissaStart.as_lora`."""
    found = {}
    for name, value in arrays.items():
        if is_whole(name):
            continue
        half = value.shape[0 if name.endswith(".lora_A") else 1] // 2
        found[name] = value[half:].copy() if name.endswith(".lora_A") else -value[:, half:]
    return found
