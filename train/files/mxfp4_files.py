"""MXFP4 weights of experts in safetensors, as in gpt-oss: codes in `<name>_blocks` uint8 [experts, out, in / 32, 16],
element 2j in the low nibble of byte j; the exponent of each block in `<name>_scales` uint8 [experts, out, in / 32].

Source: gpt-oss in transformers (integrations/mxfp4.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass, field

import numpy as np

from wgrad.device.contract import Device
from wgrad.device.errors import WgradError
from wgrad.device.formats.mxfp4 import Mxfp4Array
from wgrad.train.files.safetensors_files import TensorEntry

BLOCKS, SCALES = "_blocks", "_scales"


@dataclass(frozen=True)
class Mxfp4Entry(TensorEntry):
    """All experts of a layer, [experts, out, in]. codes, exponents: the two tensors of the file."""

    codes: TensorEntry = field(repr=False)
    exponents: TensorEntry = field(repr=False)

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.exponents.nbytes

    def _frozen(self, contents: bool = True) -> Mxfp4Array:
        parts = (self.codes, self.exponents)
        codes, exponents = (part.array().reshape(-1) if contents else np.zeros(part.nbytes, np.uint8) for part in parts)
        return Mxfp4Array(codes, exponents, (math.prod(self.shape[:-1]), self.shape[-1]))

    def array(self) -> np.ndarray:
        weight = self._frozen()
        return weight.rows(0, weight.shape[0], np.dtype(np.float32)).reshape(self.shape)

    def upload_frozen(self, device: Device, contents: bool) -> Mxfp4Array:
        """Upload the weight in its format. contents: False reads nothing, for a dry run.

        Raises:
            WgradError: a scale is beyond float32.
        """
        weight = self._frozen(contents)
        for part in weight.finite_parts() if contents else ():
            self.check_finite(part)
        return weight.map_arrays(device.upload)

    def blocks(self, rows: int) -> Iterator[np.ndarray]:
        weight, height = self._frozen(), self.shape[1]
        for begin in range(0, self.shape[0], rows):
            end = min(begin + rows, self.shape[0])
            part = weight.rows(begin * height, end * height, np.dtype(np.float32))
            yield part.reshape(end - begin, *self.shape[1:])

    def sample(self, count: int, size: int) -> list[bytes]:
        return self.codes.sample(count, size) + self.exponents.sample(count, size)


def gather_mxfp4(entries: MutableMapping[str, TensorEntry], name: str) -> None:
    """Replace the two tensors of `name` by one, if the files have them.

    Raises:
        WgradError: one of them is missing, or they do not fit each other.
    """
    codes, exponents = entries.pop(name + BLOCKS, None), entries.pop(name + SCALES, None)
    first = codes or exponents
    if first is None:
        return
    if codes is None or exponents is None:
        what = BLOCKS if codes is None else SCALES
        raise WgradError(f"{first.source}: {first.path} has {first.name}, and no {name}{what}: fetch the model again")
    fits = len(codes.shape) == 4 and codes.shape[3:] == (16,) and codes.shape[:3] == exponents.shape
    if not fits or {codes.dtype, exponents.dtype} != {"U8"}:
        raise WgradError(
            f"{first.source}: {first.path}: {codes.name} must be U8 [experts, rows, blocks, 16] and {exponents.name} "
            f"U8 [experts, rows, blocks], got {codes.dtype} {list(codes.shape)} and {exponents.dtype} "
            f"{list(exponents.shape)}: fetch the model again"
        )
    shape = (*codes.shape[:2], 32 * codes.shape[2])
    entries[name] = Mxfp4Entry(first.source, first.path, name, "MXFP4", shape, None, None, codes, exponents)
