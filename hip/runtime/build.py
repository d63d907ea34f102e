"""Build the code objects that ship with the package: `make objects`.

    python -m wgrad.hip.runtime.build [--arch gfx942] [--only gemm] [--all] [--check] [--jobs 2]

Needs clang 19, and clang 22 for gfx950, each with its lld (Debian: apt-get install clang-19 lld-19 clang-22 lld-22),
no ROCm. An architecture whose compiler is not installed is named and left as it is; the others are built.
$WGRAD_CLANG names one compiler for all. Objects that are up to date (same sources, same compiler) are not compiled
again, unless with --all, nor are those whose sources differ in comments only. --check writes nothing: it compiles
everything and compares bytes where the installed compiler made the objects, else only the digests of the sources.
Exit status: 0 all is done or matches, 1 some objects do not match, 2 a compiler was missing or failed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from wgrad.device.errors import DeviceError
from wgrad.hip.runtime.architectures import GENERIC, SHIPPED
from wgrad.hip.runtime.objects import (
    HIP,
    MANIFEST,
    OPTIONS,
    headers,
    include_flags,
    read_manifest,
    read_object,
    serves,
    source_file,
    sources,
    text_digest,
    write_object,
)

# Without a CUID, a hash of paths, the bytes do not depend on the folder.
FLAGS = (
    "-x", "hip", "--cuda-device-only", "--no-gpu-bundle-output", "-nogpulib", "-nogpuinc", "-fuse-cuid=none", *OPTIONS,
)  # fmt: skip
CLANG = os.environ.get("WGRAD_CLANG", "")
_NEWER = {"gfx950": "clang-22"}  # architectures that clang 19 does not know
BUILT = (*SHIPPED, *GENERIC)  # a generic target after its twin
_GENERIC_VERSION = "-mcode-object-version=6"
# gfx11-generic takes every GPU to have 1,024 registers a lane, as most have. With gfx1100's 1,536 its machine code is
# gfx1100's, which fits the others (tests/hip/test_objects.py); without, 7 of 33 objects differ, and two kernels spill.
_FEATURES = {"gfx11-generic": ("-Xclang", "-target-feature", "-Xclang", "+allocate1_5xvgprs")}


def compiler(architecture: str) -> str:
    """Return the compiler of an architecture's code objects."""
    return CLANG or _NEWER.get(architecture, "clang-19")


def flags(architecture: str) -> tuple[str, ...]:
    """Return clang's flags for an architecture, without its name."""
    if architecture not in GENERIC:
        return FLAGS
    version = (_GENERIC_VERSION if flag.startswith("-mcode-object-version") else flag for flag in FLAGS)
    return (*version, *_FEATURES.get(architecture, ()))


class Built(NamedTuple):
    """A code object, the digest of what the preprocessor makes of its source, and the headers that it includes.

    kept: It is the stored one, not compiled again.
    """

    image: bytes
    text: str
    headers: list[str]
    kept: bool


def _clang(source: Path, architecture: str, *options: str) -> str:
    # The source's folder is left out of the command: no path of this machine gets into the file.
    command = [compiler(architecture), *flags(architecture), f"--offload-arch={architecture}", *include_flags()]
    # clang 19 warns of version 6, by no flag's leave: "still in development". Its twin's sources are without warnings.
    command += [] if architecture in GENERIC else ["-Wall", "-Werror"]
    command += [source.name, *options]
    done = subprocess.run(command, cwd=source.resolve().parent, capture_output=True, encoding="utf-8")
    if done.returncode:
        raise RuntimeError(f"{source.name} for {architecture}:\n{done.stderr[:8000]}")
    return done.stdout


def compile_source(source: Path, architecture: str, output: Path) -> None:
    """Compile a .hip file to an ELF code object.

    Raises:
        FileNotFoundError: There is no such compiler.
        RuntimeError: It failed; the message is its own.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    _clang(source, architecture, "-o", str(output.resolve()))


def preprocess(source: Path, architecture: str) -> tuple[str, list[str]]:
    """Return the digest of the flags and a .hip file's text without comments, headers in place, and their names.

    Raises:
        As `compile_source`.
    """
    text = _clang(source, architecture, "-E", "-P", "-o", "-")
    lines = (line.strip() for line in text.splitlines())
    rule = _clang(source, architecture, "-E", "-MM", "-MT", "object", "-o", "-")
    words = rule.replace("\\\n", " ").split()  # object: x.hip a.hpp b.hpp
    digest = _sha("\n".join([*flags(architecture), *filter(None, lines)]).encode())
    return digest, [Path(word).name for word in words[2:]]


def compiler_version(architecture: str) -> str:
    """Return the first line of the --version of an architecture's compiler, empty where it is not installed."""
    try:
        done = subprocess.run([compiler(architecture), "--version"], capture_output=True, encoding="utf-8", check=True)
    except FileNotFoundError:
        return ""
    return done.stdout.splitlines()[0].strip()


