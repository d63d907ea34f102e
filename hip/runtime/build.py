"""Build the code objects that ship with the package: `make objects`.

    python -m wgrad.hip.runtime.build [--arch gfx942] [--only gemm] [--all] [--check] [--jobs 2]

Needs clang 19 and lld with the amdgcn target (Debian: apt-get install clang-19 lld-19), no ROCm. Objects that are up to
date (same sources, same compiler) are not compiled again, unless with --all. --check writes nothing: it compiles
everything and compares bytes if this compiler made the objects, else only the digests of the sources. Its exit status:
0 all objects match, 1 some do not, 2 it could not tell.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from wgrad.hip.runtime.architectures import SHIPPED
from wgrad.hip.runtime.objects import (
    HIP,
    MANIFEST,
    OPTIONS,
    compress,
    headers,
    include_flags,
    read_manifest,
    read_object,
    serves,
    source_file,
    sources,
    text_digest,
)

# Without a CUID, a hash of paths, the bytes do not depend on the folder.
FLAGS = (
    "-x", "hip", "--cuda-device-only", "--no-gpu-bundle-output", "-nogpulib", "-nogpuinc", "-fuse-cuid=none", *OPTIONS,
)  # fmt: skip
CLANG = os.environ.get("WGRAD_CLANG", "clang-19")


def compile_source(source: Path, architecture: str, output: Path, *, clang: str = CLANG) -> list[str]:
    """Compile a .hip file to an ELF code object; return the names of the headers that it includes.

    Raises:
        FileNotFoundError: There is no such compiler.
        RuntimeError: It failed; the message is its own.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    target = f"--offload-arch={architecture}"
    rule = output.with_name(f"{output.name}.d").resolve()
    command = [clang, *FLAGS, target, "-Wall", "-Werror", "-MMD", "-MT", "object", "-MF", str(rule)]
    # The source's folder is left out of the command: no path of this machine gets into the file.
    command += [*include_flags(), source.name, "-o", str(output.resolve())]
    done = subprocess.run(command, cwd=source.resolve().parent, capture_output=True, encoding="utf-8")
    if done.returncode:
        raise RuntimeError(f"{source.name} for {architecture}:\n{done.stderr[:8000]}")
    words = rule.read_text(encoding="utf-8").replace("\\\n", " ").split()  # object: x.hip a.hpp b.hpp
    rule.unlink()
    return [Path(word).name for word in words[2:]]


def compiler_version(clang: str = CLANG) -> str:
    """Return the first line of the compiler's --version. FileNotFoundError where there is none."""
    said = subprocess.run([clang, "--version"], capture_output=True, encoding="utf-8", check=True).stdout
    return said.splitlines()[0].strip()


def compile_all(
    pairs: list[tuple[Path, str]], *, clang: str = CLANG, jobs: int = 0
) -> dict[str, tuple[bytes, list[str]]]:
    """Return {"gfx942/gemm.co": (code object, names of headers)} for every (source, architecture)."""

    def one(pair: tuple[Path, str]) -> tuple[str, tuple[bytes, list[str]]]:
        source, architecture = pair
        name = f"{architecture}/{source.stem}.co"
        with tempfile.TemporaryDirectory() as scratch:
            path = Path(scratch) / source.stem
            included = compile_source(source, architecture, path, clang=clang)
            return name, (path.read_bytes(), included)

    with ThreadPoolExecutor(jobs or os.cpu_count()) as pool:
        return dict(pool.map(one, pairs))


def _pairs(architectures: list[str], only: str, root: Path) -> list[tuple[Path, str]]:
    found = [s for s in sources(root) if only in s.stem]
    return [(s, a) for s in found for a in architectures if serves(s, a)]


def _digest(source: Path, included: list[str], root: Path) -> str:
    """Return the digest of a source and of its headers, without their folders."""
    there = {path.name: path for path in headers(root)}
    return text_digest([source, *(there.get(name, root / name) for name in included)])


def _sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def outdated(folder: Path, *, root: Path = HIP, architectures: tuple[str, ...] = SHIPPED) -> list[str]:
    """Return the code objects that are missing, damaged, without a source, or out of date, each with the reason.

    Compiles nothing, so it is quick and needs no compiler.
    """
    note = read_manifest(folder)
    wrong = {}
    if note["options"] != list(FLAGS):
        wrong[MANIFEST] = "not there" if not note["options"] else "made with other options"
    expected = {f"{a}/{s.stem}.co": s for s, a in _pairs(list(architectures), "", root)}
    files = [p for architecture in architectures for p in (folder / architecture).glob("*.co.xz")]
    there = {p.relative_to(folder).as_posix().removesuffix(".xz"): p for p in files}
    made_from = {s: note["sources"].get(s.stem, {"digest": "", "headers": []}) for s in set(expected.values())}
    changed = {s for s, m in made_from.items() if m["digest"] != _digest(s, m["headers"], root)}
    for name in sorted(expected.keys() | there.keys()):
        if name not in expected:
            wrong[name] = "has no source"
        elif name not in there:
            wrong[name] = "is missing"
        elif expected[name] in changed:
            wrong[name] = f"was made from another {expected[name].name}, or other headers"
        elif note["objects"].get(name) != _sha(read_object(there[name])):
            wrong[name] = "is not the file that was made"
    return [f"{name} {why}" for name, why in wrong.items()]


