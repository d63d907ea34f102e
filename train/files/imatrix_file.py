"""llama.cpp's importance matrix: the sums of squares of each weight's inputs, in a GGUF file.

    NAME.in_sum2   float32 [1, inputs]: the sums over tokens
    NAME.counts    float32 [1, 1]: tokens

Source: tools/imatrix/imatrix.cpp and common/imatrix-loader.cpp (github.com/ggml-org/llama.cpp).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from wgrad.device.errors import WgradError
from wgrad.device.files import atomic_file
from wgrad.device.shown import as_text
from wgrad.train.files.gguf_files import open_reader, require_gguf

IMATRIX_FILE = "imatrix.gguf"  # next to a model that was quantized with it
_SUMS, _COUNTS = ".in_sum2", ".counts"


@dataclass(frozen=True)
class Imatrix:
    """Mean squares float32 [inputs] by GGUF's names of weights.

    source: name of the file or data, for the user. tokens: number of tokens behind the means; 0: unknown.
    """

    means: Mapping[str, np.ndarray]
    source: str
    tokens: int = 0

    def of(self, name: str, width: int) -> np.ndarray | None:
        """Return the importance of a weight's columns, or None if unknown.

        Raises:
            WgradError: the matrix is of another model.
        """
        found = self.means.get(name)
        if found is not None and len(found) != width:
            raise WgradError(
                f"--imatrix: {self.source} has {len(found)} columns of {name}, and the model has {width}: give one of "
                "this model"
            )
        return found

    def save(self, path: Path) -> None:
        """Write the file atomically. Raises WgradError if the disk is full, the folder is read-only, and so on."""
        gguf = require_gguf("--imatrix", path)
        writer = gguf.GGUFWriter(None, "")
        writer.kv_data[0].pop("general.architecture", None)
        writer.add_string("general.type", "imatrix")
        writer.add_array("imatrix.datasets", [as_text(self.source)])
        writer.add_uint32("imatrix.chunk_count", 1)
        writer.add_uint32("imatrix.chunk_size", self.tokens)
        for name, mean in sorted(self.means.items()):
            writer.add_tensor(name + _SUMS, (mean * np.float32(self.tokens or 1))[None].astype(np.float32))
            writer.add_tensor(name + _COUNTS, np.full((1, 1), self.tokens or 1, np.float32))
        with atomic_file(path) as file:
            writer.write_header_to_file(Path(file.name))
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
            writer.close()


def load_imatrix(path: Path) -> Imatrix:
    """Read an importance matrix. Raises WgradError if the file is not one, or is damaged."""
    tensors = {t.name: np.asarray(t.data, np.float32) for t in open_reader(path, "--imatrix").tensors}
    means = dict[str, np.ndarray]()
    for name, sums in tensors.items():
        stem, counts = name.removesuffix(_SUMS), tensors.get(name.removesuffix(_SUMS) + _COUNTS)
        if stem == name or counts is None or counts.size != 1:  # several experts
            continue
        if counts[..., 0].item() > 0:
            with np.errstate(all="ignore"):  # values that are not finite are refused below
                means[stem] = sums.reshape(-1) / counts.reshape(-1)
    if not means or not all(np.isfinite(mean).all() and (mean >= 0).all() for mean in means.values()):
        raise WgradError(f"--imatrix: {path} is no importance matrix of llama.cpp: give data, or llama-imatrix's file")
    return Imatrix(means, path.name)
