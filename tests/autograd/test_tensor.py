"""Tensors: values and gradients of their methods, optimizers, recorded steps and files.

The oracles are torch in float64, central differences within a graph, and for wgpu the reference device.
"""

from __future__ import annotations

import copy
import importlib.util
import pickle
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import wgrad
from tests.autograd.self_test_calls import TENSOR_MODULES
from tests.tools import oracle_package
from wgrad import Tensor
from wgrad import functional as F
from wgrad.autograd.custom_operator import register_operator, unregister_operator
from wgrad.autograd.gradcheck import LIMIT, gradcheck
from wgrad.autograd.modes import without_reading
from wgrad.autograd.reference import ReferenceDevice
from wgrad.autograd.tensor import before_writing
from wgrad.device.contract import Device
from wgrad.device.errors import ShapeError, WgradError

torch = oracle_package("torch")
EXAMPLES = Path(__file__).parents[2] / "examples"
A, B, C = (3, 5, 7), (5, 7), (5, 1)  # broadcast to each other
LABELS = np.array([3, 0, -100, 6, 6])
WEIGHTS = np.linspace(0.5, 3.5, 7)  # which float32 holds
GATHERED = np.random.default_rng(4).integers(0, 5, (3, 2, 7))
IDS = np.array([[1, 4, 1], [0, 2, 1]], np.int32)

# By name: the same expression of ours and of torch's tensors, and shapes that divide nothing.
CASES: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "add sub mul": (lambda a, b, c: (a + b) * c - b * 2 + (1 - a) * 0.5, (A, B, C)),
    "div neg": (lambda a, b: -a / (b * b + 1) + 2 / (a * a + 1), (A, C)),
    "pow": (lambda a, b: a**2 + a**3 + (a * a + 1) ** b + 2.0**a + (a * a + 1) ** -1.5, (A, B)),
    "exp log sqrt": (lambda a: (a.exp() + 1).log() + (a * a + 0.1).sqrt() + (a * a + 1) ** 0.5, (A,)),
    "sin cos abs": (lambda a: a.sin() * a.cos() + abs(a), (A,)),
    "relu tanh sigmoid": (lambda a: a.relu() + a.tanh() * a.sigmoid(), (A,)),
    "expm1": (lambda a: (F if isinstance(a, Tensor) else torch).expm1(a * 0.3), (A,)),
    "softplus": (
        lambda a: F.softplus(a * 3) if isinstance(a, Tensor) else torch.nn.functional.softplus(a * 3),
        (A,),
    ),
    "silu": (lambda a: F.silu(a) if isinstance(a, Tensor) else torch.nn.functional.silu(a), (A,)),
    "silu gelu methods": (
        lambda a: a.silu() + a.gelu()
        if isinstance(a, Tensor)
        else torch.nn.functional.silu(a) + torch.nn.functional.gelu(a, approximate="tanh"),
        (A,),
    ),
    "exact gelu": (
        lambda a: lib(a).gelu(a, approximate="none") + (a * 4).gelu(approximate="none")
        if isinstance(a, Tensor)
        else torch.nn.functional.gelu(a) + torch.nn.functional.gelu(a * 4),
        (A,),
    ),
    "where": (lambda a, b: lib(a).where((a > b) * (a > -1) != 0, a, b), (A, B)),
    "maximum minimum": (lambda a, b: lib(a).maximum(a, b) * lib(a).minimum(b, a), (A, B)),
    "comparisons": (lambda a, b: a * (a < b) + b * ((a >= b) * 2) + (a <= b) * 3 + (a == b) + (a != b) * 1, (A, B)),
    "sum": (lambda a: a.sum() * a.sum(1) + a.sum((0, 2), keepdim=True).sum(0).sum(1)[0], (A,)),
    "mean": (lambda a: a - a.mean(-1, keepdim=True) + a.mean((0, 1)) + a.mean(), (A,)),
    "max": (lambda a: a.amax(1) * a.amax() + a.max(-1)[0].sum() * a.max(0).values.min() + a.max(), (A,)),
    "min": (lambda a: a.amin((0, 1)) * a.amin() + a.min(1).values.sum() - a.min(a * 0.5).sum(), (A,)),
    "var std norm": (
        lambda a: a.var() * a.std(1, keepdim=True) + a.var(0, correction=0) + a.norm(dim=-1, keepdim=True) * a.norm(),
        (A,),
    ),
    "logsumexp log_softmax": (
        lambda a: a.logsumexp(1) * a.log_softmax(1)[:, 2] + lib(a).log_softmax(a, -1)[0, 0],
        (A,),
    ),
    "clamp masked_fill": (
        lambda a, b: a.clamp(-0.5, 0.7) * a.clamp(min=0)
        + a.masked_fill((a > b) & ~(a > 1) | (b > 1), 0.25) * a.clip(max=0.3) * b,
        (A, B),
    ),
    "square rsqrt": (
        lambda a: (a.square() + 1).rsqrt() + (a.square() + 2).reciprocal() - a.exp2().log2(),
        (A,),
    ),
    "lerp": (lambda a, b: a.lerp(b, 0.3) + a.lerp(b, 0.8) * a.lerp(b, b.sigmoid()), (A, A)),
    "tan where": (lambda a, b: (a * 0.1).tan() + a.where(a > b, b * 2), (A, A)),
    "method names": (lambda a, b: a.add(b).mul(2).sub(1).div(3).pow(2).neg() + a.matmul(b.t()).sum() * a.ge(b), (A, B)),
    "views": (
        lambda a: a.view(5, 21).unflatten(1, (3, 7)).movedim(0, 1) * a.contiguous().clone() + a.mT.swapaxes(1, 2),
        (A,),
    ),
    "parts": (
        lambda a: a.chunk(3, 1)[1].sum() * a.narrow(2, 1, 3).select(1, 0) * a.narrow(-1, -3, 3)[:, 1]
        + a.unbind(2)[4].sum()
        + a.flatten(0, 1)[4, 1],
        (A,),
    ),
    "repeats": (
        lambda a: a.repeat(2, 1, 1, 3) * a.tile(2, 1, 1, 3).sum()
        + a.repeat_interleave(3, 2) * a.repeat_interleave(2)[7]
        + a[:1, :, None, None, None].repeat(1, 1, 2, 1, 1, 3).sum((1, 2, 3, 4)).sum(),
        (A,),
    ),
    "flip roll": (
        lambda a: a.flip(1, 2) * a.roll(2, 1)
        + a.roll(9) * a.roll((1, -2), (0, 2))
        + a.index_select(2, numbers(a, [6, 0, 0, 1, 2, 3, 3])),
        (A,),
    ),
    "tril triu": (lambda a: (a.tril() + a.triu(2).exp()) @ a.mT.tril(-1), (A,)),
    "tril of a column": (lambda a: a[..., :1].tril(-1) * a + a[:, :1].triu(3).expand(3, 5, 7), (A,)),
    "gather": (lambda a: a.gather(1, numbers(a, GATHERED)) * 2, (A,)),
    "picked": (
        lambda a: a[:, [4, 0, 0]].sum((0, 2)) * a[..., [1]].sum()
        + a[numbers(a, [2, 0, 1]), numbers(a, [1, 4, 1])].sum(1)
        + a[1, :, [0, -1, 3]].sum(0),
        (A,),
    ),
    "einsum": (
        lambda a, b, c: lib(a).einsum("hij,kj->hik", a, b)[:, :, 0] * lib(a).einsum("hij,ij,il->jh", a, b, c).sum()
        + lib(a).einsum("hij,hkj->hik", a, a).sum()
        + lib(a).einsum("hij->ih", a).sum(1),
        (A, B, C),
    ),
    "mse_loss l1_loss": (
        lambda a, b: lib(a).mse_loss(a[0], b) + lib(a).l1_loss(a[1], b, reduction="sum")
        + lib(a).mse_loss(a[2], b, reduction="none").sum(),
        (A, B),
    ),
    "binary_cross_entropy_with_logits": (
        lambda a: lib(a).binary_cross_entropy_with_logits(a * 3, a.sigmoid()),
        (A,),
    ),
    "nll_loss one_hot": (
        lambda a: lib(a).nll_loss(lib(a).log_softmax(a, dim=-1), numbers(a, [1, 6, -100, 2, 2]))
        + (a * lib(a).one_hot(numbers(a, [1, 6, 0, 2, 2]), num_classes=7)).sum(),
        (B,),
    ),
    "normalize cosine_similarity": (
        lambda a, b: lib(a).normalize(a, dim=-1) + lib(a).cosine_similarity(a[0], b, dim=1)[:, None]
        + lib(a).cosine_similarity(a[1:, :1], b, dim=1).sum(),
        (A, B),
    ),
    "leaky_relu elu pad": (
        lambda a: lib(a).pad(lib(a).leaky_relu(a, 0.1), (1, 2, 0, 3))
        * lib(a).pad(lib(a).elu(a * 2, alpha=0.7), (2, 1, 3, 0), value=2.0),
        (A,),
    ),
    "binary_cross_entropy": (
        lambda a: lib(a).binary_cross_entropy((a * 9).sigmoid(), a.sigmoid())
        + lib(a).binary_cross_entropy(a.relu().tanh(), (a < 0) * a.detach() / a.detach(), reduction="sum"),
        (A,),
    ),
    "smooth_l1_loss huber_loss": (
        lambda a, b: lib(a).smooth_l1_loss(a[0], b, beta=0.6, reduction="none")
        + lib(a).huber_loss(a[1], b, delta=1.7),
        (A, B),
    ),
    "scaled_dot_product_attention": (
        lambda q, k, v, m: lib(q).scaled_dot_product_attention(q, k, v, is_causal=True)
        + lib(q).scaled_dot_product_attention(q, k, v, m > 0, scale=0.9)
        + lib(q).scaled_dot_product_attention(q, k, v, m),
        ((2, 3, 5, 7), (2, 3, 5, 7), (2, 3, 5, 4), (5, 5)),
    ),
    "conv2d": (
        lambda x, w, b: lib(x).conv2d(x, w, b, (2, 1), (1, 2)).sum((2, 3))
        + lib(x).conv2d(x, w)[..., -1].mean((1, 2))[:, None],
        ((2, 3, 7, 6), (5, 3, 3, 2), (5,)),
    ),
    "max_pool2d avg_pool2d": (
        lambda x: lib(x).max_pool2d(x, 2) * lib(x).avg_pool2d(x, (2, 3), 2) + lib(x).max_pool2d(x, 3, 2).sum(),
        ((2, 3, 7, 9),),
    ),
    "functions of methods": (
        lambda a: of(a).exp(a) * of(a).sum(of(a).tanh(a), -1, keepdim=True)
        + of(a).max(of(a).triu(a, diagonal=1), 1)[0][:, None],
        (A,),
    ),
    "dropout gelu": (lambda a: lib(a).dropout(a, 0.5, training=False) * lib(a).gelu(a, approximate="tanh"), (A,)),
    "reshape": (lambda a: (a.reshape(5, -1) * 2).reshape(7, 15) + a.flatten().reshape((7, 15)), (A,)),
    "transpose": (lambda a, b: a.transpose(0, 2) * b.T.unsqueeze(2) + a.permute(2, 1, 0), (A, B)),
    "squeeze expand": (lambda a, c: a + c.squeeze(1).unsqueeze(1).expand(3, -1, 7) + c.squeeze().sum(), (A, C)),
    "slices": (lambda a: a[1] * a[:, 1:4:2, ...].sum(1).sum(0) + a[..., -1][0][:, None] * a[2, 3:, 6].sum(), (A,)),
    "split cat": (lambda a: lib(a).cat([p * (i + 1) for i, p in enumerate(a.split(3, 2))][::-1], 2), (A,)),
    "split": (lambda a: a.split(2, 1)[0].exp() * a.split(2, 1)[1] + a.split([4, 1], 1)[1], (A,)),
    "stack": (lambda a, b: lib(a).stack([a[0], b, a[2].exp()], 1), (A, B)),
    "matmul": (lambda a, b: a @ b, (B, (7, 4))),
    "matmul rows": (lambda a, b, c: a @ b @ c + (c @ b.T).sum(), (A, (7, 4), (4,))),
    "matmul transposed": (lambda a, b: (a.T @ b.T).T @ a.transpose(0, 1), (B, (4, 5))),
    "matmul batched": (lambda a, b: a @ b.transpose(1, 2) @ b, (A, (3, 4, 7))),
    "matmul broadcast": (lambda a, b: a @ b, ((2, 1, 5, 7), A[:1] + (7, 2))),
    "matmul vectors": (lambda a, b: a @ b + b @ a, ((7,), (7,))),
    "softmax": (lambda a, b: a.softmax(-1) * a.softmax(1) + b[0].softmax(0), (A, B)),
    "cross_entropy": (
        lambda a: lib(a).cross_entropy(a, labels(a)) + lib(a).cross_entropy(a * 2, labels(a), reduction="sum"),
        (B,),
    ),
    "cross_entropy options": (
        lambda a: lib(a).cross_entropy(a, labels(a), label_smoothing=0.2)
        + lib(a).cross_entropy(a * 2, labels(a), reduction="none")
        + lib(a).cross_entropy(a, labels(a), reduction="none", label_smoothing=0.1) * 2,
        (B,),
    ),
    "cross_entropy weight": (
        lambda a: lib(a).cross_entropy(a, labels(a), numbers(a, WEIGHTS))
        + lib(a).cross_entropy(a * 2, labels(a), weight=numbers(a, WEIGHTS), reduction="none")
        + lib(a).cross_entropy(a, labels(a), weight=numbers(a, WEIGHTS), reduction="sum"),
        (B,),
    ),
    "rows": (lambda t: t[IDS if isinstance(t, Tensor) else torch.tensor(IDS).long()] * 2, (B,)),
    "a chain": (lambda a, b: ((a * b).tanh() * a + b).sigmoid() * (a + 1.5).exp(), (A, B)),
    "a long chain": (lambda a: long_chain(a), (B,)),
    "many operands": (lambda *x: sum_of_products(x), (B,) * 10),
    "causal_attention": (
        lambda q, k, v: F.causal_attention(q, k, v)
        if isinstance(q, Tensor)
        else torch.nn.functional.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in (q, k, v)), is_causal=True
        ).transpose(1, 2),
        ((2, 5, 3, 6),) * 3,
    ),
}  # fmt: skip


