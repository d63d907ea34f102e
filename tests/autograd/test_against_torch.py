"""The reference in float64 against torch in float64, values and gradients."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest

from tests.autograd.self_test_calls import self_test_calls
from tests.tools import oracle_package
from wgrad.autograd import functional as F
from wgrad.autograd.ops.decoding import sample_settings
from wgrad.autograd.reference import ReferenceDevice
from wgrad.autograd.tensor import Tensor

torch = oracle_package("torch")
nn = oracle_package("torch.nn.functional")
pytestmark = pytest.mark.oracle

# Both sides round in float64; sums of a few hundred terms lose two or three digits of the sixteen.
LIMIT = 1000 * np.finfo(np.float64).eps


def compare(ours: Callable[..., Tensor], theirs: Callable[..., Any], *shapes: tuple[int, ...], seed: int = 0) -> None:
    """The result and the gradient of every input, under a random gradient from above."""
    rng = np.random.default_rng(seed)
    arrays = [rng.standard_normal(shape) for shape in shapes]
    device = ReferenceDevice()
    leaves = [Tensor(a.copy(), device, requires_grad=True) for a in arrays]
    tensors = [torch.tensor(a, requires_grad=True) for a in arrays]
    y, z = ours(*leaves), theirs(*tensors)
    dy = rng.standard_normal(y.shape)
    y.backward(dy)
    z.reshape(y.shape).backward(torch.tensor(dy))
    close(y.numpy(), z.detach().numpy().reshape(y.shape))
    for leaf, tensor in zip(leaves, tensors):
        close(leaf.gradient, tensor.grad.numpy())


def close(ours: Any, theirs: np.ndarray) -> None:
    assert ours.dtype == np.float64 and ours.shape == theirs.shape
    assert np.abs(ours - theirs).max() <= LIMIT * max(1.0, np.abs(theirs).max())


def test_linear_is_torchs() -> None:
    compare(lambda x, w, b: F.linear(x, w, bias=b), nn.linear, (2, 7, 41), (13, 41), (13,))


@cache
def peers() -> dict[str, Callable[..., Any]]:
    """Return torch's functions for the self-test's calls, by the name of ours, if they take all of our arguments.

    Arguments that only torch needs depend on x.
    """
    found = {}
    for name, call in self_test_calls().items():
        try:
            takes = inspect.signature(getattr(nn, name)).parameters
        except (AttributeError, ValueError):  # torch has none of this name, or does not say what it takes
            continue
        names = [{"x": "input"}.get(n, n) for n in call.tensors]
        if {*names, *call.constants} <= takes.keys():

            def theirs(x: Any, *more: Any, call: Any = call, names: Any = names, takes: Any = takes) -> Any:
                beside = {"normalized_shape": x.shape[-1:], "dim": -1}
                given = {**dict(zip(names, (x, *more))), **call.constants}
                return getattr(nn, call.function.__name__)(**given, **{n: v for n, v in beside.items() if n in takes})

            found[name] = theirs
    return found


PEERS = ("layer_norm", "rms_norm", "silu", "softmax")


def test_an_operator_finds_its_peer() -> None:
    assert sorted(peers()) == sorted(PEERS), "PEERS lists them, so that torch is imported only where a test runs"


@pytest.mark.parametrize("name", PEERS)
def test_calls_of_the_self_test_equal_their_torch_peers(name: str) -> None:
    """With an axis more in front of x: nothing here is of one matrix alone."""
    call = self_test_calls()[name]
    x, *more = call.tensors.values()
    compare(call.on(lambda a: a, np.float64), peers()[name], (2, *x), *more)


def test_gelu_is_torchs_with_tanh() -> None:
    compare(F.gelu, lambda x: nn.gelu(x, approximate="tanh"), (7, 41))


def test_swiglu_is_torchs_silu_times_up() -> None:
    compare(F.swiglu, lambda g, u: nn.silu(g) * u, (7, 41), (7, 41))


def test_geglu_is_torchs_gelu_times_up() -> None:
    compare(F.geglu, lambda g, u: nn.gelu(g, approximate="tanh") * u, (7, 41), (7, 41))


def test_embedding_is_torchs() -> None:
    ids = np.array([1, 6, 1, 0, 6, 6], np.int32)
    compare(lambda t: F.embedding(t, ids, dtype=np.float64), lambda t: nn.embedding(torch.tensor(ids), t), (7, 13))


def test_rope_is_transformers() -> None:
    """Half-split, as transformers' Llama applies it."""
    llama = pytest.importorskip("transformers.models.llama.modeling_llama", reason="transformers is not installed")
    angle = np.outer(np.arange(50), 10000.0 ** (-np.arange(6) / 6))
    positions = np.array([[3, 0, 49, 7, 7]], np.int32)
    cos, sin = (torch.tensor(np.tile(f(angle), 2)[positions]) for f in (np.cos, np.sin))

    def theirs(x: Any) -> Any:
        return llama.apply_rotary_pos_emb(x[None].transpose(1, 2), x[None].transpose(1, 2), cos, sin)[0].transpose(1, 2)

    compare(lambda x: F.rope(x, np.cos(angle), np.sin(angle), positions[0]), theirs, (5, 3, 12))


