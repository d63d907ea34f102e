"""Shaders that note their accesses to workgroup memory, and the races among these: two invocations at one element
between the same two barriers, of which at least one writes.

A software driver runs the invocations of a workgroup in rising order, and a GPU in any. So the results of a shader that
lacks a barrier can be right on one, and on a GPU now and then wrong. The notes show it in any order.

Subgroups load and store cooperative matrices as one, which is not the invocation that wrote an element.
`storageBarrier` orders storage alone: invocations wait for each other, so what was read before may be written behind
it, but what was written need not be seen. `subgroupBarrier` orders what invocations of one subgroup do. The barriers
that the emulation of subgroups needs are none of the shader.
"""

from __future__ import annotations

import re
from collections.abc import Container
from typing import NamedTuple

import numpy as np

from tests.wgsl.workgroup_poison import ALIAS, ENTRY, Variable, bare, parts, variables

BINDING = 40  # of the notes, behind a shader's own
WORKGROUPS = 2  # of a launch, which take notes: the first
_BARRIER, _WAIT, _OF_ONE = 0xFFFFFFFF, 0xFFFFFFFE, 0xFFFFFFFD
_SITE_BITS, _PLACE_BITS = 13, 18
_ASSIGNED = re.compile(r"\s*([-+*/|&^]|<<|>>)?=(?!=)|\+\+|--")
_COMPONENT = re.compile(r"\.([xyzw])(?!\w)")
_FUNCTION = re.compile(r"^fn (\w+)\(", re.MULTILINE)
_LOCAL = re.compile(r"\b(?:let|var|const) (\w+)|\b(\w+)\s*:")
_OF_SUBGROUP = re.compile(r"left_\w+|store_\w+|load_\w+|right_element")  # functions of the emulation
_BARRIERS_OF_EMULATION, _ITS_MEMORY = ("shuffle_xor", "any_of_lanes", "wait_of_subgroup"), "votes"
_HELPERS = """
@group(0) @binding(BINDING) var<storage, read_write> race_notes: array<u32>;
var<private> race_next: u32;
var<private> race_end: u32;
fn race_note(note: u32) {
  if (race_next < race_end) {
    race_notes[race_next] = note;
    race_next += 1u;
  }
}
fn race_index(site: u32, place: u32, count: u32, index: u32) -> u32 {
  for (var i = 0u; i < count; i++) { race_note(((site + 1u) << PLACE_BITSu) | (place + i)); }
  return index;
}
fn race_begin(group: u32, lid: u32, invocations: u32) {
  let last = arrayLength(&race_notes) - 1u;
  let share = last / (WORKGROUPSu * invocations);
  race_next = (group * invocations + lid) * share;
  race_end = select(0u, race_next + share, group < WORKGROUPSu);
  if (group == 0u && lid == 0u) { race_notes[last] = invocations; }
}
"""


class Site(NamedTuple):
    """An access in the text. of_subgroup: by all its invocations as one."""

    variable: str
    writes: bool
    of_subgroup: bool
    line: str


class Noted(NamedTuple):
    """The text of a variant that notes its accesses, its sites by number, and the lanes of a subgroup."""

    text: str
    sites: list[Site]
    lanes: int


class _Array(NamedTuple):
    counts: list[str]
    by_component: bool


def _closing(text: str, at: int) -> int:
    """Return the place behind the bracket that closes the one at `at`."""
    depth = 0
    for i in range(at, len(text)):
        depth += (text[i] in "[({") - (text[i] in "])}")
        if depth == 0:
            return i + 1
    raise ValueError("a bracket that nothing closes")


