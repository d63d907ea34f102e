"""The contract between autograd and a device: what every device implements, under these names.

A device owns arrays and operators. Shapes, dtypes and errors are checked once, in `schema.py`,
before a device is called; a device never checks them again. The NumPy reference
(`reference.py`) implements all of it and is the oracle for every other device.

Letters: B batch, T query tokens, S key tokens, M N K of a product, H heads, G key/value heads,
D head width, C channels, V vocabulary, R rows, r LoRA rank. Arrays are row-major and contiguous.
An `Array` is whatever the device uses: `np.ndarray` on the reference, `wgsl.buffers.Array` on wgpu;
both have `.shape`, `.dtype` (a NumPy dtype, bfloat16 through ml_dtypes), `.size` and `.nbytes`.

Unless said otherwise an operator reads float32, float16 or (where the device has `bfloat16`) bfloat16
arrays, computes in float32 and returns the dtype named by its `dtype` argument (default: the dtype of
its first array). The reference computes
in the widest dtype it is given, so that float64 inputs give a float64 oracle.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from wgrad.device.formats.nf4 import NF4Array
from wgrad.device.memory import MemoryStats

Array = Any
DType = Any

# Optimiser scalars live on the device, so that a recorded step can be replayed. `hyper` is float32 [4] and written by
# the host each step (max_norm 0: no clipping); `state` is float32 [8] and belongs to the device.
HYPER_LR, HYPER_MAX_NORM, HYPER_GROWTH_INTERVAL = 0, 1, 2
HYPER_SIZE = 4
STATE_APPLIED = 0  # steps applied so far (float32 counts exactly to 2^24)
STATE_GOOD = 1  # steps since the loss scale last changed
STATE_APPLY = 2  # 1: this step is applied, 0: skipped
STATE_FACTOR = 3  # gradients are multiplied by this
STATE_GRAD_NORM = 4  # norm before clipping, loss scale taken out; -1 where a gradient was not finite
STATE_BIAS1, STATE_BIAS2 = 5, 6  # 1 - beta^applied
STATE_SKIPPED = 7  # steps skipped so far
STATE_SIZE = 8


class Readback(Protocol):
    """An array on its way to the host, as it was when `readback` was called."""

    def ready(self) -> bool:
        """True once `result` would not wait."""

    def result(self) -> np.ndarray:
        """Wait for the array. May be called once."""


class Replay(Protocol):
    """A recorded stretch of device work: `run()` submits it again on the same arrays, without Python's graph."""

    dispatches: int

    def run(self) -> None: ...


