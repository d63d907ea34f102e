"""Shaders for tensor cores on a device without them: operations of subgroups rewritten as plain WGSL.

Of a matmul, of 16 x 16 x 16 or another shape, each of a subgroup's invocations has as many elements as any other in
registers: of 16 x 16 and 32 invocations eight, half a row; of 8 two rows. Of the accumulator those, of the left operand
the rows. The right operand is the place in workgroup memory where it lies, so it has to be multiplied before that is
written again. All else of a shader, staging, edges, masks, epilogue, runs as it is.

A software driver runs the invocations of a workgroup in rising order up to the next barrier. Lanes are counted
backwards here, so that what an invocation reads of a result was stored by one that runs after it: a missing barrier
shows.
"""

from __future__ import annotations

import re
from typing import Any

from wgrad.autograd.bind import bind
from wgrad.wgsl.device import WgpuDevice
from wgrad.wgsl.runtime.cooperative_shapes import Shape

LANES = (32, 64, 16, 8)  # of subgroups, that every variant is tried with
# Of Apple, of Intel's Xe2 and of its DG2.
OTHER_SHAPES = (Shape(8, 8, 8), Shape(8, 16, 16), Shape(8, 8, 16))
_LOAD_A = re.compile(r"let (\w+) = coopLoad(T?)<MATRIX_A>\(&(\w+)\[(\w+)\], (\w+)\)")
_LOAD_B = re.compile(r"coopLoad(T?)<MATRIX_B>\(&(\w+)\[(\w+)\], (\w+)\)")
_LOAD_C = re.compile(r"(\w+) = coopLoadT<MATRIX_C>\(&(\w+)\[(\w+)\], (\w+)\)")
_MATRIX = re.compile(r"coop_mat(\d+)x(\d+)<f\d+, ([ABC])>")  # columns, rows, role
_MULTIPLY_ADD = re.compile(r"(\w+) = coopMultiplyAdd\((\w+), (\w+), \1\)")
_STORE = re.compile(r"coopStoreT\((\w+), &(\w+)\[(\w+)\], (\w+)\)")
_TYPES = """
struct Left { at: array<f32, ROWS * SHARED> }
struct Right { tile: u32, at: u32, ld: u32, by_rows: bool }
struct Sums { at: array<f32, ELEMENTS> }
"""
_LEFT = """
fn left_NAME(rows: ptr<private, Left>, lane: u32, at: u32, ld: u32, by_rows: bool) {
  for (var k = 0u; k < ROWS * SHARED + lane / LANES; k++) {
    let row = lane * ELEMENTS / COLUMNS + k / SHARED;
    let i = select(k % SHARED, row, by_rows) * ld * 4u + select(row, k % SHARED, by_rows);
    (*rows).at[k] = f32(NAME[at + i / 4u][i % 4u]);
  }
}
"""
_MULTIPLY = """
fn multiply_add(lane: u32, a: ptr<private, Left>, b: Right, sum: ptr<function, Sums>) {
  for (var e = 0u; e < ELEMENTS + lane / LANES; e++) {
    let column = (lane * ELEMENTS + e) % COLUMNS;
    var one = (*sum).at[e];
    for (var k = 0u; k < SHARED + lane / LANES; k++) {
      let i = select(column, k, b.by_rows) * b.ld * 4u + select(k, column, b.by_rows);
      one += (*a).at[e / COLUMNS * SHARED + k] * right_element(b.tile, b.at + i / 4u, i % 4u);
    }
    (*sum).at[e] = one;
  }
}
"""
_SUMS = """
fn store_NAME(sum: ptr<function, Sums>, lane: u32, at: u32, ld: u32) {
  for (var e = 0u; e < ELEMENTS + lane / LANES; e++) {
    let i = (lane * ELEMENTS + e) / COLUMNS * ld * 4u + (lane * ELEMENTS + e) % COLUMNS;
    NAME[at + i / 4u][i % 4u] = (*sum).at[e];
  }
}
fn load_NAME(sum: ptr<function, Sums>, lane: u32, at: u32, ld: u32) {
  for (var e = 0u; e < ELEMENTS + lane / LANES; e++) {
    let i = (lane * ELEMENTS + e) / COLUMNS * ld * 4u + (lane * ELEMENTS + e) % COLUMNS;
    (*sum).at[e] = NAME[at + i / 4u][i % 4u];
  }
}
"""


