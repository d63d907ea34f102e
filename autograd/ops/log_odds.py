"""Log-odds of log-probabilities."""

from __future__ import annotations

import numpy as np

from wgrad.autograd.args import Args
from wgrad.autograd.function import with_backward
from wgrad.autograd.operators import operator
from wgrad.autograd.precision import compute_dtype, finish, up
from wgrad.autograd.tensor import Tensor
from wgrad.device.contract import Array

LARGEST = -(2.0**-20)  # larger log-probabilities are clamped to it: a probability of 1 has infinite odds


def _log_odds(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Value and derivative."""
    z = np.minimum(x, x.dtype.type(LARGEST))
    rest = -np.expm1(z)
    return z - np.log(rest), np.where(x > LARGEST, 0, 1 / rest)


@with_backward("log_odds_backward")
def log_odds(args: Args, x: Tensor) -> None:
    """x - log(1 - exp(x)) of log-probabilities x, any shape; x is clamped to at most -2^-20."""
    args.any_shape("x", x)


@log_odds.reference
def _(x: np.ndarray) -> np.ndarray:
    compute = compute_dtype(x)
    return finish(_log_odds(up(x, compute))[0], x.dtype, compute)


@operator
def log_odds_backward(args: Args, dy: Array, x: Array) -> None:
    """-> dx = dy / (1 - exp(x)), 0 where x is clamped."""
    args.any_shape("dy", dy).same_shape("dy", dy, "x", x)


@log_odds_backward.reference
def _(dy: np.ndarray, x: np.ndarray) -> np.ndarray:
    compute = compute_dtype(dy, x)
    return finish(up(dy, compute) * _log_odds(up(x, compute))[1], x.dtype, compute)
