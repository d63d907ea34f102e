"""Methods of Tensors as functions of wgrad: `wgrad.exp(x)` is `x.exp()`, as in PyTorch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from wgrad.autograd.tensor import Tensor
from wgrad.device.errors import WgradError

NAMES = frozenset(
    """
    abs add all amax amin any argmax argmin bmm chunk clamp clip clone cos div dot eq exp exp2 flatten flip gather ge gt
    index_select le lerp log log2 log_softmax logsumexp lt masked_fill matmul max mean min mm movedim mul narrow ne neg
    norm numel outer permute pow reciprocal relu repeat_interleave reshape roll rsqrt select sigmoid sign sin softmax
    split sqrt square squeeze std sub sum swapaxes t tan tanh tile transpose tril triu unbind unflatten unsqueeze var
    """.split()
)


def method_function(name: str) -> Callable[..., Any]:
    """Return a function that calls a method of its first argument, a Tensor."""

    def call(*args: Any, **options: Any) -> Any:
        x = args[0] if args else options.pop("input", None)
        if not isinstance(x, Tensor):
            raise WgradError(f"{name}: the first argument must be a Tensor, got {type(x).__name__}; use wgrad.tensor")
        return getattr(x, name)(*args[1:], **options)

    return functools.wraps(getattr(Tensor, name))(call)
