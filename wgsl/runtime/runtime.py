"""The wgpu device without its operators: arrays, launches, recording and replay."""

from __future__ import annotations

import math
import struct
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from wgrad.device.errors import DeviceError, DeviceLost, OutOfMemory, TooLarge
from wgrad.device.memory import Array, Block, Pool
from wgrad.device.placement import Rehearsal
from wgrad.device.runtime import PooledRuntime
from wgrad.wgsl.runtime import adapters, cooperative, cooperative_shapes, matrix_units, native
from wgrad.wgsl.runtime.compile import Compiler, Constant, Pipeline
from wgrad.wgsl.runtime.dequantized_cache import DequantizedCache
from wgrad.wgsl.runtime.profiler import Profiler
from wgrad.wgsl.runtime.readback import Readback
from wgrad.wgsl.runtime.replay import Replay
from wgrad.wgsl.runtime.submission_queue import Queue
from wgrad.wgsl.runtime.submission_size import FIRST_DISPATCHES, MAX_DISPATCHES, Submission, SubmissionSize, joined
from wgrad.wgsl.runtime.transfers import SHADER, UNIT, Transfers, in_pieces
from wgrad.wgsl.runtime.uniforms import Uniforms

MAX_GROUPS = 65_535  # workgroups in one dimension of a dispatch, on every device
_STAGING_BYTES = 64 << 20


