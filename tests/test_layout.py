"""The shape of the house: which rooms there are, what may import what, that packages and tree agree."""

from __future__ import annotations

import ast
import graphlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from wgrad.train.files.gguf_names import ARCHITECTURES
from wgrad.train.files.gguf_traits import TRAITS
from wgrad.train.model.families import FAMILIES

ROOT = Path(__file__).parents[1]
ROOMS = ("device", "wgsl", "hip", "autograd", "train")
# What each room may import of the others. Nothing points back, and a device knows no Tensor.
MAY_IMPORT = {
    "device": {"device"},
    "wgsl": {"wgsl", "device"},
    "hip": {"hip", "device"},
    "autograd": {"autograd", "wgsl", "hip", "device"},
    "train": {"train", "autograd", "device"},
}
PRIVATE = re.compile(r"wgpu\.backends|\._internal\b")
LONGEST_FILE = 400


def python_files(*folders: str) -> list[Path]:
    return [p for folder in folders for p in sorted((ROOT / folder).rglob("*.py"))]


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.fixture(autouse=True, scope="module")
def _forget_trees() -> Iterator[None]:
    """A million objects, which nobody needs after this file."""
    yield
    parsed.cache_clear()


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def imported_modules(path: Path) -> list[tuple[str, int]]:
    """(module, line) of every import, and of importlib.import_module with a literal name."""
    return list(_imported_modules(path))


def _imported_modules(path: Path) -> Iterator[tuple[str, int]]:
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{relative(path)}:{node.lineno}: relative import: write wgrad.<room>.<file>"
            for alias in node.names:
                yield f"{node.module}.{alias.name}", node.lineno
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "import_module":
            if node.args and isinstance(node.args[0], ast.Constant):
                yield str(node.args[0].value), node.lineno


def test_rooms_have_no_init() -> None:
    found = [relative(p) for room in ROOMS for p in (ROOT / room).rglob("__init__.py")]
    assert found == [], "a room with __init__.py would hide an installed `hip` or `autograd`"


def test_packages_are_those_of_the_tree() -> None:
    """`packages` in pyproject.toml lists every folder that holds a source file, and maps each to its place."""
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    kinds = {".py", ".wgsl", ".hip", ".hpp", ".md"}
    folders = {p.parent for room in ROOMS for p in (ROOT / room).rglob("*") if p.suffix in kinds}
    tree = {"wgrad", *("wgrad." + relative(f).replace("/", ".") for f in folders)}
    assert set(tools["packages"]) == tree
    assert tools["package-dir"] == {"wgrad": "src/wgrad", **{f"wgrad.{room}": room for room in ROOMS}}


@pytest.mark.parametrize("room", ROOMS)
def test_links_lead_to_the_rooms(room: str) -> None:
    link = ROOT / "src" / "wgrad" / room
    if link.is_file():  # git on Windows writes a link as a text file
        assert link.read_text(encoding="utf-8").strip() == f"../../{room}"
    else:
        assert os.readlink(link) == f"../../{room}"


@pytest.mark.parametrize("room", ROOMS)
def test_imports_go_one_way(room: str) -> None:
    wrong = []
    for path in python_files(room):
        for module, line in imported_modules(path):
            parts = module.split(".")
            if parts[0] == "wgrad" and len(parts) > 1 and parts[1] in ROOMS and parts[1] not in MAY_IMPORT[room]:
                wrong.append(f"{relative(path)}:{line}: {module}")
            if parts[0] in ROOMS:
                wrong.append(f"{relative(path)}:{line}: {module}: import wgrad.{parts[0]}")
    assert wrong == [], f"{room} may import {sorted(MAY_IMPORT[room])} only"


@pytest.mark.parametrize("room", ["wgsl", "hip"])
def test_the_runtime_of_a_device_imports_nothing_above_it(room: str) -> None:
    wrong = [
        f"{relative(path)}:{line}: {module}"
        for path in python_files(f"{room}/runtime")
        for module, line in imported_modules(path)
        if module.startswith(f"wgrad.{room}.") and not module.startswith(f"wgrad.{room}.runtime.")
    ]
    assert wrong == [], f"{room}/runtime may import of {room} itself only"


def test_the_ground_floor_needs_little() -> None:
    """The lowest package imports only NumPy and the module that names a folder."""
    found = {module.split(".")[0] for path in python_files("device") for module, _ in imported_modules(path)}
    assert found - sys.stdlib_module_names <= {"wgrad", "numpy", "ml_dtypes", "platformdirs"}


# The folders of train, each of which may import those before it.
TRAIN_FLOORS = (
    *("files", "options", "model", "data", "terminal", "ranks"),
    *("output", "step", "inference", "plan", "run", "library", "serve", "commands"),
)


