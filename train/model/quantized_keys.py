"""The key `quantization_config` of config.json: the format of a model's quantized weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from wgrad.device.errors import WgradError
from wgrad.train.files.decode import show
from wgrad.train.files.packed_files import AWQ, COMPRESSED, FBGEMM, GPTQ, INT8, MODELOPT, PACKED_BITS, Packing
from wgrad.train.model.config_file import AnyQuantizationFile, QuantizationFile

_BY_THEIR_FILES = ("mxfp4", "fp8", COMPRESSED, GPTQ, AWQ, MODELOPT, FBGEMM)
_READ = "the unquantized model, bitsandbytes NF4 or 8 bits, fp8, compressed-tensors, modelopt, gptq, awq or mxfp4"
_FP4, _PACKED, _MIXED = ("nvfp4-pack-quantized", "mxfp4-pack-quantized"), "pack-quantized", "mixed-precision"
_FORMATS = ("float-quantized", "int-quantized", "naive-quantized", _PACKED, *_FP4, "mxfp8-quantized", _MIXED, "dense")


def fp8_block(file: AnyQuantizationFile | None, where: str) -> tuple[int, int] | None:
    """Return the rows and columns of FP8 weights that share a scale, or None.

    Raises:
        WgradError: The FP8 format is not supported.
    """
    if file is None or file.quant_method != "fp8":
        return None
    if file.fmt not in ("e4m3", "float8_e4m3fn"):  # two names of the same format
        raise WgradError(f"{where}: quantization_config: fmt {show(file.fmt)} is not supported: only e4m3 is")
    return file.weight_block_size


def nf4(file: AnyQuantizationFile | None, where: str) -> QuantizationFile | None:
    """Return the keys of bitsandbytes' NF4, or None for other supported methods.

    Raises:
        WgradError: The quantization method is not supported.
    """
    if file is None or file.quant_method in _BY_THEIR_FILES or (file.quant_method == INT8 and file.load_in_8bit):
        return None
    if file.quant_method != "bitsandbytes" or not file.load_in_4bit:
        raise WgradError(
            f"{where}: weights quantized by {show(file.quant_method)} (load_in_4bit: {show(file.load_in_4bit)}) cannot "
            f"be read: use {_READ}"
        )
    if file.bnb_4bit_quant_type != "nf4":
        raise WgradError(
            f"{where}: bnb_4bit_quant_type {show(file.bnb_4bit_quant_type)} is not supported: only nf4 is: use the "
            "unquantized model"
        )
    return QuantizationFile(*(getattr(file, name) for name in QuantizationFile.__struct_fields__))


def packing_of(file: AnyQuantizationFile | None, where: str) -> Packing | None:
    """Return the packing of weights that loading dequantizes (compressed-tensors, GPTQ, AWQ and others), or None.

    Raises:
        WgradError: A key has a value that is not supported.
    """
    if file is not None and file.quant_method == INT8 and file.load_in_8bit:
        return Packing(INT8, 8)
    if file is None or file.quant_method not in (COMPRESSED, GPTQ, AWQ, MODELOPT, FBGEMM):
        return None

    def only(key: str, value: object, known: Iterable[object]) -> None:
        listed = list(known)
        if value not in listed:
            raise WgradError(
                f"{where}: quantization_config: {key} {show(value)} is not supported: only "
                f"{' or '.join(map(show, listed))} is: use the unquantized model"
            )

    if file.quant_method == COMPRESSED:
        return _compressed(file, only)
    if file.quant_method == MODELOPT:
        only("quant_algo", file.quant_algo, ("FP8", "NVFP4", "FP8_PER_CHANNEL_PER_TOKEN"))
    if file.quant_method in (MODELOPT, FBGEMM):
        return Packing(file.quant_method, 8)
    bits = file.bits or file.w_bit or 4
    if file.quant_method == AWQ:
        only("bits", bits, (4,))
        only("version", (file.version or "gemm").lower(), ("gemm",))
        return Packing(AWQ)
    only("bits", bits, PACKED_BITS)
    bits = int(bits)
    only("checkpoint_format", file.checkpoint_format or GPTQ, (GPTQ, "gptq_v2"))
    return Packing(GPTQ, bits, less_one=file.checkpoint_format != "gptq_v2")


def _compressed(file: AnyQuantizationFile, only: Callable[..., None]) -> Packing:
    """Return the packing of compressed-tensors. only: raises an error for a key unless its value is in a list."""
    only("transform_config", bool((file.transform_config or {}).get("config_groups")), (False,))
    only("sparsity_config", (file.sparsity_config or {}).get("format", "dense"), ("dense",))
    groups = list((file.config_groups or {}).values())
    for kind in dict.fromkeys([file.format or "dense", *(group.format for group in groups if group.format)]):
        only("format", kind, _FORMATS)
    weights = [(own, group.format or file.format) for group in groups if (own := group.weights) is not None]
    for own, of_group in weights:
        only("num_bits", own.num_bits, PACKED_BITS if own.type != "float" else (4,) if of_group in _FP4 else (8,))
    packed = {own.num_bits for own, kind in weights if own.type != "float" and kind in (_PACKED, _MIXED)}
    blocks = {tuple(own.block_structure) for own, _ in weights if own.block_structure}
    only("block_structure of several groups", len(blocks) > 1, (False,))
    block = next(((rows, columns) for rows, columns in blocks), None)
    return Packing(COMPRESSED, 0 if len(packed) > 1 else next(iter(packed), 8), block=block)
