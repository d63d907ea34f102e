"""Every operator's gradient against central differences in float64, the operator in the middle of a graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.autograd.self_test_calls import TENSOR_MODULES, self_test_calls
from wgrad.autograd import functional as F
from wgrad.autograd.gradcheck import LIMIT, gradcheck
from wgrad.autograd.ops.clamped_swiglu import clamped_swiglu
from wgrad.autograd.ops.sinks import sink_attention
from wgrad.autograd.reference import ReferenceDevice
from wgrad.autograd.tensor import Tensor, run_backward
from wgrad.device.contract import Device

SEED = np.array([123, 456], np.uint32)
ANGLE = np.outer(np.arange(9), [1.0, 0.3, 0.01])
STARTS = np.array([[0, 0, 2, 2, 2, 5], [0, 0, 0, 0, 4, 4]], np.int32)
CACHE_LEN = np.zeros(1, np.int32)
X35, X45, QKV = (3, 5), (4, 5), ((2, 6, 4, 6), (2, 6, 2, 6), (2, 6, 2, 6))
Cases = dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]]


def gradient_cases(device: Device, dtype: Any = np.float64) -> Cases:
    """Operators whose constant arrays lie on `device`, by name, with the shapes of their inputs (in `dtype`): those
    written here, and every other one as the self-test calls it."""
    put = device.upload
    written = {**_products(device), **_experts(put), **_plain(put, dtype), **_with_indices(put, dtype)}
    others = {name: call for name, call in self_test_calls().items() if name not in written}
    return written | {name: (call.on(put, dtype), tuple(call.tensors.values())) for name, call in others.items()}


def lora(a: Tensor, b: Tensor, p: float = 0.0, seed: Any = SEED) -> F.LoraTerm:
    return F.LoraTerm(a, b, 1.7, p, seed if p else None, 3)


def _products(device: Device) -> Cases:
    rng = np.random.default_rng(7)
    seed, kinds = device.upload(SEED), (False, True)
    shares = device.upload(rng.standard_normal((5, 2)).astype(np.float32))
    nf4, double = (
        device.quantize(device.upload(rng.standard_normal((7, 10)).astype(np.float32)), 32, double=d) for d in kinds
    )
    gemms: Cases = {
        f"gemm {'t' if ta else 'n'}{'t' if tb else 'n'}{' batched' if lead else ''}": (
            lambda a, b, ta=ta, tb=tb: F.gemm(a, b, trans_a=ta, trans_b=tb, alpha=0.3),
            ((*lead, 4, 3) if ta else (*lead, 3, 4), (*lead, 5, 4) if tb else (*lead, 4, 5)),
        )
        for ta in kinds
        for tb in kinds
        for lead in ((), (2,))
    }
    return gemms | {
        "linear": (lambda x, w: F.linear(x, w), ((2, 3, 10), (7, 10))),
        "linear bias residual": (
            lambda x, w, c, r: F.linear(x, w, bias=c, residual=r),
            ((2, 3, 10), (7, 10), (7,), (2, 3, 7)),
        ),
        "linear lora": (lambda x, w, a, b: F.linear(x, w, lora=lora(a, b)), ((5, 10), (7, 10), (2, 10), (7, 2))),
        "linear lora dropout": (
            lambda x, w, a, b: F.linear(x, w, lora=lora(a, b, 0.4, seed)),
            ((5, 10), (7, 10), (2, 10), (7, 2)),
        ),
        "linear lora shares": (
            lambda x, w, a, b: F.linear(x, w, lora=lora(a, b)._replace(shares=shares)),
            ((5, 10), (7, 10), (2, 10), (7, 2)),
        ),
        "linear_quantized": (lambda x: F.linear_quantized(x, nf4), ((5, 10),)),
        "linear_quantized double": (lambda x: F.linear_quantized(x, double), ((5, 10),)),
        "linear_quantized all": (
            lambda x, a, b, c, r: F.linear_quantized(x, nf4, lora=lora(a, b), bias=c, residual=r),
            ((2, 3, 10), (2, 10), (7, 2), (7,), (2, 3, 7)),
        ),
        "linear_quantized dropout": (
            lambda x, a, b: F.linear_quantized(x, double, lora=lora(a, b, 0.4, seed)),
            ((5, 10), (2, 10), (7, 2)),
        ),
    }


def _experts(put: Callable[[np.ndarray], Any]) -> Cases:
    """Five tokens with two of four experts each; the last one has no row."""
    ids = np.array([[0, 1], [0, 1], [1, 0], [0, 1], [0, 2]], np.int32)
    groups = F.Groups(*map(put, ReferenceDevice().group_by_expert(ids, 4)))
    others = put(np.random.default_rng(0).standard_normal(X35).astype(np.float32))
    return {
        "route": (lambda x: F.route(x, 2, True)[0], (X35,)),
        "route by others": (lambda x: F.route(x, 2, True, by=others)[0], (X35,)),
        "route all": (lambda x: F.route(x, 2, False)[0], (X35,)),
        "combine": (lambda y, w, r: F.combine(y, w, groups, residual=r), ((10, 3), (5, 2), (5, 3))),
        "grouped_linear": (lambda x, w: F.grouped_linear(x, w, groups, alpha=0.3), ((10, 3), (4, 6, 3))),
        "grouped_linear gather": (
            lambda x, w, a: F.grouped_linear(x, w, groups, alpha=0.3, gather=True, add=a),
            ((5, 3), (4, 6, 3), (10, 6)),
        ),
    }


def _plain(put: Callable[[np.ndarray], Any], dtype: Any) -> Cases:
    ones, below = put(np.ones(5, dtype)), put(np.full(X35, -0.2, dtype))

    def with_residual(h: Tensor, w: Tensor) -> list[Tensor]:
        y, same = F.rms_norm_residual(h, w, 1e-5)
        return [y, same]

    return {
        "rms_norm": (lambda x, w: F.rms_norm(x, w, 1e-5), ((2, 3, 5), (5,))),
        "rms_norm_residual": (with_residual, (X35, (5,))),
        "rms_norm_residual, only h": (lambda h: F.rms_norm_residual(h, ones, 1e-5)[1], (X35,)),
        "rms_norm_residual, only y": (lambda h, w: F.rms_norm_residual(h, w, 1e-5)[0], (X35, (5,))),
        "silu": (F.silu, (X35,)),
        "clamped_swiglu": (lambda x: clamped_swiglu(x, 1.7, 0.5), ((5, 6),)),
        "softmax": (F.softmax, ((2, 3, 5),)),
        "log_odds": (lambda x: F.log_odds(F.add(F.scale(F.mul(x, x), -1.0), below)), (X35,)),
        "add": (F.add, (X35, X35)),
        "mul by itself": (lambda x: F.mul(x, x), (X35,)),
        "cast": (lambda x: F.cast(x, dtype), (X35,)),
        "dora_scale": (lambda x, m: F.dora_scale(x, m, ones), ((2, 3, 5), (5,))),
        "bias": (F.bias, ((2, 3, 5), (5,))),
        "reshape": (lambda x: x.reshape(5, -1), (X35,)),
        "checkpoint": (lambda x, y: F.checkpoint(lambda a, b: F.silu(F.mul(a, b)), x, y), (X35, X35)),
    }


def _with_indices(put: Callable[[np.ndarray], Any], dtype: Any) -> Cases:
    cos, sin = put(np.cos(ANGLE).astype(dtype)), put(np.sin(ANGLE).astype(dtype))
    positions, ids, targets = (put(np.array(a, np.int32)) for a in ([3, 0, 8, 3], [1, 4, 1, 0, 1], [1, -100, 6, 1]))
    doc_start, cache_len = put(STARTS), put(CACHE_LEN)
    table = put(np.random.default_rng(5).standard_normal((7, 5)).astype(dtype))

    def attention(**options: Any) -> Callable[..., Tensor]:
        return lambda q, k, v: F.attention(q, k, v, doc_start, cache_len, scale=0.4, **options)

    return {
        "rope": (lambda x: F.rope(x, cos, sin, positions), ((4, 2, 6),)),
        "rope, partial": (lambda x: F.rope(x, cos, sin, positions), ((4, 2, 10),)),
        "rope, interleaved": (lambda x: F.rope(x, cos, sin, positions, interleaved=True), ((4, 2, 10),)),
        "attention": (attention(), QKV),
        "attention with sinks": (
            lambda q, k, v, s: sink_attention(q, k, v, s, doc_start, cache_len, scale=0.4, window=2),
            (*QKV, (QKV[0][2],)),
        ),
        "attention window": (attention(window=2), QKV),
        "attention softcap": (attention(window=3, softcap=0.7), QKV),
        "embedding": (lambda t: F.embedding(t, ids, dtype=dtype), (X45[::-1],)),
        "linear_cross_entropy": (lambda x, w: F.linear_cross_entropy(x, w, targets), (X45, (7, 5))),
        "linear_cross_entropy softcap": (
            lambda x, w: F.linear_cross_entropy(x, w, targets, softcap=1.7),
            (X45, (7, 5)),
        ),
        "linear_cross_entropy bias": (
            lambda x, w, b: F.linear_cross_entropy(x, w, targets, bias=b),
            (X45, (7, 5), (7,)),
        ),
        "linear_cross_entropy per target": (
            lambda x: F.linear_cross_entropy(x, table, targets, per_target=True),
            (X45,),
        ),
    }


CASES = gradient_cases(ReferenceDevice())


@pytest.mark.parametrize("name", CASES)
def test_gradient_equals_central_differences(name: str) -> None:
    op, shapes = CASES[name]
    rng = np.random.default_rng(3)
    inputs = [rng.standard_normal(shape) for shape in shapes]
    assert gradcheck(op, *inputs, rng=rng) < LIMIT


@pytest.mark.parametrize("name", CASES)
def test_no_operator_writes_to_what_it_is_given(name: str) -> None:
    """Neither to its inputs nor to the gradient from above: others may hold the same array."""
    op, shapes = CASES[name]
    rng, device = np.random.default_rng(3), ReferenceDevice()
    leaves = [Tensor(_read_only(rng.standard_normal(shape)), device, requires_grad=True) for shape in shapes]
    result = op(*leaves)
    outputs = [result] if isinstance(result, Tensor) else list(result)
    run_backward(outputs, [_read_only(rng.standard_normal(out.shape)) for out in outputs])
    assert all(leaf.grad is not None for leaf in leaves)


def _read_only(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


def test_every_differentiable_operator_is_checked() -> None:
    without_gradient = {"quantize", "dequantize", "kv_append", "rope_append", "grad_norm", "clip", "adamw"}
    without_gradient |= {"sample", "advance", "add_to"}
    helpers = {"Groups", "LoraTerm", "Tensor", "parameter", "no_grad"}
    helpers |= {name for name in F.__all__ if getattr(F, name).__module__ in TENSOR_MODULES}
    assert set(F.__all__) - without_gradient - helpers <= {name.split()[0].rstrip(",") for name in CASES}


class _WrongScale(ReferenceDevice):
    """Its silu_backward forgets the gradient from above where that is 1 only by chance."""

    def silu_backward(self, dy: np.ndarray, x: np.ndarray) -> np.ndarray:
        return super().silu_backward(np.ones_like(dy), x)  # type: ignore[misc]


def test_a_dropped_upstream_gradient_is_found() -> None:
    rng = np.random.default_rng(3)
    assert gradcheck(F.silu, rng.standard_normal(X35), rng=rng, device=_WrongScale()) > 0.01


@settings(max_examples=25, deadline=None, derandomize=True)
@given(batch=st.integers(1, 3), tokens=st.integers(1, 9), group=st.integers(1, 3), heads=st.integers(1, 2),
       half=st.integers(1, 4), window=st.integers(0, 5), seed=st.integers(0, 2**16))  # fmt: skip
def test_attention_of_any_shape_passes_gradcheck(
    batch: int, tokens: int, group: int, heads: int, half: int, window: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    firsts = np.maximum.accumulate(np.minimum(rng.integers(0, tokens, (batch, tokens)), np.arange(tokens)), axis=1)
    doc_start = firsts.astype(np.int32)
    q = rng.standard_normal((batch, tokens, heads * group, 2 * half))
    k, v = rng.standard_normal((2, batch, tokens, heads, 2 * half))

    def op(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.attention(q, k, v, doc_start, CACHE_LEN, scale=0.5, window=window)

    assert gradcheck(op, q, k, v, rng=rng, checks=4) < LIMIT


@settings(max_examples=25, deadline=None, derandomize=True)
@given(m=st.integers(1, 9), n=st.integers(1, 9), k=st.integers(1, 40), r=st.integers(1, 4), p=st.sampled_from([0, 0.5]),
       double=st.booleans(), seed=st.integers(0, 2**16))  # fmt: skip
def test_nf4_linear_of_any_shape_passes_gradcheck(
    m: int, n: int, k: int, r: int, p: float, double: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    weight = ReferenceDevice().quantize(rng.standard_normal((n, k)).astype(np.float32), 32, double=double)

    def op(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return F.linear_quantized(x, weight, lora=lora(a, b, p))

    arrays = [rng.standard_normal(shape) for shape in ((m, k), (r, k), (n, r))]
    assert gradcheck(op, *arrays, rng=rng, checks=4) < LIMIT


SIZE = st.integers(1, 9)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(n=SIZE, c=SIZE, v=SIZE, seed=st.integers(0, 2**16), data=st.data())
def test_norm_loss_and_embedding_of_any_shape_pass_gradcheck(
    n: int, c: int, v: int, seed: int, data: st.DataObject
) -> None:
    """A model of one token: embedding, norm, loss on the tied table, any of the targets ignored."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, v, n).astype(np.int32)
    targets = np.array(data.draw(st.lists(st.sampled_from([-100, *range(v)]), min_size=n, max_size=n)), np.int32)

    def op(table: Tensor, norm: Tensor) -> Tensor:
        x = F.embedding(table, ids, dtype=np.float64)
        y, h = F.rms_norm_residual(x, norm, 1e-2)
        return F.linear_cross_entropy(F.add(y, h), table, targets)

    assert gradcheck(op, rng.standard_normal((v, c)), 1 + rng.standard_normal(c), rng=rng, checks=4) < LIMIT


@settings(max_examples=25, deadline=None, derandomize=True)
@given(m=SIZE, n=SIZE, k=SIZE, b=st.integers(0, 3), ta=st.booleans(), tb=st.booleans(), seed=st.integers(0, 2**16))
def test_gemm_of_any_shape_passes_gradcheck(m: int, n: int, k: int, b: int, ta: bool, tb: bool, seed: int) -> None:
    rng, lead = np.random.default_rng(seed), (b,) if b else ()
    a = rng.standard_normal((*lead, k, m) if ta else (*lead, m, k))
    c = rng.standard_normal((*lead, n, k) if tb else (*lead, k, n))

    def op(x: Tensor, y: Tensor) -> Tensor:
        return F.gemm(x, y, trans_a=ta, trans_b=tb, alpha=-1.3)

    assert gradcheck(op, a, c, rng=rng, checks=4) < LIMIT
