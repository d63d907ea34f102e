"""The router of a mixture of experts: it chooses the experts with the largest logits or corrected scores.

Sources: DeepSeek-V2 (arXiv 2405.04434), section 2.2; DeepSeek-V3 (arXiv 2412.19437), section 2.1.2.
"""

from __future__ import annotations

from typing import Any

from wgrad.autograd import functional as F
from wgrad.autograd.lazy import apply, index, reduced, view_of
from wgrad.autograd.tensor import Tensor, no_grad
from wgrad.device.contract import Array
from wgrad.train.model.experts import Experts

_NEVER = -1e30  # less than every score


def choose(experts: Experts, logits: Tensor, correction: Any) -> tuple[Tensor, Array]:
    """Choose the experts of each token.

    Args:
        experts: Rules of the router.
        logits: float32 [T, E].
        correction: Added to the scores that choose; None: nothing.

    Returns:
        Shares float32 [T, k] of each token's experts, and the indices of these experts, int32 [T, k].
    """
    if experts.mixer is not None:
        return _mixed(logits, experts.mixer)
    if correction is None and not experts.sigmoid and experts.groups == 1:
        shares, ids = F.route(logits, experts.chosen, experts.normalize)
    else:
        by = _corrected(experts, logits, correction)
        # Chosen sigmoids that add up to 1 are the softmax of their logarithms.
        scores = -F.softplus(-logits) if experts.sigmoid else logits
        normalize = experts.normalize and not experts.normalize_eps
        shares, ids = F.route(scores, experts.chosen, normalize, by=by)
        if experts.sigmoid and not normalize:
            shares = shares * F.sigmoid(logits).sum(1, keepdim=True)
        if experts.normalize_eps:
            shares = shares / (shares.sum(1, keepdim=True) + experts.normalize_eps)
    return (shares if experts.share_scale == 1 else shares * experts.share_scale), ids


def _mixed(logits: Tensor, reach: float) -> tuple[Tensor, Array]:
    """Return the shares and indices of the two best experts, as SparseMixer without noise."""
    _, ids = F.route(logits, 2, False)

    def best_of(scores: Tensor) -> Tensor:
        with no_grad():
            best = scores.amax(1, keepdim=True)
            far = best - scores > F.maximum(F.maximum(logits, -logits), best) * reach
        share: Tensor = F.route(F.where(far, _NEVER, scores), 1, False)[0]
        return share

    shape, device = tuple(logits.shape), logits.device
    best = view_of(ids.data, device).viewed(shape, (2, 0))
    first = Tensor(apply("eq", index(shape, 1, device), best).array(), device)
    return F.cat([best_of(logits), best_of(F.where(first, _NEVER, logits))], 1), ids


def _corrected(experts: Experts, logits: Tensor, correction: Any) -> Array:
    """Return the scores that choose experts, float32 [T, E], without gradient; _NEVER outside of the best groups."""
    with no_grad():
        found = logits
        if not experts.corrects_logits:
            found = F.sigmoid(logits) if experts.sigmoid else logits.softmax(-1)
        if correction is not None:
            bias = correction if isinstance(correction, Tensor) else Tensor(correction, logits.device)
            found = found + bias.reshape(1, experts.count)
        if experts.groups > 1:
            found = _in_best_groups(experts, found)
        return found.data


def _in_best_groups(experts: Experts, scores: Tensor) -> Tensor:
    """Return scores [T, E], _NEVER outside of the groups with the largest best score, or sum of their two best.

    On a tie, the earlier group is better.
    """
    tokens, groups = scores.shape[0], experts.groups
    apart = scores.reshape(tokens, groups, -1)
    best = apart.amax(2, keepdim=True)
    if not experts.groups_by_best:
        is_best = apart >= best
        second = F.where(is_best, _NEVER, apart).amax(2)
        alone = is_best.sum(2) < 2  # if two are equal, the second best score is the best score
        best = best + F.where(alone.reshape(tokens, groups, 1), second.reshape(tokens, groups, 1), best)
    shape, found = (tokens, groups, groups), view_of(best.data, scores.device)
    own, other = found.viewed(shape, (groups, 1, 0)), found.viewed(shape, (groups, 0, 1))
    before = apply("lt", index(shape, 2, scores.device), index(shape, 1, scores.device))
    better = apply("where", apply("gt", other, own), 1.0, 0.0)
    ahead = apply("where", before, apply("where", apply("ge", other, own), 1.0, 0.0), better)
    place = Tensor(reduced("sum", ahead, [2], keepdim=True).array(), scores.device)
    return F.where(place < experts.top_groups, apart, _NEVER).reshape(tokens, experts.count)
