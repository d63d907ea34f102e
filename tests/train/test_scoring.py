"""Log-probabilities of a text: against the operator of the loss, and the same token by token with a cache."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from wgrad.device.contract import Device
from wgrad.device.errors import UnusableResult
from wgrad.train.inference import scoring
from wgrad.train.inference.generation import Decoder, generate_batch
from wgrad.train.inference.scoring import log_probs, score
from wgrad.train.model.load_config import load_model_config
from wgrad.train.options.generate_config import Sampling
from wgrad.train.step.build import build_frozen

IDS = [3, 141, 59, 26, 53, 58, 97]


def test_the_bits_are_those_of_the_loss(rng: np.random.Generator, cpu: Any) -> None:
    x, weight = rng.standard_normal((9, 24), np.float32) * 3, rng.standard_normal((301, 24), np.float32)
    targets = rng.integers(0, 301, 9).astype(np.int32)
    found = log_probs(x @ weight.T, targets.tolist(), 4)
    loss, *_ = cpu.linear_cross_entropy(x, weight, targets, need_dx=False)
    assert np.float32(-np.sum(found.of_tokens, dtype=np.float64)) == loss[0]
    wide = x.astype(np.float64) @ weight.T.astype(np.float64)
    exact = wide - np.log(np.exp(wide - wide.max(1, keepdims=True)).sum(1, keepdims=True)) - wide.max(1, keepdims=True)
    assert np.abs(found.of_tokens - exact[np.arange(9), targets]).max() < 1e-4
    assert np.array_equal(found.top_ids, np.argsort(-exact, axis=1)[:, :4])
    for count in (0, 1, 301, 400):
        few = log_probs(x @ weight.T, targets.tolist(), count)
        assert few.top.shape == few.top_ids.shape == (9, min(count, 301)) and (np.diff(few.top) <= 0).all()


def test_tokens_and_logits_are_those_of_generate(
    make_checkpoint: Any, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_checkpoint()
    model = build_frozen(load_model_config(folder), folder, device, positions=64)
    sampling = Sampling(temperature=1.0, top_p=0.9, seed=5)
    decoder = Decoder(model, [IDS, IDS[:2]], 6, sampling, seeds=[5, 9], keep_logits=True)
    steps = list(decoder.tokens_and_logits())
    texts = [[row[b] for row, _ in steps] for b in (0, 1)]
    assert texts[0] == generate_batch(model, [IDS], 6, sampling)[0]
    assert texts[1] == generate_batch(model, [IDS[:2]], 6, Sampling(temperature=1.0, top_p=0.9, seed=9))[0]
    for b, prompt in enumerate((IDS, IDS[:2])):
        told = np.array([log_probs(logits, row, 1).of_tokens[b] for row, logits in steps])
        whole = score(model, [*prompt, *texts[b]], top=2)
        assert whole.given.of_tokens.shape == (len(prompt) + 5,) and whole.given.top_ids.shape == (len(prompt) + 5, 2)
        assert np.abs(told - whole.given.of_tokens[len(prompt) - 1 :]).max() < 2e-5
        assert (whole.given.of_tokens <= whole.given.top[:, 0] + 1e-6).all()
    monkeypatch.setattr(scoring, "LOGIT_ELEMENTS", 1)  # in pieces of 64 rows
    long = [int(i) for i in np.arange(150) * 7 % 300]
    model = build_frozen(load_model_config(folder), folder, device, positions=192)
    pieces = score(model, long).given.of_tokens
    monkeypatch.undo()
    assert pieces.shape == (149,) and np.allclose(pieces, score(model, long).given.of_tokens, atol=1e-5)
    nothing, last = score(model, [7], top=3), score(model, [7, 7]).given.of_tokens[0]
    assert nothing.given.top.shape == (0, 3)
    assert abs(log_probs(device.download(nothing.next_logits), [7], 0).of_tokens[0] - last) < 1e-5


def test_logits_that_are_not_finite_are_refused(make_checkpoint: Any, cpu: Any) -> None:
    folder = make_checkpoint()
    model = build_frozen(load_model_config(folder), folder, cpu, positions=64)
    model.weights["model.norm.weight"][:] = np.inf
    with np.errstate(all="ignore"), pytest.raises(UnusableResult, match="logits are not finite"):
        score(model, IDS)
