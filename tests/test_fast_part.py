"""Tests that --fast chooses: some of each test, each operator of the self-test, recent failures, and no oracles."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tests.conftest import FAST_SETS, fast_part
from wgrad.autograd.selftest.cases import cases


class Item:
    """The parts of a pytest.Item that are read."""

    def __init__(self, name: str, number: int, value: Any, *markers: str) -> None:
        self.nodeid, self.callspec, self.markers = (
            f"{name}[{number}]",
            SimpleNamespace(params={"value": value}),
            markers,
        )

    def get_closest_marker(self, name: str) -> str | None:
        return name if name in self.markers else None


def item(*about: Any) -> Any:
    return Item(*about)


def test_sets_are_taken_evenly_and_what_failed_is_kept() -> None:
    many = [item("many", i, i) for i in range(100)]
    one, oracle = item("one", 0, 0), item("oracle", 0, 0, "oracle")
    found = fast_part([*many, one, oracle], {"many[7]", "oracle[0]"})
    assert found == {many[i * 100 // FAST_SETS] for i in range(FAST_SETS)} | {many[7], one}


def test_of_the_self_test_every_operator_and_direction_is_there() -> None:
    items = [item("test_case", i, case) for i, case in enumerate(cases())]
    chosen_items: Any = fast_part(items, ())
    found = [chosen.callspec.params["value"] for chosen in chosen_items]
    kinds = {(case.op, case.direction) for case in cases()}
    assert len(found) == len(kinds) and {(case.op, case.direction) for case in found} == kinds
