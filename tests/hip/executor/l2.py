"""L1's reads from L2 in a 16-bit GEMM on MI300, whose lines have 128 bytes.

They are counted on the emulated GPU, whose L1 keeps the lines read last (tests/hip/emulator/counts.cpp).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.hip.executor.accesses import emulator
from tests.hip.executor.table import Object
from wgrad.device.formats.frozen_weight import FrozenWeight
from wgrad.hip.runtime.launch import Long

LINE, _L1_LINES = 128, 256  # bytes; lines of 32 KiB
_K, _READ = 8192, (192, 448)  # of K; what is read of it: the longer one has no start or end more than the shorter
_DTYPES = {"f16": np.float16, "bf16": np.uint16}


def lines(made: Object, kernel: str, tile: tuple[int, int, int], kind: type[FrozenWeight] | None, groups: int) -> float:
    """Count the lines that one work-group reads for 64 of K.

    tile: its rows, columns and work-items. kind: of the weight, if b is one. groups: work-groups that share an L1.
    """
    device = emulator().counting(made.architecture)
    m, n, threads = tile
    *_, dtype, layout, _ = kernel.split("_")
    operands: list[Any] = [device.empty((_K, m) if layout[0] == "t" else (m, _K), _DTYPES[dtype])]
    rows, columns = (n, _K) if layout[1] == "t" else (_K, n)
    if kind is None:
        operands.append(device.empty((rows, columns), _DTYPES[dtype]))
    else:
        weight = kind.quantize(np.ones((rows, columns), np.float32), double="nested" in kernel)
        operands += [x if x is None else device.upload(x) for x in weight.arrays().values()]
        operands += weight.parameters()
    target, strides = device.empty((m, n)), [Long(0), Long(0)] if kind is None else []

    def launch(read: int) -> None:
        arguments = [*operands, target, None, None, None, None, m, n, _K, read, 0, 0, 0, 0, 0, 0, 1.0, *strides]
        device.launch(made.source, kernel, arguments, (1, 1, 1), threads=threads)

    short, long = (
        emulator().count(lambda read=read: launch(read), l1=_L1_LINES // groups)[kernel].fetched  # type: ignore[misc]
        for read in _READ
    )
    return (long - short) * 64 / (_READ[1] - _READ[0])
