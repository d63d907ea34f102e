"""Models whose layers share keys and values and have embeddings of their own: text with and without a batch, what is
kept for the backward, weights in main memory, and refusals.

Their logits and gradients are those of test_oracle_model.py, their adapters and training of test_oracle_adapter.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.train.conftest import random_weights, tiny_config, write_checkpoint
from wgrad.autograd.reference import ReferenceDevice
from wgrad.device.contract import Device
from wgrad.train.inference.generation import generate_batch, generate_ids
from wgrad.train.model.model import Model
from wgrad.train.model.model_config import load_model_config
from wgrad.train.options.generate_config import GREEDY
from wgrad.train.step.build import build_frozen

LENGTHS, NEW = (3, 17, 9), 8


@pytest.fixture(scope="module", params=["Gemma3nForCausalLM", "Gemma4ForCausalLM"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    raw = tiny_config(request.param)
    return write_checkpoint(tmp_path_factory.mktemp("shared") / "model", raw, random_weights(raw))


@pytest.fixture(scope="module")
def model(folder: Path) -> Model:
    return build_frozen(load_model_config(folder), folder, ReferenceDevice(), positions=64, quantize=False)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    generator = np.random.default_rng(4)
    return [generator.integers(1, 300, length).tolist() for length in LENGTHS]


@pytest.mark.oracle
def test_greedy_text_is_that_of_transformers(folder: Path, model: Model, prompts: Any) -> None:
    """With a cache that has no place for layers which use another's keys."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    theirs.generation_config.eos_token_id = None
    options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    wanted = [theirs.generate(torch.tensor([p]), **options)[0, len(p) :].tolist() for p in prompts]
    assert [list(generate_ids(model, prompt, NEW, GREEDY)) for prompt in prompts] == wanted
    assert generate_batch(model, prompts, NEW, GREEDY) == wanted


@pytest.mark.oracle
def test_what_is_kept_for_the_backward_changes_no_bit(folder: Path, device: Device, monkeypatch: Any) -> None:
    """Layers that are computed again give gradients to the keys that others use, in main memory and in chunks too."""
    oracle = pytest.importorskip("tests.train.test_oracle_model")

    def gradient(**kept: Any) -> np.ndarray:
        model, parameters = oracle.full_model(folder, device)
        for name, value in kept.items():
            setattr(model, name, value)
        model.loss(oracle.make_inputs(device, *(np.tile(x, (2, 1)) for x in oracle.batch(300)))).backward()
        return np.array(device.download(parameters.grad))

    whole = gradient()
    for kept in ({"recompute": True}, {"recompute": 4, "keep_attention": True}, {"recompute": True, "offload": 5}):
        np.testing.assert_array_equal(gradient(**kept), whole)
    monkeypatch.setattr("wgrad.train.model.model.MLP_CHUNKS_ABOVE", 0)
    monkeypatch.setattr("wgrad.train.model.model.MLP_CHUNK_BYTES", 1)
    chunked = gradient(recompute=True)
    assert oracle.distance(chunked, whole) < 1e-5
