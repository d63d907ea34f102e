"""The code objects that ship: made from the sources that are there, whole, the same bytes from any folder."""

from __future__ import annotations

import json
import lzma
import os
import re
import shutil
import zlib
from collections.abc import Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.hip.executor.code_object import CodeObject
from tests.tools import CLANG, clang_for
from wgrad.device.errors import DeviceError
from wgrad.hip.runtime import binding
from wgrad.hip.runtime import build as building
from wgrad.hip.runtime import compile as compile_module
from wgrad.hip.runtime.architectures import GENERIC, SUPPORTED, TWINS, check_image, generic, renamed
from wgrad.hip.runtime.build import BUILT, build, compile_source, compiler, compiler_version, differing, main, outdated
from wgrad.hip.runtime.compile import GENERIC_VERSION, Modules
from wgrad.hip.runtime.objects import (
    HIP,
    MANIFEST,
    MOST_BYTES,
    compress,
    headers,
    objects_digest,
    read_manifest,
    read_object,
    serves,
    source_file,
    sources,
)

OBJECTS = HIP / "objects"
needs_clang = CLANG.needed
# One architecture of every second source is compiled again here, another one of the next, and others wherever an object
# has changed; `make check-objects` does all, once a week (newest.yml), and takes three minutes. Clang takes a minute of
# the largest objects (gemm_f32), three seconds of these.
QUICK = 16 << 10


def _quick(architecture: str, stem: str) -> bool:
    path = OBJECTS / GENERIC.get(architecture, architecture) / f"{stem}.co.xz"
    return path.exists() and path.stat().st_size <= QUICK