class _Torch:
    """torch's functions under our names."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.nn.functional, name, None) or getattr(torch, name)


def lib(x: Any) -> Any:
    return F if isinstance(x, Tensor) else _Torch()


def of(x: Any) -> Any:
    return wgrad if isinstance(x, Tensor) else torch


def labels(x: Any) -> Any:
    return LABELS.astype(np.int32) if isinstance(x, Tensor) else torch.tensor(LABELS)


def numbers(x: Any, values: Any) -> Any:
    return wgrad.tensor(np.asarray(values), device=x.device) if isinstance(x, Tensor) else torch.tensor(values)


def long_chain(a: Any) -> Any:
    for i in range(60):
        a = (a * 0.9 + 0.1 * i).sin() + a * 0.5
    return a


def sum_of_products(x: Any) -> Any:
    total = x[0]
    for i, y in enumerate(x[1:]):
        total = total * 0.5 + y * x[i]
    return total


def leaves(device: Device, arrays: list[np.ndarray], dtype: Any) -> list[Tensor]:
    return [Tensor(device.upload(a.astype(dtype)), device, requires_grad=True) for a in arrays]


def gradients(y: Tensor, given: list[Tensor], dy: np.ndarray) -> list[np.ndarray]:
    y.backward(y.device.upload(dy.astype(y.dtype)))
    assert all(x.grad is not None for x in given)
    return [y.numpy(), *(x.grad.numpy() for x in given if x.grad is not None)]


@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients_are_torchs(name: str) -> None:
    function, shapes = CASES[name]
    rng, device = np.random.default_rng(5), ReferenceDevice()
    arrays = [rng.standard_normal(shape) for shape in shapes]
    given, theirs = leaves(device, arrays, np.float64), [torch.tensor(a, requires_grad=True) for a in arrays]
    y, z = function(*given), function(*theirs)
    assert y.shape == tuple(z.shape)
    dy = rng.standard_normal(y.shape)
    z.backward(torch.tensor(dy))
    for ours, wanted in zip(gradients(y, given, dy), [z.detach(), *(x.grad for x in theirs)], strict=True):
        np.testing.assert_allclose(ours, wanted.numpy(), rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_central_differences(name: str) -> None:
    """The operator in the middle of a graph."""
    function, shapes = CASES[name]
    rng = np.random.default_rng(6)
    assert gradcheck(function, *(rng.standard_normal(s) for s in shapes), rng=rng, checks=4) < LIMIT


def test_every_function_of_tensors_has_a_case() -> None:
    functions = {name for name in F.__all__ if getattr(F, name).__module__ in TENSOR_MODULES}
    assert functions <= set(" ".join(CASES).split()) and len(functions) > 15


# Of what wgpu does beside `fused`, `gemm` and other operators, which the self-test has: views, places, chunks, limits.
ON_WGPU: tuple[str, ...] = (
    "pow",
    "where",
    "max",
    "slices",
    "split cat",
    "matmul transposed",
    "matmul broadcast",
    "cross_entropy",
)
ON_WGPU += ("many operands", "min", "clamp masked_fill", "picked", "gather", "tril triu", "leaky_relu elu pad")


@pytest.mark.parametrize("name", ON_WGPU)
def test_wgpu_is_the_reference(name: str, wgpu_device: Device) -> None:
    function, shapes = CASES[name]
    rng = np.random.default_rng(7)
    arrays = [rng.standard_normal(shape) for shape in shapes]
    found = []
    for device, dtype in ((ReferenceDevice(), np.float64), (wgpu_device, np.float32)):
        given = leaves(device, arrays, dtype)  # type: ignore[arg-type]
        y = function(*given)
        found.append(gradients(y, given, np.random.default_rng(8).standard_normal(y.shape)))
    for wanted, ours in zip(*found, strict=True):
        np.testing.assert_allclose(ours, wanted, rtol=3e-5, atol=2e-5 * np.abs(wanted).max())


def test_a_chain_is_one_launch_and_its_backward_one_for_each_operand(wgpu_device: Device) -> None:
    from wgrad.autograd.replay import Recorded

    a, b = leaves(wgpu_device, [np.ones((33, 5)), np.ones((33, 5))], np.float32)
    seed = wgpu_device.upload(np.ones((33, 5), np.float32))
    results = []

    def work() -> None:
        a.grad = b.grad = None
        y = ((a * b + 0.5).gelu() * a).tanh()
        results.append(y.data)
        y.backward(seed)

    recorded = Recorded(wgpu_device)
    recorded(work)
    recorded(work)
    assert recorded.dispatches == 3


def test_what_waits_is_computed_before_its_operands_change(device: Device) -> None:
    """A Tensor that was not read yet uses the parameters before the step, and the next replay does not overwrite a
    result that is kept."""
    w = Tensor(device.upload(np.ones(5, np.float32)), device, requires_grad=True)
    optimizer = wgrad.SGD([w], lr=1.0)
    twice = w * 2
    w.sum().backward()
    optimizer.step()
    assert twice.numpy().tolist() == [2.0] * 5 and w.numpy().tolist() == [0.0] * 5

    @wgrad.compile
    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, x.sum()

    made = [step(np.full(3, n, np.float32)) for n in range(5)]
    later = [(y + 1, total) for y, total in made]
    step(np.full(3, 9, np.float32))
    assert [y.numpy()[0] for y, _ in later] == [1, 3, 5, 7, 9] and [t.item() for _, t in made] == [0, 3, 6, 9, 12]


def test_a_step_that_failed_while_it_was_recorded_is_recorded_again(device: Device) -> None:
    total, fail = wgrad.zeros(1, device=device), [False, True, False, False, False]

    @wgrad.compile
    def step(x: Tensor) -> Tensor:
        device.add(total.data, x.data, out=total.data)
        if fail.pop(0):
            raise KeyError
        return x + 0

    for number in range(6):
        try:
            step(Tensor(device.upload(np.ones(1, np.float32)), device))
        except KeyError:
            assert number == 1
    assert total.item() == 6


def test_a_recorded_step_may_turn_an_axis(device: Device) -> None:
    turned = wgrad.compile(lambda x: x.flip(0) * 2 + x.roll(2, 0) + x.roll((1, -6), (0, 0)), device=device)
    for start in (0, 5, 7):
        x = np.arange(start, start + 3, dtype=np.float32)
        assert turned(x).tolist() == (x[::-1] * 2 + np.roll(x, 2) + np.roll(x, 1)).tolist()


@pytest.mark.parametrize("exact", [1 << 24, 2])
def test_float16_and_whole_numbers_turn_too(exact: int, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also along an axis longer than the numbers that the device counts exactly."""
    monkeypatch.setattr("wgrad.autograd.ops.picking.EXACT", exact)
    values = np.array([[1, 2049, 3], [65504, -5, 0.5]])
    for x in (values.astype(np.float16), values.astype(np.int32)):
        given = Tensor(device.upload(x), device)
        for made, wanted in ((given.flip(1), x[:, ::-1]), (given.roll(2, 1), np.roll(x, 2, 1))):
            assert made.dtype == x.dtype
            np.testing.assert_array_equal(made.numpy(), wanted)


