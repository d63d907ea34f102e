"""Shaders whose unrolled loops stay loops: the same operations in the same order, in less code.

Most of what a test of a shader takes is the machine code that a software driver makes of it. A compiler unrolls a loop
whose turns it can count: `more_turns` is 0, which it does not know.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from wgrad.wgsl.runtime.compile import Constant

# They repeat reads of workgroup memory and multiplications: most of the code of a GEMM or of attention. Operations of
# matrix units may stand in them.
_ROLLED = {"k TILE_K", "s K_STEPS", "k STEPS", "piece 2", "c DC4", "n VN4", "pass 2", "step STEPS", "n KEY_STEPS"}
_COUNTED = re.compile(r"(\s*for \(var (\w+) = \d+u(?: \* share)?; \2 < [\w *+/()-]+)(;.*\{.*)")
_TOGETHER = "Barrier|subgroup|workgroupUniformLoad|coop"  # what all invocations have to come to

Preprocess = Callable[[list[str], dict[str, Constant]], list[str]]


def rolled(plain: Preprocess) -> Preprocess:
    """Return `preprocess` that leaves loops as they are where their variable is a number and no part of a name."""

    def preprocess(lines: list[str], constants: dict[str, Constant]) -> list[str]:
        together = re.compile("|".join([_TOGETHER, *(rf"\b{name}\(" for name in _functions_with(_TOGETHER, lines))]))
        return _declared(_uncounted(plain(_loops(lines, together), constants), together))

    return preprocess


def _loops(lines: Sequence[str], together: re.Pattern[str]) -> list[str]:
    out: list[str] = []
    at = 0
    while at < len(lines):
        word, _, repeated = lines[at].strip().partition(" ")
        if word != "#unroll":
            out.append(lines[at])
            at += 1
            continue
        end = _end(lines, at)
        body = _loops(lines[at + 1 : end], together)
        name, count = repeated.split()
        if repeated in _ROLLED or _is_number(name, "\n".join(body), together):
            out.append(f"for (var turn_{name} = 0u; turn_{name} < {count} + more_turns; turn_{name}++) {{")
            out += [re.sub(rf"\${name}u?\b", f"turn_{name}", line) for line in body]
            out.append("}")
        else:
            out += [lines[at], *body, lines[end]]
        at = end + 1
    return out


def _end(lines: Sequence[str], at: int) -> int:
    depth = 0
    for i in range(at, len(lines)):
        word = lines[i].split(maxsplit=1)[:1]
        depth += (word == ["#unroll"]) - (word == ["#end"])
        if depth == 0:
            return i
    raise ValueError(f"no #end for line {at + 1}: {lines[at]}")


def _is_number(name: str, body: str, together: re.Pattern[str]) -> bool:
    """Return whether the variable of a loop is an operand or index, and no turn waits for other invocations."""
    uses = body.count(f"${name}")
    as_number = re.findall(rf"(?<![\w$])\${name}u\b|\[\${name}\]", re.sub("#.*", "", body))
    return uses == len(as_number) and not together.search(body)


def _uncounted(lines: list[str], together: re.Pattern[str]) -> list[str]:
    """The lines with counted loops likewise."""
    out = list(lines)
    for i, line in enumerate(lines):
        if "for (" in line and (found := _COUNTED.match(line)) and "more_turns" not in line:
            if not together.search("\n".join(_body(lines, i))):
                out[i] = f"{found[1]} + more_turns{found[3]}"
    return out


def _body(lines: Sequence[str], at: int) -> Sequence[str]:
    """The lines of the function or loop that begins there."""
    depth, end, begun = 0, at, False
    while end < len(lines) and (depth or not begun):
        depth += lines[end].count("{") - lines[end].count("}")
        begun = begun or "{" in lines[end]
        end += 1
    return lines[at:end]


def _functions_with(words: str, lines: Sequence[str]) -> set[str]:
    """Names of functions that use these words, or call one that does."""
    texts: dict[str, str] = {}
    for i, line in enumerate(lines):
        if (head := re.match(r"fn (\w+)\(", line)) and head[1] not in texts:
            end = next((j for j in range(i + 1, len(lines)) if lines[j].startswith(("fn ", "@compute"))), len(lines))
            texts[head[1]] = "\n".join(lines[i + 1 : end])
    found, new = set[str](), {name for name, text in texts.items() if re.search(words, text)}
    while new:
        found |= new
        calls = "|".join(rf"\b{name}\(" for name in new)
        new = {name for name, text in texts.items() if name not in found and re.search(calls, text)}
    return found


def _declared(lines: list[str]) -> list[str]:
    """The lines with `more_turns`, which entry points set."""
    if not any("more_turns" in line for line in lines):
        return lines
    out, entry, signature = ["var<private> more_turns: u32;"], False, ""
    for line in lines:
        out.append(line)
        entry = entry or line.startswith("@compute")
        if entry and (signature or "fn " in line):
            signature += line
            if "{" in line:
                out += ["  more_turns = lid / 1024u;"] if re.search(r"\blid: u32", signature) else []
                entry, signature = False, ""
    return out
