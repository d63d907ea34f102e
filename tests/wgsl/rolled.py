"""Shaders whose loops over a tile's depth stay loops: the same operations in the same order, in less code to compile."""

from __future__ import annotations

from collections.abc import Callable

from wgrad.wgsl.runtime.compile import Constant

# What they repeat reads and multiplies what stands in workgroup memory, and is most of the code of a GEMM or of attention.
_ROLLED = {"#unroll k TILE_K", "#unroll s K_STEPS", "#unroll k STEPS", "#unroll piece 2", "#unroll c DC4", "#unroll n VN4"}

Preprocess = Callable[[list[str], dict[str, Constant]], list[str]]


def rolled(plain: Preprocess) -> Preprocess:
    """Return `preprocess` with these of its `#unroll` as loops. `lid / THREADS` is 0, which a compiler does not know, so
    that it does not unroll them either."""

    def preprocess(lines: list[str], constants: dict[str, Constant]) -> list[str]:
        out: list[str] = []
        ends: list[str] = []
        names: list[str] = []
        for line in lines:
            word = line.strip()
            if word.startswith("#unroll "):
                _, name, count = word.split()
                if word in _ROLLED:
                    turn = f"turn_{name}"
                    line = f"for (var {turn} = 0u; {turn} < {count} + lid / THREADS; {turn}++) {{"
                    names.append(name)
                ends.append("}" if word in _ROLLED else line)
            elif word == "#end" and (end := ends.pop()) == "}":
                names.pop()
                line = end
            for name in names:
                line = line.replace(f"${name}u", f"turn_{name}").replace(f"${name}", f"turn_{name}")
            out.append(line)
        return plain(out, constants)

    return preprocess
