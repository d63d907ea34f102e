"""The shader loader: constants on top, #include, #if, #unroll, bindings that a variant leaves out."""

from __future__ import annotations

from pathlib import Path

import pytest

from wgrad.wgsl.runtime import compile as compile_module
from wgrad.wgsl.runtime.compile import assemble, declare, preprocess, read_source


def lines(text: str, **constants: object) -> list[str]:
    return [line.strip() for line in preprocess(text.strip("\n").split("\n"), constants) if line.strip()]  # type: ignore[arg-type]


def test_constants_are_declared_by_type() -> None:
    assert declare("N", 3) == "const N: u32 = 3u;"
    assert declare("X", 0.1) == "const X: f32 = 0.1f;"
    assert declare("B", True) == "const B: bool = true;"
    assert declare("T", "vec4<f16>") == "alias T = vec4<f16>;"


def test_enables_come_first_and_once() -> None:
    text = assemble("enable f16;\nfn f() {}\nenable subgroups;", {"T": "f16", "N": 1})
    assert text.split("\n")[:4] == ["enable f16;", "enable subgroups;", "alias T = f16;", "const N: u32 = 1u;"]
    assert assemble("fn f() {}", {"T": "f32"}).startswith("alias T")


CONDITIONS = """
#if A
a
#if KIND == 2
two
#else
not two
#endif
#else
not a
#endif
#if !A
never with a
#endif
#if KIND != 1
not one
#endif
"""


@pytest.mark.parametrize(
    ("constants", "wanted"),
    [
        ({"A": True, "KIND": 2}, ["a", "two", "not one"]),
        ({"A": True, "KIND": 1}, ["a", "not two"]),
        ({"A": 0, "KIND": 2}, ["not a", "never with a", "not one"]),
    ],
)
def test_conditions_choose_their_lines(constants, wanted) -> None:
    assert lines(CONDITIONS, **constants) == wanted


def test_unroll_repeats_its_lines() -> None:
    text = "#unroll i 2\nlet x$i = y[$iu];\n#unroll j N\nz$i$j\n#end\n#end"
    assert lines(text, N=2) == ["let x0 = y[0u];", "z00", "z01", "let x1 = y[1u];", "z10", "z11"]
    assert lines("#unroll i N\n#if A\n$i\n#endif\n#end", N=3, A=False) == []


def test_a_block_without_end_is_refused() -> None:
    with pytest.raises(ValueError, match="no #endif"):
        lines("#if A\nx", A=True)
    with pytest.raises(ValueError, match="no #end "):
        lines("#unroll i 2\nx")


def test_include_is_replaced_by_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_module, "_ROOM", tmp_path)
    (tmp_path / "inner.wgsl").write_text("let i = 1u;\n", encoding="utf-8")
    (tmp_path / "middle.wgsl").write_text('{\n#include "inner.wgsl"\n}\n', encoding="utf-8")
    (tmp_path / "outer.wgsl").write_text('a\n#include "middle.wgsl"\nb\n#include "inner.wgsl"\n', encoding="utf-8")
    assert read_source("outer.wgsl", {}) == "a\n{\nlet i = 1u;\n}\nb\nlet i = 1u;\n"
    with pytest.raises(FileNotFoundError):
        read_source("none.wgsl", {})


def test_include_takes_a_part_with_its_parameters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_module, "_ROOM", tmp_path)
    (tmp_path / "family").mkdir()
    text = "// Parts.\n\n#part one\nlet a = 1u;\n#endpart\n\n#part two x\nlet $x = 2u;\n#include one\n#endpart\n"
    (tmp_path / "family" / "shared.inc.wgsl").write_text(text, encoding="utf-8")
    two = '#include "shared.inc.wgsl" two'
    own = f"#include own y=q\n{two} x=b\n#part own y\n{two} x=$y\n#endpart\n"
    (tmp_path / "outer.wgsl").write_text(own, encoding="utf-8")
    assert read_source("outer.wgsl", {}) == "let q = 2u;\nlet a = 1u;\nlet b = 2u;\nlet a = 1u;\n"
    tagged = read_source("outer.wgsl", {}, tagged=True).splitlines()
    assert tagged[:2] == ["let q = 2u; //@shared.inc.wgsl:8", "let a = 1u; //@shared.inc.wgsl:4"]
    for wrong, said in (("two", "takes"), ("two x=b y=c", "takes"), ("three", "has no part three")):
        (tmp_path / "outer.wgsl").write_text(f'#include "shared.inc.wgsl" {wrong}\n', encoding="utf-8")
        with pytest.raises(ValueError, match=said):
            read_source("outer.wgsl", {})


def test_include_takes_words_and_a_constant_for_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_module, "_ROOM", tmp_path)
    (tmp_path / "row.wgsl").write_text("fn load_$x() -> f32 { return $x[$at]; }\n", encoding="utf-8")
    (tmp_path / "both.wgsl").write_text('#include "row.wgsl" x=$x at=i*2u\n', encoding="utf-8")
    (tmp_path / "outer.wgsl").write_text('#include "both.wgsl" x=q\n#include FORMAT x=k at=0\n', encoding="utf-8")
    constants: dict = {"FORMAT": "row.wgsl", "T": "f32"}
    wanted = "fn load_q() -> f32 { return q[i*2u]; }\nfn load_k() -> f32 { return k[0]; }"
    assert read_source("outer.wgsl", constants) == wanted + "\n"
    # A file is for the loader: only what WGSL may know is declared.
    assert assemble("// a comment\n" + wanted, constants) == "alias T = f32;\n" + wanted
