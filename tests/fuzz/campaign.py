"""The command line of the fuzzer: workers that make, run and judge inputs until time or number is up."""

from __future__ import annotations

import argparse
import gc
import importlib
import importlib.util
import json
import multiprocessing
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from tests.fuzz.base import FINETUNE, base_groups
from tests.fuzz.case import Case, Files, Special, from_json, to_json
from tests.fuzz.execute import Sandbox, shared_parser
from tests.fuzz.judge import judge, signature
from tests.fuzz.kinds import make_case
from tests.fuzz.mutants import misjudged
from tests.fuzz.packed import packed_groups
from tests.fuzz.surroundings import files_of_lines
from tests.fuzz.tables import table_files

CASES = Path(__file__).parent / "cases"
_CLEAR = "\r" if sys.stdout.isatty() else ""  # of the line that counts
TEMPLATE_SECONDS = 0.25  # instead of five, so that endless templates do not take most of the time
COMMANDS = (
    "finetune",
    "generate",
    "data",
    "export",
    "merge",
    "selftest",
    "import-config",
    "sweep",
    "plan",
    "eval",
    "bench",
    "serve",
    "chat",
    "warm",
)  # of most inputs
MEMORY_BYTES = 1 << 30  # of a file system in memory that is used
BATCH = 25  # inputs that share a child and a report


@contextmanager
def sandbox() -> Iterator[Sandbox]:
    """A sandbox with every group of base files, in memory where there is a file system for it."""
    _import_all()
    memory = "/dev/shm"  # of a container it may be too small
    has_room = os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > MEMORY_BYTES
    folder = Path(tempfile.mkdtemp(prefix="wgrad-fuzz-", dir=memory if has_room else None))
    try:
        os.environ["HOME"] = os.environ["HF_HOME"] = str(folder / "work")  # `~` must not lead out of it
        os.environ.pop("XDG_CACHE_HOME", None)  # nor the cache
        box = Sandbox(folder, base_groups())
        _add_run(box)
        box.groups |= packed_groups()
        box.groups["odd"] = {"fifo": Special("fifo"), "loop": Special("link", "loop")}
        for command in COMMANDS:
            shared_parser(command)
        table_files()
        gc.collect()
        gc.freeze()  # children share what is there: a search for garbage would copy it
        yield box
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _import_all() -> None:
    """Here, and not in each child."""
    import gguf  # noqa: F401
    import jinja2  # noqa: F401

    from wgrad.train.data.template_process import shared_process

    for room in ("train", "device"):
        folder = Path(__file__).parents[2] / room
        for path in sorted(folder.rglob("*.py")):
            name = ".".join(("wgrad", room, *path.relative_to(folder).with_suffix("").parts))
            if not re.search(r"__\w+__|\.ranks\.mpi_", name):  # to import MPI starts it
                importlib.import_module(name)
    shared_process()._seconds = TEMPLATE_SECONDS
    if importlib.util.find_spec("huggingface_hub"):
        from huggingface_hub import errors, snapshot_download  # noqa: F401


def _add_run(box: Sandbox) -> None:
    """A run of two steps by wgrad itself: finished, as it was before its end, and its adapter."""
    outcome, finding = box.run(Case([*FINETUNE, "--max-steps", "2", "--max-length", "64"]), judge)
    if outcome.status or finding:
        raise SystemExit(f"the sound run fails: {finding}: {outcome.stderr}")
    out = box.work / "out"
    finished: Files = {
        f"out/{p.relative_to(out).as_posix()}": p.read_bytes() for p in sorted(out.rglob("*")) if p.is_file()
    }
    box.groups["finished"] = finished
    results = ("out/results.json", "out/adapter_config.json", "out/adapter_model.safetensors", "out/loss.svg")
    box.groups["unfinished"] = {name: v for name, v in finished.items() if name not in results}
    box.groups["adapter"] = {
        f"adapter/{name}": finished[f"out/{name}"] for name in ("adapter_config.json", "adapter_model.safetensors")
    }
    box.groups["of-lines"] = files_of_lines(box.groups)


