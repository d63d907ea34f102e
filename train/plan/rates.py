"""Measure the rates of a device that predictions of a step need, and cache them."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from time import perf_counter as _clock
from typing import Any

import numpy as np

from wgrad.device.cache import cache_folder, keep, read_kept
from wgrad.device.contract import Device
from wgrad.device.dry_run import DryRuntime
from wgrad.device.errors import DeviceError, OutOfMemory

_FORMAT, _MOST_BYTES = 3, 1 << 12  # format 2 had matmuls alone, with 16-bit weights
_MOST_RATE = 1e17  # a higher measured rate means that the clock was wrong
ATTENTION_FLOPS = 3.5  # FLOP of attention with its backward, over those of its forward

# A GPU that idles has a sixth of its clock. Matmuls raise it before sizes are chosen, and again before the samples, as
# it falls while kernels compile: for at least and at most so many seconds, until two samples in turn agree.
_WARM_SECONDS, _WARM_AGAIN_SECONDS, _AGREE = (0.25, 0.5), (0.5, 1.0), 0.03
# A rate is the best of three samples. A slow GPU makes no second or third one after so many seconds.
_LEAST_SECONDS, _SAMPLING_SECONDS = 0.05, (1.0, 0.3)
_MOST_CALLS = 1 << 12  # of a sample

# Sizes, of which a GPU gets the first whose call takes `_LONG_SECONDS`, else the last: that of a step of an 8B at batch
# 4. Such a call hides the host's work and fills the GPU.
_LONG_SECONDS = 2e-3
_GEMMS = ((1024, 1024, 1024), (2048, 2048, 2048), (4096, 4096, 4096), (8192, 8192, 4096))  # rows, columns, inner
_HEADS = ((1, 2, 1), (1, 8, 2), (1, 32, 8), (4, 32, 8))  # batch, heads, key heads
_TOKENS = 2048
_COPIES = (8 << 20, 32 << 20, 128 << 20)  # bytes
_ADAPTED = ((1024, 1024), (2048, 2048), (8192, 4096))  # rows, columns
_RANK = 16
_SMALL, _PASSES = 512, 3  # rows and columns of work that takes little longer than its launches; passes next to it
_TIMES = 16  # that short work is recorded

# Matmuls alone draw so much power that many GPUs lower their clock. In a step they take turns with work that waits for
# memory, for about a fourth of their time.
_TURN = 0.25

_of_this_process: dict[str, Rates] = {}  # rates that could not be cached
_not_cached: list[str] = []  # why


@dataclass(frozen=True)
class Rates:
    """Rates of a device. Defaults: those of steps of an 8B and a 1B on an H100 (bench/notes/checkpointing.md).

    Attributes:
        matmul: FLOP/s of matmuls with NF4 weights that are kept dequantized, forward and backward.
        dense: FLOP/s of matmuls with 16-bit weights.
        attention: FLOP/s of attention with its backward, heads of 128.
        narrow: The same, heads of 64.
        adapter: Bytes/s of inputs and gradients that LoRA's matmuls read.
        memory: Bytes/s of device memory.
        link: Bytes/s of copies to main memory.
        projections: Projections/s, forward and backward, of so few elements that only launches take time.
    """

    matmul: float = 314e12
    dense: float = 260e12
    attention: float = 167e12
    narrow: float = 135e12
    adapter: float = 1.36e12
    memory: float = 2.7e12
    link: float = 45e9
    projections: float = 9e3


def rates_of(device: Device, compute: str) -> Rates | None:
    """Return the rates of a GPU, measured once and cached; None for NumPy, software drivers, and planned GPUs.

    Rates that cannot be written to the cache last until the process ends.
    """
    if device.dry_run() is None or device.facts.get("type") in ("CPU", "elsewhere"):
        return None
    what = f"{device.description}; {compute}; {device.fastest_compute}; {_FORMAT}"
    file = _file(what)
    with suppress(OSError, ValueError, TypeError, RecursionError):
        kept = Rates(**json.loads(read_kept(file, _MOST_BYTES)))
        if all(isinstance(rate, float) and 0 < rate <= _MOST_RATE for rate in asdict(kept).values()):
            return kept
    if what in _of_this_process:
        return _of_this_process[what]
    try:
        found = _measured(device, np.dtype(compute))
    except DeviceError:
        return None
    try:
        keep(file, json.dumps(asdict(found)).encode())
    except OSError as error:
        _of_this_process[what] = found
        _not_cached.append(f"the speed of this GPU cannot be cached, so the next command measures it again: {error}")
    return found


def not_cached() -> list[str]:
    """Return remarks for the user about rates that could not be cached, each once."""
    remarks = _not_cached[:]
    _not_cached.clear()
    return remarks


def _file(what: str) -> Path:
    """Return the file of the cache for the rates of a device and dtype."""
    return cache_folder("rates") / f"step-{hashlib.sha256(what.encode()).hexdigest()[:32]}.json"


@dataclass(frozen=True)
class _Work:
    """A call to a device, and its FLOP or bytes."""

    call: Callable[[], Any]
    amount: float


def _measured(device: Any, dtype: np.dtype) -> Rates:
    """Measure all rates, on a GPU that may have idled, and give the memory back."""
    _prepare(device, dtype)
    _warm_up(device, _first_long(device, _frozen_gemms(device, dtype)), *_WARM_SECONDS)
    gemm = _first_long(device, _frozen_gemms(device, dtype))
    rate = _rate(device, gemm)
    dense = _first_long(device, _gemms(device, dtype), rate)
    wide, narrow = (_first_long(device, _attentions(device, dtype, width), rate) for width in (128, 64))
    copy = _first_long(device, _copies(device))
    adapter = _first_long(device, _adapters(device, dtype), _rate(device, copy))
    transfer = None
    if not device.shared_memory and device.host_buffers:
        transfer = _first_long(device, _transfers(device))
    small = _first_long(device, iter([_small(device, dtype)]), 1.0)
    _warm_up(device, gemm, *_WARM_AGAIN_SECONDS)
    memory = _rate(device, copy)
    link = memory if transfer is None else _rate(device, transfer)
    matmul, of_dense = (_rate_in_turns(device, work, rate, copy, memory) for work in (gemm, dense))
    of_wide, of_narrow = (_rate_in_turns(device, work, rate / 2, copy, memory) for work in (wide, narrow))
    of_adapters, of_small = (_rate(device, _recorded(device, work, _TIMES)) for work in (adapter, small))
    del gemm, dense, wide, narrow, copy, adapter, transfer, small
    device.trim()
    device.reset_peak()  # a run states its own peak
    busy = _SMALL**2 * (4.0 * _SMALL / matmul + 3.0 * dtype.itemsize * (1 / of_adapters + _PASSES / memory))
    launches = max(1 / of_small - busy, 0.1 / of_small)
    return Rates(matmul, of_dense, of_wide, of_narrow, of_adapters, memory, link, 1 / launches)


def _prepare(device: Any, dtype: np.dtype) -> None:
    """Compile the kernels of the largest work on several threads."""
    dry = device.dry_run()
    works = _frozen_gemms, _gemms, _adapters, partial(_attentions, width=128), partial(_attentions, width=64)
    for every in works:
        sizes = list[_Work]()
        with suppress(DeviceError):
            sizes += every(dry, dtype)
        for work in reversed(sizes):
            with suppress(DeviceError):  # too large
                work.call()
                break
    _small(dry, dtype).call()
    device.prepare(dry)


def _recorded(device: Any, work: _Work, times: int = 1) -> _Work:
    """Return a recording of work, which costs the host little."""
    with device.capture() as replay:
        for _ in range(times):
            work.call()
    device.synchronize()
    return _Work(replay.run, times * work.amount)


def _rate_in_turns(device: Any, work: _Work, rate: float, copy: _Work, memory: float) -> float:
    """Return the rate of work that takes turns with copies, as in a step.

    rate: about that of the work. memory: that of the copies.
    """
    recorded, each = _recorded(device, work), copy.amount / memory
    copies = round(_TURN * work.amount / rate / each)

    def call() -> None:
        recorded.call()
        for _ in range(copies):
            copy.call()

    seconds = work.amount / _rate(device, _Work(call, work.amount))
    return work.amount / max(seconds - copies * each, seconds / 10)


def _gemms(device: Any, dtype: np.dtype) -> Iterator[_Work]:
    for rows, columns, inner in _GEMMS:
        a, b = _numbers(device, (rows, inner), dtype), _numbers(device, (columns, inner), dtype)
        yield _Work(partial(device.gemm, a, b, trans_b=True, dtype=dtype), 2.0 * rows * columns * inner)


def _frozen_gemms(device: Any, dtype: np.dtype) -> Iterator[_Work]:
    """Yield matmuls with frozen weights, forward and backward."""
    for rows, columns, inner in _GEMMS:
        yield _Work(_frozen_gemm(device, dtype, rows, columns, inner), 4.0 * rows * columns * inner)


def _frozen_gemm(device: Any, dtype: np.dtype, rows: int, columns: int, inner: int) -> Callable[[], None]:
    x, dy = _numbers(device, (rows, inner), dtype), _numbers(device, (rows, columns), dtype)
    weight = _frozen(device, dtype, rows, columns, inner)

    def call() -> None:
        device.linear_quantized(x, weight, dtype=dtype)
        device.linear_quantized_backward(dy, weight, dtype=dtype)

    return call


def _frozen(device: Any, dtype: np.dtype, rows: int, columns: int, inner: int) -> Any:
    """Return an NF4 weight whose dequantized values are kept as long as it lives."""
    weight = device.quantize(_numbers(device, (columns, inner), np.dtype(np.float32)), 64, double=True)
    device.keep_dequantized(weight, rows, dtype)
    return weight


def _attentions(device: Any, dtype: np.dtype, width: int) -> Iterator[_Work]:
    """Yield attention with its backward. width: of a head."""
    none = device.zeros((1,), np.int32)
    for batch, heads, kv_heads in _HEADS:
        q, do = (_numbers(device, (batch, _TOKENS, heads, width), dtype) for _ in range(2))
        k, v = (_numbers(device, (batch, _TOKENS, kv_heads, width), dtype) for _ in range(2))
        starts = device.zeros((batch, _TOKENS), np.int32)
        flops = ATTENTION_FLOPS * attention_flops(batch * _TOKENS, _TOKENS, heads * width)
        yield _Work(partial(_attend, device, do, q, k, v, starts, none), flops)


def _attend(device: Any, do: Any, q: Any, k: Any, v: Any, starts: Any, none: Any) -> None:
    scale = q.shape[3] ** -0.5
    o, lse = device.attention(q, k, v, starts, none, scale=scale)
    device.attention_backward(do, q, k, v, o, lse, starts, scale=scale)


def _adapters(device: Any, dtype: np.dtype) -> Iterator[_Work]:
    """Yield LoRA's matmuls with x [rows, columns] and dy of that shape."""
    for rows, columns in _ADAPTED:
        x, dy = (_numbers(device, (rows, columns), dtype) for _ in range(2))
        adapter = _adapter(device, rows, columns)
        yield _Work(partial(adapter, x, dy), 3.0 * rows * columns * dtype.itemsize)


