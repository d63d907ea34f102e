"""Values of users in errors, whole numbers of users in texts, and numbers with their nouns."""

from __future__ import annotations

import pytest

from wgrad.device.shown import counted, short
from wgrad.device.whole_numbers import whole_number


class Broken:
    def __repr__(self) -> str:
        raise RuntimeError


def test_any_value_is_shown_on_one_short_line() -> None:
    assert short("a\nb") == r"'a\nb'" and short(10**18) == str(10**18)
    assert short(10**5000) == "a number of 16610 bits" and short(-(10**5000)) == "a number of 16610 bits"
    assert short([10**5000]) == "a list" and short(Broken()) == "a Broken"
    assert short("x" * 200) == "'" + "x" * 59 + "..." + "x" * 9 + "'"


@pytest.mark.parametrize("text", ["", "-1", "²", "١", "1 ", "1_0", "9" * 19, "9" * 5000])
def test_whole_number_refuses_other_texts(text: str) -> None:
    assert whole_number(text) is None


def test_whole_number_reads_digits() -> None:
    assert [whole_number(text) for text in ("0", "007", "9" * 18)] == [0, 7, 10**18 - 1]


def test_a_number_has_its_noun() -> None:
    assert [counted(number, "step") for number in (0, 1, 2, 1200)] == ["0 steps", "1 step", "2 steps", "1,200 steps"]
    assert [counted(number, "copy", "copies") for number in (1, 2)] == ["1 copy", "2 copies"]