def build(
    folder: Path,
    architectures: list[str],
    only: str = "",
    *,
    clang: str = CLANG,
    jobs: int = 0,
    everything: bool = False,
    root: Path = HIP,
) -> list[Path]:
    """Build every code object of these architectures that is out of date, and update the manifest.

    only: part of the sources' names. Returns the files written.
    """
    note, version = read_manifest(folder), compiler_version(clang)
    if note["compiler"] != version:
        everything = True
    names = {line.partition(" ")[0] for line in outdated(folder, root=root, architectures=tuple(architectures))}
    everything = everything or MANIFEST in names
    pairs = [p for p in _pairs(architectures, only, root) if everything or f"{p[1]}/{p[0].stem}.co" in names]
    made = compile_all(pairs, clang=clang, jobs=jobs)
    stems = {s.stem for s in sources(root)}
    gone = [path for path in folder.glob("*/*.co.xz") if path.name.partition(".")[0] not in stems]
    for path in gone:  # objects of sources that were removed
        path.unlink()
    written = []
    for name, (image, _) in made.items():
        path = folder / f"{name}.xz"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(compress(image))
        written.append(path)
    if written or gone or everything:
        _write_manifest(folder, version, made, root)
    return written


def _write_manifest(folder: Path, version: str, made: dict[str, tuple[bytes, list[str]]], root: Path) -> None:
    old: dict[str, Any] = read_manifest(folder)
    objects = {**old["objects"], **{name: _sha(image) for name, (image, _) in made.items()}}
    kept = {name: sha for name, sha in sorted(objects.items()) if (folder / f"{name}.xz").is_file()}
    stems = {name.partition("/")[2].removesuffix(".co") for name in kept}
    included: dict[str, set[str]] = {}  # by source, over all architectures
    for name, (_, found) in made.items():
        included.setdefault(name.partition("/")[2].removesuffix(".co"), set()).update(found)
    made_from = dict(old["sources"])
    for stem, names in included.items():
        digest = _digest(source_file(stem, root), sorted(names), root)
        made_from[stem] = {"digest": digest, "headers": sorted(names)}
    note = {
        "compiler": version,
        "options": list(FLAGS),
        "sources": {stem: made_from[stem] for stem in sorted(stems)},
        "objects": kept,
    }
    (folder / MANIFEST).write_text(json.dumps(note, indent=1) + "\n", encoding="utf-8")


def differing(folder: Path, pairs: list[tuple[Path, str]], *, jobs: int = 0) -> list[str]:
    """Return the names of the code objects that this compiler does not reproduce byte for byte."""
    fresh = compile_all(pairs, jobs=jobs)
    return [name for name, (image, _) in fresh.items() if read_object(folder / f"{name}.xz") != image]


def check(folder: Path, architectures: list[str], only: str, *, jobs: int = 0) -> int:
    """Run --check and return the exit status."""
    wrong = outdated(folder, architectures=tuple(architectures))
    if wrong:
        print("\n".join(wrong) + "\nbuild them again with `make objects`")
        return 1
    made_with, version = read_manifest(folder)["compiler"], compiler_version()
    if made_with != version:
        print(f"the code objects were made with {made_with}; this is {version}, whose bytes differ:")
        print("only the digests of the sources were compared, and they are the same")
        return 0
    different = differing(folder, _pairs(architectures, only, HIP), jobs=jobs)
    wrong = [f"{name} is not what the sources give" for name in different]
    print("\n".join(wrong) or "every code object is what the sources give")
    return 1 if different else 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m wgrad.hip.runtime.build", description=__doc__)
    parser.add_argument("--arch", action="append", help=f"default: {' '.join(SHIPPED)}")
    parser.add_argument("--only", default="", help="part of a source file's name")
    parser.add_argument("--out", type=Path, default=HIP / "objects")
    parser.add_argument("--all", action="store_true", help="also what is up to date")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--jobs", type=int, default=0, help="compilers at once; default: one a core")
    a = parser.parse_args()
    architectures = a.arch or list(SHIPPED)
    try:
        if a.check:
            return check(a.out, architectures, a.only, jobs=a.jobs)
        for path in build(a.out, architectures, a.only, jobs=a.jobs, everything=a.all):
            print(f"{path} {path.stat().st_size:,} bytes")
    except FileNotFoundError:
        print(f"{CLANG} is not installed: apt-get install clang-19 lld-19, or name another in $WGRAD_CLANG")
        return 2
    except RuntimeError as error:
        print(error)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
