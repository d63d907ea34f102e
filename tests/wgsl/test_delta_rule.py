"""The gated delta rule and Mamba-2's recurrence in WGSL: in several segments and dispatches, and on a device with
little workgroup memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.wgsl.launches import same_bits_in_parts
from wgrad.autograd.reference import ReferenceDevice
from wgrad.autograd.selftest import delta_rule as rule_cases
from wgrad.autograd.selftest import ssd as ssd_cases
from wgrad.autograd.selftest.case import F32
from wgrad.autograd.selftest.run import check_case
from wgrad.device import contract

CASES = {case.name: case for case in (*rule_cases.cases(F32), *ssd_cases.cases(F32))}
FORWARD, BACKWARD, SSD_BACKWARD = (
    f"{op}/chunks/1x150x2x4x16x20/float32" for op in ("delta_rule", "delta_rule_backward", "ssd_backward")
)
STATE = "from a state/2x70x1x2x10x6/float32"
OF_CHUNKS = tuple(f"delta_rule_{kernel}" for kernel in ("system", "scan", "output"))
BACK = (*OF_CHUNKS, "delta_rule_scan_backward")


@pytest.mark.parametrize(
    ("name", "shaders"),
    [
        (FORWARD, OF_CHUNKS),
        (BACKWARD, (*BACK, "delta_rule_grads", "delta_rule_channels")),
        (SSD_BACKWARD, (*BACK, "ssd_grads", "ssd_channels")),
    ],
)
def test_several_dispatches_give_the_same_bits(
    name: str, shaders: tuple[str, ...], wgpu_device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    same_bits_in_parts(CASES[name], wgpu_device, monkeypatch, *shaders)


@pytest.mark.parametrize(
    ("op", "options"),
    [("delta_rule", {"key_heads": 2, "key_dim": 16}), ("ssd", {"groups": 2, "state_dim": 16})],
)
def test_a_sequence_of_several_segments(
    op: str, options: dict[str, int], wgpu_device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The states between them are kept for the backward, where there is none given."""
    assert contract.delta_segments(16, 2048 + 65) == [(0, 32), (2048, 2)]
    monkeypatch.setattr(contract, "delta_segment", lambda rows: 64)
    inputs, exact = CASES[f"{op}_backward/chunks/1x150x2x4x16x20/float32"].inputs(), ReferenceDevice()
    dy, _ = inputs.pop("dy"), inputs.pop("states")
    y, states = getattr(exact, op)(**inputs, **options)
    wanted = [y, *getattr(exact, f"{op}_backward")(dy, **inputs, states=states, **options)]
    given = {name: wgpu_device.upload(value) for name, value in inputs.items()}
    y, states = getattr(wgpu_device, op)(**given, **options)
    assert states.shape == (3, 1, 4, 16, 20)
    back = getattr(wgpu_device, f"{op}_backward")
    made = [y, *back(wgpu_device.upload(dy), **given, states=states, **options)]
    for found, value in zip(made, wanted):
        np.testing.assert_allclose(wgpu_device.download(found), value, rtol=2e-4, atol=2e-5)
    assert check_case(CASES[f"{op}/{STATE}"], wgpu_device).ok


def token_by_token(
    dtype: Any, xbc: np.ndarray, g: np.ndarray, dt: np.ndarray, dy: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """y without skip and the gradient of g [T, H] of one sequence, whose heads share B and C, by the definition."""
    (tokens, heads), wide = g.shape, 10
    xbc, g, dt, dy = (array.astype(dtype) for array in (xbc, g, dt, dy))
    x, b, c = np.split(xbc, (xbc.shape[1] - 2 * wide, xbc.shape[1] - wide), axis=1)
    added = dt[..., None] * x.reshape(tokens, heads, -1)
    states, y, dg = [np.zeros((heads, wide, added.shape[2]), dtype)], np.empty_like(added), np.empty_like(g)
    for t in range(tokens):
        states.append(np.exp(g[t])[:, None, None] * states[-1] + b[t][:, None] * added[t][:, None])
        y[t] = np.einsum("hnp,n->hp", states[-1], c[t])
    to_state = np.zeros_like(states[0])
    for t in reversed(range(tokens)):
        to_state = np.exp(g[t])[:, None, None] * (to_state + c[t][:, None] * dy[t][:, None])
        dg[t] = (to_state * states[t]).sum(axis=(1, 2))
    return y, dg


def test_strong_decays_are_as_exact_as_token_by_token(wgpu_device: Any) -> None:
    """Decays and their gradients are small differences of the sums of g over a chunk. Without the sums' rests y is 10
    times as far off as token by token; with differences of sums in the gradients, that of the rate is 28 times."""
    rng, heads = np.random.default_rng(0), 6
    xbc, dy = (rng.standard_normal(shape).astype(np.float32) for shape in ((1, 64, 104), (1, 64, heads, 14)))
    dt = np.log1p(np.exp(2 * rng.standard_normal((1, 64, heads)))).astype(np.float32)
    g = -np.exp(0.5 * rng.standard_normal(heads)).astype(np.float32) * dt
    (y, dg), plain = (token_by_token(t, xbc[0], g[0], dt[0], dy[0]) for t in (np.float64, np.float32))
    starts, options = np.zeros((1, 64), np.int32), {"groups": 1, "state_dim": 10}
    inputs = [wgpu_device.upload(a) for a in (xbc, g, dt, np.zeros(heads, np.float32), starts, starts[0, :1])]
    out, states = wgpu_device.ssd(*inputs, **options)
    back = wgpu_device.ssd_backward(wgpu_device.upload(dy), *inputs, states, **options)
    found = [wgpu_device.download(array)[0] for array in (out, back[1])]

    def errors(of_y: np.ndarray, of_g: np.ndarray) -> list[float]:
        """Of y, of g's gradient, and of that of the rate of each head, which is the sum of it times g."""
        pairs = [(of_y, y), (of_g, dg), ((of_g.astype(np.float64) * g[0]).sum(0), (dg * g[0]).sum(0))]
        return [float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in pairs]

    for mine, limit in zip(errors(*found), errors(*plain)):
        assert mine <= 3 * limit


def test_little_workgroup_memory_and_few_registers(wgpu_device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wgpu_device, "few_registers", True)
    monkeypatch.setattr(wgpu_device, "workgroup_bytes", 16 << 10)
    assert all(check_case(CASES[name], wgpu_device).ok for name in (FORWARD, BACKWARD))
