"""The wheel as a user gets it: built from the tree, installed in its own environment, used in an empty folder."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import wgrad
from wgrad.hip.runtime.build import BUILT
from wgrad.hip.runtime.objects import read_object

ROOT = Path(__file__).parents[1]
ROOMS = ("device", "wgsl", "hip", "autograd", "train")
SHIPPED = {".npy", ".py", ".wgsl", ".mjs", ".html", ".js", ".css", ".hip", ".hpp", ".xz", ".json"}  # .xz: hip/objects
MOST_INSTALLED_BYTES = 118 * 2**20  # README names it; du -m counts so


# Programs on the public names, and what is wrong with each further line.
RIGHT = """
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import wgrad
from wgrad import FinetuneResult, Generated, Scores, Tensor, finetune, functional, generate, load


def twice(x: Tensor) -> Tensor:
    return functional.scale(x, 2.0)


def records() -> Iterator[dict[str, Any]]:
    yield {"text": "a"}


class Watch(wgrad.Callback):
    def on_step(self, report: wgrad.StepReport) -> bool:
        return report.loss < 1 and report.step > 3


def train(out: Path) -> FinetuneResult:
    return finetune(model="m", data=records(), out=out, learning_rate=1e-4, lora_r=8, callbacks=[Watch(), lambda report:
    None])


def use(result: FinetuneResult) -> tuple[Generated, list[Generated], Scores, float]:
    with load("m", adapter=result.out, device="cpu", context=64) as model:
        one = model.generate([{"role": "user", "content": "hello"}], temperature=0, max_new_tokens=3)
        scores = model.score({"prompt": "a", "completion": "b"})
        return one, model.generate_many(["a", "b"], batch_size=2, seed=1), scores, scores.loss
