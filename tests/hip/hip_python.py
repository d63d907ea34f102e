"""Signatures of the hip-python functions that wgrad calls, by version: `hip_python.json`, made from the wheels.

    pip download --no-deps hip-python==6.4.4.555.40
    python -m tests.hip.hip_python 6.4 hip_python-6.4.4.555.40-*.whl      # or a folder: what a wheel was unpacked into

{"hipFree": {"6.4": [["object ptr"], 1], ...}}: the parameters, and how many values a call gives with its return code.
"""

from __future__ import annotations

import ast
import json
import re
import sys
import zipfile
from pathlib import Path

TABLE = Path(__file__).with_suffix(".json")
ROOM = Path(__file__).parents[2] / "hip"
_NAME = re.compile(r"hip(rtc)?[A-Z]\w*")
_FUNCTION = re.compile(r"^def (\w+)\((.*?)\):$(.*?)(?=^(?:@|def |cdef |cpdef |class )|\Z)", re.MULTILINE | re.DOTALL)
_TYPES = {"hipMemcpyKind", "hipStreamCaptureMode", "hipDeviceProp_t"}  # classes
Calls = dict[str, set[int]]


def calls(room: Path = ROOM) -> Calls:
    """Return the functions that the sources call, each with the numbers of arguments that it is given."""
    found: Calls = {}
    for path in sorted(room.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and _NAME.fullmatch(node.func.attr):
                # The one list of arguments that is spread out has three: a grid.
                count = sum(3 if isinstance(argument, ast.Starred) else 1 for argument in node.args)
                found.setdefault(node.func.attr, set()).add(count)
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "_wait":
                names = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
                found.update({name: {1} for name in names})
    return {name: counts for name, counts in found.items() if name not in _TYPES}


def signatures(sources: str, names: set[str]) -> dict[str, list[object]]:
    """Return parameters and number of values of functions in the text of .pyx files."""
    found: dict[str, list[object]] = {}
    for name, parameters, body in _FUNCTION.findall(sources):
        if name in names:
            given = re.findall(r"^    return (.*)$", body, re.MULTILINE)[-1].strip()
            found[name] = [[p.strip() for p in parameters.split(",") if p.strip()], _values(given)]
    return found


def _values(text: str) -> int:
    """Elements of the tuple that `return` gives."""
    depth = count = 0
    for at, letter in enumerate(text[1:-1]):
        depth += letter in "([" or -(letter in ")]")
        count += letter == "," and depth == 0 and bool(text[at + 2 : -1].strip())
    return 1 + count


def read(where: Path) -> str:
    """Return the texts of hip.pyx and hiprtc.pyx in a wheel, or anywhere below a folder."""
    if where.is_dir():
        return "\n".join(p.read_text(encoding="utf-8") for n in ("hip", "hiprtc") for p in where.rglob(f"{n}.pyx"))
    with zipfile.ZipFile(where) as wheel:
        wanted = [n for n in wheel.namelist() if n.rpartition("/")[2] in ("hip.pyx", "hiprtc.pyx")]
        return "\n".join(wheel.read(name).decode() for name in wanted)


def main(version: str, where: str) -> None:
    table = json.loads(TABLE.read_text(encoding="utf-8")) if TABLE.exists() else {}
    found = signatures(read(Path(where)), set(calls()))
    for name in sorted(calls()):
        table.setdefault(name, {})[version] = found[name]
    kept = {name: dict(sorted(table[name].items(), key=lambda v: float(v[0]))) for name in sorted(calls())}
    lines = [f" {json.dumps(name)}: {json.dumps(versions)}" for name, versions in kept.items()]
    TABLE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
