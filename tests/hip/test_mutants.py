"""The list of mutants fits the sources. That each is found is for tests/hip/mutants.py, which takes hours."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.hip.mutants import LISTS, ROOT, all_mutants, read_list

LEAST = 150


def test_every_mutant_can_be_applied_once() -> None:
    mutants = all_mutants()
    places = Counter({m: (ROOT / m.file).read_text(encoding="utf-8").count(m.old) for m in mutants})
    assert [str(m) for m, count in places.items() if count != 1 or m.old == m.new] == []
    assert len(places) == len(mutants)
    assert sum(not m.equivalent for m in mutants) >= LEAST


def test_their_tests_exist() -> None:
    named = {word for m in all_mutants() for word in m.tests if word.endswith(".py")}
    assert [name for name in named if not (ROOT / name).is_file()] == []
    assert all(any(word.endswith(".py") for word in m.tests) for m in all_mutants())


def test_a_line_that_is_none_of_the_list_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "list.txt"
    path.write_text("[hip/gemm/gemm.py] tests/hip/test_gemm.py\n- a\n+ b\n= because\n\nanything\n")
    with pytest.raises(ValueError, match=r"list.txt:6: 'anything' is no line of a list of mutants"):
        read_list(path)
    assert LISTS.is_dir()
