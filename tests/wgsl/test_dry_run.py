"""The dry run: it names what the device would compile, takes the memory that the device would, and runs nothing."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from wgrad.autograd.bind import bind
from wgrad.autograd.reference import ReferenceDevice
from wgrad.autograd.selftest.case import Case, upload_inputs
from wgrad.autograd.selftest.run import check_case, prepare_selftest, selftest_cases
from wgrad.device.errors import DeviceError, DeviceLost, TooLarge
from wgrad.wgsl.device import WgpuDevice
from wgrad.wgsl.runtime import compile, dry_run
from wgrad.wgsl.runtime.compile import Compiler, Variant
from wgrad.wgsl.runtime.dry_run import DryRun
from wgrad.wgsl.runtime.submission_queue import Queue


@pytest.fixture
def fresh(wgpu_device: Any) -> Any:
    """A device of this test's own, which has compiled next to nothing."""
    return bind(WgpuDevice)()


def every(number: int, device: Any) -> list[Case]:
    """A part of all cases, spread over the list."""
    return selftest_cases(device)[::number]


def test_nothing_more_compiles_after_preparing(fresh: Any) -> None:
    chosen = every(83, fresh)
    seen: list[tuple[int, int]] = []
    count = prepare_selftest(fresh, chosen, lambda done, total: seen.append((done, total)))
    assert count > len(chosen) / 2 and seen == [(done, count) for done in range(count + 1)]
    compiled = fresh.pipelines_compiled()
    assert all(check_case(case, fresh).ok for case in chosen)
    assert fresh.pipelines_compiled() == compiled
    assert prepare_selftest(fresh, chosen) == 0


def test_every_case_runs_dry_with_the_shapes_and_types_of_the_reference(wgpu_device: Any) -> None:
    """To which the cases hold the device itself as well."""
    dry, cpu = wgpu_device.dry_run(), ReferenceDevice()
    for case in every(3, wgpu_device):
        outputs = case.call(dry, upload_inputs(dry, case.inputs()))
        real = case.call(cpu, upload_inputs(cpu, case.inputs()))
        assert {n: (a.shape, a.dtype) for n, a in outputs.items()} == {n: (a.shape, a.dtype) for n, a in real.items()}


def test_it_takes_the_memory_that_the_device_takes(fresh: Any) -> None:
    def work(device: Any) -> None:
        x = device.upload(np.ones((123, 70), np.float32))
        for _ in range(2):
            with device.capture():
                y = device.gemm(x, x, trans_b=True)
                loss, dx, *_ = device.linear_cross_entropy(y, y, device.upload(np.zeros(123, np.int32)))
            device.silu(dx)

    dry = fresh.dry_run()
    before = fresh.memory()
    work(dry)
    assert fresh.memory() == before
    fresh.trim()
    kept = fresh.memory().in_use_bytes
    work(fresh)
    memory = fresh.memory()
    assert dry.memory().peak_bytes == memory.peak_bytes - kept > 100_000
    assert dry.memory().peak_reserved_bytes == memory.peak_reserved_bytes - kept


