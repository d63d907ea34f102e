"""Builds the emulated libamdhip64.so, and the kernels of hip/ as shared objects for it.

    python tests/hip/emulator/build.py OUT [--arch gfx942 --arch gfx1100]

makes OUT/libamdhip64.so and OUT/<arch>/<file>.co. Use: LD_LIBRARY_PATH=OUT (or load it first by path: the name is
enough then), WGRAD_HIP_OBJECTS=OUT, WGRAD_EMULATED_ARCH=gfx1100. Only what has changed is built again.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import shutil
import subprocess
from collections.abc import Collection
from functools import cache
from pathlib import Path

from filelock import FileLock

HERE = Path(__file__).resolve().parent
HIP = HERE.parents[2] / "hip"
HEADERS = sorted(HIP.rglob("*.hpp"))
INCLUDES = sorted({f"-I{path.parent}" for path in HEADERS})
HOST = {"gfx90a": 910, "gfx942": 942, "gfx1100": 1100, "gfx1201": 1201}
FLAGS = ["-std=c++20", "-O1", "-march=x86-64-v3", "-fPIC", "-fno-math-errno", "-Wall", "-Wno-psabi", *INCLUDES]
# What is unrolled for a GPU would only take long to compile here.
FLAGS += ["-mllvm", "-pragma-unroll-threshold=64", "-Wno-pass-failed"]
# Functions that are inlined everywhere are not compiled for callers that there cannot be.
FLAGS += ["-fvisibility-inlines-hidden"]
# GPU_KERNEL leaves this mark; the kernel's name follows.
_MARK = re.compile(r'extern "C"\s+__attribute__\(\(annotate\("gpu_kernel:" "([^"]+)"\)\)\)\s*void\s+(\w+)\s*\(')
# Kernels that report every load and store: little optimization, so that an access of the source stays one instruction.
COUNTED = ["-DGPU_COUNTED", "-gline-tables-only", "-fsanitize-coverage=func,trace-loads,trace-stores",
           "-mllvm", "-disable-vector-combine"]  # fmt: skip
MACHINE_CODE = ["-O0", "-march=x86-64-v3", "-fPIC"]


def clang() -> str:
    """clang++ 15 or later (ext_vector_type, _Float16), 19 first.

    Raises:
        FileNotFoundError: there is none.
    """
    for name in ("clang++-19", "clang++", "clang++-20", "clang++-18", "clang++-16"):
        if found := shutil.which(name):
            return found
    raise FileNotFoundError("the emulator needs clang++: apt-get install clang-19")


def _run(command: list[str], stdin: str | None = None) -> str:
    done = subprocess.run(command, input=stdin, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[:8000]}")
    return done.stdout


def lock(output: Path) -> FileLock:
    """Held while `output` is looked at and made: processes share a folder."""
    output.parent.mkdir(parents=True, exist_ok=True)
    return FileLock(f"{output}.lock")


def _fresh(output: Path, key: str) -> bool:
    note = output.with_name(output.name + ".key")
    return output.exists() and note.exists() and note.read_text() == key


def _publish(made: Path, output: Path, key: str) -> None:
    made.replace(output)
    output.with_name(output.name + ".key").write_text(key)


def _digest(flags: list[str], *texts: str) -> str:
    """Return the digest of sources and options, without the preprocessor's lines, which name the folder."""
    plain = [re.sub(r"^# \d.*$", "", text, flags=re.MULTILINE) for text in texts]
    parts = [clang(), *(flag for flag in flags if not flag.startswith("-I")), *plain]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def build_library(out: Path) -> Path:
    """OUT/libamdhip64.so."""
    sources = sorted(HERE.glob("*.cpp"))
    texts = [p.read_text() for p in (*sources, *sorted(HERE.glob("*.hpp")), HIP / "runtime" / "gpu_host.hpp")]
    output, key = out / "libamdhip64.so", _digest(FLAGS, *texts)
    with lock(output):
        if not _fresh(output, key):
            made = out / "libamdhip64.so.new"
            soname = "-Wl,-soname,libamdhip64.so"
            _run([clang(), *FLAGS, "-DGPU_HOST=942", "-shared", soname, *map(str, sources), "-o", str(made), "-ldl"])
            _publish(made, output, key)
    return output


