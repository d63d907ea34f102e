"""Epilogues of GEMM: the operations between the sums and the result; the second pass of a GEMM split over K."""

from __future__ import annotations

from dataclasses import dataclass

from wgrad.device.memory import Array
from wgrad.wgsl.elements import wgsl_element
from wgrad.wgsl.runtime.compile import Constant
from wgrad.wgsl.runtime.runtime import Runtime


@dataclass(frozen=True)
class Epilogue:
    """The operations between a GEMM's sums and `out`, whose row stride is `ldc` (0: its columns), from `column` on.

    parts: columns of each weight of a stack; each has a LoRA term of its own in `lowrank`.
    """

    out: Array
    alpha: float = 1.0
    bias: Array | None = None
    residual: Array | None = None
    lowrank: tuple[Array, Array] | None = None
    parts: tuple[int, ...] = ()
    accumulate: bool = False
    column: int = 0
    ldc: int = 0

    @property
    def row_stride(self) -> int:
        """Elements from a row of `out` to the next."""
        return self.ldc or self.out.shape[-1]

    @property
    def is_plain(self) -> bool:
        """Return whether at most `out` itself is added, and its rows are whole."""
        return self.bias is None and self.residual is None and self.lowrank is None and not self.ldc

    def constants(self, n: int) -> dict[str, Constant]:
        vec = n % 4 == 0 and self.row_stride % 4 == 0 and self.column % 4 == 0
        return {
            "HAS_BIAS": self.bias is not None,
            "HAS_RESIDUAL": self.residual is not None,
            "ACCUMULATE": self.accumulate,
            "C_T": wgsl_element(self.out, vec),
            "R_T": wgsl_element(self.residual if self.residual is not None else self.out, vec),
            "VEC_C": vec,
        }

    @staticmethod
    def of_parts(n: int) -> dict[str, Constant]:
        """Epilogue of a GEMM split over K: the parts are stored unchanged."""
        vec = n % 4 == 0
        switches = dict.fromkeys(("HAS_BIAS", "HAS_RESIDUAL", "ACCUMULATE"), False)
        return {**switches, "C_T": "vec4<f32>" if vec else "f32", "R_T": "f32", "VEC_C": vec}


def reduce_splits(device: Runtime, partial: Array, end: Epilogue, mns: tuple[int, int, int]) -> None:
    m, n, splits = mns
    constants = end.constants(n)
    vec = bool(constants["VEC_C"])
    width = 4 if vec else 1
    device.launch(
        "gemm_reduce",
        [partial, end.out, end.bias, end.residual],
        [m, n, splits, end.row_stride, end.column, float(end.alpha)],
        device.groups(m * n // width, 256),
        {**constants, "P_T": "vec4<f32>" if vec else "f32", "WIDTH": width},
        work=4.0 * m * n * (splits + 1),
    )
