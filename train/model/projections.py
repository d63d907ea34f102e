"""Outputs of projections that recomputed layers keep, by the numbers of --keep-projections and --keep-gate-up.

Of the first, 1 keeps queries, keys and values before norms and RoPE. Each more keeps gate and up of another chunk of
the MLP, in layers with an odd index first: 2 a chunk of every second layer, 3 of every layer, 4 and 5 a second one.
These are offloaded with the layer's input. The second is the number of recomputed layers, the last ones, that keep gate
and up of a chunk more, on the device.
"""

from __future__ import annotations

from typing import NamedTuple

from wgrad.train.model.model_config import ModelConfig

MOST_CHUNKS = 2  # whose gate and up a layer keeps


def kept_chunks(kept: int, layer: int) -> int:
    """Return of how many chunks of its MLP a layer keeps gate and up. kept: --keep-projections."""
    return max(kept - 1 + layer % 2, 0) // 2


class Kept(NamedTuple):
    """The values of --keep-projections, --keep-gate-up and --keep-gated."""

    projections: int = 0
    gate_up: int = 0
    gated: bool = False

    def chunks(self, layer: int, recomputed: int) -> tuple[int, int]:
        """Return of how many chunks of its MLP a layer keeps gate and up, and how many of them stay on the device.

        recomputed: Number of recomputed layers.
        """
        offloaded = kept_chunks(self.projections, layer)
        staying = int(recomputed - self.gate_up <= layer < recomputed and offloaded < MOST_CHUNKS)
        return offloaded + staying, staying


NOTHING = Kept()


def projection_widths(model: ModelConfig) -> tuple[float, float]:
    """Return the elements of a token's queries, keys and values, averaged over the layers, and of its gate and up."""
    layers = range(model.num_hidden_layers)
    attended = [
        model.q_size_of(i) + 2 * model.kv_size_of(i) * (model.kv_source(i) == i) for i in layers if model.attends(i)
    ]
    mlp = 0 if model.experts is not None else (2 if model.gated else 1) * model.mlp_width
    return sum(attended) / len(layers), mlp