def _without(text: str, kernels: Collection[str]) -> str:
    """Return the source with all other kernels as static functions that nobody calls, so that they are not compiled."""
    return _MARK.sub(lambda found: found[0] if found[2] in kernels else f"static void {found[2]}(", text)


def build_kernels(
    source: Path,
    arch: str,
    out: Path,
    *,
    counted: bool = False,
    optimized: bool = True,
    only: Collection[str] | None = None,
) -> Path:
    """OUT/<arch>/<source>.co: the kernels of one .hip file for the emulated architecture.

    counted: they report their memory accesses (counts.hpp), and are slower. Not optimized: they read all that the
    source reads, whether it is used or not. only: the kernels that are wanted.
    """
    output = out / arch / f"{source.stem}.co"
    flags = [*FLAGS, *(COUNTED if counted else ()), *(() if optimized else ("-O0",))]
    text = _preprocess(source, arch, flags)
    if only is not None:
        text = _without(text, only)
    key = _digest([*flags, *MACHINE_CODE] if counted else flags, text)
    with lock(output):
        if not _fresh(output, key):
            export = 'extern "C" __attribute__((visibility("default"))) const gpu::host::Kernel gpu_kernel_{0} ='
            export += ' {{"{0}", {1},'
            export += " unsigned(sizeof(gpu::host::Export<{0}>::sizes) - 1), gpu::host::Export<{0}>::sizes,"
            export += " gpu::host::Export<{0}>::invoke}};"
            exports = [export.format(name, threads) for threads, name in _MARK.findall(text)]
            if not exports:
                raise RuntimeError(f"{source.name} has no GPU_KERNEL for {arch}")
            made, source_text = output.with_suffix(".new"), "\n".join([text, *exports])
            if counted:  # what is counted is settled before machine code is made: the quickest will do
                code = output.with_suffix(".bc")
                _run([clang(), *flags, "-x", "c++", "-emit-llvm", "-c", "-", "-o", str(code)], stdin=source_text)
                _run([clang(), *MACHINE_CODE, "-shared", "-x", "ir", str(code), "-o", str(made), "-lm"])
                code.unlink()
            else:
                _run([clang(), *flags, "-x", "c++", "-shared", "-", "-o", str(made), "-lm"], stdin=source_text)
            _publish(made, output, key)
    return output


@cache
def _preprocessed(command: tuple[str, ...], written: tuple[int, ...]) -> str:
    """The output of a preprocessor, for sources that were last written at these times."""
    return _run(list(command))


def _preprocess(source: Path, arch: str, flags: list[str]) -> str:
    """Each device of a process asks for the same text of its kernels: the compiler is started once for it."""
    command = (clang(), *flags, f"-DGPU_HOST={HOST[arch]}", "-x", "c++", "-E", str(source))
    return _preprocessed(command, tuple(path.stat().st_mtime_ns for path in (source, *HEADERS)))


def has_kernels(source: Path, arch: str) -> bool:
    """Some files serve only some architectures: `// architectures: gfx90a gfx942` in their head."""
    found = re.search(r"^// architectures: (.*)$", source.read_text(encoding="utf-8"), re.MULTILINE)
    return found is None or arch in found.group(1).split()


def build_all(out: Path, architectures: list[str]) -> None:
    build_library(out)
    for source in sorted(HIP.rglob("*.hip")):
        for arch in architectures:
            if has_kernels(source, arch):
                build_kernels(source, arch, out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--arch", action="append", choices=sorted(HOST))
    arguments = parser.parse_args()
    build_all(arguments.out, arguments.arch or ["gfx942", "gfx1100"])
