"""Decays between the tokens of a chunk, of the heads of linear attention."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from wgrad.device.contract import DELTA_CHUNK


@dataclass
class Decays:
    """Tokens at:end of all heads. decay [B, H, n, n]: of what token j has left in the state until i, 0 where j is no
    earlier token of i's document, which `pair` says. inside, to_end, whole: the decays from the incoming state to each
    token, from each token to the chunk's end, and of the incoming state up to there."""

    at: int
    end: int
    pair: np.ndarray
    decay: np.ndarray
    inside: np.ndarray
    to_end: np.ndarray
    whole: np.ndarray

    @classmethod
    def of(cls, g: np.ndarray, starts: np.ndarray, at: int) -> Decays:
        """Decays of the chunk at this token. g [B, H, T]; starts [B, T], from the first token."""
        end = min(at + DELTA_CHUNK, g.shape[2])
        token, firsts = np.arange(at, end), starts[:, at:end]
        pair = ((token[:, None] >= token) & (token >= firsts[:, :, None]))[:, None]
        sums = np.einsum("bhij,bhj->bhi", np.broadcast_to(pair, (*g.shape[:2], *pair.shape[2:])), g[:, :, at:end])
        decay = np.where(pair, np.exp(np.where(pair, sums[..., None] - sums[..., None, :], 0)), 0).astype(g.dtype)
        inside = np.where((firsts < at)[:, None], np.exp(sums), 0).astype(g.dtype)
        # A decay is of what is behind it: that to the last token is the last row.
        return cls(at, end, pair, decay, inside, decay[..., -1, :], inside[..., -1])

    def of_sums(self, sums: np.ndarray) -> np.ndarray:
        """From gradients of the sums of g up to each token [B, H, n] those of g."""
        pair = np.broadcast_to(self.pair, (*sums.shape[:2], *self.pair.shape[2:]))
        result: np.ndarray = np.einsum("bhij,bhi->bhj", pair, sums)
        return result