def test_a_recorded_step_tells_plain_values_apart(cpu: ReferenceDevice) -> None:
    step = wgrad.compile(lambda x, f: 1.0 / (x * f) if isinstance(f, float) else x + 10 if f is True else x, device=cpu)
    given: list[Any] = [True, 1, 1.0, 0.0, -0.0]
    for _ in range(3):
        assert [step(wgrad.ones(1, device=cpu), f).item() for f in given] == [11, 1, 1, np.inf, -np.inf]


def test_a_cleared_gradient_still_reaches_its_optimizer(cpu: ReferenceDevice) -> None:
    w = wgrad.ones(3, requires_grad=True, device=cpu)
    optimizer = wgrad.SGD([w], lr=1.0)
    (w * 5).sum().backward()
    w.grad = None
    (w * 2).sum().backward()
    optimizer.step()
    assert w.numpy().tolist() == [-1.0] * 3


def test_operands_that_were_computed_meanwhile_may_be_too_many(device: Device) -> None:
    """Each operand is read along with its own inputs: more arrays than one launch can take."""
    x = leaves(device, [np.full(5, n) for n in range(1, 7)], np.float32)
    products = [a * b for a, b in zip(x[::2], x[1::2])]
    y = sum_of_products([*products, *x])
    assert [p.numpy()[0] for p in products] == [2, 12, 30]
    values = [np.full(5, v) for v in (2.0, 12, 30, 1, 2, 3, 4, 5, 6)]
    np.testing.assert_allclose(y.numpy(), sum_of_products(values))
    z = x[0] * x[1] * products[0] + x[2] * x[3] * products[1] + x[4] * x[5] * products[2]
    waiting = [a * b + 1 for a, b in zip(x[::2], x[1::2])]
    w = waiting[0] * x[0] * x[1] + waiting[1] * x[2] * x[3] + waiting[2] * x[4] * x[5]
    assert [p.numpy()[0] for p in waiting] == [3, 13, 31]
    assert w.numpy()[0] == 3 * 2 + 13 * 12 + 31 * 30 and z.numpy()[0] == 4 + 144 + 900


def test_gradients_at_zero_are_torchs(device: Device) -> None:
    """Formulas would divide 0 by 0: norms and deviations of zeros, and powers of 0."""
    zeros, exponents = np.zeros((2, 3), np.float32), np.array([0, 1, 2], np.float32)
    functions: list[Callable[[Any], Any]] = [
        lambda x: x.norm(), lambda x: x.norm(2, 1), lambda x: x.std(), lambda x: x.std(-1, keepdim=True),
        lambda x: x**0, lambda x: x**0.0, lambda x: x ** numbers(x, exponents), lambda x: x**1.5,
        lambda x: lib(x).elu(x, 0.5), lambda x: lib(x).cosine_similarity(x, numbers(x, np.ones((2, 3), np.float32))),
        lambda x: lib(x).cosine_similarity(numbers(x, np.ones((2, 3), np.float32)), x),
    ]  # fmt: skip
    for function in functions:
        ours, theirs = wgrad.tensor(zeros, requires_grad=True, device=device), torch.tensor(zeros, requires_grad=True)
        function(ours).sum().backward()
        function(theirs).sum().backward()
        assert ours.grad is not None and ours.grad.tolist() == theirs.grad.tolist()


def test_values_beyond_float32_are_torchs(device: Device) -> None:
    values = np.array([[-np.inf, -np.inf], [-np.inf, 1], [np.inf, 2]], np.float32)
    x, theirs = wgrad.tensor(values, device=device), torch.tensor(values)
    np.testing.assert_allclose(x.logsumexp(1).numpy(), theirs.logsumexp(1).numpy(), rtol=1e-6)
    assert (x[1:, 1] * 1e39).tolist() == [np.inf, np.inf] and (wgrad.zeros(2, device=device) ** -2).tolist() == [
        np.inf
    ] * 2


