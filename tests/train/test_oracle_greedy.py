"""Greedy text of every family against transformers' own `generate`, with a cache, alone and in a padded batch.

Texts depend on each logit only through the largest, so the seed of the prompts is the first for which transformers'
two largest logits are clearly apart at every token.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.families.table import CASES, FAMILY_ROWS
from tests.train.conftest import VOCAB
from tests.train.model_oracle import load_oracle, torch
from wgrad.autograd.reference import ReferenceDevice
from wgrad.train.inference.generation import Decoder, generate_ids
from wgrad.train.model.load_config import load_model_config
from wgrad.train.options.generate_config import GREEDY
from wgrad.train.step.build import build_frozen

pytestmark = pytest.mark.oracle

LENGTHS = (3, 11, 19)  # of prompts; windows are of 7 or 9 tokens
TOKENS = 13
APART = 1e-3  # of the range of logits


def greedy(model: Any, prompt: list[int], use_cache: bool) -> tuple[list[int], np.ndarray]:
    """Return transformers' text, and the logits float64 [TOKENS, V] that chose it."""
    model.generation_config.eos_token_id = None
    found = model.generate(
        torch.tensor([prompt]),
        max_new_tokens=TOKENS,
        do_sample=False,
        pad_token_id=0,
        use_cache=use_cache,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return found.sequences[0, len(prompt) :].tolist(), torch.cat(found.logits).double().numpy()


def clear(logits: np.ndarray) -> bool:
    """Return whether the largest logit of each row is clearly apart from the next."""
    ordered = np.sort(logits, axis=-1)
    return bool(((ordered[..., -1] - ordered[..., -2]) > APART * np.ptp(ordered, axis=-1)).all())


def prompts_and_texts(
    model: Any, lengths: tuple[int, ...], use_cache: bool
) -> tuple[list[list[int]], list[list[int]], np.ndarray]:
    """Return prompts, transformers' texts, and their logits [TOKENS, prompts, V], which are clear."""
    for seed in range(20):
        generator = np.random.default_rng(seed)
        prompts = [generator.integers(1, VOCAB, length).tolist() for length in lengths]
        texts, logits = zip(*(greedy(model, prompt, use_cache) for prompt in prompts))
        if clear(np.stack(logits)):
            return prompts, list(texts), np.stack(logits, axis=1)
    raise AssertionError("no seed has clear logits at every token")


@pytest.mark.parametrize("case", CASES)
def test_greedy_text_is_that_of_transformers(case: str, make_checkpoint: Any) -> None:
    architecture, changes = CASES[case]
    row = FAMILY_ROWS[architecture]
    changes = {**changes, **row.in_text.get(case, {})}
    if "rope_parameters" in changes:  # transformers 5 writes this instead of rope_theta
        changes["rope_theta"] = None
    folder = make_checkpoint(architecture, **changes)
    lengths = row.prompts.get(case, LENGTHS)
    prompts, wanted, logits = prompts_and_texts(load_oracle(folder), lengths, case not in row.without_cache)
    positions = max(lengths) + TOKENS
    ours = build_frozen(load_model_config(folder), folder, ReferenceDevice(), positions=positions, quantize=False)
    decoder = Decoder(ours, prompts, TOKENS, GREEDY, keep_logits=True)
    rows, found = zip(*((ids, kept.copy()) for ids, kept in decoder.tokens_and_logits()))
    assert np.transpose(rows).tolist() == wanted
    assert np.abs(np.stack(found) - logits).max() < 1e-4 * np.ptp(logits)
    assert list(generate_ids(ours, prompts[1], TOKENS, GREEDY)) == wanted[1]
