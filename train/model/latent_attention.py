"""Multi-head latent attention: its sizes, and the tensors that replace q_proj, k_proj and v_proj.

Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1.
"""

from __future__ import annotations

from dataclasses import dataclass

Q, Q_A, Q_B = "self_attn.q_proj", "self_attn.q_a_proj", "self_attn.q_b_proj"
KV_A, KV_B = "self_attn.kv_a_proj_with_mqa", "self_attn.kv_b_proj"
Q_NORM, KV_NORM = "self_attn.q_a_layernorm", "self_attn.kv_a_layernorm"


@dataclass(frozen=True, kw_only=True)
class LatentAttention:
    """Sizes of multi-head latent attention.

    Attributes:
        query_rank: Rank of the latents of queries, or 0 if queries are projected directly.
        rank: Rank of the latents of keys and values.
        plain, rotated: Elements of a head's query and key without and with rotary embeddings, in this order.
        value: Elements of a head's value.
        biased: Whether the projections of a layer's input have biases.
        eps: Epsilon of the latents' norms.
    """

    query_rank: int
    rank: int
    plain: int
    rotated: int
    value: int
    biased: bool = False
    eps: float = 1e-6

    @property
    def width(self) -> int:
        """Elements of a head's query and key. Values are padded to this width with zeros for attention."""
        return self.plain + self.rotated

    def projections(self, hidden: int, heads: int, out: str) -> dict[str, tuple[int, int]]:
        """Return the shapes [out, in] of a layer's projections by path within it. out: path of the last one."""
        queries = {Q: (heads * self.width, hidden)}
        if self.query_rank:
            queries = {Q_A: (self.query_rank, hidden), Q_B: (heads * self.width, self.query_rank)}
        return queries | {
            KV_A: (self.rank + self.rotated, hidden),
            KV_B: (heads * (self.plain + self.value), self.rank),
            out: (hidden, heads * self.value),
        }

    @property
    def biases(self) -> dict[str, bool]:
        """Paths of the projections except the last one, each with whether it has a bias."""
        return {Q: False, Q_A: self.biased, Q_B: False, KV_A: self.biased, KV_B: False}

    @property
    def norms(self) -> dict[str, int]:
        """Widths of the latents' norms, by their path within the layer."""
        return {**({Q_NORM: self.query_rank} if self.query_rank else {}), KV_NORM: self.rank}
