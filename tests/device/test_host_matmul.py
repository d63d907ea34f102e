"""Matmuls on the host's cores: the threads they take, and results."""

from __future__ import annotations

import os
import threading
import warnings
from pathlib import Path

import numpy as np
import pytest

from wgrad.autograd.reference import ReferenceDevice, recorded
from wgrad.device import cores, host_matmul, openblas


class FakeBlas:
    """OpenBLAS' two functions, without its threads."""

    def __init__(self, threads: int) -> None:
        self.threads = threads

    def put(self, threads: int) -> None:
        self.threads = threads


@pytest.fixture
def blas(monkeypatch: pytest.MonkeyPatch) -> FakeBlas:
    fake = FakeBlas(6)
    threads = openblas._Threads(lambda: fake.threads, fake.put)
    monkeypatch.setattr(openblas, "_threads", lambda: threads)
    return fake


@pytest.mark.parametrize(
    "available, environment, share, chosen",
    [
        (64, {}, 64, 64),
        (64, {}, 2, 2),  # a container with 2 of 64 cores
        (16, {}, 64, 16),  # more than OpenBLAS was built for
        (5, {"OPENBLAS_NUM_THREADS": "5"}, 2, 5),  # the user's own number
        (5, {"OMP_NUM_THREADS": " 5"}, 2, 5),
        (8, {"OMP_NUM_THREADS": ""}, 4, 4),
        (8, {"OMP_NUM_THREADS": "all"}, 4, 4),  # OpenBLAS ignores it, too
        (8, {"OMP_NUM_THREADS": "²"}, 4, 4),
    ],
)
def test_matmuls_take_the_cores_that_the_process_may_use(
    available: int, environment: dict[str, str], share: int, chosen: int
) -> None:
    assert openblas.chosen_threads(available, environment, share) == chosen


SRUN = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "2(x1),1(x2)", "SLURM_NODEID": "0"}
SRUN |= {"SLURM_CPUS_ON_NODE": "32", "SLURM_CPUS_PER_TASK": "8"}


@pytest.mark.parametrize(
    "environment, count",
    [
        ({}, 1),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "8"}, 8),
        ({"MPI_LOCALNRANKS": "3"}, 3),
        ({"MV2_COMM_WORLD_LOCAL_SIZE": "5"}, 5),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "x"}, 1),
        (SRUN, 2),
        (SRUN | {"SLURM_NODEID": "2"}, 1),
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "4(x2),3", "SLURM_NODEID": "1"}, 4),
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "4(x2),3", "SLURM_NODEID": "2"}, 3),
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "4(y2)", "SLURM_NTASKS_PER_NODE": "6"}, 6),
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "x,3", "SLURM_NTASKS_PER_NODE": "6"}, 6),
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": ""}, 1),
        (SRUN | {"OMPI_COMM_WORLD_LOCAL_SIZE": "7"}, 7),  # srun started Open MPI's daemon: one task of each node
        ({"SLURM_NTASKS_PER_NODE": "4", "SLURM_TASKS_PER_NODE": "4"}, 1),  # a batch script: srun starts the tasks
    ],
)
def test_number_of_ranks_on_a_host_is_the_launchers(environment: dict[str, str], count: int) -> None:
    assert cores.ranks_on_this_host(environment) == count


@pytest.mark.parametrize(
    "ranks, environment, quota, share",
    [
        ([range(64)], {}, None, 64),
        ([range(64)] * 8, {}, None, 8),  # not bound: ranks share all cores of the host
        ([range(64)] * 3, {}, None, 21),
        ([range(2)] * 5, {}, None, 1),
        ([{7}, {8}], {}, None, 1),  # bound to a core each
        ([range(0, 16), range(16, 32), range(32, 48), range(48, 64)], {}, None, 16),
        ([range(32), range(32, 64), range(32), range(32, 64)], {}, None, 16),  # bound to sockets, two to each
        ([range(8), range(6, 14)], {}, None, 7),  # they overlap in two
        ([range(8), range(8, 16)], {}, 6, 3),  # the quota is the container's
        ([range(64)] * 2, SRUN, None, 8),  # srun --cpu-bind=none
        ([range(8), range(8, 16)], SRUN, None, 8),  # srun binds
        ([range(64)] * 2, SRUN | {"SLURM_CPUS_PER_TASK": ""}, None, 16),
        ([range(64)], {"SLURM_CPUS_ON_NODE": "8", "SLURM_CPUS_PER_TASK": "2"}, None, 8),  # a batch script
        ([range(64)] * 2, SRUN | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, None, 16),  # mpirun within it
        ([range(64)], {"SLURM_CPUS_ON_NODE": "0"}, None, 64),
    ],
)
def test_ranks_share_the_cores_that_several_of_them_may_use(
    tmp_path: Path, ranks: list[set[int]], environment: dict[str, str], quota: int | None, share: int
) -> None:
    if quota:
        (tmp_path / "cpu.max").write_text(f"{quota}00000 100000")
    assert cores.share_of_cores(ranks[0], ranks, environment, tmp_path) == share


