"""`--ranks N`: run the same command N times under mpirun."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from wgrad.device.cores import usable_cores
from wgrad.device.errors import WgradError
from wgrad.train.ranks.keeper import END
from wgrad.train.ranks.start import INSTALL, LAUNCHER, ranks_started
from wgrad.train.terminal.interrupts import Interrupted
from wgrad.train.terminal.output import say_ending

_PR_SET_PDEATHSIG = 1
# Signal that Open MPI forwards to the ranks; on SIGINT and SIGTERM it kills them.
REQUEST = getattr(signal, "SIGUSR1", None)


def wants_launch(ranks: int | None) -> bool:
    """Return whether this process has to start the ranks: it is none itself."""
    return ranks is not None and ranks > 1 and ranks_started() == 1


def mpirun() -> str:
    """Return the mpirun next to this Python, or else on the path. WgradError: there is none, or no mpi4py."""
    found = shutil.which("mpirun", path=str(Path(sys.executable).parent)) or shutil.which("mpirun")
    if found is None or importlib.util.find_spec("mpi4py") is None:
        missing = "mpirun is not on the path" if found is None else "mpi4py is not installed"
        raise WgradError(f"--ranks: {missing}: {INSTALL}")
    return found


def command(ranks: int, arguments: Sequence[str]) -> list[str]:
    """Return the command line that starts `wgrad` with these arguments as `ranks` processes."""
    launcher = mpirun()
    version = subprocess.run([launcher, "--version"], capture_output=True, encoding="utf-8", timeout=60).stdout
    options: list[str] = []
    if "Open MPI" in version:
        # By default, Open MPI binds a rank with all its threads to one core.
        options = ["--oversubscribe", "--bind-to", "none"]
        if int(version.partition("Open MPI)")[2].strip().partition(".")[0] or 0) >= 5:
            options += ["--with-ft", "ulfm"]
    return [launcher, "-n", str(ranks), *options, sys.executable, "-m", "wgrad", *arguments]


def _ending_with_this_process() -> Callable[[], None] | None:
    """Return a function for a child that lets it get SIGTERM when this process ends, however it ends (Linux only)."""
    if sys.platform != "linux":
        return None
    prctl, parent = ctypes.CDLL(None).prctl, os.getpid()

    def ask() -> None:
        prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))
        if os.getppid() != parent:  # the parent ended in between
            os._exit(1)

    return ask


def launch(ranks: int, arguments: Sequence[str]) -> int:
    """Run the ranks and return the exit status.

    The first Ctrl-C (or SIGTERM, SIGHUP) asks them to save and end, the second one ends them at once.
    """
    threads = str(max(usable_cores() // ranks, 1))
    asked: list[int] = []
    environment = {"OMP_NUM_THREADS": threads, **os.environ}
    environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    environment[LAUNCHER] = f"{socket.gethostname()} {os.getpid()}"
    # A session of its own, so that Ctrl-C in a terminal reaches only this process.
    process = subprocess.Popen(
        command(ranks, arguments), env=environment, start_new_session=True, preexec_fn=_ending_with_this_process()
    )

    def handle(number: int, frame: object) -> None:
        asked.append(number)
        process.send_signal(REQUEST if len(asked) == 1 and REQUEST is not None else signal.SIGTERM)

    numbers = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
    before = {n: signal.signal(n, handle) for n in numbers if signal.getsignal(n) is not signal.SIG_IGN}
    try:
        status = process.wait()
    finally:
        for number, old in before.items():
            signal.signal(number, old)
    if len(asked) > 1:
        raise Interrupted(asked[0])
    if asked and status:  # the first rank has printed what is saved
        return 128 + asked[0]
    if status < 0:  # the ranks have lost the terminal with it
        ended = f"mpirun was ended by signal {-status}: the ranks end too; --resume goes on from the last checkpoint"
        say_ending(f"--ranks: {ended}", 1)
        return 1
    if status == END:  # the watchdog of a rank has ended it while MPI was starting, and printed why
        return 1
    return status if 0 <= status < 126 or status == 128 + signal.SIGINT else 1
