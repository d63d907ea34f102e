"""Pieces of the pages that make_table.py writes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

Row = dict[str, Any]


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    head = list(head)
    lines = ["| " + " | ".join(head) + " |", "| " + " | ".join("---" for _ in head) + " |"]
    return lines + ["| " + " | ".join(row) + " |" for row in rows]


def splice(page: str, text: str, name: str = "measured") -> str:
    """The page with `text` between the markers of that name. ValueError where they are not there, in order."""
    begin, end = f"<!-- {name}: begin, written by bench/make_table.py -->", f"<!-- {name}: end -->"
    before, found, rest = page.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"no section between {begin!r} and {end!r}")
    return f"{before}{begin}\n\n{text.rstrip()}\n\n{end}{after}"
