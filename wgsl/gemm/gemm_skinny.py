"""GEMM with a side of a LoRA's rank: recognition, and the launch of gemm_skinny.wgsl."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from wgrad.device.memory import Array
from wgrad.wgsl.formats.formats import KINDS, part_bounds
from wgrad.wgsl.runtime.compile import Constant
from wgrad.wgsl.runtime.dispatch_parts import range_parts
from wgrad.wgsl.runtime.runtime import Runtime

MOST_RANK = 64
_SIDE = 16  # rows or columns of X that a workgroup takes
_THREADS = 256
# How deep a block of the reduction a workgroup stages: the deepest that fits so many bytes.
_DEPTHS = (128, 64, 32)
_WORKGROUP_BYTES = 24_576


@dataclass(frozen=True)
class Skinny:
    """A GEMM of the large X with the small float32 S, by all that the choice of a kernel depends on.

    x_shape, x_dtype: of X.
    s_columns: of S, whose rows run along the rank where `rank_inner`.
    along_rows: the reduction runs along the rows of X; then the result is written transposed where `transposed`.
    parts: columns of X of each weight of a stack.
    part_rank, first_rank: of the ranks of a part, those from first_rank on are computed.
    """

    x_shape: tuple[int, ...]
    x_dtype: str
    s_columns: int
    rank: int
    rank_inner: bool
    along_rows: bool
    transposed: bool = False
    parts: tuple[int, ...] = ()
    part_rank: int = 0
    first_rank: int = 0

    @property
    def parts_along_y(self) -> int:
        """Parts with workgroups of their own: all, if the reduction runs along the columns of X."""
        return 1 if self.along_rows else max(1, len(self.parts))

    def parameters(self, out: Array, alpha: float, k_per_split: int, first_tile: int) -> list[int | float]:
        rows, columns = self.x_shape
        bounds = part_bounds(self.parts, columns)
        shape = [rows, columns, self.rank, self.s_columns, out.shape[1]]
        return [*shape, self.first_rank, *bounds, self.part_rank, 0, float(alpha), k_per_split, out.size, first_tile]

    def constants(self, accumulate: bool) -> dict[str, Constant]:
        return {
            "ALONG_ROWS": self.along_rows,
            "RANK_INNER": self.rank_inner,
            "C_TRANS": self.transposed,
            "ACCUMULATE": accumulate,
            "PARTS": bool(self.parts),
        }


def find(mnk: tuple[int, int, int], a: str, b: str, out: str, trans_a: bool, trans_b: bool) -> Skinny | None:
    """Return op(A) op(B) as a skinny GEMM, or None. X is A where `transposed`, else B. a, b, out: dtypes."""
    m, n, k = mnk
    if out != "float32":
        return None
    if n <= min(m, MOST_RANK) and b == "float32":
        return Skinny((k, m) if trans_a else (m, k), a, k if trans_b else n, n, not trans_b, trans_a, transposed=True)
    if m <= MOST_RANK and not trans_b and a == "float32":
        return Skinny((k, n), b, m if trans_a else k, m, trans_a, True)
    return None


def served(product: Skinny) -> bool:
    """Return whether gemm_skinny.wgsl takes it: X is read four elements at a time."""
    return product.x_dtype in ("float32", "float16") and product.x_shape[1] % 4 == 0


def launch(device: Runtime, product: Skinny, x: Array, s: Array, out: Array, alpha: float, accumulate: bool) -> None:
    """out = alpha * product (+ out where `accumulate`)."""
    rows, columns = product.x_shape
    rank4 = -(-product.rank // 4)
    slices = _THREADS // (4 * rank4)
    limit = min(device.workgroup_bytes, _WORKGROUP_BYTES)
    depth = next(d for d in _DEPTHS if _workgroup_bytes(d, rank4, slices) <= limit or d == _DEPTHS[-1])
    constants = product.constants(accumulate)
    constants |= {
        "X_KIND": KINDS[product.x_dtype],
        "VEC_X": True,
        "RANK4": rank4,
        "SLICES": slices,
        "DEPTH": depth,
    }
    groups = (-(-(columns if product.along_rows else rows) // _SIDE), product.parts_along_y, 1)
    launch_along_x(device, "gemm_skinny", [x, s, out], product, out, alpha, 0, groups, constants)


def launch_along_x(
    device: Runtime,
    shader: str,
    arrays: Sequence[Array],
    product: Skinny,
    out: Array,
    alpha: float,
    k_per_split: int,
    groups: tuple[int, int, int],
    constants: Mapping[str, Constant],
) -> None:
    """Launch workgroups along X, in as many dispatches as `Runtime.dispatch_work` asks for."""
    tiles, *others = groups
    rows, columns = product.x_shape
    work = 2.0 * rows * columns * product.rank
    for first, end in range_parts(tiles, work, device.dispatch_work):
        params = product.parameters(out, alpha, k_per_split, first)
        part = (end - first, others[0], others[1])
        device.launch(shader, arrays, params, part, constants, work=work * (end - first) / tiles)


def _workgroup_bytes(depth: int, rank4: int, slices: int) -> int:
    """Workgroup memory of the tiles of X and S, in the layout that takes more, and of the sums."""
    return 16 * ((_SIDE + 4 * rank4) * (depth // 4 + 1) + 4 * rank4 * slices)