class _Accesses:
    """The accesses of a text to workgroup memory."""

    def __init__(self, text: str) -> None:
        aliases = {name: type.strip() for name, type in ALIAS.findall(text)}
        self.arrays = {v.name: _array(v, text, aliases) for v in variables(text) if v.name != _ITS_MEMORY}
        self._name = re.compile(rf"(?<![\w.])({'|'.join(self.arrays) or '(?!)'})\b")
        self.sites: dict[Site, int] = {}

    def noted(self, text: str, of_subgroup: bool, own: Container[str], line: str = "") -> str:
        """Return a piece of a function with a note at each access. own: its names. line: that it is a part of."""
        out, at = "", 0
        while found := self._name.search(text, at):
            if found[1] in own:
                out, at = out + text[at : found.end()], found.end()
                continue
            start = line or text[text.rfind("\n", 0, found.start()) + 1 :].partition("\n")[0].strip()
            array, indices, end = self.arrays[found[1]], list[str](), found.end()
            while len(indices) < len(array.counts) and text[end : end + 1] == "[":
                first, end = end + 1, _closing(text, end)
                indices.append(self.noted(text[first : end - 1], of_subgroup, own, start))
            if not indices:
                raise ValueError(f"an access to a whole array of workgroup memory: {start}")
            place = f"u32({indices[0]})"
            for n, count in enumerate(array.counts[1:], 1):
                place = f"({place}) * u32({count})" + (f" + u32({indices[n]})" if n < len(indices) else "")
            several = " * ".join(["1u", *(f"u32({count})" for count in array.counts[len(indices) :])])
            rest, component = end, None
            if array.by_component:
                if named := _COMPONENT.match(text, end):
                    component, rest = f"{'xyzw'.index(named[1])}u", named.end()
                elif text[end : end + 1] == "[":
                    rest = _closing(text, end)
                    component = f"u32({text[end + 1 : rest - 1]})"  # whose accesses are noted as the text goes on
                several, place = "1u" if component else f"4u * {several}", f"4u * ({place}) + {component or '0u'}"
            members = re.compile(r"(\.\w+)*").match(text, rest)
            writes = _ASSIGNED.match(text, members.end() if members else rest) is not None
            number = self.sites.setdefault(Site(found[1], writes, of_subgroup, start), len(self.sites))
            last = f"race_index({number}u, race_at_{found[1]} + {place}, {several}, u32({indices[-1]}))"
            out += text[at : found.end()] + "".join(f"[{index}]" for index in (*indices[:-1], last))
            at = end
        return out + text[at:]


def _array(variable: Variable, text: str, aliases: dict[str, str]) -> _Array:
    counts, type = [], variable.type
    while (type := aliases.get(type, type)).startswith("array<"):
        type, count = parts(type[len("array<") : -1])
        counts.append(count)
    indices = r"\s*(\[[^;]*?\]){" + str(len(counts)) + "}"
    by_component = type.startswith("vec") and re.search(rf"\b{variable.name}{indices}(\.[xyzw](?!\w)|\[)", text)
    return _Array(counts, by_component is not None and bool(by_component))


def noted(text: str, lanes: int = 32) -> Noted:
    """Let the assembled, emulated text of a variant note its accesses. lanes: of a subgroup.

    Raises:
        ValueError: An access is not understood.
    """
    accesses = _Accesses(text := bare(text))
    if not accesses.arrays:
        return Noted(text, [], lanes)

    def function(name: str, body: str) -> str:
        if name not in _BARRIERS_OF_EMULATION:
            body = body.replace("workgroupBarrier();", f"workgroupBarrier(); race_note({_BARRIER}u);")
            body = body.replace("storageBarrier();", f"storageBarrier(); race_note({_WAIT}u);")
            body = body.replace("wait_of_subgroup();", f"wait_of_subgroup(); race_note({_OF_ONE}u);")
        own = {name for names in _LOCAL.findall(body) for name in names}
        out, of_subgroup = "", _OF_SUBGROUP.fullmatch(name) is not None
        for piece in re.split(r"(.*\bworkgroupUniformLoad\(.*\n)", body):
            if "workgroupUniformLoad(" in piece:  # which has barriers before and behind it
                out += f"race_note({_BARRIER}u);\n{piece}"
            else:
                out += accesses.noted(piece, of_subgroup, own)
        return out

    out, at = "", 0
    for found in _FUNCTION.finditer(text):
        end = _closing(text, text.index("{", found.end()))
        out, at = out + text[at : found.start()] + function(found[1], text[found.start() : end]), end
    text = ENTRY.sub(_begun, out + text[at:])
    places, last = "", "0u"
    for name, (counts, by_component) in accesses.arrays.items():
        places += f"const race_at_{name}: u32 = {last};\n"
        last = f"race_at_{name} + {4 if by_component else 1}u * " + " * ".join(f"u32({count})" for count in counts)
    if len(accesses.sites) >= 1 << _SITE_BITS:
        raise ValueError(f"{len(accesses.sites)} accesses, more than have a number")
    places += f"const_assert {last} <= {1 << _PLACE_BITS}u;\n"
    helpers = _HELPERS
    for name, value in (("BINDING", BINDING), ("PLACE_BITS", _PLACE_BITS), ("WORKGROUPS", WORKGROUPS)):
        helpers = helpers.replace(name, str(value))
    return Noted(text + helpers + places, list(accesses.sites), lanes)