@pytest.mark.parametrize("window", [0, 1, 5])
@pytest.mark.parametrize("heads, groups", [(4, 4), (6, 2), (3, 1)])
def test_attention_is_torchs_with_a_mask(heads: int, groups: int, window: int) -> None:
    doc_start = np.zeros((2, 23), np.int32)
    doc_start[0, 4:], doc_start[0, 17:], doc_start[1, 9:] = 4, 17, 9
    i, j = np.arange(23)[:, None], np.arange(23)
    seen = (j <= i) & (j >= doc_start[:, :, None]) & ((i - j < window) if window else True)

    def theirs(q: Any, k: Any, v: Any) -> Any:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        k, v = (x.repeat_interleave(heads // groups, dim=1) for x in (k, v))
        mask = torch.tensor(seen)[:, None]
        return nn.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.3).transpose(1, 2)

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.attention(q, k, v, doc_start, np.zeros(1, np.int32), scale=0.3, window=window)

    compare(ours, theirs, (2, 23, heads, 12), (2, 23, groups, 12), (2, 23, groups, 12))


def test_attention_on_a_cache_equals_the_whole() -> None:
    """The last tokens alone, with cache_len, give the last rows of the whole; lse too."""
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((1, 23, 4, 8)), *rng.standard_normal((2, 1, 23, 2, 8))
    doc_start, device = np.zeros((1, 23), np.int32), ReferenceDevice()
    whole = device.attention(q, k, v, doc_start, np.zeros(1, np.int32), scale=0.3, window=6)
    cache_k, cache_v = (np.concatenate([x, np.full((1, 9, 2, 8), 1e6)], axis=1) for x in (k, v))
    late = (doc_start[:, 20:], np.array([20], np.int32))
    tail = device.attention(q[:, 20:], cache_k, cache_v, *late, scale=0.3, window=6)
    close(tail[0], whole[0][:, 20:])
    close(tail[1], whole[1][..., 20:])


def test_linear_cross_entropy_is_torchs() -> None:
    targets = np.array([0, -100, 30, 7, 7, -100, 2], np.int32)

    def theirs(x: Any, w: Any, b: Any = 0.0) -> Any:
        return nn.cross_entropy(x @ w.T + b, torch.tensor(targets).long(), ignore_index=-100, reduction="sum")

    compare(lambda x, w: F.linear_cross_entropy(x, w, targets), theirs, (7, 13), (31, 13))
    compare(lambda x, w, b: F.linear_cross_entropy(x, w, targets, bias=b), theirs, (7, 13), (31, 13), (31,))


def test_adamw_with_clipping_is_torchs() -> None:
    """Five steps with clipping and decay on a part, against torch.optim.AdamW."""
    rng, device = np.random.default_rng(0), ReferenceDevice()
    start, decayed = rng.standard_normal(23), 13
    options = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8}
    parts = [torch.tensor(start[:decayed], requires_grad=True), torch.tensor(start[decayed:], requires_grad=True)]
    groups = [{"params": [parts[0]], "weight_decay": 0.1}, {"params": [parts[1]], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.03, betas=(0.9, 0.95), eps=1e-8)
    p, m, v, state = start.copy(), np.zeros(23), np.zeros(23), np.zeros(8)
    hyper, loss_scale = np.array([0.03, 1.0, 0, 0]), np.array([4.0])
    for _ in range(5):
        g = rng.standard_normal(23)
        for part, value in zip(parts, (g[:decayed], g[decayed:])):
            part.grad = torch.tensor(value)
        norm = torch.nn.utils.clip_grad_norm_(parts, 1.0)
        optimizer.step()
        scaled = g * 4.0
        device.clip(device.grad_norm(scaled), hyper, state, loss_scale, beta1=0.9, beta2=0.95)
        device.adamw(p, scaled, m, v, hyper, state, weight_decay=0.1, decay_elements=decayed, **options)
        assert abs(state[4] - float(norm)) < 1e-12
    close(p, torch.cat(parts).detach().numpy())


def test_sampling_filters_keep_what_transformers_keeps() -> None:
    """The set of tokens that top-k, top-p and min-p leave, against transformers' warpers."""
    logits_process = pytest.importorskip("transformers.generation.logits_process", reason="transformers is missing")
    rng, device = np.random.default_rng(0), ReferenceDevice()
    for temperature, k, p, least in (
        (1.0, 5, 1.0, 0.0), (0.7, 0, 0.8, 0.0), (1.3, 9, 0.6, 0.0), (1.0, 30, 0.99, 0.0), (0.8, 0, 0.9, 0.2),
        (1.2, 0, 1.0, 0.05),
    ):  # fmt: skip
        logits = rng.standard_normal(30).astype(np.float32)
        scores = logits_process.TemperatureLogitsWarper(temperature)(None, torch.tensor(logits)[None])
        if k:
            scores = logits_process.TopKLogitsWarper(k)(None, scores)
        if p < 1:
            scores = logits_process.TopPLogitsWarper(p)(None, scores)
        if least:
            scores = logits_process.MinPLogitsWarper(least)(None, scores)
        theirs = set(np.flatnonzero(np.isfinite(scores[0].numpy())))
        uniforms = np.linspace(0, 0.99999, 3000, dtype=np.float32)
        settings = sample_settings(temperature, k, p, least)[None]
        ours = {int(device.sample(logits, np.array([u]), settings)[0]) for u in uniforms}
        assert ours == theirs
