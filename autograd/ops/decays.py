"""Decays between the tokens of a chunk, of the heads of linear attention."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from wgrad.device.contract import DELTA_CHUNK


@dataclass
class Decays:
    """Tokens at:end of all heads. decay [B, H, n, n]: of what token j has left in the state until i, 0 where j is no
    earlier token of i's document. inside, to_end, whole: the decays from the incoming state to each token, from each
    token to the chunk's end, and of the incoming state up to there."""

    at: int
    end: int
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
        # A decay is a small difference of sums that can be large: in float32 it would lose its digits.
        wide = np.broadcast_to(pair, (*g.shape[:2], *pair.shape[2:])), g[:, :, at:end]
        sums = np.einsum("bhij,bhj->bhi", *wide, dtype=np.float64)
        between = np.where(pair, sums[..., None] - sums[..., None, :], -np.inf).astype(g.dtype)
        decay = np.exp(between)
        inside = np.exp(np.where((firsts < at)[:, None], sums, -np.inf).astype(g.dtype))
        # A decay is of what is behind it: that to the last token is the last row.
        return cls(at, end, decay, inside, decay[..., -1, :], inside[..., -1])


def gate_gradient(pairs: np.ndarray, inside: np.ndarray, to_end: np.ndarray, whole: np.ndarray) -> np.ndarray:
    """Gradient of g [B, H, n] of a chunk, from those of the logarithms of its decays: pairs [B, H, n, n], inside and
    to_end [B, H, n], whole [B, H].

    A token's g is in the decays from earlier tokens to it and later ones. Each is added, and none subtracted: of
    differences of sums a small gradient would keep no digit.
    """
    n = pairs.shape[-1]
    earlier = np.triu(np.ones((n, n), pairs.dtype), 1)
    across = np.tril(pairs @ earlier + inside[..., None]).sum(axis=-2)
    result: np.ndarray = across + to_end @ earlier + whole[..., None]
    return result
