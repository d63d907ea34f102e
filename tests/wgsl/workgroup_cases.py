"""Cases of the self-test for each shader that has workgroup memory, small and with all that the shader declares."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from tests.wgsl.shader_files import FORMATS
from tests.wgsl.small_tiles import QUICK_MAIN, SMALL_EXPERTS, SMALL_LORA, SMALL_MEDIUM, SMALL_SKINNY
from tests.wgsl.workgroup_poison import Variable, variables
from wgrad.autograd.selftest.attention import attention_case
from wgrad.autograd.selftest.case import F16, F32, Case, Inputs
from wgrad.autograd.selftest.cases import cases
from wgrad.autograd.selftest.experts import grouped_case
from wgrad.autograd.selftest.gemm import gemm_case
from wgrad.autograd.selftest.int8 import int8_cases
from wgrad.autograd.selftest.matrix import matrix_cases, on_tile
from wgrad.autograd.selftest.transposed import transposed_cases
from wgrad.wgsl.attention import attention_matrix
from wgrad.wgsl.attention.attention_matrix import MatrixRows
from wgrad.wgsl.attention.attention_matrix_keys import MatrixKeys
from wgrad.wgsl.attention.attention_plan import Plan, Tile
from wgrad.wgsl.gemm import gemm_matrix, gemm_matrix_lora, gemm_matrix_skinny, gemm_skinny, gemm_tile
from wgrad.wgsl.moe import grouped
from wgrad.wgsl.runtime import compile as wgsl_compile

# Masked at both ends of a tile of keys, and between documents.
_ATTENTION = [
    attention_case("poisoned", (1, 41, 2, 1, width), t, documents=2, window=13, backward=backward)
    for width, t in ((10, F32), (32, F16))
    for backward in (False, True)
]
# Tiles are walked from the last, so the maximum of a row rises from tile to tile, and its sums are scaled again. With
# so few rows V and K of a tile take turns (use_small_tiles).
_FALLING = attention_case("poisoned", (1, 41, 1, 1, 32), F16, keys=150, cache_len=109, rising=-150.0)
# Three rounds of tiles of keys, where two are loaded ahead.
_ROUNDS = attention_case("poisoned", (1, 107, 1, 1, 32), F16, backward=True)
_DECODING = attention_case("poisoned", (2, 1, 4, 2, 64), F32, keys=53, cache_len=41, window=13)


def _grouped(*rows: int) -> Case:
    """Return a case of a grouped GEMM whose experts have so many rows."""
    case = grouped_case("forward", "poisoned", (sum(rows) // len(rows), len(rows), len(rows), 72, 128), F16)

    def build(rng: np.random.Generator) -> Inputs:
        return {**case.build(rng), "start": np.cumsum((0, *rows), dtype=np.int32)}

    return replace(case, build=build)


# The first expert has a tile of 32 rows and up to 32 more, the second fewer than a tile.
_EXPERTS = _grouped(60, 10)
_RANKS_LAST = on_tile(gemm_case("poisoned lowrank", 72, 72, 72, F16, rank=40), "medium")
_OWN = [*_ATTENTION, _FALLING, _ROUNDS, _DECODING, _EXPERTS, _RANKS_LAST]
_CASES = [*cases(), *matrix_cases(), *int8_cases(False), *transposed_cases(False), *_OWN]
BY_NAME = {case.name: case for case in _CASES}
_BACKWARD = ["attention_backward/poisoned/1x41x2x1x10/float32"]
_MATRIX_BACKWARD = ["attention_backward/poisoned/1x41x2x1x32/float16"]
_DELTA_RULE = ["delta_rule/packed/2x133x1x2x10x6/float32", "delta_rule_backward/packed/2x133x1x2x10x6/float32"]
_MATRIX_RULE = ["delta_rule/matrix/1x214x1x2x64x64/float16", "delta_rule_backward/matrix/1x214x1x2x64x64/float16"]
# Few, of sizes that divide no tile, with all that a shader declares and all its entry points.
CASES = {
    "attention": ["attention/poisoned/1x41x2x1x10/float32"],
    "attention_backward_dkv": _BACKWARD,
    "attention_backward_dq": _BACKWARD,
    "attention_decode": ["attention/poisoned/2x1x4x2x64,53/float32"],
    "attention_delta": _BACKWARD,
    "attention_matrix": ["attention/poisoned/1x41x2x1x32/float16", _FALLING.name],
    "attention_matrix_dkv": _MATRIX_BACKWARD,
    "attention_matrix_dq": _MATRIX_BACKWARD,
    "attention_matrix_dq_stored": [*_MATRIX_BACKWARD, _ROUNDS.name],
    "decoding_sample": ["sample/rows/6x1003", "sample/greedy/123/0.5"],
    **dict.fromkeys(("delta_rule_output", "delta_rule_system"), _DELTA_RULE[:1]),
    "delta_rule_scan": [_DELTA_RULE[0], "delta_rule/wide/1x70x1x1x72x68/float32"],
    **dict.fromkeys(("delta_rule_channels", "delta_rule_grads", "delta_rule_scan_backward"), _DELTA_RULE[1:]),
    **dict.fromkeys((f"delta_rule_{n}_matrix" for n in ("output", "system")), _MATRIX_RULE[:1]),
    "delta_rule_scan_matrix": [_MATRIX_RULE[0], "delta_rule/matrix from a state/2x70x1x2x64x64/float16"],
    **dict.fromkeys((f"delta_rule_{n}_matrix" for n in ("grads", "scan_backward")), _MATRIX_RULE[1:]),
    **dict.fromkeys(("ssd_channels", "ssd_grads"), ["ssd_backward/packed/2x133x1x2x10x6/float32"]),
    "selective_scan_ends": [
        "selective_scan/packed/2x133x21x5/float32",
        "selective_scan_backward/packed/2x133x21x5/float32",
    ],
    "selective_scan_output": ["selective_scan/packed/2x133x21x5/float32", "selective_scan/wide/1x70x6x37/float32"],
    "selective_scan_grads": ["selective_scan_backward/packed/2x133x21x5/float32"],
    "ssd_step": ["ssd/a step on a state/2x1x2x4x12x10/float32"],
    "delta_rule_step": ["delta_rule/a step on a state/2x1x2x4x12x10/float32"],
    "fused": ["fused over 0,2/3x37x53/float32"],
    "gemm": [
        "gemm_nn/batched/3x17x29x31/float32",
        "linear_nf4_backward/row lowrank double/1x72x128/float32",
        "grouped_linear/float32 rows/70x5x2x72x68/float32",
    ],
    "gemm_int8": ["linear_q8_0/int8 lowrank/260x132x96/float32", "linear_q8_0/int8 long/128x64x2112/float32"],
    "gemm_int8_pack": ["linear_nf4/int8 double/133x136x200/float32"],
    "gemm_matrix": [
        _EXPERTS.name,
        _RANKS_LAST.name,
        "linear_nf4_backward/lowrank 16 double/264x136x192/float16/medium tile",
        "linear_iq3_xxs/plain/136x264x256/float16/medium tile",
    ],
    "gemm_matrix_lora": [
        "lora_grads/stack of 3/75x320x12/float16/any tile",
        "lora_grads/stack of 1/270x208x16/float16/any tile",
    ],
    "gemm_matrix_skinny": [
        "gemm_nt/skinny/208x20x624/float16*float32/any tile",
        "gemm_tn/skinny/16x624x208/float32*float16/any tile",
        "grouped_weight_grad/float32 ranks/70x4x2x16x136/float16",
        "grouped_linear_backward/float32 ranks/70x3x2x136x16/float16",
    ],
    "gemm_skinny": ["lora_du/stack of 2/37x192x5/float32", "lora_db/stack of 3/131x384x8/float32"],
    "gemm_transpose": ["gemm_nn/transposed/131x67x75/float32"],
    "gemv": [
        "gemm_nt/few rows/8x35x1003/float32",
        "linear_nf4/row double/1x130x192/float32",
        *(f"linear_{name}/row/1x130x192/float32" for name in ("mxfp4", "nvfp4")),
        "linear_iq3_xxs/row/1x130x256/float32",
    ],
    "loss_cross_entropy": ["linear_cross_entropy/one token/1x123x40/float32"],
    "moe_combine": ["combine_backward/plain/5x2x68/float32"],
    "moe_group": ["group_by_expert/5x7x2"],
    "moe_keep": ["keep_experts/5x9x2x4", "keep_experts/200x300x4x270"],
    "moe_place": ["place_experts/1x9x2x5"],
    "moe_route": ["route/chosen/5x7x2/float32", "route/all/41x130x8/float32", "route_backward/all/41x130x8/float32"],
    "moe_weight_grad": [  # the first workgroups have rows, and those of a second tile
        "grouped_weight_grad/float32 flat/50x3x2x67x8/float32",
        "grouped_weight_grad/float32 tiles/33x4x2x36x40/float32",
    ],
    "norm_layer": ["layer_norm/plain/7x123/float32>float32", "layer_norm_backward/plain/7x123/float32>float32"],
    "norm_rms": ["rms_norm/plain/7x123/float32>float32"],
    "norm_rms_backward": ["rms_norm_backward/residual/41x123/float32>float32"],
    "quantize_decode": ["nf4_dequantize/double/35x67/float32", "iq3_xxs_dequantize/plain small/37x256/float32"],
    "quantize_nf4": ["nf4_quantize/block 64/35x67/float32"],
    "quantize_nf4_nested": ["nf4_quantize/double block 64/35x67/float32"],
    "reduce": ["sum/7x123/float32", "grad_norm/finite/1003"],
    "reduce_rows": ["sum_rows/7x123/float32", "sum_rows/1x1/float32"],
    "round_q4_k": ["round_weight/q4_k/27x768/float32"],
    "round_q6_k": ["round_weight/q6_k/27x768/float32"],
    "softmax": ["softmax/5x123/float32", "softmax_backward/5x123/float32"],
}


@cache
def declared(shader: str) -> set[Variable]:
    """The workgroup memory of all variants of a shader, with every weight format."""
    texts = (wgsl_compile.read_source(f"{shader}.wgsl", {"B_FORMAT": name}) for name in sorted(FORMATS))
    return {variable for text in texts for variable in variables(text)}


def use_small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take tiles that a software driver compiles soon."""
    monkeypatch.setattr(gemm_tile, "MAIN", QUICK_MAIN)
    monkeypatch.setattr(gemm_matrix, "MEDIUM", SMALL_MEDIUM)
    monkeypatch.setattr(gemm_matrix_lora, "TILE", SMALL_LORA)
    monkeypatch.setattr(gemm_matrix_lora, "_AT_ONCE", 6)  # so that shares have several tiles
    for name in ("_NARROW", "_WIDE"):
        monkeypatch.setattr(gemm_matrix_skinny, name, SMALL_SKINNY)
    monkeypatch.setattr(gemm_matrix_skinny, "_tiles", lambda product: (SMALL_SKINNY,))
    monkeypatch.setattr(gemm_skinny, "_THREADS", 64)
    monkeypatch.setattr(grouped, "_matrix_tile", lambda *_: SMALL_EXPERTS)
    forward = ((0, MatrixRows(2, least_groups=2)), (0, MatrixRows(2, in_turns=True)))
    tiles = {"forward": forward, "dq": ((0, MatrixRows(2)),), "dkv": ((0, MatrixKeys(2)),)}
    monkeypatch.setattr(attention_matrix, "TILES", tiles)


def prepare(shader: str, device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a device take the shader for its cases."""
    tile = Tile(32, 32, 8, 8, 8, 4)
    plan = None if shader == "attention_decode" else Plan(tile, tile, tile, wanted_groups=1)
    monkeypatch.setattr(device, "attention_plan", plan)
    if shader == "attention_matrix_dq":
        monkeypatch.setattr(device, "scratch_bytes", 0)  # so that it is taken
