"""NF4 weights in files, as bitsandbytes and transformers store them.

Keys in addition to `<module>.weight` (uint8 [ceil(n / 2), 1]): `.absmax`, `.quant_map`, with double quantization
`.nested_absmax` and `.nested_quant_map`, and `.quant_state.bitsandbytes__nf4`, a JSON object as uint8.
Source: QLoRA (arXiv 2305.14314); bitsandbytes' QuantState.as_dict.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated

import numpy as np
from msgspec import Meta, Struct

from wgrad.device.contract import Device
from wgrad.device.errors import WgradError
from wgrad.device.formats.nf4 import LEVELS, VALUE_DTYPES, NF4Array
from wgrad.train.files.decode import decode_json, show
from wgrad.train.files.safetensors_files import TensorEntry

STATE_KEY, FP4_KEY = ".quant_state.bitsandbytes__nf4", ".quant_state.bitsandbytes__fp4"
# Endings of the further tensors of a 4-bit weight.
NF4_PARTS = (".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map", STATE_KEY)
BlockSize = Annotated[int, Meta(ge=32, le=4096)]
_AGAIN = "fetch the model again, or use the unquantized one"


def is_nf4(entries: Mapping[str, TensorEntry], name: str) -> bool:
    """Return whether a base model has the tensor `name` in 4 bits (of any kind)."""
    return name + STATE_KEY in entries or name + FP4_KEY in entries


class QuantState(Struct):
    """The JSON object of each weight. dtype: that to which decoded values are rounded."""

    blocksize: BlockSize
    shape: tuple[int, int]
    dtype: str = "float32"
    nested_blocksize: BlockSize = 256
    nested_offset: Annotated[float, Meta(ge=-1e30, le=1e30)] | None = None

    def __post_init__(self) -> None:
        for key in ("blocksize", "nested_blocksize"):
            value = getattr(self, key)
            if value & (value - 1):
                raise ValueError(f"{key} must be a power of 2; got {value}")
        if self.dtype not in VALUE_DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(VALUE_DTYPES)}; got {show(self.dtype)}")


def check_packed(entries: Mapping[str, TensorEntry], name: str, shape: tuple[int, ...]) -> TensorEntry:
    """Return the codes of a quantized weight.

    Raises:
        WgradError: they or their state are missing, or do not have this shape.
    """
    if name not in entries or name + STATE_KEY not in entries:
        raise WgradError(f"--model: the weight {name} is missing or quantized as fp4: only NF4 can be read; {_AGAIN}")
    entry, wanted = entries[name], -(-shape[0] * shape[1] // 2)
    if entry.nbytes != wanted:
        raise WgradError(
            f"--model: the quantized weight {name} in {entry.path} must have {wanted} bytes for {list(shape)}, as "
            f"config.json asks; got {entry.nbytes} ({entry.dtype}): {_AGAIN}"
        )
    return entry


def read_nf4(
    entries: Mapping[str, TensorEntry], name: str, shape: tuple[int, ...], device: Device, contents: bool = True
) -> NF4Array:
    """Upload a quantized weight. contents: False, for a dry run, does not read the packed values, the bulk of it.

    Raises:
        WgradError: a part is missing, not finite, or does not fit the others.
    """

    def part(suffix: str, *dtypes: str) -> np.ndarray:
        entry = entries.get(name + suffix)
        if entry is None:
            raise WgradError(f"--model: the quantized weight {name} lacks {name + suffix}: {_AGAIN}")
        if entry.dtype not in dtypes:
            raise fail(f"has {suffix} in {entry.dtype}, not in {' or '.join(dtypes)}")
        return (entry.finite_array() if entry.dtype == "F32" else entry.array()).reshape(-1)

    def fail(what: str) -> WgradError:
        return WgradError(f"--model: the quantized weight {name} in {entries[name].path} {what}: {_AGAIN}")

    entry = check_packed(entries, name, shape)
    # quant_storage of bitsandbytes may be any dtype.
    packed = entry.array().reshape(-1).view(np.uint8) if contents else np.zeros(entry.nbytes, np.uint8)
    where = f"--model: {entries[name].path}: {name + STATE_KEY}"
    state = decode_json(bytes(part(STATE_KEY, "U8")), QuantState, where, _AGAIN)
    if state.shape != tuple(shape):
        raise fail(f"has shape {list(state.shape)}, not {list(shape)} as config.json asks")
    code = part(".quant_map", "F32")
    if code.shape != LEVELS.shape or not np.allclose(code, LEVELS, rtol=0, atol=1e-6):
        raise fail("has a code book that is not NF4")
    count = shape[0] * shape[1]
    blocks = -(-count // state.blocksize)
    nested = name + ".nested_absmax" in entries
    absmax = part(".absmax", "U8" if nested else "F32")
    if absmax.size != blocks:
        raise fail(f"has {absmax.size} scales for {count} values in blocks of {state.blocksize}")
    codes, scales = device.upload(packed), device.upload(absmax)
    weight = NF4Array(codes, scales, (shape[0], shape[1]), state.blocksize, value_dtype=state.dtype)
    if not nested:
        return weight
    outer, table = part(".nested_absmax", "F32"), part(".nested_quant_map", "F32")
    if state.nested_offset is None or outer.size != -(-blocks // state.nested_blocksize) or table.size != 256:
        raise fail("has a nested state that does not fit its scales")
    return dataclasses.replace(
        weight,
        nested_absmax=device.upload(outer),
        nested_code=device.upload(table),
        nested_offset=device.upload(np.array([state.nested_offset], np.float32)),
        nested_block_size=state.nested_blocksize,
    )
