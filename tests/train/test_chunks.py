"""Llama 4 beyond a chunk: attention in chunks, and queries that are scaled by position, compared with transformers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.train.model_oracle import check_against_the_oracle, full_model, make_inputs, torch, transformers
from wgrad.autograd.reference import ReferenceDevice
from wgrad.device.contract import Device
from wgrad.train.inference.continuous import Batch
from wgrad.train.inference.generation import generate_ids
from wgrad.train.inference.growing import Growing
from wgrad.train.model.chunks import ChunkPages, growth_by_position
from wgrad.train.model.load_config import load_model_config
from wgrad.train.options.generate_config import GREEDY
from wgrad.train.step.build import build_frozen

pytestmark = pytest.mark.oracle
CHUNK = 64
LONG: dict[str, Any] = {
    "num_hidden_layers": 2,
    "no_rope_layers": [1, 0],
    "attention_chunk_size": CHUNK,
    "floor_scale": 29,
    "attn_scale": 0.7,
    "rope_theta": 500.0,
}


def test_logits_loss_and_gradients_beyond_a_chunk_are_transformers(make_checkpoint: Any, device: Device) -> None:
    """150 tokens: two chunks, and a part of a third."""
    check_against_the_oracle(make_checkpoint("Llama4ForCausalLM", **LONG), device, 150)


def test_chunks_begin_with_their_document(make_checkpoint: Any, device: Device) -> None:
    """A row of two documents has the logits of each by itself."""
    model, _ = full_model(make_checkpoint("Llama4ForCausalLM", **LONG), device, 150)
    ids = np.random.default_rng(2).integers(0, 300, (1, 150)).astype(np.int32)

    def logits(of: np.ndarray, start: np.ndarray | None = None) -> np.ndarray:
        inputs = make_inputs(device, np.ascontiguousarray(of), np.zeros_like(of), start)
        found: np.ndarray = device.download(model.logits(model.hidden(inputs).data))
        return found

    start = np.where(np.arange(150) < 41, 0, 41).astype(np.int32)[None]
    both = logits(ids, start)
    np.testing.assert_allclose(both, np.concatenate([logits(ids[:, :41]), logits(ids[:, 41:])]), atol=2e-5)
    assert np.abs(both[41:] - logits(ids)[41:]).max() > 1e-3


def test_text_across_chunks_is_transformers(make_checkpoint: Any, card: Any) -> None:
    """With a cache, and in pages, it is the text of transformers, one prompt of which ends in a second chunk."""
    folder = make_checkpoint("Llama4ForCausalLM", **LONG)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    built = build_frozen(load_model_config(folder), folder, card, positions=160, quantize=False)
    prompts = [np.random.default_rng(n).integers(0, 300, n).tolist() for n in (57, 118)]
    grown = [Growing.begin(prompt, 15, GREEDY) for prompt in prompts]
    batch = Batch(built, 2)
    batch.join(grown)
    while batch.growing:
        batch.queue(7).tokens()
    for prompt, one in zip(prompts, grown):
        text = list(generate_ids(built, prompt, 15, GREEDY))
        logits = theirs(torch.tensor([prompt + text]), use_cache=False).logits[0]
        assert logits[len(prompt) - 1 : -1].argmax(1).tolist() == text
        assert one.ids == text


def test_a_chunk_finds_its_pages_and_places() -> None:
    device = ReferenceDevice()
    pages = np.arange(15, dtype=np.int32).reshape(3, 5)[:, ::-1].copy()
    found, places = ChunkPages(3, 5, 128, device).of(pages, np.array([127, 130, 319], np.int32))
    np.testing.assert_array_equal(found, [[4, 3], [7, 6], [10, 10]])
    np.testing.assert_array_equal(places, [127, 2, 63])


def test_a_scale_begins_behind_its_last_position() -> None:
    assert growth_by_position(28, 0.7, 29) is None
    found = growth_by_position(60, 0.7, 29)
    assert found is not None
    np.testing.assert_allclose(found[[27, 28, 56, 57], 0], 1 + 0.7 * np.log1p([0, 1, 1, 2]), rtol=1e-6)
