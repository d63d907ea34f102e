"""Alternating updates (AltUp): a layer computes one of several streams and corrects the others by it. Also learned
augmented residuals (LAuReL) and sparse activations.

    predicted[q] = h[q] + sum over p of P(m)[q, p] h[p],  m = tanh(router(norm(h[0]) / C))
    corrected[q] = predicted[q] + (1 + K(m')[q]) (y - predicted[0]),  m' of y, which the layer makes of predicted[0]

Sources: Baykal et al., Alternating Updates for Efficient Transformers (2023); Menghani et al., LAuReL (2024);
Gemma 3n in transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import NormalDist

from wgrad.autograd import functional as F
from wgrad.autograd.tensor import Tensor

ROUTER, ROUTER_NORM = "altup.modality_router", "altup.router_norm"
PREDICT, CORRECT, SCALE = "altup.prediction_coefs", "altup.correction_coefs", "altup.correct_output_scale"
LEFT, RIGHT, LAUREL_NORM = "laurel.linear_left", "laurel.linear_right", "laurel.post_laurel_norm"
_LEAST = 1e-5  # mean of squares

Project = Callable[[str, Tensor], Tensor]


@dataclass(frozen=True)
class AltUp:
    """Alternating updates of a model.

    Attributes:
        streams: Streams of a token.
        rank: Rank of LAuReL's projections.
        sparsity: Share of the gate's elements that become 0, by layer; 0: none.
    """

    streams: int
    rank: int
    sparsity: tuple[float, ...]

    norms = (ROUTER_NORM, LAUREL_NORM)

    def projections(self, hidden: int) -> dict[str, tuple[int, int]]:
        """Return the shapes [out, in] of a layer's projections by their path within the layer."""
        s = self.streams
        of_streams = {CORRECT: (s, s), PREDICT: (s * s, s), ROUTER: (s, hidden)}
        return of_streams | {LEFT: (self.rank, hidden), RIGHT: (hidden, self.rank)}

    def outer(self, hidden: int) -> dict[str, tuple[int, int]]:
        """Return the shapes of the projections outside layers: from embeddings to streams, and back to an output."""
        return {name: (hidden, hidden) for part in (False, True) for name in self._paths(part)}

    def _paths(self, back: bool) -> list[str]:
        name = "model.altup_unembed_projections" if back else "model.altup_projections"
        return [f"{name}.{i}" for i in range(self.streams - 1)]

    def begin(self, h: Tensor, project: Project) -> Tensor:
        """Return the streams [S, N, C] of embeddings [N, C]."""
        h = h.reshape(*h.shape)  # gradients add up in this view, in one order whatever else reads the embeddings
        return F.stack([h, *self._as_long(h, ((path, h) for path in self._paths(False)), project)])

    def end(self, h: Tensor, project: Project) -> Tensor:
        """Return the mean [N, C] of the streams [S, N, C]."""
        first = h[0]
        others = ((path, h[i + 1]) for i, path in enumerate(self._paths(True)))
        return sum(self._as_long(first, others, project), first) * (1 / self.streams)

    def _as_long(self, like: Tensor, given: Iterator[tuple[str, Tensor]], project: Project) -> Iterator[Tensor]:
        """Yield projections, with each token scaled to its length in `like`."""
        length = F.sqrt((like * like).mean(-1, keepdim=True))
        for path, x in given:
            y = project(path, x)
            yield y * (length / F.sqrt(F.maximum((y * y).mean(-1, keepdim=True), _LEAST)))

    def predict(self, h: Tensor, coefficients: Tensor) -> Tensor:
        """Return the streams [S, N, C] before a layer. coefficients: float32 [N, S S]."""
        s, rows, _ = h.shape
        shares = coefficients.reshape(rows, s, s).permute(1, 2, 0).unsqueeze(3)  # [q, p, N, 1]
        return h + (shares * h.unsqueeze(0)).sum(1)

    def correct(self, predicted: Tensor, y: Tensor, coefficients: Tensor) -> Tensor:
        """Return the streams after a layer, whose output for the first is y [N, C]. coefficients: float32 [N, S]."""
        shares = (coefficients + 1.0).permute(1, 0).unsqueeze(2)
        return predicted + shares * (y - predicted[0]).unsqueeze(0)

    def sparse(self, layer: int, gate: Tensor) -> Tensor:
        """Return the part of each token's gate [N, F] above the quantile `sparsity` of a normal distribution."""
        if not self.sparsity[layer]:
            return gate
        mean = gate.mean(-1, keepdim=True)
        centered = gate - mean
        deviation = F.sqrt((centered * centered).mean(-1, keepdim=True))
        return F.relu(centered - deviation * NormalDist().inv_cdf(self.sparsity[layer])).to(gate.dtype)