def test_matmuls_take_the_share_that_ranks_have_agreed_on(blas: FakeBlas, monkeypatch: pytest.MonkeyPatch) -> None:
    blas.threads = 16
    for name in openblas._VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(openblas, "_shares", list[int]())
    monkeypatch.setattr(cores, "_quota", lambda group: None)
    monkeypatch.setattr(openblas, "affinity", lambda: range(6))
    monkeypatch.setattr(openblas, "ranks_on_this_host", lambda: 2)
    openblas.matmul_threads.cache_clear()
    try:
        assert openblas.matmul_threads() == 3
        openblas.share_cores([range(6), range(6, 12)])
        assert openblas.matmul_threads() == 6
    finally:
        openblas.matmul_threads.cache_clear()


@pytest.mark.parametrize(
    "files, quota",
    [
        ({"cpu.max": "200000 100000\n"}, 2),
        ({"cpu.max": "150000 100000\n"}, 2),
        ({"cpu.max": "5000 100000\n"}, 1),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "300000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 3),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({"cpu.max": "100000 0\n"}, None),
        ({"cpu.max": "\n"}, None),
        ({}, None),
    ],
)
def test_usable_cores_are_within_the_quota_of_a_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], quota: int | None
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(64)), raising=False)
    assert cores.usable_cores(tmp_path, {}) == (quota or 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {7}, raising=False)
    assert cores.usable_cores(tmp_path, {}) == 1
    assert cores.usable_cores(tmp_path, SRUN) == 1


def test_operators_compute_with_one_thread_of_blas_and_restore_the_number(blas: FakeBlas) -> None:
    @recorded
    def seen() -> None:
        numbers.append(blas.threads)
        with openblas.one_blas_thread():
            numbers.append(blas.threads)
        numbers.append(blas.threads)

    numbers: list[int] = []
    seen(ReferenceDevice())
    assert (numbers, blas.threads) == ([1, 1, 1], 6)


def test_number_of_threads_is_restored_after_an_error(blas: FakeBlas) -> None:
    with pytest.raises(MemoryError), openblas.one_blas_thread():
        raise MemoryError
    assert blas.threads == 6


def test_number_of_threads_is_restored_by_the_last_of_two_threads(blas: FakeBlas) -> None:
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        with openblas.one_blas_thread():
            inside.set()
            leave.wait(60)

    thread = threading.Thread(target=other)
    thread.start()
    inside.wait(60)
    with openblas.one_blas_thread():
        assert openblas._threads().get() == 6  # type: ignore[union-attr]
    assert blas.threads == 1
    leave.set()
    thread.join(60)
    assert blas.threads == 6


@pytest.mark.parametrize("threads", [2, 3, 5])
@pytest.mark.parametrize(
    "left, right, transposed",
    [
        ((333, 421), (421, 189), ""),  # rows are cut
        ((47, 612), (612, 575), "a"),  # columns are cut
        ((85, 550), (550, 322), "b"),
        ((3, 3, 45, 64), (3, 1, 64, 510), ""),
        ((3, 301, 131), (131, 257), ""),
        ((45, 64), (9, 64, 510), ""),
        ((2, 2, 129, 250), (2, 1, 250, 131), "b"),
        ((2, 1, 3, 121, 250), (1, 2, 1, 250, 131), ""),
    ],
)
def test_matmul_cut_into_pieces_equals_numpys(
    monkeypatch: pytest.MonkeyPatch, left: tuple[int, ...], right: tuple[int, ...], transposed: str, threads: int
) -> None:
    rng = np.random.default_rng(sum(left))
    a, b = (rng.standard_normal(shape).astype(np.float32) for shape in (left, right))
    if transposed == "a":
        a = np.ascontiguousarray(a.mT).mT
    if transposed == "b":
        b = np.ascontiguousarray(b.mT).mT
    computed: list[int] = []
    compute = host_matmul._Helpers.compute

    def counted(self: host_matmul._Helpers, pieces: list[host_matmul._Piece]) -> None:
        computed.append(len(pieces))
        compute(self, pieces)

    monkeypatch.setattr(host_matmul._Helpers, "compute", counted)
    monkeypatch.setattr(host_matmul, "matmul_threads", lambda: threads)
    cut = host_matmul.host_matmul(a, b)
    assert 1 < computed[0] <= max(threads, len(cut.reshape(-1, *cut.shape[-2:])))
    assert cut.dtype == np.float32 and np.allclose(cut, a.astype(np.float64) @ b, atol=2e-4)
    assert np.array_equal(cut, host_matmul.host_matmul(a, b))


