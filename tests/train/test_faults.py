"""Whatever stops a run (a kill between any two things it does to files, a full disk) loses nothing of it.

A shim around the calls that change files stands in for the machine: portable, quick, and exact about the moment.
`python -m tests.train.fault_campaign` tries every moment; here are some of them.
"""

from __future__ import annotations

import builtins
import errno
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from tests import own_process
from tests.own_process import needs_fork
from wgrad.train.commands.cli import main
from wgrad.train.output.checkpoints import Checkpoints
from wgrad.train.output.metrics import read_metrics
from wgrad.train.plan import lengths
from wgrad.train.run import whole_run

KILLED = 9  # status of a child that the shim ended
STEPS = 4

Fault = Callable[["Shim", str, Callable[[], Any], Any], Any]  # shim, operation, the call itself, data of a write


def kill(shim: Shim, operation: str, call: Callable[[], Any], data: Any) -> Any:
    """The process ends here; of a write half arrives."""
    if operation == "write":
        shim.half(data)
    os._exit(KILLED)


def disk(number: int) -> Fault:
    """Return a fault after which writes fail with the error `number`, but files can be removed."""
    return partial(_fail, number)


def _fail(number: int, shim: Shim, operation: str, call: Callable[[], Any], data: Any) -> Any:
    if operation in ("unlink", "remove", "rmdir"):
        return call()
    if operation == "write" and number == errno.ENOSPC:
        shim.half(data)
    raise OSError(number, os.strerror(number))


class Shim:
    """Counts the calls that change files under `root`; `fault` takes the place of the n-th (from 1) and all after it.

    Attributes: log, the calls so far: (operation, path).
    """

    def __init__(self, root: Path, at: int = 0, fault: Fault = kill) -> None:
        self.root, self.at, self.fault = str(root), at, fault
        self.log: list[tuple[str, str]] = []
        self.half: Callable[[Any], None] = print  # of the file that is written to

    def call(self, operation: str, path: Any, call: Callable[[], Any], data: Any = None) -> Any:
        path = str(path)
        if os.path.isabs(path) and not path.startswith(self.root):
            return call()
        self.log.append((operation, path))
        if self.at and len(self.log) >= self.at:
            return self.fault(self, operation, call, data)
        return call()

    @contextmanager
    def active(self) -> Iterator[None]:
        """Stand between this process and its files."""
        real = {name: getattr(os, name) for name in ("replace", "rename", "mkdir", "unlink", "remove", "rmdir")}
        real_open, real_os_open, fsync = builtins.open, os.open, os.fsync
        names: dict[int, str] = {}

        def patched(name: str) -> Callable[..., Any]:
            return lambda path, *rest, **more: self.call(name, path, lambda: real[name](path, *rest, **more))

        def opened(path: Any, mode: str = "r", *rest: Any, **more: Any) -> Any:
            if isinstance(path, int) or not set(mode) & set("wax+"):
                return real_open(path, mode, *rest, **more)
            file = self.call("open", path, lambda: real_open(path, mode, *rest, **more))
            return _Written(file, self, str(path)) if str(path).startswith(self.root) else file

        def os_opened(path: Any, flags: int, *rest: Any, **more: Any) -> int:
            def call() -> int:
                descriptor = real_os_open(path, flags, *rest, **more)
                names[descriptor] = str(path)
                return descriptor

            return self.call("open", path, call) if flags & os.O_CREAT else call()

        def synced(descriptor: int) -> Any:
            path = os.readlink(f"/proc/self/fd/{descriptor}") if os.path.isdir("/proc/self/fd") else ""
            return self.call("fsync", path or names.get(descriptor, "?"), lambda: fsync(descriptor))

        for name in real:
            setattr(os, name, patched(name))
        builtins.open, os.open, os.fsync = opened, os_opened, synced  # type: ignore[assignment]
        try:
            yield
        finally:
            for name, function in real.items():
                setattr(os, name, function)
            builtins.open, os.open, os.fsync = real_open, real_os_open, fsync


