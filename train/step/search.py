"""The largest number that there is a plan of, with few plans."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

FIRST = 8  # what is planned beside 1, to see what one more takes
_AROUND = (0.95, 1.05)  # where the end is, of where it seems to be
Found = TypeVar("Found")


def largest(plan: Callable[[int], Any], most: int, limit: float) -> int:
    """The largest number up to `most` of which there is a plan, 0 where there is none of 1. What one more takes is
    nearly always the same, so it is looked for around where the last two lead, again and again where that was too few.

    plan: has `peak_bytes`, at most about `limit`.
    """
    if most < 1 or (last := plan(1)) is None:
        return 0
    low, high, guesses = 1, most + 1, [min(FIRST, most)]  # fits; does not
    while guesses:
        guess = min(guesses.pop(), most)
        if not low < guess < high:
            continue
        if (found := plan(guess)) is None:
            high, guesses = guess, []
            continue
        each = max((found.peak_bytes - last.peak_bytes) / (guess - low), 1)
        if not guesses:
            end = guess + (limit - found.peak_bytes) / each
            guesses = [int(_AROUND[1] * end) + 1, int(_AROUND[0] * end)]
        low, last = guess, found
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if plan(middle) is not None else (low, middle)
    return low


def beside(guess: int, plan: Callable[[int], Any], most: int) -> int:
    """The largest number up to `most` of which there is a plan, looked for from `guess` on in steps that double."""
    low, high, step = 0, most + 1, 1
    at = min(max(guess, 1), most)
    while high - low > 1:
        if plan(at) is not None:
            low, at = at, at + step
        else:
            high, at = at, at - step
        step *= 2
        if not low < at < high:
            at = (low + high) // 2
    return low


def planned_beside(none: Found, guess: int, plan: Callable[[int], Found | None], most: int) -> Found:
    """The plan of the largest number, as `beside` finds it; `none` where there is one of 0 alone."""
    plans = {0: none}

    def planned(number: int) -> Found | None:
        made = plan(number)
        if made is not None:
            plans[number] = made
        return made

    return plans[beside(guess, planned, most)]
