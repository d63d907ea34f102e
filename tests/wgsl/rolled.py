"""Shaders whose loops over the depth of a tile stay loops: the same operations in the same order, in less code."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache

from wgrad.wgsl.gemm import gemm_tile
from wgrad.wgsl.runtime import compile as wgsl_compile
from wgrad.wgsl.runtime.compile import Constant

# They repeat reads of workgroup memory and multiplications: most of the code of a GEMM or of attention.
_ROLLED = {"k TILE_K", "s K_STEPS", "k STEPS", "piece 2", "c DC4", "n VN4", "pass 2", "step STEPS", "n KEY_STEPS"}
_ROLLED |= {"s RUNS", "q GROUP_QUADS"}  # of the delta rule on tensor cores, of a GEMV
# Of the delta rule: rows and columns of a tile, where a GEMV counts rows by the same name and keeps each in a variable
# of its own; and the 16 numbers of a column of the inverse. Rows and numbers become arrays.
_TILE, _OF_TILES = "struct Tile {", {"c 4", "i 4", "n 4", "t 16", "n 16", "k 16"}
_ROWS_OF_TILE = "struct Tile { r: array<vec4<f32>, 4> }"
_NO_TILE = f"Tile({', '.join(4 * ['vec4<f32>(0.0)'])})"
_ROW_OF_TILE = re.compile(r"\.r(\$\w|[0-3])\b")
_COPY_OF_TILE = re.compile(r"let (\w+) = tile;")  # whose rows are chosen by a variable
_NUMBERED = re.compile(r"(?:var |let )?\b(made|system|inverse|own)_\$(\w)\b")
# Operands of its matmuls, which an invocation loads before a barrier and stores behind it, become arrays.
_LOADED, _AHEAD = re.compile(r"(?:let )?\b([lr]hs)_\$e\b"), "e RUNS"
_LOADS = [f"var<private> {name}_loaded: array<vec4<f16>, RUNS>;" for name in ("lhs", "rhs")]
_ARRAYS = [f"var<private> {name}_16: array<f32, 16>;" for name in ("made", "system", "inverse", "own")]
# Loops that a compiler unrolls, by how they end: sums over invocations of a skinny GEMM, the delta rule and decoding.
_COUNTED = re.compile(r"(other < SLICES|n < (?:16|32)u|s < SPLIT|x < (?:16u|AT_ONCE));")
# Four loads of the delta rule, each a function that compilers inline: LEFT = vec4<f32>(f(r, k), f(r + 1u, k), ...).
_FOUR_ROWS = re.compile(r"( *)((?:left|right)\[.*\]) = vec4<f32>\((\w+)\(r, k\), .*\);")
_FOUR_COLUMNS = re.compile(r"( *)((?:left|right)\[.*\]) = vec4<f32>\((\w+)\(k, c\), .*\);")
_FOUR = r"\1for (var four = 0u; four < 4u + lid / 1024u; four++) { \2[four] = \3(%s); }"


@cache  # shaders and their variants have most lines in common
def _counted(line: str) -> str:
    """Return a line with its four loads as a loop, and with a loop's end that a compiler does not know."""
    line = _FOUR_ROWS.sub(_FOUR % "r + four, k", _FOUR_COLUMNS.sub(_FOUR % "k, c + four", line))
    return _COUNTED.sub(r"\1 + lid / 1024u;", line)


Preprocess = Callable[[list[str], dict[str, Constant]], list[str]]


def rolled(plain: Preprocess) -> Preprocess:
    """Return `preprocess` with these of its `#unroll` as loops.

    `lid / 1024` is 0, which a compiler does not know: it does not unroll them either.
    """

    def preprocess(lines: list[str], constants: dict[str, Constant]) -> list[str]:
        tiles = any(line.startswith(_TILE) for line in lines)
        rolled = _ROLLED | _OF_TILES if tiles else _ROLLED
        if not constants.get("RESIDUAL_AHEAD"):  # which is in variables of their own
            rolled = rolled | {"q STORES"}
        out: list[str] = _ARRAYS[:] if tiles else []
        if any(line.strip() == f"#unroll {_AHEAD}" for line in lines):
            rolled = rolled | {_AHEAD}
            out += _LOADS
        ends: list[str] = []
        names: list[str] = []
        for number, line in enumerate(lines):
            if tiles:
                line = _NUMBERED.sub(r"\1_16[turn_\2]", line)
                line = _ROWS_OF_TILE if line.startswith(_TILE) else _ROW_OF_TILE.sub(r".r[\1]", line)
                line = _LOADED.sub(r"\1_loaded[turn_e]", line)
                line = _COPY_OF_TILE.sub(r"var \1 = tile;", line).replace(_NO_TILE, "Tile()")
            word, _, repeated = line.strip().partition(" ")
            if word == "#unroll":
                name, count = repeated.split()
                # What has a variable of its own for each turn is used behind the loop.
                loop = repeated in rolled and f"let kept_${name} =" not in lines[number + 1]
                ends.append("}" if loop else line)
                if loop:
                    names.append(name)
                    line = f"for (var turn_{name} = 0u; turn_{name} < {count} + lid / 1024u; turn_{name}++) {{"
            elif word == "#end" and (end := ends.pop()) == "}":
                names.pop()
                line = end
            for name in names:
                line = line.replace(f"${name}u", f"turn_{name}").replace(f"${name}", f"turn_{name}")
            out.append(_counted(line))
        return plain(out, constants)

    return preprocess


_software_tile = gemm_tile.software_tile


@cache
def _small_tile(m: int, n: int) -> gemm_tile.Tile:
    large = _software_tile(m, n)
    return replace(large, m=max(16, large.m // 4), n=max(16, large.n // 4), tm4=1, tn4=1)


def quick_to_compile(set_attribute: Callable[[object, str, object], None] = setattr) -> None:
    """Roll the loops of this process's shaders, and have 4 x 4 results an invocation in GEMMs on a software driver, not
    16 x 16: the same operations in the same order, and the same bits."""
    set_attribute(gemm_tile, "software_tile", _small_tile)
    set_attribute(wgsl_compile, "preprocess", rolled(wgsl_compile.preprocess))