@pytest.mark.parametrize("rows", [64, 65])
def test_an_array_beyond_its_binding_is_refused_as_by_the_device(
    fresh: Any, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    """An array that a variant does not bind may be as large as it is."""
    monkeypatch.setattr(fresh, "max_binding_bytes", 64 * 96 * 4)

    def work(device: Any) -> str:
        table, ids = device.zeros((50, 96)), device.upload(np.zeros(rows, np.int32))
        try:
            device.embedding(table, ids, dtype=np.dtype(np.float32))
        except TooLarge as error:
            return str(error)
        return ""

    refused = "embedding: an array of 24,960 bytes does not fit one binding of this device (24,576); use a smaller"
    said = work(fresh.dry_run())
    assert said == work(fresh) and said.startswith(refused if rows == 65 else "") and bool(said) == (rows == 65)
    dry, large = fresh.dry_run(), fresh.zeros((rows * 96,))
    unbound = [None, dry.zeros((1,)), dry.zeros((1,)), large]  # `fill` declares one binding
    dry.launch("fill", [dry.zeros((1,)), *unbound[1:]], [1, 0, 0], (1, 1, 1))


def test_it_has_as_much_scratch_as_the_device(wgpu_device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a plan below a memory limit would choose other kernels of attention's backward than the run."""
    monkeypatch.setattr(wgpu_device, "scratch_bytes", 12345)
    assert wgpu_device.dry_run().scratch_bytes == 12345


def test_downloads_give_zeros_and_int64_is_refused_as_ever(wgpu_device: Any) -> None:
    dry = wgpu_device.dry_run()
    array = dry.upload(np.ones((3, 5), np.float32))
    dry.write(array, np.ones((3, 5), np.float32))
    later = dry.readback(array)
    assert later.ready()
    for value in (dry.download(array), later.result()):
        np.testing.assert_array_equal(value, np.zeros((3, 5), np.float32))
    with pytest.raises(ValueError, match="int64"):
        dry.upload(np.zeros(3, np.int64))


def test_a_shader_that_does_not_compile_is_told_where_it_is_launched(
    fresh: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Compiler, variant: Variant) -> Any:
        if variant.shader == "softmax":
            raise DeviceError("softmax.wgsl does not compile")
        return whole(self, variant)

    whole = Compiler._compile
    monkeypatch.setattr(Compiler, "_compile", refuse)
    chosen = [case for case in selftest_cases(fresh) if case.name.startswith(("softmax/5x123", "silu/7x123"))]
    dry = fresh.dry_run()
    for case in chosen:
        case.call(dry, upload_inputs(dry, case.inputs()))
    fresh.prepare(dry)
    assert {v.shader for v in dry.variants} >= {"softmax"} and any(fresh._compiler.has(v) for v in dry.variants)
    results = [case.name for case in chosen if case.op == "silu" and check_case(case, fresh).ok]
    assert results
    with pytest.raises(DeviceError, match="does not compile"):
        check_case(next(c for c in chosen if c.op == "softmax"), fresh)


def two_variants(device: Any) -> Any:
    dry = device.dry_run()
    dry.silu(dry.zeros((4, 64)))
    dry.rms_norm(dry.zeros((4, 64)), dry.zeros((64,)), 1e-5)
    assert len([v for v in dry.variants if not device._compiler.has(v)]) >= 2
    return dry


def test_variants_are_compiled_side_by_side(fresh: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """And kept, and told of, in their order."""
    together, whole, told = threading.Barrier(2, timeout=60), Compiler._compile, list[tuple[int, int]]()

    def compiled(self: Compiler, *variant: Any) -> Any:
        if not together.broken and len(met) < 2:
            met.append(threading.get_ident())
            together.wait()
        return whole(self, *variant)

    met: list[int] = []
    monkeypatch.setattr(Compiler, "_compile", compiled)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    dry = two_variants(fresh)
    before, new = fresh.pipelines_compiled(), [v for v in dry.variants if not fresh._compiler.has(v)]
    assert fresh.prepare(dry, lambda done, of: told.append((done, of))) == len(new)
    assert len(set(met)) == 2 and threading.get_ident() not in met
    assert told == [(n, len(new)) for n in range(len(new) + 1)]
    assert fresh.pipelines_compiled() - before == len(new) and list(fresh._compiler._pipelines)[-len(new) :] == new


@pytest.mark.parametrize("software", [True, False])
def test_nothing_is_submitted_while_variants_are_compiled(
    fresh: Any, monkeypatch: pytest.MonkeyPatch, software: bool
) -> None:
    """An error logged of a variant that does not compile would be raised there. Both report each variant once."""
    done, told, compile_one, submit = list[str](), list[tuple[int, int]](), Compiler._compile, Queue.submit

    def compiled(self: Compiler, variant: Variant) -> Any:
        if variant.shader == "norm_rms":
            raise DeviceError("norm_rms.wgsl does not compile")
        found = compile_one(self, variant)
        done.append("compiled")
        return found

    def submitted(self: Queue, dispatches: Any) -> None:
        done.append("submitted")
        submit(self, dispatches)

    dry = two_variants(fresh)
    new = [v for v in dry.variants if not fresh._compiler.has(v)]
    fresh.flush()
    monkeypatch.setattr(fresh, "software", software)
    monkeypatch.setattr(Compiler, "_compile", compiled)
    monkeypatch.setattr(Queue, "submit", submitted)
    assert fresh.prepare(dry, lambda number, of: told.append((number, of))) == len(new)
    assert done == ["compiled"] * (len(new) - 1) + ["submitted"] * (len(new) - 1)
    assert told == [(n, len(new)) for n in range(len(new) + 1)]


def test_a_device_that_is_lost_while_compiling_ends_it(fresh: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(self: Compiler, *variant: Any) -> Any:
        raise DeviceLost("the device was lost")

    def compiling() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name.startswith("ThreadPoolExecutor")]

    dry, before = two_variants(fresh), compiling()
    monkeypatch.setattr(Compiler, "_compile", lost)
    with pytest.raises(DeviceLost):
        fresh.prepare(dry)
    assert compiling() == before


def test_a_variant_is_a_file_an_entry_and_constants_in_their_order(wgpu_device: Any) -> None:
    dry = wgpu_device.dry_run()
    dry.silu(dry.zeros((4, 64)))
    fill, silu = dry.variants
    assert fill == Variant("fill", "main", ())
    assert silu.shader == "activation" or silu.shader == "elementwise"
    assert isinstance(dry, DryRun) and dry.pipelines_compiled() == 0


def test_each_variant_is_dispatched_once_with_no_workgroups(fresh: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """For drivers that make their machine code only then."""
    submitted: list[list[Any]] = []
    whole = Queue.submit

    def submit(self: Queue, dispatches: Any) -> None:
        submitted.append(list(dispatches))
        whole(self, submitted[-1])

    dry = fresh.dry_run()
    dry.silu(dry.zeros((4, 64)))
    dry.rms_norm(dry.zeros((4, 64)), dry.zeros((64,)), 1e-5)
    new = [v for v in dry.variants if not fresh._compiler.has(v)]
    fresh.flush()
    monkeypatch.setattr(Queue, "submit", submit)
    assert fresh.prepare(dry) == len(new) >= 2
    handles = [fresh._compiler.get(v.shader, v.entry, dict(v.constants)).handle for v in new]
    assert [chunk[0][0] for chunk in submitted] == handles
    assert all(len(chunk) == 1 and chunk[0][2:] == (0, 0, 0) for chunk in submitted)


def test_a_kernel_that_changed_is_another_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And the others are not, but for those that include the file that changed."""
    texts = {"plain": "a", "sharing": '#include "b.inc.wgsl"', "named": "#include FORMAT", "deep": "#include FORMAT"}
    texts |= {"b.inc": "b", "c.inc": '#include "b.inc.wgsl" part x=y', "d.inc": "d"}
    for name, text in texts.items():
        (tmp_path / f"{name}.wgsl").write_text(text)
    monkeypatch.setattr(compile, "_ROOM", tmp_path)

    def digests() -> dict[str, str]:
        compile._digest_of.cache_clear()
        named = {"named": "d.inc.wgsl", "deep": "c.inc.wgsl:part"}
        kernels = [(n, (("FORMAT", named[n]),) if n in named else ()) for n in ("plain", "sharing", "named", "deep")]
        return {name: compile.source_digest(Variant(name, "main", constants)) for name, constants in kernels}

    before = digests()
    (tmp_path / "b.inc.wgsl").write_text("other")
    after = digests()
    assert {name for name in before if before[name] != after[name]} == {"sharing", "deep"}
    compile._digest_of.cache_clear()


def test_what_a_dry_run_launched_tells_its_source(wgpu_device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    dry = wgpu_device.dry_run()
    dry.silu(dry.empty((3, 4)))
    (before,) = dry.launched
    monkeypatch.setattr(dry_run, "source_digest", lambda variant: "another")
    (after,) = dry.launched
    assert before[:2] == after[:2] and before[2][:-1] == after[2][:-1] and before != after
