"""Choices of experts as trained models make them, for benches whose weights are random.

An expert's logit is 0.8 of its popularity, 0.8 of its fit to the text's subject, and 1 of its fit to the token: normal
numbers, of which the subject's change from token to token (AR(1), coefficient 0.9). With 8 of 128 experts, 1,000 tokens
choose 65 to 70 experts for 90 % of the choices, with an entropy of 0.89 of the largest: of Qwen3-30B-A3B, 65 and 0.889
were measured (https://mcp-tool-shop-org.github.io/gpu-container/handbook/derisk/). With 2 of 8, 29 % of the tokens have
the first choice of the token before and 71 % one of its two.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from wgrad.autograd import functional as F
from wgrad.train.model import mixture
from wgrad.train.model.model import Model

POPULARITY, SUBJECT, KEPT = 0.8, 0.8, 0.9
TEXTS = 6  # that follow each other


def routing_logits(rng: np.random.Generator, popularity: np.ndarray, positions: int) -> np.ndarray:
    """Return the logits of a layer's experts at each position of a text, float32 [positions, experts]."""
    experts, found = popularity.size, []
    subject = rng.standard_normal(experts)
    for change, token in rng.standard_normal((positions, 2, experts)):
        subject = KEPT * subject + (1 - KEPT**2) ** 0.5 * change
        found.append(POPULARITY * popularity + SUBJECT * subject + token)
    return np.stack(found).astype(np.float32)


def route_as_trained(model: Model, positions: int) -> None:
    """Let the routers of a model choose as `routing_logits` says for a token's position, whatever the token is. Each
    prompt begins another of TEXTS texts."""
    config, device, rng = model.config, model.device, np.random.default_rng(0)
    assert config.experts is not None
    layers = sum(map(config.has_experts, range(config.num_hidden_layers)))
    popularity = rng.standard_normal((layers, config.experts.count))
    texts = itertools.cycle(
        [[device.upload(routing_logits(rng, of, positions)) for of in popularity] for _ in range(TEXTS)]
    )
    hidden, choose = model.hidden, mixture.choose
    at: dict[str, Any] = {}

    def noted(inputs: Any, *more: Any) -> Any:
        if inputs.doc_start.shape[-1] > 1 or not at:
            at["text"] = next(texts)
        at.update(positions=inputs.positions, tables=iter(at["text"]))
        return hidden(inputs, *more)

    def chosen(experts: Any, logits: Any, correction: Any) -> Any:
        routed = F.embedding(next(at["tables"]), at["positions"], dtype=np.float32, device=device)
        return choose(experts, routed, correction)

    model.hidden = noted  # type: ignore[method-assign, assignment]
    mixture.choose = chosen
