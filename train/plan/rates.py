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
from wgrad.device.errors import DeviceError

_FORMAT, _MOST_BYTES = 2, 1 << 12  # format 1 had rates of idle clocks and of short launches
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
_TOKENS, _HEAD_DIM = 2048, 128
_COPIES = (8 << 20, 32 << 20, 128 << 20)  # bytes

_of_this_process: dict[str, Rates] = {}  # rates that could not be cached
_not_cached: list[str] = []  # why


@dataclass(frozen=True)
class Rates:
    """Rates of a device: FLOP/s of matmuls and attention, bytes/s of device memory and of copies to main memory.

    Defaults: those of a step of an 8B at batch 4 on an H100 (bench/notes/checkpointing.md).
    """

    matmul: float = 290e12
    attention: float = 150e12
    memory: float = 2.5e12
    link: float = 45e9


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
    _warm_up(device, _first_long(device, _gemms(device, dtype)), *_WARM_SECONDS)
    gemm = _first_long(device, _gemms(device, dtype))
    attention = _first_long(device, _attentions(device, dtype), _rate(device, gemm))
    copy = _first_long(device, _copies(device))
    transfer = None
    if not device.shared_memory and device.host_buffers:
        transfer = _first_long(device, _transfers(device))
    _warm_up(device, gemm, *_WARM_AGAIN_SECONDS)
    memory = _rate(device, copy)
    link = memory if transfer is None else _rate(device, transfer)
    found = Rates(_rate(device, gemm), _rate(device, attention), memory, link)
    del gemm, attention, copy, transfer
    device.trim()
    return found


def _gemms(device: Any, dtype: np.dtype) -> Iterator[_Work]:
    for rows, columns, inner in _GEMMS:
        a, b = _numbers(device, (rows, inner), dtype), _numbers(device, (columns, inner), dtype)
        yield _Work(partial(device.gemm, a, b, trans_b=True, dtype=dtype), 2.0 * rows * columns * inner)


def _attentions(device: Any, dtype: np.dtype) -> Iterator[_Work]:
    """Yield attention with its backward."""
    none = device.zeros((1,), np.int32)
    for batch, heads, kv_heads in _HEADS:
        q, do = (_numbers(device, (batch, _TOKENS, heads, _HEAD_DIM), dtype) for _ in range(2))
        k, v = (_numbers(device, (batch, _TOKENS, kv_heads, _HEAD_DIM), dtype) for _ in range(2))
        starts = device.zeros((batch, _TOKENS), np.int32)
        flops = ATTENTION_FLOPS * attention_flops(batch * _TOKENS, _TOKENS, heads * _HEAD_DIM)
        yield _Work(partial(_attend, device, do, q, k, v, starts, none), flops)


def _attend(device: Any, do: Any, q: Any, k: Any, v: Any, starts: Any, none: Any) -> None:
    scale = _HEAD_DIM**-0.5
    o, lse = device.attention(q, k, v, starts, none, scale=scale)
    device.attention_backward(do, q, k, v, o, lse, starts, scale=scale)


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
    some = np.random.default_rng(0).standard_normal(1 << 16).astype(dtype)
    return device.upload(np.resize(some, shape))


def _first_long(device: Any, works: Iterator[_Work], rate: float | None = None) -> _Work:
    """Return the first work that takes `_LONG_SECONDS`, else the last that the device takes.

    rate: that it would reach; without it, the seconds are measured.
    """
    found = None
    try:
        for work in works:
            work.call()  # compiles
            device.synchronize()
            found = work
            if _is_long(device, work) if rate is None else work.amount / rate >= _LONG_SECONDS:
                break
    except DeviceError:  # not enough memory
        if found is None:
            raise
    assert found is not None
    return found


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
        count, seconds = _calls(device, work) if short else (count, _sample(device, work, count))
        best = min(best, seconds)
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