class Runtime(PooledRuntime):
    """Owns one wgpu device. Arrays come from a pool; dispatches are recorded and submitted in batches, in order."""

    name = "wgpu"
    tensor_cores_off = ""  # why tensor cores that the driver offers are not used
    matrix_shape = cooperative_shapes.BLOCK  # of one cooperative matrix
    few_registers = False  # choose smaller tiles, whose values fit few registers (Intel)
    attention_plan: Any = None  # a Plan that replaces the table's choice, for sweeps and tests
    gemm_plans: dict[Any, Any] | None = None  # those of a dry run, which remembers them (gemm/plan.py)

    def __init__(self, spec: str | None = None, *, max_binding_bytes: int | None = None) -> None:
        adapter = adapters.choose(spec)
        device = adapters.open_device(adapter)
        self.spec, self.facts, self._adapter = spec, adapters.facts(adapter), adapter
        rate_file = adapters.rate_file(adapter, matrix_units.among(device.features))
        queue = Queue(device, adapter.info["adapter_type"] == "CPU")
        self._start(device, queue, adapter.info, max_binding_bytes, rate_file)
        size = self._submission_size
        queue.in_flight.rate = lambda: size.rate
        if self.matrix_units:
            cooperative.choose_variants(self, adapters.card(adapter), adapters.matrix_shape(adapter))

    def _start(
        self,
        device: Any,
        queue: Any,
        info: Mapping[str, Any],
        max_binding_bytes: int | None,
        rate_file: Path | None = None,
    ) -> None:
        """device, queue: real ones, or stand-ins (webgpu_trace.py). rate_file: as in SubmissionSize."""
        self._device, self._queue, limits = device, queue, device.limits
        self.adapter_type: str = info["adapter_type"]
        self.few_registers = info.get("vendor_id") == adapters.INTEL
        self.description = f"{info['device']} ({info['backend_type']}, {info['description']})"
        # A driver that runs shaders on the CPU has kernels of its own; tests set this to run both kinds.
        self.software = self.adapter_type == "CPU"
        self.float16 = "shader-f16" in self._device.features
        self.subgroups = "subgroup" in self._device.features
        self.subgroup_barrier = adapters.orders_subgroups(self._device.features, info)
        self.matrix_units = matrix_units.among(self._device.features)
        self.lanes = 32  # of a subgroup of a kernel on tensor cores
        # LoRA's matmuls on a stack are slow without tensor cores (bench/notes/rejected-runtime.md).
        self.stacks_weights = self.matrix_units and not self.software
        self.int8_products = False  # `round_products` sets it
        self.transposes_left = False  # in every GEMM that allows it, not only large ones (the self-test's switch)
        # "large", "medium" or "two": this tile for every GEMM that allows it (the self-test's switch).
        self.matrix_tile = ""
        self.bfloat16 = False  # WGSL has no such type; weights are decoded from its bits
        self.shared_memory = self.adapter_type in ("CPU", "IntegratedGPU")  # tests set it to run both kinds
        self.host_buffers = adapters.HOST_BUFFERS in self._device.features
        self.copies_beside = self.adapter_type == "DiscreteGPU"  # tests set it on a software driver
        self.max_binding_bytes = min(max_binding_bytes or 1 << 62, limits["max-storage-buffer-binding-size"])
        self.max_buffer_bytes: int = limits["max-buffer-size"]
        self.workgroup_bytes: int = limits["max-compute-workgroup-storage-size"]
        self._compiler = self._new_compiler()
        self._pool = Pool(self._create_buffer, self._destroy_block)
        self._host_pool = Pool(self._create_host_buffer, self._destroy_block)
        self._make_cache()
        self._bind_groups: dict[Any, tuple[Any, Any]] = {}
        self._block_keys: dict[int, list[Any]] = {}
        self._uniforms = Uniforms(device, queue)
        self._pending: list[native.Dispatch] = []
        self._pending_names: list[str] = []
        self._pending_work, self._pending_apart, self._most_pending = 0.0, False, FIRST_DISPATCHES
        self._transfers = Transfers(self.max_binding_bytes)
        self._submission_size = SubmissionSize(self.adapter_type, rate_file)
        self._dummy = self.zeros((64,), np.float32)

    def _new_compiler(self) -> Compiler:
        return Compiler(self._device, self._queue.refused)

    @property
    def fastest_compute(self) -> str:
        return "float16" if self.matrix_units else "float32"

    def _make_cache(self) -> None:
        self.dequantized = DequantizedCache()
        self._pool.spare = self.dequantized.drop

    def caching_dequantized(self) -> AbstractContextManager[None]:
        return self.dequantized.open()

    @contextmanager
    def capture(self, rehearsal: Rehearsal | None = None) -> Iterator[Any]:
        # A replay decodes what it reads: cached values are carried neither into a recording nor out of one.
        self.dequantized.drop()
        self.synchronize()
        with super().capture(rehearsal) as replay:
            try:
                yield replay
            finally:
                self.dequantized.drop()
        self.synchronize()  # the rate that this measures sizes the recording's submissions
        if isinstance(replay, Replay):  # a dry run's has none
            replay.submissions = joined(replay.submissions, self._submission_size.work)

    # ---- storage -------------------------------------------------------------------------
    def _check_buffer(self, nbytes: int) -> None:
        if nbytes > self.max_buffer_bytes:
            raise OutOfMemory(
                f"an array of {nbytes:,} bytes is larger than one buffer may be on this device"
                f" ({self.max_buffer_bytes:,})"
            )

    def _check_binding(self, shader: str, nbytes: int) -> None:
        if nbytes > self.max_binding_bytes:
            raise TooLarge(
                f"{shader}: an array of {nbytes:,} bytes does not fit one binding of this device"
                f" ({self.max_binding_bytes:,}); use a smaller batch or sequence length"
            )

    def _create_buffer(self, nbytes: int, usage: str = "STORAGE|COPY_SRC|COPY_DST") -> Any:
        self._check_buffer(nbytes)
        try:
            return self._device.create_buffer(size=nbytes, usage=usage)
        except Exception as error:
            refused = self._queue.refused(error, "making an array")
            if isinstance(refused, DeviceLost):
                raise refused from error
            raise OutOfMemory(
                f"no memory for {nbytes:,} bytes on {self.description}: {self._pool.in_use_bytes:,} bytes in use,"
                f" {self._pool.reserved_bytes:,} reserved ({error})"
            ) from error

    def _create_host_buffer(self, nbytes: int) -> Any:
        """Create a buffer in host memory: on every backend, that is where buffers mapped for reading are."""
        if not self.host_buffers:
            raise DeviceError(
                f"{self.description} has no {adapters.HOST_BUFFERS}: it cannot reach main memory by itself"
            )
        return self._create_buffer(nbytes, "MAP_READ|STORAGE|COPY_SRC|COPY_DST")

    def _destroy_block(self, block: Block) -> None:
        if self._queue.lost is None:
            self.flush()
        for key in self._block_keys.pop(block.serial, ()):
            self._bind_groups.pop(key, None)
        if self._queue.lost is None:
            self._queue.drain()
        block.buffer.destroy()

    def _fill_words(self, out: Array, word: int) -> None:
        for part in self.flat_windows(out):
            words, odd = (part.nbytes + 3) // 4, part.nbytes % 4
            self.launch("fill", [part], [words, word, (1 << 8 * odd) - 1], self.groups(words, 256 * 4))

    def _write_new(self, array: Array, host: np.ndarray) -> None:
        self._write(array, host, np.zeros(0, np.uint8))

    def write(self, array: Array, host: np.ndarray) -> None:
        odd = array.nbytes % 4  # bytes in a last word that may be shared with a neighbor, whose bytes are kept
        self._write(array, host, self._last_word(array)[odd:] if odd else np.zeros(0, np.uint8))

    def _last_word(self, array: Array) -> np.ndarray:
        self.flush()
        word = np.empty(4, np.uint8)
        at = array.offset + array.nbytes // 4 * 4
        self._queue.read_later(array.lease.block.buffer, at, word.nbytes).copy_to(word.data)
        return word

    def _write(self, array: Array, host: np.ndarray, tail: np.ndarray) -> None:
        # A write enters the queue at once, so what was recorded before must be submitted first.
        self.flush()
        self.dequantized.written(array)
        data = np.ascontiguousarray(host, dtype=array.dtype).reshape(-1).view(np.uint8)
        if data.nbytes % 4:
            data = np.resize(np.append(data, tail), -(-data.nbytes // 4) * 4)
        self._queue.write(array.lease.block.buffer, array.offset, data)

    def download(self, array: Array) -> np.ndarray:
        self.flush()
        nbytes = (array.nbytes + 3) & ~3
        out = np.empty(nbytes, np.uint8)
        for at in range(0, nbytes, _STAGING_BYTES):
            size = min(_STAGING_BYTES, nbytes - at)
            self._queue.read_later(array.lease.block.buffer, array.offset + at, size).copy_to(out.data[at : at + size])
        values: np.ndarray = out[: array.nbytes].view(array.dtype).reshape(array.shape)
        return values

    def readback(self, array: Array, out: np.ndarray | None = None) -> Readback:
        """Copy an array to the host without waiting: later work may overwrite it."""
        self.flush()
        nbytes = max((array.nbytes + 3) & ~3, 4)
        return Readback(self._queue.read_later(array.lease.block.buffer, array.offset, nbytes), array, out)

    def transfer(self, src: Array, out: Array) -> None:
        """out = src, in pieces that overlap with the large launches that follow (transfers.py). The rest is copied by a
        command before anything else that may touch either array."""
        self.dequantized.written(out)
        if self._replay is not None:
            self._keep([src, out])
        if self.copies_beside and in_pieces(src, out):
            self._transfers.add(src, out, to_host=out.lease.of(self._host_pool))
        else:
            self._complete_transfers()
            self._copy(src, out)

    def _complete_transfers(self, blocks: Collection[Block] | None = None) -> None:
        """Complete the pending transfers up to the last that touches one of these blocks. None: all."""
        for src, out in self._transfers.due(blocks):
            self._copy(src, out)

    def _copy(self, src: Array, out: Array) -> None:
        """Record a copy command, between two passes."""
        buffers = native.handle(src.lease.block.buffer), native.handle(out.lease.block.buffer)
        nbytes = (src.nbytes + 3) & ~3
        self._record("transfer", (None, buffers, src.offset, out.offset, nbytes), 2.0 * src.nbytes)

    def _copy_beside(self, work: float) -> None:
        """Record pieces of pending transfers in the submission that begins with a launch of so many FLOP."""
        for number, (src, out, groups) in enumerate(self._transfers.beside(work)):
            pipeline = self._compiler.get(SHADER.shader, SHADER.entry, {})
            bind_group = self._bind(pipeline, [src, out], [src.nbytes // UNIT])
            if number == 0:
                self._submit_pending()
                self._pending_apart = True
            self._record(pipeline.name, (pipeline.handle, bind_group, groups, 1, 1), 0.0)

    def flat_windows(self, array: Array) -> Iterator[Array]:
        """Flat pieces of an array, each no larger than one binding."""
        step = self.max_binding_bytes // array.dtype.itemsize // 1024 * 1024
        for at in range(0, max(array.size, 1), max(step, 1024)):
            yield self.view(array, (min(step, array.size - at),), at)

    def row_windows(self, rows: int, row_bytes: int) -> list[tuple[int, int]]:
        """Return (first, last + 1) ranges of rows that fit one binding and start where a binding may start."""
        align = 256 // math.gcd(row_bytes, 256)  # rows to the next aligned row
        most = self.max_binding_bytes // row_bytes // align * align
        if most == 0 and rows * row_bytes > self.max_binding_bytes:
            raise TooLarge(f"a row of {row_bytes:,} bytes does not fit one binding of {self.max_binding_bytes:,} bytes")
        step = most or rows
        return [(at, min(at + step, rows)) for at in range(0, rows, step)]

    def synchronize(self) -> None:
        self.flush()
        self._queue.wait()
        self._submission_size.waited()

    def close(self) -> None:
        """Release a device that was lost; its memory goes with the last array."""
        self._bind_groups.clear()
        self._block_keys.clear()
        self._queue.close()

    def pipelines_compiled(self) -> int:
        return self._compiler.compiled

    # ---- launches ------------------------------------------------------------------------
    @staticmethod
    def groups(items: int, per_group: int) -> tuple[int, int, int]:
        """Workgroups for `items`, folded into two dimensions; the shader linearizes x + y * num_workgroups.x."""
        n = max(1, -(-items // per_group))
        if n <= MAX_GROUPS:
            return n, 1, 1
        y = -(-n // MAX_GROUPS)
        return -(-n // y), y, 1

    def launch(
        self,
        shader: str,
        arrays: Sequence[Array | None],
        params: Sequence[int | float],
        groups: tuple[int, int, int],
        constants: Mapping[str, Constant] | None = None,
        *,
        entry: str = "main",
        work: float = 0.0,
    ) -> None:
        """Record one dispatch of `shader`.wgsl, a file of this package or a whole path.

        arrays: for bindings 1, 2, ... in order (None: a dummy). Those whose binding #if left out are skipped.
        params: 4-byte fields of the uniform struct at binding 0 (int -> u32 or i32, float -> f32).
        groups: workgroup counts. constants: names put on top of the file. work: FLOP, or bytes if memory-bound.
        """
        pipeline = self._compiler.get(shader, entry, dict(constants or {}))
        if max(groups) > MAX_GROUPS:
            raise TooLarge(f"{pipeline.name}: a dispatch of {groups} workgroups exceeds {MAX_GROUPS} in one dimension")
        bind_group = self._bind(pipeline, arrays, params)
        for n in pipeline.written:
            self.dequantized.written(arrays[n - 1])
        if self._replay is not None:
            self._keep(arrays)
        if self._transfers:
            self._complete_transfers({a.lease.block for a in arrays if a is not None})
            self._copy_beside(work)
        self._record(pipeline.name, (pipeline.handle, bind_group, *groups), work)

    @property
    def dispatch_work(self) -> float:
        """The work above which a launch is split into several dispatches, if its shader allows it."""
        return self._submission_size.dispatch_work

    def _record(self, name: str, dispatch: native.Dispatch, work: float) -> None:
        if self._pending_work and self._pending_work + work > self._submission_size.work:
            self._submit_pending()
            self._most_pending = MAX_DISPATCHES
        self._pending.append(dispatch)
        self._pending_names.append(name)
        self._pending_work += work
        if len(self._pending) >= self._most_pending or self._pending_work > self._submission_size.work:
            self._submit_pending()
            self._most_pending = MAX_DISPATCHES

    def _bind(self, pipeline: Pipeline, arrays: Sequence[Array | None], params: Sequence[int | float]) -> Any:
        packed = b"".join(
            struct.pack("<f", p) if isinstance(p, float) else struct.pack("<I", p & 0xFFFFFFFF) for p in params
        )
        arrays = [arrays[n - 1] for n in pipeline.bindings]
        parts: list[tuple[int, int, int]] = []
        for a in arrays:
            a = self._dummy if a is None else a
            parts.append((a.lease.block.serial, a.offset, max((a.nbytes + 3) & ~3, 4)))
        key = (pipeline.handle, packed, *parts)
        found = self._bind_groups.get(key)
        if found is None:
            found = self._new_bind_group(key, pipeline, arrays, packed, parts)
        return found[1]

    def _new_bind_group(
        self,
        key: Any,
        pipeline: Pipeline,
        arrays: Sequence[Array | None],
        packed: bytes,
        parts: list[tuple[int, int, int]],
    ) -> tuple[Any, Any]:
        entries = [{"binding": 0, "resource": self._uniforms.binding(packed)}]
        for n, a, (serial, offset, nbytes) in zip(pipeline.bindings, arrays, parts):
            self._check_binding(pipeline.name, nbytes)
            buffer = (self._dummy if a is None else a).lease.block.buffer
            entries.append({"binding": n, "resource": {"buffer": buffer, "offset": offset, "size": nbytes}})
            self._block_keys.setdefault(serial, []).append(key)
        try:
            group = self._device.create_bind_group(layout=pipeline.layout, entries=entries)
        except Exception as error:
            raise self._queue.refused(error, f"binding {arrays} to {pipeline.name}") from error
        self._bind_groups[key] = (group, native.handle(group))
        return self._bind_groups[key]

    def flush(self) -> None:
        """Submit recorded work and pending transfers."""
        self._complete_transfers()
        self._submit_pending()
        self._most_pending = FIRST_DISPATCHES

    def _submit_pending(self) -> None:
        if not self._pending:
            return
        made = Submission(self._pending, self._pending_names, self._pending_work, self._pending_apart)
        self._pending, self._pending_names, self._pending_work, self._pending_apart = [], [], 0.0, False
        self._submission_size.submitted(made.work)
        if self._replay is not None:
            self._replay.submissions.append(made)
        self._submit(made)

    def _submit(self, submission: Submission) -> None:
        if self.profiler is not None:
            self.profiler.submit(submission.dispatches, submission.names)
        else:
            self._queue.submit(submission.dispatches, submission.names, submission.work)

    def _new_replay(self) -> Replay:
        return Replay(self)

    def _new_profiler(self) -> Profiler:
        """Timestamps around every dispatch (slower: each gets a pass of its own)."""
        return Profiler(self._device, self._queue)
