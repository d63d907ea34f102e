"""Search for the largest number whose plan fits, with few plans."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

FIRST = 8  # planned after 1, to learn the cost of one more
_AROUND = (0.95, 1.05)  # factors of the predicted largest number, between which the true one usually lies
Found = TypeVar("Found")


def largest(plan: Callable[[int], Any], most: int, limit: float) -> int:
    """Return the largest number up to `most` that has a plan; 0: not even 1 has.

    Each further unit usually costs the same, so the search looks around the number that the last two plans predict.

    Args:
        plan: Returns the plan of a number, with `peak_bytes`; None: it does not fit.
        most: Largest number.
        limit: Bytes that a plan may take, about.
    """
    if most < 1 or (last := plan(1)) is None:
        return 0
    low, high, guesses = 1, most + 1, [FIRST]  # fits; does not
    while guesses:
        guess = min(guesses.pop(), most)
        if guess <= low:
            continue
        if (found := plan(guess)) is None:
            high = guess
            break
        each = max((found.peak_bytes - last.peak_bytes) / (guess - low), 1)
        if not guesses:
            end = guess + (limit - found.peak_bytes) / each
            guesses = [int(_AROUND[1] * end) + 1, int(_AROUND[0] * end)]
        low, last = guess, found
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if plan(middle) is not None else (low, middle)
    return low


def beside(guess: int, plan: Callable[[int], Any], most: int, further: Callable[[Any], int] | None = None) -> int:
    """Return the largest number up to `most` that has a plan, searching from `guess` in steps that double.

    further: Says of a plan how many more seem to fit, and steps up are as large.
    """
    low, high, step = 0, most + 1, 1
    at = min(max(guess, 1), most)
    while high - low > 1:
        if (found := plan(at)) is not None:
            low, at = at, at + (step if further is None else max(further(found), 1))
        else:
            high, at = at, at - step
        step *= 2
        if not low < at < high:
            at = (low + high) // 2
    return low


def planned_beside(
    none: Found,
    guess: int,
    plan: Callable[[int], Found | None],
    most: int,
    further: Callable[[Found], int] | None = None,
) -> Found:
    """Return the plan of the number that `beside` finds. none: the plan of 0."""
    plans = {0: none}

    def planned(number: int) -> Found | None:
        made = plan(number)
        if made is not None:
            plans[number] = made
        return made

    return plans[beside(guess, planned, most, further)]
