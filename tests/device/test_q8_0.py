"""Q8_0 against the gguf package: what is quantised and its values, and the rules of its parts."""

from __future__ import annotations

from dataclasses import replace

import gguf
import numpy as np
import pytest

from wgrad.autograd.reference import ReferenceDevice
from wgrad.device.errors import ShapeError
from wgrad.device.formats.q8_0 import BLOCK_BYTES, Q8Array


def in_file(weight: Q8Array) -> np.ndarray:
    """The bytes of a weight as a GGUF file has them: [out, in / 32 * 34]."""
    scales, codes = weight.scales.view(np.uint8).reshape(-1, 2), weight.codes.reshape(-1, 32)
    return np.concatenate([scales, codes], axis=1).reshape(weight.shape[0], -1)


@pytest.mark.parametrize("scale", [1e-7, 1e-4, 0.02, 3.0])
def test_bytes_and_values_are_those_of_gguf(scale: float, rng: np.random.Generator) -> None:
    w = (scale * rng.standard_normal((37, 96))).astype(np.float32)
    w[3, 32:64] = 0
    w[5, 64:] = np.arange(32) / 2 - 8  # halves, once 127 is the largest
    w[5, 70] = 127
    kind = gguf.GGMLQuantizationType.Q8_0
    weight, wanted = Q8Array.quantize(w), gguf.quantize(w, kind)
    assert wanted.shape == (37, 3 * BLOCK_BYTES)
    np.testing.assert_array_equal(in_file(weight), wanted)
    values = gguf.dequantize(wanted, kind)
    np.testing.assert_array_equal(weight.rows(0, 37, np.dtype(np.float32)), values)
    np.testing.assert_array_equal(Q8Array.from_gguf(wanted, w.shape).rows(0, 37, np.dtype(np.float32)), values)
    np.testing.assert_array_equal(weight.rows(7, 21, np.dtype(np.float64)), values[7:21])


def test_rules_name_what_is_wrong(rng: np.random.Generator) -> None:
    cpu, weight = ReferenceDevice(), Q8Array.quantize(rng.standard_normal((4, 64)).astype(np.float32))
    assert cpu.dequantize(weight).shape == (4, 64)
    wrong = {
        "shape must have rows of whole blocks of 32, got 48": replace(weight, shape=(4, 48)),
        "w.codes": replace(weight, codes=weight.codes[1:]),
        "w.scales": replace(weight, scales=weight.scales.astype(np.float32)),
    }
    for message, bad in wrong.items():
        with pytest.raises(ShapeError, match=message):
            cpu.dequantize(bad)
    with pytest.raises(ShapeError, match="format must be one that devices bring weights into, got q8_0"):
        cpu.quantize(rng.standard_normal((4, 64)).astype(np.float32), format="q8_0")
