"""Weights of compressed-tensors, ModelOpt, GPTQ, AWQ and others: each as its format's rules restore it, packed here
number by number."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.tools import oracle_package
from wgrad.autograd.reference import ReferenceDevice
from wgrad.device.errors import WgradError
from wgrad.device.formats.nf4 import NF4Array
from wgrad.train.files import packed_files
from wgrad.train.files.nf4_files import FP4_KEY, STATE_KEY
from wgrad.train.files.safetensors_files import read_entries
from wgrad.train.model.linear_files import with_transposed
from wgrad.train.model.load_config import load_model_config, parse_model_config
from wgrad.train.model.model_files import open_files
from wgrad.train.step.build import build_frozen

BF16, F16, E4M3 = ml_dtypes.bfloat16, np.float16, ml_dtypes.float8_e4m3fn
GROUP, BLOCK = 8, (24, 16)
AWQ_PLACES = (0, 2, 4, 6, 1, 3, 5, 7)
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
Parts = dict[str, np.ndarray]
Made = tuple[Parts, np.ndarray]  # a module's tensors, and its weight in float32


def in_words(codes: np.ndarray, bits: int, places: tuple[int, ...] | None = None) -> np.ndarray:
    """Pack codes [n, m] into int32 [n, words], with consecutive codes of a row in one word."""
    per = 32 // bits
    words = [[0] * -(-codes.shape[1] // per) for _ in codes]
    for row, values in enumerate(codes):
        for column in range(codes.shape[1]):
            word, number = divmod(column, per)
            slot = number if places is None else places.index(number)
            words[row][word] |= int(values[column]) << (bits * slot)
    return np.array(words, np.uint32).view(np.int32)


def rounded(values: np.ndarray, dtype: Any) -> np.ndarray:
    return values.astype(dtype).astype(np.float32)


def scaled(shape: tuple[int, int], draw: np.random.Generator, kind: Any, block: tuple[int, int], dtype: Any) -> Made:
    """Codes of 8 bits, with a scale of each block, and of whole numbers a zero point."""
    scales = [-(-n // b) for n, b in zip(shape, block)]
    codes = draw.standard_normal(shape).astype(np.float32) * 20
    codes = codes.astype(E4M3) if kind is E4M3 else codes.astype(np.int8)
    own = (0.002 * (1 + draw.random(scales))).astype(dtype)
    places = [np.arange(n) // b for n, b in zip(shape, block)]
    wide = own.astype(np.float32)[places[0]][:, places[1]]
    zeros = draw.integers(-9, 9, scales).astype(np.int8) * (kind is np.int8)
    values = codes.astype(np.float32) - zeros[places[0]][:, places[1]]
    parts = {"weight": codes, "weight_scale": own.reshape(1) if own.size == 1 else own}
    parts |= {"weight_zero_point": zeros} if kind is np.int8 else {"input_scale": np.ones(1, np.float32)}
    return parts, rounded(values * wide, BF16 if dtype is np.float32 else dtype)


def fp8_rows(shape: tuple[int, int], draw: np.random.Generator) -> Made:
    return scaled(shape, draw, E4M3, (1, shape[1]), BF16)


def fp8_whole(shape: tuple[int, int], draw: np.random.Generator) -> Made:
    return scaled(shape, draw, E4M3, shape, np.float32)


def fp8_blocks(shape: tuple[int, int], draw: np.random.Generator) -> Made:
    return scaled(shape, draw, E4M3, BLOCK, BF16)


def int8_rows(shape: tuple[int, int], draw: np.random.Generator) -> Made:
    return scaled(shape, draw, np.int8, (1, shape[1]), BF16)


def int4(shape: tuple[int, int], draw: np.random.Generator, uneven: bool = False) -> Made:
    """compressed-tensors' pack-quantized. uneven: with zero points, and columns in any group."""
    (rows, columns), groups = shape, shape[1] // GROUP
    codes, scales = draw.integers(-8, 8, shape), draw.random((rows, groups)).astype(BF16)
    place = np.arange(columns) // GROUP
    parts = {
        "weight_packed": in_words(codes + 8, 4),
        "weight_scale": scales,
        "weight_shape": np.array(shape, np.int64),
        "weight_g_idx": np.full(columns, -1, np.int32),  # as compressed-tensors has it where columns are in order
    }
    zeros = np.zeros((rows, groups), np.int64)
    if uneven:
        zeros, place = draw.integers(-8, 8, (rows, groups)), draw.permutation(place)
        parts["weight_zero_point"] = np.ascontiguousarray(in_words((zeros + 8).T, 4).T)
        parts["weight_g_idx"] = place.astype(np.int32)
    wanted = (codes - zeros[:, place]) * scales.astype(np.float32)[:, place]
    return parts, rounded(wanted.astype(np.float32), BF16)


