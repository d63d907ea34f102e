"""Text of the embedded model, with cache and replay and several prompts at once, against transformers' generate."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.tools import oracle_package
from wgrad.autograd.reference import ReferenceDevice
from wgrad.device.contract import Device
from wgrad.train.data.packing import Document, make_batch
from wgrad.train.data.tokenizer import load_tokenizer
from wgrad.train.inference.generation import generate_batch, generate_ids
from wgrad.train.inference.guided import Free, guided_batch, text_ids
from wgrad.train.inference.repetition import Repetition, penalize
from wgrad.train.inference.scoring import score
from wgrad.train.model.load_config import load_model_config
from wgrad.train.model.model_inputs import Inputs
from wgrad.train.options.generate_config import GREEDY
from wgrad.train.step.build import build_frozen
from wgrad.train.step.objectives import write_batch

torch = oracle_package("torch")
transformers = oracle_package("transformers")

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


def test_repetition_is_penalized_as_transformers_does(device: Device) -> None:
    """Tokens of the prompt and of the answer count, for each text of a batch by itself."""
    prompts = [load_tokenizer(BASE).encode(text) for text in TEXTS]
    model = transformers.AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    ours = build_frozen(load_model_config(BASE), BASE, device, positions=96, quantize=False)
    plain = generate_batch(ours, prompts, 24, GREEDY)
    for penalty in (1.3, 0.8):
        options = {"max_new_tokens": 24, "do_sample": False, "repetition_penalty": penalty}
        theirs = [model.generate(torch.tensor([p]), **options)[0, len(p) :].tolist() for p in prompts]
        sampling = replace(GREEDY, repetition_penalty=penalty)
        assert theirs != plain
        assert guided_batch(ours, prompts, 24, sampling, (), [Free()] * len(prompts)) == theirs
        assert list(text_ids(ours, prompts[1], 24, sampling, ())) == theirs[1]


def test_factors_are_transformers_processor(device: Device) -> None:
    rng = np.random.default_rng(3)
    logits, texts = rng.standard_normal((3, 41)).astype(np.float32), [[5, 5, 40], [], list(range(41))]
    texts[1] = [0]
    histories = [Repetition(1.7, 41, text[:1]) for text in texts]
    factors = np.stack([one.factors(text[1:]) for one, text in zip(histories, texts)])
    assert histories[0].factors([5, 40, 5]) is histories[0].factors([5, 40, 5, 40]), "nothing is new"
    found = device.upload(logits)
    penalize(device, found, device.upload(factors))
    processor = transformers.RepetitionPenaltyLogitsProcessor(1.7)
    for row, text in enumerate(texts):
        wanted = processor(torch.tensor([text]), torch.tensor(logits[row : row + 1]))[0].numpy()
        np.testing.assert_allclose(device.download(found)[row], wanted, rtol=1e-6)


# ---- rotary embeddings that depend on the length ---------------------------------------------------
LONGROPE = {"rope_type": "longrope", "short_factor": [1.1] * 6, "long_factor": [4.5, 7.0, 9.0, 3.0, 2.0, 1.5]}
BY_LENGTH: dict[str, dict[str, Any]] = {
    "Phi3ForCausalLM": {"rope_scaling": LONGROPE, "original_max_position_embeddings": 16},
    "MiniCPM3ForCausalLM": {
        "rope_scaling": {**LONGROPE, "short_factor": [1.1] * 3, "long_factor": [4.5, 7.0, 9.0]},
        "original_max_position_embeddings": 16,
        "scale_emb": 1.0,
    },
    "LlamaForCausalLM": {"rope_scaling": {**LONGROPE, "original_max_position_embeddings": 16}},
    "Qwen2ForCausalLM": {"rope_scaling": {"rope_type": "dynamic", "factor": 8.0}, "max_position_embeddings": 16},
    "Gemma3ForCausalLM": {
        "rope_parameters": {"full_attention": {**LONGROPE, "original_max_position_embeddings": 16}},
        "num_hidden_layers": 3,
        "sliding_window": 9,
        "sliding_window_pattern": 2,
    },
}
LENGTHS = (5, 11, 16, 17, 20)  # on either side of 16, and growing beyond


@pytest.mark.parametrize("architecture", BY_LENGTH)
def test_text_beyond_the_original_length_is_that_of_transformers(architecture: str, make_checkpoint: Any) -> None:
    """Alone and in a batch, each text has the embeddings of its own length."""
    folder = make_checkpoint(architecture, **BY_LENGTH[architecture])
    generator = np.random.default_rng(5)
    prompts = [generator.integers(1, 300, length).tolist() for length in LENGTHS]  # 0 fills rows
    wanted = []
    for prompt in prompts:
        theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        theirs.generation_config.eos_token_id = None
        ids = theirs.generate(torch.tensor([prompt]), max_new_tokens=14, do_sample=False, pad_token_id=0)
        wanted.append(ids[0, len(prompt) :].tolist())
    for positions in (34, 64):
        ours = build_frozen(load_model_config(folder), folder, ReferenceDevice(), positions=positions, quantize=False)
        assert generate_batch(ours, prompts, 14, GREEDY) == wanted
        assert [list(generate_ids(ours, prompt, 14, GREEDY)) for prompt in prompts] == wanted


@pytest.mark.parametrize("architecture", BY_LENGTH)
def test_each_sequence_of_a_packed_batch_has_the_embeddings_of_its_own_length(
    architecture: str, make_checkpoint: Any
) -> None:
    """Whatever the table's length is, which a prompt of a sample may have made longer."""
    folder = make_checkpoint(architecture, **BY_LENGTH[architecture])
    generator, texts, wanted = np.random.default_rng(6), [], 0.0
    for length in (7, 16, 17, 23):
        texts.append(generator.integers(0, 300, length))
        theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        ids = torch.tensor(texts[-1])[None]
        with torch.no_grad():
            logits = theirs(ids, use_cache=False).logits[0]
        wanted += float(torch.nn.functional.cross_entropy(logits[:-1], ids[0, 1:], reduction="sum"))
    documents = [Document(ids.astype(np.int32), np.ones(len(ids), bool), "") for ids in texts]
    batch = make_batch([documents[1:], documents[:1]], 2, 61)
    for positions in (61, 200):
        device = ReferenceDevice()
        model = build_frozen(load_model_config(folder), folder, device, positions=positions, quantize=False)
        inputs = Inputs.empty(model, 2, 61)
        write_batch(device, inputs, batch, batch.targets)
        assert float(model.loss(inputs).numpy()[0]) == pytest.approx(wanted, rel=1e-5)
        scored = [-score(model, ids.tolist()).given.of_tokens.sum() for ids in texts]
        assert sum(scored) == pytest.approx(wanted, rel=1e-5)