class _Written:
    """A file that is written to, through a shim."""

    def __init__(self, file: Any, shim: Shim, path: str) -> None:
        self._file, self._shim, self._path = file, shim, path

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, data: Any) -> Any:
        def half(data: Any) -> None:
            self._file.write(data[: len(data) // 2])
            self._file.flush()

        self._shim.half = half
        return self._shim.call("write", self._path, lambda: self._file.write(data), data)

    def __enter__(self) -> _Written:
        return self

    def __exit__(self, *error: Any) -> None:
        self._file.close()


# ---- a checkpoint ------------------------------------------------------------------------------
def arrays_of(step: int) -> dict[str, np.ndarray]:
    return {"parameters": np.arange(70, dtype=np.float32) + step, "state": np.full(8, step, np.float32)}


def adapter(folder: Path) -> None:
    with open(folder / "adapter_model.safetensors", "wb") as file:
        file.write(b"for people" * 9)


@pytest.fixture
def two_checkpoints(tmp_path: Path) -> Path:
    for step in (2, 4):
        Checkpoints(tmp_path / "out").save(step, arrays_of(step), {"run": {}}, adapter)
    return tmp_path / "out"


def save_six(out: Path, shim: Shim) -> int:
    with shim.active():
        Checkpoints(out).save(6, arrays_of(6), {"run": {}}, adapter)
    return 0


@needs_fork
def test_a_kill_at_any_call_of_a_checkpoint_leaves_one_that_is_whole(two_checkpoints: Path, tmp_path: Path) -> None:
    found, at, status = set(), 0, KILLED
    while status == KILLED:
        at += 1
        out = tmp_path / "copy"
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(two_checkpoints, out)
        status, said = own_process.run(partial(save_six, out, Shim(out, at)), tmp_path / "log")
        assert status in (KILLED, 0), said
        state = Checkpoints(out).load()
        assert state is not None and state.step in (4, 6)
        np.testing.assert_array_equal(state.arrays["parameters"], arrays_of(state.step)["parameters"])
        found.add(state.step)
        Checkpoints(out).save(6, arrays_of(6), {"run": {}}, adapter)  # as the resumed run will
        assert sorted(p.name for p in (out / "checkpoints").iterdir()) == ["step-4", "step-6"]
    assert found == {4, 6} and at > 20


def test_a_full_disk_at_any_call_of_a_checkpoint_leaves_the_ones_before(two_checkpoints: Path, tmp_path: Path) -> None:
    whole = Shim(tmp_path)
    save_six(two_checkpoints, whole)
    shutil.rmtree(two_checkpoints / "checkpoints" / "step-6")
    Checkpoints(two_checkpoints).save(2, arrays_of(2), {"run": {}}, adapter)
    for at in range(1, len(whole.log) + 1):
        out = tmp_path / "copy"
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(two_checkpoints, out)
        try:
            save_six(out, Shim(out, at, disk(errno.ENOSPC)))
        except Exception as error:
            assert "cannot write" in str(error) and "the disk is full" in str(error), (at, error)
            assert not list(out.rglob("*.partial")), at
        state = Checkpoints(out).load()
        assert state is not None and state.step in (4, 6)
        np.testing.assert_array_equal(state.arrays["parameters"], arrays_of(state.step)["parameters"])


def test_everything_is_on_the_disk_before_it_gets_its_name(two_checkpoints: Path) -> None:
    """A power cut leaves only synced data: each file, then names in the folder, and then the folder's own name."""
    shim = Shim(two_checkpoints.parent)
    save_six(two_checkpoints, shim)
    operations = [(operation, Path(path).name) for operation, path in shim.log]
    named = next(
        i
        for i, (operation, name) in enumerate(operations)
        if operation == "replace" and name.startswith("step-6.") and name.endswith(".partial")
    )
    for file in ("trainer.safetensors", "trainer.json", "adapter_model.safetensors"):
        written = max(i for i, (operation, name) in enumerate(operations) if operation == "write" and file in name)
        synced = max(i for i, (operation, name) in enumerate(operations) if operation == "fsync" and file in name)
        assert written < synced < named, file
    assert operations[named - 1][0] == "fsync" and operations[named - 1][1].startswith("step-6.")
    assert operations[named + 1] == ("fsync", "checkpoints")


# ---- a run -------------------------------------------------------------------------------------
def run_main(arguments: list[str], shim: Shim, folder: Path) -> int:
    lengths.SAMPLE_TOKENS = 6  # as `short_samples`, in the process that ends with this run
    with shim.active(), patch.object(whole_run, "check_disk", return_value=""):  # disks fill while it runs
        status = main(arguments)
    (folder / "calls").write_text(str(len(shim.log)))
    return status


class Runs:
    """A tiny run, how it ends when nothing happens, and how it ends after a fault."""

    def __init__(self, folder: Path, model: Path, data: Path, more: str = "") -> None:
        self.folder, self.model, self.data, self.more = folder, model, data, more
        self.whole = folder / "whole"
        status, said = self.run(self.whole)
        assert status == 0, said
        self.calls = int((folder / "calls").read_text())

    def options(self, out: Path) -> list[str]:
        text = (
            f"finetune --model {self.model} --data {self.data} --out {out} --device cpu --lora-r 2 --max-length 24 "
            f"--max-steps {STEPS} --save-steps 2 --logging-steps 1 --learning-rate 5e-3 "
            f"--gradient-accumulation-steps 1 --lora-dropout 0.1 {self.more}"
        )
        return text.split()

    def run(self, out: Path, shim: Shim | None = None, *more: str) -> tuple[int, str]:
        arguments = [*self.options(out), *more]
        return own_process.run(partial(run_main, arguments, shim or Shim(out), self.folder), self.folder / "log")

    def after(self, at: int, fault: Fault, statuses: tuple[int, ...]) -> str:
        """Run with a fault at a call, then resume without it. Return the first run's output."""
        out = self.folder / "faulty"
        shutil.rmtree(out, ignore_errors=True)
        status, said = self.run(out, Shim(out, at, fault))
        assert status in statuses and "Traceback" not in said, (at, status, said)
        if status == 0:  # what failed was of no consequence (giving back the lock)
            self.check(out)
        status, again = self.run(out, None, "--resume")
        assert status == 0 and "Traceback" not in again, (at, again)
        self.check(out)
        return said

    def check(self, out: Path) -> None:
        """Check that a run's adapter, losses and results are those of the undisturbed run."""
        name = "adapter_model.safetensors"
        assert (out / name).read_bytes() == (self.whole / name).read_bytes()
        records = [
            [
                (r["step"], *map(r.get, ("loss", "grad_norm", "held_out_loss")))
                for r in read_metrics(o / "metrics.jsonl")
            ]
            for o in (out, self.whole)
        ]
        assert records[0] == records[1] and len([r for r in records[0] if r[1]]) == STEPS
        assert (out / "samples.jsonl").read_text() == (self.whole / "samples.jsonl").read_text()
        results = [json.loads((o / "results.json").read_text()) for o in (out, self.whole)]
        for key in ("held_out_loss_before", "held_out_loss_after", "sample_before", "sample_after", "steps"):
            assert results[0][key] == results[1][key], key
        names = sorted(str(p.relative_to(out)) for p in out.rglob("*"))
        assert names == sorted(str(p.relative_to(self.whole)) for p in self.whole.rglob("*"))


@pytest.fixture
def runs(tmp_path: Path, make_checkpoint: Any, text_data: Path) -> Runs:
    sizes = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "num_hidden_layers": 1}
    return Runs(tmp_path, make_checkpoint(hidden_size=16, intermediate_size=24, **sizes), text_data)


def test_a_killed_run_ends_in_the_same_bits(runs: Runs) -> None:
    for at in range(1, runs.calls + 1, max(1, runs.calls // 12)):
        runs.after(at, kill, (KILLED,))


def test_a_killed_run_that_keeps_its_best_ends_in_the_same_bits(
    tmp_path: Path, make_checkpoint: Any, text_data: Path
) -> None:
    """Not a moment without a whole checkpoint, from the first on: the best goes only when a better one is there."""
    if not hasattr(os, "fork"):
        pytest.skip("this system cannot fork")
    sizes = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "num_hidden_layers": 1}
    model = make_checkpoint(hidden_size=16, intermediate_size=24, **sizes)
    runs = Runs(tmp_path, model, text_data, "--eval-steps 1 --keep-best 1 --early-stopping-patience 3")
    assert len([r for r in read_metrics(runs.whole / "metrics.jsonl") if "held_out_loss" in r]) == STEPS + 1
    for at in range(3, runs.calls + 1, max(1, runs.calls // 4)):
        runs.after(at, kill, (KILLED,))


def test_a_run_on_a_full_disk_ends_in_the_same_bits_once_there_is_room(runs: Runs) -> None:
    for at in range(2, runs.calls + 1, max(1, runs.calls // 12)):
        said = runs.after(at, disk(errno.ENOSPC), (2, 0))
        assert "the disk is full" in said or "done in" in said, (at, said)


@contextmanager
def small_disk(folder: Path, pages: int) -> Iterator[None]:
    """A file system of that many pages of 4 KiB; while the block runs."""
    folder.mkdir(exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={4 * pages}k", "tmpfs", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        pytest.skip(f"no mount here: {error}")
    if done.returncode:
        pytest.skip(f"a small file system cannot be mounted here: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def on_a_small_disk(runs: Runs, pages: int) -> str:
    """Run on a disk of this size, then resume on a larger one to the same bits. Return the first run's output."""
    disk = runs.folder / "disk"
    with small_disk(disk, pages):
        status, said = runs.run(disk / "out")
        assert status in (0, 2) and "Traceback" not in said, (pages, said)
        assert status == 0 or "the disk is full" in said, (pages, said)
        subprocess.run(["mount", "-o", "remount,size=4m", str(disk)], check=True)
        status, again = runs.run(disk / "out", None, "--resume")
        assert status == 0 and "Traceback" not in again, (pages, again)
        runs.check(disk / "out")
    return said


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="mounting a file system takes root")
def test_a_run_on_a_small_disk_ends_in_the_same_bits_once_it_is_larger(runs: Runs) -> None:
    """The disk itself says no here, not the shim."""
    said = [on_a_small_disk(runs, pages) for pages in (2, 5, 9, 14, 19)]
    assert sum("the disk is full" in text for text in said) >= 3


def test_a_folder_that_cannot_be_written_is_told_before_anything_is_loaded(runs: Runs) -> None:
    for number, words in ((errno.EROFS, "read-only"), (errno.EACCES, "permission denied"), (errno.ENOSPC, "full")):
        out = runs.folder / "refused"
        status, said = runs.run(out, Shim(out, 1, disk(number)))
        assert status == 2 and words in said and "cannot write" in said and "device:" not in said
        assert not out.exists()
        out.mkdir()  # there, and cannot be written into
        status, said = runs.run(out, Shim(out, 1, disk(number)))
        assert status == 2 and words in said and "device:" not in said
        out.rmdir()