def test_pieces_are_computed_in_several_threads_with_one_of_blas_each(
    blas: FakeBlas, monkeypatch: pytest.MonkeyPatch
) -> None:
    both, plain, seen = threading.Barrier(2, timeout=10), np.matmul, list[int]()

    def matmul(a: np.ndarray, b: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        seen.append(blas.threads)
        if out is not None:
            both.wait()  # for the other thread
        return plain(a, b, out=out)

    monkeypatch.setattr(host_matmul, "matmul_threads", lambda: 2)
    monkeypatch.setattr(host_matmul.np, "matmul", matmul)
    a = np.ones((300, 250))
    found = host_matmul.host_matmul(a, a.T)
    assert found.dtype == np.float64 and (found == 250).all()
    host_matmul.host_matmul(a[:7], a.T)  # too small to cut
    assert (seen, blas.threads) == ([1, 1, 1], 6)


@pytest.mark.parametrize(
    "left, right, most, sizes",
    [
        ((333, 421), (421, 189), 3, [(112, 189), (112, 189), (109, 189)]),  # the longer axis, in multiples of 16
        ((47, 612), (612, 575), 3, [(47, 192), (47, 192), (47, 191)]),
        ((300, 100), (100, 200), 9, [(144, 200), (156, 200)]),  # of enough work
        ((90, 90_000), (90_000, 70), 9, [(48, 70), (42, 70)]),  # not too short
        ((7, 200, 100), (100, 160), 3, [(2, 200, 160), (2, 200, 160), (3, 200, 160)]),
        ((2, 200, 100), (100, 160), 9, [(1, 200, 160)] * 2),
        ((9, 60, 100), (100, 80), 9, [(4, 60, 80), (5, 60, 80)]),
        ((2, 2, 99, 256), (256, 300), 3, [(99, 300)] * 4),
    ],
)
def test_a_matmul_is_cut_by_matrices_or_by_its_longer_axis(
    left: tuple[int, ...], right: tuple[int, ...], most: int, sizes: list[tuple[int, ...]]
) -> None:
    y = np.empty((*left[:-1], right[-1]))
    pieces = host_matmul._pieces(np.empty(left), np.empty(right), y, most)
    assert [out.shape for *_, out in pieces] == sizes


def test_a_forked_process_has_threads_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    started = list[int]()

    class Helpers(host_matmul._Helpers):
        def __init__(self, count: int) -> None:
            started.append(count)

        def compute(self, pieces: list[host_matmul._Piece]) -> None:
            pass

    monkeypatch.setattr(host_matmul, "_Helpers", Helpers)
    monkeypatch.setattr(host_matmul, "matmul_threads", lambda: 3)
    a = np.ones((300, 300), np.float32)
    for process in (-1, -1, -2):
        monkeypatch.setattr(host_matmul.os, "getpid", lambda process=process: process)
        host_matmul.host_matmul(a, a)
    assert started == [2, 2]
    host_matmul._helpers.cache_clear()


def test_helping_threads_do_not_warn_about_infinity() -> None:
    a, out = np.full((40, 40), 3e38, np.float32), np.empty((40, 40), np.float32)
    helpers, job = host_matmul._Helpers(1), host_matmul._Job([(a, a, out)])
    with np.errstate(all="raise"), warnings.catch_warnings():
        warnings.simplefilter("error")
        helpers._jobs.put(job)
        job.wait()
    assert np.isinf(out).all()


def test_error_of_a_helping_thread_reaches_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
        raise MemoryError("no room for a piece")

    monkeypatch.setattr(host_matmul, "matmul_threads", lambda: 3)
    monkeypatch.setattr(host_matmul.np, "matmul", fail)
    with pytest.raises(MemoryError, match="no room for a piece"):
        host_matmul.host_matmul(np.ones((300, 300), np.float32), np.ones((300, 300), np.float32))


def test_another_blas_keeps_its_own_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openblas, "_threads", lambda: None)
    openblas.matmul_threads.cache_clear()
    try:
        assert openblas.matmul_threads() == 0
        a = np.ones((300, 300), np.float32)
        assert (host_matmul.host_matmul(a, a) == 300).all()
    finally:
        openblas.matmul_threads.cache_clear()


def test_a_library_that_is_loaded_is_preferred_to_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (package := tmp_path / "numpy").mkdir()
    (folder := tmp_path / "numpy.libs").mkdir()
    (file := folder / "libscipy_openblas64_-1.so").touch()
    monkeypatch.setattr(openblas.np, "__file__", str(package / "__init__.py"))
    monkeypatch.setattr(openblas, "_MAPS", tmp_path / "maps")
    assert openblas._libraries() == [file]
    line = "7f00-7f01 r--p 0000 08:01 77   {}\n"
    openblas._MAPS.write_text(line.format("/lib/libc.so.6"))
    assert openblas._libraries() == [file]
    openblas._MAPS.write_text(line.format("/lib/libopenblas.so.0") * 2 + line.format("/lib/libc.so.6"))
    assert openblas._libraries() == [Path("/lib/libopenblas.so.0")]


def test_openblas_of_numpy_is_found() -> None:
    name = np.show_config(mode="dicts")["Build Dependencies"]["blas"]["name"]
    assert (openblas._threads() is not None) == ("openblas" in name)
    assert openblas.matmul_threads() >= ("openblas" in name)