# Subgroups of LANES, whatever the device has: through workgroup memory.
_SUBGROUPS = """
var<workgroup> votes: array<f32, 1024>;
fn shuffle_xor(lid: u32, mine: f32, mask: u32) -> f32 {
  votes[lid] = mine;
  workgroupBarrier();
  let other = select(1e30, votes[lid ^ mask], (lid ^ mask) / LANES == lid / LANES);
  workgroupBarrier();
  return other;
}
fn wait_of_subgroup() { workgroupBarrier(); }
fn any_of_lanes(lid: u32, mine: bool) -> bool {
  votes[lid] = f32(u32(mine));
  workgroupBarrier();
  var found = false;
  for (var i = 0u; i < LANES; i++) { found = found || votes[lid / LANES * LANES + i] != 0.0; }
  workgroupBarrier();
  return found;
}
"""


def _arguments(text: str) -> list[str]:
    """Return the parts between the commas of an argument list."""
    found, depth = [""], 0
    for letter in text:
        depth += (letter == "(") - (letter == ")")
        if letter == "," and depth == 0:
            found.append("")
        else:
            found[-1] += letter
    return found


def _without_eights(text: str) -> str:
    """Arrays of Eight (gemm_matrix.wgsl) as arrays of vec4, of which it is two: a software driver's compiler needs
    minutes for some shaders with the struct."""

    def stores(found: re.Match[str]) -> str:
        low, high = _arguments(found[3])
        return f"{found[1]}[2u * {found[2]}] = {low}; {found[1]}[2u * {found[2]} + 1u] = {high};"

    text = re.sub(r"(\w+): array<Eight, (.*)>;", r"\1: array<vec4<f16>, 2u * (\2)>;", text)
    text = re.sub(r"(\w+)\[(\w+)\] = Eight\((.*)\);", stores, text)
    text = re.sub(r"&(\w+)\[(\w+)\]\.low, ", r"&\1[twice_\2], ", text)
    text = re.sub(r"( *let (\w+_at_\w+) = .*;)(?=\n.*twice_\2\b)", r"\1 let twice_\2 = 2u * \2;", text)
    return re.sub(r"(\w+)\[(\w+)\]\.(low|high)\b", lambda m: f"{m[1]}[2u * {m[2]}{' + 1u' * (m[3] == 'high')}]", text)


def _check_uniform(text: str) -> None:
    """ValueError where a cooperative operation stands in a conditional whose condition may differ between invocations,
    or after a return in one, as naga sees it: whatever was read from a variable may, which `&&` and `||` become. No
    library asks that where the operations are emulated."""
    lets = dict(re.findall(r"\blet (\w+) = (.*);", text))
    varying = {"lid", *re.findall(r"\bvar (\w+)", text)}

    def may_differ(expression: str, seen: frozenset[str] = frozenset()) -> bool:
        names = set(re.findall(r"(?<![\w.])\w+", expression)) - seen  # not those of members
        if "&&" in expression or "||" in expression:
            return True
        loaded = "workgroupUniformLoad" in expression
        return not loaded and any(n in varying or n in lets and may_differ(lets[n], seen | names) for n in names)

    for found in re.finditer(r"\bif \((.*)\) \{", text):
        depth, at = 1, found.end()
        while depth:
            depth += (text[at] == "{") - (text[at] == "}")
            at += 1
        leaves = "return;" in text[found.end() : at] and "coop" in text[at:]
        if ("coop" in text[found.end() : at] or leaves) and may_differ(found[1]):
            raise ValueError(f"cooperative operations want uniform control flow, and this may differ: {found[1]}")


def _shape_of(text: str) -> tuple[str, tuple[int, int, int]]:
    """Text with MATRIX_A, MATRIX_B and MATRIX_C for the types, and the one shape of them all.

    ValueError where a type is not of that shape, or of other elements.
    """
    types = set(_MATRIX.findall(text))
    sizes = {role: (int(rows), int(columns)) for columns, rows, role in types}
    for role in "ABC":
        text = re.sub(rf"coop_mat\d+x\d+<f{'32' if role == 'C' else '16'}, {role}>", f"MATRIX_{role}", text)
    (m, k), (also_k, n) = sizes["A"], sizes["B"]
    if also_k != k or sizes["C"] != (m, n) or len(types) != 3 or _MATRIX.search(text):
        raise ValueError(f"cooperative matrices of one shape were expected, not {sizes}")
    return text, (m, n, k)