@runtime_checkable
class Device(Protocol):
    name: str  # "cpu", "wgpu", "hip"
    description: str  # one line for people: card, driver, backend
    facts: dict[str, Any]  # the same for reports: name; where known also backend, type, driver, memory_bytes, ...
    reason: str  # why this one was taken, for people
    float16: bool  # float16 arrays are supported
    bfloat16: bool  # bfloat16 activations are; bfloat16 weights are everywhere

    # ---- storage -------------------------------------------------------------------------
    def empty(self, shape: Sequence[int], dtype: DType = np.float32) -> Array:
        """Uninitialised array; its memory returns to the pool when the last reference goes."""

    def zeros(self, shape: Sequence[int], dtype: DType = np.float32) -> Array: ...

    def upload(self, host: np.ndarray) -> Array:
        """Copy a NumPy array (any dtype; int64 is refused: convert first) to the device."""

    def write(self, array: Array, host: np.ndarray) -> None:
        """Overwrite an array in place (same shape and dtype). The storage stays, so a Replay sees the new values."""

    def download(self, array: Array) -> np.ndarray:
        """Wait for the device and copy an array to the host."""

    def readback(self, array: Array) -> Readback:
        """Start copying an array to the host without waiting; what comes after may overwrite it."""

    def view(self, array: Array, shape: Sequence[int], offset: int = 0) -> Array:
        """Same storage, starting `offset` elements in; writes show in both. A non-zero offset is a multiple of 64."""

    def copy(self, src: Array, out: Array) -> None:
        """out = src; same size and dtype."""

    def fill(self, out: Array, value: float) -> None:
        """out = value, everywhere (float32, or 16 bits)."""

    def synchronize(self) -> None:
        """Wait until all submitted work is done; raise DeviceError if the device was lost on the way."""

    def memory(self) -> MemoryStats: ...

    def reset_peak(self) -> None: ...

    def pipelines_compiled(self) -> int:
        """Pipelines compiled since the device was made (0 on the reference): after the first step it must not grow."""

    def dry_run(self) -> Any:
        """A device of the same operators and memory pool on which nothing runs: work on it shows which kernels this one
        will need (`prepare`) and, by its `memory()`, how much memory. Arrays belong to one of the two; downloads give
        zeros. None where the device has no such thing."""

    def prepare(self, dry: Any, progress: Callable[[int, int], None] | None = None) -> int:
        """Compile the kernels that the work on `dry` needs and that are not compiled yet; -> how many those were.
        progress: called with (done, in all). What does not compile is reported where it is launched."""

    def kernel_caches(self) -> list[Path]:
        """Folders, which need not exist, in which compiled kernels may be kept from one process to the next."""

    def capture(self) -> AbstractContextManager[Any]:
        """Record all device work issued inside the block (it also runs); the block gets a Replay. Arrays made
        inside may be dropped after it: their memory stays reserved for the replay as scratch, and holds nothing
        between replays."""

    def profile(self, on: bool = True) -> bool:
        """Time every launch from now on, which slows them; False where there are no kernels to time. Raises DeviceError
        where the device cannot."""

    def profile_table(self) -> str:
        """Per kernel: calls, total and mean time, share. Empty without `profile()`."""

    # ---- products ------------------------------------------------------------------------
    def gemm(
        self,
        a: Array,
        b: Array,
        *,
        trans_a: bool = False,
        trans_b: bool = False,
        alpha: float = 1.0,
        bias: Array | None = None,
        residual: Array | None = None,
        lowrank: tuple[Array, Array] | None = None,
        out: Array | None = None,
        accumulate: bool = False,
        dtype: DType = None,
    ) -> Array:
        """out = alpha * op(a) op(b) + u op(v) + bias + residual (+ out when `accumulate`).

        a: [M, K] or [K, M] (trans_a); b: [K, N] or [N, K] (trans_b), also bfloat16; a leading batch axis on both
        makes it batched. lowrank = (u [M, r], v): v is [N, r] when trans_b, else [r, N]; the LoRA term.
        bias [N] float32, residual and out [M, N]. Without trans_a and bfloat16 restrictions: any mix is allowed.
        bias, residual and lowrank are for the unbatched product only. dtype: of the result; default: out's, else a's.
        """

    def linear_nf4(
        self,
        x: Array,
        weight: NF4Array,
        *,
        bias: Array | None = None,
        residual: Array | None = None,
        lowrank: tuple[Array, Array] | None = None,
        dtype: DType = None,
    ) -> Array:
        """[M, K] x dequant([N, K])^T + u v^T (u [M, r], v [N, r]) + bias + residual -> [M, N]; default dtype: x's."""

    def linear_nf4_backward(
        self, dy: Array, weight: NF4Array, *, lowrank: tuple[Array, Array] | None = None, dtype: DType = None
    ) -> Array:
        """[M, N] dy x dequant([N, K]) + u v (u [M, r], v [r, K]) -> dx [M, K]; default dtype: dy's."""

    # ---- norms, activations, rotary ------------------------------------------------------
    def rms_norm(self, x: Array, weight: Array, eps: float, *, dtype: DType = None) -> tuple[Array, Array]:
        """x [R, C], weight [C] float32 -> y [R, C] (default dtype: x's), rstd [R] float32; y = x * rstd * weight."""

    def rms_norm_backward(
        self,
        dy: Array,
        x: Array,
        weight: Array,
        rstd: Array,
        *,
        residual_grad: Array | None = None,
        need_dweight: bool = True,
        dtype: DType = None,
    ) -> tuple[Array, Array | None]:
        """-> dx [R, C] (+ residual_grad when given; default dtype: x's), dweight [C] float32 or None."""

    def silu(self, x: Array) -> Array: ...

    def silu_backward(self, dy: Array, x: Array) -> Array: ...

    def gelu(self, x: Array) -> Array:
        """The tanh approximation."""

    def gelu_backward(self, dy: Array, x: Array) -> Array: ...

    def swiglu(self, gate: Array, up: Array) -> Array:
        """silu(gate) * up."""

    def swiglu_backward(self, dy: Array, gate: Array, up: Array) -> tuple[Array, Array]:
        """-> dgate, dup."""

    def geglu(self, gate: Array, up: Array) -> Array:
        """gelu(gate) * up."""

    def geglu_backward(self, dy: Array, gate: Array, up: Array) -> tuple[Array, Array]: ...

    def rope(self, x: Array, cos: Array, sin: Array, positions: Array, *, inverse: bool = False) -> Array:
        """x [N, H, D]; cos, sin float32 [P, D/2] (scaling and its factor are in the table); positions int32 [N].
        Half-split: element i pairs with i + D/2. `inverse` rotates back: that is the backward."""

    # ---- attention -----------------------------------------------------------------------
    def attention(
        self,
        q: Array,
        k: Array,
        v: Array,
        doc_start: Array,
        cache_len: Array,
        *,
        scale: float,
        window: int = 0,
    ) -> tuple[Array, Array]:
        """q [B, T, H, D], k v [B, S, G, D] (H a multiple of G) -> o [B, T, H, D] (q's dtype), lse float32 [B, H, T].

        Query t stands at key index i = cache_len[0] + t (cache_len int32 [1]; 0 in training, the cache length in
        decoding) and sees keys j with doc_start[b, t] <= j <= i, and i - j < window where window > 0.
        doc_start int32 [B, T]: first key index of the query's document (packing); rising within a row.
        """

    def attention_backward(
        self,
        do: Array,
        q: Array,
        k: Array,
        v: Array,
        o: Array,
        lse: Array,
        doc_start: Array,
        *,
        scale: float,
        window: int = 0,
    ) -> tuple[Array, Array, Array]:
        """-> dq, dk, dv (shapes and dtypes of q, k, v). T = S and cache_len = 0. Deterministic."""

    def kv_append(self, cache: Array, new: Array, cache_len: Array) -> None:
        """cache [B, S, G, D] in place: cache[:, cache_len[0] : cache_len[0] + T] = new [B, T, G, D]. A token that would
        lie past S is left out (`schema.py` refuses it where the host knows cache_len)."""

    def rope_append(
        self, k: Array, v: Array, cos: Array, sin: Array, positions: Array, keys: Array, values: Array, cache_len: Array
    ) -> None:
        """`rope` of k, and `kv_append` of that and of v, in one launch; keys and values in place:
        keys[:, cache_len[0] : cache_len[0] + T] = rope(k), values[...] = v. k, v [B T, G, D]; keys, values
        [B, S, G, D]; all of one dtype; cos, sin, positions [B T] as in `rope`. For decoding: there is no backward."""

    # ---- softmax family, plain operators -------------------------------------------------
    def softmax(self, x: Array) -> Array:
        """Over the last axis of [R, C]."""

    def softmax_backward(self, dy: Array, y: Array) -> Array: ...

    def mask(self, x: Array, keep: Array, value: float) -> Array:
        """x where keep (uint32, same shape) is non-zero, else value."""

    def add(self, a: Array, b: Array, *, out: Array | None = None) -> Array:
        """a + b, same shape; out may be a or b."""

    def mul(self, a: Array, b: Array) -> Array: ...

    def scale(self, x: Array, alpha: float) -> Array: ...

    def scale_by(self, x: Array, factor: Array) -> Array:
        """x * factor[0], factor float32 [1] on the device."""

    def cast(self, x: Array, dtype: DType) -> Array:
        """float32, float16 (and from bfloat16)."""

    def bias(self, x: Array, b: Array) -> Array:
        """x [R, C] + b [C]."""

    def sum_rows(self, x: Array, *, out: Array | None = None, accumulate: bool = False) -> Array:
        """[R, C] -> float32 [C]; the backward of bias."""

    def sum(self, x: Array) -> Array:
        """All elements -> float32 [1]."""

    def dropout(self, x: Array, p: float, seed: Array, stream: int) -> Array:
        """Keep with probability 1 - p and divide by 1 - p. Keep bit of element i: counter-based, from
        (i, stream, seed uint32 [2]) by Philox-4x32-10, the same on every device. Its own backward."""

    # ---- embedding, loss -----------------------------------------------------------------
    def embedding(self, table: Array, ids: Array, *, dtype: DType = np.float32) -> Array:
        """table [V, C] float32, float16 or bfloat16, ids int32 [N] -> [N, C]."""

    def embedding_backward(self, dy: Array, ids: Array, vocab_size: int) -> Array:
        """-> dtable float32 [V, C]. Deterministic."""

    def linear_cross_entropy(
        self, x: Array, weight: Array, targets: Array, *, need_dx: bool = True, need_dweight: bool = False
    ) -> tuple[Array, Array | None, Array | None]:
        """x [N, C], weight [V, C] (float32, float16, bfloat16), targets int32 [N], -100 ignored ->
        loss float32 [1] (sum over targets of -log softmax(x weight^T)), dx [N, C] float32, dweight [V, C] float32.
        Logits stand in memory only a chunk of tokens (and of vocabulary) at a time."""

    # ---- NF4 -----------------------------------------------------------------------------
    def nf4_quantize(self, w: Array, block_size: int = 64, *, double: bool = False) -> Any:
        """w [out, in] float32, float16 or bfloat16 -> an object with the fields of NF4Array, value-compatible with
        bitsandbytes."""

    def nf4_dequantize(self, w: NF4Array, dtype: DType = np.float32) -> Array: ...

    # ---- optimiser: all trainable parameters in one flat float32 buffer ---------------------
    def grad_norm(self, g: Array) -> Array:
        """float32 [2]: sum of squares of the finite elements, number of elements that are not finite."""

    def clip(self, norm: Array, hyper: Array, state: Array, loss_scale: Array, *, beta1: float, beta2: float) -> None:
        """One thread, in place on `state` and `loss_scale` (float32 [1]); layouts above (HYPER_*, STATE_*). Works out
        the factor for the gradients (loss scale taken out, clipped to max_norm) and the bias corrections; skips the
        step when a gradient is not finite; adjusts the dynamic loss scale (halve at a skip, down to 1; double after
        growth_interval good steps, up to 65536; growth_interval 0: it stays)."""

    def adamw(
        self,
        p: Array,
        g: Array,
        exp_avg: Array,
        exp_avg_sq: Array,
        hyper: Array,
        state: Array,
        *,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        decay_elements: int,
    ) -> None:
        """In place on p, exp_avg, exp_avg_sq (float32 [n]). Decoupled weight decay on the first `decay_elements`.
        Nothing changes where state[STATE_APPLY] is 0."""

    # ---- decoding ------------------------------------------------------------------------
    def sample(self, logits: Array, uniform: Array, *, temperature: float, top_k: int, top_p: float) -> Array:
        """logits float32 [V], uniform float32 [1] in [0, 1) -> id int32 [1]. temperature 0 is greedy (lowest id on a
        tie). top_k 0 and top_p 1 are off. Order as in transformers: temperature, top-k, top-p; a value tied with the
        k-th is kept; then inverse of the cumulative distribution in id order."""
