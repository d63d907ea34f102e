"""Sets that only `make test-all` runs: they are a part of the sets of each test, never all of them."""

from __future__ import annotations

from pathlib import Path

from tests.sweeps import SWEEPS, Evenly, InTurn, Odd, Sizes, Types, Variants, Without, sweep_part

ROOT = Path(__file__).parents[1]


def test_every_entry_names_a_test() -> None:
    for name in SWEEPS:
        file, _, test = name.partition("::")
        text = (ROOT / file).read_text(encoding="utf-8")
        assert f"def {test}(" in text or f"\n{test} = " in text, name


def test_sizes_that_differ_alone_are_a_sweep() -> None:
    names = ["t[nn/plain/41x123x67/float32]", "t[nn/plain/3x5x7/float32]", "t[nn/plain/41x123x67/float16]", "t[q4_0-7]"]
    assert Sizes().chosen(names) == {names[1], names[2], names[3]} or Sizes().chosen(names) == {*names} - {names[1]}
    assert Sizes(2).chosen(names) == set(names)


def test_odd_sizes_stay_and_types_take_turns() -> None:
    sizes, kinds = ("128x128x64", "41x123x67", "3x130x72"), ("float32", "float16", "float16*float32")
    names = [f"t[{variant}/{size}/{kind}]" for kind in kinds for variant in ("plain", "bias") for size in sizes]
    assert Odd().chosen(names) == {name for name in names if "41x123x67" in name}
    mixed = {name for name in names if "*" in name and "41x123x67" in name}
    assert Types(Odd()).chosen(names) == {"t[plain/41x123x67/float32]", "t[bias/41x123x67/float16]"} | mixed
    assert Types(Odd(), first=1).chosen(names) == {"t[plain/41x123x67/float16]", "t[bias/41x123x67/float32]"} | mixed
    assert Types(Odd(), without="bias|[*]").chosen(names) == {"t[plain/41x123x67/float32]"}
    assert Types(Odd(), without="[*]", always="plain").chosen(names) == {
        *(f"t[plain/41x123x67/{kind}]" for kind in kinds[:2]),
        "t[bias/41x123x67/float32]",
    }


def test_evenly_and_without_choose_their_sets() -> None:
    names = [f"t[{i}]" for i in range(9)]
    assert Evenly(3).chosen(names) == {"t[1]", "t[4]", "t[7]"} and Evenly(20).chosen(names) == set(names)
    assert Without("[0-7]").chosen(names) == {"t[8]"}


def test_sizes_and_dtypes_take_turns_but_for_those_that_are_left_out() -> None:
    names = [f"t[{op}/{size}/{kind}]" for op in "ab" for size in ("3x5", "41") for kind in ("float32", "float16")]
    assert Variants().chosen(names) == {"t[a/3x5/float32]", "t[b/3x5/float16]"}
    assert Variants(without="b/.*float16").chosen(names) == {"t[a/3x5/float32]", "t[b/3x5/float32]"}
    assert Variants(without="b").chosen(names) == Variants().chosen(names)


def test_the_last_parameter_takes_turns() -> None:
    names = [f"t[{case}-{lanes}]" for case in ("a-b", "left out", "c", "d") for lanes in (32, 64)]
    assert InTurn("left out").chosen(names) == {"t[a-b-32]", "t[a-b-64]", "t[c-64]", "t[d-32]"}
    many = [f"t[{n}-{lanes}]" for n in range(14) for lanes in (8, 32)]
    assert sum(name.endswith("-8]") for name in InTurn().chosen(many)) == 7
    assert sum(name.endswith("-8]") for name in InTurn(rare=("8",)).chosen(many)) == 1
    always = InTurn(rare=("8",), always=r"\[5-8\]").chosen(many)
    assert sum(name.endswith("-8]") for name in always) == 2 and "t[5-8]" in always


def test_something_of_each_test_stays_and_others_are_left_alone() -> None:
    names = [f"{test}[{i}]" for test in SWEEPS for i in range(40)] + ["tests/other.py::test[1]"]
    left = sweep_part(names)
    assert not [name for name in left if name.startswith("tests/other")]
    for test, rule in SWEEPS.items():
        assert isinstance(rule, Without) or {n for n in names if n.startswith(f"{test}[")} - left