def gptq(shape: tuple[int, int], draw: np.random.Generator, bits: int = 4, less: int = 1, order: bool = False) -> Made:
    (rows, columns), groups = shape, shape[1] // GROUP
    codes = draw.integers(0, 1 << bits, (columns, rows))
    zeros, scales = draw.integers(0, 1 << bits, (groups, rows)), draw.random((groups, rows)).astype(F16)
    place = np.arange(columns) // GROUP
    place = draw.permutation(place) if order else place
    stored = (zeros - less) % (1 << bits)
    parts = {
        "qweight": np.ascontiguousarray(in_words(codes.T, bits).T),
        "qzeros": in_words(stored, bits),
        "scales": scales,
        "g_idx": place.astype(np.int32),
    }
    wanted = (codes - zeros[place]) * scales.astype(np.float32)[place]
    return parts, rounded(wanted.T.astype(np.float32), F16)


def gptq_in_order(shape: tuple[int, int], draw: np.random.Generator) -> Made:
    return gptq(shape, draw, order=True)


def gptq_v2(shape: tuple[int, int], draw: np.random.Generator) -> Made:
    return gptq(shape, draw, bits=8, less=0)


def awq(shape: tuple[int, int], draw: np.random.Generator) -> Made:
    (rows, columns), groups = shape, shape[1] // GROUP
    codes, zeros = draw.integers(0, 16, (columns, rows)), draw.integers(0, 16, (groups, rows))
    scales, place = draw.random((groups, rows)).astype(F16), np.arange(columns) // GROUP
    parts = {"qweight": in_words(codes, 4, AWQ_PLACES), "qzeros": in_words(zeros, 4, AWQ_PLACES), "scales": scales}
    wanted = (codes - zeros[place]) * scales.astype(np.float32)[place]
    return parts, rounded(wanted.T.astype(np.float32), F16)


def uneven_int4(shape: tuple[int, int], draw: np.random.Generator) -> Made:
    return int4(shape, draw, uneven=True)


def in_pairs(codes: np.ndarray) -> np.ndarray:
    """Codes of 4 bits as floats in uint8, and the numbers that they are."""
    return (codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8)


