"""Rules for the text of all shaders: what they open with, what they include, and that none repeats another."""

from __future__ import annotations

import re
from itertools import combinations

import pytest

from tests.wgsl.shader_files import FORMATS, SHADERS, SHARED

LONGEST_SHADER = 460
MOST_FILES = 5  # to read for one kernel
LONGEST_RUN = 7  # lines that two files may have in common: a signature, a loop over what an invocation owns


def substance(text: str) -> list[str]:
    """The lines without comments and spaces; those that only close something are not counted."""
    bare = (re.sub(r"//.*|\s", "", line) for line in text.splitlines())
    return [line for line in bare if line.strip("{})];,#") not in ("", "end", "endif", "else")]


def longest_run(one: list[str], other: list[str]) -> list[str]:
    """The most lines in a row that both have."""
    best, end = 0, 0
    before = [0] * (len(other) + 1)
    for i, line in enumerate(one):
        now = [0] * (len(other) + 1)
        for j, same in enumerate(other):
            if line == same:
                now[j + 1] = before[j] + 1
                if now[j + 1] > best:
                    best, end = now[j + 1], i + 1
        before = now
    return one[end - best : end]


def files_to_read(name: str) -> set[str]:
    """The file, what it includes, and of the weight formats the one with most."""
    found = {name}
    for inner in re.findall(r'^#include "(\S+)"', SHADERS[name], re.MULTILINE):
        found |= files_to_read(inner)
    if "#include B_FORMAT" in SHADERS[name]:
        found |= max((files_to_read(other) for other in FORMATS), key=lambda files: len(files - found))
    return found


def test_shared_text_is_in_inc_files_and_used() -> None:
    """A file has an entry point or is an `.inc.wgsl`; each of these, and each part, is included somewhere."""
    assert {name for name, text in SHADERS.items() if "@compute" not in text.partition("#part")[0]} <= SHARED | {
        "elementwise.wgsl"
    }
    assert FORMATS <= SHARED
    everything = "\n".join(SHADERS.values())
    for name in SHARED:
        parts = re.findall(r"^#part (\w+)", SHADERS[name], re.MULTILINE)
        for part in parts:
            used = rf'^#include ("{re.escape(name)}" )?{part}\b'
            assert re.search(used, everything, re.MULTILINE), f"{name}: nothing includes the part {part}"
        assert parts or name in FORMATS


def test_a_kernel_is_read_in_few_files() -> None:
    counts = {name: len(files_to_read(name)) for name in set(SHADERS) - SHARED}
    assert {name: n for name, n in counts.items() if n > MOST_FILES} == {}


@pytest.mark.parametrize("name", sorted(SHADERS))
def test_a_shader_opens_with_its_formula_and_dispatch(name: str) -> None:
    lines = SHADERS[name].splitlines()
    head = "\n".join(lines[: next(i for i, line in enumerate(lines) if not line.startswith("//"))])
    if name not in SHARED:
        assert "workgroup" in head, f"{name} does not open with how many workgroups it takes"
    assert head, f"{name} does not open with what it is a part of"
    assert len(lines) <= LONGEST_SHADER


def test_no_shader_repeats_another() -> None:
    lines = {name: substance(text) for name, text in SHADERS.items()}
    runs = {(a, b): longest_run(lines[a], lines[b]) for a, b in combinations(lines, 2)}
    repeated = {pair: run for pair, run in runs.items() if len(run) > LONGEST_RUN}
    assert repeated == {}, "make these lines a part that both include"


def test_a_repeated_body_is_seen() -> None:
    body = "\n".join(f"  let x{i} = {i}u;  // a comment" for i in range(LONGEST_RUN + 1))
    one, other = f"fn f() {{\n{body}\n}}", f"fn g() {{\n\n// another\n{body.replace('  let', 'let')}\n}}"
    assert len(longest_run(substance(one), substance(other))) == LONGEST_RUN + 1


def factors(text: str) -> list[str]:
    """Return the arguments of calls of `times` and `times4`, without the calls in them."""
    found, pattern = [], re.compile(r"\btimes4?\(((?:[^()]|\([^()]*\))*)\)")
    while match := pattern.search(text):
        found.append(match[1])
        text = text[: match.start()] + "made" + text[match.end() :]
    return found


@pytest.mark.parametrize("name", [name for name, text in SHADERS.items() if '"quantize.inc.wgsl" exact' in text])
def test_a_factor_that_counts_to_the_bit_is_no_bare_product(name: str) -> None:
    """A driver may reorder a product of products: NVIDIA's did, and a code of 27 x 768 was another."""
    text = re.sub(r"//.*", "", SHADERS[name])
    bare = {variable for variable, value in re.findall(r"(?:let|var) ([\w$]+) = ([^;]*);", text) if "*" in value}
    bare = {variable for variable in bare if not re.search(rf"{re.escape(variable)} = times4?\(", text)}
    given = factors(text)
    assert given and not [one for one in given if "*" in one]
    assert not [
        (one, variable) for one in given for variable in bare if re.search(rf"(?<!\w){re.escape(variable)}(?!\w)", one)
    ]


def test_bare_factors_are_seen() -> None:
    assert factors("a = times(b * c, d); e = times4(times4(f, g(h)), i * j);") == ["b * c, d", "f, g(h)", "made, i * j"]
