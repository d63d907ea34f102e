"""AdamW over the flat buffer: against the textbook in float64, and what a step that is not finite does."""

from __future__ import annotations

import numpy as np
import pytest

from wgrad.autograd.ops.optimizer import STATE_APPLIED, STATE_GRAD_NORM, STATE_SKIPPED
from wgrad.device.contract import Device
from wgrad.train.step.optim import ALIGN, START_LOSS_SCALE, AdamW, FlatParameters, ParameterSpec

SPECS = [
    ParameterSpec("norm", (13,), decay=False),
    ParameterSpec("a", (5, 7), rate=4.0),
    ParameterSpec("bias", (3,), decay=False),
    ParameterSpec("b", (9, 11)),
]


def filled(device: Device, seed: int = 0) -> tuple[FlatParameters, dict[str, np.ndarray]]:
    parameters = FlatParameters(SPECS, device)
    generator = np.random.default_rng(seed)
    values = {s.name: generator.standard_normal(s.shape).astype(np.float32) for s in SPECS}
    for name, value in values.items():
        parameters.set(name, value)
    return parameters, values


def set_gradients(parameters: FlatParameters, grads: dict[str, np.ndarray]) -> None:
    for name, grad in grads.items():
        parameters.device.write(parameters.tensors[name].gradient, grad)


def test_decayed_parameters_come_first_and_views_are_aligned(device: Device) -> None:
    parameters, values = filled(device)
    assert parameters.decay_elements == 3 * ALIGN  # 35 and 99 numbers, each rounded up
    assert parameters.size == 5 * ALIGN
    assert parameters.count == sum(v.size for v in values.values())
    flat = device.download(parameters.data)
    np.testing.assert_array_equal(flat[:99], values["b"].ravel())  # of two rates the lower first
    np.testing.assert_array_equal(flat[2 * ALIGN : 2 * ALIGN + 35], values["a"].ravel())
    np.testing.assert_array_equal(flat[3 * ALIGN : 3 * ALIGN + 13], values["norm"])
    for name, value in values.items():
        np.testing.assert_array_equal(parameters.get(name), value)


def textbook(
    values: dict[str, np.ndarray], grads: list[dict[str, np.ndarray]], clip: float, dtype: type
) -> tuple[dict[str, np.ndarray], float]:
    """Decoupled AdamW with global-norm clipping, in `dtype`."""
    lr, decay = 1e-2, 0.1
    rates = {s.name: s.rate for s in SPECS}
    p: dict[str, np.ndarray] = {n: v.astype(dtype) for n, v in values.items()}
    m, v = ({n: np.zeros_like(x) for n, x in p.items()} for _ in range(2))
    norm = 0.0
    for t, step in enumerate(grads, start=1):
        norm = float(np.sqrt(sum((g.astype(dtype) ** 2).sum() for g in step.values())))
        factor = dtype(min(1.0, clip / norm)) if clip else dtype(1)
        for n, g in step.items():
            g = g.astype(dtype) * factor
            m[n] = dtype(0.9) * m[n] + dtype(0.1) * g
            v[n] = dtype(0.999) * v[n] + dtype(0.001) * g * g
            if n in ("a", "b"):
                p[n] = p[n] * dtype(1 - rates[n] * lr * decay)
            update = m[n] / dtype(1 - 0.9**t) / (np.sqrt(v[n] / dtype(1 - 0.999**t)) + dtype(1e-8))
            p[n] = p[n] - dtype(rates[n] * lr) * update
    return p, norm


