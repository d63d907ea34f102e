"""The one file that touches wgpu-py's private parts.

wgpu-py checks every argument in Python, which costs more than the call itself (43 us a dispatch against about 5 with
the foreign functions called directly, measured on an H100 host). Recording a dispatch is therefore done here, on the
raw library. The names used are those of wgpu-py 0.32; pyproject.toml pins the minor version.
"""

from __future__ import annotations

import logging
import os
import re
import tempfile
import time
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import numpy as np
from cffi.model import ArrayType, PointerType  # type: ignore[import-untyped]

from wgrad.device.errors import DeviceError, DeviceLost, OutOfMemory
from wgrad.wgsl.runtime import matrix_units

COPY_LOADED = matrix_units.use_copy()  # wgpu finds its library while it is imported

import wgpu  # noqa: E402
from wgpu.backends import wgpu_native as _native  # noqa: E402

_lib = _native.lib
_ffi = _native.ffi


class _Types(dict[str, Any]):
    """cffi's table of C types by their text, in which a name with * or [] behind it is looked up: cffi parses such a
    text together with all names of the header, which takes 30 ms, for each of some thirty that a run begins with."""

    def __missing__(self, text: str) -> Any:
        found = re.fullmatch(r"(\w+) *(\*|\[\]) *", text)
        try:
            if found is None:
                raise KeyError(text)
            named, _ = _ffi._parser._declarations[f"typedef {found[1]}"]
            with _ffi._lock:
                made = PointerType(named) if found[2] == "*" else ArrayType(named, None)
                result = self[text] = _ffi._get_cached_btype(made), False
        except (AttributeError, TypeError, ValueError):  # of another cffi, which then parses it
            raise KeyError(text) from None
        return result


with suppress(AttributeError):
    _ffi._parsed_types = _Types(_ffi._parsed_types)

LIBRARY = "wgpu-native " + ".".join(map(str, _native.lib_version_info))

# One recorded dispatch: pipeline and bind group handles, workgroup counts. Or a copy between two buffers: None, their
# handles, bytes of the source's offset, the target's, and to copy.
Dispatch = tuple[Any, Any, int, int, int]

# Submissions in flight before the host waits for old ones: bounds memory held by finished commands (it only comes
# back on a poll) without letting the device run dry. It waits for half of them: what a thread does first after it was
# woken costs it 0.1 to 0.25 ms more (docs/rejected.md).
MAX_IN_FLIGHT, _FEWEST_IN_FLIGHT = 8, 4
UPLOAD_BYTES, _UPLOADS = 4 << 20, 6  # of a buffer that large writes go through, and how many there are
STAGED_BYTES = 1 << 20  # of a write that goes through them, and at once: a bucket of the gradient, say
_MOST_STAGING_BYTES = 256 << 20  # of buffers kept for the next readback: more than the buckets of an 8B's gradient


def handle(obj: Any) -> Any:
    """The C handle of a wgpu-py object. Its owner must be kept alive by the caller."""
    return obj._internal


