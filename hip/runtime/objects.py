"""The code objects that ship with the package: where they are, what they were made from, and how to read one.

hip/objects/<architecture>/<file>.co.xz, and hip/objects/manifest.json, which `hip/runtime/build.py` writes:
    {"compilers": {"gfx942": first line of clang's --version},
     "headers": {"gemm": [what it includes, as clang says]},
     "sources": {"gfx942/gemm.co": digest of clang's flags and of the texts of the source and its headers},
     "texts": {"gfx942/gemm.co": digest of what the preprocessor makes of the source},
     "objects": {"gfx942/gemm.co": SHA-256 before compression}}
A generic target's objects (GENERIC) are stored as what differs from their twin's, a hundredth of the size.
$WGRAD_HIP_OBJECTS names another folder of this layout, where files may also be uncompressed (<file>.co).
"""

from __future__ import annotations

import hashlib
import json
import lzma
import os
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from wgrad.device.errors import DeviceError
from wgrad.hip.runtime.architectures import GENERIC

HIP = Path(__file__).resolve().parents[1]  # its folders hold the kernels beside the Python that launches them
MANIFEST = "manifest.json"
OPTIONS = ("-std=c++17", "-O3", "-fno-math-errno", "-mcode-object-version=5")
_HOST_HEADER = "gpu_host.hpp"  # the CPU half of gpu.hpp: no GPU reads it
MOST_BYTES = 64 << 20  # of a code object; ours have at most 1 MB
# Results are a few hundred KB: a larger dictionary would only cost memory on reading.
_FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": 1 << 20}]


def sources(root: Path = HIP) -> list[Path]:
    """Return all kernel sources, sorted by name."""
    return sorted(root.rglob("*.hip"), key=lambda path: path.name)


def source_file(source: str, root: Path = HIP) -> Path:
    """Return the path of `source`.hip, also where there is no such file."""
    return next(root.rglob(f"{source}.hip"), root / f"{source}.hip")


def serves(source: Path, architecture: str) -> bool:
    """Return whether a source is for an architecture: its head may list some (`// architectures: gfx942 gfx90a`)."""
    for line in source.read_text(encoding="utf-8").splitlines():
        if line.startswith("// architectures:"):
            return GENERIC.get(architecture, architecture) in line.partition(":")[2].split()
        if not line.startswith("//"):
            break
    return True


def headers(root: Path = HIP) -> list[Path]:
    """Return all headers that a GPU's kernels may include, sorted by name."""
    found = (path for path in root.rglob("*.hpp") if path.name != _HOST_HEADER)
    return sorted(found, key=lambda path: path.name)


def include_flags(root: Path = HIP) -> list[str]:
    """Return the compiler's options for the folders of headers."""
    return [f"-I{folder}" for folder in sorted({path.parent for path in headers(root)})]


def text_digest(paths: Iterable[Path]) -> str:
    """Return the SHA-256 of the compiler's options and the files' texts; a missing file counts as empty."""
    parts = [" ".join(OPTIONS)]
    for path in paths:
        parts += [path.name, path.read_text(encoding="utf-8") if path.is_file() else ""]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def objects_folder() -> Path:
    named = os.environ.get("WGRAD_HIP_OBJECTS")
    return Path(named) if named else HIP / "objects"


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of a folder of code objects; what it lacks, or all of it where there is none, is empty."""
    path = folder / MANIFEST
    empty: dict[str, Any] = {"compilers": {}, "headers": {}, "sources": {}, "texts": {}, "objects": {}}
    return empty | (json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {})


def compress(image: bytes) -> bytes:
    return lzma.compress(image, format=lzma.FORMAT_XZ, check=lzma.CHECK_CRC32, filters=_FILTERS)


def write_object(path: Path, image: bytes) -> None:
    """Write a .co.xz file; that of a generic target after its twin's.

    Raises:
        DeviceError: The twin's is missing or damaged.
    """
    if path.parent.name in GENERIC:
        image = _difference(image, _twins(path)) + zlib.crc32(image).to_bytes(4, "little")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(compress(image))


def read_object(path: Path) -> bytes:
    """Return the code object in a .co or .co.xz file.

    Raises:
        DeviceError: The compressed data is damaged, or larger than a code object can be; or a generic target's was
            stored with another twin.
    """
    data = path.read_bytes()
    if path.suffix != ".xz":
        return data
    image = decompress(data, str(path))
    if path.parent.name in GENERIC:
        check, image = image[-4:], _difference(image[:-4], _twins(path))
        if zlib.crc32(image).to_bytes(4, "little") != check:
            raise _damaged(path, "it was made with another twin")
    return image


def _twins(path: Path) -> bytes:
    twin = path.parents[1] / GENERIC[path.parent.name] / path.name
    if not twin.is_file():
        raise _damaged(path, f"{twin} is missing, a part of it")
    return read_object(twin)


def _difference(image: bytes, other: bytes) -> bytes:
    """Return the exclusive or of two files, of the first one's size; its own inverse."""
    size = len(image)
    return (int.from_bytes(image) ^ int.from_bytes(other[:size].ljust(size, b"\0"))).to_bytes(size)


def decompress(data: bytes, where: str) -> bytes:
    """Invert `compress`. Raises DeviceError as `read_object` does."""
    decompressor = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=MOST_BYTES)
    try:
        image = decompressor.decompress(data, MOST_BYTES)
        problem = "" if decompressor.eof and not decompressor.unused_data else "it does not end where it should"
    except (lzma.LZMAError, EOFError) as error:
        image, problem = b"", str(error)
    if problem:
        raise _damaged(where, problem)
    return image


def _damaged(where: object, problem: str) -> DeviceError:
    return DeviceError(f"the code object {where} is damaged ({problem}); install wgrad again")


def find_object(folder: Path, architecture: str, source: str) -> Path | None:
    """Return the file with the code object of `source`.hip, if there is one."""
    for suffix in (".co", ".co.xz"):
        path = folder / architecture / (source + suffix)
        if path.is_file():
            return path
    return None


def objects_digest(folder: Path, architecture: str) -> str:
    """Return the SHA-256 over the files of an architecture."""
    digest = hashlib.sha256()
    for path in sorted((folder / architecture).glob("*.co*")):
        if path.suffix in (".co", ".xz"):
            digest.update(path.name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()
