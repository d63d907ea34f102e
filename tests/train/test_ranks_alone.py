"""Parts of ranks that one process can test: deals, devices, launchers, messages."""

from __future__ import annotations

import io
import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from wgrad.device.errors import NeedsNewProcess, WgradError
from wgrad.train.commands import actions
from wgrad.train.commands.cli import main
from wgrad.train.ranks import keeper, launch, start
from wgrad.train.ranks.deal import deal, even_shares
from wgrad.train.ranks.devices import device_of_rank
from wgrad.train.ranks.polls import poll_pause
from wgrad.train.ranks.shares import EVERY, MEASURED, SKIPPED, Shares
from wgrad.train.ranks.world import Member, World
from wgrad.train.run import recovery


@pytest.mark.parametrize(
    "count, seconds", [(8, [1.0, 1.0]), (7, [1.0, 3.0]), (2, [1.0, 9.0, 1.0]), (13, [2.0, 3.0, 5.0])]
)
def test_a_deal_ends_as_early_as_any(count: int, seconds: list[float]) -> None:
    """Every micro-batch once, in order; no other deal has its last rank finish sooner."""
    dealt = deal(count, seconds)
    assert [number for numbers in dealt for number in numbers] == list(range(count))

    def best(left: int, ranks: list[float]) -> float:
        if len(ranks) == 1:
            return left * ranks[0]
        return min(max(n * ranks[0], best(left - n, ranks[1:])) for n in range(left + 1))

    assert max(len(numbers) * time for numbers, time in zip(dealt, seconds)) == best(count, seconds)


def test_equal_ranks_have_equal_shares() -> None:
    assert even_shares(8, 2) == [4, 4] and even_shares(7, 3) == [3, 2, 2] and even_shares(2, 3) == [1, 1, 0]


CARDS = [
    {"spec": "hip:2", "name": "Radeon RX 7900 XTX (gfx1100)", "usable": True, "type": "DiscreteGPU"},
    {"spec": "hip:0", "name": "Radeon RX 7900 XTX (gfx1100)", "usable": True, "type": "DiscreteGPU"},
    {"spec": "hip:1", "name": "Radeon Graphics (gfx1036)", "usable": False, "type": "IntegratedGPU"},
    {"spec": "wgpu:0", "name": "NVIDIA H200", "usable": True, "type": "DiscreteGPU"},
    {"spec": "wgpu:1", "name": "AMD Radeon", "usable": True, "type": "DiscreteGPU"},
    {"spec": "wgpu:2", "name": "llvmpipe", "usable": True, "type": "CPU"},
    {"spec": "cpu", "name": "NumPy", "usable": True, "type": "CPU"},
]


@pytest.mark.parametrize(
    "spec, devices, taken",
    [
        ("auto", CARDS, ["wgpu:0", "wgpu:1"]),
        ("wgpu", CARDS, ["wgpu:0", "wgpu:1"]),
        ("wgpu:0, cpu", CARDS, ["wgpu:0", "cpu"]),
        ("wgpu:0,wgpu:0", CARDS, ["wgpu:0", "wgpu:0"]),  # Slurm may show each task a GPU of its own as the first
        ("cpu", CARDS, ["cpu", "cpu"]),
        ("wgpu:llvmpipe", CARDS, ["wgpu:llvmpipe"] * 2),
        ("hip", CARDS, ["hip:2", "hip:0"]),
        ("hip:7900 XTX", CARDS, ["hip:2", "hip:0"]),
        ("auto", CARDS[5:], ["auto", "auto"]),
    ],
)
def test_each_rank_takes_the_next_gpu_of_its_host(spec: str, devices: list[dict[str, Any]], taken: list[str]) -> None:
    assert [device_of_rank(spec, rank, 2, lambda: devices) for rank in range(2)] == taken


def test_one_rank_of_a_host_takes_what_a_run_alone_would() -> None:
    def listed() -> list[dict[str, Any]]:
        raise AssertionError("nothing needs to be listed")

    assert device_of_rank("auto", 0, 1, listed) == "auto"


TOO_MANY = [("auto", 3), ("hip", 3), ("hip:2", 2), ("wgpu:0", 2), ("wgpu:H200", 2), ("cpu,wgpu:0", 3)]


@pytest.mark.parametrize("spec, ranks", TOO_MANY)
def test_more_ranks_than_gpus_are_refused(spec: str, ranks: int) -> None:
    with pytest.raises(WgradError, match=rf"^--device.*{ranks} ranks.*start fewer ranks"):
        device_of_rank(spec, ranks - 1, ranks, lambda: CARDS)


