"""The wheel as a user gets it: built from the tree, installed in its own environment, used in an empty folder."""

from __future__ import annotations

import hashlib
import json
import lzma
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import wgrad

ROOT = Path(__file__).parents[1]
ROOMS = ("device", "wgsl", "hip", "autograd", "train")
SHIPPED = {".py", ".wgsl", ".mjs", ".html", ".hip", ".hpp", ".xz", ".json"}  # the last two: hip/objects
MOST_INSTALLED_BYTES = 120e6


def run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Without what would lead Python or mypy back to the tree."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "MYPY"))}
    return subprocess.run([str(c) for c in command], cwd=cwd, env=environment, capture_output=True, text=True)


def build_wheel(folder: Path, links: bool) -> Path:
    """A wheel from a copy of the tree (a build leaves files behind)."""
    tree = folder / "tree"
    skip = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in (*ROOMS, "src"):
        shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=skip)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    if not links:
        for room in ROOMS:
            (tree / "src" / "wgrad" / room).unlink()
    options = ("--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--disable-pip-version-check")
    built = run(sys.executable, "-m", "pip", "wheel", *options, "--wheel-dir", folder, tree, cwd=folder)
    assert built.returncode == 0, built.stderr
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"), links=True)


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python of a new environment with the wheel; what it depends on is taken from this environment."""
    folder = tmp_path_factory.mktemp("environment")
    made = run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder)
    assert made.returncode == 0, made.stderr
    python = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
    options = ("--quiet", "--no-deps", "--no-index", "--disable-pip-version-check")
    done = run(sys.executable, "-m", "pip", "--python", python, "install", *options, wheel, cwd=folder)
    assert done.returncode == 0, done.stderr
    here = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).stdout.strip()
    dependencies = Path(str(metadata.distribution("numpy").locate_file(".")))
    (Path(here) / "dependencies.pth").write_text(f"{dependencies}\n")  # comes after the wheel on sys.path
    return python


def test_ships_every_source_file_and_nothing_else(wheel: Path) -> None:
    names = {n for n in zipfile.ZipFile(wheel).namelist() if not n.split("/")[0].endswith(".dist-info")}
    tree = {
        f"wgrad/{room}/{p.relative_to(ROOT / room).as_posix()}"
        for room in ROOMS
        for p in (ROOT / room).rglob("*")
        if p.suffix in SHIPPED
    }
    assert names == tree | {"wgrad/__init__.py", "wgrad/__main__.py", "wgrad/py.typed"}


def test_ships_a_code_object_of_every_kernel_file(wheel: Path) -> None:
    """As the manifest lists them: nothing has to be compiled after installing."""
    archive = zipfile.ZipFile(wheel)
    listed = json.loads(archive.read("wgrad/hip/objects/manifest.json"))["objects"]
    for name, digest in listed.items():
        image = lzma.decompress(archive.read(f"wgrad/hip/objects/{name}.xz"))
        assert hashlib.sha256(image).hexdigest() == digest, name
    kernels = {p.stem for p in (ROOT / "hip" / "kernels").glob("*.hip")}
    for architecture in ("gfx90a", "gfx942", "gfx1100", "gfx1201"):
        have = {n.partition("/")[2].removesuffix(".co") for n in listed if n.startswith(f"{architecture}/")}
        assert {"gemm", "storage"} <= have <= kernels


def test_carries_its_licence_and_needs_no_torch(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (licence,) = [n for n in archive.namelist() if n.endswith("/LICENSE")]
    assert "Apache License" in archive.read(licence).decode()
    (about,) = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
    needs = re.findall(r"^Requires-Dist: ([\w-]+)(.*)$", archive.read(about).decode(), re.MULTILINE)
    at_run_time = {name.lower().replace("_", "-") for name, rest in needs if "extra ==" not in rest}
    wanted = {"wgpu", "numpy", "ml-dtypes", "safetensors", "tokenizers", "jinja2", "msgspec", "pyyaml", "rich"}
    wanted |= {"filelock", "platformdirs"}
    assert at_run_time == wanted


def test_without_links_the_wheel_is_the_same(wheel: Path, tmp_path: Path) -> None:
    other = build_wheel(tmp_path, links=False)
    contents = [
        {n: archive.read(n) for n in archive.namelist() if "dist-info" not in n}
        for archive in (zipfile.ZipFile(wheel), zipfile.ZipFile(other))
    ]
    assert contents[0] == contents[1]


def test_version_is_said_once() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["version"] == wgrad.__version__


def test_oracles_are_pinned_and_the_makefile_takes_the_same_torch() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    oracles = [Requirement(text) for text in project["optional-dependencies"]["oracle"]]
    for oracle in oracles:
        (pin,) = oracle.specifier
        assert pin.operator == "==" and "*" not in pin.version, oracle
    done = run("make", "--dry-run", "--always-make", ".venv-test/installed", cwd=ROOT)
    assert f" {next(str(o) for o in oracles if o.name == 'torch')}\n" in done.stdout, done.stderr


def test_commands_run_from_an_empty_folder(installed: Path, tmp_path: Path) -> None:
    for command in ([installed.parent / "wgrad"], [installed, "-m", "wgrad.train"]):
        said = run(*command, "--version", cwd=tmp_path)
        assert (said.returncode, said.stdout) == (0, f"wgrad {wgrad.__version__}\n"), said.stderr
    checked = run(installed.parent / "wgrad", "selftest", "--device", "cpu", "--only", "rope", cwd=tmp_path)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert list(tmp_path.iterdir()) == []


def test_every_module_imports_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    code = """
import importlib, pkgutil, sys, wgrad
home = wgrad.__path__[0]
for room in ("wgsl", "hip", "autograd", "train"):
    package = importlib.import_module(f"wgrad.{room}") if room != "hip" else None
    for found in pkgutil.iter_modules(package.__path__) if package else ():
        if found.name != "__main__":
            module = importlib.import_module(f"wgrad.{room}.{found.name}")
            assert module.__file__.startswith(home), module.__file__