def test_squares_that_a_dtype_lacks_are_not_stored(device: Device) -> None:
    """float16 loses squares of values above 256, and float32 those of values below 1e-23."""
    values = np.linspace(-900, 700, 75, dtype=np.float16).reshape(3, 25)
    functions: list[Callable[[Any], Any]] = [
        lambda x: x.norm(dim=1), lambda x: x.std(1), lambda x: x.std(False), lambda x: x.log_softmax(1)[:, 3],
    ]  # fmt: skip
    for function in functions:
        ours, theirs = wgrad.tensor(values, requires_grad=True, device=device), torch.tensor(values, requires_grad=True)
        y, z = function(ours), function(theirs)
        assert y.dtype == np.float16
        np.testing.assert_allclose(y.numpy(), z.detach().numpy(), rtol=1e-3)
        y.sum().backward()
        z.sum().backward()
        assert ours.grad is not None
        np.testing.assert_allclose(ours.grad.numpy(), theirs.grad.numpy(), atol=2e-3)
    small = wgrad.tensor([1e-25], requires_grad=True, device=device)
    (1e-25 / small).sum().backward()
    assert small.grad is not None and small.grad.item() == pytest.approx(-1e25)
    five = wgrad.tensor([5.0], device=device)
    for weight in (1, wgrad.ones(1, device=device)):
        assert wgrad.tensor([1e30], device=device).lerp(five, weight).item() == 5
    assert wgrad.zeros(70_000, dtype=np.float16, device=device).logsumexp(0).item() == pytest.approx(11.16, abs=0.01)


def test_a_tensor_without_axes_does_not_widen_others(device: Device) -> None:
    def ours(dtype: str, *shape: int) -> Tensor:
        return wgrad.ones(*shape, dtype=dtype, device=device)

    for a, b in (("float16", "float32"), ("int32", "float16"), ("int32", "float32"), ("float32", "float16")):
        wanted = str((torch.ones(2, dtype=getattr(torch, a)) * torch.ones((), dtype=getattr(torch, b))).dtype)
        for made in (ours(a, 2) * ours(b), ours(b) + ours(a, 2), F.maximum(ours(a, 2), ours(b)), ours(a, 2) / ours(b)):
            assert f"torch.{made.dtype}" == wanted, (a, b)
    assert (ours("float16") * ours("float32")).dtype == np.float32
    one = ours("float32")
    assert one.sum(-1).shape == one.squeeze(0).shape == one.max(0).indices.shape == () and one.softmax(-1).item() == 1


def test_dtypes_that_meet_are_widened(device: Device) -> None:
    whole, half = wgrad.tensor([1, 2], device=device), wgrad.tensor([1e4, 0.5], dtype="float16", device=device)
    single = wgrad.tensor([1e6, 0.25], requires_grad=True, device=device)
    assert wgrad.cat([whole, single]).tolist() == [1, 2, 1e6, 0.25] and wgrad.cat([whole, whole > 1]).dtype == np.int32
    joined = wgrad.stack([half, single])
    assert joined.tolist() == [[1e4, 0.5], [1e6, 0.25]] and half.unsqueeze(0).matmul(single).item() == pytest.approx(
        1e10
    )
    (joined * 3).sum().backward()
    assert single.grad is not None and single.grad.dtype == np.float32 and single.grad.tolist() == [3, 3]
    assert isinstance(whole[1].item(), int) and isinstance(single[1].item(), float)


CHANGED: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {  # and whether the backward reads w
    "mul": (lambda w: w * w, True),
    "a chain": (lambda w: ((w + 1) * 2).sigmoid() * w.exp(), True),
    "matmul": (lambda w: w.reshape(1, 3) @ w, True),
    "an operator": (lambda w: F.rms_norm(w.reshape(1, 3), w, 1e-5), True),
    "softmax": (lambda w: F.cross_entropy(w.reshape(1, 3), np.array([1])), True),
    "largest": (lambda w: w.amax(), True),
    "linear": (lambda w: (w * 2 + 1 - w) / 3 + w.reshape(3)[:2].sum(), False),
    "its output, computed": (lambda w: computed(w.exp()), False),
    "a copy": (lambda w: w.clone() * w.clone(), False),
}


def computed(x: Tensor) -> Tensor:
    x.numpy()
    return x


@pytest.mark.parametrize("name", CHANGED)
def test_a_change_between_forward_and_backward_is_an_error(name: str, device: Device) -> None:
    function, reads = CHANGED[name]
    w = wgrad.tensor([1.0, 2.0, 3.0], requires_grad=True, device=device)
    loss = function(w).sum()
    loss.item()
    with wgrad.no_grad():
        w -= 0.5
    if reads:
        with pytest.raises(WgradError, match="needs were changed in place after the forward"):
            loss.backward()
    else:
        loss.backward()
        assert w.grad is not None
    again = function(w).sum()
    again.backward()


def test_powers_of_negative_numbers_are_numpys(device: Device) -> None:
    base, exponent = np.array([-2, -2, -1.5, 0, 0, 3, -2], np.float32), np.array([3, 2, -1, 0, 2, 0.5, 0.5], np.float32)
    found = (wgrad.tensor(base, device=device) ** exponent).numpy()
    np.testing.assert_allclose(found[:-1], base[:-1] ** exponent[:-1], rtol=1e-5)
    assert np.isnan(found[-1])


def test_tensors_are_made_as_in_torch(cpu: ReferenceDevice) -> None:
    assert wgrad.zeros((2, 3), device=cpu).shape == wgrad.randn(2, 3, device=cpu).shape == (2, 3)
    assert wgrad.ones(2, 3, device=cpu).sum().item() == 6 and wgrad.tensor(2.5, device=cpu).shape == ()
    x = wgrad.tensor([1.0, 2.0], requires_grad=True, device=cpu)
    (x * x).backward(gradient=wgrad.tensor([1.0, 10.0], device=cpu))
    assert x.grad is not None and x.grad.tolist() == [2.0, 40.0]
    wgrad.manual_seed(3)
    first = [wgrad.rand(3, 2, device=cpu), wgrad.randint(0, 9, (5,), device=cpu), wgrad.randn((2, 2), device=cpu)]
    wgrad.manual_seed(3)
    again = [wgrad.rand(3, 2, device=cpu), wgrad.randint(0, 9, (5,), device=cpu), wgrad.randn((2, 2), device=cpu)]
    assert all((a == b).all() for a, b in zip(first, again)) and first[1].dtype == wgrad.int32
    made = {
        "arange": ((2, 7, 2), {}), "linspace": ((0, 1, 5), {}), "eye": ((3,), {}), "full": (((2, 3), 1.5), {}),
        "tensor": (([[1.5, 2]],), {"dtype": "float16"}),
    }  # fmt: skip
    for name, (args, options) in made.items():
        theirs = {k: getattr(torch, v) for k, v in options.items()}
        ours = getattr(wgrad, name)(*args, **options, device=cpu)
        wanted = getattr(torch, name)(*args, **theirs).numpy()
        np.testing.assert_allclose(ours.numpy(), wanted, atol=1e-7)
        assert ours.size(-1) == wanted.shape[-1] and ours.size() == wanted.shape and ours.numel() == wanted.size
    assert wgrad.zeros_like(x).tolist() == [0, 0] and wgrad.ones_like(x.half()).dtype == wgrad.float16
    assert f"{(x * 2).sum():.2f}" == "6.00" and float(x.sum()) == 3 and "[1., 2.], float32 on cpu" in str(x)
    assert np.asarray(x).tolist() == [1, 2] and x.is_leaf and not (x * 2).is_leaf


def test_places_of_extremes_are_torchs(device: Device) -> None:
    values = np.random.default_rng(2).integers(0, 4, (3, 5, 7))
    x, theirs = wgrad.tensor(values.astype(np.float32), device=device), torch.tensor(values)
    for dim in (0, 1, -1):
        assert x.argmax(dim).numpy().tolist() == values.argmax(dim).tolist(), "the first of equal ones"
        assert x.argmin(dim, keepdim=True).numpy().tolist() == values.argmin(dim, keepdims=True).tolist()
        assert x.max(dim).indices.dtype == np.int32 and (x.max(dim)[0] == x.amax(dim)).all()
        assert x.min(dim, keepdim=True).values.numpy().tolist() == theirs.min(dim, keepdim=True).values.tolist()
    assert x.argmax().item() == values.argmax() and x.flatten()[int(x.argmax())].item() == values.max()
    assert x.any() and not (x > 9).any() and (x < 4).all(1).all() and not (x < 3).all()
    assert (x > 0).any(dim=-1).numpy().tolist() == (values > 0).any(-1).astype(int).tolist()