@pytest.mark.parametrize(
    "environment, count",
    [
        ({}, 1),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, 4),
        ({"PMI_SIZE": "3"}, 3),
        ({"MV2_COMM_WORLD_SIZE": "5"}, 5),
        ({"SLURM_STEP_NUM_TASKS": "2"}, 2),
        ({"SLURM_NTASKS": "8"}, 1),  # a batch script: srun starts the tasks
    ],
)
def test_a_process_knows_how_many_were_started(environment: dict[str, str], count: int) -> None:
    assert start.ranks_started(environment) == count


def test_a_launcher_of_another_mpi_is_told(monkeypatch: Any) -> None:
    """Two processes that are each alone for MPI would both train and write everything."""
    monkeypatch.setenv("PMI_SIZE", "2")
    with pytest.raises(WgradError, match="2 processes were started, and MPI sees 1: .*mpirun"):
        with start.open_world():
            pass


@pytest.mark.parametrize("missing", ["mpi4py", "mpirun"])
def test_mpi_that_is_missing_is_told(monkeypatch: Any, missing: str) -> None:
    if missing == "mpirun":
        monkeypatch.setattr(launch.shutil, "which", lambda name, path=None: None)
    else:
        monkeypatch.setattr(launch.importlib.util, "find_spec", lambda name: None)
        monkeypatch.setitem(sys.modules, "wgrad.train.ranks.mpi_world", None)  # its import fails
        monkeypatch.setenv("PMI_SIZE", "2")
        with pytest.raises(WgradError, match=r"MPI cannot be used .*pip install 'wgrad\[mpi\]'"), start.open_world():
            pass
    with pytest.raises(WgradError, match=rf"^--ranks: {missing} is not .*pip install 'wgrad\[mpi\]'"):
        launch.command(2, ["finetune"])


