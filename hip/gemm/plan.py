"""Choice of the kernel for a GEMM, by shapes, dtypes and alignment alone."""

from __future__ import annotations

from dataclasses import dataclass

SHORT = ("f32", "f16", "bf16")  # by kind: 0 float32, 1 float16, 2 bfloat16
DECODED_IN_PRODUCTS = ("nf4", "nf4_nested", "q8_0")  # WEIGHT_FORMATS of weight_formats.hpp
OF_EXPERTS = (*DECODED_IN_PRODUCTS, "mxfp4")  # and EXPERT_FORMATS
SKINNY = 64  # results at most this wide use the kernels for LoRA
_MIN_K_PER_SPLIT, _MAX_SPLITS, _MIN_K_PER_SKINNY_SPLIT, _MAX_SKINNY_SPLITS = 256, 16, 128, 32
_FAR = 1 << 23  # elements of a row: 128 such rows of float32 have 32-bit byte offsets
_DEPTH = 64  # of K per iteration of a kernel's loop: splits of K are multiples of it


@dataclass(frozen=True)
class Tile:
    """A work-group's tile of the result, and its work-items."""

    m: int
    n: int
    threads: int


# The shapes of gemm_product.hpp; the other files have one each.
_CDNA = {"big": Tile(256, 256, 512), "small": Tile(128, 128, 256)}
_RDNA = {"big": Tile(128, 128, 256), "small": Tile(64, 128, 128)}
_SPLIT = Tile(128, 128, 256)
_GEMV = Tile(1, 4, 256)


@dataclass(frozen=True)
class Gpu:
    """A GPU, as plans see it.

    wave: lanes of a wave, 64 (CDNA) or 32 (RDNA). matrix16, split: has gemm.hip, gemm_split.hip. flushes_denormals: its
    tensor cores take float16 subnormals for zeros (CDNA2).
    """

    wave: int
    compute_units: int
    matrix16: bool
    split: bool
    flushes_denormals: bool = False


@dataclass(frozen=True)
class Plan:
    """A kernel and its launch.

    splits, per_split: of K (1, 0: not split). swapped: the kernel makes the transposed result, from b and a in this
    order. kinds: it takes the operands' dtypes as arguments.
    """

    source: str
    name: str
    tile: Tile
    splits: int = 1
    per_split: int = 0
    swapped: bool = False
    kinds: bool = False


def dense(
    gpu: Gpu, kinds: tuple[int, int], layout: str, mnk: tuple[int, int, int], batch: int, aligned: bool, out: int = 0
) -> Plan:
    """Plan a GEMM of dense operands.

    kinds: dtype codes of a and b; out: of the result. layout: nn, nt, tn or tt. aligned: both operands start at
    multiples of 16 bytes.
    """
    m, n, k = mnk
    if m == 1 and layout[1] == "t" and batch == 1:  # [K, 1] and [1, K] are the same
        return Plan("gemv", "gemv" if aligned and k % 8 == 0 else "gemv_unaligned", _GEMV, kinds=True)
    if layout == "tt":
        return _wide(gpu, "gemm_any_tt", mnk, batch, True)
    # Elements of a row of each operand: what vector loads must divide.
    rows = {"nn": (k, n), "nt": (k,), "tn": (m, n)}[layout]
    by8 = aligned and not any(row % 8 for row in rows)
    by4 = aligned and not any(row % 4 for row in rows)
    if _on_matrix16(gpu, kinds, out):
        shape, tile = _shape(gpu, m, n, batch)
        if not by8:
            shape, tile = "unaligned", _shapes(gpu)["small"]
        name = f"gemm_{SHORT[kinds[0]]}_{layout}_{shape}"
        return Plan("gemm", name, tile, *_splits(gpu, mnk, batch, tile))
    narrow = min(m, n) if layout == "tn" else n
    if narrow <= SKINNY and batch == 1 and by8:
        return _skinny(gpu, layout, mnk)
    if gpu.split and kinds[1] == 2 and layout != "tn" and by8:
        return _split(gpu, f"gemm_split_{SHORT[kinds[0]]}_bf16_{layout}", mnk, batch)
    if by4 and max(rows) < _FAR:
        return _wide(gpu, f"gemm_mix_{layout}" if any(kinds) else f"gemm_f32_{layout}", mnk, batch, any(kinds))
    return _wide(gpu, f"gemm_any_{layout}", mnk, batch, True)


