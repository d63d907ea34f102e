"""List and open adapters in a child process first, so that a driver that crashes or hangs ends only the child.

If the child ends early, each Vulkan driver and each other backend is tried in a child of its own. This process then
uses those that passed, through the variables of Vulkan's loader. The verdict is cached by library, drivers, device
nodes and limits (vulkan_drivers.py), so the check runs once. `wgrad devices` and `wgrad doctor` repeat a check that
found a crash. A hang is not cached, because a busy machine may look like one.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from wgrad.device.cache import cache_folder, keep, read_kept
from wgrad.device.child import Child, Silent
from wgrad.device.errors import DeviceError
from wgrad.wgsl.runtime.vulkan_drivers import VARIABLES, driver_files, state_of_drivers

SILENCE = 30.0  # seconds between two lines of the child after which a driver counts as hanging
START = 120.0  # seconds until its first line, before which no driver is loaded
FORMAT = 1
FINE = "WGRAD_ADAPTERS_CHECKED"  # tells child processes in which state of the drivers nothing crashes
_LARGEST = 1 << 16  # bytes of a kept verdict
# wgpu-native's names of the backends that are tried one by one if all together crash. OpenGL is not used.
BACKENDS = ("Vulkan", "DX12", "Metal")
_CODE = "import sys; sys.path[:] = {path!r}; from wgrad.wgsl.runtime.adapters import tell; tell({backends!r}, {skip!r})"


class Crash(msgspec.Struct, frozen=True):
    """A driver, or one adapter of a driver, that is not used. index: of the adapter in `list_adapters`."""

    name: str
    reason: str
    index: int | None = None


class Verdict(msgspec.Struct, frozen=True):
    """Result of a check. files: the drivers that Vulkan's loader may use; None: all that are registered."""

    crashes: tuple[Crash, ...] = ()
    files: tuple[str, ...] | None = None
    backends: tuple[str, ...] = BACKENDS
    format: int = FORMAT


@dataclass
class _Said:
    """Output of a child process. opening: the number of the adapter that it ended with."""

    ready: bool = False
    adapters: list[str] | None = None
    opening: int | None = None
    done: bool = False
    ending: str = ""
    hung: bool = False
    errors: list[str] = field(default_factory=list)


def check(library: str, again: bool = False) -> Verdict:
    """Find the drivers and adapters that this process may use.

    Args:
        library: name and version of wgpu's library.
        again: repeat a cached check that found a crash.

    Raises:
        DeviceError: wgpu cannot be used at all.
    """
    state = hashlib.sha256(json.dumps([FORMAT, library, state_of_drivers()]).encode()).hexdigest()[:32]
    if os.environ.get(FINE) == state:
        return Verdict()
    path = cache_folder("adapters") / f"{state}.json"
    verdict = _kept(path)
    if verdict is None or (again and verdict.crashes):
        verdict, lasting = _check()
        if lasting:
            with suppress(OSError):  # made again next time
                keep(path, msgspec.json.encode(verdict))
    if not verdict.crashes:
        os.environ[FINE] = state
    return verdict


def narrow(verdict: Verdict) -> None:
    """Restrict Vulkan's loader, which this process has not called yet, to the drivers of the verdict."""
    if verdict.files is not None:
        for variable in VARIABLES:
            os.environ[variable] = os.pathsep.join(verdict.files) or os.devnull


def _kept(path: Path) -> Verdict | None:
    try:
        verdict = msgspec.json.decode(read_kept(path, _LARGEST), type=Verdict)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return verdict if verdict.format == FORMAT else None


def _check() -> tuple[Verdict, bool]:
    """Return the verdict, and whether to cache it."""
    crashes, failed, lasting = _try(BACKENDS, None)
    if failed is None:
        return Verdict(tuple(crashes)), lasting
    if not failed.ready:
        said = f": {failed.errors[-1][:200]}" if failed.errors else ""
        raise DeviceError(f"the process that looks for adapters {failed.ending} before it began{said}")
    files = driver_files()
    good: list[str] = []
    backends: list[str] = []
    found: list[Crash] = []
    for backends_tried, file in [(("Vulkan",), file) for file in files] + [((name,), None) for name in BACKENDS[1:]]:
        if file is None and not _has(backends_tried[0]):
            continue
        _, failed, _ = _try(backends_tried, None if file is None else [file])
        name = f"the {backends_tried[0]} driver" + (f" {os.path.basename(file)}" if file else "")
        if failed is not None:
            lasting = lasting and not failed.hung
            found.append(Crash(name, f"{failed.ending} while its adapters were listed"))
            continue
        good += [file] if file else []
        backends += [backends_tried[0]]
    left = tuple(dict.fromkeys(backends))
    if left:
        crashes, failed, _ = _try(left, good)
        if failed is None:
            return Verdict((*found, *crashes), tuple(good), left), lasting
        found.append(Crash("the drivers together", f"{failed.ending} while their adapters were listed"))
    if not found:
        found.append(Crash("the Vulkan loader", "ended the process while adapters were listed"))
    return Verdict(tuple(found), (), ()), lasting


def _has(backend: str) -> bool:
    return {"DX12": sys.platform == "win32", "Metal": sys.platform == "darwin"}.get(backend, True)


def _try(backends: Sequence[str], files: Sequence[str] | None) -> tuple[list[Crash], _Said | None, bool]:
    """Return adapters that do not open, the output if not even the list was made, and whether nothing hung."""
    crashes: list[Crash] = []
    lasting = True
    while True:
        said = _ask(backends, files, [crash.index for crash in crashes if crash.index is not None])
        lasting = lasting and not said.hung
        if said.done:
            return crashes, None, lasting
        number, adapters = said.opening, said.adapters or []
        if number is None or not 0 <= number < len(adapters) or any(crash.index == number for crash in crashes):
            return [], said, lasting
        crashes.append(Crash(adapters[number], f"{said.ending} while it was opened", number))


def _ask(backends: Sequence[str], files: Sequence[str] | None, skip: Collection[int]) -> _Said:
    """Have a child list the adapters and open all but those of `skip`."""
    environment = {k: v for k, v in os.environ.items() if k != FINE}
    if files is not None:
        environment |= dict.fromkeys(VARIABLES, os.pathsep.join(files) or os.devnull)
    code = _CODE.format(path=sys.path, backends=tuple(backends), skip=tuple(skip))
    try:
        child = Child(code, environment)
    except OSError as error:
        raise DeviceError(f"no process can be started to look for adapters: {error.strerror or error}") from error
    said = _Said()
    try:
        # Once all adapters have opened, the child has nothing left to tell: its end may take a driver any time.
        while not said.done and (line := child.line(SILENCE if said.ready else START)) is not None:
            _take(said, line.strip())
        if not said.done:
            said.ending = _ending(child.status(SILENCE))
    except Silent:
        said.hung = True
        said.ending = f"did not answer for {SILENCE if said.ready else START:.0f} s"
    finally:
        child.end()
    said.errors = [line for line in map(str.strip, child.errors) if line]
    return said


def _take(said: _Said, line: str) -> None:
    word, _, rest = line.partition(" ")
    if word == "ready":
        said.ready = True
    elif word == "listed":
        said.adapters = [str(name) for name in json.loads(rest)]
    elif word == "opening":
        said.opening = int(rest)
    elif word == "done":
        said.done = True


def _ending(status: int) -> str:
    if status < 0:
        with suppress(ValueError):
            return f"crashed ({signal.Signals(-status).name})"
    return f"crashed (status {status:#x})" if status > 255 else f"ended with status {status}"