@pytest.mark.parametrize("floor", TRAIN_FLOORS)
def test_train_is_built_floor_on_floor(floor: str) -> None:
    assert {p.parent.name for p in python_files("train")} == {"train", *TRAIN_FLOORS}
    below = TRAIN_FLOORS[: TRAIN_FLOORS.index(floor) + 1]
    wrong = [
        f"{relative(path)}:{line}: {module}"
        for path in python_files(f"train/{floor}")
        for module, line in imported_modules(path)
        if module.startswith("wgrad.train.") and module.split(".")[2] not in below
    ]
    assert wrong == [], f"train/{floor} may import {below} only"


@pytest.mark.parametrize("room", ["device", "train"])
def test_no_module_imports_itself_by_way_of_others(room: str) -> None:
    modules = {"wgrad." + relative(p).removesuffix(".py").replace("/", "."): p for p in python_files(room)}
    imports = {
        name: {n for m, _ in imported_modules(path) for n in (m, m.rpartition(".")[0])} & modules.keys()
        for name, path in modules.items()
    }
    graphlib.TopologicalSorter(imports).prepare()  # CycleError


@pytest.mark.parametrize("room", ROOMS)
def test_no_package_imports_itself_in_a_circle(room: str) -> None:
    """Imports count at the top of a file, inside functions and by name."""
    files = {"wgrad." + relative(p).removesuffix(".py").replace("/", "."): p for p in python_files(room)}
    graph = {}
    for name, path in files.items():
        imported = {module for module, _ in imported_modules(path)}
        imported |= {module.rpartition(".")[0] for module in imported}
        graph[name] = sorted((imported & set(files)) - {name})
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"these import each other: {' <- '.join(error.args[1])}")


def test_names_are_imported_from_where_they_are_defined() -> None:
    """Or from a file that says that it passes them on. As `mypy --strict` asks, which takes as long as mypy itself."""
    files = {"wgrad." + relative(p).removesuffix(".py").replace("/", "."): p for p in python_files(*ROOMS)}
    hidden = {name: imported_for_itself(path) for name, path in files.items()}
    wrong = [
        f"{relative(path)}:{line}: {module}"
        for path in python_files(*ROOMS, "src")
        for module, line in imported_modules(path)
        if module not in files and module.rpartition(".")[2] in hidden.get(module.rpartition(".")[0], ())
    ]
    assert wrong == []