"""
WRONG = {
    "\ntwice(3)\n": 'incompatible type "int"; expected "Tensor"',
    'finetune(model="m", data="d", out="o", lora_r="8")\n': 'Argument "lora_r" to "finetune" '
    'has incompatible type "str"',
    'finetune(modle="m")\n': 'Unexpected keyword argument "modle"',
    "finetune(data=3)\n": 'Argument "data" to "finetune" has incompatible type "int"',
    'load("m", contex=3)\n': 'Unexpected keyword argument "contex"',
    'load("m").generate("a", temprature=0)\n': 'Unexpected keyword argument "temprature"',
    'load("m").generate("a").txt\n': '"Generated" has no attribute "txt"',
    "generate(prompt=3)\n": 'Argument "prompt" to "generate" has incompatible type "int"',
}


def run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Without what would lead Python or mypy back to the tree."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "MYPY"))}
    return subprocess.run([str(c) for c in command], cwd=cwd, env=environment, capture_output=True, text=True)


def copy_tree(folder: Path, links: bool) -> Path:
    """Copy the sources of a build, without the times and modes of the files."""
    tree = folder / "tree"
    skip = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in (*ROOMS, "src"):
        shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=skip)
    for name in ("pyproject.toml", "README.md", "LICENSE", "NOTICE", "CHANGELOG.md", "MANIFEST.in"):
        shutil.copy(ROOT / name, tree)
    if not links:
        for room in ROOMS:
            (tree / "src" / "wgrad" / room).unlink()
        for path in tree.rglob("*.py"):
            os.utime(path, (10**9, 10**9))
            path.chmod(0o600)
    return tree


def build_wheel(folder: Path, tree: Path) -> Path:
    options = ("--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--disable-pip-version-check")
    built = run(sys.executable, "-m", "pip", "wheel", *options, "--wheel-dir", folder, tree, cwd=folder)
    assert built.returncode == 0, built.stderr
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    return build_wheel(folder, copy_tree(folder, links=True))


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


def test_a_release_has_addresses_and_absolute_links(tmp_path: Path) -> None:
    for name in ("README.md", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    address = "https://example.org/some/where"
    subprocess.run([sys.executable, ROOT / ".ci" / "release_links.py", address, "v7"], cwd=tmp_path, check=True)
    link, here = r"\]\(([^)]+)\)", f"{address}/(blob|raw)/v7/"
    before, after = (re.findall(link, (folder / "README.md").read_text()) for folder in (ROOT, tmp_path))
    assert [re.sub(here, "", path) for path in after] == before and all(path.startswith("https://") for path in after)
    assert f"{address}/raw/v7/docs/assets/run.svg" in after and f"{address}/blob/v7/CONTRIBUTING.md" in after
    project, mine = (tomllib.loads((folder / "pyproject.toml").read_text()) for folder in (tmp_path, ROOT))
    urls = project["project"].pop("urls")
    assert project == mine and urls["Repository"] == address and all(url.startswith(address) for url in urls.values())


def test_ships_every_source_file_and_nothing_else(wheel: Path) -> None:
    names = {n for n in zipfile.ZipFile(wheel).namelist() if not n.split("/")[0].endswith(".dist-info")}
    tree = {
        f"wgrad/{room}/{p.relative_to(ROOT / room).as_posix()}"
        for room in ROOMS
        for p in (ROOT / room).rglob("*")
        if p.suffix in SHIPPED
    }
    assert names == tree | {
        f"wgrad/{n}" for n in ("__init__.py", "__main__.py", "functional.py", "py.typed", "version.py")
    }


def test_ships_a_code_object_of_every_kernel_file(wheel: Path, tmp_path: Path) -> None:
    """As the manifest lists them: nothing has to be compiled after installing."""
    archive, folder = zipfile.ZipFile(wheel), "wgrad/hip/objects"
    archive.extractall(tmp_path, [name for name in archive.namelist() if name.startswith(folder)])
    listed = json.loads(archive.read(f"{folder}/manifest.json"))["objects"]
    for name, digest in listed.items():
        image = read_object(tmp_path / folder / f"{name}.xz")
        assert hashlib.sha256(image).hexdigest() == digest, name
    kernels = {p.stem for p in (ROOT / "hip").rglob("*.hip")}
    for architecture in BUILT:
        have = {n.partition("/")[2].removesuffix(".co") for n in listed if n.startswith(f"{architecture}/")}
        assert {"gemm", "storage"} <= have <= kernels


def test_carries_its_license_and_needs_no_torch(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    for file, words in (("LICENSE", "Apache License"), ("NOTICE", "bitsandbytes")):
        (name,) = [n for n in archive.namelist() if n.endswith(f"/{file}")]
        assert words in archive.read(name).decode()
    (about,) = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
    needs = re.findall(r"^Requires-Dist: ([\w-]+)(.*)$", archive.read(about).decode(), re.MULTILINE)
    at_run_time = {name.lower().replace("_", "-") for name, rest in needs if "extra ==" not in rest}
    wanted = {"wgpu", "numpy", "ml-dtypes", "safetensors", "tokenizers", "jinja2", "msgspec", "pyyaml", "rich"}
    wanted |= {"filelock", "platformdirs"}
    assert at_run_time == wanted


def test_builds_are_the_same_to_the_byte(wheel: Path, tmp_path: Path) -> None:
    """From other times, modes and umask, without links, and from an sdist, which is the same again too."""
    made = list[Path]()
    code = "import sys; sys.path.insert(0, 'src'); import reproducible_build as b; b.build_sdist(sys.argv[1])"
    for number, links in enumerate((True, False)):
        folder = tmp_path / str(number)
        folder.mkdir()
        built = run(sys.executable, "-c", code, folder, cwd=copy_tree(folder, links))
        assert built.returncode == 0, built.stderr
        made += folder.glob("*.tar.gz")
    assert made[0].read_bytes() == made[1].read_bytes()
    with tarfile.open(made[0]) as archive:
        names = [name.partition("/")[2] for name in archive.getnames()]
        archive.extractall(tmp_path, filter="data")
    assert {"NOTICE", "LICENSE", "CHANGELOG.md", "src/reproducible_build.py"} <= set(names)
    again = build_wheel(tmp_path, tmp_path / made[0].name.removesuffix(".tar.gz"))
    assert again.read_bytes() == wheel.read_bytes()


def test_version_is_said_once() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert "version" not in project and project["dynamic"] == ["version"]
    lines = [line for p in (ROOT / "src/wgrad").glob("*.py") for line in p.read_text().splitlines()]
    assert [line for line in lines if line.startswith("__version__ =")] == [f'__version__ = "{wgrad.__version__}"']


def test_the_conda_recipe_is_of_this_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    recipe = yaml.safe_load((ROOT / "recipe/recipe.yaml").read_text(encoding="utf-8"))
    names = {"wgpu": "wgpu-py"}  # where conda-forge calls it otherwise

    def of_conda(text: str) -> tuple[str, SpecifierSet]:
        requirement = Requirement(text)
        return names.get(requirement.name, requirement.name), requirement.specifier

    run = [line.partition(" ") for line in recipe["requirements"]["run"]]
    assert run[0] == ("python", " ", ">=${{ python_min }}")
    needed = {name: SpecifierSet(limits) for name, _, limits in run[1:]}
    assert needed == dict(map(of_conda, project["project"]["dependencies"]))
    assert f">={recipe['context']['python_min']}" == project["project"]["requires-python"]
    assert (
        "setuptools " + str(Requirement(project["build-system"]["requires"][0]).specifier)
        in (recipe["requirements"]["host"])
    )
    assert recipe["context"]["version"] == wgrad.__version__
    scripts = [f"{name} = {target}" for name, target in project["project"]["scripts"].items()]
    assert recipe["build"]["python"]["entry_points"] == scripts
    about = {key: recipe["about"][key] for key in ("summary", "license", "license_file")}
    keys = ("description", "license", "license-files")
    assert list(about.values()) == [project["project"][key] for key in keys]


def test_the_image_is_made_of_what_is_there() -> None:
    """Every folder of the package is copied, past .dockerignore; the image's user is not root."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    lines = text.replace("\\\n", " ").splitlines()
    copied = [name for line in lines if line.startswith("COPY ") for name in line.split()[1:-1]]
    assert [name for name in copied if not (ROOT / name).exists()] == []
    folders = {path.split("/")[0] for path in project["tool"]["setuptools"]["package-dir"].values()}
    files = {project["project"]["readme"], "pyproject.toml", *project["project"]["license-files"]}
    assert set(copied) == folders | files
    let_through = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert {line[1:] for line in let_through if line.startswith("!")} == set(copied)
    extras = re.findall(r"whl\)\[([\w,]+)\]", text)[0].split(",")
    assert set(extras) <= set(project["project"]["optional-dependencies"])
    assert [line.split()[1] for line in lines if line.startswith("USER ")] == ["wgrad"]
    assert 'ENTRYPOINT ["wgrad"]' in lines and "graphics" in text.partition("NVIDIA_DRIVER_CAPABILITIES=")[2]


