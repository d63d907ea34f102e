"""The tape: sums of gradients, several outputs, leaf buffers, memory, checkpointing and errors."""

from __future__ import annotations

import gc
import inspect
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest

from wgrad.autograd import functional as F
from wgrad.autograd.chunks import in_row_chunks
from wgrad.autograd.function import Context
from wgrad.autograd.reference import ReferenceDevice
from wgrad.autograd.tensor import Tensor, is_recomputing, no_grad, parameter
from wgrad.device.contract import Device
from wgrad.device.errors import ShapeError, WgradError
from wgrad.device.formats.nf4 import NF4Array


def leaf(device: Device, values: Any) -> Tensor:
    return Tensor(device.upload(np.array(values, np.float32)), device, requires_grad=True)


def grad(tensor: Tensor) -> np.ndarray:
    assert tensor.gradient is not None
    return tensor.device.download(tensor.gradient)


def test_a_diamond_adds_both_paths(device: Device) -> None:
    x = leaf(device, [1.0, 2.0, -3.0])
    y = F.scale(x, 2.0)
    F.sum(F.add(F.mul(y, y), F.scale(y, 5.0))).backward()
    np.testing.assert_allclose(grad(x), 2 * (2 * 2 * np.array([1, 2, -3.0]) + 5), rtol=1e-6)


def test_a_tensor_used_many_times_adds_up_all_its_gradients(device: Device) -> None:
    x = leaf(device, [1.5, -2.0])
    total = x
    for _ in range(7):
        total = F.add(total, x)
    F.sum(total).backward()
    np.testing.assert_array_equal(grad(x), [8, 8])


def test_a_shared_gradient_is_not_written_to(device: Device) -> None:
    """`add` gives one array to both of its inputs, and a later sum into one of them must not change the other."""
    a, b = leaf(device, [1.0, 2.0]), leaf(device, [3.0, 4.0])
    y = F.add(F.scale(a, 1.0), F.scale(b, 1.0))
    z = F.add(y, F.scale(a, 10.0))
    F.sum(F.add(z, F.scale(y, 2.0))).backward()
    np.testing.assert_array_equal(grad(a), [13, 13])
    np.testing.assert_array_equal(grad(b), [3, 3])


def test_backward_adds_to_what_a_leaf_has(device: Device) -> None:
    x = leaf(device, [1.0, 2.0])
    for _ in range(3):
        F.sum(F.scale(x, 2.0)).backward()
    np.testing.assert_array_equal(grad(x), [6, 6])


def test_seed_scales_the_gradient(device: Device) -> None:
    x = leaf(device, [1.0, 2.0])
    F.sum(F.scale(x, 2.0)).backward(device.upload(np.array([8.0], np.float32)))
    np.testing.assert_array_equal(grad(x), [16, 16])


@pytest.mark.parametrize("used", ["first", "second", "both"])
def test_fused_outputs_have_the_gradients_of_two_operators(device: Device, used: str) -> None:
    """rms_norm_residual agrees with two separate operators."""
    host = np.random.default_rng(0).standard_normal((5, 12)).astype(np.float32)
    weight = np.linspace(0.5, 1.5, 12, dtype=np.float32)

    def loss(x: Tensor, w: Tensor, fused: bool) -> Tensor:
        y, h = F.rms_norm_residual(x, w, 1e-5) if fused else (F.rms_norm(x, w, 1e-5), x)
        terms = {"first": [F.mul(y, y)], "second": [F.mul(h, h)], "both": [F.mul(y, y), F.mul(h, h)]}[used]
        total = F.sum(terms[0])
        return F.add(total, F.sum(terms[1])) if len(terms) > 1 else total

    grads = []
    for fused in (True, False):
        x, w = leaf(device, host), leaf(device, weight)
        loss(x, w, fused).backward()
        assert (w.grad is None) == (used == "second")
        grads.append([grad(x)] if used == "second" else [grad(x), grad(w)])
    for one, other in zip(*grads):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_the_second_output_is_the_same_storage(cpu: ReferenceDevice) -> None:
    h = leaf(cpu, np.ones((3, 4)))
    assert F.rms_norm_residual(h, cpu.upload(np.ones(4, np.float32)), 1e-5)[1].data is h.data


