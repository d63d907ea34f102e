"""Shaders whose workgroup memory begins as anything but zeros: the invocations fill it before the first statement.

WebGPU has it begin as zeros. wgpu-native makes every compute pipeline with `zero_initialize_workgroup_memory: false`
(`wgpuDeviceCreateComputePipeline` in its src/lib.rs, as of October 2024; seen on an H200 with 29.0.1.1), so that naga
writes no stores for it and a shader finds what the one before left there. lavapipe gives memory that is zeros, where
what relies on them passes every other test.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

# Infinity rather than not-a-number, which a maximum and a comparison lose. Out of a value of the run: as a constant the
# compiler refuses it.
_VALUES = {"f32": "infinite", "f16": "f16(infinite)", "u32": "0xffffffffu", "i32": "-1", "bool": "true"}
_VARIABLE = re.compile(r"var<workgroup>\s*(\w+)\s*:([^;]+);")
ALIAS = re.compile(r"\balias (\w+)\s*=([^;]+);")
_STRUCT = re.compile(r"\bstruct (\w+)\s*\{([^}]*)\}")
ENTRY = re.compile(r"@compute\s+@workgroup_size\(([^\n]+)\)\s*fn \w+\((.*?)\)\s*\{", re.DOTALL)
_FUNCTION = """
fn poison_workgroup_memory(lid: u32, invocations: u32) {{
  let infinite = bitcast<f32>(0x7f800000u | (lid & 0u));
{stores}  workgroupBarrier();
}}
"""


class Variable(NamedTuple):
    """A declaration of workgroup memory."""

    name: str
    type: str


def bare(text: str) -> str:
    return re.sub(r" *//.*", "", text)


def variables(text: str) -> list[Variable]:
    """The workgroup memory of a shader or a part of one. ValueError: some is not understood."""
    found = [Variable(name, type.strip()) for name, type in _VARIABLE.findall(bare(text))]
    if len(found) != bare(text).count("var<workgroup>"):
        raise ValueError("a declaration of workgroup memory that the poison does not understand")
    return found


def parts(text: str) -> list[str]:
    """Return the parts between commas outside brackets."""
    found, depth = [""], 0
    for letter in text:
        depth += (letter in "<(") - (letter in ">)")
        if letter == "," and depth == 0:
            found.append("")
        else:
            found[-1] += letter
    return [part.strip() for part in found if part.strip()]


class _Types:
    """The types that a text declares."""

    def __init__(self, text: str) -> None:
        self._aliases = {name: type.strip() for name, type in ALIAS.findall(text)}
        self._structs = {name: parts(fields) for name, fields in _STRUCT.findall(text)}

    def stores(self, place: str, type: str, depth: int = 0) -> Iterator[str]:
        """Statements that write each number of `place`; of the outermost array an invocation takes a share."""
        while type in self._aliases:
            type = self._aliases[type]
        if type in self._structs:
            for field in self._structs[type]:
                name, _, inner = (part.strip() for part in field.partition(":"))
                yield from self.stores(f"{place}.{name}", inner, depth)
        elif type.startswith("array<"):
            element, count = parts(type[len("array<") : -1])
            i, (first, step) = f"i{depth}", ("0u", "1u") if depth else ("lid", "invocations")
            yield f"for (var {i} = {first}; {i} < u32({count}); {i} += {step}) {{"
            yield from self.stores(f"{place}[{i}]", element, depth + 1)
            yield "}"
        else:
            yield f"{place} = {self._value(type)};"

    def _value(self, type: str) -> str:
        """Return the value of a number, or of a vector of them."""
        vector = re.fullmatch(r"vec([234])<(\w+)>", type)
        if vector:
            return f"vec{vector[1]}({self._value(vector[2])})"
        while type in self._aliases:
            type = self._aliases[type]
        if type not in _VALUES:
            raise ValueError(f"workgroup memory of a type that the poison does not know: {type}")
        return _VALUES[type]


def poisoned(text: str) -> str:
    """The assembled text of a variant, none of whose workgroup memory begins as zeros. ValueError: it has some that is
    not understood."""
    declared, types = variables(text), _Types(bare(text))
    if not declared:
        return text

    def filled(entry: re.Match[str]) -> str:
        if not re.search(r"@builtin\(local_invocation_index\)\s*lid: u32", entry[2]):
            raise ValueError("an entry point whose invocations have no index lid")
        return f"{entry[0]}\n  poison_workgroup_memory(lid, u32({entry[1]}));"

    lines = [line for variable in declared for line in types.stores(*variable)]
    text, entries = ENTRY.subn(filled, text)
    if entries != bare(text).count("@compute"):
        raise ValueError("an entry point that the poison does not find")
    return text + _FUNCTION.format(stores="".join(f"  {line}\n" for line in lines))
