"""Decays between the tokens of a chunk in linear attention."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from wgrad.device.contract import DELTA_CHUNK


@dataclass
class Decays:
    """Decays of the tokens at:end (n of them), for B sequences and H heads.

    decay [B, H, n, n]: from token j to token i; 0 unless j is i or an earlier token of i's document.
    inside [B, H, n]: from the incoming state to each token.
    to_end [B, H, n]: from each token to the end of the chunk.
    whole [B, H]: from the incoming state to the end of the chunk.
    """

    at: int
    end: int
    decay: np.ndarray
    inside: np.ndarray
    to_end: np.ndarray
    whole: np.ndarray

    @classmethod
    def of(cls, g: np.ndarray, starts: np.ndarray, at: int) -> Decays:
        """Return the decays of the chunk that begins at token `at`.

        g [B, H, T]: logarithms of the decays. starts [B, T]: first token of each token's document.
        """
        end = min(at + DELTA_CHUNK, g.shape[2])
        token, firsts = np.arange(at, end), starts[:, at:end]
        pair = ((token[:, None] >= token) & (token >= firsts[:, :, None]))[:, None]
        # A decay is a small difference of sums that can be large: in float32 it would lose its digits.
        wide = np.broadcast_to(pair, (*g.shape[:2], *pair.shape[2:])), g[:, :, at:end]
        sums = np.einsum("bhij,bhj->bhi", *wide, dtype=np.float64)
        between = np.where(pair, sums[..., None] - sums[..., None, :], -np.inf).astype(g.dtype)
        decay = np.exp(between)
        inside = np.exp(np.where((firsts < at)[:, None], sums, -np.inf).astype(g.dtype))
        # The decays to the last token are those to the end of the chunk.
        return cls(at, end, decay, inside, decay[..., -1, :], inside[..., -1])


def gate_gradient(pairs: np.ndarray, inside: np.ndarray, to_end: np.ndarray, whole: np.ndarray) -> np.ndarray:
    """Return the gradient of g [B, H, n] of a chunk, from the gradients of the logarithms of its decays.

    pairs [B, H, n, n]: of decay. inside and to_end [B, H, n], whole [B, H]: of those of the same name.
    A token's g is part of every decay from a token before it to it or a token after it. Their gradients are added one
    by one: as a difference of cumulative sums, a small gradient would lose all its digits.
    """
    n = pairs.shape[-1]
    earlier = np.triu(np.ones((n, n), pairs.dtype), 1)
    across = np.tril(pairs @ earlier + inside[..., None]).sum(axis=-2)
    result: np.ndarray = across + to_end @ earlier + whole[..., None]
    return result
