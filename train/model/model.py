"""The decoder of Llama-like families, built from its configuration (families.py) and its weights.

Shapes: B rows, T tokens, N = B * T, C hidden, H heads, G key/value heads, D head width, V vocabulary. The compute dtype
is that of matmul inputs (norm outputs, q, k, v, attention, gate, up). The residual stream, statistics and the loss are
float32.
Sources: LLaMA (arXiv 2302.13971), grouped heads (2305.13245), SwiGLU (2002.05202).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from wgrad.autograd import functional as F
from wgrad.autograd.checkpoint import keeping_matmuls
from wgrad.autograd.chunks import chunk_rows, in_row_chunks
from wgrad.autograd.tensor import Tensor, is_recording, no_grad
from wgrad.device.contract import Array, Device
from wgrad.device.formats.frozen_weight import FrozenWeight
from wgrad.train.model.activations import GATED, PLAIN, gated, xielu
from wgrad.train.model.altup import CORRECT, LAUREL_NORM, LEFT, PREDICT, RIGHT, ROUTER, ROUTER_NORM, SCALE, AltUp
from wgrad.train.model.attention import Attention
from wgrad.train.model.balance import Balance
from wgrad.train.model.experts import EXPERTS
from wgrad.train.model.kv_cache import KVCache
from wgrad.train.model.layer_kinds import layer_kind
from wgrad.train.model.layers import Beside, through_layers
from wgrad.train.model.lora import Adapter, linear_modules
from wgrad.train.model.mixers import mix
from wgrad.train.model.mixture import mixture
from wgrad.train.model.model_config import Mixer, ModelConfig
from wgrad.train.model.model_inputs import Inputs
from wgrad.train.model.per_layer import GATE, NORM, OUT, OUT_NORM, PROJECTION, TABLE
from wgrad.train.model.projections import NOTHING, Kept
from wgrad.train.model.stacks import GATE_UP
from wgrad.train.model.streamed_weights import StreamedWeights
from wgrad.train.model.token_tables import TokenTables
from wgrad.train.model.weights import EMBEDDING, HEAD, HEAD_BIAS, LAYER_SCALE, XIELU, mlp_row_bytes

# In recomputed layers, gate, up, their product and the gradients of these are in memory for only a chunk of rows at a
# time. Chunks depend only on shapes and options, so that free memory and the weights' location do not change results.
MLP_CHUNK_BYTES, MLP_CHUNKS_ABOVE = 768 << 20, 4096


class Mixed(NamedTuple):
    """A model with several adapters, and the index of one of them; -1: none (adapter_mix.py)."""

    model: Model
    number: int


class Model(Attention):
    """A decoder on a device.

    Args:
        weights: Frozen Arrays or FrozenWeights, or trainable Tensors, by the names of `weights.weight_specs`.
            StreamedWeights for weights in main memory; a backward then needs `recompute`.
        adapter: Low-rank adapters.
        positions: Rows of the rotary tables, at least the length of the longest sequence.
        dtype: Compute dtype: float32, float16 or bfloat16.
        recompute: Number of layers, from the first on, that keep only their input for the backward; True means all.
        offload: Number of these layers, from the first on, that keep it in main memory.
        keep_attention, kept: Whether they also keep attention's output, and which outputs are kept in addition.
        keep_norms: Whether other layers keep their norms' outputs.
        mlp_chunk_bytes, mlp_chunks_above: Replace MLP_CHUNK_BYTES and MLP_CHUNKS_ABOVE.
        balance: Load-balancing loss of the routers, which `loss` adds in training.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, Any],
        device: Device,
        *,
        adapter: Adapter | None = None,
        positions: int,
        dtype: Any = np.float32,
        recompute: bool | int = False,
        offload: int = 0,
        keep_attention: bool = False,
        kept: Kept = NOTHING,
        keep_norms: bool = True,
        mlp_chunk_bytes: int | None = None,
        mlp_chunks_above: int | None = None,
        balance: Balance | None = None,
    ) -> None:
        parts: dict[str, Any] = {"adapter": adapter, "dtype": dtype, "keep_norms": keep_norms}
        super().__init__(config, weights, device, positions=positions, **parts)
        self.recompute, self.offload, self.keep_attention, self.kept = recompute, offload, keep_attention, kept
        self.mlp_chunk_bytes, self.mlp_chunks_above = mlp_chunk_bytes, mlp_chunks_above
        self._streamed = weights if isinstance(weights, StreamedWeights) else None
        self.balance = balance
        self._balance: Balance | None = None  # of the current forward, for its recomputation
        self.passed: dict[int, Callable[[], None]] = {}  # by layer: called once a backward has passed its input
        self.mixed: Mixed | None = None  # set if sequences of other adapters may share this model's batches

    @property
    def expert_use(self) -> str:
        """Return a line on the experts that decoding found in slots so far; "" if there are none."""
        needed, missing = (0, 0) if self._streamed is None else self._streamed.use
        found = f"{100 * (1 - missing / needed):.0f} % of {needed:,}" if needed else ""
        return found and f"experts: {found} were on the device"

    def token_tables(self, tokens: int) -> TokenTables | None:
        """Return tables for a batch of `tokens` tokens, which the caller fills; None if no sequence needs them."""
        return TokenTables.empty(self.config, tokens, self.positions, self.device)

    def _whole(self, name: str) -> Tensor | None:
        """Return the adapter's whole weight of this name, if it has one."""
        return None if self.adapter is None else self.adapter.whole.get(name)

    @property
    def head(self) -> Any:
        """Return the output weight [V, C]; it is the embedding if they are tied and the adapter has no head."""
        if (whole := self._whole(HEAD)) is not None:
            return whole
        name = EMBEDDING if self.config.tie_word_embeddings else HEAD
        return self.weights[name] if self._streamed is None else self._streamed.table(name)

    @property
    def _head_bias(self) -> Any:
        whole = self._whole(HEAD_BIAS)
        return self.weights.get(HEAD_BIAS) if whole is None else whole

    @property
    def moves(self) -> bool:
        """Return whether weights or layers' inputs come from main memory."""
        return self._streamed is not None or self.offload > 0

    @property
    def recomputed(self) -> int:
        """Return how many layers, from the first on, are recomputed in the backward."""
        layers = self.config.num_hidden_layers
        return layers if self.recompute is True else min(self.recompute, layers)

    @property
    def variants(self) -> set[str]:
        """Return the formats and dtypes of its projections."""
        weights = self.weights if self._streamed is None else self._streamed.projections
        rounded = {n: m.rounded for n, m in (self.adapter.modules if self.adapter else {}).items() if m.rounded}
        found = (rounded.get(module, weights[f"{module}.weight"]) for module in linear_modules(self.config))
        return {w.variant if isinstance(w, FrozenWeight) else np.dtype(w.dtype).name for w in found}

    # ---- whole passes ------------------------------------------------------------------------
    def hidden(self, inputs: Inputs, cache: KVCache | None = None, balance: Balance | None = None) -> Tensor:
        """Return the head's input, [N, E]. balance: gets the routers' logits and choices."""
        self._balance = balance
        if self._streamed is not None:
            adapted = self.adapter is not None and any(EXPERTS in module for module in self.adapter.modules)
            is_step = inputs.doc_start.shape[-1] == 1
            self._streamed.begin(None if cache is None else inputs.ids.size, adapted, is_step)
        table = self._whole(EMBEDDING)
        table = self.weights[EMBEDDING] if table is None else table
        h = F.embedding(table, inputs.ids, dtype=np.float32, device=self.device)
        h = self._with_positions(h, inputs)
        if self.config.embedding_scale != 1:
            # Rounded to the compute dtype as in transformers, since the weights were trained with that factor.
            h = F.scale(h, float(self.dtype.type(self.config.embedding_scale)))
        if self.config.embedding_norm:
            h = F.rms_norm(h, self._constant(h.shape[1], 1), self.config.rms_norm_eps, dtype=np.float32)
        beside = self._beside(h, inputs)
        project = partial(self._outer, inputs=inputs)
        h = self.config.altup.begin(h, project) if self.config.altup else h
        h = through_layers(
            lambda index, h, *beside: self._layer(index, h, inputs, cache, beside), h, beside,
            recomputed=self.recomputed if cache is None else 0, offload=self.offload,
            keep_attention=self.keep_attention, passed=self.passed, kind_of=partial(layer_kind, self),
            begin=(lambda index: None) if self._streamed is None else self._streamed.enter,
        )  # fmt: skip
        h = self.config.altup.end(h, project) if self.config.altup else h
        h = self._to_head(h, inputs)
        return h if self.config.logit_scale == 1 else F.scale(h, self.config.logit_scale)

    def loss(self, inputs: Inputs) -> Tensor:
        """Return the sum over targets of the cross-entropy in nats, float32 [1]; in training plus `balance`, if any."""
        balance = self.balance if is_recording() else None
        if balance is None:
            return self._cross_entropy(inputs)
        balance.begin(inputs.doc_start)
        assert inputs.targets is not None
        return balance.added(self._cross_entropy(inputs, balance=balance), inputs.targets)

    def token_losses(self, inputs: Inputs) -> Tensor:
        """Return each target's cross-entropy in nats, float32 [N], 0 without a target. The head gets no gradient."""
        return self._cross_entropy(inputs, per_target=True)

    def _cross_entropy(self, inputs: Inputs, per_target: bool = False, balance: Balance | None = None) -> Tensor:
        options: dict[str, Any] = {"softcap": self.config.logit_softcap, "per_target": per_target}
        bias = self._head_bias
        return F.linear_cross_entropy(
            self.hidden(inputs, balance=balance), self.head, inputs.targets, bias=bias, **options
        )

    @contextmanager
    def without_adapter(self) -> Iterator[None]:
        """Compute the base model within the block, with adapters off."""
        adapter, self.adapter = self.adapter, None
        try:
            yield
        finally:
            self.adapter = adapter

    def logits(self, hidden: Array) -> Array:
        """Return logits, float32 [M, V], without gradient. hidden: [M, C]."""
        with no_grad():
            bias = self._head_bias
            logits = F.linear(Tensor(hidden, self.device), self.head, bias=bias, dtype=np.float32).data
        cap = self.config.logit_softcap
        return self.device.softcap(logits, cap) if cap else logits

    def _beside(self, embedded: Tensor, inputs: Inputs) -> Beside:
        """Return the layers' inputs besides the stream. embedded: embeddings [N, C], with which the stream begins."""
        c = self.config
        if c.per_layer is None:
            return Beside(c)
        projected = self._outer(PROJECTION, embedded, inputs)
        norm, eps = self._norm_weight(NORM, c.per_layer.width), c.rms_norm_eps
        return Beside(c, c.per_layer.inputs(c.hidden_size, projected, self.weights[TABLE], norm, eps, inputs.ids))

    def _outer(self, module: str, x: Tensor, inputs: Inputs) -> Tensor:
        """Return a projection of the stream in float32."""
        return F.cast(self._linear(module, F.cast(x, self.dtype), inputs), np.float32)

    # ---- a layer -----------------------------------------------------------------------------
    def _layer(
        self, index: int, h: Tensor, inputs: Inputs, cache: KVCache | None, beside: Sequence[Tensor]
    ) -> Tensor | tuple[Tensor, ...]:
        """Return the stream after a layer, and the tensors that `Beside` keeps. beside: inputs from `Beside`."""
        c, prefix = self.config, f"model.layers.{index}."
        before, after, *_ = c.norms_of(index)
        own, shared = (beside[:1], beside[1:]) if c.per_layer else ((), beside)
        if c.altup is not None:
            h, keys = self._altup_layer(c.altup, index, h, inputs, cache, own, shared)
            return (h, *keys) if cache is None and c.shares_keys(index) else h
        if not c.mixes(index):
            return self._mlp_half(index, h, inputs, cache, own)
        y, h = self._norm(prefix, before, h)
        if (linear := c.linear_of(index)) is not None and linear.alongside:
            mixed, scale = self._mixed(linear, index, y, inputs, cache), linear.out_scale
            h = self._to_stream(prefix, linear.out_proj, after, mixed, h, inputs, scale=scale)
        with keeping_matmuls(self.kept.projections > 0):
            o_proj, attended, keys = self._attended(index, y, inputs, cache, shared)
        if c.parallel:
            h = self._mlp_half(index, h, inputs, cache, own, y if c.mlp_norm == before else None)
            return self._to_stream(prefix, o_proj, after, attended, h, inputs, last=True)
        last, scale = not c.has_mlp(index), c.attention_out_scale
        h = self._to_stream(prefix, o_proj, after, attended, h, inputs, last=last, scale=scale)
        h = h if last else self._mlp_half(index, h, inputs, cache, own)
        return (h, *keys) if cache is None and c.shares_keys(index) else h

    def _altup_layer(
        self,
        altup: AltUp,
        index: int,
        streams: Tensor,
        inputs: Inputs,
        cache: KVCache | None,
        own: Sequence[Tensor],
        shared: Sequence[Tensor],
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """Run a layer of several streams [S, N, C]. Return the streams, and the keys and values of `_attended`."""
        prefix, scale = f"model.layers.{index}.", 2**-0.5
        before, after, *_ = self.config.norms_of(index)
        # A reshape sums the gradients that reach it in the order of its operands. This keeps sums equal whether the
        # backward reaches keys and values, which other layers read, directly or through a recomputed layer.
        streams = streams.reshape(*streams.shape)
        streams = altup.predict(streams, self._coefficients(prefix, PREDICT, streams[0], inputs))
        y, h = self._norm(prefix, before, streams[0])
        o_proj, attended, keys = self._attended(index, y, inputs, cache, shared)
        laurel = self._linear(prefix + RIGHT, self._linear(prefix + LEFT, y, inputs), inputs)
        laurel = y + self._normed(prefix + LAUREL_NORM, laurel, np.float32)
        h = (laurel + self._to_stream(prefix, o_proj, after, attended, h, inputs)) * scale
        h = self._mlp_alone(index, h, inputs, None, last=False)
        streams = altup.correct(streams.reshape(*streams.shape), h, self._coefficients(prefix, CORRECT, h, inputs))
        first, *others = streams.split(1)
        h = (first * self._tensor(prefix + SCALE)).reshape(*h.shape)
        gate = self._linear(prefix + GATE, F.cast(h, self.dtype), inputs)
        added = self._linear(prefix + OUT, GATED[self.config.hidden_act](gate, *own), inputs)
        added = self._normed(prefix + OUT_NORM, added, np.float32)
        return F.cat([first, *(other + added for other in others)]), keys

    def _coefficients(self, prefix: str, module: str, x: Tensor, inputs: Inputs) -> Tensor:
        """Return the coefficients that mix streams, float32 [N, ...]."""
        routed = self._linear(prefix + ROUTER, self._normed(prefix + ROUTER_NORM, x, self.dtype), inputs)
        modes = F.tanh(F.cast(routed, np.float32) * (1 / self.config.hidden_size))
        return F.cast(self._linear(prefix + module, F.cast(modes, self.dtype), inputs), np.float32)

    def _attended(
        self, index: int, y: Tensor, inputs: Inputs, cache: KVCache | None, shared: Sequence[Tensor]
    ) -> tuple[str, Tensor, Sequence[Tensor]]:
        """Return the path of attention's output projection, its input [N, H D], and the keys and values."""
        c = self.config
        linear = c.linear_of(index)
        if linear is None or linear.alongside:
            y = y if c.attention_in_scale == 1 else F.scale(y, c.attention_in_scale)
            return c.o_proj, *self._attention(index, y, inputs, cache, shared)
        return linear.out_proj, self._mixed(linear, index, y, inputs, cache), ()

    def _mixed(self, linear: Mixer, index: int, y: Tensor, inputs: Inputs, cache: KVCache | None) -> Tensor:
        """Return the input of the output projection of the layer that replaces attention or runs alongside it."""
        c, prefix = self.config, f"model.layers.{index}."
        y = y if linear.in_scale == 1 else F.scale(y, linear.in_scale)
        rows = {"doc_start": inputs.doc_start, "cache_len": inputs.cache_len, "cache": cache, "layer": index}
        rows["ones"] = partial(self._constant, value=1)
        project = partial(self._linear, x=y, inputs=inputs)
        return mix(linear, self.weights, prefix, project, c.rms_norm_eps, **rows)

    def _mlp_half(
        self,
        index: int,
        h: Tensor,
        inputs: Inputs,
        cache: KVCache | None,
        own: Sequence[Tensor] = (),
        y: Tensor | None = None,
    ) -> Tensor:
        """Run `_mlp`, in chunks of rows if the layer is recomputed and the sequence is long."""
        c, (kept, staying) = self.config, self.kept.chunks(index, self.recomputed)
        # No chunks with dropout, which would drop the same elements in each since it counts from the first row, or with
        # a balance, which counts the tokens of a whole micro-batch.
        if index < self.recomputed and cache is None and inputs.seed is None and self._balance is None:
            each, most = mlp_row_bytes(c, self.dtype.itemsize), self.mlp_chunk_bytes or MLP_CHUNK_BYTES
            above = MLP_CHUNKS_ABOVE if self.mlp_chunks_above is None else self.mlp_chunks_above
            if rows := chunk_rows(h.shape[0], each, most, above):
                # If attention does not read h, nothing else does, so its gradient may replace it.
                fn = partial(self._mlp, index, inputs, None)
                return in_row_chunks(fn, h, rows, *own, spent=not c.parallel, kept=kept, staying=staying)
        with keeping_matmuls(kept > 0, staying=kept == staying > 0):
            return self._mlp(index, inputs, y, h, *own)

    def _mlp(self, index: int, inputs: Inputs, y: Tensor | None, h: Tensor, *own: Tensor) -> Tensor:
        """Run a layer's MLP with norm and residual, and the parts after it, which treat each token by itself.

        own: the layer's own embeddings. y: the norm of h, if it has been computed.
        """
        prefix = f"model.layers.{index}."
        h = self._mlp_alone(index, h, inputs, y, last=not own)
        for embedded in own:
            gate = self._linear(prefix + GATE, F.cast(h, self.dtype), inputs)
            h = self._to_stream(prefix, OUT, OUT_NORM, GATED[self.config.hidden_act](gate, embedded), h, inputs)
        return h * self._tensor(prefix + LAYER_SCALE) if self.config.layer_scale else h

    def _mlp_alone(self, index: int, h: Tensor, inputs: Inputs, y: Tensor | None, last: bool) -> Tensor:
        c, prefix = self.config, f"model.layers.{index}."
        *_, before, after = c.norms_of(index)
        if y is None:
            y, h = self._norm(prefix, before, h)
        if c.has_experts(index):
            routed = partial(
                mixture, c, self.weights, self.adapter, prefix, projection=partial(self._linear, inputs=inputs),
                one=self._constant(1, 1), balance=self._balance,
                group_by=partial(self._streamed.group, index) if self._streamed is not None else None,
            )  # fmt: skip
            if c.experts is not None and c.experts.norms is not None:
                return self._with_mlp(index, y, h, inputs, routed)
            return F.add(h, self._normed(prefix + after, routed(y, None), np.float32)) if after else routed(y, h)
        activated = self._activated(index, y, inputs)
        return self._to_stream(prefix, c.down_proj, after, activated, h, inputs, last=last, scale=c.down_scale)

    def _with_mlp(self, index: int, y: Tensor, h: Tensor, inputs: Inputs, routed: Callable[..., Tensor]) -> Tensor:
        """Experts alongside an MLP: h plus the normed sum of both, each normed."""
        c, prefix = self.config, f"model.layers.{index}."
        assert c.experts is not None and c.experts.norms is not None
        of_mlp, before, of_experts = (prefix + norm for norm in c.experts.norms)
        made = self._linear(prefix + c.down_proj, self._activated(index, y, inputs), inputs)
        seen = F.rms_norm(h, self.weights[prefix + c.experts.router_scale], c.rms_norm_eps, dtype=self.dtype)
        found = routed(self._normed(before, h, self.dtype), None, routed=seen)
        both = F.add(self._normed(of_mlp, made, np.float32), self._normed(of_experts, found, np.float32))
        return F.add(h, self._normed(prefix + c.norms_of(index)[3], both, np.float32))

    def _splits_gate_up(self, index: int) -> bool:
        """Return whether gate and up may come from one projection."""
        c = self.config
        return not (c.altup is not None and c.altup.sparsity[index] > 0) and c.gate_scale == 1

    def _is_stacked(self, stack: str) -> bool:
        splits = self._splits_gate_up if stack.endswith(GATE_UP) else self._splits_qkv
        return splits(int(stack.split(".")[2])) and self._has_stack(stack)

    def _activated(self, index: int, y: Tensor, inputs: Inputs) -> Tensor:
        """Return the input of the MLP's last projection."""
        c, prefix = self.config, f"model.layers.{index}."
        if not c.gated:
            up = self._linear(prefix + c.up_proj, y, inputs)
            if c.hidden_act == "xielu":
                return xielu(up, *(self._tensor(prefix + name) for name in XIELU), dtype=self.dtype)
            return PLAIN[c.hidden_act](up)
        act = partial(gated, c.hidden_act, self.kept.gated)
        if c.gate_up_proj:
            return act(self._linear(prefix + c.gate_up_proj, y, inputs))
        if self._splits_gate_up(index) and (both := self._stacked(prefix + GATE_UP, y, inputs)) is not None:
            return act(both)
        gate = self._linear(prefix + c.gate_proj, y, inputs)
        gate = c.altup.sparse(index, gate) if c.altup else gate
        gate = gate if c.gate_scale == 1 else F.scale(gate, c.gate_scale)
        return act(gate, self._linear(prefix + c.up_proj, y, inputs))
