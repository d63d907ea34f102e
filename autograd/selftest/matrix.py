"""Self-test cases of kernels on tensor cores, for devices that have them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from wgrad.autograd.selftest import lora
from wgrad.autograd.selftest.attention import attention_case
from wgrad.autograd.selftest.case import BF16, F16, F32, Case, Inputs, Outputs, switched
from wgrad.autograd.selftest.delta_rule import matrix_rule_cases
from wgrad.autograd.selftest.experts import grouped_case
from wgrad.autograd.selftest.gemm import gemm_case
from wgrad.autograd.selftest.linear import frozen_case, stacked_cases
from wgrad.device.contract import Device
from wgrad.device.formats.frozen_weight import formats


def matrix_cases() -> list[Case]:
    """Return cases in addition to `cases`, many of which run on tensor cores too."""
    return product_cases() + decoded_cases() + skinny_cases() + attention_cases() + expert_cases() + matrix_rule_cases()


def trusted_cases() -> list[Case]:
    """Return the cases that decide whether a GPU's tensor cores are right: all forms of kernels, but few formats.

    A run checks its own format (verify.py). Q4_K represents formats that are decoded 16 elements at a time.
    """
    others = formats().keys() - {"nf4", "q4_k"}
    names = {f"linear_{format}{direction}" for format in others for direction in ("", "_backward")}
    return [case for case in matrix_cases() if case.name.split("/")[0] not in names]


def decoded_cases() -> list[Case]:
    """Return cases of frozen weights.

    With many rows, the weight is decoded first. With fewer, each tile decodes it, also of as few rows as one token of
    several prompts has.
    """
    options: dict[str, Any] = {"rank": 16, "double": True}
    rows = (264, 15, 40, 100)  # with fewer outputs, the reference's error may be too small for a limit
    within = [
        frozen_case(format, "decoded within", rows[(i + 2 * b) % len(rows)], 264, 288, F16, backward=b, rank=16)
        for i, format in enumerate(formats())
        for b in (False, True)
    ]
    many = [frozen_case("nf4", "decoded", 520, 72, 136, F16, backward=b, **options) for b in (False, True)]
    few = [
        frozen_case("nf4", "few rows", 13, 136, 1096, F16, **options),
        frozen_case("nf4", "few rows", 3, 1096, 136, F16, backward=True, **options),
        *(frozen_case("nf4", "few rows", rows, 136, 264, F16, **options) for rows in (21, 40, 100)),
        gemm_case("few rows", 1, 136, 72, F16),
        gemm_case("few rows", 40, 136, 264, F16, trans_b=True),
        gemm_case("few rows", 21, 136, 72, F16, BF16, trans_b=True, dtype=F32),
    ]
    tiles = ((True, ""), (False, "large"), (True, "large"))
    blocks = [
        on_tile(frozen_case("nf4", "in blocks", 520, 80, 272, F16, backward=b, **options), tile) for b, tile in tiles
    ]
    return [*(on_tile(case, "") for case in many + within + few), *blocks]


def skinny_cases() -> list[Case]:
    """Return cases of GEMMs with LoRA's rank: float16 with float32 operands, at full float32 precision."""
    shapes = [
        gemm_case("skinny", 208, 20, 624, F16, F32, trans_b=True, alpha=0.37, dtype=F32),
        gemm_case("skinny", 208, 16, 624, F16, F32, dtype=F32),
        gemm_case("skinny", 16, 624, 208, F32, F16, trans_a=True, accumulate=F32, dtype=F32, alpha=1.7),
        gemm_case("skinny", 624, 20, 208, F16, F32, trans_a=True, accumulate=F32, dtype=F32),
        gemm_case("skinny", 64, 64, 4112, F16, F32, trans_b=True, dtype=F32),
        # A side so long that a workgroup takes two or four tensor-core tiles of it, with a remainder.
        gemm_case("skinny", 8208, 20, 48, F16, F32, trans_b=True, dtype=F32),
        gemm_case("skinny", 4112, 16, 48, F16, F32, dtype=F32),
        gemm_case("skinny", 8208, 20, 48, F16, F32, trans_a=True, dtype=F32),
    ]
    return [
        on_tile(case, "") for case in shapes + lora.cases(F16, lora.UNITS) + lora.cases_of_both(F16, lora.BOTH_UNITS)
    ]


