"""Several ranks train what one would: the same steps, the same result but for rounding, at any number of them."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from tests.train.rank_campaign import ULFM, killed_run
from tests.train.ranks_runs import (
    ENVIRONMENT,
    LIMIT,
    command_of,
    finetune,
    lossy,
    mpirun,
    named,
    needs_mpi,
    start,
    words,
)
from wgrad.train.commands.cli import main
from wgrad.train.output.metrics import read_steps
from wgrad.train.ranks.start import Watchdog, open_world
from wgrad.train.ranks.world import RankFailure, World

pytestmark = needs_mpi
STEPS = 12  # after the seventh, shares follow what each rank has taken


@pytest.fixture
def values(make_checkpoint: Any, text_data: Path, tmp_path: Path) -> dict[str, Any]:
    """A step of 8 rows in 4 micro-batches, whose numbers of target tokens differ."""
    return {
        "--model": make_checkpoint(),
        "--data": text_data,
        "--out": tmp_path / "out",
        "--device": "cpu",
        "--lora-r": 3,
        "--max-length": 48,
        "--batch-size": 2,
        "--gradient-accumulation-steps": 4,
        "--no-packing": True,
        "--max-steps": STEPS,
        "--learning-rate": 1e-3,
        "--lora-dropout": 0.1,
        "--seed": 5,
        "--eval-fraction": 0.2,
        "--no-sample": True,  # the other ranks would wait for it, busily
    }


_WHOLE: dict[str, Path] = {}  # runs of one rank that tests compare with, by their options


@pytest.fixture
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[dict[str, Any]], Path]:
    """Return whole(values), the output folder of a run of one rank. Model and data are the same in all tests."""

    def run(values: dict[str, Any]) -> Path:
        key = repr({name: value for name, value in values.items() if name not in ("--model", "--data", "--out")})
        if key not in _WHOLE:
            out = tmp_path_factory.mktemp("whole") / "out"
            assert main(["finetune", *words(values | {"--out": out})]) == 0
            _WHOLE[key] = out
        return _WHOLE[key]

    return run


def result(out: Path, steps: int = STEPS) -> tuple[np.ndarray, np.ndarray, dict[str, Any]]:
    """Losses of all steps, all numbers of the adapter, results.json."""
    arrays = safetensors.numpy.load_file(out / "adapter_model.safetensors")
    flat = np.concatenate([arrays[name].ravel() for name in sorted(arrays)])
    records = read_steps(out / "metrics.jsonl")
    assert [record["step"] for record in records] == list(range(1, steps + 1))
    return np.array([r["loss"] for r in records]), flat, json.loads((out / "results.json").read_text())


def same(out: Path, expected: Path, rounding: float = 1e-5, steps: int = STEPS) -> None:
    """Check that two runs agree, except for the order of sums.

    They first differ by a few units of float32's last place. AdamW divides gradients by their size, which adds to it.
    """
    (losses, adapter, results), (losses0, adapter0, results0) = result(out, steps), result(expected, steps)
    np.testing.assert_allclose(losses, losses0, rtol=rounding / 5)
    assert np.linalg.norm(adapter - adapter0) <= rounding * np.linalg.norm(adapter0)
    for key in ("held_out_loss_before", "held_out_loss_after"):
        assert results[key] == pytest.approx(results0[key], rel=rounding / 5)
    assert results["steps"] == results0["steps"] and results["skipped_steps"] == results0["skipped_steps"]


# The ranks wait for each other while shaders compile.
_QUICK = "from tests.wgsl.rolled import quick_to_compile; quick_to_compile()"


def test_two_ranks_of_different_devices_train_what_one_does(
    values: dict[str, Any], tmp_path: Path, wgpu_device: Any
) -> None:
    """NumPy and a software driver, two micro-batches of two rows each, beside one rank with a batch of eight."""
    values |= {"--lora-dropout": 0, "--max-steps": 6}
    whole = values | {"--out": tmp_path / "one", "--batch-size": 8, "--gradient-accumulation-steps": 1}
    assert main(["finetune", *words(whole)]) == 0
    run = start(command_of(2, values | {"--device": "cpu,wgpu"}, before=[_QUICK] * 2))
    assert run.returncode == 0, run.stderr
    same(tmp_path / "out", tmp_path / "one", steps=6)
    assert "rank 0 " in run.stdout and "rank 1 " in run.stdout and run.stdout.count("2 of 4 micro-batches") == 2
    log = (tmp_path / "out" / "ranks" / "rank-1.log").read_text()
    assert "step 6/6" in log and run.stdout.count("step 6/6") == 1


def test_a_run_of_two_ranks_goes_on_with_one_and_with_three(values: dict[str, Any], tmp_path: Path) -> None:
    """With dropout, whose masks belong to the micro-batches, not to ranks, and with samples."""
    del values["--no-sample"]
    values |= {"--lr-scheduler-type": "constant", "--warmup-steps": 0}
    assert main(["finetune", *words(values | {"--out": tmp_path / "one"})]) == 0
    run = finetune(2, values | {"--max-steps": STEPS // 2})
    assert run.returncode == 0, run.stderr
    for ranks in (1, 3):
        out = tmp_path / f"by-{ranks}"
        shutil.copytree(tmp_path / "out", out)
        more = {"--out": out, "--resume": True, "--max-steps": STEPS}
        if ranks == 1:
            assert main(["finetune", *words(more)]) == 0
        else:
            run = finetune(ranks, more)
            assert run.returncode == 0, run.stderr
        same(out, tmp_path / "one")


def test_a_run_of_one_rank_imports_no_mpi(values: dict[str, Any]) -> None:
    code = "import sys; from wgrad.train.commands.cli import main; assert main(sys.argv[1:]) == 0; "
    code += "assert 'mpi4py' not in sys.modules and 'wgrad.train.ranks.mpi_world' not in sys.modules"
    run = start([sys.executable, "-c", code, "finetune", *words(values | {"--max-steps": 1})])
    assert run.returncode == 0, run.stderr


def test_the_ranks_of_the_option_are_started_and_asked_to_end(values: dict[str, Any], tmp_path: Path) -> None:
    """Ctrl-C reaches what started them: all ranks end after one step, which is saved."""
    command = [sys.executable, "-m", "wgrad", "finetune", *words(values | {"--ranks": 2, "--max-steps": 5000})]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=ENVIRONMENT, stdout=pipe, stderr=pipe, text=True) as process:
        metrics, begun = tmp_path / "out" / "metrics.jsonl", time.monotonic()
        while not (metrics.exists() and metrics.read_bytes().count(b"\n") > 2) and time.monotonic() - begun < LIMIT:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=LIMIT)
    assert process.returncode == 130 and "rank 1 " in stdout, stderr
    told = re.search(r"interrupted after step (\d+) of 5000, which is saved", stderr)
    assert told and stderr.count("interrupted") == 1, stderr
    assert [path.name for path in (tmp_path / "out" / "checkpoints").iterdir()] == [f"step-{told[1]}"]


# ---- what can be wrong -------------------------------------------------------------------------------
def refused(run: subprocess.CompletedProcess[str], *parts: str) -> None:
    """Status 2, one line that has all the parts, no traceback, nobody left waiting."""
    errors = [line for line in run.stderr.splitlines() if "wgrad: error:" in line]
    assert run.returncode == 2 and len(errors) == 1 and "Traceback" not in run.stderr, run.stderr
    for part in parts:
        assert part in errors[0], errors[0]


@pytest.mark.parametrize("option", ["--learning-rate", "--data", "--model"])
def test_ranks_with_different_options_or_files_are_refused(
    values: dict[str, Any], tmp_path: Path, option: str, make_checkpoint: Any
) -> None:
    """The second rank has another learning rate, no data, another model."""
    other = {"--learning-rate": 3e-3, "--data": tmp_path / "nowhere.jsonl"}
    if option == "--model":
        other[option] = make_checkpoint(name="other", hidden_size=36)
    python = [sys.executable, "-m", "wgrad", "finetune"]
    rest = ["-n", "1", *python, *words(values | {option: other[option]})]
    run = start([*mpirun(1), *python, *words(values), ":", *rest])
    said = {"--learning-rate": "0.003 on rank 1", "--data": "nowhere.jsonl", "--model": "the base model"}
    refused(run, said[option], "rank 1 (")
    assert not (tmp_path / "out" / "results.json").exists() and not (tmp_path / "out" / "config.yaml").exists()


def test_the_first_rank_says_what_failed_before_mpi_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher ends every rank when the first one exits, which another may do as soon as MPI has ended."""
    events = list[Any]()

    class Joined(World):
        def close(self) -> None:
            events.append("closed")

    monkeypatch.setattr("wgrad.train.ranks.start.ranks_started", lambda: 2)
    monkeypatch.setattr("wgrad.train.ranks.start.watching", lambda started: nullcontext(Watchdog()))
    monkeypatch.setattr("wgrad.train.ranks.start._join", lambda started: Joined())
    with pytest.raises(RankFailure) as caught, open_world(lambda *told: events.append(told)):
        raise RankFailure("rank 1 (there): no such file", 2, said=True)
    assert events == [("rank 1 (there): no such file", 2), "closed"]
    assert not caught.value.said, "the command would say it again"


