"""The committed tables: rows of what ships are complete; rows of older objects are named and skipped, never held."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.hip.executor import remake as remaking
from tests.hip.executor import table as tables
from tests.hip.executor.code_object import CodeObject, ExecutorError, object_digest
from tests.hip.executor.table import (
    COMMAND,
    OBJECTS,
    TABLES,
    Object,
    Row,
    Table,
    held,
    is_current,
    only,
    reason,
    stale,
)
from wgrad.hip.runtime.objects import read_object


@pytest.mark.parametrize("name", TABLES)
def test_rows_are_of_what_ships(name: str) -> None:
    """A row for each kernel of an object that is current; in hip_executed and hip_access_counts, of those that small
    cases launch: products and attention choose among many."""
    table, rows = TABLES[name], TABLES[name].rows()
    older = stale(table, rows)
    for made in set(table.objects()) - set(older):
        path = OBJECTS / f"{made}.co.xz"
        kernels = set(CodeObject(read_object(path), made.architecture, str(path)).kernels)
        there = {r["kernel"] for r in rows if (r["arch"], r["source"]) == made}
        chosen = (
            name == "hip_access_counts"
            or name == "hip_executed"
            and made.source.startswith(("gem", "linear", "attention"))
        )
        assert there <= kernels if chosen else there == kernels, made
    if older:
        pytest.skip(reason(name, older))


def test_every_source_is_in_a_table() -> None:
    """A new one gets its rows without anybody's saying so."""
    assert {made.source for t in TABLES.values() for made in t.objects()} == {made.source for made in tables.digests()}


# ---- what `held` does with rows of older objects ---------------------------------------------------
NEW = Object("gfx942", "rope")


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Table:
    """A table of the rows that ship of two objects; of the second, the object has changed since."""
    other = Object("gfx942", "norm")
    monkeypatch.setattr(tables, "digests", lambda: {NEW: "1" * 16, other: "2" * 16})
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    made = Table("planted", ("gfx942",), lambda source: True)
    monkeypatch.setitem(TABLES, "planted", made)
    rows: list[Row] = [
        {"arch": "gfx942", "kernel": "rope", "spills": 0, "source": "rope", "object": "1" * 16},
        {"arch": "gfx942", "kernel": "norm", "spills": 9, "source": "norm", "object": "0" * 16},
    ]
    made.path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return made


def plant(table: Table, kernel: str, **changed: Any) -> None:
    table.write(r | (changed if r["kernel"] == kernel else {}) for r in table.rows())


def nothing_spills(chosen: Any = lambda row: True) -> None:
    """Check that no row spills, as a test of limits does."""
    with held("planted", chosen) as rows:
        assert [r["kernel"] for r in rows if r["spills"]] == []


def test_a_stale_row_skips_and_names_the_command(table: Table) -> None:
    """Though it would break the limit."""
    with pytest.raises(pytest.skip.Exception, match=f"gfx942/norm.*{COMMAND}"):
        nothing_spills()
    assert stale(table, table.rows()) == [Object("gfx942", "norm")]


def test_a_wrong_row_of_what_ships_fails_though_others_are_stale(table: Table) -> None:
    plant(table, "rope", spills=1)
    with pytest.raises(AssertionError, match="rope"):
        nothing_spills()


def test_rows_that_a_test_does_not_ask_for_do_not_skip_it(table: Table) -> None:
    nothing_spills(lambda row: row["kernel"] == "rope")


def test_rows_made_anew_are_held(table: Table) -> None:
    plant(table, "norm", object="2" * 16)
    with pytest.raises(AssertionError, match="norm"):
        nothing_spills()
    plant(table, "norm", spills=0)
    nothing_spills()


def test_an_object_without_rows_is_stale(table: Table) -> None:
    table.write(r for r in table.rows() if r["source"] == "rope")
    assert stale(table, table.rows()) == [Object("gfx942", "norm")]


def test_one_row_that_is_missing_skips(table: Table) -> None:
    with pytest.raises(pytest.skip.Exception, match=COMMAND), held("planted") as rows:
        assert only(rows, "rope")["spills"] == 0
        only(rows, "norm")


def test_remade_rows_are_of_what_ships_and_the_others_stay(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Object] = []

    def rows(which: Object, kernels: list[str], say: Callable[[str], None]) -> list[Row]:
        made.append(which)
        return [{"kernel": k, "spills": 0} for k in kernels]

    monkeypatch.setattr(remaking, "outdated", lambda folder: [])
    monkeypatch.setattr(remaking, "missing", lambda architecture: "")
    monkeypatch.setattr(remaking, "shipped", lambda s, a: SimpleNamespace(kernels={"norm": {}}, digest="2" * 16))
    monkeypatch.setitem(remaking.MAKERS, "planted", rows)
    options: dict[str, Any] = {"everything": False, "architectures": [], "source": ""}
    remaking.remake("planted", remaking.wanted(table, **options), print)
    assert made == [Object("gfx942", "norm")] and remaking.wanted(table, **options) == []
    assert [r["kernel"] for r in table.rows()] == ["norm", "rope"]
    nothing_spills()
    assert len(remaking.wanted(table, **{**options, "everything": True})) == 2
    monkeypatch.setitem(remaking.MAKERS, "planted", lambda *_: [])
    with pytest.raises(ExecutorError, match="nothing launches a kernel of gfx942/rope"):
        remaking.remake("planted", [NEW], print)
    monkeypatch.setattr(remaking, "outdated", lambda folder: ["gfx942/rope.co was made from another rope.hip"])
    with pytest.raises(ExecutorError, match="rope.co was made from another rope.hip.*run `make objects` first"):
        remaking.remake("planted", [NEW], print)


def test_digests_are_those_of_the_files() -> None:
    path = OBJECTS / f"{NEW}.co.xz"
    assert object_digest(read_object(path)) == tables.digests()[NEW]
    assert is_current({"arch": "gfx942", "source": "rope", "object": tables.digests()[NEW]})