def nvfp4(shape: tuple[int, int], draw: np.random.Generator) -> Made:
    """Scales in E4M3, which a number in float32 divides."""
    codes, whole = draw.integers(0, 16, shape), np.array([draw.uniform(3, 9)], np.float32)
    scales = draw.uniform(0.1, 2, (shape[0], shape[1] // GROUP)).astype(E4M3)
    wide = np.repeat(scales.astype(np.float32) / whole, GROUP, axis=1)
    parts = {"weight_packed": in_pairs(codes), "weight_scale": scales, "weight_global_scale": whole}
    parts["input_global_scale"] = np.ones(1, np.float32)
    return parts, rounded(E2M1[codes] * wide, BF16)


def mxfp4(shape: tuple[int, int], draw: np.random.Generator) -> Made:
    codes, powers = draw.integers(0, 16, shape), draw.integers(118, 130, (shape[0], shape[1] // GROUP))
    parts = {"weight_packed": in_pairs(codes), "weight_scale": powers.astype(np.uint8)}
    return parts, E2M1[codes] * np.repeat(2.0 ** (powers - 127), GROUP, axis=1).astype(np.float32)


def mxfp8(shape: tuple[int, int], draw: np.random.Generator) -> Made:
    codes = (draw.standard_normal(shape) * 20).astype(E4M3)
    powers = draw.integers(118, 130, (shape[0], shape[1] // GROUP))
    parts = {"weight": codes, "weight_scale": powers.astype(np.uint8)}
    return parts, codes.astype(np.float32) * np.repeat(2.0 ** (powers - 127), GROUP, axis=1).astype(np.float32)


def mixed(shape: tuple[int, int], draw: np.random.Generator) -> Made:
    """Each module in one of three formats, two of which have words of other bits."""
    if shape[0] > shape[1]:
        return int4(shape, draw)
    if shape[0] == shape[1]:
        return nvfp4(shape, draw)
    codes, scales = draw.integers(-128, 128, shape), draw.random((shape[0], 1)).astype(BF16)
    parts = {"weight_packed": in_words(codes + 128, 8), "weight_scale": scales, "weight_shape": np.array(shape)}
    return parts, rounded((codes * scales.astype(np.float32)).astype(np.float32), BF16)


def modelopt_nvfp4(shape: tuple[int, int], draw: np.random.Generator) -> Made:
    """Scales in E4M3, which a number in float32 multiplies."""
    codes, whole = draw.integers(0, 16, shape), np.float32(draw.uniform(0.001, 0.1))
    scales = draw.uniform(1, 300, (shape[0], shape[1] // GROUP)).astype(E4M3)
    wide = np.repeat(scales.astype(np.float32) * whole, GROUP, axis=1)
    parts = {"weight": in_pairs(codes), "weight_scale": scales, "weight_scale_2": np.array(whole)}
    return parts | {"input_scale": np.ones((), np.float32)}, rounded(E2M1[codes] * wide, BF16)


def modelopt_fp8(shape: tuple[int, int], draw: np.random.Generator) -> Made:
    codes, scale = (draw.standard_normal(shape) * 20).astype(E4M3), np.float32(draw.random())
    parts = {"weight": codes, "weight_scale": np.array(scale), "input_scale": np.ones((), np.float32)}
    return parts, rounded(codes.astype(np.float32) * scale, BF16)


def fbgemm(shape: tuple[int, int], draw: np.random.Generator) -> Made:
    codes, scales = (draw.standard_normal(shape) * 20).astype(E4M3), draw.random((shape[0], 1)).astype(np.float32)
    parts = {"weight": codes, "weight_scale": scales, "input_scale_ub": np.array([1200.0], np.float32)}
    return parts, rounded(codes.astype(np.float32) * scales, BF16)


def of_bitsandbytes(shape: tuple[int, int], draw: np.random.Generator) -> Made:
    """A scale of each row: its largest number, which is 127."""
    codes, largest = draw.integers(-127, 128, shape).astype(np.int8), draw.random(shape[0]).astype(np.float32)
    wanted = codes.astype(np.float32) * largest[:, None] * np.float32(1 / 127)
    return {"weight": codes, "SCB": largest, "weight_format": np.zeros((), np.uint8)}, rounded(wanted, F16)


def compressed(kind: str, **weights: Any) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", **weights}}}
    return {"quant_method": "compressed-tensors", "format": kind, "config_groups": groups, "ignore": ["lm_head"]}


def several(more: dict[str, Any]) -> dict[str, Any]:
    """Groups of modules: one of 4 bits in blocks of 24 x 16, and another."""
    own = {"weights": {"num_bits": 4, "type": "int", "block_structure": BLOCK}}
    return {"config_groups": {"group_0": own, "group_1": more}}


INT4 = compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=GROUP)
MIXED = {
    "group_0": {"format": "pack-quantized", "weights": {"num_bits": 4, "type": "int"}},
    "group_1": {"format": "pack-quantized", "weights": {"num_bits": 8, "type": "int"}},
    "group_2": {"format": "nvfp4-pack-quantized", "weights": {"num_bits": 4, "type": "float"}},
}
CASES: dict[str, tuple[Callable[..., Made], dict[str, Any]]] = {
    "fp8 rows": (fp8_rows, compressed("float-quantized", strategy="channel")),
    "fp8 whole": (fp8_whole, compressed("float-quantized", strategy="tensor")),
    "fp8 blocks": (fp8_blocks, compressed("float-quantized", strategy="block", block_structure=BLOCK)),
    "fp8 rows beside blocks": (fp8_rows, compressed("float-quantized", strategy="block", block_structure=BLOCK)),
    "int8 rows": (int8_rows, compressed("int-quantized", type="int", strategy="channel")),
    "int4": (int4, INT4),
    "int4 uneven": (uneven_int4, INT4),
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False}),
    "gptq in order": (gptq_in_order, {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq"}),
    "gptq of 8 bits": (gptq_v2, {"quant_method": "gptq", "bits": 8, "checkpoint_format": "gptq_v2"}),
    "nvfp4": (nvfp4, compressed("nvfp4-pack-quantized", num_bits=4)),
    "mxfp4": (mxfp4, compressed("mxfp4-pack-quantized", num_bits=4)),
    "mxfp8": (mxfp8, compressed("mxfp8-quantized")),
    "mixed": (mixed, compressed("mixed-precision") | {"config_groups": MIXED}),
    "modelopt nvfp4": (modelopt_nvfp4, {"quant_method": "modelopt", "quant_algo": "NVFP4"}),
    "modelopt fp8": (modelopt_fp8, {"quant_method": "modelopt", "quant_algo": "FP8"}),
    "fbgemm": (fbgemm, {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}),
    "bitsandbytes": (of_bitsandbytes, {"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False}),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "version": "gemm", "zero_point": True}),
}


NAMES = {
    "float32": "F32",
    "bfloat16": "BF16",
    "float16": "F16",
    "int8": "I8",
    "uint8": "U8",
    "int32": "I32",
    "int64": "I64",
}


def write(path: Path, arrays: Parts) -> None:
    """A safetensors file, of 8-bit floats too."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, array in sorted(arrays.items(), key=lambda item: -item[1].itemsize):
        begin, data = len(data), data + np.ascontiguousarray(array).tobytes()
        kind = NAMES.get(array.dtype.name, "F8_E4M3")
        header[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": [begin, len(data)]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def pack(folder: Path, case: str) -> dict[str, np.ndarray]:
    """Convert the projections of a checkpoint to codes, and return the decoded weights by name."""
    make, scheme = CASES[case]
    draw, arrays, wanted = np.random.default_rng(4), dict[str, np.ndarray](), dict[str, np.ndarray]()
    for name, entry in read_entries(folder / "model.safetensors", "").items():
        module = name.removesuffix(".weight")
        if "_proj" not in name:
            arrays[name] = np.array(entry.array())
        elif len(entry.shape) == 3:  # each expert by itself
            halves = ("gate_proj", "up_proj") if "gate_up" in name else ("down_proj",)
            count, rows, columns = entry.shape
            each = []
            for number in range(count):
                for half in halves:
                    parts, made = make((rows // len(halves), columns), draw)
                    own = f"{module.rpartition('.')[0]}.{number}.{half}"
                    arrays |= {f"{own}.{part}": value for part, value in parts.items()}
                    each.append(made)
            wanted[module] = np.concatenate(each).reshape(entry.shape)
        else:
            parts, wanted[name] = make(entry.shape, draw)
            arrays |= {f"{module}.{part}": value for part, value in parts.items()}
    write(folder / "model.safetensors", arrays)
    raw = json.loads((folder / "config.json").read_text()) | {"quantization_config": scheme}
    (folder / "config.json").write_text(json.dumps(raw))
    return wanted


def test_bitsandbytes_has_gpt_2s_projections_as_out_and_in(make_checkpoint: Any) -> None:
    """Float weights, here those of other modules, are the other way. One of them is a square, which fits both ways."""
    folder, draw = make_checkpoint("GPT2LMHeadModel"), np.random.default_rng(4)
    arrays = {name: np.array(entry.array()) for name, entry in read_entries(folder / "model.safetensors", "").items()}
    wanted = {}
    for module in ("h.0.attn.c_proj", "h.1.mlp.c_fc"):
        shape = arrays.pop(f"transformer.{module}.weight").shape[::-1]
        parts, wanted[module] = of_bitsandbytes(shape, draw)
        arrays |= {f"transformer.{module}.{part}": value for part, value in parts.items()}
    write(folder / "model.safetensors", arrays)
    raw = json.loads((folder / "config.json").read_text()) | {"quantization_config": CASES["bitsandbytes"][1]}
    (folder / "config.json").write_text(json.dumps(raw))
    files, _, _ = open_files(folder, load_model_config(folder))
    for module, value in wanted.items():
        assert np.array_equal(files.entry(f"model.{module.replace('h.', 'layers.', 1)}.weight").array(), value)
    floats = files.entry("model.layers.0.mlp.c_fc.weight").array()
    assert np.array_equal(floats, arrays["transformer.h.0.mlp.c_fc.weight"].T)


def test_only_float_matrices_of_gpt_2_are_turned(make_checkpoint: Any) -> None:
    folder, name = make_checkpoint("GPT2LMHeadModel"), "model.layers.0.mlp.c_fc.weight"
    entries, config = read_entries(folder / "model.safetensors", ""), load_model_config(folder)
    matrix, vector = entries["transformer.h.0.mlp.c_fc.weight"], entries["transformer.h.0.ln_1.weight"]
    for kept, others in ((vector, {}), (matrix, {name + STATE_KEY: vector}), (matrix, {name + FP4_KEY: vector})):
        assert with_transposed({name: kept, **others}, config)[name] is kept
    turned = with_transposed({name: matrix}, config)[name]
    blocks = list(turned.blocks(5))
    assert turned.shape == matrix.shape[::-1] and {len(block) for block in blocks[:-1]} == {5}
    assert np.array_equal(np.concatenate(blocks), matrix.array().T)


@pytest.mark.parametrize("case", CASES)
def test_weights_are_those_of_the_formats_rules(
    case: str, make_checkpoint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_files, "_AT_ONCE", 300)
    folder = make_checkpoint("Qwen3MoeForCausalLM" if case in ("int4", "fp8 rows") else "LlamaForCausalLM",
                             moe_intermediate_size=40)  # fmt: skip
    wanted = pack(folder, case)
    config = load_model_config(folder)
    model = build_frozen(config, folder, ReferenceDevice(), positions=64, quantize=False)
    for name, values in wanted.items():
        found = model.weights[name]
        assert found.dtype == (F16 if case.startswith(("gptq", "awq", "bits")) else BF16)
        np.testing.assert_array_equal(found.astype(np.float32), values, err_msg=name)
    assert isinstance(
        build_frozen(config, folder, ReferenceDevice(), positions=64).weights["model.layers.1.self_attn.o_proj.weight"],
        NF4Array,
    )


def test_a_part_that_is_missing_or_does_not_fit_is_named(make_checkpoint: Any) -> None:
    folder = make_checkpoint()
    pack(folder, "gptq")
    arrays = {n: np.array(e.array()) for n, e in read_entries(folder / "model.safetensors", "").items()}
    name, first = "model.layers.0.mlp.up_proj", open_files(folder, load_model_config(folder))[0].digest()
    changes: dict[str, dict[str, Any]] = {
        "and no scales of it": {f"{name}.scales": None},
        "and no qzeros of it": {f"{name}.qzeros": None},
        r"is I32 \[6, 88\], which does not go with scales \[5, 88\]": {f"{name}.scales": arrays[f"{name}.scales"][:5]},
    }
    for message, change in changes.items():
        kept = {n: a for n, a in (arrays | change).items() if a is not None}
        write(folder / "model.safetensors", kept)
        with pytest.raises(WgradError, match=f"^--model: .*{re.escape(name)}.qweight.*{message}"):
            open_files(folder, load_model_config(folder))
    for part in ("qweight", "scales", "qzeros", "g_idx"):
        write(folder / "model.safetensors", arrays | {f"{name}.{part}": arrays[f"{name}.{part}"][::-1]})
        files = open_files(folder, load_model_config(folder))[0]
        assert files.digest() != first, part
    entry = files.entries[f"{name}.weight"]
    np.testing.assert_array_equal(np.concatenate([*entry.blocks(5)]), entry.array())


def test_biases_of_zeros_are_left_out(make_checkpoint: Any) -> None:
    """GPTQ's first tools wrote them for models that have none."""
    folder = make_checkpoint()
    pack(folder, "gptq")
    arrays = {n: np.array(e.array()) for n, e in read_entries(folder / "model.safetensors", "").items()}
    name, bias = "model.layers.0.mlp.up_proj.bias", np.zeros(88, F16)
    write(folder / "model.safetensors", arrays | {name: bias})
    files = open_files(folder, load_model_config(folder))[0]
    assert name not in files.entries and "model.layers.0.mlp.up_proj.weight" in files.entries
    bias[7] = 0.1
    write(folder / "model.safetensors", arrays | {name: bias})
    with pytest.raises(WgradError, match=f"has 1 tensor that LlamaForCausalLM, .* does not use: {re.escape(name)}"):
        open_files(folder, load_model_config(folder))


@pytest.mark.parametrize(
    ("scheme", "message"),
    [
        (compressed("mxfp6-pack-quantized", num_bits=6), "format 'mxfp6-pack-quantized' is not supported"),
        (compressed("nvfp4-pack-quantized"), "num_bits 8 is not supported: only 4 is"),
        (compressed("marlin-24", num_bits=4, type="int"), "format 'marlin-24' is not supported"),
        (compressed("float-quantized", num_bits=4), "num_bits 4 is not supported: only 8"),
        (compressed("pack-quantized", num_bits=3, type="int"), "num_bits 3 is not supported"),
        (INT4 | {"transform_config": {"config_groups": {"R1": {}}}}, "transform_config true is not supported"),
        (INT4 | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config 'sparse-24-bitmask'"),
        (compressed("dense") | several({"format": "marlin-24"}), "format 'marlin-24' is not supported"),
        (INT4 | several({"weights": {"num_bits": 3, "type": "int"}}), "num_bits 3 is not supported"),
        (INT4 | several({"weights": {"num_bits": 4, "block_structure": [8, 8]}}), "block_structure of several groups"),
        ({"quant_method": "awq", "w_bit": 3}, "bits 3 is not supported: only 4 is"),
        ({"quant_method": "gptq", "bits": 3}, "bits 3 is not supported: only 2 or 4 or 8 is"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version 'gemv' is not supported: only 'gemm' is"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo 'W4A8_AWQ' is not supported"),
        ({"quant_method": "modelopt"}, "quant_algo null is not supported"),
        ({"quant_method": "exl3", "bits": 3.5}, "quantized by 'exl3' .* cannot be read: use the unquantized model"),
        ({"quant_method": "hqq"}, r"quantized by 'hqq' \(load_in_4bit: false\) cannot be read"),
    ],
)
def test_other_formats_are_refused_by_their_key(scheme: dict[str, Any], message: str, make_config: Any) -> None:
    with pytest.raises(WgradError, match=rf"^config.json: .*{message}"):
        parse_model_config(make_config() | {"quantization_config": scheme})


def test_codes_of_other_bits_need_their_columns(make_checkpoint: Any) -> None:
    """Where modules have words of other bits, each says how many columns it has."""
    folder = make_checkpoint()
    pack(folder, "mixed")
    entries = read_entries(folder / "model.safetensors", "")
    arrays = {n: e.octets().view(E4M3) if e.dtype == "F8_E4M3" else np.array(e.array()) for n, e in entries.items()}
    shape = "model.layers.0.mlp.up_proj.weight_shape"
    for wrong in (None, np.array([88, 16])):
        kept = {n: a for n, a in (arrays | {shape: wrong}).items() if a is not None}
        write(folder / "model.safetensors", kept)
        with pytest.raises(
            WgradError, match=r"has model.layers.0.mlp.up_proj.weight_packed, and no weight_shape of it"
        ):
            open_files(folder, load_model_config(folder))


@pytest.mark.oracle
def test_eight_bits_are_those_of_bitsandbytes() -> None:
    torch, functional = oracle_package("torch"), oracle_package("bitsandbytes").functional
    parts, wanted = of_bitsandbytes((7, 40), np.random.default_rng(1))
    found = functional.int8_vectorwise_dequant(torch.tensor(parts["weight"]), torch.tensor(parts["SCB"]))
    np.testing.assert_array_equal(found.to(torch.float16).float().numpy(), wanted)
