"""The committed tables of the compiled kernels (bench/results/hip_*.jsonl), and which of their rows are of what ships.

A row is one kernel of one architecture and names the code object that it was made from (`object`: the first 16 digits
of its SHA-256, as in hip/objects/manifest.json). After a kernel has changed and `make objects` has run, rows of the
older object are stale: tests hold the others to their limits, say which are stale and are skipped, until
`make hip-tables` has made them anew. Nothing here needs a compiler or the executor.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from wgrad.hip.runtime.architectures import SHIPPED
from wgrad.hip.runtime.objects import HIP, read_manifest

Row = dict[str, Any]
RESULTS = Path(__file__).parents[3] / "bench" / "results"
OBJECTS = HIP / "objects"
COMMAND = "make hip-tables"
PRODUCTS = ("gemm", "linear", "gemm_f32", "gemm_split", "gemm_skinny", "gemv")
GROUPED = ("gemm_grouped", "gemm_grouped_f32")
_RECURRENCES = ("delta_rule", "ssd", "selective_scan", "short_conv")
_NOT_COUNTED = ("attention_combine", "gemm_split", *GROUPED, "moe", "fused", *_RECURRENCES)
ATTENTION = ("attention_forward", "attention_backward_dq", "attention_backward_dkv")


class Object(NamedTuple):
    """One shipped code object."""

    architecture: str
    source: str

    def __str__(self) -> str:
        return f"{self.architecture}/{self.source}"


class Table(NamedTuple):
    """A file of rows. serves: is this source's object in it? key: what sets rows of one object apart."""

    name: str
    architectures: tuple[str, ...]
    serves: Callable[[str], bool]
    key: tuple[str, ...] = ("kernel",)

    @property
    def path(self) -> Path:
        return RESULTS / f"{self.name}.jsonl"

    def objects(self) -> list[Object]:
        """Every object whose kernels have rows, by what ships."""
        return [o for o in sorted(digests()) if o.architecture in self.architectures and self.serves(o.source)]

    def rows(self) -> list[Row]:
        """All rows; none where there is no file yet."""
        if not self.path.exists():
            return []
        return [json.loads(line) for line in self.path.read_text(encoding="utf-8").splitlines()]

    def write(self, rows: Iterable[Row]) -> None:
        """Keeps what ships, in order."""
        kept = {(o.architecture, o.source) for o in self.objects()}
        found = sorted(
            (r for r in rows if (r["arch"], r["source"]) in kept),
            key=lambda r: (r["arch"], r["source"], *(r[k] for k in self.key)),
        )
        self.path.write_text("".join(json.dumps(r) + "\n" for r in found), encoding="utf-8")


# By the file's name without `.jsonl`. No counted case is large enough for attention_combine; the accesses of gemm_split
# and of the GEMMs of experts are those of gemm; those of experts, expressions and recurrences have no bar yet.
TABLES = {
    table.name: table
    for table in (
        Table("hip_executed", SHIPPED, lambda source: True),
        Table("hip_isa", SHIPPED, lambda source: source in PRODUCTS),
        Table("hip_isa_memory", SHIPPED, lambda s: s not in (*PRODUCTS, *GROUPED, *ATTENTION, "attention_plain")),
        Table("hip_attention", SHIPPED, lambda source: source in ATTENTION),
        Table(
            "hip_access_counts",
            ("gfx942", "gfx1100"),
            lambda s: s not in _NOT_COUNTED,
            ("family", "dtype", "kernel"),
        ),
    )
}


@cache
def digests() -> dict[Object, str]:
    """The first 16 digits of what ships, by the manifest."""
    found = (name.removesuffix(".co").split("/") + [sha] for name, sha in read_manifest(OBJECTS)["objects"].items())
    return {Object(architecture, source): sha[:16] for architecture, source, sha in found}


def is_current(row: Row) -> bool:
    """Was a row made from the object that ships?"""
    return digests().get(Object(row["arch"], row["source"])) == row["object"]


def stale(table: Table, rows: list[Row]) -> list[Object]:
    """Objects of a table that have no rows, or rows of another object."""
    made_from: dict[Object, set[str]] = {}
    for r in rows:
        made_from.setdefault(Object(r["arch"], r["source"]), set()).add(r["object"])
    return [o for o in table.objects() if made_from.get(o) != {digests()[o]}]


def reason(table: str, objects: list[Object]) -> str:
    """Return the reason of a skipped test."""
    named = ", ".join(map(str, objects))
    return f"rows of {table} are of older objects ({named}): run `{COMMAND}`, which needs tests/hip/executor"


@contextmanager
def held(name: str, chosen: Callable[[Row], bool] = lambda row: True) -> Iterator[list[Row]]:
    """The chosen rows that are of what ships, to be held to limits. Where others are stale, the test is skipped at the
    end, after it has held these; a failure comes first."""
    table = TABLES[name]
    rows = table.rows()
    yield [r for r in rows if is_current(r) and chosen(r)]
    wanted = {Object(r["arch"], r["source"]) for r in rows if chosen(r)}
    if older := [o for o in stale(table, rows) if o in wanted]:
        pytest.skip(reason(name, older))


def only(rows: list[Row], kernel: str) -> Row:
    """The row of a kernel. Where it is stale, `held` has left it out: the test is skipped here."""
    found = [r for r in rows if r["kernel"] == kernel]
    if not found:
        pytest.skip(f"no row of {kernel} is of what ships: run `{COMMAND}`")
    return found[0]
