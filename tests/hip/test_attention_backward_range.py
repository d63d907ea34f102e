"""float16's range in the backward on the tensor cores: gradients, values and probabilities so small or so large that P,
dS, do or v would leave it without the scales of attention_gradient.hpp. gfx90a's tensor cores take float16 subnormals
for zeros."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

NAMES = ("do", "q", "k", "v", "o", "lse", "doc_start")
LENGTH = 131
ARCHITECTURES = ("gfx90a", "gfx942", "gfx1100")


def random(width: int = 64) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    return {n: rng.standard_normal((LENGTH, width)) for n in ("do", "q", "k", "v")}


def inputs(x: dict[str, np.ndarray], scale: float, powers: tuple[int, int]) -> dict[str, np.ndarray]:
    """Return the inputs of one causal head after its forward, with do and v times these powers of two."""
    factors = {"do": 2.0 ** powers[0], "v": 2.0 ** powers[1]}
    stored = {n: (a * factors.get(n, 1)).astype(np.float16) for n, a in x.items()}
    scores = scale * stored["q"].astype(np.float64) @ stored["k"].astype(np.float64).T
    scores = np.where(np.tri(len(scores), dtype=bool), scores, -np.inf)
    lse = np.logaddexp.reduce(scores, axis=1)
    o = np.exp(scores - lse[:, None]) @ stored["v"].astype(np.float64)
    return {**stored, "o": o.astype(np.float16), "lse": lse.astype(np.float32)}


def gradients(x: dict[str, np.ndarray], scale: float, powers: tuple[int, int], kind: Any) -> dict[str, np.ndarray]:
    """dq, dk, dv in float64; of float16: P, dS and the results rounded to it, sums in float32, do and v taken back by
    their powers, so that nothing leaves the range."""
    wide: Any = np.float64 if kind is np.float64 else np.float32
    back = {"do": -powers[0], "v": -powers[1], "o": -powers[1]}
    do, q, k, v, o = (x[n].astype(wide) * wide(2.0 ** back.get(n, 0)) for n in ("do", "q", "k", "v", "o"))
    seen = np.tri(len(q), dtype=bool)
    p = np.where(seen, np.exp(np.where(seen, wide(scale) * (q @ k.T) - x["lse"].astype(wide)[:, None], 0)), 0)
    ds = (p * (do @ v.T - (do * o).sum(1, keepdims=True))).astype(kind).astype(wide)
    found = {"dq": wide(scale) * (ds @ k), "dk": wide(scale) * (ds.T @ q), "dv": p.astype(kind).astype(wide).T @ do}
    return {
        n: a.astype(kind).astype(np.float64) * 2.0 ** (powers[0] + (n != "dv") * powers[1]) for n, a in found.items()
    }


def check(device: Any, x: dict[str, np.ndarray], scale: float, powers: tuple[int, int] = (0, 0)) -> None:
    """Errors are at most twice those of a plain float16 implementation whose values stay in range, and those of results
    that are subnormal."""
    stored = inputs(x, scale, powers)
    arrays = {n: device.upload(a[None, None] if n == "lse" else a[None, :, None]) for n, a in stored.items()}
    arrays["doc_start"] = device.upload(np.zeros((1, LENGTH), np.int32))
    found = device.attention_backward(*(arrays[n] for n in NAMES), scale=scale)
    wanted, plain = (gradients(stored, scale, powers, kind) for kind in (np.float64, np.float16))
    for (name, exact), array in zip(wanted.items(), found):
        errors = np.abs(device.download(array).astype(np.float64)[0, :, 0] - exact)
        allowed = np.abs(plain[name] - exact)
        for first in (0, 1) if name == "dv" else (0,):  # without the first key too, which may outshine the others
            assert errors[first:].max() <= 2 * allowed[first:].max() + 2.0**-25, name


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(
    "powers", [(-22, 0), (-13, 0), (-7, 0), (12, -10), (0, -13), (-14, -7), (-10, 12), (6, 6)], ids=str
)
def test_gradients_and_values_far_from_one_keep_their_digits(
    emulator: Any, architecture: str, powers: tuple[int, int]
) -> None:
    """do and v of subnormal numbers; dS below float16's smallest, and above its largest."""
    x = random()
    if min(powers) >= 0:  # dS beyond float16, dq and dk within
        x["q"], x["k"] = x["q"] / 64, x["k"] / 64
    check(emulator.device(architecture), x, 0.125, powers)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("power", [-12, 0, 7])
@pytest.mark.parametrize("above", [5, 10, 15, 20])
def test_many_small_probabilities_count(emulator: Any, architecture: str, above: float, power: int) -> None:
    """Scores (scale 1) of about 0, and of `above` for the first key."""
    x = random()
    x["q"], x["k"] = 0.25 * x["q"], 0.25 * x["k"]
    x["q"][:, 0], x["k"][:, 0], x["k"][0] = 1, 0, 0
    x["k"][0, 0] = above
    check(emulator.device(architecture), x, 1.0, (power, 0))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("row", [3, LENGTH - 1])
@pytest.mark.parametrize("name", ["do", "v"])
def test_a_row_far_larger_than_the_rest_keeps_the_limits(emulator: Any, architecture: str, name: str, row: int) -> None:
    """It sets the scales of all that it meets. A value that nobody attends to only spends the range."""
    x = random(128)
    x[name][row] *= 2.0**9
    if name == "v":
        x["q"][:, 0], x["k"][row, 0] = 4, -200
    check(emulator.device(architecture), x, 0.125)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_score_gradients_at_their_bound_stay_in_range(emulator: Any, architecture: str) -> None:
    """Two kinds of keys with opposite values, all along do: p (1 - p) is what keeps dS below |do| |v|."""
    x = random()
    x["q"], x["k"] = x["q"] / 8, x["k"] / 8
    x["do"][:], x["v"][:] = 1.99, 1.99  # their lengths are just below a power of two
    x["v"][1::2] *= -1
    check(emulator.device(architecture), x, 0.125)


@pytest.mark.all
@pytest.mark.parametrize("architecture", ["gfx942"])
def test_score_gradients_near_the_largest_that_there_are_stay_in_range(emulator: Any, architecture: str) -> None:
    """do and v of about 61,000 in each of 256 elements take dS to 2^38; the scale takes dq and dk back."""
    x, signs = random(256), (-1.0) ** np.arange(LENGTH)[:, None]
    x["q"], x["k"] = x["q"] / 64, x["k"] / 64
    x["do"][:] = x["v"][:] = 1.87 * signs  # alternating, so that dv stays in range
    check(emulator.device(architecture), x, 2.0**-22, (15, 15))