def test_parameters_are_changed_in_place_outside_of_the_tape(device: Device) -> None:
    """Gradient descent as PyTorch's tutorials write it, and constants that keep their name alone."""
    w = wgrad.tensor([1.0, 2.0, 3.0], requires_grad=True, device=device)
    same, waiting = w, w * 10
    (w * w).sum().backward()
    grad = w.grad
    assert grad is not None
    with wgrad.no_grad():
        w -= 0.25 * grad
        w *= 4
    assert same is w and w.requires_grad and w.tolist() == [2, 4, 6] and waiting.tolist() == [10, 20, 30]
    assert w.grad is not None
    w.grad.zero_()
    assert w.grad.tolist() == [0, 0, 0]
    assert w.detach().copy_(w.detach()[1:2]).tolist() == [4, 4, 4] and w.tolist() == [4, 4, 4]
    total = other = wgrad.zeros(2, device=device)
    total += 1
    assert total.tolist() == [1, 1] and other.tolist() == [0, 0]
    with pytest.raises(WgradError, match="copy_: the Tensor is a result on the tape"):
        (w * 2).fill_(1)
    other = copy.deepcopy(w)
    assert other.device is device and other.requires_grad and other.fill_(1).tolist() == [1, 1, 1] != w.tolist()
    other.data = w.detach() + 1
    assert (other * 1).tolist() == [5, 5, 5]
    wgrad.SGD([other])
    with pytest.raises(WgradError, match="an optimizer holds this parameter; use copy_"):
        other.data = w.detach() + 2
    with pytest.raises(WgradError, match=r"grad: must be None or a Tensor of shape \[3\], got \[2\]"):
        w.grad = wgrad.zeros(2, device=device)
    with pytest.raises(WgradError, match="grad: must be None or a Tensor of .*, got ndarray"):
        w.grad = np.zeros(3)  # type: ignore[assignment]
    (w * 2).backward(wgrad.tensor([1, 2, 3], device=device))
    assert w.requires_grad_(False) is w and not (w * 2).requires_grad


def test_a_gradient_comes_back_from_another_device(wgpu_device: Device, cpu: ReferenceDevice) -> None:
    x = wgrad.tensor([1.0, 2.0], requires_grad=True, device=cpu)
    there = x.to(wgpu_device)
    assert there.device is wgpu_device and there.to(wgpu_device) is there
    (there * there).to(cpu).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [2.0, 4.0]


def test_dropout_draws_its_seeds(cpu: ReferenceDevice) -> None:
    x = wgrad.ones(500, requires_grad=True, device=cpu)
    wgrad.manual_seed(1)
    first, second = F.dropout(x, 0.25), F.dropout(x, 0.25)
    wgrad.manual_seed(1)
    assert (F.dropout(x, 0.25) == first).all() and not (first == second).all()
    assert abs((first == 0).mean().item() - 0.25) < 0.06


MISSING: dict[str, tuple[Callable[[], Any], str]] = {
    "in place": (lambda: t(3).add_(1), r"not changed in place; use x = x.add\(...\)"),
    "gpu": (lambda: t(3).cuda(), r'use x.to\("wgpu"\)'),
    "host": (lambda: t(3).sort(), "NumPy's sort"),
    "typo": (lambda: t(3).sofmax(), "did you mean softmax"),
    "modules": (lambda: wgrad.nn, "a model is a function of its parameters"),
    "function": (lambda: wgrad.expm1, r"use wgrad.functional.expm1$"),
    "method": (lambda: wgrad.item, r"a method of Tensors: x.item\(\)"),
    "method that is missing": (lambda: wgrad.cumsum, r"use x @ wgrad.ones\(n, n\).triu"),
    "functional": (lambda: F.masked_fill, r"a method of Tensors: x.masked_fill\(\)"),
}


@pytest.mark.parametrize("name", MISSING)
def test_a_missing_name_of_torch_says_what_to_use(name: str) -> None:
    call, message = MISSING[name]
    with pytest.raises(AttributeError, match=message):
        call()


def test_what_is_named_instead_of_torchs_is_there() -> None:
    from wgrad.autograd import torch_names

    for known, has in ((torch_names._METHODS, Tensor), (torch_names._FUNCTIONAL, F), (torch_names._MODULE, wgrad)):
        assert not [name for name in known if hasattr(has, name)]
        for text in known.values():
            for name in re.findall(r"wgrad\.(\w+)", text):
                assert hasattr(wgrad, name) or name == "functional"


def test_whole_numbers_stay_whole(device: Device) -> None:
    ids = wgrad.tensor([0, 2, 1], device=device)
    table = wgrad.tensor([[1.0], [2.0], [3.0], [4.0]], device=device)
    assert table[ids + 1].numpy().tolist() == [[2.0], [4.0], [3.0]]
    assert (ids * 0.5).dtype == np.float32 and (ids / 1).dtype == np.float32
    assert (ids - 2).numpy().tolist() == [-2, 0, -1] and ((ids > 0) * 1).sum().item() == 2
    assert ((ids == 1) * 1.0).mean().item() == pytest.approx(1 / 3)
    assert ids[ids].dtype == np.int32 and ids[ids].numpy().tolist() == [0, 1, 2]
    assert (ids > 0)[[2, 0]].numpy().tolist() == [1, 0]
    powers = (ids - 2) ** 3
    assert (
        powers.dtype == (ids**0).dtype == np.int32 and powers.tolist() == [-8, 0, -1] and (ids**0).tolist() == [1] * 3
    )
    assert (ids**2.0).dtype == np.float32 and (ids**12).tolist() == [0, 4096, 1]
    counted = (ids > 0).sum(0, keepdim=True)
    assert (counted.numpy() - 5).tolist() == [-3] and counted.dtype == np.int32
    assert (ids - 1).to(bool).tolist() == (ids - 1).type_as(ids > 0).tolist() == [1, 1, 0]
    assert (ids * 0.6).to(np.int64).dtype == np.int32
    host: Any = np.arange(3)
    assert (host + ids).numpy().tolist() == [0, 3, 3]


@pytest.mark.parametrize("kind", ["SGD", "momentum", "AdamW"])
def test_optimizers_are_torchs(kind: str, device: Device) -> None:
    rng = np.random.default_rng(3)
    arrays = [rng.standard_normal(s).astype(np.float32) for s in ((5, 7), (7,))]
    ours, theirs = leaves(device, arrays, np.float32), [torch.tensor(a, requires_grad=True) for a in arrays]
    options: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.1, **({"momentum": 0.8} if kind == "momentum" else {})}
    name = "AdamW" if kind == "AdamW" else "SGD"
    mine, other = getattr(wgrad, name)(ours, **options), getattr(torch.optim, name)(theirs, **options)
    x = rng.standard_normal((3, 5)).astype(np.float32)
    for number in range(4):
        if number == 2:
            mine.lr = other.param_groups[0]["lr"] = 0.02
        mine.zero_grad()
        other.zero_grad()
        ((x @ ours[0] + ours[1]) ** 2).mean().backward()
        ((torch.tensor(x) @ theirs[0] + theirs[1]) ** 2).mean().backward()
        mine.step()
        other.step()
    for a, b in zip(ours, theirs):
        np.testing.assert_allclose(a.numpy(), b.detach().numpy(), atol=2e-6)


@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_an_optimizer_leaves_out_parameters_without_a_gradient(name: str, device: Device) -> None:
    """Each has its own number of steps, which is AdamW's bias correction."""
    arrays = [np.random.default_rng(n).standard_normal(3).astype(np.float32) for n in range(4)]
    ours, theirs = leaves(device, arrays, np.float32), [torch.tensor(a, requires_grad=True) for a in arrays]
    options: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.3, **({"momentum": 0.8} if name == "SGD" else {})}
    mine, other = getattr(wgrad, name)(ours, **options), getattr(torch.optim, name)(theirs, **options)
    mine.step()
    for used in ((0, 1, 3), (0, 3), (1, 2), (), (0, 1, 2, 3), (2,)):
        for given, optimizer in ((ours, mine), (theirs, other)):
            for p in (given[n] for n in used):
                (p * p).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    for a, b in zip(ours, theirs):
        np.testing.assert_allclose(a.numpy(), b.detach().numpy(), atol=1e-6)
    before = [p.numpy() for p in ours]
    (ours[0] * 2).sum().backward()
    mine.zero_grad(set_to_none=False)
    mine.step()
    assert (ours[3].numpy() == before[3]).all() and (ours[0].numpy() != before[0]).all(), "weight decay of ours[0]"
    scalar = Tensor(device.upload(np.full((), 2, np.float32)), device, requires_grad=True)
    optimizer = getattr(wgrad, name)([scalar], lr=0.5)
    scalar.backward()
    optimizer.step()
    assert scalar.item() < 1.6


