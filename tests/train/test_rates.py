"""Rates of a device: sizes, the warm-up of a GPU that idled, how long it takes, and the cache."""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

import numpy as np
import pytest

from tests.train.conftest import choose_card
from wgrad.autograd.reference import ReferenceDevice
from wgrad.device.errors import OutOfMemory
from wgrad.train.commands.bench_model import SHAPES
from wgrad.train.commands.cli import main
from wgrad.train.model.load_config import parse_model_config
from wgrad.train.options.finetune_config import RunOptions
from wgrad.train.plan import rates
from wgrad.train.plan.rates import Rates, not_cached, rates_of
from wgrad.train.plan.speed import step_seconds

_IDLE, _WARM_AFTER = 0.17, 0.3  # clock of an idle GPU over its highest; seconds of work until that
_COMPILES, _WAITS, _OTHERS = 0.8, 2e-4, 0.03  # seconds; the last: for another program, in every third wait


@dataclass(eq=False)
class Memory:
    shape: tuple[int, ...]
    nbytes: int


class Gpu:
    """A GPU with a clock of its own. Its rates rise with work, and fall while it idles as kernels compile."""

    fastest_compute, shared_memory, host_buffers = "float16", False, True
    others, host_seconds = _OTHERS, 0.0  # the last: of a call that is not recorded

    def __init__(self, peak: Rates, memory: float = math.inf) -> None:
        self.peak, self.facts, self.description = peak, {"type": "DiscreteGPU"}, "a GPU"
        self.now = self._queued = self._busy = 0.0
        self._memory, self._known = memory, set[str]()
        self.calls, self.trimmed, self.reset, self._waits = list[tuple[str, float]](), 0, 0, 0
        self._arrays = WeakSet[Memory]()
        self.late = lambda wait: self.others * (wait % 3 == 0)  # seconds for other programs in a wait
        self.factor = lambda busy: min(1.0, _IDLE + (1 - _IDLE) * busy / _WARM_AFTER)
        self.compiling = 0.0  # seconds
        self.cap = lambda name: 1.0  # of the clock, by power
        self.kept = WeakSet[Memory]()
        self._recording: list[tuple[str, float]] | None = None
        self._least = 1 / peak.projections / 8  # seconds of a launch

    def dry_run(self) -> Any:
        return Gpu(self.peak)

    def prepare(self, dry: Any) -> None:
        """Compile at once what the dry run launched."""
        self._known |= dry._known
        self._compile()

    def _compile(self) -> None:
        self.compiling += _COMPILES
        self.now, self._busy = self.now + _COMPILES, 0.0

    def zeros(self, shape: tuple[int, ...], dtype: Any = np.float32) -> Any:
        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        if nbytes > self._memory:
            raise OutOfMemory("no memory")
        array = Memory(shape, nbytes)
        self._arrays.add(array)
        return array

    empty_host = zeros

    def upload(self, host: np.ndarray) -> Any:
        assert np.ptp(host.flat[:100]) > 0  # zeros would take less power
        return self.zeros(host.shape, host.dtype)

    def _work(self, name: str, seconds: float) -> None:
        if name not in self._known:
            self._known.add(name)
            self._compile()
        self.host(self.host_seconds)
        if self._recording is not None:
            self._recording.append((name, seconds))
        self._run(name, seconds)

    def _run(self, name: str, seconds: float) -> None:
        seconds = max(seconds, self._least if name.startswith("linear") else 0.0)
        seconds /= self.factor(self._busy) * self.cap(name)
        self.calls.append((name, seconds))
        self._queued, self._busy = self._queued + seconds, self._busy + seconds

    def host(self, seconds: float) -> None:
        """The host works, while the device does what is queued."""
        self.now += seconds
        self._queued = max(self._queued - seconds, 0.0)

    @contextmanager
    def capture(self) -> Iterator[Any]:
        recorded = self._recording = list[tuple[str, float]]()

        def run() -> None:
            for name, seconds in recorded:
                self._run(name, seconds)

        yield SimpleNamespace(run=run)
        self._recording = None

    def gemm(self, a: Any, b: Any, trans_a: bool = False, trans_b: bool = False, dtype: Any = None) -> None:
        large = max(a.nbytes, b.nbytes)
        if min(a.shape[0], b.shape[0], a.shape[1]) > 16:
            self._work("gemm", 2.0 * a.shape[0] * a.shape[1] * b.shape[0] / self.peak.dense)
        else:
            self._work(f"lora {trans_a}", max(large / self.peak.adapter, self._least))

    def quantize(self, numbers: Any, block: int, double: bool) -> Any:
        return self.zeros(numbers.shape, np.uint8)

    def keep_dequantized(self, weight: Any, rows: int, dtype: Any) -> None:
        self.kept.add(weight)

    def linear_quantized(self, x: Any, weight: Any, dtype: Any) -> Any:
        assert weight in self.kept and x.shape[1] == weight.shape[1]
        self._work("linear", 2.0 * x.shape[0] * math.prod(weight.shape) / self.peak.matmul)
        return Memory((x.shape[0], weight.shape[0]), 2 * x.shape[0] * weight.shape[0])

    def linear_quantized_backward(self, dy: Any, weight: Any, dtype: Any) -> Any:
        assert weight in self.kept and dy.shape[1] == weight.shape[0]
        self._work("linear_backward", 2.0 * dy.shape[0] * math.prod(weight.shape) / self.peak.matmul)
        return Memory((dy.shape[0], weight.shape[1]), 2 * dy.shape[0] * weight.shape[1])

    def lora_grads(self, dy: Any, b: Any, u: Any) -> tuple[Any, None]:
        self._work("lora_grads", max(dy.nbytes / self.peak.adapter, self._least))
        return self.zeros(u.shape), None

    def add(self, a: Any, b: Any) -> Any:
        self._work("add", max(3.0 * a.nbytes / self.peak.memory, self._least))
        return a

    def attention(self, q: Any, k: Any, v: Any, *_: Any, scale: float) -> tuple[None, None]:
        batch, tokens, heads, width = q.shape
        assert k.shape == v.shape == (batch, tokens, k.shape[2], width) and k.shape[2] < heads
        self._attend("attention", 2.0 * batch * tokens * tokens * heads * width, width)
        return None, None

    def attention_backward(self, do: Any, q: Any, *rest: Any, scale: float) -> None:
        batch, tokens, heads, width = q.shape
        self._attend("attention_backward", 5.0 * batch * tokens * tokens * heads * width, width)

    def _attend(self, name: str, flops: float, width: int) -> None:
        self._work(name, flops / (self.peak.attention if width > 64 else self.peak.narrow))

    def copy(self, a: Any, b: Any) -> None:
        self._work("copy", 2.0 * a.nbytes / self.peak.memory)

    def transfer(self, a: Any, host: Any) -> None:
        self._work("transfer", a.nbytes / self.peak.link)

    def synchronize(self) -> None:
        self._waits += 1
        self.now += self._queued + _WAITS + self.late(self._waits)
        self._queued = 0.0

    def trim(self) -> int:
        assert not self._arrays  # else their memory stays
        self.trimmed += 1
        return 0

    def reset_peak(self) -> None:
        self.reset = self.trimmed