class ErrorLog(logging.Handler):
    """Collects what wgpu-py can only log: validation errors of raw calls, and a lost device."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.messages: list[str] = []
        logger = logging.getLogger("wgpu")
        logger.addHandler(self)
        logger.propagate = False

    def emit(self, record: logging.LogRecord) -> None:
        # wgpu-py shortens a message that it has logged before; every one of ours is to say all.
        getattr(_native._api.error_handler._per_thread_data, "error_message_counts", {}).clear()
        message = record.getMessage()
        # A driver's chatter at instance creation is no error of ours.
        if "XDG_RUNTIME_DIR" not in message and "EGL" not in message:
            self.messages.append(message)

    def raise_if_any(self, doing: str) -> None:
        if self.messages:
            text = " | ".join(self.messages)
            self.messages.clear()
            raise as_device_error(text, doing)


def as_device_error(error: Exception | str, doing: str) -> DeviceError:
    """What wgpu said, as one line of one of our classes. `doing` completes "... while"."""
    error_log().messages.clear()  # the same is often logged as well
    text = " ".join(str(error).split())
    if "lost" in text.lower():
        return DeviceLost(
            f"the device was lost while {doing}: {text}. The driver reset it (often its watchdog, or another program on"
            " the card); start again with --resume to go on from the last checkpoint"
        )
    if "out of memory" in text.lower() or "OutOfMemory" in text:
        return OutOfMemory(f"the device ran out of memory while {doing}: {text}")
    return DeviceError(f"the device refused work while {doing}: {text}")


_error_log: ErrorLog | None = None


def error_log() -> ErrorLog:
    """The process-wide log (wgpu-py has one logger)."""
    global _error_log
    if _error_log is None:
        _error_log = ErrorLog()
    return _error_log


def enumerate_adapters() -> list[Any]:
    # Mesa writes a line to the terminal for each driver that it tries where this is not set, and never uses it here.
    os.environ.setdefault("XDG_RUNTIME_DIR", tempfile.gettempdir())
    error_log()  # before the instance exists, so that driver chatter stays off the user's terminal
    return list(wgpu.gpu.enumerate_adapters_sync())


class _Mapping:
    """A buffer that is to be mapped, once this submission is done, and what wgpu says of it: nothing yet, that it is,
    or what is wrong."""

    done, error = False, ""

    def __init__(self, buffer: Any, submission: Any, mode: int) -> None:
        self._submission = submission
        given = _ffi.new_handle(self)
        _under_way[given] = self
        how = _ffi.new("WGPUBufferMapCallbackInfo *")
        how.mode, how.callback, how.userdata1 = _lib.WGPUCallbackMode_AllowProcessEvents, _mapped, given
        _lib.wgpuBufferMapAsync(buffer._internal, mode, 0, buffer.size, how[0])

    def wait(self, queue: Queue, doing: str) -> None:
        if not self.done:
            queue.wait_for(self._submission)
        if not self.done:  # of a device that is lost nothing is waited for
            queue.wait()
        if self.error or not self.done:
            raise as_device_error(self.error or "the device is lost", doing)


_under_way: dict[Any, _Mapping] = {}  # by the handle that wgpu gives back: both must outlive the call


@_ffi.callback("void(WGPUMapAsyncStatus, WGPUStringView, void *, void *)")  # type: ignore[untyped-decorator]
def _mapped(status: int, message: Any, handle_of: Any, _: Any) -> None:
    mapping = _under_way.pop(handle_of)
    mapping.done = True
    if status != _lib.WGPUMapAsyncStatus_Success:
        text = _ffi.unpack(message.data, message.length).decode(errors="replace") if message.length else ""
        mapping.error = f"a buffer could not be mapped ({status}: {text})"


class Readback:
    """Bytes on their way to the host, in a buffer that is mapped once the device has come so far.

    wgpu-py's own thread would wait for what was submitted last: a copy in the middle of a step would not be seen before
    all of the step is done.
    """

    def __init__(self, queue: Queue, staging: Any, submission: Any) -> None:
        self._queue, self._staging = queue, staging
        self._mapping = _Mapping(staging, submission, _lib.WGPUMapMode_Read)

    def ready(self) -> bool:
        if not self._mapping.done:
            self._queue.poll()
        return self._mapping.done

    def copy_to(self, target: memoryview) -> None:
        """Wait for the bytes, and copy as many as the target has. Once."""
        self._mapping.wait(self._queue, "reading from the device")
        staging = self._staging
        target[:] = _ffi.buffer(_lib.wgpuBufferGetConstMappedRange(staging._internal, 0, staging.size), len(target))
        _lib.wgpuBufferUnmap(staging._internal)
        self._queue.keep_staging(staging)
        error_log().raise_if_any("reading from the device")


class _Uploads:
    """Writes through a few buffers by turns. wgpu's own write makes a buffer each time, whose memory the system has to
    give, and clear, anew: of large arrays that is most of its time."""

    def __init__(self, queue: Queue) -> None:
        self._queue = queue
        self._free: deque[tuple[Any, _Mapping]] = deque()  # what was used longest ago first

    def write(self, buffer: Any, offset: int, data: np.ndarray) -> None:
        """data: bytes, a multiple of 4."""
        for at in range(0, data.nbytes, UPLOAD_BYTES):
            part = data[at : at + UPLOAD_BYTES]
            staging = self._take()
            mapped = _lib.wgpuBufferGetMappedRange(staging._internal, 0, staging.size)
            if mapped == _ffi.NULL:
                raise as_device_error("the device is lost", "writing to the device")
            np.copyto(np.frombuffer(_ffi.buffer(mapped, part.nbytes), np.uint8), part)
            _lib.wgpuBufferUnmap(staging._internal)
            encoder = _lib.wgpuDeviceCreateCommandEncoder(self._queue._c_device, _ffi.NULL)
            copy(encoder, (staging._internal, buffer._internal), 0, offset + at, part.nbytes)
            submission = self._queue._submit(encoder, "writing to the device")
            self._free.append((staging, _Mapping(staging, submission, _lib.WGPUMapMode_Write)))

    def _take(self) -> Any:
        """A buffer that is mapped."""
        doing = "writing to the device"
        if len(self._free) < _UPLOADS:
            try:
                make = self._queue._device.create_buffer
                return make(size=UPLOAD_BYTES, usage="MAP_WRITE|COPY_SRC", mapped_at_creation=True)
            except Exception as error:
                raise as_device_error(error, doing) from error
        staging, mapping = self._free.popleft()
        mapping.wait(self._queue, doing)
        return staging


class Queue:
    """Encodes and submits lists of dispatches."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self._c_device = device._internal
        self._c_queue = device.queue._internal
        self._in_flight: deque[Any] = deque()
        self._staging: list[Any] = []
        self._uploads = _Uploads(self)
        # Seconds, in all, that `submit` waited for an old submission, and of them on the CPU (some drivers spin).
        self.waited = self.waiting_cpu = 0.0
        self._index_type = "WGPUSubmissionIndex *"

    def submit(self, dispatches: Iterable[Dispatch]) -> None:
        """Record the dispatches in one compute pass, in order, and submit them."""
        encoder = _lib.wgpuDeviceCreateCommandEncoder(self._c_device, _ffi.NULL)
        compute_pass = _lib.wgpuCommandEncoderBeginComputePass(encoder, _ffi.NULL)
        set_pipeline = _lib.wgpuComputePassEncoderSetPipeline
        set_bind_group = _lib.wgpuComputePassEncoderSetBindGroup
        dispatch = _lib.wgpuComputePassEncoderDispatchWorkgroups
        null = last = _ffi.NULL
        for pipeline, bind_group, x, y, z in dispatches:
            if pipeline is not last:
                last = pipeline
                if pipeline is None:
                    compute_pass = _copy_between_passes(encoder, compute_pass, bind_group, x, y, z)
                    last = _ffi.NULL  # of a new pass nothing is set yet
                    continue
                set_pipeline(compute_pass, pipeline)
            set_bind_group(compute_pass, 0, bind_group, 0, null)
            dispatch(compute_pass, x, y, z)
        _lib.wgpuComputePassEncoderEnd(compute_pass)
        _lib.wgpuComputePassEncoderRelease(compute_pass)
        self._in_flight.append(self._submit(encoder, "submitting commands"))
        if len(self._in_flight) > MAX_IN_FLIGHT:
            begun, cpu = time.perf_counter(), time.thread_time()
            old = [self._in_flight.popleft() for _ in range(len(self._in_flight) - _FEWEST_IN_FLIGHT)]
            self.wait_for(old[-1])
            self.waited += time.perf_counter() - begun
            self.waiting_cpu += time.thread_time() - cpu

    def _submit(self, encoder: Any, doing: str) -> Any:
        """-> the submission's index."""
        commands = _lib.wgpuCommandEncoderFinish(encoder, _ffi.NULL)
        _lib.wgpuCommandEncoderRelease(encoder)
        error_log().raise_if_any(doing)  # the library ends the process where what is wrong gets further than here
        index = _lib.wgpuQueueSubmitForIndex(self._c_queue, 1, _ffi.new("WGPUCommandBuffer[]", [commands]))
        _lib.wgpuCommandBufferRelease(commands)
        error_log().raise_if_any(doing)
        return index

    def poll(self) -> None:
        """See what is done by now, without waiting."""
        _lib.wgpuDevicePoll(self._c_device, False, _ffi.NULL)

    def wait_for(self, index: Any) -> None:
        """Until this submission, and what came before it, is done."""
        _lib.wgpuDevicePoll(self._c_device, True, _ffi.new(self._index_type, index))

    def wait(self) -> None:
        """Until everything submitted is done."""
        self._in_flight.clear()
        _lib.wgpuDevicePoll(self._c_device, True, _ffi.NULL)
        error_log().raise_if_any("waiting for the device")

    def read_later(self, buffer: Any, offset: int, nbytes: int) -> Readback:
        """Start copying bytes (a multiple of 4) to the host, behind everything submitted so far."""
        try:
            staging = self._take_staging(nbytes)
        except Exception as error:
            raise as_device_error(error, "reading from the device") from error
        encoder = _lib.wgpuDeviceCreateCommandEncoder(self._c_device, _ffi.NULL)
        copy(encoder, (buffer._internal, staging._internal), offset, 0, nbytes)
        return Readback(self, staging, self._submit(encoder, "reading from the device"))

    def _take_staging(self, nbytes: int) -> Any:
        for at, staging in enumerate(self._staging):
            if staging.size == nbytes:
                return self._staging.pop(at)
        return self._device.create_buffer(size=nbytes, usage="MAP_READ|COPY_DST")

    def keep_staging(self, staging: Any) -> None:
        """For the next readback of this size: new memory costs more than the copy. What was used longest ago goes."""
        self._staging.append(staging)
        while sum(kept.size for kept in self._staging) > _MOST_STAGING_BYTES:
            self._staging.pop(0).destroy()

    def write(self, buffer: Any, offset: int, data: Any) -> None:
        """Copy host bytes (C-contiguous buffer, a multiple of 4 bytes) into a buffer, behind what is submitted."""
        view = _ffi.from_buffer(data)
        if len(view) >= STAGED_BYTES:
            self._uploads.write(buffer, offset, np.frombuffer(data, np.uint8))
            return
        _lib.wgpuQueueWriteBuffer(self._c_queue, buffer._internal, offset, view, len(view))
        error_log().raise_if_any("writing to the device")


