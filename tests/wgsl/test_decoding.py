"""Sampling against its exact distribution in float64, and the key/value cache."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.case_results import assert_case
from wgrad.autograd.ops.decoding import sample_settings
from wgrad.autograd.reference import ReferenceDevice
from wgrad.autograd.selftest import decoding
from wgrad.autograd.selftest.case import F32, Case
from wgrad.wgsl.device import WgpuDevice

SETTINGS: list[tuple[Any, ...]] = [
    (1.0, 0, 1.0),
    (0.7, 5, 1.0),
    (1.3, 0, 0.8),
    (0.8, 40, 0.9),
    (1.0, 1, 1.0),
    (1.0, 0, 1e-9),
    (5.0, 3, 0.5),
]
SETTINGS += [(0.9, 0, 1.0, 0.1), (1.1, 0, 0.95, 0.3)]


def draw(device, logits: np.ndarray, number: float, setting: tuple[Any, ...]) -> int:
    uniform, settings = np.array([number], np.float32), sample_settings(*setting)[None]
    out = device.sample(*map(device.upload, (logits, uniform, settings)))
    return int(device.download(out)[0])


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@pytest.mark.parametrize("vocab", [1, 7, 255, 256, 300, 5003])
def test_sample_draws_the_tokens_of_the_reference(vocab, setting, wgpu_device, rng) -> None:
    """The same tokens as the reference, for numbers in the middle of a token's stretch of the cumulative sum."""
    logits = (3 * rng.standard_normal(vocab)).astype(np.float32)
    reference = ReferenceDevice()
    for number in (*rng.random(8), 0.0, 1 - 2**-24):
        found = draw(wgpu_device, logits, number, setting)
        near = {draw(reference, logits, min(max(number + e, 0.0), 1 - 2**-24), setting) for e in (-2e-6, 0.0, 2e-6)}
        assert found in near


@pytest.mark.parametrize("setting", [(1.0, 5, 1.0), (1.0, 0, 0.6), (0.0, 0, 1.0)], ids=str)
def test_ties_stay_together(setting, wgpu_device, rng) -> None:
    logits = rng.integers(-3, 4, 1003).astype(np.float32)
    reference = ReferenceDevice()
    for number in np.linspace(0.003, 0.997, 23):
        assert draw(wgpu_device, logits, number, setting) == draw(reference, logits, number, setting)


def test_greedy_takes_the_lowest_of_equals(wgpu_device: WgpuDevice) -> None:
    for places in ([5, 700], [256, 512], [0, 1002], [777]):
        logits = np.full(1003, -7.0, np.float32)
        logits[places] = 2.5
        assert draw(wgpu_device, logits, 0.9, (0.0, 0, 1.0)) == places[0]
    assert draw(wgpu_device, np.full(300, -1e30, np.float32), 0.5, (0.0, 0, 1.0)) == 0


STEPS = [case for case in decoding.cases(F32) if case.name.startswith(("advance", "sample/rows"))]


@pytest.mark.parametrize("case", STEPS, ids=lambda case: case.name)
def test_steps_of_several_sequences_are_within_the_limits(case: Case, wgpu_device) -> None:
    assert_case(case, wgpu_device)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize(("groups", "width"), [(2, 8), (1, 5), (3, 64)])
def test_kv_append_leaves_out_what_is_past_the_end(groups, width, dtype, wgpu_device, rng) -> None:
    cache = rng.standard_normal((2, 9, groups, width)).astype(dtype)
    new = rng.standard_normal((2, 3, groups, width)).astype(dtype)
    for first in (0, 4, 6, 8):
        found = wgpu_device.upload(cache)
        wgpu_device.kv_append(found, wgpu_device.upload(new), wgpu_device.upload(np.array([first], np.int32)))
        wanted = cache.copy()
        wanted[:, first : first + 3] = new[:, : 9 - first]  # what lies past the end is left out, not wrapped
        np.testing.assert_array_equal(wgpu_device.download(found), wanted)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize(("groups", "width"), [(2, 8), (1, 10), (3, 64)])
def test_rope_append_is_rope_and_append(groups, width, dtype, wgpu_device, rng) -> None:
    """To the bit, on all that is in the cache; what lies past its end is left out."""
    d, batch, tokens, length = wgpu_device, 2, 3, 9
    k, v = (d.upload(rng.standard_normal((batch * tokens, groups, width)).astype(dtype)) for _ in range(2))
    cos, sin = (d.upload(rng.standard_normal((20, width // 2)).astype(np.float32)) for _ in range(2))
    positions = d.upload(rng.integers(0, 20, batch * tokens).astype(np.int32))
    rotated = d.download(d.rope(k, cos, sin, positions))
    for first in (0, 4, 6, 8, 9):
        before = rng.standard_normal((2, batch, length, groups, width)).astype(dtype)
        keys, values = (d.upload(cache) for cache in before)
        d.rope_append(k, v, cos, sin, positions, keys, values, d.upload(np.array([first], np.int32)))
        for found, cache, new in zip((keys, values), before, (rotated, d.download(v))):
            wanted = cache.copy()
            rows = new.reshape(batch, tokens, groups, width)
            wanted[:, first : first + tokens] = rows[:, : length - first]
            np.testing.assert_array_equal(d.download(found), wanted)