def _work(box: Sandbox, args: argparse.Namespace, worker: int, reports: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's business
    box = Sandbox(box.folder / f"worker-{worker}", box.groups)
    os.environ["HOME"] = os.environ["HF_HOME"] = str(box.work)
    end = time.monotonic() + args.seconds
    number = args.first + worker
    while time.monotonic() < end and (not args.inputs or number < args.first + args.inputs):
        numbers = range(number, number + BATCH * args.workers, args.workers)
        cases = [make_case(args.seed, n, box.groups, args.only) for n in numbers]
        verdicts = box.run_all(cases, judge)
        # Run alone, so that what a child keeps from one case to the next is told from what the case does.
        findings = [
            (box.run(case, judge)[1] or f"beside other inputs only: {finding}", case)
            for case, (_, finding) in zip(cases, verdicts)
            if finding
        ]
        reports.send((Counter(case.kind for case in cases), findings))
        number += BATCH * args.workers
    reports.close()


@dataclass
class _Tally:
    """The counts and findings of a run so far."""

    args: argparse.Namespace
    done: Counter[str] = field(default_factory=Counter)
    found: Counter[str] = field(default_factory=Counter)
    begun: float = field(default_factory=time.monotonic)
    shown: float = 0.0

    def line(self) -> str:
        seconds, total = time.monotonic() - self.begun, self.done.total()
        return f"seed {self.args.seed}: {total} inputs in {seconds:.0f} s ({total / seconds:.0f}/s)"

    def show(self) -> None:
        """A line that counts on a terminal, else one a minute."""
        now = time.monotonic()
        if sys.stdout.isatty():
            print(f"\r{self.line()}, {len(self.found)} findings", end="", flush=True)
        elif now - max(self.begun, self.shown) >= 60:
            self.shown = now
            print(f"{self.line()}, {len(self.found)} findings", flush=True)

    def record(self, finding: str, case: Case) -> None:
        """Count a finding; print the first of its kind and, with --keep, write its case."""
        mark = f"{case.kind}: {signature(finding)}"
        self.found[mark] += 1
        if self.found[mark] > 1:
            return
        print(f"{_CLEAR}{case.kind}: {finding}  [{case.note}]", flush=True)
        if self.args.keep:
            folder = Path(self.args.keep)
            folder.mkdir(parents=True, exist_ok=True)
            name = f"{case.kind}-{self.args.seed}-{case.note.rpartition(' ')[2]}.json"
            (folder / name).write_text(to_json(replace(case, note=f"{case.note}: {finding[:300]}")), encoding="utf-8")

    def summary(self) -> None:
        each = ", ".join(f"{name} {count}" for name, count in sorted(self.done.items()))
        print(f"{_CLEAR}{self.line()}: {each}")
        for mark, count in self.found.most_common():
            print(f"{count:7d} x {mark}")
        print(f"{len(self.found)} findings", flush=True)


def _campaign(box: Sandbox, args: argparse.Namespace) -> int:
    """Run a campaign and return the number of different findings. Ctrl-C ends it early."""
    pipes: list[Connection] = []
    workers = []
    for worker in range(args.workers):
        reader, writer = multiprocessing.Pipe(duplex=False)
        process = multiprocessing.get_context("fork").Process(target=_work, args=(box, args, worker, writer))
        process.start()
        writer.close()
        pipes.append(reader)
        workers.append(process)
    tally = _Tally(args)
    try:
        _collect(pipes, tally)
    except KeyboardInterrupt:
        for process in workers:
            process.terminate()
    for process in workers:
        process.join()
    tally.summary()
    broken = [p.exitcode for p in workers if p.exitcode and p.exitcode > 0]
    if broken:
        print(f"{len(broken)} workers ended with status {broken[0]}: the fuzzer itself is at fault")
    return len(tally.found) + len(broken)


def _collect(pipes: list[Connection], tally: _Tally) -> None:
    """Count what the workers report until all have ended."""
    while pipes:
        for pipe in wait(pipes):
            assert isinstance(pipe, Connection)
            try:
                counts, findings = pipe.recv()
            except EOFError:
                pipes.remove(pipe)
                continue
            tally.done += counts
            for finding, case in findings:
                tally.record(finding, case)
        tally.show()


def replay(box: Sandbox, paths: list[Path]) -> int:
    """Run the kept cases and return the number that fail."""
    failed = 0
    verdicts = box.run_all([from_json(path.read_text()) for path in paths], judge)  # what a case imports, others have
    for path, (_, finding) in zip(paths, verdicts, strict=True):
        if finding:
            failed += 1
            print(f"{path.name}: {finding}", flush=True)
    print(f"{len(paths)} cases, {failed} fail")
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--inputs", type=int, default=0, help="stop after so many (default: --seconds alone decides)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="number of the first input")
    parser.add_argument("--only", default="", help="kinds whose name contains one of these, with commas")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--keep", metavar="DIR", help="write a case of each kind of finding there")
    parser.add_argument(
        "--replay",
        nargs="*",
        metavar="FILE",
        help="run these cases (default: all of tests/fuzz/cases), and then new ones where --inputs is given",
    )
    parser.add_argument(
        "--mutants", action="store_true", help="also run mutants of commands, each of which must be seen"
    )
    parser.add_argument("--show", type=int, metavar="NUMBER", help="run one input of the seed and print what it gives")
    args = parser.parse_args()
    with sandbox() as box:
        if args.show is not None:
            return _show_one(box, args)
        found = misjudged(box) if args.mutants else 0
        if args.replay is not None:
            found += replay(box, [Path(p) for p in args.replay] or sorted(CASES.glob("*.json")))
        if (args.replay is not None or args.mutants) and not args.inputs:
            return 1 if found else 0
        return 1 if _campaign(box, args) or found else 0


def _show_one(box: Sandbox, args: argparse.Namespace) -> int:
    case = make_case(args.seed, args.show, box.groups, args.only)
    outcome, finding = box.run(case, judge)
    text = json.loads(to_json(case))
    print(json.dumps(text, indent=1)[:6000])
    print(outcome.stdout[-3000:], outcome.stderr[-6000:], sep="\n----\n")
    print(f"status {outcome.status}, {outcome.cpu_seconds:.2f} s, {outcome.grown >> 20} MiB")
    print(finding)
    return 0