def _copy_between_passes(encoder: Any, compute_pass: Any, buffers: tuple[Any, Any], *numbers: int) -> Any:
    """End a pass, copy, and begin the next one."""
    _lib.wgpuComputePassEncoderEnd(compute_pass)
    _lib.wgpuComputePassEncoderRelease(compute_pass)
    copy(encoder, buffers, *numbers)
    return _lib.wgpuCommandEncoderBeginComputePass(encoder, _ffi.NULL)


def copy(encoder: Any, buffers: tuple[Any, Any], source_offset: int, offset: int, nbytes: int) -> None:
    """A copy from the first buffer to the second into the encoder, from C handles."""
    source, target = buffers
    _lib.wgpuCommandEncoderCopyBufferToBuffer(encoder, source, source_offset, target, offset, nbytes)


def record(compute_pass: Any, pipeline: Any, bind_group: Any, x: int, y: int, z: int) -> None:
    """One dispatch into a pass made by wgpu-py, from C handles."""
    _lib.wgpuComputePassEncoderSetPipeline(compute_pass._internal, pipeline)
    _lib.wgpuComputePassEncoderSetBindGroup(compute_pass._internal, 0, bind_group, 0, _ffi.NULL)
    _lib.wgpuComputePassEncoderDispatchWorkgroups(compute_pass._internal, x, y, z)
