"""Rewrite the cooperative matrices of a shader to other shapes than 16 x 16 x 16.

Kernels are written for 16 x 16 x 16, which keeps tiles, strips and loops the same on every GPU. Where a GPU has smaller
matrices, each operation becomes several: a load of 16 x 16 elements becomes loads of its parts, a multiplication those
of all pairs of parts that share a side. Parts of `x` are `x_<row>_<column>`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from wgrad.wgsl.runtime.cooperative_shapes import BLOCK, Shape

SHAPE = "MATRIX_SHAPE"  # constant of a variant: the shape as text; without it, BLOCK
_SIDE = 16
_OPERATIONS = {
    "load": re.compile(
        r"(let )?(\w+) = coopLoad(T?)<coop_mat16x16<f(?:16|32), ([ABC])>>\(&(\w+)\[(\w+)\](\.low)?, (\w+)\);"
    ),
    "zero": re.compile(r"var (\w+) = coop_mat16x16<f32, C>\(\);"),
    "multiply": re.compile(r"(\w+) = coopMultiplyAdd\((\w+), (\w+), \1\);"),
    "store": re.compile(r"coopStoreT\((\w+), &(\w+)\[(\w+)\], (\w+)\);"),
}


def constant_of(shape: Shape) -> dict[str, str]:
    """Constant of a variant of this shape."""
    return {} if shape == BLOCK else {SHAPE: "x".join(map(str, shape))}


def in_shape(text: str, shape: str) -> str:
    """Return the assembled text with matrices of a shape. Raises ValueError for an unknown operation."""
    parts = _Parts(Shape(*map(int, shape.split("x"))))
    return "\n".join(part for line in text.splitlines() for part in parts.of(line))


class _Parts:
    """Lines of a shape for one line of 16 x 16 x 16."""

    def __init__(self, shape: Shape) -> None:
        self._rows = {"A": shape.m, "B": shape.k, "C": shape.m}
        self._columns = {"A": shape.k, "B": shape.n, "C": shape.n}

    def of(self, line: str) -> Iterator[str]:
        code, comment, origin = line.partition(" //")
        space = code[: len(code) - len(code.lstrip())]
        for name, pattern in _OPERATIONS.items():
            found = pattern.fullmatch(code.strip())
            if found:
                made = getattr(self, f"_{name}")(*found.groups())
                yield from (f"{space}{one}{comment}{origin}" for one in made)
                return
        if "coop" in re.sub("^enable .*", "", code):
            raise ValueError(f"a cooperative operation of which no parts are known: {code.strip()}")
        yield line

    def _each(self, role: str) -> list[tuple[int, int]]:
        """First row and column of each part of 16 x 16 elements."""
        rows, columns = range(0, _SIDE, self._rows[role]), range(0, _SIDE, self._columns[role])
        return [(row, column) for row in rows for column in columns]

    def _load(
        self, let: str | None, name: str, by_rows: str, role: str, array: str, at: str, low: str | None, ld: str
    ) -> Iterator[str]:
        kind = f"coop_mat{self._columns[role]}x{self._rows[role]}<{'f32' if role == 'C' else 'f16'}, {role}>"
        for row, column in self._each(role):
            along, across = (row, column) if by_rows else (column, row)
            index = f"{name}_at_{row}_{column}"
            yield f"let {index} = {_place(at, along, across, ld, bool(low))};"
            yield f"{let or ''}{name}_{row}_{column} = coopLoad{by_rows}<{kind}>(&{array}[{index}]{low or ''}, {ld});"

    def _zero(self, name: str) -> Iterator[str]:
        for row, column in self._each("C"):
            yield f"var {name}_{row}_{column} = coop_mat{self._columns['C']}x{self._rows['C']}<f32, C>();"

    def _multiply(self, c: str, a: str, b: str) -> Iterator[str]:
        for k in range(0, _SIDE, self._rows["B"]):
            for row, column in self._each("C"):
                part = f"{c}_{row}_{column}"
                yield f"{part} = coopMultiplyAdd({a}_{row}_{k}, {b}_{k}_{column}, {part});"

    def _store(self, name: str, array: str, at: str, ld: str) -> Iterator[str]:
        for row, column in self._each("C"):
            index = f"{array}_of_{name}_{row}_{column}"
            yield f"let {index} = {_place(at, row, column, ld, False)};"
            yield f"coopStoreT({name}_{row}_{column}, &{array}[{index}], {ld});"


def _place(at: str, rows: int, elements: int, ld: str, eights: bool) -> str:
    """Index of the part that is offset by rows and elements, in vec4 or in eights. ld: vec4 per row."""
    unit = 2 if eights else 1
    return at + (f" + {rows // unit}u * {ld}" if rows else "") + (f" + {elements // 4 // unit}u" if elements else "")