def measured(gpu: Any, patch: pytest.MonkeyPatch) -> Rates:
    patch.setattr(rates, "_clock", lambda: gpu.now)
    return rates._measured(gpu, np.dtype(np.float16))


def scaled(factor: float) -> Rates:
    """The rates of a GPU that is so much faster than an H100, with launches that take as long."""
    return replace(Rates(**{name: factor * rate for name, rate in asdict(Rates()).items()}), projections=9e3)


def of_peak(found: Rates, gpu: Gpu) -> list[float]:
    return [rate / peak for rate, peak in zip(asdict(found).values(), asdict(gpu.peak).values())]


# ---- the measurement ----------------------------------------------------------------------------
@pytest.mark.parametrize(("scale", "seconds"), [(1.0, 5.5), (0.1, 5.5), (1e-3, 7.0)])  # 314, 31 and 0.31 TFLOP/s
def test_the_rates_of_a_gpu_that_idled_are_those_of_its_full_clock(
    scale: float, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = Gpu(scaled(scale))
    *found, projections = of_peak(measured(gpu, monkeypatch), gpu)
    assert found == pytest.approx([1.0] * 7, rel=0.03)
    assert projections == pytest.approx(1.0, rel=0.06) if scale == 1.0 else 0.2 < projections < 2.0
    assert gpu.now - gpu.compiling < seconds and gpu.trimmed == gpu.reset == 1
    assert gpu.compiling <= 3 * _COMPILES  # most kernels at once


def test_matmuls_have_the_clock_that_they_have_in_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone they draw more power than in turns with other work, so that their clock is lower."""
    gpu = Gpu(Rates())

    def cap(name: str) -> float:
        matmuls = {"gemm", "linear", "linear_backward"}
        last = gpu.calls[-40:]
        share = sum(seconds for called, seconds in last if called in matmuls) / sum(seconds for _, seconds in last)
        return 0.85 if name in matmuls and share > 0.9 else 1.0

    gpu.factor = lambda busy: 1.0
    gpu.cap = lambda name: cap(name) if gpu.calls else 1.0
    assert of_peak(measured(gpu, monkeypatch), gpu) == pytest.approx([1.0] * 8, rel=0.06)


def test_the_host_does_not_slow_short_work_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recorded, a call takes it hardly any time."""
    gpu = Gpu(Rates())
    gpu.host_seconds = 9e-5  # longer than any call of LoRA or of a small matmul
    assert of_peak(measured(gpu, monkeypatch), gpu) == pytest.approx([1.0] * 8, rel=0.06)


@pytest.mark.parametrize(
    "idle, warm, seconds",
    [(0.0, 0.1, 4.2), (0.5, 0.5, 4.4), (0.0, 0.9, 4.6)],  # of work at the lowest clock, and until the highest
    ids=["soon", "at once but late", "slowly"],
)
def test_a_warm_up_lasts_until_the_clock_no_longer_rises(
    idle: float, warm: float, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = Gpu(Rates())
    gpu.others = 0.0
    gpu.factor = lambda busy: 1.0 if busy >= warm else _IDLE + (1 - _IDLE) * max(busy - idle, 0.0) / warm
    assert of_peak(measured(gpu, monkeypatch), gpu) == pytest.approx([1.0] * 8, rel=0.06)
    assert gpu.now - gpu.compiling < seconds


@pytest.mark.parametrize("every, seconds", [(5, 0.4), (4, 0.4), (4, 0.06), (5, 0.004)])
def test_other_programs_change_neither_sizes_nor_rates(
    every: int, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One wait of some takes longer than a sample, or than what makes a size long, whichever wait comes first."""
    monkeypatch.setattr(rates, "_numbers", lambda device, shape, dtype: device.zeros(shape, dtype))
    found = list[dict[str, float]]()
    for begin in range(every + 1):
        gpu = Gpu(scaled(0.3))
        gpu.factor = lambda busy: 1.0
        gpu.late = partial(lambda begin, wait: seconds * (wait % every == begin), begin)  # at last in none
        *rates_found, projections = of_peak(measured(gpu, monkeypatch), gpu)
        assert rates_found == pytest.approx([1.0] * 7, rel=0.03), begin
        assert projections == pytest.approx(1.16, rel=0.03)  # launches hide a part of the work
        found.append(dict(gpu.calls))
    assert all(calls == pytest.approx(found[-1], rel=0.01) for calls in found)


@pytest.mark.parametrize("late", [{1}, {2}, {3}, {1, 2}])
def test_short_work_that_waits_for_another_program_is_short(late: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(Rates())
    monkeypatch.setattr(rates, "_clock", lambda: gpu.now)
    gpu.factor = lambda busy: 1.0
    gpu.late = lambda wait: 0.4 * (wait in late)
    work = next(iter(rates._copies(gpu)))
    work.call()
    gpu.synchronize()
    gpu._waits = 0
    assert not rates._is_long(gpu, work)
    gpu._waits = 0
    assert len(late) > 1 or rates._rate(gpu, work) == pytest.approx(gpu.peak.memory, rel=0.02)


def test_a_gpu_gets_work_of_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large GPU has calls that fill it, a slow one none that take long."""
    large, slow = Gpu(Rates()), Gpu(Rates(5e10, 5e10, 2e10, 2e10, 5e9, 1e10, 2e9))
    large.others = 0.0  # a wait would make a short call long
    for gpu in (large, slow):
        measured(gpu, monkeypatch)
    for name in ("gemm", "attention_backward"):
        assert max(seconds for called, seconds in large.calls if called == name) > 1.5e-3, name
    assert max(seconds for _, seconds in slow.calls) < 2.0 and slow.now < 20


@pytest.mark.parametrize("name, value", [("shared_memory", True), ("host_buffers", False)])
def test_what_cannot_be_copied_to_the_host_is_not_measured(
    name: str, value: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = Gpu(Rates())
    setattr(gpu, name, value)
    found = measured(gpu, monkeypatch)
    assert found.link == found.memory and "transfer" not in gpu._known


def test_a_clock_that_never_settles_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(Rates())
    gpu.factor = lambda busy: 0.6 + 0.4 * math.sin(40 * gpu.now)
    measured(gpu, monkeypatch)
    assert gpu.now - gpu.compiling < 6.0


def test_a_gpu_of_little_memory_has_rates_of_smaller_work(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(Rates(projections=9e4), memory=20 << 20)
    assert of_peak(measured(gpu, monkeypatch), gpu)[:7] == pytest.approx([1.0] * 7, rel=0.1)
    with pytest.raises(OutOfMemory, match="no memory"):
        measured(Gpu(Rates(), memory=0), monkeypatch)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_rates_are_measured_by_calls_that_a_gpu_takes(
    dtype: str, monkeypatch: pytest.MonkeyPatch, wgpu_device: Any
) -> None:
    """In float32 the largest do not fit a binding of 128 MiB."""
    for name in ("_WARM_SECONDS", "_WARM_AGAIN_SECONDS"):
        monkeypatch.setattr(rates, name, (0.0, 0.0))
    monkeypatch.setattr(rates, "_LEAST_SECONDS", 0.0)
    plan = wgpu_device.dry_run()
    plan.shared_memory = False  # so that copies are measured too
    plan.max_binding_bytes = 128 << 20
    prepared = list[int]()
    plan.prepare = lambda dry: prepared.append(len(dry.variants))
    assert all(rate > 0 for rate in asdict(rates._measured(plan, np.dtype(dtype))).values())
    assert prepared[0] > 5


# ---- the cache ----------------------------------------------------------------------------------
def test_rates_are_measured_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """They are measured again if the cache file is damaged or of an older format. A software driver has no rates."""
    monkeypatch.setattr(rates, "cache_folder", lambda name: tmp_path / name)
    calls = list[Any]()

    def found(device: Any, dtype: np.dtype) -> Rates:
        calls.append(dtype)
        return Rates()

    monkeypatch.setattr(rates, "_measured", found)
    gpu: Any = Gpu(Rates())
    assert rates_of(gpu, "float16") == Rates() == rates_of(gpu, "float16") and calls == [np.float16]
    (file,) = (tmp_path / "rates").iterdir()
    whole = '{"matmul": %s, "attention": 1.0, "memory": 1.0, "link": 1.0}'
    for text in ("[", '{"matmul": 0.0}', whole % "1e300", whole % "true", whole % "-1.0"):
        file.write_text(text)
        assert rates_of(gpu, "float16") == Rates() and calls.pop() == np.float16
    monkeypatch.setattr(rates, "_FORMAT", rates._FORMAT - 1)
    assert rates_of(gpu, "float16") == Rates() and len(calls) == 2
    for kind in ("CPU", "elsewhere"):
        gpu.facts = {"type": kind}
        assert rates_of(gpu, "float16") is None and rates_of(ReferenceDevice(), "float32") is None


def test_each_gpu_and_dtype_has_rates_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(rates, "cache_folder", lambda name: tmp_path / name)
    gpu: Any = Gpu(Rates())
    found = [Rates(matmul=float(number)) for number in range(1, 5)]
    measurements = iter(found)
    monkeypatch.setattr(rates, "_measured", lambda device, dtype: next(measurements))
    seen = [rates_of(gpu, "float16"), rates_of(gpu, "float32")]
    for name, value in (("description", "another GPU"), ("fastest_compute", "float32")):
        monkeypatch.setattr(gpu, name, value)
        seen.append(rates_of(gpu, "float16"))
    assert seen == found


def test_rates_that_cannot_be_measured_or_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def keep(file: Path, content: bytes) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    def fail(device: Any, dtype: np.dtype) -> Rates:
        raise OutOfMemory("no memory")

    monkeypatch.setattr(rates, "cache_folder", lambda name: tmp_path / name)
    monkeypatch.setattr(rates, "keep", keep)
    monkeypatch.setattr(rates, "_of_this_process", {})
    monkeypatch.setattr(rates, "_measured", lambda device, dtype: Rates(matmul=7.0))
    gpu: Any = Gpu(Rates())
    assert rates_of(gpu, "float16") == Rates(matmul=7.0)
    monkeypatch.setattr(rates, "_measured", fail)
    assert rates_of(gpu, "float16") == Rates(matmul=7.0) and rates_of(gpu, "float32") is None
    (remark,) = not_cached()
    assert remark.endswith("cannot be cached, so the next command measures it again: [Errno 30] Read-only file system")
    assert not not_cached()


def test_a_plan_says_once_that_rates_cannot_be_cached(
    make_checkpoint: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are measured once for all that a plan predicts."""
    calls = list[np.dtype]()

    def found(device: Any, dtype: np.dtype) -> Rates:
        calls.append(dtype)
        return Rates()

    monkeypatch.setattr(rates, "_of_this_process", {})
    (tmp_path / "rates").write_text("a file where the folder should be")
    monkeypatch.setattr(rates, "cache_folder", lambda name: tmp_path / name)
    monkeypatch.setattr(rates, "_measured", found)
    choose_card(monkeypatch, {"type": "DiscreteGPU"})
    small = ["--lora-r", "4", "--max-length", "32", "--no-sample", "--no-gradient-checkpointing"]
    assert main(["plan", "--model", str(make_checkpoint()), *small]) == 0
    said = capsys.readouterr()
    assert len(calls) == 1 and said.err.count("cannot be cached") == 1 and "tokens/s" in said.out


def test_the_default_rates_predict_the_steps_that_they_are_of() -> None:
    """Those of an H100 that keeps everything, as `bench/results` has them."""
    rows = map(json.loads, (Path(__file__).parents[2] / "bench/results/plans-h100.jsonl").read_text().splitlines())
    tree, run = "c7cf5eca, --keep-gated", "keys from the last, gated activations kept"
    found = {}
    for row in (row for row in rows if (row["tree"], row["run"]) == (tree, run)):
        config = RunOptions(
            compute="float16", batch_size=row["batch"], max_length=2048, gradient_accumulation_steps=1,
            gradient_checkpointing=False, keep_dequantized=True, keep_gated=True,
        )  # fmt: skip
        device: Any = ReferenceDevice()
        device.stacks_weights = True
        seconds = step_seconds(config, parse_model_config(SHAPES[row["work"]].config()), device, Rates())
        found[row["work"], row["batch"]] = 1e3 * seconds / row["ms_per_step"]
    assert found == pytest.approx({("llama-3.1-8b", 4): 1, ("llama-3.2-1b", 1): 1, ("llama-3.2-1b", 4): 1}, rel=0.025)
