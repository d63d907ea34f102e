"""The decoder of the LLaMA-type families, from its configuration (what families.py says of it) and its weights.

Shapes: B rows, T tokens, N = B * T, C hidden, H heads, G key/value heads, D head width, V vocabulary. With compute
float16 or bfloat16 what feeds a product is of that type (norm outputs, q k v, attention, gate, up); the residual
stream, the statistics and the loss are float32.
Sources: LLaMA (arXiv 2302.13971), grouped heads (2305.13245), SwiGLU (2002.05202).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from wgrad.autograd import functional as F
from wgrad.autograd.chunks import even_rows, in_row_chunks
from wgrad.autograd.functional import LoraTerm
from wgrad.autograd.ops.decoding import check_room
from wgrad.autograd.ops.sinks import attend
from wgrad.autograd.tensor import Tensor, is_recomputing, no_grad
from wgrad.device.contract import Array, Device
from wgrad.device.formats.frozen_weight import FrozenWeight
from wgrad.train.model.activations import GATED, PLAIN, xielu
from wgrad.train.model.delta_net import gated, split_gate
from wgrad.train.model.dora import inverse_of
from wgrad.train.model.kv_cache import KVCache
from wgrad.train.model.layers import through_layers
from wgrad.train.model.lora import Adapter, linear_modules
from wgrad.train.model.mixers import mix
from wgrad.train.model.mixture import has_experts, mixture
from wgrad.train.model.model_config import ModelConfig
from wgrad.train.model.model_inputs import Inputs
from wgrad.train.model.rope_scaling import grown, rope_tables
from wgrad.train.model.stacks import GATE_UP, QKV, parts_of
from wgrad.train.model.streamed_weights import StreamedWeights
from wgrad.train.model.token_tables import TokenTables
from wgrad.train.model.weights import EMBEDDING, HEAD, HEAD_BIAS, XIELU

# Where layers are recomputed, a long row's gate, up, their product and the gradients of the three stand in memory for
# as many rows at a time. By shapes and options alone: where weights lie, and how much memory there is, changes no bit.
MLP_CHUNK_BYTES, MLP_CHUNKS_ABOVE = 768 << 20, 4096


class Model:
    """A decoder on a device.

    weights: name -> frozen Array or FrozenWeight, or trainable Tensor, as in `weights.weight_specs`; StreamedWeights
    where they live in main memory, which a backward wants recompute for. adapter: low-rank
    adapters. positions: rows of the rotary tables, at least the longest sequence. recompute: of the first so many
    layers (True: of all) keep only the input for the backward; offload: of the first so many of these keep it in main
    memory; keep_attention: and with it what attention gives. keep_norms: others keep their norms' outputs.
    mlp_chunk_bytes: in place of MLP_CHUNK_BYTES. dtype: float32, float16 or bfloat16, see above.
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
        keep_norms: bool = True,
        mlp_chunk_bytes: int | None = None,
    ) -> None:
        self.config, self.weights, self.device, self.adapter = config, weights, device, adapter
        self.dtype, self.recompute, self.offload = np.dtype(dtype), recompute, offload
        self.keep_attention, self.keep_norms, self.mlp_chunk_bytes = keep_attention, keep_norms, mlp_chunk_bytes
        self._streamed = weights if isinstance(weights, StreamedWeights) else None
        self.passed: dict[int, Callable[[], None]] = {}  # layer -> called once a backward has passed its input
        self.watch: Callable[[str, Tensor], object] = lambda module, x: None  # called with each projection's input
        self.positions = positions
        tables = rope_tables(config.rope, positions)
        self.cos, self.sin = (device.upload(table) for table in tables)
        self._of_queries: tuple[Array, Array] | None = None  # where they differ from those of keys
        if config.query_growth and positions > config.query_length:
            cos, sin = (device.upload(grown(table, config.query_growth, config.query_length)) for table in tables)
            self._of_queries = (cos, sin)
        self._constants: dict[tuple[int, int], Array] = {}
        self._local = (self.cos, self.sin)  # of layers with a window
        if config.local_rope is not None and config.local_rope != config.rope:
            cos, sin = (device.upload(table) for table in rope_tables(config.local_rope, positions))
            self._local = (cos, sin)

    def token_tables(self, tokens: int) -> TokenTables | None:
        """For a batch of `tokens` tokens, to be written to; None where no sequence needs any."""
        return TokenTables.empty(self.config, tokens, self.positions, self.device)

    def _whole(self, name: str) -> Tensor | None:
        """The adapter's own of a weight."""
        return None if self.adapter is None else self.adapter.whole.get(name)

    @property
    def head(self) -> Any:
        """Output weight [V, C]: the embedding's own where the two are tied, and the adapter has none."""
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
        """The kinds of its projections: those of formats, and types of numbers."""
        weights = self.weights if self._streamed is None else self._streamed.projections
        found = (weights[f"{module}.weight"] for module in linear_modules(self.config))
        return {w.variant if isinstance(w, FrozenWeight) else np.dtype(w.dtype).name for w in found}

    # ---- whole passes ------------------------------------------------------------------------
    def hidden(self, inputs: Inputs, cache: KVCache | None = None) -> Tensor:
        """[N, C]: the output of the final norm, of which the head makes logits."""
        if self._streamed is not None:
            self._streamed.begin()
        table = self._whole(EMBEDDING)
        table = self.weights[EMBEDDING] if table is None else table
        h = F.embedding(table, inputs.ids, dtype=np.float32, device=self.device)
        if self.config.embedding_scale != 1:
            # In the compute dtype, as transformers has it: what the weights were trained with.
            h = F.scale(h, float(self.dtype.type(self.config.embedding_scale)))
        if self.config.embedding_norm:
            h = F.rms_norm(h, self._constant(h.shape[1], 1), self.config.rms_norm_eps, dtype=np.float32)
        h = through_layers(
            lambda index, h: self._layer(index, h, inputs, cache), h, self.config.num_hidden_layers,
            recomputed=self.recomputed if cache is None else 0, offload=self.offload,
            keep_attention=self.keep_attention, passed=self.passed,
        )  # fmt: skip
        h = self._normed(self.config.final_norm, h, self.dtype)
        return h if self.config.logit_scale == 1 else F.scale(h, self.config.logit_scale)

    def loss(self, inputs: Inputs) -> Tensor:
        """float32 [1]: the sum over targets of the cross-entropy in nats."""
        return self._cross_entropy(inputs)

    def token_losses(self, inputs: Inputs) -> Tensor:
        """float32 [N]: the cross-entropy of each target in nats, 0 where there is none. The head has no gradient."""
        return self._cross_entropy(inputs, per_target=True)

    def _cross_entropy(self, inputs: Inputs, per_target: bool = False) -> Tensor:
        options: dict[str, Any] = {"softcap": self.config.logit_softcap, "per_target": per_target}
        bias = self._head_bias
        return F.linear_cross_entropy(self.hidden(inputs), self.head, inputs.targets, bias=bias, **options)

    @contextmanager
    def without_adapter(self) -> Iterator[None]:
        """Compute the base model within the block, with adapters off."""
        adapter, self.adapter = self.adapter, None
        try:
            yield
        finally:
            self.adapter = adapter

    def logits(self, hidden: Array) -> Array:
        """[M, C] -> float32 [M, V]. Without gradient."""
        with no_grad():
            bias = self._head_bias
            logits = F.linear(Tensor(hidden, self.device), self.head, bias=bias, dtype=np.float32).data
        cap = self.config.logit_softcap
        return self.device.softcap(logits, cap) if cap else logits

    # ---- a layer -----------------------------------------------------------------------------
    def _layer(self, index: int, h: Tensor, inputs: Inputs, cache: KVCache | None) -> Tensor:
        if self._streamed is not None:
            self._streamed.enter(index)
        c, prefix = self.config, f"model.layers.{index}."
        y, h = self._norm(prefix, c.attention_norm, h)
        o_proj, attended = self._attended(index, y, inputs, cache)
        if c.parallel:
            h = self._mlp_half(index, h, inputs, cache, y)
            return self._to_stream(prefix, o_proj, c.attention_out_norm, attended, h, inputs, last=True)
        h = self._to_stream(prefix, o_proj, c.attention_out_norm, attended, h, inputs)
        return self._mlp_half(index, h, inputs, cache)

    def _attended(self, index: int, y: Tensor, inputs: Inputs, cache: KVCache | None) -> tuple[str, Tensor]:
        """Return the path of attention's output projection, and its input [N, H D]."""
        c, prefix = self.config, f"model.layers.{index}."
        if (linear := c.linear_of(index)) is None:
            return c.o_proj, self._attention(index, y, inputs, cache)
        rows = {"doc_start": inputs.doc_start, "cache_len": inputs.cache_len, "cache": cache, "layer": index}
        project = partial(self._linear, x=y, inputs=inputs)
        return linear.out_proj, mix(linear, self.weights, prefix, project, c.rms_norm_eps, **rows)

    def _mlp_half(
        self, index: int, h: Tensor, inputs: Inputs, cache: KVCache | None, y: Tensor | None = None
    ) -> Tensor:
        """`_mlp`; of a long row that is recomputed, in chunks."""
        c, prefix = self.config, f"model.layers.{index}."
        # Dropout counts elements from the first row that it is given: in chunks it would drop the same ones in each.
        if index < self.recomputed and cache is None and inputs.seed is None:
            most = (self.mlp_chunk_bytes or MLP_CHUNK_BYTES) // (6 * c.mlp_width * self.dtype.itemsize)
            if h.shape[0] > max(most, MLP_CHUNKS_ABOVE):
                rows = even_rows(h.shape[0], most)
                # Without y, h is what `_to_stream` has just made for this half alone.
                return in_row_chunks(lambda x: self._mlp(prefix, x, inputs), h, rows, spent=y is None)
        return self._mlp(prefix, h, inputs, y)

    def _mlp(self, prefix: str, h: Tensor, inputs: Inputs, y: Tensor | None = None) -> Tensor:
        """A layer's MLP, norm and residual included: of each row by itself. y: the norm of h, where it is there."""
        c = self.config
        if y is None:
            y, h = self._norm(prefix, c.mlp_norm, h)
        if has_experts(c, prefix):
            return mixture(c, self.weights, self.adapter, prefix, y, h, partial(self._linear, inputs=inputs))
        activated = self._activated(prefix, y, inputs)
        return self._to_stream(prefix, c.down_proj, c.mlp_out_norm, activated, h, inputs, last=True)

    def _activated(self, prefix: str, y: Tensor, inputs: Inputs) -> Tensor:
        """Return the input of the MLP's last projection."""
        c = self.config
        if not c.gated:
            up = self._linear(prefix + c.up_proj, y, inputs)
            if c.hidden_act == "xielu":
                return xielu(up, *(self._tensor(prefix + name) for name in XIELU), dtype=self.dtype)
            return PLAIN[c.hidden_act](up)
        if c.gate_up_proj:
            return GATED[c.hidden_act](self._linear(prefix + c.gate_up_proj, y, inputs))
        if (both := self._stacked(prefix + GATE_UP, y, inputs)) is not None:
            return GATED[c.hidden_act](both)
        gate = self._linear(prefix + c.gate_proj, y, inputs)
        return GATED[c.hidden_act](gate, self._linear(prefix + c.up_proj, y, inputs))

    def _norm(self, prefix: str, norm: str, h: Tensor) -> tuple[Tensor, Tensor]:
        """-> the norm of the residual stream, or the stream itself where the family has none here, and the stream to go
        on with."""
        if not norm:
            return F.cast(h, self.dtype) if self.dtype != h.dtype else h, h
        if self.config.layer_norm:
            return self._normed(prefix + norm, h, self.dtype), h
        weight, eps = self._norm_weight(prefix + norm, h.shape[1]), self.config.rms_norm_eps
        return F.rms_norm_residual(h, weight, eps, dtype=self.dtype, again=not self.keep_norms)

    def _normed(self, module: str, x: Tensor, dtype: Any) -> Tensor:
        weight, eps = self._norm_weight(module, x.shape[1]), self.config.rms_norm_eps
        if self.config.layer_norm:
            bias = self.weights.get(f"{module}.bias")
            bias = self._constant(x.shape[1], 0) if bias is None else bias
            return F.layer_norm(x, weight, bias, eps, dtype=dtype)
        return F.rms_norm(x, weight, eps, dtype=dtype)

    def _norm_weight(self, module: str, width: int) -> Any:
        weight = self.weights.get(f"{module}.weight")
        return self._constant(width, 1) if weight is None else weight

    def _constant(self, width: int, value: int) -> Array:
        """float32 [width]: the weight or the bias of a norm that has none."""
        if (width, value) not in self._constants:
            self._constants[width, value] = self.device.upload(np.full(width, value, np.float32))
        return self._constants[width, value]

    def _to_stream(
        self, prefix: str, module: str, norm: str, x: Tensor, h: Tensor, inputs: Inputs, *, last: bool = False
    ) -> Tensor:
        """The residual stream h plus a projection of x, which is normed or scaled first where the family does that.
        last: the sum goes into nothing but the layer's output, which nobody reads where the layer is made again."""
        if not norm and self.config.residual_scale == 1:
            return self._linear(prefix + module, x, inputs, residual=h, unread=last and is_recomputing())
        y = self._linear(prefix + module, x, inputs)
        if norm:
            y = self._normed(prefix + norm, y, np.float32)
        if self.config.residual_scale != 1:
            y = F.scale(y, self.config.residual_scale)
        return F.add(h, y)

    def _attention(self, index: int, y: Tensor, inputs: Inputs, cache: KVCache | None) -> Tensor:
        """-> [N, H D], before the output projection."""
        c, rows, tokens = self.config, inputs.batch, inputs.tokens
        q, k, v, gate, rotated = self._queries_keys_values(index, y, inputs, cache)
        q = q.reshape(rows, tokens, c.num_attention_heads, c.head_dim)
        if cache is not None:
            k, v = self._append(index, k, v, inputs, cache, rotate=c.use_rope[index] and not rotated)
        else:
            k = k.reshape(rows, tokens, c.num_key_value_heads, c.head_dim)
            v = v.reshape(rows, tokens, c.num_key_value_heads, c.head_dim)
        scale, sinks = c.score_scale or c.head_dim**-0.5, self.weights.get(f"model.layers.{index}.self_attn.sinks")
        options: dict[str, Any] = {"scale": scale, "window": c.windows[index], "softcap": c.score_softcap}
        o = attend(q, k, v, sinks, inputs.doc_start, inputs.cache_len, **options)
        o = o.reshape(rows * tokens, c.q_size)
        return o if gate is None else gated(o, gate)

    def _queries_keys_values(
        self, index: int, y: Tensor, inputs: Inputs, cache: KVCache | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, bool]:
        """-> q [N, H, D], k and v [N, G, D], the gate of the output [N, H D] where there is one, and whether k is
        rotated as q is: where it goes to a cache by itself, what appends it does that."""
        c, prefix = self.config, f"model.layers.{index}.self_attn."
        tables = self._tables(index, inputs)
        if c.use_rope[index] and not (c.qk_norm or c.clip_qkv or c.attention_gate or self._of_queries):
            qkv = self._stacked(f"model.layers.{index}.{QKV}", y, inputs)
            if qkv is not None:
                heads = {"heads": c.num_attention_heads, "kv_heads": c.num_key_value_heads}
                return *F.rope_split(qkv, *tables, **heads, interleaved=c.interleaved), None, True
        q, k, v = (self._linear(f"{prefix}{part}_proj", y, inputs) for part in "qkv")
        q, gate = split_gate(q, c.num_attention_heads, c.head_dim) if c.attention_gate else (q, None)
        if c.clip_qkv:
            q, k, v = (F.maximum(F.minimum(x, c.clip_qkv), -c.clip_qkv) for x in (q, k, v))
        if not c.qk_norm_last:
            q, k = self._head_norm(index, c.q_norm, q), self._head_norm(index, c.k_norm, k)
        q = q.reshape(-1, c.num_attention_heads, c.head_dim)
        k, v = (x.reshape(-1, c.num_key_value_heads, c.head_dim) for x in (k, v))
        appended = cache is not None and not c.qk_norm_last  # which rotates k as well
        if c.use_rope[index]:
            cos, sin = self._of_queries or tables[:2]
            q = F.rope(q, cos, sin, tables[2], interleaved=c.interleaved)
            k = k if appended else F.rope(k, *tables, interleaved=c.interleaved)
        if c.qk_norm_last:
            q, k = self._head_norm(index, c.q_norm, q), self._head_norm(index, c.k_norm, k)
        return q, k, v, gate, not appended

    def _tables(self, index: int, inputs: Inputs) -> tuple[Array, Array, Array]:
        """cos and sin of a layer, and the row of each token."""
        slides, own = self.config.windows[index] > 0, inputs.tables
        if own is not None:
            return *(own.windows if slides else own.layers), own.rows
        return *(self._local if slides else (self.cos, self.sin)), inputs.positions

    def _append(
        self, index: int, k: Tensor, v: Tensor, inputs: Inputs, cache: KVCache, *, rotate: bool
    ) -> tuple[Tensor, Tensor]:
        """k (still to be rotated where `rotate`), v [N, G, D] to the cache of a layer -> all its keys and values
        [B, S, G, D]."""
        device, keys, values = self.device, cache.keys[index], cache.values[index]
        check_room("rope_append" if rotate else "kv_append", keys, inputs.tokens, inputs.cache_len)
        if rotate:
            tables = self._tables(index, inputs)
            options = {"interleaved": self.config.interleaved}
            device.rope_append(k.data, v.data, *tables, keys, values, inputs.cache_len, **options)
        else:
            for part, new in ((keys, k), (values, v)):
                rows = new.reshape(inputs.batch, inputs.tokens, *new.shape[1:])
                device.kv_append(part, rows.data, inputs.cache_len)
        return Tensor(keys, device), Tensor(values, device)

    def _head_norm(self, index: int, module: str, x: Tensor) -> Tensor:
        """QK-norm: each head of [N, H * D] by itself (Qwen3), or all at once (OLMo 2); x as it is without one."""
        if not self.config.qk_norm:
            return x
        weight = self._norm_weight(f"model.layers.{index}.{module}", self.config.head_dim)
        shape, width = x.shape, weight.shape[0]
        x = x.reshape(x.size // width, width)
        return F.rms_norm(x, weight, self.config.rms_norm_eps, dtype=self.dtype).reshape(*shape)

    def _tensor(self, name: str) -> Tensor:
        weight = self.weights[name]
        return weight if isinstance(weight, Tensor) else Tensor(weight, self.device)

    def _linear(
        self, module: str, x: Tensor, inputs: Inputs, *, residual: Tensor | None = None, unread: bool = False
    ) -> Tensor:
        """A projection with its bias and adapter. With a residual the output is the float32 stream, else `dtype`.
        unread: see `F.linear`."""
        self.watch(module, x)
        weight, bias = self.weights[module + ".weight"], self.weights.get(module + ".bias")
        dtype = self.dtype if residual is None else np.float32
        options: dict[str, Any] = {"lora": self._lora(module, inputs.seed), "dtype": dtype}
        linear = F.linear_quantized if isinstance(weight, FrozenWeight) else F.linear
        own = self.adapter.modules.get(module) if self.adapter else None
        if own is not None and own.magnitude is not None:
            inverse = inverse_of(own, weight, self.device) if own.inverse is None else own.inverse
            y = F.dora_scale(linear(x, weight, **options), own.magnitude, inverse)
            y = y if bias is None else F.bias(y, bias)
            return y if residual is None else F.add(residual, y)
        options |= {"bias": bias, "residual": residual, "unread": unread}
        return linear(x, weight, **options)

    def _stacked(self, stack: str, x: Tensor, inputs: Inputs) -> Tensor | None:
        """Several projections of x side by side in one product (stacks.py); None where they are not stacked."""
        if stack + ".weight" not in self.weights:
            return None
        adapted = self.adapter.modules if self.adapter else {}
        if stack not in adapted and any(part in adapted for part in parts_of(stack)):
            return None
        return self._linear(stack, x, inputs)

    def _lora(self, module: str, seed: Array | None) -> LoraTerm | None:
        lora = self.adapter.modules.get(module) if self.adapter else None
        if lora is None or self.adapter is None:
            return None
        p = self.adapter.config.dropout if seed is not None else 0.0
        return LoraTerm(*lora.factors, lora.scaling, dropout=p, seed=seed if p else None, stream=lora.stream)