def test_gradients_go_into_the_leaf_buffers(device: Device) -> None:
    """Buffers are views of a flat one, as for the optimizer. Some operators write to them directly, others do not."""
    rng = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {"weight": (7, 10), "a": (2, 10), "b": (7, 2), "bias": (7,), "norm": (10,)}
    flat = device.upload(np.full(64 * 8, 0.5, np.float32))
    host = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    offsets = dict(zip(shapes, (0, 128, 192, 256, 320)))

    def run(leaves: dict[str, Tensor]) -> None:
        x = Tensor(device.upload(rng_x), device)
        x = F.rms_norm(x, leaves["norm"], 1e-5)
        term = F.LoraTerm(leaves["a"], leaves["b"], 1.5)
        y = F.linear(x, leaves["weight"], bias=leaves["bias"], lora=term)
        F.sum(F.mul(y, y)).backward()

    rng_x = rng.standard_normal((4, 10)).astype(np.float32)
    buffered = {
        name: parameter(device.upload(host[name]), device, device.view(flat, shape, offsets[name]))
        for name, shape in shapes.items()
    }
    plain = {name: leaf(device, host[name]) for name in shapes}
    run(plain)
    run(buffered)
    run(buffered)
    for name in shapes:
        np.testing.assert_allclose(grad(buffered[name]), 0.5 + 2 * grad(plain[name]), rtol=1e-4, atol=1e-3)
    left = device.download(flat)
    np.testing.assert_array_equal(left[70:128], 0.5)  # between two parameters nothing is touched
    assert not np.array_equal(left[:70], np.full(70, 0.5))


def test_no_grad_saves_nothing(device: Device) -> None:
    x = leaf(device, [1.0, 2.0])
    with no_grad():
        y = F.sum(F.mul(x, x))
    assert not y.requires_grad and y.node is None
    with pytest.raises(WgradError, match="nothing below this tensor requires a gradient"):
        y.backward()


