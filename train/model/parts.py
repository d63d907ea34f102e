"""Building blocks of layers: projections with their adapters, norms, and additions to the residual stream."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from wgrad.autograd import functional as F
from wgrad.autograd.functional import LoraTerm
from wgrad.autograd.tensor import Tensor, is_recomputing
from wgrad.device.contract import Array, Device
from wgrad.device.formats.frozen_weight import FrozenWeight
from wgrad.train.model.dora import inverse_of
from wgrad.train.model.lora import Adapter
from wgrad.train.model.model_config import ModelConfig
from wgrad.train.model.model_inputs import Inputs
from wgrad.train.model.stacks import parts_of, stack_of
from wgrad.train.model.weights import PROJECT_IN, PROJECT_OUT


class Parts:
    """A decoder's weights on a device, with the operations that layers apply to them. See `Model`."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, Any],
        device: Device,
        adapter: Adapter | None,
        dtype: Any,
        keep_norms: bool,
    ) -> None:
        self.config, self.weights, self.device, self.adapter = config, weights, device, adapter
        self.dtype, self.keep_norms = np.dtype(dtype), keep_norms
        self.watch: Callable[[str, Tensor], object] = lambda module, x: None  # called with each projection's input
        self._constants: dict[tuple[int, int], Array] = {}
        self.kinds: tuple[Adapter | None, dict[int, str]] = None, {}  # of layers, with this adapter (layer_kinds.py)
        self.dequantized: dict[int, tuple[str, ...]] = {}  # modules of each layer whose weights are kept dequantized

    def _norm(self, prefix: str, norm: str, h: Tensor) -> tuple[Tensor, Tensor]:
        """Norm the residual stream.

        Returns:
            The normed stream, or the stream in the compute dtype if `norm` is ""; and the residual stream to continue
            with.
        """
        if not norm:
            return F.cast(h, self.dtype) if self.dtype != h.dtype else h, h
        if self.config.layer_norm:
            return self._normed(prefix + norm, h, self.dtype), h
        weight, eps = self._norm_weight(prefix + norm, h.shape[1]), self.config.rms_norm_eps
        return F.rms_norm_residual(h, weight, eps, dtype=self.dtype, again=not self.keep_norms)

    def _normed(self, module: str, x: Tensor, dtype: Any) -> Tensor:
        """Return the norm `module` of x in `dtype`."""
        weight, eps = self._norm_weight(module, x.shape[1]), self.config.rms_norm_eps
        if self.config.layer_norm:
            bias = self.weights.get(f"{module}.bias")
            bias = self._constant(x.shape[1], 0) if bias is None else bias
            return F.layer_norm(x, weight, bias, eps, dtype=dtype)
        return F.rms_norm(x, weight, eps, dtype=dtype)

    def _norm_weight(self, module: str, width: int) -> Any:
        """Return a norm's weight, or ones if it has none."""
        weight = self.weights.get(f"{module}.weight")
        return self._constant(width, 1) if weight is None else weight

    def _constant(self, width: int, value: int) -> Array:
        """Return a constant float32 [width], which replaces a weight or bias that a norm does not have."""
        if (width, value) not in self._constants:
            self._constants[width, value] = self.device.upload(np.full(width, value, np.float32))
        return self._constants[width, value]

    def _to_stream(
        self,
        prefix: str,
        module: str,
        norm: str,
        x: Tensor,
        h: Tensor,
        inputs: Inputs,
        *,
        last: bool = False,
        scale: float = 1.0,
    ) -> Tensor:
        """Add a projection of x to the residual stream h.

        Args:
            prefix: Path of the layer.
            module: Path of the projection within the layer.
            norm: Path of the norm of the projection's output, or of the sum (`norms_stream`); "": none.
            last: Whether the sum is only the layer's output, which a recomputation does not need.
            scale: Factor of the projection's output, in addition to the family's `residual_scale`.
        """
        scale *= self.config.residual_scale
        if self.config.norms_stream:
            return self._normed(prefix + norm, self._linear(prefix + module, x, inputs, residual=h), np.float32)
        if not norm and scale == 1:
            return self._linear(prefix + module, x, inputs, residual=h, unread=last and is_recomputing())
        y = self._linear(prefix + module, x, inputs)
        if norm:
            y = self._normed(prefix + norm, y, np.float32)
        if scale != 1:
            y = F.scale(y, scale)
        return F.add(h, y)

    def _with_positions(self, h: Tensor, inputs: Inputs) -> Tensor:
        """Return the stream: embeddings of tokens [N, E], projected if need be, and those of positions, if any."""
        if self.config.embedding_width:
            h = F.cast(self._linear(PROJECT_IN, F.cast(h, self.dtype), inputs), np.float32)
        if not self.config.position_table:
            return h
        table, first = self._tensor(f"{self.config.position_table}.weight"), self.config.position_offset
        return F.add(h, F.embedding(table[first:] if first else table, inputs.positions, dtype=np.float32))

    def _to_head(self, h: Tensor, inputs: Inputs) -> Tensor:
        """Return the input of the head [N, E]: the normed stream, projected if need be."""
        h = self._normed(self.config.final_norm, h, self.dtype) if self.config.final_norm else F.cast(h, self.dtype)
        return self._linear(PROJECT_OUT, h, inputs) if self.config.embedding_width else h

    def _tensor(self, name: str) -> Tensor:
        """Return a weight as a Tensor."""
        weight = self.weights[name]
        return weight if isinstance(weight, Tensor) else Tensor(weight, self.device)

    def _linear(
        self,
        module: str,
        x: Tensor,
        inputs: Inputs,
        *,
        residual: Tensor | None = None,
        unread: bool = False,
        biased: bool = True,
    ) -> Tensor:
        """Return a projection of x with its bias and adapter.

        The output is in the compute dtype; with a residual it is the float32 stream. unread: as for `F.linear`. biased:
        False leaves the bias to the caller.
        """
        self.watch(module, x)
        own = self.adapter.modules.get(module) if self.adapter else None
        weight = self.weights[module + ".weight"] if own is None or own.rounded is None else own.rounded
        bias = self.weights.get(module + ".bias") if biased else None
        dtype = self.dtype if residual is None else np.float32
        options: dict[str, Any] = {"lora": self._lora(module, inputs), "dtype": dtype}
        linear = F.linear_quantized if isinstance(weight, FrozenWeight) else F.linear
        if own is not None and own.magnitude is not None:
            inverse = inverse_of(own, weight, self.device) if own.inverse is None else own.inverse
            y = F.dora_scale(linear(x, weight, **options), own.magnitude, inverse)
            y = y if bias is None else F.bias(y, bias)
            return y if residual is None else F.add(residual, y)
        options |= {"bias": bias, "residual": residual, "unread": unread}
        return linear(x, weight, **options)

    def _stacked(self, stack: str, x: Tensor, inputs: Inputs) -> Tensor | None:
        """Return several projections of x, concatenated, from one GEMM (stacks.py); None if they are not stacked."""
        return self._linear(stack, x, inputs) if self._has_stack(stack) else None

    def _has_stack(self, stack: str) -> bool:
        """Return whether there is a stack, and its adapter if any of its parts have one."""
        adapted = self.adapter.modules if self.adapter else {}
        without = stack not in adapted and any(part in adapted for part in parts_of(stack))
        return stack + ".weight" in self.weights and not without

    def _is_stacked(self, stack: str) -> bool:
        """Return whether the stack's layer multiplies with the stack instead of its parts."""
        raise NotImplementedError

    def used_weights(self, modules: Sequence[str]) -> list[Any]:
        """Return the weights that a layer multiplies with for these modules: their stack, or each by itself.

        Weights that --qat replaces by rounded ones are left out.
        """
        stack = stack_of(modules[-1]) if len(modules) > 1 else None
        if stack is not None and self._is_stacked(stack):
            return [self.weights[f"{stack}.weight"]]
        adapted = self.adapter.modules if self.adapter else {}
        names = [name for name in modules if name not in adapted or adapted[name].rounded is None]
        found = [self.weights.get(f"{name}.weight", self.weights.get(name)) for name in names]
        return [weight for weight in found if weight is not None]

    def _lora(self, module: str, inputs: Inputs) -> LoraTerm | None:
        """Return the adapter's term of a projection, or None without an adapter."""
        lora, seed = self.adapter.modules.get(module) if self.adapter else None, inputs.seed
        if lora is None or self.adapter is None:
            return None
        if lora.shares:
            return LoraTerm(*lora.factors, lora.scaling, shares=inputs.adapters[lora.shares])
        p = self.adapter.config.dropout if seed is not None else 0.0
        rounded = lora.rounded is not None
        return LoraTerm(*lora.factors, lora.scaling, p, seed if p else None, lora.stream, rounded)
