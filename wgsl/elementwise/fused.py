"""Elementwise expressions of broadcast operands, optionally reduced, in one launch. Shader: fused.wgsl."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from wgrad.device.expression import FUNCTIONS, SOURCES, ElementwiseFunction, Program, View, row_major
from wgrad.device.memory import Array
from wgrad.wgsl.elements import GROUP, next_power_of_two, same_block, wgsl_type
from wgrad.wgsl.elementwise.elementwise import copy
from wgrad.wgsl.operators import implements
from wgrad.wgsl.runtime.compile import Constant
from wgrad.wgsl.runtime.runtime import Runtime

_PER_GROUP = 4 * GROUP
_ENOUGH_GROUPS = 256  # a reduction is divided among so many workgroups if it has enough rows
_LEAST_ROWS = 16  # rows per invocation below which a reduction is not divided
_KINDS = {"sum": 1, "max": 2}


class _Axes(NamedTuple):
    """Sizes of axes, and their strides by view; neighboring axes are merged where every view allows it."""

    sizes: list[int]
    strides: list[list[int]]


@implements("fused")
def fused(
    device: Runtime,
    program: Program,
    arrays: tuple[Array, ...],
    views: tuple[View, ...],
    scalars: tuple[float, ...],
    shape: tuple[int, ...],
    reduce: str,
    axes: tuple[int, ...],
    out: Array | None,
    place: View | None,
    accumulate: bool,
    dtype: np.dtype,
) -> Array:
    kept = [axis for axis in range(len(shape)) if axis not in axes]
    kept_shape = tuple(shape[axis] for axis in kept)
    result = device.empty(kept_shape, dtype) if out is None else out
    if out is not None and any(same_block(out, a) for a in arrays):  # bound for reading and for writing at once
        arrays = tuple(_copied(device, a) if same_block(out, a) else a for a in arrays)
    place = place or (row_major(kept_shape), 0)
    rows, n = math.prod(shape[axis] for axis in axes), math.prod(kept_shape)
    launch = _Launch(device, program, arrays, views, scalars, shape, kept)
    if not reduce:
        launch.run(result, place, accumulate, device.groups(n, _PER_GROUP))
        return result
    wide, inside = _layout(n, rows, views, kept, axes)
    tiles, tall = -(-n // wide), GROUP // wide
    chunks = max(1, min(-(-rows // (tall * _LEAST_ROWS)), _ENOUGH_GROUPS // tiles))
    step = -(-rows // chunks)
    chunks = -(-rows // step)
    whole = chunks == 1
    target = result if whole else device.empty((chunks, *kept_shape))
    where = place if whole else (row_major(kept_shape), 0)
    groups = device.groups(tiles * chunks, 1)
    launch.run(target, where, accumulate and whole, groups, wide, _KINDS[reduce], (rows, step), inside)
    if not whole:
        parts = (("load", 0),), (target,), ((row_major(target.shape), 0),), (), target.shape
        fused(device, *parts, reduce, (0,), result, place, accumulate, result.dtype)
    return result


def _copied(device: Runtime, array: Array) -> Array:
    made = device.empty(array.shape, array.dtype)
    copy(device, array, made)
    return made


def _layout(n: int, rows: int, views: Sequence[View], kept: Sequence[int], axes: Sequence[int]) -> tuple[int, bool]:
    """Results that a workgroup computes, and whether its neighboring invocations take neighboring rows.

    They do where most operands are contiguous along the rows.
    """
    unit = [{axis for axis, stride in enumerate(strides) if stride == 1} for strides, _ in views]
    inside = sum(bool(u & {*axes}) for u in unit) >= sum(bool(u & {*kept}) for u in unit)
    if inside:
        return GROUP // min(GROUP, next_power_of_two(rows)), True
    tall = min(GROUP // 32, next_power_of_two(-(-rows // 4)))
    return min(GROUP // tall, next_power_of_two(n)), False


def _merged(sizes: Sequence[int], strides: Sequence[Sequence[int]], fixed: set[int]) -> tuple[_Axes, dict[int, int]]:
    """Merge axes and drop those of size 1, except the `fixed` ones; also return where each fixed one is now."""
    found, where = _Axes([], [[] for _ in strides]), {}
    joins = False
    for axis, size in enumerate(sizes):
        if axis in fixed:
            where[axis] = len(found.sizes)
            joins = False
        elif size == 1:
            continue
        elif joins and all(s[-1] == stride[axis] * size for s, stride in zip(found.strides, strides)):
            found.sizes[-1] *= size
            for s, stride in zip(found.strides, strides):
                s[-1] = stride[axis]
            continue
        else:
            joins = True
        found.sizes.append(size)
        for s, stride in zip(found.strides, strides):
            s.append(stride[axis])
    return found, where


class _Uniform:
    """Fields of the uniform after those that every launch has, and their values."""

    def __init__(self, *values: int) -> None:
        self.text, self.values = "", list[int | float](values)

    def field(self, kind: str, value: int | float, name: str = "") -> str:
        name = name or f"q{len(self.values)}"
        self.text += f", {name}: {kind}"
        self.values.append(value)
        return f"p.{name}"


class _Shader:
    """WGSL of an expression at index k of the kept axes and index r of the reduced ones."""

    def __init__(self, uniform: _Uniform, program: Program, shape: Sequence[int], kept: Sequence[int]) -> None:
        self._uniform, self._program, self._shape = uniform, program, shape
        self._axes = {"k": list(kept), "r": [a for a in range(len(shape)) if a not in kept]}
        self._indexed = {operands[0] for name, *operands in program if name == "index"}
        self._coordinates: dict[str, list[str]] = {"k": [], "r": []}
        self._index: dict[int, str] = {}  # the coordinate along an axis that the program asks for

    def text(self, views: Sequence[View], place: View, scalars: Sequence[float]) -> str:
        at = [list[str]() for _ in range(len(views) + 1)]
        for letter, axes in self._axes.items():
            strides = [[view[0][axis] for axis in axes] for view in views]
            strides += [list(place[0])] if letter == "k" else []
            fixed = {axes.index(axis) for axis in self._indexed & {*axes}}
            merged, where = _merged([self._shape[axis] for axis in axes], strides, fixed)
            names = self._split(letter, merged.sizes)
            self._index |= {axes[i]: names[n] for i, n in where.items()}
            for terms, of in zip(at, merged.strides):
                terms += [
                    name if stride == 1 else f"{name} * {self._uniform.field('u32', stride)}"
                    for name, stride in zip(names, of)
                    if stride
                ]
        for terms, (_, offset) in zip(at, [*views, place]):
            terms += [self._uniform.field("u32", offset)] if offset else []
        *loads, y = (" + ".join(terms) or "0u" for terms in at)
        value = [*self._coordinates["k"], *self._coordinates["r"], *self._instructions(loads, scalars)]
        place_lines = ["fn place(k: u32) -> u32 {", *self._coordinates["k"], f"return {y};\n}}"]
        value_lines = ["fn value(k: u32, r: u32) -> f32 {", *value, f"return v{len(self._program) - 1};\n}}"]
        return "\n".join(map("\n  ".join, (place_lines, value_lines)))

    def _split(self, letter: str, sizes: Sequence[int]) -> list[str]:
        """Names of the coordinates that a flat index has along axes of these sizes."""
        if len(sizes) < 2:
            return [letter] * len(sizes)
        lines = self._coordinates[letter]
        lines.append(f"var {letter}_rest = {letter};")
        for i in reversed(range(1, len(sizes))):
            size = self._uniform.field("u32", sizes[i])
            lines.append(f"let {letter}{i} = {letter}_rest % {size}; {letter}_rest /= {size};")
        lines.append(f"let {letter}0 = {letter}_rest;")
        return [f"{letter}{i}" for i in range(len(sizes))]

    def _instructions(self, loads: Sequence[str], scalars: Sequence[float]) -> Iterator[str]:
        for number, (name, *operands) in enumerate(self._program):
            if name == "load":
                value = f"f32(a{operands[0]}[{loads[operands[0]]}])"
            elif name == "scalar":
                with np.errstate(over="ignore"):  # beyond float32 is inf
                    value = self._uniform.field("f32", float(np.float32(scalars[operands[0]])))
            elif name == "index":
                value = f"f32({self._index[operands[0]]})"
            elif name == "old":
                value = "f32(y[place(k)])"
            else:
                value = FUNCTIONS[name].wgsl
                for i, operand in enumerate(operands):
                    value = value.replace(f"${i}", f"v{operand}")
            yield f"let v{number} = {value};"


class _Launch(NamedTuple):
    """Arguments shared by the passes of one call."""

    device: Runtime
    program: Program
    arrays: tuple[Array, ...]
    views: tuple[View, ...]
    scalars: tuple[float, ...]
    shape: tuple[int, ...]
    kept: list[int]

    def run(
        self, y: Array, place: View, accumulate: bool, groups: tuple[int, int, int], wide: int = 0, kind: int = 0,
        rows: tuple[int, int] = (0, 0), inside: bool = False,
    ) -> None:  # fmt: skip
        """rows: reduced in all, and by a chunk."""
        types = tuple(wgsl_type(a.dtype) for a in (*self.arrays, y))
        constants: dict[str, Constant] = {"REDUCE": kind, "ACCUMULATE": accumulate}
        if kind:
            constants |= {"WIDE": wide, "ROWS_INSIDE": inside}
        given = self.program, self.views, self.scalars, self.shape, tuple(self.kept), place, types
        functions = tuple(FUNCTIONS[name] for name, *_ in self.program if name not in SOURCES)
        values, texts = _texts(functions, *given, rows if kind else ())
        work = float(sum(a.nbytes for a in self.arrays) + y.nbytes)
        self.device.launch("fused", [*self.arrays, y], values, groups, constants | texts, work=work)


@lru_cache(maxsize=1024)
def _texts(
    functions: tuple[ElementwiseFunction, ...],
    program: Program,
    views: tuple[View, ...],
    scalars: tuple[float, ...],
    shape: tuple[int, ...],
    kept: tuple[int, ...],
    place: View,
    types: tuple[str, ...],
    rows: tuple[int, ...],
) -> tuple[list[int | float], dict[str, str]]:
    """The uniform's values and the generated parts of the shader.

    functions: of the program, part of the cache's key because a name can be registered again. types: of the arrays'
    elements, the output's last.
    """
    uniform = _Uniform(math.prod(shape[axis] for axis in kept), 0)
    for name, count in zip(("rows", "step"), rows):
        uniform.field("u32", count, name)
    value = _Shader(uniform, program, shape, kept).text(views, place, scalars)
    bound = [
        f"@group(0) @binding({n}) var<storage, read> a{n - 1}: array<{kind}>;" for n, kind in enumerate(types[:-1], 1)
    ]
    bound.append(f"@group(0) @binding({len(types)}) var<storage, read_write> y: array<Y_T>;")
    helpers = _helpers([function.helper for function in functions])
    texts = {"FIELDS": uniform.text, "BINDINGS": "\n".join(bound), "HELPERS": helpers, "VALUE": value}
    return uniform.values, {"Y_T": types[-1], **texts}


def _helpers(texts: Sequence[str]) -> str:
    """Each WGSL function once, as several helpers may define the same."""
    functions = [function.strip() for text in texts for function in ("\n" + text).split("\nfn ")]
    return "\n".join(f"fn {function}" for function in dict.fromkeys(functions) if function)