BUILT_HERE = [a for a in BUILT if not clang_for(a).missing] or list(BUILT)
SERVED = [(s, [a for a in BUILT_HERE if serves(s, a)]) for s in sources()]
TURN = zlib.crc32((OBJECTS / MANIFEST).read_bytes())
SAMPLE = [(s, found[(TURN + n) // 2 % len(found)]) for n, (s, found) in enumerate(SERVED) if (TURN + n) % 2]
SAMPLE = [(s, a) for s, a in SAMPLE if _quick(a, s.stem)]

SOURCES = [source.stem for source in sources() if serves(source, "gfx1200")]
QUICK_SOURCES = [s for s in SOURCES if _quick("gfx1201", s)]


@pytest.fixture
def room(tmp_path: Path) -> Path:
    """A copy of two small sources and their headers, to be changed."""
    folder = tmp_path / "room"
    folder.mkdir()
    for path in (*headers(), *map(source_file, ("storage", "dropout"))):
        shutil.copy(path, folder)
    return folder


def test_files_of_kernels_have_names_of_their_own() -> None:
    """Objects, digests and hiprtc know them by name, whatever folder they lie in."""
    names = [path.name for path in (*sources(), *headers())]
    assert len(set(names)) == len(names) > 50


def test_shipped_objects_are_what_the_sources_give() -> None:
    """By the digests in the manifest: quick, and needs no compiler."""
    assert outdated(OBJECTS) == [], "make them again with `make objects`"


@pytest.mark.parametrize("pair", SAMPLE, ids=lambda p: f"{p[0].stem}-{p[1]}")
def test_compiling_again_gives_the_same_bytes(pair: tuple[Path, str]) -> None:
    clang_for(pair[1]).require()
    made_with, version = read_manifest(OBJECTS)["compilers"][pair[1]], compiler_version(pair[1])
    if made_with != version:
        pytest.skip(f"they were made with {made_with}, here is {version}")
    assert differing(OBJECTS, [pair]) == []


def test_each_object_is_for_its_folder() -> None:
    for architecture in BUILT:
        found = sorted((OBJECTS / architecture).glob("*.co.xz"))
        assert found
        for path in found:
            check_image(read_object(path), str(path), architecture, "a card")


def test_sources_that_name_architectures_name_all_that_are_supported() -> None:
    named = [source for source in sources() if not serves(source, "none")]
    lacking = {s.stem: {a for a in SUPPORTED if not serves(s, a)} for s in named}
    assert {stem: found for stem, found in lacking.items() if found} == {"gemm_split": SUPPORTED - {"gfx942", "gfx950"}}


@needs_clang
@pytest.mark.parametrize(
    ("architecture", "source"),
    [
        ("gfx1200", QUICK_SOURCES[TURN % len(QUICK_SOURCES)]),
        ("gfx1102", "storage"),
        pytest.param("gfx1200", SOURCES[TURN % len(SOURCES)], marks=pytest.mark.all),
    ],
)
def test_twins_have_the_same_machine_code(
    architecture: str, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As clang would make it. Of gfx1200 another source whenever an object has changed."""
    runtime(monkeypatch, version=GENERIC_VERSION - 1)
    image, _ = Modules(architecture)._image(source)
    compile_source(source_file(source), architecture, tmp_path / "made.co")
    assert image == (tmp_path / "made.co").read_bytes()


@pytest.mark.parametrize(("target", "twin"), GENERIC.items())
def test_generic_objects_have_their_twins_machine_code(target: str, twin: str) -> None:
    """Every kernel's, with the same registers and sizes, so what is tested of the one holds of the other. They differ
    in the ELF header and the name of the target in the metadata."""
    folder = OBJECTS / target
    assert {path.name for path in folder.iterdir()} == {path.name for path in (OBJECTS / twin).iterdir()}
    for path in folder.iterdir():
        image = read_object(path)
        here, there = (CodeObject(i, a, path.name) for i, a in ((image, target), (_twin_of(path), twin)))
        assert image[8] == 4 and image[51] == 1  # version 6 of the ABI, version 1 of the generic target
        assert here.kernels == there.kernels
        for kernel in here.kernels:
            (entry, size), (others, same) = here.symbols[kernel], there.symbols[kernel]
            assert size == same and _bytes(here, entry, size) == _bytes(there, others, size), kernel
            ours, theirs = here.descriptor(kernel), there.descriptor(kernel)
            assert ours._replace(address=0, entry=0) == theirs._replace(address=0, entry=0), kernel


def _twin_of(path: Path) -> bytes:
    return read_object(OBJECTS / GENERIC[path.parent.name] / path.name)


def _bytes(code: CodeObject, address: int, size: int) -> bytes:
    (segment,) = (s for s in code.segments if s.address <= address < s.address + len(s.data))
    return segment.data[address - segment.address :][:size]


def test_a_generic_object_with_another_twin_is_refused(tmp_path: Path) -> None:
    """It is stored as what differs from its twin's."""
    for name in ("gfx12-generic", "gfx1201"):
        shutil.copytree(OBJECTS / name, tmp_path / name, ignore=shutil.ignore_patterns("[!s]*"))
    path = tmp_path / "gfx12-generic" / "storage.co.xz"
    assert read_object(path) == read_object(OBJECTS / "gfx12-generic" / "storage.co.xz")
    twin = tmp_path / "gfx1201" / "storage.co.xz"
    twin.write_bytes(compress(read_object(twin)[:-1] + b"x"))
    with pytest.raises(DeviceError, match="made with another twin"):
        read_object(path)
    twin.unlink()
    with pytest.raises(DeviceError, match=r"storage.co.xz is missing, a part of it"):
        read_object(path)


def runtime(
    monkeypatch: pytest.MonkeyPatch, refused: Collection[str] = (), version: int = GENERIC_VERSION, code: int = 209
) -> list[str]:
    """Stand in for a driver that refuses these architectures' objects, and return those that it is asked to load.

    code: its answer for those.
    """
    asked: list[str] = []

    def load(image: bytes) -> tuple[Any, ...]:
        (target,) = re.findall(rb"amdgcn-amd-amdhsa--([a-z0-9-]*)", image)
        asked.append(target.decode())
        return (code,) if asked[-1] in refused else (0, "a module")

    fake = SimpleNamespace(
        hipModuleLoadData=load, hipSetDevice=lambda index: (0,), hipRuntimeGetVersion=lambda: (0, version)
    )
    monkeypatch.setattr(binding, "hip", lambda: fake)
    monkeypatch.setenv("WGRAD_HIP_OBJECTS", str(OBJECTS))
    return asked


@pytest.mark.parametrize(("architecture", "twin"), TWINS.items())
def test_twins_are_served(architecture: str, twin: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By generic objects, where ROCm knows them, else under their own name. A file for another one is refused."""
    asked = runtime(monkeypatch, version=GENERIC_VERSION - 1)
    modules = Modules(architecture)
    assert modules.origin == "shipped" and modules.digest() == Modules(twin).digest() and modules.has("gemm")
    image, _ = modules._image("storage")
    check_image(image, "storage", architecture, "a card")
    with pytest.raises(DeviceError, match=f"code object for {twin} is damaged, which {architecture} uses too"):
        renamed(image, architecture)
    modules._module("storage")
    assert modules.loaded() == {"storage": f"{twin}/storage.co.xz"}
    asked += runtime(monkeypatch)
    modules, others = Modules(architecture), Modules(twin)
    modules._module("storage")
    assert modules.loaded() == {"storage": f"{generic(architecture)}/storage.co.xz"}
    assert asked == [architecture]
    # Of both folders: the driver may refuse the first.
    assert modules.digest() not in (others.digest(), objects_digest(OBJECTS, generic(architecture)))
    with pytest.raises(DeviceError, match="is for gfx1.-generic, and this GPU is"):
        check_image(modules._modules["storage"][1], "storage", twin, "a card")


def test_objects_that_the_driver_refuses(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """After a generic object comes the twin's, then hiprtc. Own objects have no substitute."""
    asked = runtime(monkeypatch, {"gfx11-generic"})
    modules = Modules("gfx1151")
    for source in ("storage", "dropout"):
        modules._module(source)
    assert asked == ["gfx11-generic", "gfx1151", "gfx1151"] and modules.origin == "shipped" and not caplog.records
    assert modules.refused == {"gfx11-generic": "209"}
    assert modules.loaded() == {"storage": "gfx1100/storage.co.xz", "dropout": "gfx1100/dropout.co.xz"}

    for code in (200, 218):
        asked = runtime(monkeypatch, {"gfx11-generic"}, code=code)
        Modules("gfx1151")._module("storage")
        assert asked == ["gfx11-generic", "gfx1151"]
    runtime(monkeypatch, {"gfx11-generic"}, code=2)
    with pytest.raises(DeviceError, match="gfx11-generic/storage.co.xz cannot be loaded"):  # out of memory
        Modules("gfx1151")._module("storage")

    asked = runtime(monkeypatch, {"gfx11-generic", "gfx1151"})
    made = renamed(read_object(OBJECTS / "gfx1100" / "storage.co.xz"), "gfx1151"), "cache/hip/storage.co.xz"
    monkeypatch.setattr(compile_module, "compile_with_hiprtc", lambda *given: made)
    with pytest.raises(DeviceError, match="cache/hip/storage.co.xz cannot be loaded"):  # after it comes nothing
        Modules("gfx1151", "a card")._module("storage")
    (note,) = (record.getMessage() for record in caplog.records)
    assert "none of the code objects that ship for a card (gfx11-generic: 209, gfx1100: 209), so hiprtc" in note

    def missing(*_: str) -> tuple[bytes, str]:
        raise DeviceError("no hiprtc")

    monkeypatch.setattr(compile_module, "compile_with_hiprtc", missing)
    with pytest.raises(DeviceError, match="no hiprtc; the driver refused .* .gfx11-generic: 209, gfx1100: 209"):
        Modules("gfx1151")._module("storage")

    asked = runtime(monkeypatch, {"gfx942"})
    with pytest.raises(DeviceError, match="cannot be loaded on a GPU .gfx942.; build it again"):
        Modules("gfx942")._module("storage")
    assert asked == ["gfx942"]


def test_without_objects_hiprtc_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime(monkeypatch)
    monkeypatch.setenv("WGRAD_HIP_OBJECTS", str(tmp_path))
    monkeypatch.setattr(compile_module, "compile_with_hiprtc", lambda *given: given)
    modules = Modules("gfx1151")
    assert modules.origin == "hiprtc" and modules._image("storage") == ("storage", "gfx1151")


def test_work_groups_fit_small_register_files() -> None:
    """gfx1100 has 1,536 registers a lane, most of gfx11 1,024, in blocks of 16. A work-group is on four SIMDs."""
    for path in sorted((OBJECTS / "gfx1100").glob("*.co.xz")):
        for kernel in CodeObject(read_object(path), "gfx1100", str(path)).kernels.values():
            waves = -(-kernel[".max_flat_workgroup_size"] // (32 * 4))
            assert waves * -(-kernel[".vgpr_count"] // 16) * 16 <= 1024, kernel[".name"]


@needs_clang
def test_changes_are_seen(room: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A changed source, header, option or object is out of date."""
    objects = tmp_path / "objects"

    def wrong() -> list[str]:
        return outdated(objects, root=room, architectures=("gfx942",))

    assert len(build(objects, ["gfx942"], root=room)) == 2 and wrong() == []
    assert build(objects, ["gfx942"], root=room) == []
    source = room / "storage.hip"
    text = source.read_text()
    source.write_text(text.replace("u32 word, u64 bytes", "u32 word, u64 bytes, u32 more"))
    assert wrong() == ["gfx942/storage.co was made from another storage.hip, other headers or options"]
    assert [p.name for p in build(objects, ["gfx942"], root=room)] == ["storage.co.xz"] and wrong() == []
    with (room / "elements.hpp").open("a") as file:  # dropout's, not storage's
        file.write("namespace gpu { using more = float; }\n")
    assert [line.partition(" ")[0] for line in wrong()] == ["gfx942/dropout.co"]
    build(objects, ["gfx942"], root=room)
    with (room / "elements.hpp").open("a") as file:
        file.write("\n// A comment: nothing is compiled.\n")
    assert len(wrong()) == 1 and build(objects, ["gfx942"], root=room) == [] and wrong() == []
    path = objects / "gfx942" / "storage.co.xz"
    path.write_bytes(compress(read_object(path) + b"\0"))
    assert wrong() == ["gfx942/storage.co is not the file that was made"]
    assert build(objects, ["gfx942"], root=room) == [path] and wrong() == []
    path.unlink()
    assert wrong() == ["gfx942/storage.co is missing"]
    build(objects, ["gfx942"], root=room)
    source.unlink()
    assert wrong() == ["gfx942/storage.co has no source"]
    build(objects, ["gfx942"], root=room)
    assert wrong() == [] and not path.exists()
    assert set(read_manifest(objects)["headers"]) == {"dropout"}
    monkeypatch.setattr(building, "FLAGS", (*building.FLAGS, "-fno-signed-zeros"))
    assert wrong() == ["gfx942/dropout.co was made from another dropout.hip, other headers or options"]
    assert len(build(objects, ["gfx942"], root=room)) == 1 and wrong() == []
    assert len(build(objects, ["gfx942"], root=room, everything=True)) == 1


@needs_clang
def test_another_compiler_is_told_from_stale_objects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(building, "sources", lambda root=HIP: [source_file("storage")])
    build(tmp_path, ["gfx942"])
    assert building.check(tmp_path, ["gfx942"], "") == 0
    assert "every code object of gfx942 is what the sources give" in capsys.readouterr().out
    note = json.loads((tmp_path / MANIFEST).read_text())
    (tmp_path / MANIFEST).write_text(json.dumps({**note, "compilers": {"gfx942": "clang version 99"}}))
    assert building.check(tmp_path, ["gfx942"], "") == 0
    assert "made with clang version 99, and this is" in capsys.readouterr().out
    path = tmp_path / "gfx942" / "storage.co.xz"
    path.write_bytes(path.read_bytes()[:-40])
    assert building.check(tmp_path, ["gfx942"], "") == 1
    assert "gfx942/storage.co is damaged" in capsys.readouterr().out


@needs_clang
def test_an_architecture_without_its_compiler_is_named_and_left(
    room: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The others are built, and what was not is out of date once its source has changed."""
    objects, both = tmp_path / "objects", ("gfx942", "gfx1100")
    monkeypatch.setattr(building, "sources", lambda root=room: [room / "storage.hip"])
    monkeypatch.setattr(building, "source_file", lambda stem, root=room: room / f"{stem}.hip")
    monkeypatch.setattr(building, "headers", lambda root=room: headers(room))
    monkeypatch.setattr("sys.argv", ["build", "--out", str(objects), *(w for a in both for w in ("--arch", a))])
    assert main() == 0 and outdated(objects, architectures=both) == []
    with (room / "storage.hip").open("a") as file:
        file.write("namespace gpu { using more = float; }\n")
    monkeypatch.setattr(building, "_NEWER", {"gfx1100": "clang-99"})
    assert main() == 2
    said = capsys.readouterr().out
    assert "gfx942/storage.co.xz" in said and "gfx1100/storage.co.xz" not in said.splitlines()[-2]
    assert "not built: gfx1100: clang-99 is not installed: apt-get install clang-99 lld-99" in said
    assert outdated(objects, architectures=both) == [
        "gfx1100/storage.co was made from another storage.hip, other headers or options"
    ]
    assert set(read_manifest(objects)["compilers"]) == set(both)
    assert building.check(objects, ["gfx942"], "") == 0 and building.check(objects, ["gfx1100"], "") == 1
    monkeypatch.setattr(building, "outdated", lambda *_, **__: [])
    assert building.check(objects, list(both), "") == 2
    assert "not checked: gfx1100: clang-99 is not installed" in capsys.readouterr().out


def test_compilers_of_architectures_are_clang_19_and_22(monkeypatch: pytest.MonkeyPatch) -> None:
    """$WGRAD_CLANG names one for all."""
    monkeypatch.setattr(building, "CLANG", "")
    assert {a: compiler(a) for a in BUILT} == {a: "clang-22" if a == "gfx950" else "clang-19" for a in BUILT}
    monkeypatch.setattr(building, "CLANG", "clang-20")
    assert {compiler(a) for a in BUILT} == {"clang-20"}


@pytest.mark.parametrize("more", [b"", b"x"], ids=["too large", "more behind it"])
def test_an_object_unpacks_to_a_bounded_size(more: bytes, tmp_path: Path) -> None:
    path = tmp_path / "bomb.co.xz"
    packer = lzma.LZMACompressor(lzma.FORMAT_XZ, preset=0)
    path.write_bytes(packer.compress(bytes(0 if more else MOST_BYTES + 1)) + packer.flush() + more)
    with pytest.raises(DeviceError, match="bomb.co.xz is damaged"):
        read_object(path)


@needs_clang
def test_objects_are_the_same_from_any_folder(room: Path, tmp_path: Path) -> None:
    made = []
    for folder in (room, tmp_path / "elsewhere" / "a longer name"):
        if folder != room:
            shutil.copytree(room, folder)
        compile_source(folder / "dropout.hip", "gfx1100", folder / "out.co")
        made.append((folder / "out.co").read_bytes())
    assert made[0] == made[1] and str(tmp_path).encode() not in made[0]


@needs_clang
def test_manifest_names_the_headers_that_the_compiler_found(room: Path, tmp_path: Path) -> None:
    """Those of headers too, not what a comment or a branch for another machine names."""
    with (room / "storage.hip").open("a") as file:
        file.write('// #include "columns.hpp"\n#if 0\n#include "attention_mask.hpp"\n#endif\n')
    architectures = ("gfx12-generic", "gfx1201")  # the first is stored as what differs from the second
    build(tmp_path / "objects", list(architectures), root=room)
    assert outdated(tmp_path / "objects", root=room, architectures=architectures) == []
    assert read_manifest(tmp_path / "objects")["headers"] == {
        "dropout": ["elements.hpp", "gpu.hpp", "gpu_device.hpp", "gpu_types.hpp"],
        "storage": ["gpu.hpp", "gpu_device.hpp", "gpu_types.hpp"],
    }


def test_objects_take_less_than_three_megabytes() -> None:
    """Part of the installed size that tests/test_package.py bounds."""
    total = sum(os.path.getsize(p) for p in OBJECTS.rglob("*") if p.is_file())
    assert total < 3e6, f"{total:,} bytes"
