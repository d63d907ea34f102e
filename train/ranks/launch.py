"""`--ranks N`: the same command once more, N times, under the mpirun of this environment or else of the system."""

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

from wgrad.device.errors import WgradError
from wgrad.train.ranks.keeper import END
from wgrad.train.ranks.start import INSTALL, LAUNCHER, ranks_started
from wgrad.train.terminal.interrupts import Interrupted

_PR_SET_PDEATHSIG = 1
# Open MPI hands this on to the ranks; SIGINT and SIGTERM it answers by killing them.
REQUEST = getattr(signal, "SIGUSR1", None)


def wants_launch(ranks: int | None) -> bool:
    """Return whether this process is to start the ranks, being none itself."""
    return ranks is not None and ranks > 1 and ranks_started() == 1


def mpirun() -> str:
    """The launcher that belongs to this Python, or the one on the path. WgradError: there is none, or no mpi4py."""
    found = shutil.which("mpirun", path=str(Path(sys.executable).parent)) or shutil.which("mpirun")
    if found is None or importlib.util.find_spec("mpi4py") is None:
        missing = "mpirun is not on the path" if found is None else "mpi4py is not installed"
        raise WgradError(f"--ranks: {missing}: {INSTALL}")
    return found


def command(ranks: int, arguments: Sequence[str]) -> list[str]:
    """The command line that starts `wgrad` with these arguments as so many ranks."""
    launcher = mpirun()
    version = subprocess.run([launcher, "--version"], capture_output=True, encoding="utf-8", timeout=60).stdout
    options: list[str] = []
    if "Open MPI" in version:
        options = [
            "--oversubscribe",
            "--bind-to",
            "none",
        ]  # by default a rank is bound to one core, with all its threads
        if int(version.partition("Open MPI)")[2].strip().partition(".")[0] or 0) >= 5:
            options += ["--with-ft", "ulfm"]
    return [launcher, "-n", str(ranks), *options, sys.executable, "-m", "wgrad", *arguments]


def _ending_with_this_process() -> Callable[[], None] | None:
    """For a child: that SIGTERM comes to it once this process is no more, however it ends. Linux alone has that."""
    if sys.platform != "linux":
        return None
    prctl, parent = ctypes.CDLL(None).prctl, os.getpid()

    def ask() -> None:
        prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))
        if os.getppid() != parent:  # it ended in between
            os._exit(1)

    return ask


def launch(ranks: int, arguments: Sequence[str]) -> int:
    """Run the ranks -> exit status. The first Ctrl-C (or SIGTERM, SIGHUP) asks them to save and end, the second ends
    them at once."""
    threads = str(max((os.cpu_count() or 1) // ranks, 1))
    asked: list[int] = []
    environment = {"OMP_NUM_THREADS": threads, **os.environ}
    environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    environment[LAUNCHER] = f"{socket.gethostname()} {os.getpid()}"
    # A session of its own, so that Ctrl-C in a terminal comes here alone.
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
    if asked and status:  # the first rank has said what is saved
        return 128 + asked[0]
    if status == END:  # what keeps a rank has ended it while MPI was starting, and said why
        return 1
    return status if 0 <= status < 126 or status == 128 + signal.SIGINT else 1
