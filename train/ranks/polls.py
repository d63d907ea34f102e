"""Pauses between the polls of a wait for other ranks."""

from __future__ import annotations

POLL = 2e-5  # seconds between polls while data is transferred, which MPI advances only when it is polled
SLOWEST_POLL = 5e-4  # the same in a long wait


def poll_pause(waited: float) -> float:
    """Return the seconds to the next poll of a wait that has taken `waited` seconds.

    Where another rank compiles shaders, this one leaves it the core, and notices its answer at most 0.5 % later.
    """
    return min(max(POLL, waited / 200), SLOWEST_POLL)