@pytest.mark.parametrize("clip", [0.0, 0.7])
def test_ten_steps_are_those_of_the_textbook(clip: float, device: Device) -> None:
    parameters, values = filled(device)
    optimizer = AdamW(parameters, weight_decay=0.1, max_grad_norm=clip)
    generator = np.random.default_rng(1)
    steps = [{s.name: generator.standard_normal(s.shape).astype(np.float32) for s in SPECS} for _ in range(10)]
    for grads in steps:
        set_gradients(parameters, grads)
        optimizer.set_lr(1e-2)
        optimizer.step()
        assert not device.download(parameters.grad).any()
    true, norm = textbook(values, steps, clip, np.float64)
    plain, _ = textbook(values, steps, clip, np.float32)
    for name, wanted in true.items():
        moved = np.abs(wanted - values[name]).max()
        assert moved > 1e-2
        error, limit = np.abs(parameters.get(name) - wanted).max(), np.abs(plain[name] - wanted).max()
        # 1 - beta is itself rounded on a device: a relative 2^-24 / (1 - beta2) of the movement at most.
        assert error <= 3 * limit + 2.0**-24 / 0.001 * moved, name
    state = device.download(optimizer.state)
    assert state[STATE_APPLIED] == 10 and state[STATE_SKIPPED] == 0
    assert state[STATE_GRAD_NORM] == pytest.approx(norm, rel=1e-5)


@pytest.mark.filterwarnings("error")
def test_a_limit_beyond_float32_clips_nothing(device: Device) -> None:
    results = []
    for clip in (0.0, 1e300):
        parameters, values = filled(device)
        optimizer = AdamW(parameters, max_grad_norm=clip)
        set_gradients(parameters, {name: 1e3 * value for name, value in values.items()})
        optimizer.set_lr(1e-2)
        optimizer.step()
        results.append({name: parameters.get(name) for name in values})
    for name, value in results[0].items():
        assert np.isfinite(value).all() and np.array_equal(value, results[1][name])


def test_a_gradient_that_is_not_finite_skips_the_step_and_halves_the_loss_scale(device: Device) -> None:
    parameters, values = filled(device)
    optimizer = AdamW(parameters, scale_loss=True)
    assert device.download(optimizer.loss_scale)[0] == START_LOSS_SCALE
    for bad in (np.inf, np.nan):
        grad = np.ones((5, 7), np.float32)
        grad[2, 3] = bad
        set_gradients(parameters, {"a": grad})
        optimizer.set_lr(1.0)
        optimizer.step()
    for name, value in values.items():
        np.testing.assert_array_equal(parameters.get(name), value)
    assert not device.download(parameters.grad).any()
    state = device.download(optimizer.state)
    assert state[STATE_SKIPPED] == 2 and state[STATE_APPLIED] == 0 and state[STATE_GRAD_NORM] == -1
    assert device.download(optimizer.loss_scale)[0] == START_LOSS_SCALE / 4


def test_state_goes_out_and_in_to_the_bit(device: Device) -> None:
    generator = np.random.default_rng(1)
    grads = [{s.name: generator.standard_normal(s.shape).astype(np.float32) for s in SPECS} for _ in range(4)]

    def advance(optimizer: AdamW, steps: list[dict[str, np.ndarray]]) -> None:
        for step in steps:
            set_gradients(optimizer.parameters, step)
            optimizer.set_lr(1e-2)
            optimizer.step()

    whole = AdamW(filled(device)[0], scale_loss=True)
    advance(whole, grads)
    first = AdamW(filled(device)[0], scale_loss=True)
    advance(first, grads[:2])
    second = AdamW(filled(device, seed=9)[0], scale_loss=True)
    second.load_state_arrays(first.state_arrays())
    advance(second, grads[2:])
    for name, value in whole.state_arrays().items():
        np.testing.assert_array_equal(second.state_arrays()[name], value)
    with pytest.raises(ValueError, match="parameters: expected float32"):
        second.load_state_arrays({n: v[:3] for n, v in first.state_arrays().items()})
    for name in ("state", "loss_scale"):  # its counts are read as whole numbers
        with pytest.raises(ValueError, match=f"{name}: a number is not finite"):
            second.load_state_arrays(first.state_arrays() | {name: first.state_arrays()[name] + np.float32("nan")})
    for wrong in (np.zeros(3, np.float32), np.zeros((second.parameters.size, 1), np.float32)):
        with pytest.raises(ValueError, match="expected float32"):
            second.parameters.from_file(wrong)
