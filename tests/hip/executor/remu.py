"""The objects of gfx1100 on a second executor, `remu`, which was written apart from this project.

remu is a library in Rust that tinygrad had until April 2026. remu.patch adds what our kernels need of it: several
barriers, waves in either order, buffer loads, DPP16, ds_bpermute, a few other instructions, and mends some that were
wrong. $WGRAD_REMU names the library (libremu.so):

    git clone https://github.com/tinygrad/tinygrad && git -C tinygrad checkout 16f50a40a5~1
    git -C tinygrad apply --unidiff-zero $PWD/tests/hip/executor/remu.patch
    cargo build --release --manifest-path tinygrad/extra/remu/Cargo.toml
    export WGRAD_REMU=$PWD/tinygrad/extra/remu/target/release/libremu.so
    python -m tests.hip.executor.remu            # every case of the self-test; pytest runs some
    python -m tests.hip.executor.remu --reversed # a work-group's last wave goes first

It ends the process at an instruction that it lacks, so cases run in a process of their own, begun again behind the case
that ended it.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from tests.hip.executor.binding import Binding
from tests.hip.executor.call import segment
from tests.hip.executor.code_object import ExecutorError
from tests.hip.executor.device import ExecutedDevice
from tests.hip.executor.waves import Grid
from wgrad.autograd.selftest.case import Case
from wgrad.autograd.selftest.run import check_case
from wgrad.device.errors import DeviceError

ARCHITECTURE = "gfx1100"
RIGHT, WRONG, STOPPED, REFUSED = "right", "wrong", "stopped", "refused"
REVERSED = "--reversed"
SECONDS = 60  # of one case
_IDS = 7  # of a kernel descriptor's second word: the bits that ask for the work-group's numbers along x, y and z


def library() -> str:
    """Return the path in $WGRAD_REMU, empty where there is no such file."""
    path = os.environ.get("WGRAD_REMU", "")
    return path if Path(path).is_file() else ""


class RemuBinding(Binding):
    """Launches go to remu."""

    reversed = False  # the order of a work-group's waves

    def _execute(self, kernel: Any, grid: Grid, threads: int, packed: bytes) -> None:
        asked = kernel.descriptor.rsrc2 >> _IDS & 7
        if asked not in (dims := {1: 1, 3: 2, 7: 3}):
            raise DeviceError(f"{REFUSED}: {kernel.name} asks for its work-group's numbers by {asked:#b}")
        try:
            arguments = segment(kernel, packed, grid, threads)
        except ExecutorError as error:
            raise DeviceError(str(error)) from error
        code, size = kernel.bias + kernel.descriptor.entry, kernel.code.symbols[kernel.name][1]
        run = ctypes.CDLL(library()).run_kernel
        run.argtypes = [ctypes.c_void_p, *[ctypes.c_uint32] * 7, ctypes.c_void_p]
        if status := run(code, size // 4, *grid, threads, dims[asked], self.reversed, arguments.address):
            raise DeviceError(f"remu: {kernel.name} ended with {status}")
        self.execution.kernels.append(kernel.name)
        arguments.free()
        self.memory.verify()


class RemuDevice(ExecutedDevice):
    """Every operator, on remu."""

    binding = RemuBinding


@cache
def cases() -> dict[str, Case]:
    """The self-test's, by name, and those that test_every_kernel.py adds to reach every kernel."""
    from tests.hip.executor.operators import all_cases
    from tests.hip.test_every_kernel import pool

    return {case.name: case for case in (*all_cases(), *pool())}


def check(names: Sequence[str], *options: str) -> dict[str, str]:
    """Run cases of the self-test, and return what became of each: RIGHT, WRONG, STOPPED or REFUSED."""
    verdicts: dict[str, str] = {}
    while left := [name for name in names if name not in verdicts]:
        command = [sys.executable, "-m", "tests.hip.executor.remu", "--child", *options, *left]
        try:
            said = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS * len(left)).stdout
        except subprocess.TimeoutExpired as error:
            said = (error.stdout or b"").decode()
        for line in said.splitlines():
            verdict, tab, name = line.partition("\t")
            if tab and verdict in (RIGHT, WRONG, REFUSED):
                verdicts[name] = verdict
        if stopped := next((name for name in left if name not in verdicts), None):
            verdicts[stopped] = STOPPED
    return verdicts


def _child(names: Sequence[str]) -> None:
    device = RemuDevice(ARCHITECTURE)
    for name in names:
        try:
            verdict = RIGHT if (result := check_case(cases()[name], device)).ok else WRONG
            if not result.ok and result.message.find(REFUSED) >= 0:
                verdict = REFUSED
        except DeviceError as error:
            verdict = REFUSED if REFUSED in str(error) else WRONG
        print(f"{verdict}\t{name}", flush=True)


def main(arguments: Sequence[str]) -> int:
    options = [REVERSED] if REVERSED in arguments else []
    arguments = [argument for argument in arguments if argument != REVERSED]
    RemuBinding.reversed = bool(options)
    if arguments[:1] == ["--child"]:
        _child(arguments[1:])
        return 0
    if not library():
        print("$WGRAD_REMU names no library; this file's first lines say how to build it")
        return 2
    verdicts = check(arguments or list(cases()), *options)
    for name, verdict in verdicts.items():
        if verdict != RIGHT:
            print(f"{verdict}: {name}")
    print(", ".join(f"{count} {verdict}" for verdict, count in Counter(verdicts.values()).items()))
    return any(verdict != RIGHT for verdict in verdicts.values())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
