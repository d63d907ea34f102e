"""hiprtc, ROCm's run-time compiler: code objects of GPUs for which none were built, kept in a cache.

The package has objects of every supported GPU, so hiprtc is needed in two cases. Eight architectures run generic
objects, or another one's under a new name (GENERIC and TWINS in architectures.py), which no driver has loaded yet: if
it refuses both, hiprtc compiles. And `build.py` leaves out objects whose compiler is not installed.

Files in the cache folder `hip` (device/cache.py) are <file>-<architecture>-<digest>.co.xz; the digest covers the
format, the source, the headers and the options, so that another version of wgrad never uses them.
"""

from __future__ import annotations

import hashlib
from typing import Any

from wgrad.device.cache import cache_folder, keep, read_kept
from wgrad.device.errors import DeviceError
from wgrad.hip.runtime import binding
from wgrad.hip.runtime.objects import (
    HIP,
    MOST_BYTES,
    OPTIONS,
    compress,
    decompress,
    headers,
    source_file,
    text_digest,
)

FORMAT = "co.xz 1"  # of files in the cache
# Attention reads through buffer descriptors, by builtins that clang got in June and July 2024 (LLVM pull requests 95276
# and 99258). ROCm 6.3 has clang 18, which lacks them; 6.4 has a clang 19 of those months, which is tried; 7.0 clang 20.
LEAST_VERSION = 6_04_00000  # of HIP, as hipRuntimeGetVersion counts
_BUILTINS = ("make_buffer_rsrc", "raw_buffer_load", "amdgpu_buffer_rsrc_t")  # in a log: this compiler lacks them


def compile_with_hiprtc(source: str, architecture: str) -> tuple[bytes, str]:
    """Return the code object of `source`.hip and its origin: from the cache, or compiled now.

    Raises:
        DeviceError: hiprtc is missing, or rejects the source; the message has its log.
    """
    path = source_file(source, HIP)
    text = path.read_text(encoding="utf-8")
    included = headers(HIP)
    digest = hashlib.sha256(f"{FORMAT} {architecture} {text_digest((path, *included))}".encode()).hexdigest()
    kept = cache_folder("hip") / f"{source}-{architecture}-{digest[:16]}.co.xz"
    try:
        image = decompress(read_kept(kept, MOST_BYTES), str(kept))
        if image[:4] == b"\x7fELF":
            return image, str(kept)
    except (DeviceError, OSError):  # missing or damaged, by a full disk for example: compile again
        pass
    if (version := binding.runtime_version()) < LEAST_VERSION:
        raise _too_old(architecture, version)
    texts = {p.name: p.read_text(encoding="utf-8") for p in included}
    image = _compile(source, text, texts, [f"--offload-arch={architecture}", *OPTIONS])
    try:
        keep(kept, compress(image))
    except OSError:  # the folder is not writable: compiled again next time
        return image, f"{source}.hip as compiled by hiprtc"
    return image, str(kept)


def _too_old(architecture: str, version: int) -> DeviceError:
    return DeviceError(
        f"no code object was built for {architecture}, and the hiprtc that is installed is too old to compile the"
        f" kernels (HIP {version // 10_000_000}.{version // 100_000 % 100}): install ROCm 7.0 or newer, or run"
        f" `python -m wgrad.hip.runtime.build --arch {architecture}`, which needs no ROCm"
    )


def _compile(source: str, text: str, headers: dict[str, str], options: list[str]) -> bytes:
    rtc = binding.hiprtc()
    names = [n.encode() for n in headers]
    bodies = [b.encode() for b in headers.values()]
    name = f"{source}.hip".encode()
    try:
        made = rtc.hiprtcCreateProgram(text.encode(), name, len(names), bodies, names)
    except RuntimeError as error:  # of hip-python's loader
        raise DeviceError(
            f"no code object of {source}.hip was built for this GPU ({options[0]}), and hiprtc, which would make one,"
            " cannot be opened: install ROCm's hiprtc (libhiprtc.so), or run"
            f" `python -m wgrad.hip.runtime.build --arch {options[0].rpartition('=')[2]}`, which needs no ROCm"
            f" ({str(error)[:200]})"
        ) from error
    program = _checked(rtc, made, "hiprtcCreateProgram")
    try:
        code = rtc.hiprtcCompileProgram(program, len(options), [o.encode() for o in options])[0]
        if int(code) != 0:
            log = _log(rtc, program)
            if any(name in log for name in _BUILTINS):
                raise _too_old(options[0].rpartition("=")[2], binding.runtime_version())
            raise DeviceError(f"hiprtc cannot compile {source}.hip ({options[0]}): {log}")
        image = bytearray(_checked(rtc, rtc.hiprtcGetCodeSize(program), "hiprtcGetCodeSize"))
        _checked(rtc, rtc.hiprtcGetCode(program, image), "hiprtcGetCode")
    finally:
        destroy = getattr(program, "createRef", None)  # the call takes the address of the handle
        if destroy is not None:
            rtc.hiprtcDestroyProgram(destroy())
    return bytes(image)


def _log(rtc: Any, program: Any) -> str:
    size = int(_checked(rtc, rtc.hiprtcGetProgramLogSize(program), "hiprtcGetProgramLogSize"))
    log = bytearray(max(size, 1))
    _checked(rtc, rtc.hiprtcGetProgramLog(program, log), "hiprtcGetProgramLog")
    return log.rstrip(b"\0").decode(errors="replace")[:4000]


def _checked(rtc: Any, result: tuple[Any, ...], what: str) -> Any:
    """Do as binding.check does, for hiprtc's own codes, where 2 does not mean out of device memory."""
    if int(result[0]) != 0:
        raise DeviceError(f"{what} failed: {getattr(result[0], 'name', int(result[0]))}")
    return result[1] if len(result) > 1 else None
