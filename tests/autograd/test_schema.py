"""Every rule of the schema: the message names the operator, the argument, the rule, what was received, what to do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from wgrad.autograd import functional as F
from wgrad.autograd.ops.decoding import check_room, sample_settings
from wgrad.autograd.ops.optimizer import HYPER_SIZE, STATE_SIZE
from wgrad.autograd.reference import ReferenceDevice
from wgrad.autograd.tensor import Tensor, parameter
from wgrad.device.errors import ShapeError, WgradError
from wgrad.device.formats.frozen_weight import formats

CPU = ReferenceDevice()
NF4 = CPU.quantize(np.ones((7, 10), np.float32))
DOUBLE = CPU.quantize(np.ones((7, 10), np.float32), double=True)


def f32(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


def i32(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.int32)


def t(*shape: int, dtype: Any = np.float32) -> Tensor:
    return Tensor(np.ones(shape, dtype), CPU, requires_grad=np.dtype(dtype).kind == "f")


def lora(a: Tensor, b: Tensor, **options: Any) -> F.LoraTerm:
    return F.LoraTerm(a, b, **{"scaling": 1.0, **options})


def attend(q: Tensor, k: Tensor, v: Tensor, doc_start: Any = None, cache_len: Any = None, **options: Any) -> Tensor:
    doc_start = i32(*q.shape[:2]) if doc_start is None else doc_start
    return F.attention(q, k, v, doc_start, i32(1) if cache_len is None else cache_len, scale=1.0, **options)


def append(**changes: Any) -> None:
    arrays = {"k": f32(6, 2, 6), "v": f32(6, 2, 6), "cos": f32(9, 3), "sin": f32(9, 3), "positions": i32(6)}
    arrays |= {"keys": f32(2, 4, 2, 6), "values": f32(2, 4, 2, 6), "cache_len": i32(1)}
    CPU.rope_append(**(arrays | changes))


def step(**changes: Any) -> None:
    arrays = {n: f32(9) for n in ("p", "g", "exp_avg", "exp_avg_sq")}
    arrays |= {"hyper": f32(HYPER_SIZE), "state": f32(STATE_SIZE)}
    decay = changes.pop("decay_elements", 3)
    arrays |= changes
    options = {"beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.0}
    CPU.adamw(**arrays, decay_elements=decay, **options)


BAD: dict[str, tuple[Callable[[], Any], str]] = {
    # arrays in general
    "not an array": (lambda: F.add(t(3), 7.0), r"add: b must be an array on the device, got float; upload it first"),
    "dtype": (
        lambda: F.silu(t(3, dtype=np.int32)),
        r"silu: x must be float32, float16 or bfloat16, got int32; cast it first",
    ),
    "empty": (lambda: F.softmax(t(2, 0)), r"softmax: x must not be empty, got shape \[2, 0\]"),
    "too few axes": (
        lambda: F.rms_norm(t(5), f32(5)),
        r"rms_norm: x must have at least 2 axes, got shape \[5\]",
    ),
    # products
    "gemm inner": (
        lambda: F.gemm(t(3, 4), t(5, 6)),
        r"gemm: b must be \[K, N\] with K = 4 from a, got shape \[5, 6\]; check trans_a and trans_b",
    ),
    "gemm batch": (lambda: F.gemm(t(2, 3, 4), t(3, 4, 6)), r"gemm: b must be \[B, K, N\] with B = 2"),
    "gemm axes": (lambda: F.gemm(t(2, 3, 4), t(4, 6)), r"gemm: b must be \[B, K, N\], got shape \[4, 6\]"),
    "linear weight": (
        lambda: F.linear(t(3, 10), f32(10, 7)),
        r"linear: weight must be \[N, K\] with K = 10 from x, got shape \[10, 7\]; a linear weight is \[out,",
    ),
    "linear bias": (lambda: F.linear(t(3, 10), f32(7, 10), bias=f32(8)), r"linear: bias must be \[N\] with N = 7"),
    "linear bias dtype": (
        lambda: F.linear(t(3, 10), f32(7, 10), bias=np.ones(7, np.float16)),
        r"linear: bias must be float32, got float16",
    ),
    "linear residual": (
        lambda: F.linear(t(2, 3, 10), f32(7, 10), residual=t(3, 7)),
        r"linear: residual must have the shape of the result \[2, 3, 7\], got \[3, 7\]",
    ),
    "linear dtype": (
        lambda: F.linear(t(3, 10), f32(7, 10), dtype=np.int32),
        r"linear: dtype must be float32, float16 or bfloat16",
    ),
    "lora a": (
        lambda: F.linear(t(3, 10), f32(7, 10), lora=lora(t(10, 2), t(7, 2))),
        r"linear: lora.a must be \[r, K\] with K = 10 .*, got shape \[10, 2\]; lora_A is \[r, in\]",
    ),
    "lora b": (
        lambda: F.linear_quantized(t(3, 10), NF4, lora=lora(t(2, 10), t(2, 7))),
        r"linear_quantized: lora.b must be \[N, r\] with N = 7.*, got shape \[2, 7\]; lora_B is \[out, r\]",
    ),
    "lora seed": (
        lambda: F.linear_quantized(t(3, 10), NF4, lora=lora(t(2, 10), t(7, 2), dropout=0.1)),
        r"linear_quantized: lora.seed must be an array on the device, got NoneType",
    ),
    "lora stream": (
        lambda: F.linear(
            t(3, 10), f32(7, 10), lora=lora(t(2, 10), t(7, 2), dropout=0.1, seed=np.ones(2, np.uint32), stream=-1)
        ),
        r"linear: stream must be in \[0, 2\^32\), got -1; number the dropout layers from 0",
    ),
    "lora dropout": (
        lambda: F.linear(t(3, 10), f32(7, 10), lora=lora(t(2, 10), t(7, 2), dropout=1.0)),
        r"linear: p must be in \[0, 1\), got 1.0",
    ),
    "lora scaling": (
        lambda: F.linear(t(3, 10), f32(7, 10), lora=lora(t(2, 10), t(7, 2), scaling=float("nan"))),
        r"linear: lora.scaling must be finite, got nan",
    ),
    "lora gradients' u": (
        lambda: CPU.lora_grads(f32(3, 128), f32(128, 2), f32(3, 2), (64, 64)),
        r"lora_grads: u must .*4.*, got shape \[3, 2\]",
    ),
    "lora gradients added to nothing": (
        lambda: CPU.lora_grads(f32(3, 7), f32(7, 2), f32(3, 2), accumulate=True),
        r"lora_grads: out must be given where the result is added to it, got None",
    ),
    "linear of nf4": (
        lambda: F.linear(t(3, 10), NF4),
        r"linear: weight must be an array: call linear_quantized, got NF4Array",
    ),
    "linear_quantized of an array": (
        lambda: F.linear_quantized(t(3, 10), f32(7, 10)),  # type: ignore[arg-type]
        r"linear_quantized: weight must be an .*NF4Array.*: call linear, or quantize it, got ndarray",
    ),
    # NF4
    "nf4 width": (
        lambda: F.linear_quantized(t(3, 11), NF4),
        r"linear_quantized: weight must be \[N, K\] with K = 11 from x, got shape \[7, 10\]; pass the weight of this",
    ),
    "nf4 packed": (
        lambda: F.linear_quantized(t(3, 10), replace(NF4, packed=NF4.packed[:-1])),
        r"linear_quantized: weight.packed must hold 35 bytes for shape \[7, 10\], got 34; quantize the weight again",
    ),
    "nf4 absmax": (
        lambda: CPU.dequantize(replace(NF4, absmax=f32(3))),
        r"dequantize: w.absmax must be \[2\], got shape \[3\]",
    ),
    "nf4 nested dtype": (
        lambda: CPU.dequantize(replace(DOUBLE, absmax=f32(2))),
        r"dequantize: w.absmax must be uint8, got float32",
    ),
    "nf4 nested code": (
        lambda: CPU.dequantize(replace(DOUBLE, nested_code=f32(16))),
        r"dequantize: w.nested_code must be \[256\]",
    ),
    "nf4 block size": (
        lambda: CPU.quantize(f32(7, 10), 48),
        r"quantize: block_size must be one of \(32, 64, .*\), got 48; 64 is usual",
    ),
    "unknown format": (
        lambda: CPU.quantize(f32(7, 10), format="q9_k"),
        r"quantize: format must be one of .*nf4.*, got 'q9_k'; nf4 is usual",
    ),
    "nf4 vector": (
        lambda: CPU.quantize(f32(70)),
        r"quantize: w must be \[N, K\], got shape \[70\]; only mat",
    ),
    # norms, activations, rotary
    "rms_norm weight": (
        lambda: F.rms_norm(t(3, 10), f32(9), 1e-5),
        r"rms_norm: weight must be \[C\] with C = 10 from x, got shape \[9\]",
    ),
    "rms_norm axes": (
        lambda: F.rms_norm(t(10), f32(10), 1e-5),
        r"rms_norm: x must have at least 2 axes, got shape \[10\]; reshape it",
    ),
    "rms_norm eps": (lambda: F.rms_norm_residual(t(3, 10), f32(10), 0.0), r"rms_norm_residual: eps must be positive"),
    "swiglu": (
        lambda: F.swiglu(t(3, 10), t(3, 9)),
        r"swiglu: up must have the shape of gate \[3, 10\], got \[3, 9\]; reshape it \(nothing is broadcast\)",
    ),
    "rope axes": (
        lambda: F.rope(t(3, 10), f32(9, 5), f32(9, 5), i32(3)),
        r"rope: x must be \[N, H, D\].*flatten batch",
    ),
    "rope odd": (lambda: F.rope(t(3, 2, 5), f32(9, 2), f32(9, 2), i32(3)), r"rope: x must have an even head width D"),
    "rope table": (
        lambda: F.rope(t(3, 2, 6), f32(9, 6), f32(9, 6), i32(3)),
        r"rope: cos must have at most D / 2 = 3 columns, one for each rotated pair, got 6",
    ),
    "rope positions": (
        lambda: F.rope(t(3, 2, 6), f32(9, 3), f32(9, 3), i32(4)),
        r"rope: positions must be \[N\] with N",
    ),
    # attention
    "attention heads": (
        lambda: attend(t(1, 4, 3, 8), t(1, 4, 2, 8), t(1, 4, 2, 8)),
        r"attention: q must have a multiple of the key heads G = 2, got H = 3; check num_attention_heads",
    ),
    "attention width": (
        lambda: attend(t(1, 4, 1, 520), t(1, 4, 1, 520), t(1, 4, 1, 520)),
        r"attention: q must have a head width of at most 512, got 520",
    ),
    "attention keys": (
        lambda: attend(t(1, 4, 2, 8), t(1, 3, 2, 8), t(1, 3, 2, 8)),
        r"attention: k must hold a key for every query, got T = 4 > S = 3",
    ),
    "attention decode gradient": (
        lambda: attend(t(1, 1, 2, 8), t(1, 3, 2, 8), t(1, 3, 2, 8)),
        r"attention: k must have as many tokens as q where a gradient is wanted, got T = 1, S = 3; use no_grad",
    ),
    "attention dtypes": (
        lambda: attend(t(1, 4, 2, 8), t(1, 4, 2, 8, dtype=np.float16), t(1, 4, 2, 8)),
        r"attention: q, k, v must share a dtype, got float32, float16, float32; cast",
    ),
    "attention doc_start": (
        lambda: attend(t(1, 4, 2, 8), t(1, 4, 2, 8), t(1, 4, 2, 8), doc_start=i32(4)),
        r"attention: doc_start must be \[B, T\], got shape \[4\]",
    ),
    "attention window": (
        lambda: attend(t(1, 4, 2, 8), t(1, 4, 2, 8), t(1, 4, 2, 8), window=-1),
        r"attention: window must be 0 \(none\) or positive, got -1",
    ),
    "attention softcap": (
        lambda: attend(t(1, 4, 2, 8), t(1, 4, 2, 8), t(1, 4, 2, 8), softcap=-1.0),
        r"attention: softcap must be 0 \(none\) or from 1e-6 to 1e6, got -1.0",
    ),
    "softcap": (lambda: CPU.softcap(f32(3), 0.0), r"softcap: cap must be positive, got 0; without a cap, do not"),
    "loss softcap": (
        lambda: F.linear_cross_entropy(t(3, 4), f32(9, 4), i32(3), softcap=float("nan")),
        r"linear_cross_entropy: softcap must be 0 \(none\) or from 1e-6 to 1e6, got nan",
    ),
    "kv_append long": (
        lambda: CPU.kv_append(f32(1, 4, 2, 8), f32(1, 5, 2, 8), i32(1)),
        r"kv_append: new must fit into the cache of 4 tokens, got 5; make a longer cache",
    ),
    "kv_append dtype": (
        lambda: CPU.kv_append(f32(1, 4, 2, 8), np.ones((1, 2, 2, 8), np.float16), i32(1)),
        r"kv_append: new must have the cache's dtype float32, got float16",
    ),
    "kv_append full": (
        lambda: check_room("kv_append", f32(1, 4, 2, 8), 2, i32(1) + 3),
        r"kv_append: cache_len must leave room for 2 more tokens in the cache of 4, got 3; make a longer cache",
    ),
    "rope_append negative": (
        lambda: check_room("rope_append", f32(1, 4, 2, 8), 3, i32(1) - 1),
        r"rope_append: cache_len must leave .*, got -1",
    ),
    "rope_append long": (
        lambda: append(k=f32(10, 2, 6), v=f32(10, 2, 6), positions=i32(10)),
        r"rope_append: k must fit into the cache of 4 tokens, got 5; make a longer cache",
    ),
    "rope_append rows": (
        lambda: append(k=f32(5, 2, 6), v=f32(5, 2, 6), positions=i32(5)),
        r"rope_append: k must have as many tokens for each of the 2 rows of the cache, got N = 5; append the same",
    ),
    "rope_append v": (lambda: append(v=f32(6, 2, 8)), r"rope_append: v must be \[N, G, D\] with D = 6 from k, got"),
    "rope_append odd": (
        lambda: append(k=f32(6, 2, 5), v=f32(6, 2, 5)),
        r"rope_append: k must have an even head width D .*, got 5",
    ),
    "rope_append table": (
        lambda: append(sin=f32(9, 6)),
        r"rope_append: sin must be \[P, J\] with J = 3.*, got shape \[9, 6\]",
    ),
    "rope_append values": (
        lambda: append(values=f32(2, 5, 2, 6)),
        r"rope_append: values must be \[B, S, G, D\] with S = 4 from keys, got shape \[2, 5, 2, 6\]",
    ),
    "rope_append dtype": (
        lambda: append(values=np.ones((2, 4, 2, 6), np.float16)),
        r"rope_append: values must have the dtype of keys float32, got float16; cast it",
    ),
    # plain
    "add": (lambda: F.add(t(3, 4), t(4, 3)), r"add: b must have the shape of a \[3, 4\], got \[4, 3\]"),
    "mask": (lambda: F.mask(t(3, 4), np.ones((3, 4), bool), 0.0), r"mask: keep must be uint32, got bool"),
    "mask shape": (lambda: F.mask(t(3, 4), np.ones((3, 5), np.uint32), 0.0), r"mask: keep must be \[3, 4\], got"),
    "scale": (lambda: F.scale(t(3), float("inf")), r"scale: alpha must be finite, got inf"),
    "cast": (lambda: F.cast(t(3), np.int8), r"cast: dtype must be float32, float16 or bfloat16, got int8"),
    "bias": (lambda: F.bias(t(3, 4), f32(3)), r"bias: b must be \[C\] with C = 4"),
    "dropout p": (lambda: F.dropout(t(3), 1.5, np.ones(2, np.uint32), 0), r"dropout: p must be in \[0, 1\), got 1.5"),
    "dropout seed": (lambda: F.dropout(t(3), 0.5, i32(2), 0), r"dropout: seed must be uint32, got int32"),
    "dropout stream": (
        lambda: F.dropout(t(3), 0.5, np.ones(2, np.uint32), -1),
        r"dropout: stream must be in \[0, 2\^32\)",
    ),
    "reshape": (
        lambda: t(3, 4).reshape(5, -1),
        r"reshape: shape must hold the 12 elements of \[3, 4\], got \[5, -1\]; one axis may be -1",
    ),
    "reshape twice": (lambda: t(3, 4).reshape(-1, -1), r"reshape: shape must hold the 12 elements"),
    # embedding, loss
    "embedding ids": (
        lambda: F.embedding(t(9, 4), i32(2, 3)),
        r"embedding: ids must be \[N\], got shape \[2, 3\]; flatten",
    ),
    "loss x": (lambda: F.linear_cross_entropy(t(2, 3, 4), f32(9, 4), i32(3)), r"x must be \[N, C\].*flatten batch and"),
    "loss weight": (
        lambda: F.linear_cross_entropy(t(3, 4), f32(4, 9), i32(3)),
        r"linear_cross_entropy: weight must be \[V, C\] with C = 4 .* the output layer is \[vocab, hidden\]",
    ),
    "loss targets": (
        lambda: F.linear_cross_entropy(t(3, 4), f32(9, 4), i32(2)),
        r"linear_cross_entropy: targets must be \[N\] with N = 3 .*one target for each row of x, -100 to ignore it",
    ),
    # optimizer, decoding
    "grad_norm": (
        lambda: CPU.grad_norm(f32(3, 4)),
        r"grad_norm: g must be \[n\], got shape \[3, 4\]; pass the flat",
    ),
    "clip": (
        lambda: CPU.clip(f32(2), f32(3), f32(STATE_SIZE), f32(1), beta1=0.9, beta2=0.99),
        r"clip: hyper must be \[4\], got shape \[3\]",
    ),
    "adamw": (
        lambda: step(g=f32(8)),
        r"adamw: g must be \[n\] with n = 9 from p, got shape \[8\]; all four are",
    ),
    "adamw decay": (lambda: step(decay_elements=10), r"adamw: decay_elements must be between 0 and n = 9, got 10"),
    "sample": (
        lambda: CPU.sample(f32(2, 3, 5), f32(2), f32(2, 4)),
        r"sample: logits must be \[V\], got shape \[2, 3, 5\]",
    ),
    "sample rows": (
        lambda: CPU.sample(f32(2, 5), f32(1), f32(2, 4)),
        r"sample: uniform must be \[B\] with B = 2 from logits",
    ),
    "advance": (
        lambda: CPU.advance(i32(2), f32(4, 2), i32(4, 3), i32(1), i32(2), i32(2), i32(1), f32(2)),
        r"advance: tokens must be \[P, B\] with B = 2 from drawn, got shape \[4, 3\]",
    ),
    "sample settings": (
        lambda: CPU.sample(f32(2, 5), f32(2), f32(1, 4)),
        r"sample: settings must be \[B, 4\] with B = 2 from logits",
    ),
    "sample top_p": (lambda: sample_settings(top_p=0.0), r"sample: top_p must be in \(0, 1\], got 0.0"),
    "sample top_k": (lambda: sample_settings(top_k=-2), r"sample: top_k must be 0 \(off\) or positive"),
    "sample temperature": (lambda: sample_settings(temperature=-1.0), r"sample: temperature must be 0"),
    "sample min_p": (lambda: sample_settings(min_p=1.5), r"sample: min_p must be in \[0, 1\], got 1.5"),
    "parameter": (
        lambda: parameter(f32(3, 4), CPU, f32(4, 3)),
        r"parameter: grad must have the shape of data \[3, 4\], got \[4, 3\]",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_wrong_argument_is_explained(name: str) -> None:
    call, message = BAD[name]
    with pytest.raises(ShapeError, match=message) as caught:
        call()
    assert isinstance(caught.value, WgradError) and isinstance(caught.value, ValueError)
    assert "\n" not in str(caught.value)


def test_right_arguments_pass() -> None:
    """The calls above are wrong in one thing each: put right, they run."""
    F.linear_quantized(t(2, 3, 10), NF4, bias=f32(7), residual=t(2, 3, 7), lora=lora(t(2, 10), t(7, 2)))
    F.rope(t(3, 2, 6), f32(9, 3), f32(9, 3), i32(3))
    attend(t(1, 4, 4, 8), t(1, 4, 2, 8), t(1, 4, 2, 8))
    check_room("kv_append", f32(1, 4, 2, 8), 2, i32(1) + 2)
    CPU.kv_append(f32(1, 4, 2, 8), f32(1, 2, 2, 8), i32(1) + 2)
    append()
    F.linear_cross_entropy(t(3, 4), f32(9, 4), i32(3))
    CPU.clip(f32(2), f32(HYPER_SIZE), f32(STATE_SIZE), f32(1), beta1=0.9, beta2=0.99)
    step()
    CPU.sample(f32(5), f32(1) * 0.5, f32(1, 4))
    CPU.sample(f32(2, 5), f32(2) * 0.5, f32(2, 4))
    CPU.advance(i32(2), f32(4, 2), i32(4, 2), i32(1), i32(2), i32(2), i32(1), f32(2))
    assert t(3, 4).reshape(2, -1).shape == (2, 6)


class _Only32Bits(ReferenceDevice):
    float16 = bfloat16 = False


def test_a_device_without_16_bits_refuses_them_but_for_weights() -> None:
    device = _Only32Bits()
    x = Tensor(np.ones((3, 4), np.float32), device)
    with pytest.raises(ShapeError, match="dtype is float16, which NumPy .* takes for weights only; use float32"):
        F.cast(x, np.float16)
    with pytest.raises(ShapeError, match="x is float16, which"):
        F.silu(Tensor(np.ones((3, 4), np.float16), device))
    with pytest.raises(ShapeError, match="x is bfloat16, which .* takes for weights only; use float32"):
        F.silu(Tensor(np.ones((3, 4), ml_dtypes.bfloat16), device))
    for dtype in (np.float16, ml_dtypes.bfloat16):  # a weight: on every device
        table = Tensor(np.ones((5, 4), dtype), device)
        assert F.embedding(table, np.zeros(3, np.int32)).shape == (3, 4)
    weight = formats()["q4_0"].quantize(np.ones((5, 32), np.float32))  # its scales are float16
    assert device.linear_quantized(np.ones((3, 32), np.float32), weight).shape == (3, 5)
