"""Mutation testing of the HIP package: bugs of one line, each of which the named tests must find.

    python -m tests.hip.mutants                     all of them: hours; what lives is printed, and the exit status is 1
    python -m tests.hip.mutants --list attention    one of the lists
    python -m tests.hip.mutants --only gemm_tile    those of files whose name has this in it
    python -m tests.hip.mutants --jobs 4

The list is tests/hip/mutants/*.txt:

    [hip/gemm/gemm_tile.hpp] tests/hip/test_gemm.py -k gfx942      a file, and pytest's arguments
    - what a line of it has, which is there once
    + what it has instead
    = why no test can tell the two apart                              only for a mutant that is equivalent

Each is applied to a copy of the checkout; kernels are built there again. It runs weekly (.github/workflows/mutants.yml)
and by hand, not with the tests; tests/hip/test_mutants.py holds that the list fits the sources.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
LISTS = Path(__file__).with_suffix("")
SECONDS = 900  # of a test run; what takes longer, hangs
KILLED, ALIVE, BROKEN = "killed", "ALIVE", "tests do not run"


class Mutant(NamedTuple):
    file: str
    tests: tuple[str, ...]  # pytest's arguments
    old: str
    new: str
    equivalent: str  # the reason; empty where tests must tell it apart

    def __str__(self) -> str:
        return f"{self.file}: {self.old}  ->  {self.new}"

    def plant(self, root: Path) -> None:
        """Raises ValueError where the file does not have `old` exactly once."""
        path = root / self.file
        text = path.read_text(encoding="utf-8")
        if text.count(self.old) != 1:
            raise ValueError(f"{self.file} has {text.count(self.old)} places with '{self.old}', which must be one")
        path.write_text(text.replace(self.old, self.new), encoding="utf-8")


def read_list(path: Path) -> list[Mutant]:
    """Raises ValueError for a line that is none of the list's."""
    found: list[Mutant] = []
    file, old = "", ""
    tests: tuple[str, ...] = ()
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        kind, rest = line[:2], line[2:]
        if line.startswith("["):
            file, _, words = line[1:].partition("]")
            tests = tuple(shlex.split(words))
        elif kind == "- ":
            old = rest
        elif kind in ("+ ", "+") and old:
            found.append(Mutant(file, tests, old, rest, ""))
            old = ""
        elif kind == "= " and found and not old:
            found[-1] = found[-1]._replace(equivalent=rest)
        elif line:
            raise ValueError(f"{path.name}:{number}: '{line}' is no line of a list of mutants")
    return found


def all_mutants(name: str = "*", only: str = "") -> list[Mutant]:
    """name: of a list; only: part of a file's name."""
    return [m for path in sorted(LISTS.glob(f"{name}.txt")) for m in read_list(path) if only in m.file]


class Checkout:
    """A copy of the checkout with its own emulated GPU. It does not rebuild what $WGRAD_EMULATOR_DIR has."""

    def __init__(self, folder: Path) -> None:
        self.root, self.objects = folder / "checkout", folder / "emulator"
        listed = subprocess.run(["git", "ls-files", "-z", "-co", "--exclude-standard"], cwd=ROOT, check=True,
                                capture_output=True)  # fmt: skip
        for name in filter(None, listed.stdout.decode().split("\0")):
            target = self.root / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target, follow_symlinks=False)
        if built := os.environ.get("WGRAD_EMULATOR_DIR"):
            shutil.copytree(built, self.objects)

    def run(self, tests: tuple[str, ...]) -> tuple[int, str]:
        """pytest's exit status, negative where a signal or SECONDS ended it, and its last words."""
        environment = {**os.environ, "PYTHONPATH": str(self.root / "src"), "WGRAD_EMULATOR_DIR": str(self.objects)}
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-n0", "--all", "-p", "no:cacheprovider", *tests]
        try:
            done = subprocess.run(
                command, cwd=self.root, env=environment, timeout=SECONDS, capture_output=True, text=True
            )
        except subprocess.TimeoutExpired:
            return -1, f"more than {SECONDS} s"
        words = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
        return done.returncode, (words or done.stdout.splitlines()[-1:] or [""])[-1]

    def judge(self, mutant: Mutant) -> tuple[str, str]:
        path = self.root / mutant.file
        before = path.read_bytes()
        mutant.plant(self.root)
        try:
            code, words = self.run(mutant.tests)
        finally:
            path.write_bytes(before)
        # 1: tests failed; below 0: the process did not live. 2 to 5: pytest was used wrongly, or found no test.
        return (ALIVE if code == 0 else KILLED if code == 1 or code < 0 else BROKEN), words


def run(mutants: list[Mutant], jobs: int) -> list[tuple[Mutant, str]]:
    """(mutant, verdict) of those that are not as the list has them."""
    wrong: list[tuple[Mutant, str]] = []
    with tempfile.TemporaryDirectory(prefix="wgrad-mutants-") as folder, ThreadPoolExecutor(jobs) as pool:
        checkouts: SimpleQueue[Checkout] = SimpleQueue()
        for number in range(jobs):
            checkouts.put(Checkout(Path(folder) / str(number)))

        def one(mutant: Mutant) -> None:
            checkout = checkouts.get()
            try:
                verdict, words = checkout.judge(mutant)
            finally:
                checkouts.put(checkout)
            as_listed = verdict == (ALIVE if mutant.equivalent else KILLED)
            print(f"{'' if as_listed else '* '}{verdict}: {mutant}  ({mutant.equivalent or words})", flush=True)
            if not as_listed:
                wrong.append((mutant, verdict))

        list(pool.map(one, mutants))
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.hip.mutants", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    lists = [path.stem for path in sorted(LISTS.glob("*.txt"))]
    parser.add_argument("--list", default="*", choices=lists, help="one of the lists")
    parser.add_argument("--only", default="", help="part of a file's name")
    parser.add_argument("--jobs", type=int, default=1, help="checkouts at once")
    options = parser.parse_args()
    mutants = all_mutants(options.list, options.only)
    wrong = run(mutants, options.jobs)
    equivalent = sum(bool(m.equivalent) for m in mutants)
    print(f"{len(mutants)} mutants, {equivalent} of them equivalent; {len(wrong)} not as the list has them")
    for mutant, verdict in wrong:
        print(f"  {verdict}: {mutant}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