def frozen(gpu: Gpu, kind: int, out: int, name: str, layout: str, mnk: tuple[int, int, int]) -> Plan:
    """Plan a GEMM with a frozen weight, whose rows are multiples of 8.

    kind: dtype code of x or dy. name: of the weight's format in weight_formats.hpp. layout: nt (forward) or nn
    (backward).

    On 16-bit tensor cores the decoded weight is rounded to x's dtype, so only for 16-bit results, where that does
    not show. Where only one of x and the result has 16 bits, gemm_split.hip splits both into pieces.
    """
    m, n, _ = mnk
    if m == 1 and layout == "nt":
        return Plan("gemv", f"gemv_{name}", _GEMV, kinds=True)
    if kind and out and gpu.matrix16:
        shape, tile = _shape(gpu, m, n, 1)
        full = f"gemm_{name}_{SHORT[kind]}_{layout}_{shape}"
        return Plan("linear", full, tile, *_splits(gpu, mnk, 1, tile))
    if gpu.split and (kind == 1) != (out != 0) and kind != 2:
        return _split(gpu, f"gemm_split_{name}_{SHORT[kind]}_{layout}", mnk, 1)
    return _wide(gpu, f"gemm_{name}_f32_{layout}", mnk, 1, True)


def experts(gpu: Gpu, kinds: tuple[int, int], layout: str, nk: tuple[int, int], out: int, *, aligned: bool) -> Plan:
    """Plan a GEMM of experts with dense weights. nk: columns of the result and inner size; the rest as for `dense`."""
    n, k = nk
    rows = (k, n) if layout == "nn" else (k,)
    if _on_matrix16(gpu, kinds, out) and aligned and not any(row % 8 for row in rows):
        return Plan("gemm_grouped", f"grouped_{SHORT[kinds[0]]}_{layout}", _shapes(gpu)["small"])
    whole = aligned and not any(row % 4 for row in rows) and max(rows) < _FAR
    name = f"grouped_{'mix' if whole else 'any'}_{layout}"
    return Plan("gemm_grouped_f32", name, wide_tile(gpu), kinds=True)


def experts_frozen(gpu: Gpu, kind: int, name: str, layout: str) -> Plan:
    """Plan a GEMM of experts of 16-bit activations with frozen weights; arguments as for `frozen`."""
    return Plan("gemm_grouped", f"grouped_{name}_{SHORT[kind]}_{layout}", _shapes(gpu)["small"])


def _on_matrix16(gpu: Gpu, kinds: tuple[int, int], out: int) -> bool:
    """Return whether 16-bit tensor cores serve dense operands of these dtypes."""
    # In a float32 result it shows where float16 subnormals were taken for zeros.
    flushed = gpu.flushes_denormals and kinds == (1, 1) and out == 0
    return kinds[0] == kinds[1] and kinds[0] != 0 and gpu.matrix16 and not flushed


def wide_tile(gpu: Gpu) -> Tile:
    """Return the tile of the float32 kernels."""
    return Tile(128, 128, 4 * gpu.wave)


def _shapes(gpu: Gpu) -> dict[str, Tile]:
    return _CDNA if gpu.wave == 64 else _RDNA


def _shape(gpu: Gpu, m: int, n: int, batch: int) -> tuple[str, Tile]:
    """Return the big tile where it fills the GPU, else the small one."""
    name = "big" if _count(m, n, _shapes(gpu)["big"]) * batch >= gpu.compute_units else "small"
    return name, _shapes(gpu)[name]


def _wide(gpu: Gpu, name: str, mnk: tuple[int, int, int], batch: int, kinds: bool) -> Plan:
    tile = wide_tile(gpu)
    return Plan("gemm_f32", name, tile, *_splits(gpu, mnk, batch, tile), kinds=kinds)


def _split(gpu: Gpu, name: str, mnk: tuple[int, int, int], batch: int) -> Plan:
    return Plan("gemm_split", name, _SPLIT, *_splits(gpu, mnk, batch, _SPLIT))


def _skinny(gpu: Gpu, layout: str, mnk: tuple[int, int, int]) -> Plan:
    """Plan tiles of 128 x 16 or 128 x 64, along the longer side for tn; K is split until the GPU is full twice."""
    m, n, k = mnk
    swapped = layout == "tn" and m < n
    long, narrow = (n, m) if swapped else (m, n)
    width = 16 if narrow <= 16 else 64
    tiles = -(-long // 128)
    wanted = min(2 * gpu.compute_units // tiles, k // _MIN_K_PER_SKINNY_SPLIT, _MAX_SKINNY_SPLITS)
    tile = Tile(width, 128, 256) if swapped else Tile(128, width, 256)
    return Plan("gemm_skinny", f"gemm_skinny_{layout}_{width}", tile, *_divide(k, wanted), swapped=swapped, kinds=True)


def _splits(gpu: Gpu, mnk: tuple[int, int, int], batch: int, tile: Tile) -> tuple[int, int]:
    """Return splits of K and K of each: enough for all compute units, while each split is worth its launch."""
    m, n, k = mnk
    wanted = min(gpu.compute_units // _count(m, n, tile), k // _MIN_K_PER_SPLIT, _MAX_SPLITS)
    return _divide(k, 1 if batch > 1 else wanted)


def _divide(k: int, wanted: int) -> tuple[int, int]:
    if wanted < 2:
        return 1, 0
    per_split = -(-k // wanted // _DEPTH) * _DEPTH
    return -(-k // per_split), per_split


def _count(m: int, n: int, tile: Tile) -> int:
    return -(-m // tile.m) * -(-n // tile.n)