def test_oracles_are_pinned_and_the_makefile_takes_the_same_torch() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    oracles = [Requirement(text) for text in project["optional-dependencies"]["oracle"]]
    for oracle in oracles:
        (pin,) = oracle.specifier
        assert pin.operator == "==" and "*" not in pin.version, oracle
    done = run("make", "--dry-run", "--always-make", ".venv-test/installed", cwd=ROOT)
    assert f" {next(str(o) for o in oracles if o.name == 'torch')} " in done.stdout, done.stderr


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


@pytest.mark.all  # 19 seconds of mypy; that py.typed is shipped is tested above
def test_a_user_of_the_wheel_gets_types(installed: Path, tmp_path: Path) -> None:
    """mypy reads py.typed and the rooms: right code passes, and each wrong line is found, in what it is wrong."""
    (tmp_path / "right.py").write_text(RIGHT)
    (tmp_path / "wrong.py").write_text(RIGHT + "".join(WRONG))
    options = (
        "--python-executable",
        installed,
        "--cache-dir",
        tmp_path / "cache",
        "--strict",
        "--follow-imports",
        "silent",
    )
    checked = run(sys.executable, "-m", "mypy", *options, "right.py", cwd=tmp_path)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    checked = run(sys.executable, "-m", "mypy", *options, "wrong.py", cwd=tmp_path)
    found = [line for line in checked.stdout.splitlines() if ": error: " in line]
    for (line, words), told in zip(WRONG.items(), found, strict=True):
        assert words in told, (line, told)


def test_the_installed_size_is_that_of_the_readme() -> None:
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


def test_the_operators_can_be_imported_by_their_public_name() -> None:
    import wgrad
    import wgrad.functional
    from wgrad.autograd import functional
    from wgrad.functional import rms_norm

    assert wgrad.functional is functional and rms_norm is functional.rms_norm