@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_a_gradient_that_is_set_is_received(name: str, cpu: ReferenceDevice) -> None:
    """Before the optimizer is made, or after; None takes it away."""
    w = leaves(cpu, [np.full(3, 2.0), np.full(5, 2.0)], np.float32)
    w[0].grad = wgrad.ones(3, device=cpu)
    optimizer = getattr(wgrad, name)(w, lr=0.1, weight_decay=0.5)

    def moved() -> list[bool]:
        before = [p.tolist()[0] for p in w]
        optimizer.step()
        return [p.tolist()[0] < old for p, old in zip(w, before)]

    assert moved() == [True, False]
    w[0].grad, w[1].grad = None, wgrad.ones(5, device=cpu)
    assert moved() == [False, True]
    w[1].grad = None
    assert moved() == [False, False]


def test_neighbors_are_updated_together(cpu: ReferenceDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """By one launch for all parameters, or two where one between them has no gradient."""
    w = [wgrad.ones(3, requires_grad=True, device=cpu) for _ in range(5)]
    optimizer, adamw, sizes = wgrad.AdamW(w), cpu.adamw, list[int]()

    def updated(p: Any, *others: Any, **options: Any) -> None:
        sizes.append(p.size)
        adamw(p, *others, **options)

    monkeypatch.setattr(cpu, "adamw", updated)
    for used in (w, [w[0], w[1], w[3], w[4]]):
        optimizer.zero_grad()
        for p in used:
            p.sum().backward()
        optimizer.step()
    assert sizes == [5 * 64, 2 * 64, 2 * 64]


def test_values_are_read_after_a_function_that_is_replayed_not_in_it(cpu: ReferenceDevice) -> None:
    x = wgrad.ones(2, device=cpu)
    with without_reading("loss"):
        assert str(x) == repr(x)
        with pytest.raises(WgradError, match="^loss: reads values"):
            x.sum().item()
    assert x.sum().item() == 2 and str(x) != repr(x)


@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_a_recorded_step_may_leave_out_a_parameter(name: str, device: Device) -> None:
    found = []
    for wrap in (lambda step: step, wgrad.compile):
        w = leaves(device, [np.full(3, 2.0), np.full(5, 2.0), np.full(3, -1.0)], np.float32)
        optimizer = getattr(wgrad, name)(w, lr=0.1, weight_decay=0.5)

        def step(x: Tensor, w: Any = w, optimizer: Any = optimizer) -> None:
            optimizer.zero_grad()
            (w[0] * x + w[2] * w[2]).sum().backward()
            optimizer.step()

        run = wrap(step)
        for number in range(4):
            run(Tensor(device.upload(np.full(3, number + 1, np.float32)), device))
        found.append([p.tolist() for p in w])
    assert found[0] == found[1] and found[0][1] == [2.0] * 5 and found[0][0][0] < 2 and found[0][2][0] > -1


def test_a_recorded_step_that_leaves_out_other_parameters_is_an_error(cpu: ReferenceDevice) -> None:
    w = [wgrad.ones(3, requires_grad=True, device=cpu) for _ in range(2)]
    optimizer, used = wgrad.AdamW(w), iter([w, w[:1]])

    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        for p in next(used):
            (p * x).sum().backward()
        optimizer.step()

    compiled = wgrad.compile(step)
    compiled(wgrad.ones(3, device=cpu))
    with pytest.raises(WgradError, match="compile: step leaves out a parameter that was updated before"):
        compiled(wgrad.ones(3, device=cpu))


def example(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_recorded_mlp_is_torchs(device: Device) -> None:
    """The step of examples/mlp.py is replayed from its third call on."""
    rng = np.random.default_rng(1)
    arrays = [rng.standard_normal(s).astype(np.float32) * 0.5 for s in ((2, 9), (9,), (9, 3), (3,))]
    ours, theirs = leaves(device, arrays, np.float32), [torch.tensor(a, requires_grad=True) for a in arrays]
    mine, other = wgrad.AdamW(ours, lr=0.02), torch.optim.AdamW(theirs, lr=0.02)

    def loss_of(x: Any, p: Any) -> Any:
        return (x @ p[0] + p[1]).relu() @ p[2] + p[3]

    @wgrad.compile
    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(loss_of(x, ours), y)
        mine.zero_grad()
        loss.backward()
        mine.step()
        return loss

    for _ in range(6):
        x, y = rng.standard_normal((13, 2)).astype(np.float32), rng.integers(0, 3, 13).astype(np.int32)
        loss = torch.nn.functional.cross_entropy(loss_of(torch.tensor(x), theirs), torch.tensor(y).long())
        other.zero_grad()
        loss.backward()
        other.step()
        found = step(Tensor(device.upload(x), device), Tensor(device.upload(y), device))
        assert abs(found.item() - loss.item()) < 1e-5
    assert step.launches > 0
    for a, b in zip(ours, theirs):
        np.testing.assert_allclose(a.numpy(), b.detach().numpy(), atol=1e-5)


@pytest.fixture
def registered() -> Iterator[Callable[..., Any]]:
    names: list[str] = []

    def register(name: str, **given: Any) -> Any:
        made = register_operator(name, **given)
        names.append(name)
        return made

    yield register
    for name in names:
        unregister_operator(name)


def hinge(registered: Callable[..., Any], **change: Any) -> Any:
    given: dict[str, Any] = {
        "wgsl": "max(x, 0.0) * max(x, 0.0) * sharp(scale)",
        "helper": "fn sharp(z: f32) -> f32 { return 1.0 + z * z; }",
        "reference": lambda x, scale: np.maximum(x, 0) ** 2 * (1 + scale * scale),
        "backward": lambda dy, x, scale: (
            dy * 2 * x.relu() * (1 + scale * scale),
            dy * x.relu() ** 2 * 2 * scale,
        ),
    }
    return registered("squared_hinge", **{**given, **change})


def test_an_operator_from_outside_is_checked_and_fuses(device: Device, registered: Callable[..., Any]) -> None:
    operator = hinge(registered)
    assert operator.check(device) < 1e-3
    x, s = leaves(device, [np.linspace(-1, 2, 15).reshape(3, 5), np.full((5,), 0.5)], np.float32)
    y = (operator(x, s) * 2).sum()
    y.backward()
    wanted = np.maximum(x.numpy(), 0)
    assert abs(y.item() - (2 * wanted**2 * 1.25).sum()) < 1e-4
    assert x.grad is not None and s.grad is not None
    np.testing.assert_allclose(x.grad.numpy(), 4 * wanted * 1.25, rtol=1e-5)
    np.testing.assert_allclose(s.grad.numpy(), (2 * wanted**2).sum(0), rtol=1e-5)


def test_an_expression_may_have_literals_and_names_of_its_helper(device: Device) -> None:
    given: dict[str, Any] = {
        "wgsl": "select(0.0, scaled(x, HALF), f32(x > 0.0) > 0.5 || false)",
        "helper": "fn scaled(z: f32, by: f32) -> f32 { return z * by; }\nconst HALF = 0.5; // twice",
        "reference": lambda x: np.where(x > 0, x * x.dtype.type(0.5), 0 * x),
        "backward": lambda dy, x: dy * (x > 0) * 0.5,
    }  # fmt: skip
    made = register_operator("half_of_positive", **given)
    try:
        assert made(Tensor(device.upload(np.array([-1, 3], np.float32)), device)).tolist() == [0, 1.5]
    finally:
        unregister_operator("half_of_positive")


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "wgsl": ({"wgsl": "max(x, 0.0) * sharp(scale)"}, "its WGSL is off by .* from the reference in float32 on wgpu"),
    "backward": (
        {"backward": lambda dy, x, scale: (dy * x.relu(), dy * x.relu() ** 2 * 2 * scale)},
        "its backward differs from central differences by",
    ),
    "gradients": ({"backward": lambda dy, x, scale: dy}, "backward must return 2 gradients, got 1"),
    "shape": ({"backward": lambda dy, x, scale: (dy, dy.sum(0))}, r"must have the shape of dy \[7, 41\], got \[41\]"),
    "unknown": ({"wgsl": "x * scale * rate"}, r"has rate, which is no parameter of reference \(x, scale\)"),
    "a whole number": ({"wgsl": "i32(x * scale)"}, "does not run on wgpu: Shader validation error: Function"),
    "no backward": ({"backward": None}, "backward must be a function, got NoneType"),
    "no text": ({"wgsl": 3}, "register_operator: wgsl must be text, got int"),
    "not finite": (
        {"reference": lambda x, scale: np.sqrt(x) * scale},
        "the reference is nan for -3; give a domain in which it is finite",
    ),
    "no Tensor": ({"backward": lambda dy, x, scale: (dy.numpy(), dy)}, "must be a Tensor or None, got ndarray"),
    "syntax": ({"wgsl": "max(x, 0.0) ** scale"}, "^squared_hinge: its WGSL does not run on wgpu: parsing error"),
    "argument": ({"wgsl": "max(x, 0.0)"}, "the expression 'max.x, 0.0.' does not use scale"),
    "reference": ({"reference": lambda x, scale: x.nothing}, "the reference fails: "),
    "dtype": ({"reference": lambda x, scale: (x * scale).astype(np.float16)}, "must keep shape and dtype"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_operator_is_found(name: str, wgpu_device: Device, registered: Callable[..., Any]) -> None:
    change, message = WRONG[name]
    with pytest.raises(WgradError, match=message):
        hinge(registered, **change).check(wgpu_device)


def test_a_name_is_given_once(registered: Callable[..., Any]) -> None:
    hinge(registered)
    with pytest.raises(WgradError, match="an operator is already called squared_hinge; take another name"):
        hinge(registered)


def test_the_small_gpt_is_torchs(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loss and parameters agree after steps of AdamW, of which the last are replayed. Sizes divide nothing."""
    monkeypatch.syspath_prepend(str(EXAMPLES.parent / "bench"))
    torch_loss = importlib.import_module("bench_autograd").torch_gpt_loss
    monkeypatch.setattr("wgrad.autograd.creation._devices", {"here": device})
    monkeypatch.setattr("wgrad.autograd.creation._default", ["here"])
    model = example("tiny_gpt").TinyGPT(11, layers=1, width=18, heads=3, context=7)
    theirs = {name: torch.tensor(x.numpy(), requires_grad=True) for name, x in model.p.items()}
    mine, other = wgrad.AdamW(model.p.values(), lr=0.01), torch.optim.AdamW(theirs.values(), lr=0.01)

    @wgrad.compile
    def step(ids: Tensor, targets: Tensor) -> Tensor:
        loss = model.loss(ids, targets)
        mine.zero_grad()
        loss.backward()
        mine.step()
        return loss  # type: ignore[no-any-return]

    for seed in range(4):
        ids = np.random.default_rng(seed).integers(0, 11, (3, 8)).astype(np.int32)
        ours = step(ids[:, :-1], ids[:, 1:]).item()
        loss = torch_loss(theirs, *(torch.tensor(a.copy()).long() for a in (ids[:, :-1], ids[:, 1:])), torch, 1, 3)
        other.zero_grad()
        loss.backward()
        other.step()
        assert abs(ours - loss.item()) < 1e-5
    for name, x in model.p.items():
        np.testing.assert_allclose(x.numpy(), theirs[name].detach().numpy(), atol=1e-5)


def test_the_mlp_in_15_lines_is_torchs(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tutorial's first program as it is, for fewer steps, and with torch under the same names."""
    monkeypatch.setattr("wgrad.autograd.creation._devices", {"here": device})
    monkeypatch.setattr("wgrad.autograd.creation._default", ["here"])
    page = (EXAMPLES.parent / "docs/tutorials/autograd.md").read_text(encoding="utf-8")
    program = page.split("```python\n")[1].split("```")[0]
    assert 10 < len([line for line in program.splitlines() if line]) <= 15
    short = program.replace("range(200)", "range(20)")
    imports = "import wgrad\nfrom wgrad import functional as F\n"
    assert short != program and imports in short

    def as_torch(x: np.ndarray) -> Any:
        return torch.tensor(x.astype(np.int64) if x.dtype == np.int32 else x)

    def randn(*shape: int, requires_grad: bool, scale: float = 1.0) -> Any:
        return as_torch(wgrad.randn(*shape, scale=scale, device="cpu").numpy()).requires_grad_(requires_grad)

    names = {"tensor": as_torch, "randn": randn, "zeros": torch.zeros, "AdamW": torch.optim.AdamW}
    ours: dict[str, Any] = {}
    theirs: dict[str, Any] = {"wgrad": SimpleNamespace(**names), "F": torch.nn.functional}
    for text, space in ((short, ours), (short.replace(imports, ""), theirs)):
        wgrad.manual_seed(3)
        exec(text, space)
    assert abs(ours["loss"].item() - theirs["loss"].item()) < 1e-5
    for name in ("w1", "b1", "w2", "b2"):
        np.testing.assert_allclose(ours[name].numpy(), theirs[name].detach().numpy(), atol=1e-5)


def test_the_examples_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("wgrad.autograd.creation._default", ["cpu"])
    assert example("mlp").main("cpu", steps=20) < 0.69
    assert example("tiny_gpt").main("cpu", steps=2, batch=1, letters=3) < 5
    assert "step 1: loss" in capsys.readouterr().out


def test_files_are_those_of_torch(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    x = wgrad.tensor([[1.5, 2.0]], device="cpu")
    wgrad.save_tensors({"x": x, "n": wgrad.tensor([3], device="cpu")}, tmp_path / "a.safetensors")
    assert torch.equal(load_file(tmp_path / "a.safetensors")["x"], torch.tensor([[1.5, 2.0]]))
    found = wgrad.load_tensors(tmp_path / "a.safetensors", device="cpu", requires_grad=True)
    assert found["x"].numpy().tolist() == [[1.5, 2.0]] and found["n"].dtype == np.int32 and found["x"].requires_grad
    with pytest.raises(WgradError, match="there is no file"):
        wgrad.load_tensors(tmp_path / "b", device="cpu")


def t(*shape: int) -> Tensor:
    return wgrad.zeros(*shape, requires_grad=True, device="cpu")


def _reads_inside() -> None:
    step = wgrad.compile(lambda x: x * (x.sum().item() + 1))
    for _ in range(2):
        step(wgrad.zeros(3, device="cpu"))


BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "broadcast": (lambda: t(3, 4) + t(4, 3), r"add: shapes \[3, 4\], \[4, 3\] cannot be broadcast"),
    "matmul": (
        lambda: t(3, 4) @ t(3, 4),
        r"matmul: the last axis of \[3, 4\] must be as long as the second-to-last axis of \[3, 4\]",
    ),
    "dim": (lambda: t(3, 4).sum(2), r"sum: dim must be an axis of 2, from -2 to 1, got 2"),
    "index": (lambda: t(3, 4)[3], r"an index must be from -3 to 2 for an axis of 3, got 3"),
    "length": (lambda: len(t()), r"a Tensor without axes has no length; use item\(\)"),
    "slice": (lambda: t(3, 4)[2:1], r"a slice must not be empty, got 2:1: of an axis of 3"),
    "backward slice": (lambda: t(3, 4)[::-1], r"a slice must have a positive step \(flip reverses an axis\), got ::-1"),
    "mask": (lambda: t(3)[t(3) > 0], r"an index must be int32, got a mask .* wgrad.where\(mask, x, 0\)"),
    "places": (lambda: t(3)[[0, 3]], r"an index must be from -3 to 2 for an axis of 3, got 0 to 3"),
    "truth": (lambda: bool(t(3) == t(3)), r"neither true nor false; use any\(\) or all\(\)"),
    "ands": (lambda: t(3) & t(3), r"& \| and ~ are for comparisons, got a Tensor of float32"),
    "equation": (lambda: F.einsum("ij,jk", t(3, 4), t(3, 4)), r"einsum: .*'ij,jk' does not fit .*: 'j' is 4 and 3"),
    "assignment": (lambda: t(3).__setitem__(0, 1.0), r"cannot be assigned to; .*wgrad.where"),
    "in place": (lambda: t(3).__iadd__(1), r"a parameter cannot be changed by \+= while gradients are recorded"),
    "walked once": (lambda: t(3).sum().backward(retain_graph=True), r"retain_graph must be False"),
    "a shape": (
        lambda: F.layer_norm(t(3, 4), (4,), t(4)),
        r"layer_norm: weight must be a Tensor, got .* \(4,\)",
    ),
    "a shape in a list": (lambda: F.rms_norm(t(3, 4), [4]), r"rms_norm: weight must be .* \[4\]; .* takes wgrad.ones"),
    "no first argument": (lambda: wgrad.tanh(0.5), r"tanh: the first argument must be a Tensor, got float"),
    "no channels": (lambda: F.conv2d(t(1, 3, 5, 5), t(4, 2, 3, 3)), r"conv2d: x must be .* there are no groups"),
    "large kernel": (
        lambda: F.max_pool2d(t(1, 3, 5, 4), 5),
        r"max_pool2d: .* within the image of \[5, 4\], got \[5, 5\]",
    ),
    "no beta": (lambda: F.smooth_l1_loss(t(3), t(3), beta=0), r"smooth_l1_loss: beta must be positive, got 0"),
    "no delta": (lambda: F.huber_loss(t(3), t(3), delta=0), r"huber_loss: delta must be positive, got 0"),
    "table": (lambda: F.embedding(wgrad.tensor([0], device="cpu"), t(3, 4)), r"embedding: table must be the first arg"),
    "gelu": (lambda: F.gelu(t(3), approximate="erf"), r'gelu: approximate must be "tanh" or "none"'),
    "var": (lambda: t(1).var(), r"var: there must be more than 1 elements, got 1"),
    "expand": (lambda: t(3, 4).expand(3, 5), r"expand: "),
    "no axes": (lambda: t().sum(1), r"sum: dim 1 is given, but the Tensor has no axes; reshape it to \[1\]"),
    "class weights": (
        lambda: F.cross_entropy(t(2, 4), [0, 1], np.ones(3)),
        r"cross_entropy: weight must be \[C\], here \[4\], .* got \[3\]",
    ),
    "classes in axis 1": (
        lambda: F.cross_entropy(t(2, 4, 3), np.zeros((2, 3), int)),
        r"behind logits.movedim\(1, -1\) if axis 1 has the classes",
    ),
    "cat": (lambda: F.cat([t(3, 4), t(3, 5)]), r"cat: shapes must agree but for axis 0, got \[3, 4\] and \[3, 5\]"),
    "targets": (lambda: F.cross_entropy(t(3, 4), np.zeros(4, int)), r"cross_entropy: logits must be \[N, C\]"),
    "operand": (lambda: t(3) + "x", r"add: an operand must be a Tensor, an array or a number, got str"),
    "item": (lambda: t(3).item(), r"item: "),
    "empty": (lambda: wgrad.tensor([], device="cpu"), r"tensor: an array must not be empty"),
    "optimizer": (lambda: wgrad.SGD([t(3) * 2]), r"parameter 0 of an optimizer is no leaf"),
    "shape of any size": (lambda: wgrad.zeros((-(10**5000),)), r"shape must have positive whole numbers, got a list"),
    "axis of any size": (lambda: t(3).sum(10**5000), r"sum: dim must be an axis of 1, .* got a number of 16610 bits"),
    "index of any size": (lambda: t(3)[10**5000], r"an index must be from -3 to 2 .* got a number of 16610 bits"),
    "shape": (lambda: t(3, 0), r"shape must have positive whole numbers, got .3, 0."),
    "twice": (lambda: (lambda p: wgrad.SGD([p, p]))(t(3)), r"parameter 1 of an optimizer is there twice"),
    "an argument that learns": (
        lambda: wgrad.compile(lambda x: x)(t(3)),
        r"compile: argument 0 of <lambda> requires a g",
    ),
    "an argument": (
        lambda: wgrad.compile(lambda x: x)({}),
        r"compile: argument 0 of <lambda> must be a Tensor, .* dict",
    ),
    "compiled": (_reads_inside, r"compile: <lambda> reads values, which a recorded step cannot repeat"),
    "narrow": (lambda: t(3, 4).narrow(1, 2, 3), r"narrow: start and start \+ length must lie within .* 2 and length 3"),
    "repeats": (lambda: t(3).repeat_interleave(0), r"repeat_interleave: repeats must be positive, got 0"),
    "no classes": (lambda: F.one_hot(t(3), 0), r"one_hot: num_classes must be positive, got 0"),
    "an axis": (lambda: t(3, 4).select(2, 0), r"select: dim must be an axis of 2, from -2 to 1, got 2"),
    "another axis": (lambda: t(3, 4).repeat_interleave(2, 2), r"repeat_interleave: dim must be an axis of 2"),
    "an axis of parts": (lambda: t(3, 4).unflatten(2, (2, 2)), r"unflatten: dim must be an axis of 2"),
    "a moved axis": (lambda: t(3, 4).movedim(3, 0), r"movedim: dim must be an axis of 2"),
    "an axis twice": (lambda: t(3, 4).sum((1, -1)), r"sum: dim must name an axis once, got \[1, -1\]"),
    "turned twice": (lambda: t(3, 4).flip(0, 0), r"flip: dims must name an axis once"),
    "true": (lambda: t(3)[True], r"an index must be a whole number, a slice, .* got True"),
    "a fraction": (lambda: t(3)[1.0], r"an index must be a whole number, a slice, .* got 1.0"),
    "a matrix": (lambda: t(3, 4).outer(t(3)), r"outer: operands must have 1 axes, got shape \[3, 4\]"),
    "whole numbers": (lambda: wgrad.zeros(3, dtype="int32", requires_grad=True), r"must be of floats to have a grad"),
    "64 bits": (
        lambda: wgrad.tensor([1 << 40], device="cpu"),
        r"tensor: numbers must be from -2147483648 to 2147483647",
    ),
    "64 bits of zeros": (lambda: wgrad.zeros(3, dtype="int64", device="cpu"), r"zeros: numbers must be .* got int64"),
    "64 bits of ones": (lambda: wgrad.ones(3, dtype="int64", device="cpu"), r"full: numbers must be .* got int64"),
    "no step": (lambda: wgrad.arange(0, 5, 0, device="cpu"), r"arange: step must not be 0"),
    "no points": (lambda: wgrad.linspace(0, 1, -1, device="cpu"), r"shape must have positive whole numbers, got .-1."),
    "no rows": (lambda: wgrad.eye(-1, device="cpu"), r"shape must have positive whole numbers, got .-1, -1."),
    "no choice": (lambda: wgrad.randint(5, 5, 3, device="cpu"), r"randint: low must be below high, .* got 5 and 5"),
    "beyond int32": (lambda: wgrad.randint(0, 1 << 32, 3, device="cpu"), r"randint: .* both within int32"),
    "below 0": (lambda: wgrad.full((2,), -1, dtype="uint32", device="cpu"), r"full: numbers must be from 0 to"),
    "a label": (lambda: F.cross_entropy(t(2, 4), [4, 0]), r"cross_entropy: targets must be from 0 to 3, .* got 4"),
    "a place": (lambda: t(2, 4).gather(1, [[-1], [0]]), r"gather: index must be from 0 to 3, got -1 to 0"),
    "a row": (lambda: t(3, 4)[wgrad.tensor([-1], device="cpu")].numpy(), r"ids must be from 0 to 2, .* got -1 to -1"),
    "a row beyond": (lambda: t(3, 4)[wgrad.tensor([3], device="cpu")].numpy(), r"ids must be .* 0 to 2, .* 3 to 3"),
    "a seed": (lambda: (t(2) * 2).backward([1.0, 1.0]), r"backward: gradient must be a Tensor, got list"),
    "a number": (lambda: (t(2) * 2).sum().backward(2.0), r"backward: gradient must be a Tensor, got float"),
    "pickled": (lambda: pickle.dumps(t(2)), r"cannot be pickled; use wgrad.save_tensors"),
    "devices": (lambda: t(3) + Tensor(np.ones(3), ReferenceDevice()), r"add: operands must be on one device"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_wrong_argument_is_explained(name: str) -> None:
    call, message = BAD[name]
    with pytest.raises((ShapeError, WgradError), match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_threads_compute_what_waits_once() -> None:
    """One thread computes all pending Tensors while others read them and add more."""
    device: Any = ReferenceDevice()
    found, calls = list[Any](), list[int]()
    waits = Tensor(device.upload(np.arange(6, dtype=np.float32).reshape(2, 3)), device) * 2.0 + 1.0
    plain = device.fused

    def fused(*given: Any, **options: Any) -> Any:
        calls.append(threading.get_ident())
        time.sleep(0.05)
        return plain(*given, **options)

    device.fused = fused
    readers = [lambda: found.append(waits.data), before_writing, lambda: found.append(waits.transpose(0, 1).data.T)]
    threads = [threading.Thread(target=reader) for reader in readers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 2 and len(calls) <= 2  # the transposed copy is another launch
    for values in found:
        np.testing.assert_array_equal(values, [[1, 3, 5], [7, 9, 11]])
