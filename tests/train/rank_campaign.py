"""Kill a random rank at a random moment, many times: python -m tests.train.rank_campaign [--times 30] [--ranks 3]

On the embedded model, with user-level failure mitigation; in every other run the ranks share memory two by two, as on
several hosts, in the others all do. Each run must end with status 0, with all steps in
metrics.jsonl, and with the held-out loss and the adapter of a run that nothing happened to.
With --devices no rank is killed, but their devices are lost at random calls; half of the runs do without failure
mitigation.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

from tests.train.ranks_runs import ENVIRONMENT, LIMIT, command_of, lossy, named
from wgrad.train.output.metrics import read_steps

ROOT = Path(__file__).parents[2]
ULFM = ("--with-ft", "ulfm")


def pids(out: Path) -> dict[int, int]:
    """Return the process of each rank of the run that writes to `out`."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if str(out).encode() not in (folder / "cmdline").read_bytes().split(b"\0"):
                continue
            environment = dict(e.split(b"=", 1) for e in (folder / "environ").read_bytes().split(b"\0") if b"=" in e)
        except OSError:  # gone meanwhile
            continue
        if b"OMPI_COMM_WORLD_RANK" in environment:
            found[int(environment[b"OMPI_COMM_WORLD_RANK"])] = int(folder.name)
    return found


def killed_run(
    values: dict[str, Any],
    ranks: int,
    victim: int,
    moment: float | int,
    before: Sequence[str] = (),
    options: Sequence[str] = ULFM,
) -> subprocess.CompletedProcess[str]:
    """A run of which rank `victim` is killed: at a moment in seconds from its start, or (int) once so many steps are in
    metrics.jsonl. before, options: as in `command_of`."""
    out = Path(values["--out"])
    command = command_of(ranks, values, *options, before=before)
    process = subprocess.Popen(
        command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True
    )
    try:
        begun = time.monotonic()
        while process.poll() is None and time.monotonic() - begun < LIMIT:
            if isinstance(moment, int):
                metrics = out / "metrics.jsonl"
                due = metrics.exists() and metrics.read_bytes().count(b"\n") >= moment
            else:
                due = time.monotonic() - begun >= moment
            if due and victim in (running := pids(out)):
                os.kill(running[victim], signal.SIGKILL)
                break
            time.sleep(0.01)
        stdout, stderr = process.communicate(timeout=LIMIT)
    except BaseException:
        process.terminate()
        raise
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


def outcome(out: Path) -> tuple[list[int], np.ndarray, np.ndarray]:
    """Steps and losses of metrics.jsonl, the numbers of the adapter."""
    records = read_steps(out / "metrics.jsonl")
    arrays = safetensors.numpy.load_file(out / "adapter_model.safetensors")
    flat = np.concatenate([arrays[name].ravel() for name in sorted(arrays)])
    return [r["step"] for r in records], np.array([r["loss"] for r in records]), flat


def differences(out: Path, whole: Path) -> str:
    """Return the differences from the undisturbed run, or ""."""
    (steps, losses, flat), (steps0, losses0, flat0) = outcome(out), outcome(whole)
    if steps != steps0:
        return f"steps {steps}"
    if not np.allclose(losses, losses0, rtol=1e-5):
        return f"losses differ by {np.max(np.abs(losses / losses0 - 1)):.2g}"
    off = float(np.linalg.norm(flat - flat0) / np.linalg.norm(flat0))
    return f"the adapter differs by {off:.2g}" if off > 1e-4 else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=int, default=30)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--devices", action="store_true")
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4), "little"))
    args = parser.parse_args()
    chance, folder = random.Random(args.seed), Path(tempfile.mkdtemp(prefix="rank-campaign-"))
    examples = ROOT / "examples"
    values: dict[str, Any] = {
        "--model": examples / "base_model", "--data": examples / "data" / "proverbs.jsonl", "--device": "cpu",
        "--max-length": 64, "--batch-size": 2, "--gradient-accumulation-steps": 4,
        "--learning-rate": 2e-3, "--max-steps": 16, "--save-steps": 4,
        "--eval-tokens": 500, "--no-sample": True, "--logging-steps": 1, "--out": folder / "whole",
    }  # fmt: skip
    begun = time.monotonic()
    assert killed_run(values, args.ranks, -1, 0.0).returncode == 0
    length, bad, hit = time.monotonic() - begun, 0, 0
    print(f"seed {args.seed}; a run that nothing happens to takes {length:.1f} s", flush=True)
    for number in range(args.times):
        victim, moment = chance.randrange(args.ranks), chance.uniform(0.5, length)
        out = folder / f"run-{number}"
        hosts = [named(f"host-{rank // 2}") for rank in range(args.ranks)] if number % 2 else []
        options: Sequence[str] = ULFM
        if args.devices:
            victim, options = -1, ULFM if number % 4 < 2 else ()
            losing = [lossy([int(chance.expovariate(1 / 3000)) for _ in range(3)]) for _ in range(args.ranks)]
            hosts = [f"{host}\n{line}" for host, line in zip(hosts or ["pass"] * args.ranks, losing)]
        run = killed_run(values | {"--out": out}, args.ranks, victim, moment, hosts, options)
        lost = ("opened again" if args.devices else f"lost rank {victim}") in run.stdout
        # Of a rank that is killed while MPI starts nobody is told: then the run ends within a minute.
        unborn = run.returncode == 1 and "Timeout (0:01:00)!" in run.stderr and not out.exists()
        failed = f"status {run.returncode}: {run.stderr[-800:]}"
        given_up = not options and "times at step" in run.stderr  # with failure mitigation that rank leaves the others
        wrong = "" if unborn or given_up else failed if run.returncode else differences(out, folder / "whole")
        hit += lost
        bad += bool(wrong)
        told = "told" if lost else "ended before it began" if unborn else "given up" if given_up else "not told"
        where = "several hosts" if hosts else "one host"
        result = wrong or "as if nothing"
        print(f"{number + 1}: rank {victim} of {where} after {moment:.2f} s, {told}: {result}", flush=True)
        shutil.rmtree(out, ignore_errors=True)
    print(f"{args.times} runs, {hit} went on with fewer ranks, {bad} wrong")
    shutil.rmtree(folder)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