def imported_for_itself(path: Path) -> set[str]:
    """Names that a file imports without saying that it passes them on: `import x as x`, or x in __all__."""
    body = parsed(path).body
    imports = [alias for node in body if isinstance(node, ast.Import | ast.ImportFrom) for alias in node.names]
    lists = [node.value for node in body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"]
    listed = {name for value in lists for name in ast.literal_eval(value)}
    return {alias.asname or alias.name for alias in imports if alias.asname != alias.name} - listed


def test_code_asks_tables_instead_of_the_name_of_a_family() -> None:
    """Names of transformers and of llama.cpp stand in tables. Those of tokenizers, in train/data, are others."""
    assert TRAITS.keys() <= ARCHITECTURES.keys()
    types = {name for own in FAMILIES.values() for name in (own.model_type, *own.other_types)}
    tables = ("families.py", "gguf_names.py", "gguf_traits.py")
    wrong = [
        f"{relative(path)}:{getattr(node, 'lineno', 0)}: {ast.unparse(node)}"
        for path in python_files("train")
        if path.parent.name != "data" and path.name not in tables
        for node in ast.walk(parsed(path))
        if (path.name.startswith("gguf_") and is_one_of({*ARCHITECTURES}, node))
        or (isinstance(node, ast.Compare) and compares_a_name(types | FAMILIES.keys() | ARCHITECTURES.keys(), node))
    ]
    assert wrong == [], "ask for a field of the table's entry"


def is_one_of(names: set[str], node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in names


def compares_a_name(names: set[str], node: ast.Compare) -> bool:
    """Return whether a comparison has a literal name, or a variable or field of names without their table."""
    sides = [getattr(side, "attr", getattr(side, "id", "")) for side in (node.left, *node.comparators)]
    asked = {"architecture", "model_type", "gguf"} & {*sides}
    known = {"ARCHITECTURES", "FAMILIES", "MULTIMODAL"} & {*sides}
    by_name = bool(asked and not known) and not isinstance(node.ops[0], ast.Is | ast.IsNot)
    return by_name or any(is_one_of(names, part) for part in ast.walk(node))


def test_only_wgsl_imports_wgpu() -> None:
    wrong = [
        f"{relative(path)}:{line}"
        for path in python_files("autograd", "train", "hip", "src", "examples")
        for module, line in imported_modules(path)
        if module.split(".")[0] == "wgpu"
    ]
    assert wrong == []


def test_one_file_imports_mpi4py() -> None:
    """By the import statement or by name; a run of one rank does not even import that file."""
    found = {
        relative(path)
        for path in python_files(*ROOMS, "src", "bench")
        for module, _ in imported_modules(path)
        if module.split(".")[0] == "mpi4py" or module.endswith("ranks.mpi_world")
    }
    assert found == {"train/ranks/mpi_world.py", "train/ranks/start.py"}


def test_no_torch_at_run_time() -> None:
    """But in a program of its own, which bench --against-cpu compares with and nothing imports."""
    apart = "train/commands/torch_step.py"
    wrong = [
        f"{relative(path)}:{line}: {module}"
        for path in python_files(*ROOMS, "src")
        for module, line in imported_modules(path)
        if module.endswith(".torch_step")
        or (
            module.split(".")[0] in {"torch", "transformers", "peft", "trl", "bitsandbytes"} and relative(path) != apart
        )
    ]
    assert wrong == []


def test_one_file_touches_private_parts_of_wgpu() -> None:
    touching = {relative(p) for p in python_files(*ROOMS, "src") if PRIVATE.search(p.read_text(encoding="utf-8"))}
    assert touching == {"wgsl/runtime/native.py"}


def test_no_file_is_named_like_a_standard_module() -> None:
    """Scripts of a room run with the room on sys.path; and `hip/hip.py` would pass for hip-python."""
    taken = sys.stdlib_module_names | {"hip", "autograd", "wgpu", "numpy"}
    files = [p for p in python_files(*ROOMS) if p.stem != "__main__"]
    wrong = [relative(p) for p in files if p.stem in taken]
    assert wrong == []


def test_files_named_in_the_docs_exist() -> None:
    """Paths of the repository on any page of docs; a name with <...> stands for what is added."""
    text = "\n".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs").rglob("*.md"))
    named = [
        n
        for n in re.findall(r"(?<![\w/<])(?:[\w.-]+/)+[\w.-]*(?![\w/<>*])", text)
        if n.split("/")[0] in (*ROOMS, "tests")
    ]
    assert len(named) >= 40
    assert [n for n in named if not (ROOT / n.rstrip(".")).exists()] == []


def test_python_files_stay_small() -> None:
    lines = {relative(p): len(p.read_text(encoding="utf-8").splitlines()) for p in python_files(*ROOMS)}
    assert {name: n for name, n in lines.items() if n > LONGEST_FILE} == {}


def test_every_shader_is_launched_and_opens_with_a_comment() -> None:
    launchers = "\n".join(p.read_text(encoding="utf-8") for p in python_files("wgsl"))
    shaders = sorted((ROOT / "wgsl").rglob("*.wgsl"))
    assert shaders
    included = set(re.findall(r'^#include "(\S+)"', "\n".join(p.read_text(encoding="utf-8") for p in shaders), re.M))
    included |= {f"{p.stem}.inc.wgsl" for p in python_files("device/formats")}  # by the constant B_FORMAT
    launched = [p for p in shaders if re.search(rf"""["']{p.stem}(\.wgsl)?["']""", launchers)]
    unused = [relative(p) for p in shaders if p not in launched and p.name not in included]
    assert unused == [], "no launcher in wgsl/*.py names these, and no shader includes them"
    bare = [relative(p) for p in shaders if not p.read_text(encoding="utf-8").startswith("//")]
    assert bare == [], "a shader opens with its formula, its buffers and its dispatch"


@pytest.mark.parametrize("links", ["absent", "text files"])
def test_runs_without_links(tmp_path: Path, links: str) -> None:
    """A checkout in which src/wgrad has no links to the rooms finds them at the top of the repository."""
    for room in ROOMS:
        shutil.copytree(ROOT / room, tmp_path / room)
    package = tmp_path / "src" / "wgrad"
    package.mkdir(parents=True)
    shutil.copy(ROOT / "src" / "wgrad" / "__init__.py", package)
    if links == "text files":
        for room in ROOMS:
            (package / room).write_text(f"../../{room}")
    code = (
        "import wgrad, wgrad.autograd.tensor as a, wgrad.wgsl.runtime.compile as w, wgrad.train.commands.cli as t\n"
        "print(wgrad.__file__, a.__file__, w.__file__, t.__file__, sep='\\n')"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "src")}
    run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert all(Path(line).is_relative_to(tmp_path) for line in run.stdout.split())


def test_a_room_hides_no_installed_package(tmp_path: Path) -> None:
    """With the repository's root first on sys.path, `import hip` and `import autograd` still find what is installed."""
    for name in ("hip", "autograd"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("installed = True\n")
    code = "import hip, autograd; assert hip.installed and autograd.installed"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)])}
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