class Launches:
    """Stand-in for the launcher: it returns statuses in turn, and records its calls."""

    def __init__(self, statuses: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
        self.statuses, self.words, self.lost_at = statuses, list[list[str]](), list[str | None]()
        monkeypatch.setattr(actions, "launch", self.launch)
        monkeypatch.setattr(recovery, "_PAUSE", 0.0)
        monkeypatch.delenv("WGRAD_LOST_AT", raising=False)

    def launch(self, ranks: int, words: list[str]) -> int:
        self.words.append([*words])
        self.lost_at.append(os.environ.get("WGRAD_LOST_AT"))
        return self.statuses.pop(0)


def test_ranks_are_started_again_where_a_new_process_can_have_the_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    started = Launches([NeedsNewProcess.status] * 2 + [0], monkeypatch)
    words = ["finetune", "--model", "m", "--data", "d", "--ranks", "2", "--out", str(tmp_path / "out")]
    assert main(words) == 0
    assert started.words == [words, [*words, "--resume"], [*words, "--resume"]]
    assert started.lost_at == [None, "0", "0,0"]
    assert capsys.readouterr().out.count("note: only new processes can open that GPU again: all ranks are started") == 2
    assert "WGRAD_LOST_AT" not in os.environ  # a later run of this process has lost nothing


def test_ranks_that_never_count_enough_losses_are_not_started_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """As where the newest checkpoint is damaged: they go on from the one before, and count from there."""
    started = Launches([NeedsNewProcess.status] * 9, monkeypatch)
    words = ["finetune", "--model", "m", "--data", "d", "--ranks", "2", "--out", str(tmp_path / "out")]
    monkeypatch.setattr("wgrad.train.output.checkpoints.Checkpoints.last_step", lambda self: 6)
    assert main(words) == 2 and len(started.words) == recovery.MOST
    assert "the device was lost 3 times since step 6 was saved, and no later one was: " in capsys.readouterr().err


def test_a_long_wait_polls_less_often_and_is_hardly_longer() -> None:
    assert [poll_pause(waited) for waited in (0.0, 0.001, 0.1, 30.0)] == [2e-5, 2e-5, 5e-4, 5e-4]
    waited, polls = 0.0, 0
    while waited < 3.0:
        waited, polls = waited + poll_pause(waited), polls + 1
    assert waited < 3.0 * 1.005 and polls < 7000, polls


# ---- shares by speed ---------------------------------------------------------------------------------------
def members(count: int) -> list[Member]:
    return [Member(number, "host") for number in range(count)]


def test_shares_follow_what_a_micro_batch_takes_and_are_repeated() -> None:
    """A rank three times as fast gets 6 of 8 micro-batches; the first steps of all, which compile, do not count."""
    shares = Shares(8, members(2))
    assert shares.sizes == [4, 4]
    changed = [shares.observe([9.0, 1.0]) for _ in range(SKIPPED)]
    changed += [shares.observe([1.0, 3.0]) for _ in range(MEASURED)]
    assert changed == [False] * (SKIPPED + MEASURED - 1) + [True] and shares.sizes == [6, 2]
    assert [list(numbers) for numbers in shares.deal(8)] == [[0, 1, 2, 3, 4, 5], [6, 7]]
    assert "rank 0 6 (1000 ms each), rank 1 2 (3000 ms each)" in shares.describe()
    resumed = Shares(8, members(2))
    resumed.restore({str(rank): seconds for rank, seconds in shares.seconds.items()})
    assert resumed.deal(8) == shares.deal(8) and resumed.deal(3) == shares.deal(3)
    others = Shares(8, members(3))
    others.restore({"0": 1.0, "1": 3.0})  # of two ranks: three begin evenly
    assert others.sizes == [3, 3, 2]


def test_shares_are_measured_again_and_change_only_where_it_pays() -> None:
    shares = Shares(8, members(2))
    assert not any(shares.observe([1.0, 1.1]) for _ in range(EVERY)) and shares.sizes == [4, 4]
    assert sum(shares.observe([1.0, 7.0]) for _ in range(EVERY)) == 1 and shares.sizes == [7, 1]


def test_what_is_known_of_the_ranks_that_are_left_stays_known() -> None:
    shares = Shares(8, members(3))
    for _ in range(SKIPPED + MEASURED):
        shares.observe([1.0, 1.0, 3.0])
    shares.begin([members(3)[0], members(3)[2]])
    assert shares.sizes == [6, 2]


def checks_until_it_ends(
    monkeypatch: pytest.MonkeyPatch, alive: set[int], *given: float, older: float = 0.0, joining: int = 1
) -> float:
    """Run the watchdog of a rank that it ends, where these ranks are alive.

    Args:
        monkeypatch: For the watchdog's clock and messages.
        alive: Ranks of this host.
        *given: Arguments of the watchdog.
        older: Seconds for which the rank has run before its watchdog.
        joining: The check at which the rank begins to start MPI.

    Returns:
        How many checks that took.
    """
    checks, ended = 0, list[int]()

    def select(*_: object) -> list[list[int]]:
        nonlocal checks
        checks += 1
        return [[0] if checks == joining else []]

    with monkeypatch.context() as patch:
        patch.setattr(keeper.select, "select", select)
        patch.setattr(keeper.os, "read", lambda *_: keeper.JOINING)
        patch.setattr(keeper, "age", lambda _: older)
        patch.setattr(keeper.time, "monotonic", lambda: checks * keeper.EVERY)
        patch.setattr(keeper, "launcher_of", lambda *_: 1 << 30)
        patch.setattr(keeper, "ranks_of", lambda *_: alive)
        patch.setattr(keeper.os, "kill", lambda pid, number: ended.append(number))
        keeper.main(*given, "RANK")  # type: ignore[arg-type]
    assert ended == [keeper.END]
    return checks


def test_a_rank_that_ended_is_named_by_the_rank_that_acts_first(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The launcher ends the others with it, so a lowest rank that is late could not name it any more."""
    checks = {}
    for rank in (1, 2):
        checks[rank] = checks_until_it_ends(monkeypatch, {1, 2}, rank, 3, 3, 60)
        assert capfd.readouterr().err.startswith("wgrad: error: rank 0 ended while MPI was starting: ")
    settled = keeper.SETTLED / keeper.EVERY
    assert checks == {1: settled + 1, 2: settled + 3}  # the first of them sees it twice


@pytest.mark.parametrize(
    ("alive", "rank", "here", "size", "said"),
    [
        ({2}, 2, 3, 3, "ranks 0, 1 ended while MPI was starting: "),
        ({3}, 3, 2, 4, "a rank of this host ended while MPI was starting: "),
        ({2, 3}, 3, 2, 4, "rank 3 has not found the others within 5 s: "),
        (set(), 1, 1, 2, "rank 1 has not found the others within 5 s: "),
        ({0}, 1, 2, 2, "rank 1 has not found the others within 5 s: "),  # /proc does not show this one
    ],
)
def test_a_watchdog_tells_why_it_ends_its_rank(
    alive: set[int],
    rank: int,
    here: int,
    size: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    checks = checks_until_it_ends(monkeypatch, alive, rank, here, size, 5)
    assert capfd.readouterr().err.startswith(f"wgrad: error: {said}")
    assert checks == (keeper.SETTLED / keeper.EVERY + 1 if "ended" in said else 5 / keeper.EVERY + 2)


def test_a_rank_that_is_older_than_its_watchdog_is_not_waited_for_again(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """On a busy machine, importing wgrad takes longer than starting all ranks."""
    checks = checks_until_it_ends(monkeypatch, {1}, 1, 2, 2, 60, older=2.0)
    assert checks == (keeper.SETTLED - 2.0) / keeper.EVERY + 1
    assert "rank 0 ended while MPI was starting" in capfd.readouterr().err


def test_the_limit_of_mpis_start_begins_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not with slow imports: the watchdog starts before them."""
    assert checks_until_it_ends(monkeypatch, {0, 1}, 1, 2, 2, 5, joining=40) == 40 + 5 / keeper.EVERY + 1


def test_ranks_that_the_first_one_takes_along_are_not_named(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Rank 0 has named rank 1 and ended; the launcher ends rank 2 a moment later."""
    clock, alive = itertools.count(step=keeper.EVERY), itertools.chain([{0, 2}] * 3, itertools.repeat({2}))
    checks = itertools.chain([[[]]] * 13, itertools.repeat([[0]]))  # the rank has ended: end of file
    monkeypatch.setattr(keeper.select, "select", lambda *_: next(checks))
    monkeypatch.setattr(keeper.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(keeper, "age", lambda _: 0.0)
    monkeypatch.setattr(keeper, "launcher_of", lambda *_: 1 << 30)
    monkeypatch.setattr(keeper, "ranks_of", lambda *_: next(alive))
    monkeypatch.setattr(keeper.os, "read", lambda *_: b"")
    monkeypatch.setattr(keeper.os, "kill", lambda *_: pytest.fail("the launcher ends this rank"))
    keeper.main(2, 3, 3, 60, "RANK")
    assert capfd.readouterr().err == ""


@pytest.mark.skipif(sys.platform == "win32", reason="no signals")
def test_a_launcher_that_is_killed_is_told(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    killed = [sys.executable, "-S", "-c", "import os; os.kill(os.getpid(), 9)"]
    monkeypatch.setattr(launch, "command", lambda ranks, arguments: killed)
    assert launch.launch(2, []) == 1
    said = capsys.readouterr().err
    assert said.startswith("wgrad: error: --ranks: mpirun was ended by signal 9: the ranks end too; --resume goes on")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", closed := io.StringIO())
        closed.close()
        assert launch.launch(2, []) == 1  # whatever the terminal takes


@pytest.mark.skipif(sys.platform == "win32", reason="no signals")
def test_ranks_share_the_cores_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    count = [sys.executable, "-S", "-c", "import os, sys; sys.exit(int(os.environ['OMP_NUM_THREADS']))"]
    monkeypatch.setattr(launch, "command", lambda ranks, arguments: count)
    monkeypatch.setattr(launch, "usable_cores", lambda: 7)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert [launch.launch(ranks, []) for ranks in (2, 9)] == [3, 1]
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert launch.launch(2, []) == 5


@pytest.mark.skipif(sys.platform == "win32", reason="no watchdog")
@pytest.mark.parametrize(
    ("environment", "arguments"),
    [
        ({"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, ["3", "2", "OMPI_COMM_WORLD_RANK"]),
        ({"PMI_RANK": "3", "MPI_LOCALNRANKS": "2"}, ["3", "2", "PMI_RANK"]),
        ({"MV2_COMM_WORLD_RANK": "1", "MV2_COMM_WORLD_LOCAL_SIZE": "2"}, ["1", "2", "MV2_COMM_WORLD_RANK"]),
        (
            {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "2", "SLURM_STEP_TASKS_PER_NODE": "2(x2)"},
            ["2", "2", "SLURM_PROCID"],
        ),
        ({"OMPI_COMM_WORLD_RANK": "x"}, ["0", "1", "OMPI_COMM_WORLD_RANK"]),
        ({"OMPI_COMM_WORLD_RANK": "x", "PMI_RANK": "3"}, ["3", "1", "PMI_RANK"]),
    ],
)
def test_a_watchdog_knows_the_ranks_of_its_host(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], arguments: list[str]
) -> None:
    class Started(Exception):
        pass

    def popen(command: list[str], **_: Any) -> Any:
        raise Started(command)

    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(start.LAUNCHER, raising=False)
    monkeypatch.setattr(start.subprocess, "Popen", popen)
    with pytest.raises(Started) as caught, start.watching(4):
        pass
    (command,) = caught.value.args
    rank, here, variable = arguments
    assert command[-6:] == [keeper.__file__, rank, here, "4", str(start.START_LIMIT), variable]


def test_one_watchdog_runs_from_the_options_to_the_end_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = list[str]()

    class Keeper(start.Watchdog):
        def __init__(self, started: int) -> None:
            events.append(f"watches {started}")

        def joining(self) -> None:
            events.append("joining")

        def joined(self) -> None:
            events.append("joined")

        def close(self) -> None:
            events.append("closed")

    def run(config: object) -> int:
        events.append("runs")
        with start.open_world():
            return 0

    monkeypatch.setenv("PMI_SIZE", "2")
    monkeypatch.setattr(start, "_LimitOfStart" if sys.platform == "win32" else "_Keeper", Keeper)
    monkeypatch.setattr(start, "_join", lambda started: World())
    monkeypatch.setattr("wgrad.train.run.finetune.run_finetune", run)
    assert main(["finetune", "--model", "m", "--data", "d", "--out", str(tmp_path / "out")]) == 0
    assert events == ["watches 2", "runs", "joining", "joined", "closed"]


def catches(number: int) -> bool:
    """Return whether this process has a handler for a signal."""
    status = Path("/proc/self/status").read_text()
    return bool(int(status.partition("SigCgt:")[2].split()[0], 16) >> (number - 1) & 1)


@pytest.mark.skipif(sys.platform != "linux", reason="handlers are read in /proc")
@pytest.mark.parametrize("before", [signal.SIG_DFL, None], ids=["default", "of C"])
def test_a_watchdog_hears_of_mpis_start_and_ends_no_rank_after_it(
    monkeypatch: pytest.MonkeyPatch, before: signal.Handlers | None
) -> None:
    """A watchdog that has ended is no error."""
    heard, told = os.pipe()
    process = SimpleNamespace(stdin=os.fdopen(told, "wb", 0), wait=lambda: 0)
    monkeypatch.setattr(start.subprocess, "Popen", lambda *_, **__: process)
    monkeypatch.setattr(start.signal, "getsignal", lambda number: before)
    with start.watching(2) as watchdog:
        assert catches(keeper.END)
        watchdog.joining()
        watchdog.joined()
        assert not catches(keeper.END) and os.read(heard, 9) == keeper.JOINING + keeper.JOINED
        os.close(heard)
        watchdog.joined()


@pytest.mark.skipif(sys.platform != "linux", reason="when a process began is read in /proc")
def test_the_age_of_a_process_is_the_time_since_it_began(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = 100 * os.sysconf("SC_CLK_TCK")
    for found, seconds in (((1, begun, False), 3.5), ((1, 2 * begun, False), 0.0), ((1, 0, False), 0.0), (None, 0.0)):
        with monkeypatch.context() as patch:
            patch.setattr(keeper, "process", lambda pid, found=found: found)
            patch.setattr(keeper.time, "clock_gettime", lambda clock: 103.5)
            assert keeper.age(7) == seconds


def child_of(pid: int) -> int | None:
    """Return the first child of a process, if it has one by now."""
    time.sleep(0.005)
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(children[0]) if children else None


@pytest.mark.skipif(sys.platform != "linux", reason="which ranks live is read in /proc")
@pytest.mark.parametrize("variable", ["OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"])
def test_a_watchdog_finds_the_ranks_of_any_launcher(variable: str) -> None:
    """A shell that was started as a rank is passed over; the launcher has the variables of the batch script."""
    environment = {} if variable == "SLURM_PROCID" else {"SLURM_PROCID": "0"}
    code = (
        "import os, subprocess, sys\n"
        "name, *command = sys.argv[1:]\n"
        "ranks = [subprocess.Popen(command, env={**os.environ, name: str(rank)}) for rank in (0, 1)]\n"
        "print(*[rank.pid for rank in ranks], flush=True)\n"
        "[rank.wait() for rank in ranks]"
    )
    command = [sys.executable, "-S", "-c", code, variable, "sh", "-c", "sleep 20 & wait"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, start_new_session=True) as launcher:
        try:
            assert launcher.stdout is not None
            shells = [int(word) for word in launcher.stdout.readline().split()]
            sleeping = next(pid for _ in range(2000) if (pid := child_of(shells[0])))
            assert keeper.launcher_of(sleeping, variable) == keeper.launcher_of(shells[1], variable) == launcher.pid
            assert keeper.ranks_of(launcher.pid, variable) == {0, 1}
            assert 0 <= keeper.age(shells[1]) < 60
        finally:
            os.killpg(launcher.pid, 9)