def _begun(entry: re.Match[str]) -> str:
    """Return the head of an entry point that knows where its notes go."""
    head, names = entry[0], []
    for builtin in ("workgroup_id", "num_workgroups"):
        found = re.search(rf"@builtin\({builtin}\)\s*(\w+)", entry[2])
        names.append(found[1] if found else f"race_{builtin}")
        if not found:
            head = re.sub(r"(\bfn \w+\()", rf"\1@builtin({builtin}) race_{builtin}: vec3<u32>, ", head, count=1)
    group, groups = names
    number = f"{group}.x + {groups}.x * ({group}.y + {groups}.y * {group}.z)"
    return f"{head}\n  race_begin({number}, lid, u32({entry[1]}));"


def races(notes: np.ndarray, noted: Noted) -> list[str]:
    """Return the lines that race in a launch, in pairs.

    Args:
        notes: int32, zeros before the launch; the last becomes the number of invocations of a workgroup.
        noted: The variant that was launched.

    Raises:
        ValueError: There are fewer notes than accesses and barriers.
    """
    if not noted.sites:
        return []
    invocations, found = int(notes[-1]), set[tuple[int, int]]()
    share = (notes.size - 1) // (WORKGROUPS * invocations)
    writes, of_subgroup = np.array([(s.writes, s.of_subgroup) for s in noted.sites], bool).T
    groups = notes[: WORKGROUPS * invocations * share].view(np.uint32).reshape(WORKGROUPS, invocations, share)
    if groups[:, :, -1].any():
        raise ValueError(f"an invocation may have more than {share} accesses and barriers; give it more notes")
    for group in groups:
        lane, at = np.nonzero((group != 0) & (group < _OF_ONE))
        counts = (_counted(group == n)[lane, at] for n in (_BARRIER, _WAIT, _OF_ONE))
        entry, barriers, waits, of_one = group[lane, at], *counts
        site, place = (entry >> _PLACE_BITS).astype(int) - 1, entry & ((1 << _PLACE_BITS) - 1)
        who = np.where(of_subgroup[site], 1024 + lane // noted.lanes, lane)
        table = np.stack((barriers << _PLACE_BITS | place, site, who, waits, lane // noted.lanes, of_one))
        table = table[:, np.argsort(table[0], kind="stable")]
        first = np.flatnonzero(np.diff(table[0], prepend=-1))
        ends = np.append(first[1:], table.shape[1])
        several = np.minimum.reduceat(table[2], first) != np.maximum.reduceat(table[2], first)
        several &= np.logical_or.reduceat(writes[table[1]], first)
        for i in np.flatnonzero(several):
            _, site, who, waits, subgroup, of_one = table[:, first[i] : ends[i]]
            found |= _pairs(writes[site], site, who, waits, subgroup, of_one)
    return [f"{noted.sites[a].line} | {noted.sites[b].line}" for a, b in sorted(found)]


def _counted(of_kind: np.ndarray) -> np.ndarray:
    return np.cumsum(of_kind, axis=1, dtype=int)


def _pairs(
    writes: np.ndarray, site: np.ndarray, who: np.ndarray, waits: np.ndarray, subgroup: np.ndarray, of_one: np.ndarray
) -> set[tuple[int, int]]:
    """Return the sites of an element's accesses between two barriers that race. of_one: barriers of the subgroup."""
    found = set()
    for n in np.flatnonzero(writes):
        others = (who != who[n]) & (writes | (waits >= waits[n]))
        others &= (subgroup != subgroup[n]) | (of_one == of_one[n])
        found |= {(int(site[n]), int(other)) for other in site[others][:1]}
    return found