def test_a_step_too_small_for_the_ranks_is_refused(values: dict[str, Any]) -> None:
    refused(finetune(2, values | {"--gradient-accumulation-steps": 1}), "--gradient-accumulation-steps", "2 ranks")


# ---- ranks that are lost -------------------------------------------------------------------------------
# What is done without the first rank: `test_a_rank_that_is_killed_while_it_adds_up_costs_nothing`.
@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.all), 2])
def test_a_rank_that_is_killed_costs_nothing(values: dict[str, Any], tmp_path: Path, whole: Any, victim: int) -> None:
    """The first rank, whose part another takes over, or the last: the run ends as if nothing had happened."""
    run = killed_run(values | {"--logging-steps": 1}, 3, victim, 3)
    assert run.returncode == 0, run.stderr
    assert f"lost rank {victim} (" in run.stdout and "going on with 2 ranks" in run.stdout
    same(tmp_path / "out", whole(values))


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="Linux has memory that ranks can share")
def test_a_rank_that_is_killed_while_it_adds_up_costs_nothing(
    values: dict[str, Any], tmp_path: Path, whole: Any
) -> None:
    """Two ranks share memory, and the first adds up with a third, of another host. In the middle of a step it has given
    its part, and is killed before it adds up its slice: the second does what it did, from that step on."""
    dying = "; ".join([
        named("one"), "import os, itertools; from wgrad.train.ranks.all_reduce import AllReduce",
        "count = itertools.count()", "add = AllReduce._add",
        "AllReduce._add = lambda self, bucket: os.kill(os.getpid(), 9) if next(count) == 12 else add(self, bucket)",
    ])  # fmt: skip
    run = start(command_of(3, values | {"--logging-steps": 1}, *ULFM, before=[dying, named("one"), named("two")]))
    assert run.returncode == 0, run.stderr
    assert "lost rank 0 (one)" in run.stdout and "going on with 2 ranks" in run.stdout
    assert "rank 2  two" in run.stdout and "share no memory" not in run.stdout
    same(tmp_path / "out", whole(values))


