"""llama.cpp's importance matrix: of each weight the sums of squares of its inputs, in a GGUF file.

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
from wgrad.train.files.gguf_files import open_reader, require_gguf

IMATRIX_FILE = "imatrix.gguf"  # beside a model that was quantised by it
_SUMS, _COUNTS = ".in_sum2", ".counts"


@dataclass(frozen=True)
class Imatrix:
    """Mean squares float32 [inputs] by GGUF's names of weights. source: a file or what the data was, for people.

    tokens: that were seen; 0: not known.
    """

    means: Mapping[str, np.ndarray]
    source: str
    tokens: int = 0

    def of(self, name: str, width: int) -> np.ndarray | None:
        """Importance of a weight's columns, None where it is not known. WgradError: it is of another model."""
        found = self.means.get(name)
        if found is not None and len(found) != width:
            raise WgradError(
                f"--imatrix: {self.source} has {len(found)} columns of {name}, and the model has {width}: give one of "
                "this model"
            )
        return found

    def save(self, path: Path) -> None:
        """Write the file."""
        gguf = require_gguf("--imatrix", path)
        writer = gguf.GGUFWriter(path, "")
        writer.kv_data[0].pop("general.architecture", None)
        writer.add_string("general.type", "imatrix")
        writer.add_array("imatrix.datasets", [self.source])
        writer.add_uint32("imatrix.chunk_count", 1)
        writer.add_uint32("imatrix.chunk_size", self.tokens)
        for name, mean in sorted(self.means.items()):
            writer.add_tensor(name + _SUMS, (mean * np.float32(self.tokens or 1))[None].astype(np.float32))
            writer.add_tensor(name + _COUNTS, np.full((1, 1), self.tokens or 1, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def load_imatrix(path: Path) -> Imatrix:
    """Read such a file. WgradError: it is none, or damaged."""
    tensors = {t.name: np.asarray(t.data, np.float32) for t in open_reader(path, "--imatrix").tensors}
    means = dict[str, np.ndarray]()
    for name, sums in tensors.items():
        stem, counts = name.removesuffix(_SUMS), tensors.get(name.removesuffix(_SUMS) + _COUNTS)
        if stem == name or counts is None or counts.size != 1:  # of several experts
            continue
        if counts[..., 0].item() > 0:
            with np.errstate(all="ignore"):  # what is not finite is refused below
                means[stem] = sums.reshape(-1) / counts.reshape(-1)
    if not means or not all(np.isfinite(mean).all() and (mean >= 0).all() for mean in means.values()):
        raise WgradError(f"--imatrix: {path} is no importance matrix of llama.cpp: give data, or llama-imatrix's file")
    return Imatrix(means, path.name)
