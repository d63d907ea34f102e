"""Makes the code objects that ship with the package: `python -m wgrad.hip.build [--arch gfx942] [--check]`.

Needs clang 19 and lld with the amdgcn target (Debian: apt-get install clang-19 lld-19), no ROCm. The same compiler
gives the same bytes: --check compares with what is there and writes nothing.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from wgrad.hip.compile import OPTIONS, ROOM, SHIPPED, serves, sources

CLANG = os.environ.get("WGRAD_CLANG", "clang-19")


def compile_source(source: Path, architecture: str, output: Path, *, clang: str = CLANG) -> None:
    """One .hip file -> an ELF code object.

    Raises:
        FileNotFoundError: there is no such compiler. RuntimeError: it refused; the message is its own.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    command = [
        clang, "-x", "hip", "--cuda-device-only", f"--offload-arch={architecture}", "--no-gpu-bundle-output",
        "-nogpulib", "-nogpuinc", *OPTIONS, "-Wall", "-Werror", source.name, "-o", str(output.resolve()),
    ]  # fmt: skip
    # The folder is left out of the command: no path of this machine gets into the file.
    done = subprocess.run(command, cwd=source.resolve().parent, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{source.name} for {architecture}:\n{done.stderr[:8000]}")


def build(folder: Path, architectures: list[str], only: str = "", *, clang: str = CLANG) -> list[Path]:
    """Every source for every architecture under `folder`; the files written."""
    made = []
    for source in sources():
        if only not in source.stem:
            continue
        for architecture in architectures:
            if serves(source, architecture):
                made.append(folder / architecture / f"{source.stem}.co")
                compile_source(source, architecture, made[-1], clang=clang)
    return made


def stale(folder: Path, architectures: list[str], *, clang: str = CLANG) -> list[str]:
    """Names of the code objects that are not what the sources give, or lie there without a source."""
    with tempfile.TemporaryDirectory() as scratch:
        fresh = {p.relative_to(scratch): p.read_bytes() for p in build(Path(scratch), architectures, clang=clang)}
    there = {p.relative_to(folder): p.read_bytes() for a in architectures for p in (folder / a).glob("*.co")}
    return sorted(str(name) for name in fresh.keys() | there.keys() if fresh.get(name) != there.get(name))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m wgrad.hip.build", description=__doc__)
    parser.add_argument("--arch", action="append", help=f"default: {' '.join(SHIPPED)}")
    parser.add_argument("--only", default="", help="part of a source file's name")
    parser.add_argument("--out", type=Path, default=ROOM / "objects")
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    architectures = arguments.arch or list(SHIPPED)
    try:
        if arguments.check:
            wrong = stale(arguments.out, architectures)
            print("\n".join(wrong) or "all code objects are what the sources give")
            return 1 if wrong else 0
        for path in build(arguments.out, architectures, arguments.only):
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