def expert_cases() -> list[Case]:
    """Return cases of grouped GEMMs: on each tile, with experts that fill it partly; dequantized first; row by row."""
    found = []
    for side, gather in (("forward", True), ("backward", False)):
        found += [
            grouped_case(side, "32 x 64", (41, 3, 2, 136, 136), F16, gather=gather, format="nf4", double=True),
            grouped_case(side, "64 x 64", (70, 3, 2, 136, 136), F16, gather=gather, format="q6_k"),
            grouped_case(side, "128 x 128", (115, 3, 2, 136, 136), F16, gather=gather, format="nf4"),
            grouped_case(side, "tall", (196, 3, 2, 136, 136), F16, gather=gather, weight=F16),
            grouped_case(side, "tall", (220, 3, 2, 136, 128), F16, gather=gather, format="nf4", double=True),
            grouped_case(side, "taller", (262, 2, 2, 136, 160), F16, gather=gather, format="mxfp4"),
            grouped_case(side, "taller", (190, 3, 2, 136, 136), F16, gather=gather, format="nf4"),
            grouped_case(side, "taller", (262, 2, 2, 136, 160), F16, gather=gather, format="nf4", double=True),
            grouped_case(side, "high", (152, 3, 2, 136, 136), F16, gather=gather, format="nf4", double=True),
            grouped_case(side, "dequantized", (520, 2, 2, 144, 128), F16, gather=gather, format="nf4", double=True),
        ]
    for format in ("nf4", "mxfp4"):
        found.append(grouped_case("forward", "one by one", (2, 17, 2, 136, 160), F16, gather=True, format=format))
    found.append(grouped_case("forward", "one has all", (272, 2, 2, 72, 128), F16, format="nf4", one_has_all=True))
    return found + expert_rank_cases()


def expert_rank_cases() -> list[Case]:
    """Return cases of the GEMMs of experts' LoRA: float16 with float32 operands, or float32 rounded to float16."""
    of_x: dict[str, Any] = {"gather": True, "dy": F32}
    return [
        grouped_case("weight_grad", "ranks", (70, 4, 2, 16, 136), F16, **of_x),
        grouped_case("weight_grad", "ranks", (520, 2, 2, 20, 72), F16, **of_x, add=True),
        grouped_case("weight_grad", "ranks", (70, 3, 2, 136, 12), F32, dy=F16, add=True, one_has_all=True),
        grouped_case("forward", "ranks", (70, 3, 2, 20, 136), F16, gather=True, dtype=F32),
        grouped_case("backward", "ranks", (70, 3, 2, 136, 16), F16, dtype=F32),
        grouped_case("forward", "ranks", (70, 3, 2, 136, 8), F32, add=True, dtype=F16),
        grouped_case("backward", "ranks", (70, 3, 2, 24, 136), F32, dtype=F16),
    ]


def attention_cases() -> list[Case]:
    """Return cases of attention: widths; many tiles; prefill; and scores that rise or fall along the keys.

    Tiles are walked from the last to the first, so that falling scores rescale the sums.
    """
    return [
        attention_case("rising", (1, 133, 2, 1, 64), F16, rising=40.0),
        attention_case("falling", (1, 133, 2, 1, 64), F16, rising=-40.0),
        attention_case("rising window", (2, 70, 4, 2, 32), F16, rising=40.0, window=37),
        attention_case("prefill on a cache", (1, 48, 4, 2, 128), F16, keys=200, cache_len=100),
        *(attention_case("packed", (1, 200, 4, 1, 128), F16, documents=4, backward=back) for back in (False, True)),
        *(attention_case("window", (2, 133, 4, 2, 32), F16, window=70, backward=back) for back in (False, True)),
        # Enough heads for workgroups of 128 queries.
        attention_case("many", (8, 133, 32, 8, 64), F16),
        *(attention_case("many", (8, 133, 32, 8, 128), F16, documents=2, backward=back) for back in (False, True)),
        _with_tile(attention_case("many", (8, 133, 32, 8, 128), F16, documents=2), "large"),
        # Rows that are loaded into registers in three parts.
        *(attention_case("many", (8, 133, 32, 8, 96), F16, backward=back) for back in (False, True)),
        _with_tile(attention_case("many", (8, 133, 32, 8, 96), F16), "large"),
    ]