def test_ranks_that_share_no_memory_say_so_and_train_the_same(
    values: dict[str, Any], tmp_path: Path, whole: Any
) -> None:
    """They add up as ranks of several hosts do. Each is bound to cores of its own, and takes all of them."""
    bound = (
        "import atexit, os; from wgrad.device import cores, openblas; cores._quota = lambda group: None; "
        "os.sched_getaffinity = lambda process: {}; "
        "atexit.register(lambda: open({!r}, 'w').write(str(openblas._shares)))"
    )
    before = [bound.format({5 * rank + core for core in range(4)}, str(tmp_path / f"{rank}")) for rank in range(2)]
    run = start(command_of(2, values, before=[f"{line}; vars(os).pop('memfd_create', None)" for line in before]))
    assert run.returncode == 0, run.stderr
    assert [(tmp_path / f"{rank}").read_text() for rank in range(2)] == ["[4]", "[4]"]
    assert run.stdout.count("share no memory (this system has no memfd_create)") == 1
    same(tmp_path / "out", whole(values))


@pytest.mark.parametrize(
    "options, gaps, opened",
    [((), [[1000], [550]], 2), (ULFM, [[1000], [550, 9, 9, 9]], 4)],
    ids=["plain", "ulfm"],
)
def test_ranks_go_back_together_when_a_device_is_lost(
    values: dict[str, Any], tmp_path: Path, whole: Any, options: tuple[str, ...], gaps: list[list[int]], opened: int
) -> None:
    """In the same processes, to the newest state of the first. With ULFM a rank that gives up leaves the other."""
    values |= {"--logging-steps": 1, "--max-steps": 6, "--gradient-accumulation-steps": 2, "--save-steps": 1}
    run = start(command_of(2, values, *options, before=[lossy(g) for g in gaps]))
    assert run.returncode == 0, run.stderr
    log = (tmp_path / "out" / "ranks" / "rank-1.log").read_text()
    assert run.stdout.count("opened again") + log.count("opened again") == opened
    assert "note: rank 1 (" in run.stdout and "resuming from" in run.stdout
    if options:
        assert "the device was lost 3 times at step" in run.stderr and "lost rank 1 (" in run.stdout
    same(tmp_path / "out", whole(values), steps=6)