@pytest.mark.parametrize("parts", [(), (64, 128)])
def test_a_frozen_factor_of_lora_changes_no_other_gradient(cpu: ReferenceDevice, parts: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    ones = [cpu.quantize(rng.standard_normal((n, 64)).astype(np.float32)) for n in parts or (7,)]
    weight = NF4Array.stack(ones, cpu) if parts else ones[0]
    columns, ranks = sum(parts or (7,)), 2 * max(1, len(parts))
    host = [rng.standard_normal(shape).astype(np.float32) for shape in ((3, 64), (ranks, 64), (columns, 2))]

    def gradients(frozen: bool) -> list[np.ndarray]:
        x, a, b = (leaf(cpu, one) for one in host)
        b = b.detach() if frozen else b
        F.sum(F.linear_quantized(x, weight, lora=F.LoraTerm(a, b, 1.5))).backward()
        assert (b.grad is None) == frozen
        return [grad(x), grad(a)]

    for found, wanted in zip(gradients(True), gradients(False), strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_detach_cuts_the_tape(device: Device) -> None:
    x = leaf(device, [1.0, 2.0])
    F.sum(F.mul(x, F.scale(x, 3.0).detach())).backward()
    np.testing.assert_array_equal(grad(x), [3, 6])


def test_second_backward_is_an_error(cpu: ReferenceDevice) -> None:
    y = F.scale(leaf(cpu, [1.0]), 2.0)
    F.sum(y).backward()
    with pytest.raises(WgradError, match="walked before through scale.*run the forward again"):
        F.sum(F.mul(y, y)).backward()


def test_backward_of_several_elements_needs_a_seed(cpu: ReferenceDevice) -> None:
    y = F.scale(leaf(cpu, [1.0, 2.0]), 2.0)
    with pytest.raises(ShapeError, match=r"gradient is needed.*shape \[2\]"):
        y.backward()
    with pytest.raises(ShapeError, match=r"gradient must have the tensor's shape \[2\], got \[1\]"):
        y.backward(np.ones(1, np.float32))


def test_two_devices_are_an_error(cpu: ReferenceDevice) -> None:
    with pytest.raises(WgradError, match="add: arguments must be on one device"):
        F.add(leaf(cpu, [1.0]), leaf(ReferenceDevice(), [1.0]))


def test_no_tensor_needs_a_device(cpu: ReferenceDevice) -> None:
    table, ids = np.ones((3, 4), np.float32), np.zeros(2, np.int32)
    with pytest.raises(WgradError, match="no argument is a Tensor"):
        F.embedding(table, ids)
    assert F.embedding(table, ids, device=cpu).shape == (2, 4)


def test_a_gradient_in_another_dtype_is_cast(device: Device) -> None:
    if not device.float16:
        pytest.skip(f"{device.description} has no float16")
    x = leaf(device, np.ones((2, 3)))
    half = F.cast(x, np.float16)
    y = F.linear(half, device.upload(np.eye(3, dtype=np.float32)), residual=F.scale(x, 2.0), dtype=np.float16)
    F.sum(y).backward()
    assert grad(x).dtype == np.float32
    np.testing.assert_array_equal(grad(x), np.full((2, 3), 3.0))


def test_a_residual_gets_the_gradient_as_it_is(device: Device) -> None:
    """With 16-bit activations, GEMMs of the backward round it, but that of the residual stream stays float32."""
    if not device.float16:
        pytest.skip(f"{device.description} has no float16")
    x, stream = leaf(device, np.ones((2, 3))), leaf(device, np.zeros((2, 3)))
    y = F.linear(F.cast(x, np.float16), device.upload(np.eye(3, dtype=np.float32)), residual=stream, dtype=np.float32)
    seed = np.full((2, 3), 1 + 2.0**-13, np.float32)
    y.backward(device.upload(seed))
    np.testing.assert_array_equal(grad(stream), seed)
    np.testing.assert_array_equal(grad(x), np.ones((2, 3)))


@pytest.mark.parametrize("also_added", [False, True])
def test_a_gradient_that_came_rounded_gives_the_bits_of_one_that_is_cast(
    device: Device, also_added: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The norm after a layer on a float32 stream writes its gradient in float16 as well, which saves a cast.

    If the stream is also read elsewhere, only the sum of its gradients counts.
    """
    if not device.float16:
        pytest.skip(f"{device.description} has no float16")
    rng, casts = np.random.default_rng(0), []
    arrays = [rng.standard_normal(shape).astype(np.float32) for shape in ((9, 16), (24, 16), (9, 24), (24,))]
    cast = device.bound_operators["cast"]

    def counted(*args: Any, **given: Any) -> Any:
        casts.append(1)
        return cast(*args, **given)

    monkeypatch.setitem(device.bound_operators, "cast", counted)

    def gradients() -> list[np.ndarray]:
        x, residual = F.cast(start := leaf(device, arrays[0]), np.float16), leaf(device, arrays[2])
        h = F.linear(x, device.upload(arrays[1].astype(np.float16)), residual=residual, dtype=np.float32)
        y, passed_on = F.rms_norm_residual(h, device.upload(arrays[3]), 1e-5, dtype=np.float16)
        loss = F.sum(F.add(F.mul(passed_on, passed_on), F.cast(F.mul(y, y), np.float32)))
        if also_added:
            loss = F.add(loss, F.sum(F.mul(h, h)))
        casts.clear()
        loss.backward()
        return [grad(start), grad(residual)]

    found, number = gradients(), len(casts)
    monkeypatch.setattr(Context, "rounded_by", lambda ctx, i: None)
    for value, wanted in zip(found, gradients(), strict=True):
        np.testing.assert_array_equal(value, wanted)
    assert len(casts) - number == (0 if also_added else 1)


@pytest.mark.parametrize("joined", [True, False])
def test_what_a_backward_makes_again_is_not_kept(device: Device, joined: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is SwiGLU's output, which only the gradient of LoRA's A reads. The bits are those of a kept one."""
    rng = np.random.default_rng(0)
    sizes = {"gate": (40, 64 if joined else 32), "up": (40, 32), "weight": (24, 32), "a": (4, 32), "b": (24, 4)}
    values = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in sizes.items()}

    def run() -> tuple[list[np.ndarray], int]:
        gate, up = (leaf(device, values[name]) for name in ("gate", "up"))
        weight = device.upload(values["weight"])
        a, b = (parameter(device.upload(values[n]), device, grad=device.zeros(sizes[n])) for n in "ab")
        gc.collect()  # arrays of other tests would go in between
        before = device.memory().in_use_bytes
        y = F.linear(F.swiglu(gate) if joined else F.swiglu(gate, up), weight, lora=F.LoraTerm(a, b, 0.5))
        kept = device.memory().in_use_bytes - before
        y.backward(device.upload(np.ones((40, 24), np.float32)))
        return [grad(t) for t in ((gate, a, b) if joined else (gate, up, a, b))], kept

    run()  # makes what stays, shaders' parameters for one
    found, kept = run()
    monkeypatch.setattr(Context, "recomputed_by", lambda ctx, i: None)
    expected, more = run()
    for value, wanted in zip(found, expected, strict=True):
        np.testing.assert_array_equal(value, wanted)
    assert more - kept == 40 * 32 * 4 and np.abs(expected[-2]).max() > 0


def test_a_constant_gets_no_gradient_silently(cpu: ReferenceDevice) -> None:
    x, positions = leaf(cpu, np.ones((3, 2, 6))), np.zeros(3, np.int32)
    cos, sin = leaf(cpu, np.ones((9, 3))), np.zeros((9, 3), np.float32)
    y = F.sum(F.rope(x, cos, sin, positions))
    with pytest.raises(WgradError, match="rope: an argument without gradient is a Tensor that requires one; detach it"):
        y.backward()
    F.sum(F.rope(x, cos.detach(), sin, positions)).backward()
    assert cos.grad is None and grad(x).shape == (3, 2, 6)


def test_a_function_shows_its_forward() -> None:
    """It has the forward's signature without the context, or that of its operator, and its docstring."""
    shown = {name: list(inspect.signature(getattr(F, name)).parameters) for name in ("rms_norm", "linear", "swiglu")}
    assert shown["rms_norm"] == ["x", "weight", "eps", "dtype"] and shown["swiglu"] == ["gate", "up"]
    assert shown["linear"] == list(inspect.signature(F.linear_quantized).parameters)
    assert inspect.signature(F.dropout).return_annotation == "Tensor"
    for name, function in ((n, getattr(F, n)) for n in F.__all__):
        assert function.__doc__ and function.__name__ == name


def test_arguments_by_name_are_those_by_place(device: Device) -> None:
    """In any order, each argument gets its own gradient."""
    rng = np.random.default_rng(0)
    for function, by_place in ((F.swiglu, ("gate", "up")), (F.mul, ("a", "b"))):
        arrays = [rng.standard_normal((3, 4)) for _ in by_place]
        placed, named = ([leaf(device, a) for a in arrays] for _ in range(2))
        F.sum(function(*placed)).backward()
        F.sum(function(**dict(reversed(list(zip(by_place, named)))))).backward()
        for one, other in zip(placed, named):
            np.testing.assert_array_equal(grad(one), grad(other))


# ---- memory ------------------------------------------------------------------------------
def chain(x: Tensor, depth: int) -> Tensor:
    for _ in range(depth):
        x = F.silu(x)
    return F.sum(x)


def test_the_walk_frees_saved_arrays_as_it_goes(cpu: ReferenceDevice) -> None:
    """At its peak, the backward has the saved arrays and a few gradients, but never all of both."""
    x = leaf(cpu, np.ones((64, 64)))
    loss = chain(x, 20)
    after_forward = cpu.memory().in_use_bytes
    cpu.reset_peak()
    loss.backward()
    extra = cpu.memory().peak_bytes - after_forward
    assert extra <= 3 * x.data.nbytes
    del loss
    gc.collect()
    assert cpu.memory().in_use_bytes == 2 * x.data.nbytes  # the leaf and its gradient


def test_saved_arrays_die_though_the_loss_lives(cpu: ReferenceDevice) -> None:
    x = leaf(cpu, np.ones(8))
    inner = F.scale(x, 2.0)
    saved = weakref.ref(inner.data)
    loss = F.sum(F.silu(inner))
    del inner
    gc.collect()
    assert saved() is not None
    loss.backward()
    gc.collect()
    assert saved() is None and loss.node is not None


def test_memory_does_not_grow_from_step_to_step(device: Device) -> None:
    x = leaf(device, np.ones((64, 64)))
    used = []
    for _ in range(4):
        x.grad = None
        chain(x, 5).backward()
        device.synchronize()
        gc.collect()
        used.append(device.memory().in_use_bytes)
    assert used[1] == used[-1]


def test_a_deep_graph_does_not_recurse(cpu: ReferenceDevice) -> None:
    x = leaf(cpu, [0.5])
    chain(x, 5000).backward()
    assert np.isfinite(grad(x)).all()


# ---- checkpoint --------------------------------------------------------------------------
def layer(device: Device, weights: dict[str, Any], x: Tensor) -> Tensor:
    y, h = F.rms_norm_residual(x, weights["norm"], 1e-5)
    seed = weights["seed"]
    term = F.LoraTerm(weights["a"], weights["b"], 2.0, 0.3, seed, 11)
    return F.dropout(F.linear_quantized(F.silu(y), weights["nf4"], lora=term, residual=h), 0.2, seed, 12)


def layer_weights(device: Device, rng: np.random.Generator) -> dict[str, Any]:
    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    return {
        "norm": parameter(device.upload(normal(64)), device),
        "a": parameter(device.upload(normal(3, 64)), device),
        "b": parameter(device.upload(normal(64, 3)), device, device.zeros((64, 3))),
        "nf4": device.quantize(device.upload(normal(64, 64))),
        "seed": device.upload(np.array([5, 6], np.uint32)),
    }


@pytest.mark.parametrize("input_needs_grad", [True, False])
def test_checkpoint_equals_plain_bit_for_bit(device: Device, input_needs_grad: bool) -> None:
    """This holds even if only the parameters inside need gradients, and not the input (a frozen embedding)."""
    found = []
    for use in (False, True):
        rng = np.random.default_rng(1)
        layers = [layer_weights(device, rng) for _ in range(2)]
        x = Tensor(device.upload(rng.standard_normal((7, 64)).astype(np.float32)), device, input_needs_grad)
        h = x
        for weights in layers:
            if use:
                h = F.checkpoint(lambda t, w=weights: layer(device, w, t), h)
            else:
                h = layer(device, weights, h)
        loss = F.sum(F.mul(h, h))
        loss.backward()
        grads = [grad(w[name]) for w in layers for name in ("norm", "a", "b")]
        found.append([loss.numpy(), *grads, *([grad(x)] if input_needs_grad else [])])
    for plain, checkpointed in zip(*found):
        np.testing.assert_array_equal(plain, checkpointed)


def test_the_last_product_of_a_checkpoint_is_not_made_again(device: Device) -> None:
    """With `unread`, the residual replaces the sum in the backward. Every gradient has the same bits."""
    found, products = [], []
    for last in (False, True):
        rng = np.random.default_rng(1)
        weights = layer_weights(device, rng)
        x = parameter(device.upload(rng.standard_normal((7, 64)).astype(np.float32)), device)

        def stretch(t: Tensor, w: dict[str, Any] = weights, last: bool = last) -> Tensor:
            y, h = F.rms_norm_residual(t, w["norm"], 1e-5)
            term, unread = F.LoraTerm(w["a"], w["b"], 2.0), last and is_recomputing()
            if unread:
                products.append("left out")
            return F.linear_quantized(F.silu(y), w["nf4"], lora=term, residual=h, unread=unread)

        h = F.checkpoint(stretch, x)
        F.sum(F.mul(h, h)).backward()
        found.append([h.numpy(), grad(x), *(grad(weights[name]) for name in ("norm", "a", "b"))])
    assert products == ["left out"]
    for whole, without in zip(*found, strict=True):
        np.testing.assert_array_equal(whole, without)


def check_bits_of_a_plain_call(
    stretch: Callable[..., Tensor], values: Iterable[np.ndarray], device: Device, keep: bool, calls: list[Any]
) -> None:
    """Check a checkpointed stretch's result and gradients. calls: afterwards, those of the checkpointed run alone."""
    found = []
    for run in (stretch, lambda *x: F.checkpoint(stretch, *x, keep=keep)):
        leaves = [parameter(device.upload(value), device) for value in values]
        calls.clear()
        y = run(*leaves)
        F.sum(F.mul(y, y)).backward()
        found.append([y.numpy(), *map(grad, leaves)])
    for plain, checkpointed in zip(*found, strict=True):
        np.testing.assert_array_equal(plain, checkpointed)


@pytest.mark.parametrize("keep", [False, True])
def test_attention_is_computed_again_or_kept(device: Device, monkeypatch: pytest.MonkeyPatch, keep: bool) -> None:
    """A stretch has two of them, in order. Every gradient has the bits of a plain call."""
    rng = np.random.default_rng(2)
    values = rng.standard_normal((3, 1, 19, 2, 8)).astype(np.float32)
    doc_start, cache_len = device.zeros((1, 19), np.int32), device.zeros((1,), np.int32)
    given = device.attention
    calls = []

    def counted(*args: Any, **options: Any) -> Any:
        calls.append(args)
        return given(*args, **options)

    def stretch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        o = F.attention(q, k, v, doc_start, cache_len, scale=0.4)
        return F.attention(o, v, k, doc_start, cache_len, scale=0.3)

    monkeypatch.setattr(device, "attention", counted)
    check_bits_of_a_plain_call(stretch, values, device, keep, calls)
    assert len(calls) == (2 if keep else 4)


@pytest.mark.parametrize("keep", [False, True])
def test_lora_multiplies_x_again_or_keeps_it(device: Device, monkeypatch: pytest.MonkeyPatch, keep: bool) -> None:
    """The last one in chunks, which keep nothing. Every gradient has the bits of a plain call."""
    rng, n = np.random.default_rng(3), 72
    values = [rng.standard_normal(shape).astype(np.float32) for shape in ((n, 9), (3, 9), (7, 3), (2, 7), (9, 2))]
    weights = [device.upload(rng.standard_normal(shape).astype(np.float32)) for shape in ((7, 9), (9, 7))]
    given, calls = device.gemm, []

    def counted(a: Any, b: Any, **options: Any) -> Any:
        if options.get("trans_b") and b.shape[0] in (2, 3):
            calls.append((a.shape[0], b.shape[0]))
        return given(a, b, **options)

    def stretch(x: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
        y = F.linear(x, weights[0], lora=F.LoraTerm(a, b, 0.5))

        def fn(rows: Tensor) -> Tensor:
            y = F.linear(F.linear(rows, weights[0]), weights[1], lora=F.LoraTerm(c, d, 0.5))
            return F.add(rows, y)

        return in_row_chunks(fn, F.linear(y, weights[1], lora=F.LoraTerm(c, d, 2.0), residual=x), 64)

    monkeypatch.setattr(device, "gemm", counted)
    check_bits_of_a_plain_call(stretch, values, device, keep, calls)
    whole, chunks = [(n, 3), (n, 2)], [(64, 2), (8, 2)]
    assert calls == whole + chunks + ([] if keep else whole) + chunks


def test_unread_wants_what_stands_in_its_place(cpu: ReferenceDevice) -> None:
    x, w = leaf(cpu, np.ones((2, 3))), leaf(cpu, np.ones((3, 3)))
    with pytest.raises(
        ShapeError, match="unread needs a residual of the result's dtype float32, .* got None; leave unread out"
    ):
        F.linear(x, w, unread=True)


def test_checkpoint_recomputes_several_outputs(cpu: ReferenceDevice) -> None:
    def fn(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return F.mul(a, b), F.silu(a)

    x, y = leaf(cpu, [1.0, 2.0]), leaf(cpu, [3.0, -1.0])
    product, activated = F.checkpoint(fn, x, y)
    F.sum(F.add(product, activated)).backward()
    p, q = leaf(cpu, [1.0, 2.0]), leaf(cpu, [3.0, -1.0])
    F.sum(F.add(*fn(p, q))).backward()
    np.testing.assert_array_equal(grad(x), grad(p))
    np.testing.assert_array_equal(grad(y), grad(q))


def test_checkpoint_saves_only_its_input(cpu: ReferenceDevice) -> None:
    x = leaf(cpu, np.ones((64, 64)))
    loss = F.checkpoint(lambda t: chain(t, 20), x)
    gc.collect()
    assert cpu.memory().in_use_bytes == x.data.nbytes + loss.data.nbytes


def test_checkpoint_under_no_grad_is_a_plain_call(cpu: ReferenceDevice) -> None:
    with no_grad():
        assert F.checkpoint(lambda t: F.scale(t, 2.0), leaf(cpu, [1.0])).node is None


# ---- recording ---------------------------------------------------------------------------
def test_a_step_replays_on_new_values(device: Device) -> None:
    """A recorded forward and backward that runs again on a changed input adds the new gradient."""
    x = device.upload(np.array([[1.0, 2.0]], np.float32))
    w = parameter(device.upload(np.array([[3.0, 4.0]], np.float32)), device, device.zeros((1, 2)))

    def step() -> Tensor:
        loss = F.sum(F.linear(Tensor(x, device), w))
        loss.backward()
        return loss

    step()
    with device.capture() as replay:
        loss = step()
    device.write(x, np.array([[10.0, 20.0]], np.float32))
    replay.run()
    np.testing.assert_allclose(grad(w), [[12, 24]])
    np.testing.assert_allclose(loss.numpy(), [110])
    assert replay.dispatches > 0