def product_cases() -> list[Case]:
    """Return cases of float16 GEMMs in every form that tensor cores take, on each tile, with and without a remainder of
    K. Sides are at least 64, and rows start at multiples of 8 elements."""
    found: list[Case] = []
    for tile in ("medium", "large"):
        forms = [(False, False), (False, True), (True, False), (True, True)]
        plain = [gemm_case("plain", 264, 136, k, F16, trans_a=ta, trans_b=tb) for ta, tb in forms for k in (136, 256)]
        found += [on_tile(case, tile) for case in plain + _matrix_epilogues() + _matrix_frozen()]
    found += [on_tile(case, "two") for case in _two_at_once()]
    found.append(on_tile(gemm_case("many columns", 264, 16640, 40, F16, trans_b=True), "large"))
    found.append(on_tile(gemm_case("split", 72, 136, 4104, F16, trans_b=True, dtype=F32), ""))
    found.append(on_tile(gemm_case("split lowrank", 72, 136, 1032, F16, trans_b=True, rank=16), ""))
    return found


def _two_at_once() -> list[Case]:
    """Return cases of the tile that runs twice on a compute unit: rounded or transposed operands, many columns."""
    return [
        gemm_case("lowrank", 200, 264, 72, F16, trans_b=True, rank=16, residual=F16),
        gemm_case("lowrank", 136, 200, 136, F16, rank=16),
        gemm_case("accumulate", 136, 264, 72, F16, trans_a=True, accumulate=F32, dtype=F32, alpha=1.7),
        gemm_case("bfloat16", 72, 264, 104, F16, BF16, trans_b=True, dtype=F32),
        gemm_case("bfloat16", 72, 264, 104, F16, BF16),
    ]


def _matrix_epilogues() -> list[Case]:
    return [
        gemm_case("long inner", 72, 136, 4104, F16, trans_b=True, dtype=F32),
        gemm_case("short inner", 72, 136, 40, F16, trans_b=True),
        gemm_case("epilogue", 200, 136, 96, F16, trans_b=True, alpha=0.37, bias=True, residual=F32, rank=20, dtype=F32),
        gemm_case("lowrank", 200, 136, 72, F16, rank=40, residual=F16),
        gemm_case("lowrank", 136, 200, 72, F16, trans_a=True, rank=7),
        gemm_case("accumulate", 136, 264, 72, F16, trans_a=True, accumulate=F32, dtype=F32, alpha=1.7),
        gemm_case("batched", 72, 136, 104, F16, batch=3, trans_b=True),
        gemm_case("bfloat16", 72, 264, 104, F16, BF16, trans_b=True, dtype=F32),
        gemm_case("bfloat16", 72, 264, 104, F16, BF16),
    ]


def _matrix_frozen() -> list[Case]:
    """Return cases of every format, and of features that only NF4 has: nested scales, rows that end within a tile."""
    shapes: list[tuple[str, str, int, int, int, dict[str, Any]]] = [
        *((format, "plain", 136, 264, 128, {}) for format in formats()),
        ("nf4", "lowrank 16", 264, 136, 192, {"rank": 16, "double": True}),
        ("nf4", "rest of K", 72, 136, 264, {"double": True}),
    ]
    plain = [
        frozen_case(format, name, m, n, k, F16, backward=backward, **options)
        for backward in (False, True)
        for format, name, m, n, k, options in shapes
    ]
    return plain + [case for case in stacked_cases(F16) if "lowrank" in case.name]


def _with_tile(case: Case, tile: str) -> Case:
    def call(device: Device, x: Inputs) -> Outputs:
        with switched(device, "matrix_tile", tile):
            return case.call(device, x)

    return replace(case, name=f"{case.name}/{tile or 'any'} tile", call=call)


def on_tile(case: Case, tile: str) -> Case:
    """Return the case with all GEMMs on the tile of this name, if the device has it."""
    # Tensor cores truncate sums of 16 products, where others round: the errors have one sign and add up.
    inner = int(case.shape.split("x")[1 if case.direction == "backward" else 2])
    return replace(_with_tile(case, tile), ulps=case.ulps + inner / 32)