def _adapter(device: Any, rows: int, columns: int) -> Callable[[Any, Any], None]:
    """Return LoRA's matmuls, called with x and dy."""
    shapes = (_RANK, columns), (columns, _RANK), (rows, _RANK)
    a, b, u = (_numbers(device, shape, np.dtype(np.float32)) for shape in shapes)

    def call(x: Any, dy: Any) -> None:
        device.gemm(x, a, trans_b=True, dtype=np.float32)
        du, _ = device.lora_grads(dy, b, u)
        device.gemm(du, x, trans_a=True, dtype=np.float32)

    return call


def _small(device: Any, dtype: np.dtype) -> _Work:
    """Return the launches of a projection, each of which waits for the one before: its matmuls, those of LoRA, and its
    share of passes over activations."""
    x = _numbers(device, (_SMALL, _SMALL), dtype)
    weight, adapter = _frozen(device, dtype, _SMALL, _SMALL, _SMALL), _adapter(device, _SMALL, _SMALL)

    def call() -> None:
        dx = device.linear_quantized_backward(device.linear_quantized(x, weight, dtype=dtype), weight, dtype=dtype)
        adapter(dx, dx)
        for _ in range(_PASSES):
            dx = device.add(dx, dx)

    return _Work(call, 1.0)


def _copies(device: Any) -> Iterator[_Work]:
    for nbytes in _COPIES:
        a, b = device.zeros((nbytes // 4,)), device.zeros((nbytes // 4,))
        yield _Work(partial(device.copy, a, b), 2.0 * nbytes)


def _transfers(device: Any) -> Iterator[_Work]:
    for nbytes in _COPIES:
        a, host = device.zeros((nbytes // 4,)), device.empty_host((nbytes // 4,))
        yield _Work(partial(device.transfer, a, host), float(nbytes))


def _numbers(device: Any, shape: tuple[int, ...], dtype: np.dtype) -> Any:
    """Return random numbers, as zeros take less power and so run at a higher clock."""
    if isinstance(device, DryRuntime):
        return device.zeros(shape, dtype)
    some = np.random.default_rng(0).standard_normal(1 << 16).astype(dtype)
    return device.upload(np.resize(some, shape))


def _first_long(device: Any, works: Iterator[_Work], rate: float | None = None) -> _Work:
    """Return the first work that takes `_LONG_SECONDS`, else the last that the device takes.

    rate: that it would reach, so that smaller work need not be compiled; without it, the seconds are measured.
    """
    found = list[_Work]()
    with suppress(DeviceError):  # not enough memory
        for work in works:
            if rate is None:
                work.call()  # compiles
                device.synchronize()
            found.append(work)
            if _is_long(device, work) if rate is None else work.amount / rate >= _LONG_SECONDS:
                break
    while rate is not None and found:
        try:
            found[-1].call()
            device.synchronize()
            break
        except DeviceError:
            found.pop()
    if not found:
        raise OutOfMemory("no memory for the smallest work whose rate is measured")
    return found[-1]


def _is_long(device: Any, work: _Work) -> bool:
    """Return whether work takes `_LONG_SECONDS` three times, as other programs make some calls longer."""
    return all(_sample(device, work, 1) >= _LONG_SECONDS for _ in range(3))


def _warm_up(device: Any, work: _Work, least: float, most: float) -> None:
    """Repeat work until the clock no longer rises, for `least` to `most` seconds."""
    begun = _clock()
    count, last = _calls(device, work)
    while _clock() - begun < most:
        seconds = _sample(device, work, count)
        if abs(seconds - last) <= _AGREE * last and _clock() - begun >= least:
            return
        last = seconds


def _rate(device: Any, work: _Work) -> float:
    """Return the FLOP or bytes per second of the best sample."""
    begun = _clock()
    count, best = _calls(device, work)
    for most in _SAMPLING_SECONDS:
        short = 2 * count * best < _LEAST_SECONDS  # the first sample was of another program
        if not short and _clock() - begun >= most:
            break
        if short:
            count, seconds = _calls(device, work)
            best = min(best, seconds)
        best = min(best, _sample(device, work, count))
    return work.amount / best


def _calls(device: Any, work: _Work) -> tuple[int, float]:
    """Return the calls of a sample of `_LEAST_SECONDS`, and the seconds of one call."""
    count = 1
    while True:
        seconds = _sample(device, work, count)
        if count * seconds >= _LEAST_SECONDS or count >= _MOST_CALLS:
            return count, seconds
        count = min(_MOST_CALLS, max(2 * count, math.ceil(_LEAST_SECONDS / seconds)))


def _sample(device: Any, work: _Work, count: int) -> float:
    """Return the seconds of one of `count` calls."""
    begun = _clock()
    for _ in range(count):
        work.call()
    device.synchronize()
    return max(_clock() - begun, 1e-9) / count


def attention_flops(tokens: int, length: int, width: int) -> float:
    """Return the FLOP of a causal forward."""
    return 2.0 * tokens * length * width