# ---- ends --------------------------------------------------------------------------------------------
@pytest.mark.skipif(sys.platform != "linux", reason="which ranks live is read in /proc")
@pytest.mark.parametrize("when", ["before", "within"])
def test_a_rank_that_dies_while_mpi_starts_is_said_in_a_line(values: dict[str, Any], when: str) -> None:
    """Its launcher says nothing, and the others would wait inside MPI's start."""
    dying = "import os; os.kill(os.getpid(), 9)"
    if when == "within":
        dying = "import mpi4py, os, threading; threading.Timer(1, os.kill, (os.getpid(), 9)).start(); " + (
            "import sys, types; sys.modules['mpi4py.MPI'] = None; import wgrad.train.ranks.start as s; "
            "s._join = lambda n: __import__('time').sleep(99)"
        )
    begun = time.monotonic()
    run = start(command_of(2, values, *ULFM, before=["pass", dying]))
    # 4 s on an idle machine; 60 where MPI's own limit ends it.
    assert time.monotonic() - begun < 45 and run.returncode > 0, run.stderr
    errors = [line for line in run.stderr.splitlines() if line]
    expected = "wgrad: error: rank 1 ended while MPI was starting: see what it said, then start the run again"
    assert errors == [expected], run.stderr


def living(out: Path) -> list[str]:
    """Command lines of processes that name the folder."""
    lines = subprocess.run(["ps", "-axww", "-o", "stat=,args="], capture_output=True, text=True, check=True).stdout
    return [line for line in lines.splitlines() if str(out) in line and not line.startswith("Z")]


@pytest.mark.skipif(sys.platform != "linux", reason="which ranks live is read in /proc")
@pytest.mark.parametrize("victim", ["wgrad", "mpirun"])
def test_ranks_end_with_what_started_them(values: dict[str, Any], tmp_path: Path, victim: str) -> None:
    command = [sys.executable, "-m", "wgrad", "finetune", *words(values | {"--ranks": 2, "--max-steps": 5000})]
    null = subprocess.DEVNULL
    with subprocess.Popen(command, env=ENVIRONMENT, stdout=null, stderr=null) as process:
        metrics, begun = tmp_path / "out" / "metrics.jsonl", time.monotonic()
        while not (metrics.exists() and metrics.read_bytes().count(b"\n") > 2) and time.monotonic() - begun < LIMIT:
            time.sleep(0.05)
        assert len(living(tmp_path)) >= 3
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(process.pid if victim == "wgrad" else int(children[0]), signal.SIGKILL)
        process.wait(LIMIT)
    ended = time.monotonic()
    while living(tmp_path) and time.monotonic() - ended < 20:
        time.sleep(0.1)
    assert living(tmp_path) == []
