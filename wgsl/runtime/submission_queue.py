"""The queue to the device: dispatches, writes and readbacks."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np

from wgrad.device.errors import DeviceError, DeviceHung, DeviceLost
from wgrad.wgsl.runtime.abort_guard import poll, submit
from wgrad.wgsl.runtime.in_flight import Flight, InFlight
from wgrad.wgsl.runtime.native import Dispatch, as_device_error, copy, disown, error_log, ffi, handle, lib
from wgrad.wgsl.runtime.submit_thread import Submitted, SubmitThread

# Submissions in flight before the host waits for old ones: bounds the memory of finished commands (which only a poll
# releases) without letting the device run dry. It waits for half of them, because a thread loses 0.1 to 0.25 ms when
# it is woken (bench/notes/rejected-runtime.md). More short ones are allowed: eight of decoding are four steps, and a
# caller that queues a block of steps reads the one before meanwhile.
MAX_IN_FLIGHT, MAX_SHORT_IN_FLIGHT = 8, 64
UPLOAD_BYTES, _UPLOADS = 4 << 20, 6  # size and number of the buffers for large writes
# Behind launches a buffer is free only after them, and more are made: with several ranks two parts of a backward are
# in front of each bucket, and for 6 buffers the host waited for up to 28 ms (bench/notes/scaling.md).
_MOST_UPLOADS = 20
STAGED_BYTES = 1 << 20  # writes of at least this size, such as a bucket of the gradient, go through them
_MOST_STAGING_BYTES = 256 << 20  # of buffers kept for the next readback: more than the buckets of an 8B's gradient


class _Mapping:
    """A buffer that is mapped once a submission is done: pending, done, or an error."""

    done, error = False, ""

    def __init__(self, buffer: Any, mode: int) -> None:
        self._buffer, self._mode, self._submission = buffer, mode, None

    def begin(self, submission: Any) -> None:
        self._submission = submission
        given = ffi.new_handle(self)
        _under_way[given] = self
        how = ffi.new("WGPUBufferMapCallbackInfo *")
        how.mode, how.callback, how.userdata1 = lib.WGPUCallbackMode_AllowProcessEvents, _mapped, given
        lib.wgpuBufferMapAsync(handle(self._buffer), self._mode, 0, self._buffer.size, how[0])

    def see(self, c_device: Any) -> None:
        """Wait for the submission. Called on the submit thread."""
        if not self.done and self._submission is not None:
            poll(c_device, self._submission, wait=True)

    def wait(self, queue: Queue, doing: str) -> None:
        if not self.done:
            queue.wait_for(self, doing)
        if not self.done:  # the wait above does nothing on a lost device
            queue.wait()
        if self.error or not self.done:
            raise queue.refused(self.error or "the device is lost", doing)


_under_way: dict[Any, _Mapping] = {}  # by the handle that wgpu gives back: both must outlive the call


@ffi.callback("void(WGPUMapAsyncStatus, WGPUStringView, void *, void *)")  # type: ignore[untyped-decorator]
def _mapped(status: int, message: Any, handle_of: Any, _: Any) -> None:
    if not _under_way:  # the program has ended, and this module with it
        return
    mapping = _under_way.pop(handle_of)
    mapping.done = True
    if status != lib.WGPUMapAsyncStatus_Success:
        text = ffi.unpack(message.data, message.length).decode(errors="replace") if message.length else ""
        mapping.error = f"a buffer could not be mapped ({status}: {text})"


class Readback:
    """A copy of bytes on its way to the host, in a buffer that is mapped once the device has made it.

    wgpu-py's own thread would wait for the last submission: a copy in the middle of a step would complete only with
    the whole step.
    """

    def __init__(self, queue: Queue, staging: Any, encoder: Any) -> None:
        """encoder: with a copy to `staging`, which is submitted."""
        self._queue, self._staging = queue, staging
        self._mapping = _Mapping(staging, lib.WGPUMapMode_Read)
        queue.submit_encoder(encoder, "reading from the device", self._mapping)

    def ready(self) -> bool:
        if not self._mapping.done:
            self._queue.poll()
        return self._mapping.done

    def copy_to(self, target: memoryview) -> None:
        """Wait for the bytes and copy as many as the target has. May be called once."""
        self._mapping.wait(self._queue, "reading from the device")
        staging = self._staging
        mapped = lib.wgpuBufferGetConstMappedRange(handle(staging), 0, staging.size)
        if mapped == ffi.NULL:
            raise self._queue.refused("the device is lost", "reading from the device")
        # Unlike an assignment to `target` this lets the submit thread run meanwhile.
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(ffi.buffer(mapped, len(target)), np.uint8))
        lib.wgpuBufferUnmap(handle(staging))
        self._queue.keep_staging(staging)
        error_log().raise_if_any("reading from the device")


class _Uploads:
    """Large writes through a few staging buffers in turn.

    wgpu's own write allocates a buffer each time, whose memory the system must provide and clear. For large arrays that
    is most of its time.
    """

    def __init__(self, queue: Queue) -> None:
        self._queue = queue
        self._free: deque[tuple[Any, _Mapping]] = deque()  # least recently used first

    def write(self, buffer: Any, offset: int, data: np.ndarray) -> None:
        """data: bytes, a multiple of 4."""
        for at in range(0, data.nbytes, UPLOAD_BYTES):
            part = data[at : at + UPLOAD_BYTES]
            staging = self._take()
            mapped = lib.wgpuBufferGetMappedRange(handle(staging), 0, staging.size)
            if mapped == ffi.NULL:
                raise self._queue.refused("the device is lost", "writing to the device")
            np.copyto(np.frombuffer(ffi.buffer(mapped, part.nbytes), np.uint8), part)
            lib.wgpuBufferUnmap(handle(staging))
            encoder = lib.wgpuDeviceCreateCommandEncoder(self._queue._c_device, ffi.NULL)
            copy(encoder, (handle(staging), handle(buffer)), 0, offset + at, part.nbytes)
            mapping = _Mapping(staging, lib.WGPUMapMode_Write)
            self._queue.submit_encoder(encoder, "writing to the device", mapping)
            self._free.append((staging, mapping))

    def _take(self) -> Any:
        """Return a mapped buffer."""
        doing = "writing to the device"
        pending = bool(self._free) and not self._free[0][1].done
        if len(self._free) < (_MOST_UPLOADS if pending and self._queue.in_flight else _UPLOADS):
            try:
                make = self._queue._device.create_buffer
                return make(size=UPLOAD_BYTES, usage="MAP_WRITE|COPY_SRC", mapped_at_creation=True)
            except Exception as error:
                raise self._queue.refused(error, doing) from error
        staging, mapping = self._free.popleft()
        mapping.wait(self._queue, doing)
        return staging


def _nothing() -> None:
    pass


class Queue:
    """Encodes lists of dispatches and has them submitted, in order, by a thread of its own.

    Two thirds of the host's time are wgpu's, for ending an encoder and submitting it; meanwhile the next one is
    recorded. That thread also waits for the device, because a wait for a device that hangs never returns, and a wait
    for a lost one ends the thread (abort_guard.py).

    What bypasses the thread (a small write), or destroys a buffer that was recorded, must `drain` first.
    """

    def __init__(self, device: Any, software: bool = False) -> None:
        self._device = device
        self._c_device = handle(device)
        self._c_queue = handle(device.queue)
        self.in_flight = InFlight(software)
        self._thread = SubmitThread(error_log().keep_apart, self.in_flight.lost)
        self._staging: list[Any] = []
        self._uploads = _Uploads(self)
        self._look: Submitted | None = None  # the last `poll`
        self.lost: DeviceLost | None = None
        self._closed = False
        # Total seconds that `submit` waited for old submissions, and CPU seconds of all waits (some drivers spin).
        self.waited = self.waiting_cpu = 0.0

    def submit(self, dispatches: Iterable[Dispatch], names: Sequence[str] = (), work: float = 0.0) -> None:
        """Record the dispatches in one compute pass, in order, and hand it over. The next `drain` raises wgpu's errors.

        names, work: as in InFlight.
        """
        self._check()
        encoder = lib.wgpuDeviceCreateCommandEncoder(self._c_device, ffi.NULL)
        compute_pass = lib.wgpuCommandEncoderBeginComputePass(encoder, ffi.NULL)
        set_pipeline = lib.wgpuComputePassEncoderSetPipeline
        set_bind_group = lib.wgpuComputePassEncoderSetBindGroup
        dispatch = lib.wgpuComputePassEncoderDispatchWorkgroups
        null = last = ffi.NULL
        for pipeline, bind_group, x, y, z in dispatches:
            if pipeline is not last:
                last = pipeline
                if pipeline is None:
                    compute_pass = _copy_between_passes(encoder, compute_pass, bind_group, x, y, z)
                    last = ffi.NULL  # of a new pass nothing is set yet
                    continue
                set_pipeline(compute_pass, pipeline)
            set_bind_group(compute_pass, 0, bind_group, 0, null)
            dispatch(compute_pass, x, y, z)
        lib.wgpuComputePassEncoderEnd(compute_pass)
        lib.wgpuComputePassEncoderRelease(compute_pass)
        self.in_flight.add(self._hand_over(encoder, "submitting commands"), names, work)
        count = len(self.in_flight)
        if count > MAX_IN_FLIGHT and (count > MAX_SHORT_IN_FLIGHT or not self.in_flight.are_short):
            begun = time.perf_counter()
            self._see_finished(self.in_flight.oldest(count // 2 + 1))
            self.waited += time.perf_counter() - begun

    def submit_encoder(self, encoder: Any, doing: str, mapping: _Mapping | None = None) -> None:
        """Hand over an encoder to be submitted, and a buffer to be mapped after it."""
        self._check()
        self._hand_over(encoder, doing, mapping)

    def _hand_over(self, encoder: Any, doing: str, mapping: _Mapping | None = None) -> Submitted:
        def work() -> Any:
            index = self._submit(encoder, doing)
            if mapping is not None:
                mapping.begin(index)
            return index

        return self._thread.submit(work, partial(lib.wgpuCommandEncoderRelease, encoder))

    def _submit(self, encoder: Any, doing: str) -> Any:
        """Submit on the calling thread and return the index of the submission."""
        self.in_flight.doing = doing
        commands = lib.wgpuCommandEncoderFinish(encoder, ffi.NULL)
        lib.wgpuCommandEncoderRelease(encoder)
        error_log().raise_if_any(doing)  # submitting an invalid encoder would end the process
        index = submit(self._c_queue, commands)
        lib.wgpuCommandBufferRelease(commands)
        error_log().raise_if_any(doing)
        return index

    def _wait(self, look: Callable[[], None], doing: str) -> None:
        """Have the submit thread run `look`, which waits for the device, and wait for that."""
        self._check()

        def work() -> None:
            self.in_flight.doing = doing
            cpu = time.thread_time()
            look()
            self.waiting_cpu += time.thread_time() - cpu
            error_log().raise_if_any(doing)

        self._thread.submit(work, _nothing)
        self.drain()

    def _see_finished(self, flights: Sequence[Flight], more: Callable[[], None] = _nothing) -> None:
        """Wait for each submission in turn, so that the one that hangs is known."""

        def look() -> None:
            for flight in flights:
                if (index := flight.submitted.result()) is not None:
                    poll(self._c_device, index, wait=True)
                self.in_flight.finished(flight)
            more()

        self._wait(look, "waiting for the device")

    def drain(self) -> None:
        """Wait until all that was recorded is submitted."""
        self._check()
        try:
            self._thread.drain(self.in_flight.wait)
        except DeviceError as error:
            if isinstance(error, DeviceLost):
                self._lose(error)
            self.in_flight.clear()
            error_log().messages.clear()  # a lost device is logged for this thread, too
            raise

    def close(self) -> None:
        """Release the memory of a lost device. One that hangs keeps it. A second call does nothing."""
        self._lose(DeviceLost("the device was closed"))
        if self._closed:
            return
        self._closed = True
        self._staging.clear()
        self._uploads = _Uploads(self)
        if not isinstance(self.lost, DeviceHung):
            # In a panicked thread, releasing the device does not poll it, which would panic again. The queue, with the
            # memory of what is in flight, must be released in another thread.
            self._thread.end_with(
                partial(poll, self._c_device, wait=False),
                partial(lib.wgpuDeviceRelease, self._c_device),
                partial(lib.wgpuQueueRelease, self._c_queue),
            )

    def _lose(self, error: DeviceLost) -> None:
        """Mark the device as lost. It is never released: the library would wait for it and end the process."""
        if self.lost is None:
            self.lost = type(error)(str(error))  # without a traceback, which refers to arrays
            if isinstance(error, DeviceHung):
                self._thread.abandon()
            for held in (self._device.queue, self._device):
                disown(held)

    def refused(self, error: Exception | str, doing: str) -> DeviceError:
        """Return wgpu's error as one of ours."""
        found = self.lost or as_device_error(error, doing)
        if isinstance(found, DeviceLost):
            self._lose(found)
        return found

    def _check(self) -> None:
        """Raise DeviceLost if the device is known to be lost: wgpu would end the process."""
        if self.lost is not None:
            raise type(self.lost)(str(self.lost))

    @property
    def submitting_cpu(self) -> float:
        """CPU seconds that submitting has taken on its thread."""
        return self._thread.cpu - self.waiting_cpu

    def poll(self) -> None:
        """Have the submit thread process what is done by now, without waiting."""
        if self.lost is None and (self._look is None or self._look.wait(0)):
            self._look = self._thread.submit(partial(poll, self._c_device, wait=False), _nothing)

    def wait_for(self, mapping: _Mapping, doing: str) -> None:
        """Wait for the submission of this mapping and those before it."""
        self._wait(partial(mapping.see, self._c_device), doing)

    def wait(self) -> None:
        """Wait for everything submitted."""
        self._see_finished(self.in_flight.oldest(len(self.in_flight)), partial(poll, self._c_device, wait=True))
        error_log().raise_if_any("waiting for the device")

    def read_later(self, buffer: Any, offset: int, nbytes: int) -> Readback:
        """Start copying bytes (a multiple of 4) to the host, after everything submitted so far."""
        self._check()
        try:
            staging = self._take_staging(nbytes)
        except Exception as error:
            raise self.refused(error, "reading from the device") from error
        encoder = lib.wgpuDeviceCreateCommandEncoder(self._c_device, ffi.NULL)
        copy(encoder, (handle(buffer), handle(staging)), offset, 0, nbytes)
        return Readback(self, staging, encoder)

    def _take_staging(self, nbytes: int) -> Any:
        for at, staging in enumerate(self._staging):
            if staging.size == nbytes:
                return self._staging.pop(at)
        return self._device.create_buffer(size=nbytes, usage="MAP_READ|COPY_DST")

    def keep_staging(self, staging: Any) -> None:
        """Keep a buffer for the next readback of its size: new memory costs more than the copy."""
        self._staging.append(staging)
        while sum(kept.size for kept in self._staging) > _MOST_STAGING_BYTES:
            self._staging.pop(0).destroy()

    def write(self, buffer: Any, offset: int, data: Any) -> None:
        """Copy host bytes (C-contiguous buffer, a multiple of 4 bytes) into a buffer, after what is submitted."""
        view = ffi.from_buffer(data)
        if len(view) >= STAGED_BYTES:
            self._uploads.write(buffer, offset, np.frombuffer(data, np.uint8))
            return
        self.drain()
        lib.wgpuQueueWriteBuffer(self._c_queue, handle(buffer), offset, view, len(view))
        error_log().raise_if_any("writing to the device")


def _copy_between_passes(encoder: Any, compute_pass: Any, buffers: tuple[Any, Any], *numbers: int) -> Any:
    """End a pass, copy, and begin the next one."""
    lib.wgpuComputePassEncoderEnd(compute_pass)
    lib.wgpuComputePassEncoderRelease(compute_pass)
    copy(encoder, buffers, *numbers)
    return lib.wgpuCommandEncoderBeginComputePass(encoder, ffi.NULL)
