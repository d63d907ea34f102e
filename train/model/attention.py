"""Attention of a layer: queries, keys and values, their norms and rotary embeddings, and the cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from wgrad.autograd import functional as F
from wgrad.autograd.ops.sinks import attend
from wgrad.autograd.tensor import Tensor
from wgrad.device.contract import Array, Device
from wgrad.device.dry_run import DryRuntime
from wgrad.device.errors import WgradError
from wgrad.train.model.alibi import alibi_table, with_alibi
from wgrad.train.model.chunks import growth_by_position, in_chunks
from wgrad.train.model.delta_net import gated, split_gate
from wgrad.train.model.kv_cache import KVCache, Rope
from wgrad.train.model.latent_attention import KV_A, KV_B, KV_NORM, Q_A, Q_B, Q_NORM, LatentAttention, Q
from wgrad.train.model.model_config import ModelConfig
from wgrad.train.model.model_inputs import Inputs
from wgrad.train.model.parts import Parts
from wgrad.train.model.rope_scaling import RopeConfig, grown, rope_tables
from wgrad.train.model.stacks import QKV


class Attention(Parts):
    """Attention of a decoder's layers. positions: rows of the rotary tables."""

    def __init__(
        self, config: ModelConfig, weights: Mapping[str, Any], device: Device, *, positions: int, **options: Any
    ) -> None:
        super().__init__(config, weights, device, **options)
        if config.position_table and positions > config.positions:
            raise WgradError(
                f"sequences of {positions} tokens are longer than the {config.positions} positions that the model has "
                f"embeddings of: use at most {config.positions} (--max-length, --context)"
            )
        self.positions = positions
        self._chunk = config.chunk if config.chunk < positions else 0  # else all tokens are in one
        growth = growth_by_position(positions, *config.plain_growth)
        grows = config.query_growth and positions > config.query_length
        if grows and config.latent is not None:  # the part of a query that is not rotated too
            growth = grown(np.ones((positions, 1)), config.query_growth, config.query_length)
        self._growth = None if growth is None else device.upload(growth)
        self._alibi = self._upload_alibi() if config.alibi else None
        self.cos, self.sin = self._upload_tables(config.rope)
        self._of_queries: tuple[Array, Array] | None = None  # tables of queries, if they differ from those of keys
        if grows and config.latent is None:
            self._of_queries = self._upload_tables(config.rope, config.query_growth)
        self._local = (self.cos, self.sin)  # of layers with a window
        if config.local_rope is not None and config.local_rope != config.rope:
            self._local = self._upload_tables(config.local_rope)

    def _upload_alibi(self) -> Array:
        heads = self.config.num_attention_heads
        if isinstance(self.device, DryRuntime):
            return self.device.empty((self.positions, heads), np.float32)
        return self.device.upload(alibi_table(heads, self.positions))

    def _upload_tables(self, rope: RopeConfig, growth: float = 0.0) -> tuple[Array, Array]:
        """Return cos and sin of all positions on the device, scaled by `grown` if there is growth."""
        if isinstance(self.device, DryRuntime):  # to compute 131,072 rows takes as long as all else in a dry run
            pairs = rope_tables(rope, 0)[0].shape[1]
            cos, sin = (self.device.empty((self.positions, pairs), np.float32) for _ in range(2))
            return cos, sin
        length, tables = self.config.query_length, rope_tables(rope, self.positions)
        cos, sin = (self.device.upload(grown(table, growth, length) if growth else table) for table in tables)
        return cos, sin

    def _attention(
        self, index: int, y: Tensor, inputs: Inputs, cache: KVCache | None, shared: Sequence[Tensor]
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """Return [N, H D], before the output projection, and, without a cache, the keys and values [B, T, G, D].

        shared: keys and values of another layer, which this one uses.
        """
        c, rows, tokens = self.config, inputs.batch, inputs.tokens
        source, scale = c.kv_source(index), c.score_scale_of(index)
        k: Tensor | None = None
        v: Tensor | None = None
        if source == index:
            q, k, v, gate, rotated = self._queries_keys_values(index, y, inputs, cache)
            if self._alibi is not None:
                constants = self._constant(1, 0), self._constant(1, 1)
                q, k, v = with_alibi(q, k, v, self._alibi, inputs.positions, *constants)
        else:
            (q, gate), rotated = self._queries(index, y, inputs), True
        q = q.reshape(rows, tokens, c.heads_of(index), c.key_width_of(index))
        sinks = self.weights.get(f"model.layers.{index}.self_attn.sinks")
        options: dict[str, Any] = {"scale": scale, "window": c.windows[index], "softcap": c.score_softcap}
        made: Sequence[Tensor] = ()
        if cache is not None:
            rope = Rope(*self._tables(index, inputs), c.interleaved) if c.use_rope[index] and not rotated else None
            o = cache.attend(source, q, k, v, sinks, inputs, rope, self._chunk_of(index), **options)
        else:
            heads = (rows, tokens, c.kv_heads_of(index), c.key_width_of(index))
            made = shared if k is None or v is None else [x.reshape(*heads) for x in (k, v)]
            seen = in_chunks(inputs, chunk, self.device) if (chunk := self._chunk_of(index)) else inputs
            o = attend(q, *made, sinks, seen.doc_start, inputs.cache_len, **options)
        if c.latent is not None or c.alibi:
            o = o[..., : c.latent.value if c.latent else c.head_dim]
        if c.gate_of_heads and gate is not None:
            o, gate = o.reshape(rows * tokens, c.heads_of(index), -1), gate.reshape(rows * tokens, -1, 1)
        if gate is not None:
            o = gated(o if c.gate_of_heads else o.reshape(rows * tokens, -1), gate, c.gate_softplus)
        return o.reshape(rows * tokens, -1), made

    def _splits_qkv(self, index: int) -> bool:
        """Return whether one projection may give queries, keys and values, since only RoPE is applied to them."""
        c = self.config
        apart = c.qk_norm or c.clip_qkv or c.attention_gate or c.attention_gate_proj or self._of_queries
        return c.latent is None and c.use_rope[index] and not apart

    def _queries_keys_values(
        self, index: int, y: Tensor, inputs: Inputs, cache: KVCache | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, bool]:
        """Return q [N, H, D], k and v [N, G, D], the gate [N, H D] of the output or None, and whether k is rotated.

        k is not rotated if the operator that appends it to the cache rotates it.
        """
        c, prefix = self.config, f"model.layers.{index}.{self.config.attention}."
        if c.latent is not None:
            return *self._from_latents(c.latent, index, y, inputs), None, True
        if c.qkv_proj:
            return *self._of_one(index, y, inputs, cache is None), None, cache is None
        tables = self._tables(index, inputs)
        if self._splits_qkv(index):
            qkv = self._stacked(f"model.layers.{index}.{QKV}", y, inputs)
            if qkv is not None:
                heads = {"heads": c.heads_of(index), "kv_heads": c.num_key_value_heads}
                return *F.rope_split(qkv, *tables, **heads, interleaved=c.interleaved), None, True
        q, gate = self._queries(index, y, inputs)
        both = [self._linear(f"{prefix}{part}_proj", y, inputs) for part in c.keys_of(index)]
        k, v = both[0], both[-1]
        if not c.qk_norm_last:
            k = self._head_norm(index, c.k_norm, k)
        if c.value_norm:
            v = self._normed_heads(v, self._constant(c.head_dim_of(index), 1))
        k, v = (self._clipped(x).reshape(-1, c.kv_heads_of(index), c.head_dim_of(index)) for x in (k, v))
        appended = cache is not None and not c.qk_norm_last  # appending to the cache rotates k
        if c.use_rope[index] and not appended:
            k = F.rope(k, *tables, interleaved=c.interleaved)
        if c.qk_norm_last:
            k = self._head_norm(index, c.k_norm, k)
        return q, k, v, gate, not appended

    def _of_one(self, index: int, y: Tensor, inputs: Inputs, rotate_keys: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Return rotated q [N, H, D], and k and v [N, G, D], from the one projection `qkv_proj`."""
        c, tables = self.config, self._tables(index, inputs)
        heads, groups, width = c.heads_of(index), c.kv_heads_of(index), c.head_dim_of(index)
        each = heads // groups
        qkv = self._linear(f"model.layers.{index}.{c.qkv_proj}", y, inputs)
        if c.qkv_by_heads:
            parts = qkv.reshape(-1, groups, each + 2, width).split([each, 1, 1], 2)
        else:
            parts = qkv.reshape(-1, heads + 2 * groups, width).split([heads, groups, groups], 1)
        q, k, v = (x.reshape(-1, x.size // (x.shape[0] * width), width) for x in parts)
        if not c.use_rope[index]:
            return q, k, v
        q = F.rope(q, *tables, interleaved=c.interleaved)
        return q, F.rope(k, *tables, interleaved=c.interleaved) if rotate_keys else k, v

    def _queries(self, index: int, y: Tensor, inputs: Inputs) -> tuple[Tensor, Tensor | None]:
        """Return rotated q [N, H, D], and the gate [N, H D] of the output or None."""
        c, tables = self.config, self._tables(index, inputs)
        q, gate = self._linear(f"model.layers.{index}.{c.attention}.q_proj", y, inputs), None
        if c.attention_gate:
            q, gate = split_gate(q, c.heads_of(index), c.head_dim_of(index))
        if c.attention_gate_proj:
            gate = self._linear(f"model.layers.{index}.{c.attention_gate_proj}", y, inputs)
        if not c.qk_norm_last:
            q = self._head_norm(index, c.q_norm, q)
        q = self._clipped(q).reshape(-1, c.heads_of(index), c.head_dim_of(index))
        if c.use_rope[index]:
            cos, sin = self._of_queries or tables[:2]
            q = F.rope(q, cos, sin, tables[2], interleaved=c.interleaved)
        else:
            q = self._grown(q, inputs)
        return (self._head_norm(index, c.q_norm, q) if c.qk_norm_last else q), gate

    def _from_latents(self, c: LatentAttention, index: int, y: Tensor, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v [N, H, D]. Heads share the rotated part of their keys; v is padded with zeros."""
        prefix, heads = f"model.layers.{index}.", self.config.num_attention_heads

        def linear(module: str, x: Tensor) -> Tensor:
            return self._linear(prefix + module, x, inputs)

        def normed(norm: str, x: Tensor) -> Tensor:
            return F.rms_norm(x, self.weights[f"{prefix}{norm}.weight"], c.eps, dtype=self.dtype)

        def rotated(x: Tensor) -> Tensor:
            return F.rope(x, *self._tables(index, inputs), interleaved=self.config.interleaved)

        q = linear(Q_B, normed(Q_NORM, linear(Q_A, y))) if c.query_rank else linear(Q, y)
        q_plain, q_turned = q.reshape(-1, heads, c.width).split([c.plain, c.rotated], 2)
        latent, k_turned = linear(KV_A, y).split([c.rank, c.rotated], 1)
        both = linear(KV_B, normed(KV_NORM, latent)).reshape(-1, heads, c.plain + c.value)
        k_plain, v = both.split([c.plain, c.value], 2)
        k_turned = rotated(k_turned.reshape(-1, 1, c.rotated)).expand(-1, heads, c.rotated)
        q = self._grown(F.cat([q_plain, rotated(q_turned)], 2), inputs)
        k = F.cat([k_plain, k_turned], 2)
        if rest := c.width - c.value:
            zeros = Tensor(self._constant(1, 0), v.device).to(v.dtype).reshape(1, 1, 1)
            v = F.cat([v, zeros.expand(v.shape[0], heads, rest)], 2)
        return q, k, v

    def _grown(self, q: Tensor, inputs: Inputs) -> Tensor:
        """Return queries [N, H, D], scaled by their position if the model asks for that."""
        if self._growth is None:
            return q
        factors = F.embedding(self._growth, inputs.positions, device=self.device)
        return (F.cast(q, np.float32) * factors.reshape(-1, 1, 1)).to(q.dtype)

    def _chunk_of(self, index: int) -> int:
        """Return the length of the chunks in which a layer attends; 0: it sees the whole sequence."""
        return self._chunk if self._chunk and self.config.chunked[index] else 0

    def _clipped(self, x: Tensor) -> Tensor:
        clip = self.config.clip_qkv
        return F.maximum(F.minimum(x, clip), -clip) if clip else x

    def _tables(self, index: int, inputs: Inputs) -> tuple[Array, Array, Array]:
        """Return cos and sin of a layer, and each token's row in them."""
        slides, own = self.config.windows[index] > 0, inputs.tables
        if own is not None:
            return *(own.windows if slides else own.layers), own.rows
        return *(self._local if slides else (self.cos, self.sin)), inputs.positions

    def _head_norm(self, index: int, module: str, x: Tensor) -> Tensor:
        """Apply QK-norm, if there is one, to each head of [N, H * D] (Qwen3) or to all heads at once (OLMo 2)."""
        if not self.config.qk_norm or not (self.config.qk_norm_weight or self.config.use_rope[index]):
            return x
        module, width = f"model.layers.{index}.{module}", self.config.head_dim_of(index)
        if self.config.qk_layer_norm:
            return self._layer_normed_heads(module, x, width)
        return self._normed_heads(x, self._norm_weight(module, width))

    def _layer_normed_heads(self, module: str, x: Tensor, width: int) -> Tensor:
        """Apply LayerNorm to each head of x, with one weight for all heads (Phi) or one for each (Command R+)."""
        shape, eps, weight = x.shape, self.config.rms_norm_eps, f"{module}.weight"
        x = x.reshape(x.size // width, width)
        if not self.config.qk_norm_heads:
            y = F.layer_norm(x, self.weights[weight], self.weights[f"{module}.bias"], eps, dtype=self.dtype)
            return y.reshape(*shape)
        ones, zeros = self._constant(width, 1), self._constant(width, 0)
        y = F.layer_norm(x, ones, zeros, eps, dtype=np.float32).reshape(shape[0], -1, width)
        return (y * self._tensor(weight)).to(self.dtype).reshape(*shape)

    def _normed_heads(self, x: Tensor, weight: Any) -> Tensor:
        shape, width = x.shape, weight.shape[0]
        x = x.reshape(x.size // width, width)
        return F.rms_norm(x, weight, self.config.rms_norm_eps, dtype=self.dtype).reshape(*shape)
