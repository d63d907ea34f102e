"""TB/s at which workgroups read what many of them share, by access pattern and bytes in flight.

    python bench/bench_reads.py [--device NAME] [--small] [--out FILE]

The reads are those of a float16 GEMM (wgsl/gemm/gemm_matrix.wgsl): each invocation reads 16 bytes at a time of rows
that are 8 KiB apart, so many of them before it uses the first, walks along the rows, and begins anew at the end of
`footprint` bytes, which all workgroups share. One workgroup runs on a compute unit at once, or two where
`workgroup_bytes` are 24,576 or less (NVIDIA). What is read is added up and never stored.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from typing import Any

import wgpu
from common import Report

from wgrad.autograd.bench.timing import median_spread
from wgrad.autograd.bind import bind
from wgrad.wgsl.device import WgpuDevice

ROW_STRIDE = 8192
SAMPLES, SAMPLE_SECONDS, WARM_SECONDS = 5, 0.03, 0.5
CODE = """
@group(0) @binding(0) var<storage, read> source: array<vec4<u32>>;
@group(0) @binding(1) var<storage, read_write> out: array<u32>;
var<workgroup> kept: array<u32, WORDS>;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
  kept[lid] = lid;
  var sum = vec4<u32>();
  let base = (group.x * ROWS * READS + lid / UNITS) * (STRIDE / 16u) + lid % UNITS;
  for (var i = 0u; i < TURNS; i++) {
LOADS
ADDS
  }
  if (sum.x == 77u && sum.y == 3u) { out[lid] = sum.z + kept[sum.w % 64u]; }
}
"""


@dataclass(frozen=True)
class Reads:
    """row_bytes: read of a row side by side. reads: of 16 bytes, by an invocation, under way together."""

    row_bytes: int
    footprint: int
    reads: int = 6
    threads: int = 256
    workgroup_bytes: int = 38_912
    groups: int = 528
    turns: int = 256

    @property
    def nbytes(self) -> int:
        return self.groups * self.threads * self.reads * self.turns * 16

    def code(self) -> str:
        units = self.row_bytes // 16
        rows, last = self.threads // units, self.footprint // 16 - 1
        places = [f"(base + {n * rows * ROW_STRIDE // 16}u + i * {units}u) & {last}u" for n in range(self.reads)]
        text = CODE.replace("LOADS", "\n".join(f"    let x{n} = source[{at}];" for n, at in enumerate(places)))
        text = text.replace("ADDS", "\n".join(f"    sum ^= x{n};" for n in range(self.reads)))
        numbers = {"WORDS": self.workgroup_bytes // 4, "THREADS": self.threads, "ROWS": rows, "UNITS": units}
        for name, number in {**numbers, "READS": self.reads, "STRIDE": ROW_STRIDE, "TURNS": self.turns}.items():
            text = text.replace(name, f"{number}u")
        return text


MIB = 1 << 20
CASES = [Reads(row_bytes, size * MIB) for size in (4, 16, 32, 64, 256) for row_bytes in (64, 128, 512)]
CASES += [Reads(64, 32 * MIB, reads) for reads in (2, 4, 8, 12)]
CASES += [Reads(64, 32 * MIB, threads=threads, workgroup_bytes=24_576, groups=1056) for threads in (128, 256)]
CASES += [Reads(64, 32 * MIB, groups=groups, turns=1024) for groups in (16, 33, 66, 132)]
SMALL = [Reads(64, MIB, 2, 64, 1024, 2, 4), Reads(128, MIB, 4, 64, 1024, 2, 4)]


def runner(device: Any, case: Reads) -> Any:
    """A call that runs the case so many times and waits."""
    source = device.create_buffer(size=case.footprint, usage=wgpu.BufferUsage.STORAGE)
    out = device.create_buffer(size=4096, usage=wgpu.BufferUsage.STORAGE | wgpu.BufferUsage.COPY_SRC)
    module = device.create_shader_module(code=case.code())
    pipeline = device.create_compute_pipeline(layout="auto", compute={"module": module, "entry_point": "main"})
    entries = [
        {"binding": n, "resource": {"buffer": buffer, "offset": 0, "size": buffer.size}}
        for n, buffer in enumerate((source, out))
    ]
    bindings = device.create_bind_group(layout=pipeline.get_bind_group_layout(0), entries=entries)

    def run(times: int) -> float:
        begun = time.perf_counter()
        encoder = device.create_command_encoder()
        compute_pass = encoder.begin_compute_pass()
        compute_pass.set_pipeline(pipeline)
        compute_pass.set_bind_group(0, bindings)
        for _ in range(times):
            compute_pass.dispatch_workgroups(case.groups)
        compute_pass.end()
        device.queue.submit([encoder.finish()])
        device.queue.read_buffer(out, 0, 4)
        return time.perf_counter() - begun

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default=None, help="adapter index or name (default: the best)")
    parser.add_argument("--small", action="store_true", help="small sizes, to try the script on a slow device")
    parser.add_argument("--out", default=None)
    args = parser.parse_args()
    device = bind(WgpuDevice)(args.device)
    report = Report("reads", device, args.out)
    warm = 0.0
    for case in SMALL if args.small else CASES:
        run = runner(device._device, case)
        while warm < (0 if args.small else WARM_SECONDS):
            warm += run(10)
        one = run(2) / 2
        times = max(1, round(SAMPLE_SECONDS / one))
        seconds, spread = median_spread([run(times) / times for _ in range(1 if args.small else SAMPLES)])
        report.row(
            row_bytes=case.row_bytes, footprint_mib=case.footprint / MIB, reads=case.reads, threads=case.threads,
            workgroup_bytes=case.workgroup_bytes, groups=case.groups, tb_per_second=case.nbytes / seconds / 1e12,
            spread=spread,
        )  # fmt: skip


if __name__ == "__main__":
    main()
