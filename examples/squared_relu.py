"""An operator of your own: its shader (squared_relu.wgsl), its gradient, and the test that the gradient is right.

    python examples/squared_relu.py

The shader is plain WGSL with the loader's `#if` lines (wgsl/runtime/compile.py says which there are). An operator that
is to be a part of wgrad, on every device, takes the list in docs/contributing/operator.md instead.
"""

from pathlib import Path
from typing import Any

import numpy as np

import wgrad
from wgrad import Tensor
from wgrad.autograd.function import Context, differentiable
from wgrad.autograd.gradcheck import gradcheck

SHADER = str(Path(__file__).resolve().with_suffix(""))  # .wgsl is added to it
GROUP = 256  # invocations of a workgroup, as the shader has it


def compute(device: Any, x: Any, dy: Any = None) -> Any:
    """y, or with dy the gradient of x; any shape, float32 (NumPy's device: float64 too, for the differences below)."""
    if device.name == "cpu":
        return np.maximum(x, 0) ** 2 if dy is None else 2 * np.maximum(x, 0) * dy
    out = device.empty(x.shape)
    groups = device.groups(x.size, GROUP)
    device.launch(SHADER, [x, dy, out], [x.size], groups, {"BACKWARD": dy is not None}, work=2.0 * x.nbytes)
    return out


@differentiable
def squared_relu(ctx: Context, x: Tensor) -> Tensor:
    """max(x, 0)^2. Source: So et al., Primer (2021)."""
    ctx.save(x)
    return compute(ctx.device, x)


@squared_relu.backward
def _(ctx: Context, dy: Any) -> Any:
    (x,) = ctx.saved
    return (compute(ctx.device, x, dy),)


def gradient_error(device: Any) -> float:
    """The largest relative difference between the gradient and central differences in float64, at a size that is no
    multiple of a workgroup's."""
    rng = np.random.default_rng(0)
    dtype = np.float64 if device.name == "cpu" else np.float32
    return gradcheck(squared_relu, rng.standard_normal((7, 41)), rng=rng, device=device, dtype=dtype)


def main(device: str = "auto") -> float:
    chosen = wgrad.select_device(device)
    error = gradient_error(chosen)
    print(f"{chosen.description}: the gradient differs from central differences by {error:.1e}")
    return error


if __name__ == "__main__":
    main()