def with_matrix_units() -> Any:
    """Return a device with a GPU's ways, and tensor cores if it has float16, for shaders that are `emulated`."""
    device = bind(WgpuDevice)()
    device.software, device.matrix_units = False, device.float16
    return device


def emulated(text: str, lanes: int) -> str:
    """The assembled text of a variant without operations of subgroups, as on a GPU whose subgroups have `lanes`. One
    without cooperative matrices stays as it is. ValueError where one is left.
    """
    if "wgpu_cooperative_matrix" not in text:
        return text
    text = text.replace("enable wgpu_cooperative_matrix;\n", "")
    _check_uniform(text)
    text, (m, n, k) = _shape_of(text)
    builtins = {
        "subgroup_size": f"{lanes}u",
        "subgroup_id": f"lid / {lanes}u",
        "subgroup_invocation_id": f"lid % {lanes}u",
    }
    for name, value in builtins.items():
        text, has = re.subn(rf",\s*@builtin\({name}\) {name}: u32(,?)", r"\1", text)
        if has:
            text = re.sub(r"(\bfn main\([^{]*\{\n)", rf"\1  let {name} = {value};\n", text)
    text = _without_eights(text)
    loaded = _LOAD_A.findall(text)
    lefts, operands = sorted({m[2] for m in loaded}), sorted({m[0] for m in loaded})
    rights = sorted({m[1] for m in _LOAD_B.findall(text)})
    sums = sorted({m[1] for m in _STORE.findall(text)})

    last = f"{lanes - 1}u - lid % {lanes}u"

    def by_rows(letter: str) -> str:
        return "true" if letter else "false"

    text = _LOAD_A.sub(lambda m: f"left_{m[3]}(&{m[1]}, {last}, {m[4]}, {m[5]}, {by_rows(m[2])})", text)
    text = _LOAD_B.sub(lambda m: f"Right({rights.index(m[2])}u, {m[3]}, {m[4]}, {by_rows(m[1])})", text)
    text = _LOAD_C.sub(rf"load_\2(&\1, {last}, \3, \4)", text)
    text = _STORE.sub(rf"store_\2(&\1, {last}, \3, \4)", text)
    text = text.replace("MATRIX_C()", "Sums()")
    text = _MULTIPLY_ADD.sub(rf"multiply_add({last}, &\2, \3, &\1)", text)
    # Levels of NF4, which each invocation keeps from before a barrier on.
    text, kept = re.subn(r"\bmy_level = (.*);", r"level_of_lane[lid] = \1;", text)
    if kept:
        text = text.replace("var<private> my_level: f32;", "var<workgroup> level_of_lane: array<f32, 1024>;")
        text = text.replace("subgroupShuffle(my_level, ", "level_in_lane(")
        text += f"fn level_in_lane(lane: u32) -> f32 {{ return select(1e30, level_of_lane[lane], lane < {lanes}u); }}\n"
    subgroups = _SUBGROUPS if re.search("subgroup(ShuffleXor|Any|Barrier)", text) else ""
    text = text.replace("subgroupBarrier()", "wait_of_subgroup()")
    text = text.replace("subgroupShuffleXor(", "shuffle_xor(lid, ").replace("subgroupAny(", "any_of_lanes(lid, ")
    if re.search("coop|subgroup[A-Z]", re.sub(r"//.*", "", text)):
        raise ValueError("an operation of subgroups that the emulation does not know")
    choices = "".join(f"  if (which == {i}u) {{ return f32({name}[at][e]); }}\n" for i, name in enumerate(rights))
    right = f"fn right_element(which: u32, at: u32, e: u32) -> f32 {{\n{choices}  return 0.0;\n}}\n"
    private = "".join(f"var<private> {name}: Left;\n" for name in operands)
    helpers = [subgroups, _TYPES, private, *(_LEFT.replace("NAME", name) for name in lefts), right, _MULTIPLY]
    added = "".join([*helpers, *(_SUMS.replace("NAME", name) for name in sums)])
    elements = m * n // lanes
    names = {"LANES": lanes, "ELEMENTS": elements, "ROWS": max(1, elements // n), "COLUMNS": n, "SHARED": k}
    return text + re.sub(rf"\b({'|'.join(names)})\b", lambda m: f"{names[m[1]]}u", added)
