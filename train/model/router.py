"""The router of a mixture of experts: chosen are those of the largest logits, or of the largest corrected scores.

Sources: DeepSeek-V2 (arXiv 2405.04434), section 2.2; DeepSeek-V3 (arXiv 2412.19437), section 2.1.2.
"""

from __future__ import annotations

from typing import Any

from wgrad.autograd import functional as F
from wgrad.autograd.tensor import Tensor, no_grad
from wgrad.device.contract import Array
from wgrad.train.model.experts import Experts

_NEVER = -1e30  # less than every score


def choose(experts: Experts, logits: Tensor, correction: Any) -> tuple[Tensor, Array]:
    """logits float32 [T, E] -> the weights float32 [T, k] of each token's experts, and their numbers int32 [T, k].
    correction: of the scores that choose, None: logits do."""
    if experts.mixer:
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
    """Weights and numbers of the two best, as SparseMixer has them without noise."""
    _, ids = F.route(logits, 2, False)

    def best_of(scores: Tensor) -> Tensor:
        with no_grad():
            best = scores.amax(1, keepdim=True)
            far = best - scores > F.maximum(F.maximum(logits, -logits), best) * reach
        share: Tensor = F.route(F.where(far, _NEVER, scores), 1, False)[0]
        return share

    with no_grad():
        first = logits >= logits.amax(1, keepdim=True)
    return F.cat([best_of(logits), best_of(F.where(first, _NEVER, logits))], 1), ids


def _corrected(experts: Experts, logits: Tensor, correction: Any) -> Array:
    """float32 [T, E]: the scores by which experts are chosen, of those in other groups _NEVER. Without gradient."""
    with no_grad():
        found = F.sigmoid(logits) if experts.sigmoid else logits.softmax(-1)
        if correction is not None:
            bias = correction if isinstance(correction, Tensor) else Tensor(correction, logits.device)
            found = found + bias.reshape(1, experts.count)
        if experts.groups > 1:
            found = _in_best_groups(experts, found)
        return found.data


def _in_best_groups(experts: Experts, scores: Tensor) -> Tensor:
    """scores [T, E], _NEVER outside of the groups whose best score is largest, or whose two best add up to most."""
    tokens, groups = scores.shape[0], experts.groups
    apart = scores.reshape(tokens, groups, -1)
    best = apart.amax(2, keepdim=True)
    if not experts.groups_by_best:
        is_best = apart >= best
        second = F.where(is_best, _NEVER, apart).amax(2)
        alone = is_best.sum(2) < 2  # of two that are equally good, the second is as good
        best = best + F.where(alone.reshape(tokens, groups, 1), second.reshape(tokens, groups, 1), best)
    better = (best.reshape(tokens, 1, groups) > best).sum(2)
    return F.where(better.reshape(tokens, groups, 1) < experts.top_groups, apart, _NEVER).reshape(tokens, experts.count)