def missing_compilers(architectures: Iterable[str]) -> list[str]:
    """Return a line for each compiler that is not installed, with its architectures and how to install it."""
    of: dict[str, list[str]] = {}
    for architecture in architectures:
        if not compiler_version(architecture):
            of.setdefault(compiler(architecture), []).append(architecture)
    return [
        f"{', '.join(found)}: {name} is not installed: apt-get install {name} {name.replace('clang', 'lld')}, or name"
        " another in $WGRAD_CLANG"
        for name, found in of.items()
    ]


def compile_all(
    pairs: list[tuple[Path, str]], *, jobs: int = 0, stored: Callable[[str, str], bytes | None] | None = None
) -> dict[str, Built]:
    """Return {"gfx942/gemm.co": code object} for every (source, architecture).

    stored: Returns a code object, by its name and its text's digest, that need not be compiled again.
    """

    def one(pair: tuple[Path, str]) -> tuple[str, Built]:
        source, architecture = pair
        name = f"{architecture}/{source.stem}.co"
        text, included = preprocess(source, architecture)
        if stored is not None and (image := stored(name, text)) is not None:
            return name, Built(image, text, included, kept=True)
        with tempfile.TemporaryDirectory() as scratch:
            path = Path(scratch) / source.stem
            compile_source(source, architecture, path)
            return name, Built(path.read_bytes(), text, included, kept=False)

    with ThreadPoolExecutor(jobs or os.cpu_count()) as pool:
        return dict(pool.map(one, pairs))


def _pairs(architectures: list[str], only: str, root: Path) -> list[tuple[Path, str]]:
    found = [s for s in sources(root) if only in s.stem]
    return [(s, a) for s in found for a in architectures if serves(s, a)]


def _texts(source: Path, included: list[str], root: Path) -> str:
    """Return the digest of a source and its headers, without their folders."""
    there = {path.name: path for path in headers(root)}
    return text_digest([source, *(there.get(name, root / name) for name in included)])


def _digest(name: str, texts: str) -> str:
    """Return the digest of what an object is made from: its architecture's flags and the texts."""
    return _sha(" ".join([*flags(name.partition("/")[0]), texts]).encode())


def _sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def outdated(folder: Path, *, root: Path = HIP, architectures: tuple[str, ...] = BUILT) -> list[str]:
    """Return the code objects that are missing, damaged, without a source, or out of date, each with the reason.

    Compiles nothing, so it is quick and needs no compiler.
    """
    note, wrong = read_manifest(folder), {}
    expected = {f"{a}/{s.stem}.co": s for s, a in _pairs(list(architectures), "", root)}
    files = [p for architecture in architectures for p in (folder / architecture).glob("*.co.xz")]
    there = {p.relative_to(folder).as_posix().removesuffix(".xz"): p for p in files}
    texts = {s: _texts(s, note["headers"].get(s.stem, []), root) for s in set(expected.values())}
    for name in sorted(expected.keys() | there.keys()):
        if name not in expected:
            wrong[name] = "has no source"
        elif name not in there:
            wrong[name] = "is missing"
        elif note["sources"].get(name) != _digest(name, texts[expected[name]]):
            wrong[name] = f"was made from another {expected[name].name}, other headers or options"
        elif (image := _stored(there[name])) is None:
            wrong[name] = "is damaged"
        elif note["objects"].get(name) != _sha(image):
            wrong[name] = "is not the file that was made"
    return [f"{name} {why}" for name, why in wrong.items()]


def _stored(path: Path) -> bytes | None:
    """Return the code object in a file, None where it is missing or damaged."""
    try:
        return read_object(path)
    except (DeviceError, FileNotFoundError):
        return None