for name in wgrad.__all__:
    assert getattr(wgrad, name) is not None
assert not {"torch", "transformers", "peft", "trl", "bitsandbytes"} & set(sys.modules)
print(home)
"""
    imported = run(installed, "-c", code, cwd=tmp_path)
    assert imported.returncode == 0, imported.stderr
    assert Path(imported.stdout.strip()).is_relative_to(installed.parents[1])


def test_a_user_of_the_wheel_gets_types(installed: Path, tmp_path: Path) -> None:
    """mypy reads py.typed and the rooms: right code passes, and a wrong argument is found."""
    right = (
        "from wgrad import Tensor, functional\n\ndef twice(x: Tensor) -> Tensor:\n    return functional.scale(x, 2.0)\n"
    )
    wrong = right + "\ntwice(3)\n"
    for name, text, status in (("right.py", right, 0), ("wrong.py", wrong, 1)):
        (tmp_path / name).write_text(text)
        options = ("--python-executable", installed, "--cache-dir", tmp_path / "cache", "--follow-imports", "silent")
        checked = run(sys.executable, "-m", "mypy", *options, name, cwd=tmp_path)
        assert checked.returncode == status, checked.stdout + checked.stderr
    assert 'incompatible type "int"; expected "Tensor"' in checked.stdout


def test_installed_size() -> None:
    """wgrad's dependencies, and theirs, as their packages list their files (bytecode, which pip may add, left out)."""
    waiting, seen, total = ["wgrad"], set(), 0.0
    while waiting:
        name = waiting.pop().lower().replace("_", "-")
        if name in seen:
            continue
        seen.add(name)
        distribution = metadata.distribution(name)
        needs = [Requirement(text) for text in distribution.requires or []]
        waiting += [need.name for need in needs if need.marker is None or need.marker.evaluate({"extra": ""})]
        if name != "wgrad":  # editable here
            files = [str(distribution.locate_file(f)) for f in distribution.files or [] if f.suffix != ".pyc"]
            total += sum(os.path.getsize(f) for f in files if os.path.exists(f))
    total += sum(p.stat().st_size for room in ROOMS for p in (ROOT / room).rglob("*") if p.suffix in SHIPPED)
    assert {"numpy", "wgpu", "tokenizers"} < seen
    assert total < MOST_INSTALLED_BYTES, f"{total / 1e6:.1f} MB in {sorted(seen)}"
