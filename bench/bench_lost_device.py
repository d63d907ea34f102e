"""Seconds from the loss of the GPU in a run until it trains again, without the loading of weights.

    python bench/bench_lost_device.py [--driver nvidia] [--shape smollm2-135m] [--runs 12] [--seed 0] [--out FILE]

A driver in front of the machine's own (tests/portability/front_driver.c, which needs a C compiler) loses the device at
a random call of Vulkan, soon after the second step. Each run is a process of its own, alone on the GPU, with random
weights; one without a row comes first and fills the caches of pipelines. Columns, in seconds: `noticed_s` from the loss
to its error, `open_s` to open the device again, `prepare_s` for the plan and the pipelines, `load_s` to load the
weights, `total_s` from the loss to the end of the next step. `without_load_s` is `total_s` less `load_s`.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from bench_start import EXAMPLES, shape_of, write_checkpoint
from common import Report

from wgrad.train.commands.cli import main as wgrad
from wgrad.train.run import recovery, whole_run
from wgrad.train.step.trainer import Trainer
from wgrad.wgsl.runtime.vulkan_drivers import driver_files

ROOT = Path(__file__).parents[1]
SAVED, LAST = 2, 30  # steps
CALLS = 40  # the loss comes at one of so many calls after step SAVED
TRAIN = (
    f"--max-steps {LAST} --save-steps {SAVED} --batch-size 1 --gradient-accumulation-steps 1 --logging-steps 1 "
    "--eval-fraction 0 --no-sample --device wgpu".split()
)


class Clock:
    """Times of one run, by their names. at: CLOCK_MONOTONIC when something ended; taken: seconds that it took."""

    def __init__(self) -> None:
        self.at: dict[str, float] = {}
        self.taken: dict[str, float] = {}

    def around(self, owner: Any, name: str, method: str) -> None:
        """Time the last call of a function."""
        plain = getattr(owner, method)

        def timed(*given: Any, **named: Any) -> Any:
            begun = time.monotonic()
            result = plain(*given, **named)
            self.at[name] = time.monotonic()
            self.taken[name] = self.at[name] - begun
            return result

        setattr(owner, method, timed)


def child(library: str, call: int, words: list[str]) -> None:
    """Train, lose the device, and print the times as JSON; at call 0 nothing is lost."""
    front = ctypes.CDLL(library)
    at, calls = (ctypes.c_int.in_dll(front, f"wgrad_fault_{name}") for name in ("at", "calls"))
    clock, device = Clock(), ""
    clock.around(recovery.Losses, "open_s", "reopened")
    clock.around(whole_run, "load_s", "build_session")
    clock.around(whole_run.WholeRun, "prepare_s", "_plan")
    plain_step, plain_after = Trainer.step, whole_run.WholeRun.after

    def step(trainer: Trainer, *given: Any) -> None:
        nonlocal device
        plain_step(trainer, *given)
        loaded, noticed = (clock.at.get(name, 0.0) for name in ("load_s", "noticed"))
        if not noticed and loaded and call and given[0].index + 1 == SAVED:  # a plan has steps too, on no device
            at.value = calls.value + call
        if 0 < noticed < loaded and "trains" not in clock.at:
            trainer.device.synchronize()
            clock.at["trains"], device = time.monotonic(), trainer.device.description

    def after(*given: Any) -> Any:
        clock.at["noticed"] = time.monotonic()
        return plain_after(*given)

    Trainer.step, whole_run.WholeRun.after = step, after  # type: ignore[assignment,method-assign]
    if wgrad(["finetune", *words]):
        raise SystemExit("the run failed")
    if not call:
        return
    lost = ctypes.c_double.in_dll(front, "wgrad_fault_lost_at").value
    total = clock.at["trains"] - lost
    row = {"noticed_s": clock.at["noticed"] - lost, **clock.taken}
    row |= {"total_s": total, "without_load_s": total - row["load_s"]}
    print(json.dumps({"device": device, **row}))


def front_driver(folder: Path, compiler: str, name: str) -> tuple[str, dict[str, str]]:
    """Compile the driver in front of the one of that name. Return its library, and Vulkan's environment to find it."""
    file = next(file for file in driver_files() if name in file and Path(file).exists())
    behind = json.loads(Path(file).read_text(encoding="utf-8"))["ICD"]["library_path"]
    library, manifest = folder / "front_driver.so", folder / "front_driver.json"
    source = ROOT / "tests" / "portability" / "front_driver.c"
    command = [compiler, "-shared", "-fPIC", "-DFAULTS", "-o", str(library), str(source), "-ldl"]
    subprocess.run(command, check=True)
    icd = {"library_path": str(library), "api_version": "1.3.0"}
    manifest.write_text(json.dumps({"file_format_version": "1.0.0", "ICD": icd}), encoding="utf-8")
    found = {"VK_ICD_FILENAMES": str(manifest), "VK_DRIVER_FILES": str(manifest), "RUST_BACKTRACE": "0"}
    return str(library), {"WGRAD_VULKAN_DRIVER": behind, **found}


def runs(args: argparse.Namespace, folder: Path) -> Callable[[int], dict[str, Any]]:
    """Return a function that trains once, and loses the device at a call."""
    library, environment = front_driver(folder, args.compiler, args.driver)
    write_checkpoint(shape_of(args.shape), folder / "model")
    data = ["--model", str(folder / "model"), "--data", str(EXAMPLES / "data" / "proverbs.jsonl")]
    count = 0

    def run(call: int) -> dict[str, Any]:
        nonlocal count
        count += 1
        words = [*data, "--max-length", str(args.max_length), "--out", str(folder / f"out-{count}"), *TRAIN]
        command = [sys.executable, __file__, "child", library, str(call), *words]
        ended = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True)
        if ended.returncode:
            raise SystemExit(ended.stdout[-2000:] + ended.stderr[-2000:])
        found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1]) if call else {}
        return found

    return run


def main() -> None:
    if sys.argv[1:2] == ["child"]:
        child(sys.argv[2], int(sys.argv[3]), sys.argv[4:])
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="smollm2-135m")
    parser.add_argument("--max-length", type=int, default=512)
    parser.add_argument("--runs", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--driver", default="nvidia", help="part of the name of the file that registers it: lvp, nvidia"
    )
    parser.add_argument("--compiler", default="cc", help="C compiler")
    parser.add_argument("--out", default=None)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        run = runs(args, Path(folder))
        run(0)
        chosen, found, report = random.Random(args.seed), list[float](), None
        for _ in range(args.runs):
            call = chosen.randint(1, CALLS)
            row = run(call)
            report = report or Report("lost_device", SimpleNamespace(description=row["device"]), args.out)
            row.pop("device")
            report.row(work=args.shape, call=call, **row)
            found.append(row["without_load_s"])
    print(f"without loading: median {statistics.median(found):.2f} s, at most {max(found):.2f} s, of {len(found)}")


if __name__ == "__main__":
    main()