def build(
    folder: Path, architectures: list[str], only: str = "", *, jobs: int = 0, everything: bool = False, root: Path = HIP
) -> list[Path]:
    """Build every code object of these architectures that is out of date, and update the manifest.

    Args:
        folder: Where the objects and the manifest are.
        architectures: Their compilers must be installed.
        only: Part of the sources' names. Where the compiler is another one, all are compiled again.
        jobs: Compilers at once; 0: one a core.
        everything: Compile also what is up to date.
        root: The folder of the sources.

    Returns:
        The files written.
    """
    note = read_manifest(folder)
    versions = {architecture: compiler_version(architecture) for architecture in architectures}
    others = {a for a, version in versions.items() if note["compilers"].get(a) != version}  # made by another compiler
    names = {line.partition(" ")[0] for line in outdated(folder, root=root, architectures=tuple(architectures))}
    pairs = [
        (source, a)
        for source, a in _pairs(architectures, "", root)
        if a in others or only in source.stem and (everything or f"{a}/{source.stem}.co" in names)
    ]

    def stored(name: str, text: str) -> bytes | None:
        if everything or name.partition("/")[0] in others or note["texts"].get(name) != text:
            return None
        image = _stored(folder / f"{name}.xz")
        return image if image is not None and _sha(image) == note["objects"].get(name) else None

    made = compile_all(pairs, jobs=jobs, stored=stored)
    stems = {s.stem for s in sources(root)}
    gone = [path for path in folder.glob("*/*.co.xz") if path.name.partition(".")[0] not in stems]
    for path in gone:  # objects of sources that were removed
        path.unlink()
    written = []
    for name, built in sorted(made.items(), key=lambda item: item[0].partition("/")[0] in GENERIC):  # twins first
        if not built.kept:
            written.append(folder / f"{name}.xz")
            write_object(written[-1], built.image)
    if made or gone:
        _write_manifest(folder, versions, made, root)
    return written


def _write_manifest(folder: Path, versions: dict[str, str], made: dict[str, Built], root: Path) -> None:
    old: dict[str, Any] = read_manifest(folder)
    kept = sorted(path.relative_to(folder).as_posix().removesuffix(".xz") for path in folder.glob("*/*.co.xz"))
    # A source's headers are those of all its architectures; of one that was not compiled now, those listed before.
    headers: dict[str, set[str]] = {}
    for name in kept:
        stem = PurePosixPath(name).stem
        headers.setdefault(stem, set()).update(made[name].headers if name in made else old["headers"].get(stem, []))
    texts = {stem: _texts(source_file(stem, root), sorted(found), root) for stem, found in headers.items()}
    note = {
        "compilers": {**old["compilers"], **versions},
        "headers": {stem: sorted(found) for stem, found in sorted(headers.items())},
        "sources": {
            n: _digest(n, texts[PurePosixPath(n).stem]) if n in made else old["sources"].get(n, "") for n in kept
        },
        "texts": {n: made[n].text if n in made else old["texts"].get(n, "") for n in kept},
        "objects": {n: _sha(made[n].image) if n in made else old["objects"].get(n, "") for n in kept},
    }
    (folder / MANIFEST).write_text(json.dumps(note, indent=1) + "\n", encoding="utf-8")


def differing(folder: Path, pairs: list[tuple[Path, str]], *, jobs: int = 0) -> list[str]:
    """Return the names of the code objects that this compiler does not reproduce byte for byte."""
    fresh = compile_all(pairs, jobs=jobs)
    return [name for name, built in fresh.items() if _stored(folder / f"{name}.xz") != built.image]


def check(folder: Path, architectures: list[str], only: str, *, jobs: int = 0) -> int:
    """Run --check, print what it finds and return the exit status."""
    wrong = outdated(folder, architectures=tuple(architectures))
    if wrong:
        print("\n".join(wrong) + "\nbuild them again with `make objects`")
        return 1
    made_with, same = read_manifest(folder)["compilers"], []
    for architecture in architectures:
        if (version := compiler_version(architecture)) == made_with[architecture]:
            same.append(architecture)
        elif version:
            print(
                f"{architecture}: only the digests of the sources were compared, and they are the same: the code"
                f" objects were made with {made_with[architecture]}, and this is {version}"
            )
    wrong = [f"{name} is not what the sources give" for name in differing(folder, _pairs(same, only, HIP), jobs=jobs)]
    if same:
        print("\n".join(wrong) or f"every code object of {', '.join(same)} is what the sources give")
    lacking = missing_compilers(architectures)
    print("".join(f"not checked: {line}\n" for line in lacking), end="")
    return 1 if wrong else 2 if lacking else 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m wgrad.hip.runtime.build", description=__doc__)
    parser.add_argument("--arch", action="append", help=f"default: {' '.join(BUILT)}")
    parser.add_argument("--only", default="", help="part of a source file's name")
    parser.add_argument("--out", type=Path, default=HIP / "objects")
    parser.add_argument("--all", action="store_true", help="also what is up to date")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--jobs", type=int, default=0, help="compilers at once; default: one a core")
    a = parser.parse_args()
    architectures = a.arch or list(BUILT)
    try:
        if a.check:
            return check(a.out, architectures, a.only, jobs=a.jobs)
        installed = [name for name in architectures if compiler_version(name)]
        for path in build(a.out, installed, a.only, jobs=a.jobs, everything=a.all):
            print(f"{path} {path.stat().st_size:,} bytes")
    except RuntimeError as error:
        print(error)
        return 2
    lacking = missing_compilers(architectures)
    print("".join(f"not built: {line}\n" for line in lacking), end="")
    return 2 if lacking else 0


if __name__ == "__main__":
    sys.exit(main())
