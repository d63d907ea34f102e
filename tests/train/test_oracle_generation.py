"""Text of the embedded model, with cache and replay and several prompts at once, against transformers' generate."""

from __future__ import annotations

from pathlib import Path

import pytest

from wgrad.device.contract import Device
from wgrad.train.data.tokenizer import load_tokenizer
from wgrad.train.model.model_config import load_model_config
from wgrad.train.options.generate_config import GREEDY
from wgrad.train.run.build import build_frozen
from wgrad.train.run.generation import generate_batch, generate_ids

torch = pytest.importorskip("torch", reason="the oracle is torch: pip install wgrad[oracle]")
transformers = pytest.importorskip("transformers", reason="the oracle is transformers: pip install wgrad[oracle]")

pytestmark = pytest.mark.oracle
BASE = Path(__file__).parents[2] / "examples" / "base_model"
TEXTS = ("And they lay wait", "A soft answer", "The", "My son, hear the instruction of thy father, and")
TOKENS = 40


def test_greedy_text_is_that_of_transformers(device: Device) -> None:
    tokenizer = load_tokenizer(BASE)
    prompts = [tokenizer.encode(text) for text in TEXTS]
    model = transformers.AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32)
    options = {"max_new_tokens": TOKENS, "do_sample": False}
    model.generation_config.eos_token_id = None  # to the last token
    theirs = [model.generate(torch.tensor([p]), **options)[0, len(p) :].tolist() for p in prompts]
    assert len({len(p) for p in prompts}) > 2 and all(len(ids) == TOKENS for ids in theirs)
    ours = build_frozen(load_model_config(BASE), BASE, device, positions=96, quantize=False)
    assert generate_batch(ours, prompts, TOKENS, GREEDY) == theirs
    assert list(generate_ids(ours, prompts[0], TOKENS, GREEDY)) == theirs[0]
