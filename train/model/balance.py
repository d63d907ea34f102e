"""Load-balancing loss of a model's routers, over all its layers at once, as in transformers.

Source: Fedus et al., Switch Transformers (2022), equations 4 to 6.
"""

from __future__ import annotations

from typing import Any

from wgrad.autograd.function import Context, differentiable
from wgrad.autograd.lazy import Lazy, apply, index, reduced, view_of
from wgrad.autograd.ops.loss import IGNORE_INDEX
from wgrad.autograd.tensor import Tensor, is_recomputing
from wgrad.device.contract import Array, Device
from wgrad.train.model.experts import Experts


class Balance:
    """Loss of a micro-batch: the number of experts times the sum, over experts, of share of tokens times mean
    probability. Padding does not count.

    `begin` starts a forward, `through` and `count` take each router's logits and choice, `added` ends it. Layers that
    the backward recomputes count once.

    Args:
        coefficient: Weight of this loss in the model's loss.
        experts: Experts of the model.
        tokens: Tokens of a micro-batch.
        device: Device.
    """

    def __init__(self, coefficient: float, experts: Experts, tokens: int, device: Device) -> None:
        self.coefficient, self.experts, self.device = coefficient, experts, device
        self._chosen, self._probabilities, self._slope = (device.zeros((experts.count,)) for _ in range(3))
        self._real = device.zeros((tokens,))

    def begin(self, doc_start: Array) -> None:
        """Start a forward. doc_start: start of each token's document, int32 [B, T]; each padding is a document."""
        for sums in (self._chosen, self._probabilities):
            self.device.fill(sums, 0.0)
        rows, width = doc_start.shape
        starts = view_of(doc_start, self.device)
        for first, count in ((0, width - 1), (width - 1, 1)):  # no column follows the last one
            if not count:
                continue
            own = starts.viewed((rows, count), (width, 1), first)
            place = index((rows, count), 1, self.device) + float(first)
            alone = apply("eq", own, place)
            if not first:
                following = starts.viewed((rows, count), (width, 1), 1)
                alone = alone * apply("ne", following, place)
            (1.0 - apply("where", alone, 1.0, 0.0)).write(self._real, ((width, 1), first))

    def through(self, logits: Tensor) -> Tensor:
        """Return the logits [N, E], to which a backward adds the loss's gradient."""
        return _balanced(logits, self._slope, self._real)

    def count(self, logits: Tensor, ids: Tensor) -> None:
        """Count a router's logits, float32 [N, E], and chosen experts, int32 [N, k]."""
        if is_recomputing():
            return
        (tokens, experts), chosen = logits.shape, ids.shape[1]
        real = view_of(self._real, self.device)
        probabilities = view_of(self.device.softmax(logits.data), self.device)
        total = probabilities * real.viewed((tokens, experts), (1, 0))
        reduced("sum", total, [0], keepdim=False).write(self._probabilities, accumulate=True)
        shape = (tokens, chosen, experts)
        picked = apply("eq", view_of(ids.data, self.device).viewed(shape, (chosen, 1, 0)), index(shape, 2, self.device))
        total = apply("where", picked, real.viewed(shape, (1, 0, 0)), 0.0)
        reduced("sum", total, [0, 1], keepdim=False).write(self._chosen, accumulate=True)

    def added(self, loss: Tensor, targets: Array) -> Tensor:
        """Add the coefficient times this loss, for each target, to `loss`: float32 [1], a sum over targets."""
        weight = self.coefficient * self.experts.count
        sums = self._chosen, self._probabilities, self._slope, self._real
        return _with_balance(loss, *sums, targets, weight, sum(self.experts.layers))


@differentiable
def _balanced(ctx: Context, logits: Tensor, slope: Array, real: Array) -> Tensor:
    ctx.save(logits, slope, real)
    return logits


@_balanced.backward
def _(ctx: Context, dlogits: Array) -> Any:
    logits, slope, real = ctx.saved
    shape, device = tuple(logits.shape), ctx.device
    dprobabilities = view_of(real, device).viewed(shape, (1, 0)) * view_of(slope, device).viewed(shape, (0, 1))
    own = device.softmax_backward(dprobabilities.array(), device.softmax(logits))
    return (view_of(dlogits, device) + view_of(own, device)).array(), None, None


@differentiable
def _with_balance(
    ctx: Context,
    loss: Tensor,
    chosen: Array,
    probabilities: Array,
    slope: Array,
    real: Array,
    targets: Array,
    weight: float,
    layers: int,
) -> Tensor:
    """Add the loss. slope: written by the backward, which runs before the backwards of the routers."""
    ctx.save(chosen, slope, real, targets)
    ctx.weight, ctx.layers = weight, layers
    of_all = reduced("sum", view_of(chosen, ctx.device) * view_of(probabilities, ctx.device), [0], keepdim=True)
    y: Tensor = (view_of(loss, ctx.device) + of_all * _share(ctx, real, targets)).array()
    return y


@_with_balance.backward
def _(ctx: Context, dloss: Array) -> Any:
    chosen, slope, real, targets = ctx.saved
    given = view_of(dloss, ctx.device).viewed(tuple(chosen.shape), (0,))
    share = _share(ctx, real, targets).viewed(tuple(chosen.shape), (0,))
    (given * share * view_of(chosen, ctx.device)).write(slope)
    return dloss, *[None] * 7


def _share(ctx: Context, real: Array, targets: Array) -> Lazy:
    """Return [1]: the weight times the number of targets, over the square of the number of all routers' tokens."""
    counted = apply("where", apply("ne", view_of(targets, ctx.device), float(IGNORE_INDEX)), 1.0, 0.0)
    rows = reduced("sum", view_of(real, ctx.device), [0], keepdim=True) * float(ctx.layers)
    rows = apply("maximum", rows, 1.0)
    share: Lazy = reduced("sum", counted, [0], keepdim=True) * ctx.weight / rows / rows
    return share
