"""A watchdog process for each rank: it ends the rank if its launcher ends, or if another rank ends while MPI starts.

MPI's start holds Python's global lock, so no thread of a rank could notice that another rank has ended. `start.py` runs
this file as a program; it imports nothing of wgrad. Without /proc, it knows no other ranks, and checks the launcher by
its id alone.
"""

from __future__ import annotations

import math
import os
import select
import signal
import sys
import time

# Messages of a rank: it begins to start MPI, and MPI has joined it with the others.
JOINING, JOINED = b"s", b"j"
# Signal that ends a rank during MPI's start, with its number as the exit status. Open MPI uses SIGHUP itself.
END = getattr(signal, "SIGUSR2", signal.SIGTERM)
EVERY = 0.5  # seconds between checks
SETTLED = 3.0  # seconds from the start of one rank until the launcher has certainly started all of its host
PATIENCE = 4  # checks more where a further rank has ended: perhaps by its watchdog, and the launcher ends this one


def process(pid: int) -> tuple[int, int, bool] | None:
    """Return (parent, start time, whether it is a zombie) of a process by /proc; None: there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            words = file.read().rpartition(")")[2].split()
        return int(words[1]), int(words[19]), words[0] in "ZX"
    except (OSError, ValueError, IndexError):
        return None


def rank_of(pid: int, variable: str) -> int | None:
    """Return the rank that a process was started as, by its environment variable; None: it is no rank."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            words = file.read().split(b"\0")
        return next((int(w.partition(b"=")[2]) for w in words if w.startswith(variable.encode() + b"=")), None)
    except (OSError, ValueError):
        return None


def launcher_of(pid: int, variable: str) -> int:
    """Return the nearest ancestor of a process that is no rank, nor a shell that was started as one."""
    while (found := process(pid)) is not None:
        pid = found[0]
        if pid <= 1 or rank_of(pid, variable) is None:
            break
    return pid


def age(pid: int) -> float:
    """Return for how many seconds a process has existed; 0: not known."""
    found, clock = process(pid), getattr(time, "CLOCK_BOOTTIME", None)
    if found is None or clock is None or found[1] <= 0:
        return 0.0
    return max(0.0, time.clock_gettime(clock) - found[1] / os.sysconf("SC_CLK_TCK"))


def ranks_of(launcher: int, variable: str) -> set[int]:
    """Return the ranks of a launcher that are alive on this host."""
    ranks = set[int]()
    for name in os.listdir("/proc"):
        if name.isdecimal() and (found := process(int(name))) and found[0] == launcher and not found[2]:
            rank = rank_of(int(name), variable)
            if rank is not None:
                ranks.add(rank)
    return ranks


def lives(pid: int, begun: int) -> bool:
    """Return whether a process is alive. begun: its start time as of `process`; 0: not known."""
    found = process(pid)
    if found is not None:
        return not found[2] and begun in (0, found[1])
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return not os.path.exists("/proc/self/stat")


def main(rank: int, here: int, size: int, limit: float, variable: str, *watched: str) -> None:
    """Watch the parent process until it ends, or has to be ended.

    Args:
        rank: Rank of the parent.
        here: Ranks on this host.
        size: Ranks on all hosts.
        limit: Seconds for MPI to start, from the message `JOINING` on.
        variable: The environment variable that has the rank of each process that the launcher starts.
        *watched: PID or PID:BEGUN of launchers.
    """
    parent, begun = os.getppid(), time.monotonic()
    older = age(parent)  # importing wgrad takes seconds on a busy machine
    launcher = launcher_of(parent, variable) if process(parent) else 0
    pids = [(int(pid), int(start or 0)) for pid, _, start in (word.partition(":") for word in watched)]
    if launcher > 1 and (found := process(launcher)):
        pids.append((launcher, found[1]))
    joining, joined, lacking, lost = math.inf, False, 0, set[int]()
    while True:
        if select.select([0], [], [], EVERY)[0]:
            said = os.read(0, 1)
            if not said:  # the rank has ended
                return
            joined = joined or said == JOINED
            joining = time.monotonic() if said == JOINING else joining
        if not all(lives(*pid) for pid in pids):
            _say(rank == 0, "what started the ranks was killed: they end; --resume goes on from the last checkpoint")
            os.kill(parent, signal.SIGKILL)
            return
        now = time.monotonic()
        if joined or now - begun + older < SETTLED:
            continue
        alive = ranks_of(launcher, variable) if launcher > 1 and here > 1 else set()
        before, lost = lost, set(range(size)) - alive if rank in alive and len(alive) < here else set()
        lacking = 0 if not lost else lacking + 1 if lost == before or not before else -PATIENCE
        # One rank after the other: the launcher ends them all with the first one, whose watchdog has printed why.
        if lost and lacking >= 2 + 2 * sorted(alive).index(rank):
            names = ", ".join(map(str, sorted(lost)))
            who = f"rank{'s' * (len(lost) > 1)} {names}" if here == size else "a rank of this host"
            _say(True, f"{who} ended while MPI was starting: see what it said, then start the run again")
        elif now - joining > limit:
            _say(True, f"rank {rank} has not found the others within {limit:.0f} s: see whether all were started")
        else:
            continue
        os.kill(parent, END)
        return


def _say(is_main_process: bool, text: str) -> None:
    if is_main_process:
        try:
            os.write(2, f"wgrad: error: {text}\n".encode())
        except OSError:  # standard error is closed
            pass


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]), *sys.argv[5:])
