"""Recompute rows of the committed tables: those of older objects, or all."""

from __future__ import annotations

from collections.abc import Callable

from tests.hip.executor import accesses, attention, memory_bound, operators, products
from tests.hip.executor.code_object import ExecutorError
from tests.hip.executor.device import shipped
from tests.hip.executor.table import OBJECTS, TABLES, Object, Row, Table, stale
from tests.hip.executor.tinygrad_emulator import missing
from wgrad.hip.runtime.build import outdated

Maker = Callable[[Object, list[str], Callable[[str], None]], list[Row]]
MAKERS: dict[str, Maker] = {
    "hip_executed": operators.rows,
    "hip_isa": products.rows,
    "hip_isa_memory": memory_bound.rows,
    "hip_attention": attention.rows,
    "hip_access_counts": accesses.rows,
}
_ON_THE_EMULATOR = ("hip_access_counts",)  # of tests/hip/emulator: needs no tinygrad


def wanted(table: Table, *, everything: bool, architectures: list[str], source: str) -> list[Object]:
    """Objects of a table whose rows are to be made. architectures: all where empty; source: part of a name."""
    found = table.objects() if everything else stale(table, table.rows())
    return [o for o in found if o.architecture in (architectures or [o.architecture]) and source in o.source]


def remake(name: str, objects: list[Object], say: Callable[[str], None]) -> None:
    """Makes the rows of these objects and writes the table after each.

    Raises:
        ExecutorError: something is missing; the code objects are older than the sources; no case launches a kernel.
    """
    if older := outdated(OBJECTS):
        raise ExecutorError(f"{older[0]}: run `make objects` first")
    table = TABLES[name]
    for made in objects:
        if name not in _ON_THE_EMULATOR and (lacking := missing(made.architecture)):
            raise ExecutorError(lacking)
        code = shipped(made.source, made.architecture)
        say(f"{name}: {made}")
        found = MAKERS[name](made, list(code.kernels), say)
        if not found:
            raise ExecutorError(f"{name}: nothing launches a kernel of {made}: add a case, or leave it out in TABLES")
        about = {"source": made.source, "object": code.digest}
        others = [r for r in table.rows() if (r["arch"], r["source"]) != made]
        table.write([*others, *({"arch": made.architecture, **row, **about} for row in found)])
