"""More experts and slots than the cases of every backend have: than a wave has lanes, than a work-group work-items."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from wgrad.autograd.ops.routing import MOST_CHOSEN
from wgrad.autograd.reference import ReferenceDevice


@pytest.mark.parametrize(("tokens", "experts"), [(2, 300), (65600, 2)])
def test_work_items_group_several_experts_or_chunks_of_slots(hip_device: Any, tokens: int, experts: int) -> None:
    ids = np.random.default_rng(5).integers(0, experts, (tokens, 1)).astype(np.int32)
    found, wanted = (d.group_by_expert(d.upload(ids), experts) for d in (hip_device, ReferenceDevice()))
    for mine, true in zip(found, wanted):
        np.testing.assert_array_equal(hip_device.download(mine), true)


# Ids of more experts than a wave has lanes, and of rows that the last expert has in two tiles.
FAR, TILES = np.array([[1, 63], [33, 64], [64, 69], [65, 64]]), np.arange(150)[:, None] // 10 > 0


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize(("ids", "experts"), [(FAR, 70), (TILES, 2)], ids=["far", "tiles"])
def test_each_expert_has_its_tiles(hip_device: Any, ids: np.ndarray, experts: int, dtype: Any) -> None:
    rng, ids = np.random.default_rng(7), ids.astype(np.int32)
    x, weight = (rng.integers(-3, 4, shape).astype(dtype) for shape in ((len(ids), 8), (experts, 8, 8)))  # exact sums

    def results(device: Any) -> list[np.ndarray]:
        start, order, _ = device.group_by_expert(device.upload(ids), experts)
        y = device.grouped_linear(device.upload(x), device.upload(weight), start, order=order)
        return [device.download(a) for a in (y, device.grouped_linear_backward(y, device.upload(weight), start))]

    for found, wanted in zip(results(hip_device), results(ReferenceDevice()), strict=True):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("normalize", [True, False])
def test_a_token_has_as_many_experts_as_it_may(hip_device: Any, normalize: bool) -> None:
    rng, chosen = np.random.default_rng(3), MOST_CHOSEN  # two of each lane of 32
    logits, dweights = (rng.standard_normal((2, n)).astype(np.float32) for n in (140, chosen))

    def results(device: Any) -> list[np.ndarray]:
        weights, ids = device.route(device.upload(logits), chosen, normalize)
        back = device.route_backward(device.upload(dweights), device.upload(logits), ids, normalize)
        return [device.download(a) for a in (weights, ids, back)]

    for found, wanted in zip(results(hip_device), results(ReferenceDevice()), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-7)


def test_zeros_of_both_signs_tie(hip_device: Any) -> None:
    logits = np.array([[-1, -0.0, 0.0], [-1, 0.0, -0.0]], np.float32)
    np.testing.assert_array_equal(
        hip_device.download(hip_device.route(hip_device.upload(logits), 2, True)[1]), [[1, 2]] * 2
    )


@pytest.mark.parametrize("order", ["", "rev"])
def test_gradients_of_rows_longer_than_a_wave_reads(
    hip_device: Any, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WGRAD_EMULATED_ORDER", order or "fwd")
    rng, ids = np.random.default_rng(9), np.array([[0, 1], [1, 0], [0, 1]], np.int32)
    x, y, weights = (rng.integers(-3, 4, shape).astype(np.float32) for shape in ((3, 523), (6, 523), (3, 2)))

    def results(device: Any) -> list[np.ndarray]:
        start, order, _ = device.group_by_expert(device.upload(ids), 2)
        of_x, of_y = device.upload(x), device.upload(y)
        made = device.combine_backward(of_x, of_y, order, device.upload(weights))
        return [device.download(a) for a in (*made, device.grouped_weight_grad(of_y, of_x, start, order=order))]

    for found, wanted in zip(results(hip_device), results(ReferenceDevice()), strict=True):
        np.testing.assert_array_equal(found, wanted)
