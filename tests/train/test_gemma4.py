"""Models whose layers share keys and values and have embeddings of their own: text with and without a batch, what is
kept for the backward, weights in main memory, and refusals.

Their logits and gradients are those of test_oracle_model.py, their adapters and training of test_oracle_adapter.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.families.common import GEMMA4_EXPERTS
from tests.train.conftest import distance, random_weights, tiny_config, write_checkpoint
from wgrad.autograd.reference import ReferenceDevice
from wgrad.device.contract import Device
from wgrad.device.errors import WgradError
from wgrad.train.inference.generation import generate_batch, generate_ids
from wgrad.train.model.load_config import load_model_config, parse_model_config
from wgrad.train.model.load_weights import load_frozen
from wgrad.train.model.lora import linear_modules, match_targets
from wgrad.train.model.model import Model
from wgrad.train.model.model_files import ModelFiles
from wgrad.train.options.finetune_config import RunOptions
from wgrad.train.options.generate_config import GREEDY
from wgrad.train.step.build import build_frozen, build_trainable, count_parameters
from wgrad.train.step.lora_options import lora_config

LENGTHS, NEW = (3, 17, 9), 8


@pytest.fixture(scope="module", params=["Gemma3nForCausalLM", "Gemma4ForCausalLM", "experts"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    experts = request.param == "experts"
    raw = tiny_config("Gemma4ForCausalLM", **GEMMA4_EXPERTS) if experts else tiny_config(request.param)
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
    oracle = pytest.importorskip("tests.train.model_oracle")

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
    assert distance(chunked, whole) < 1e-5


@pytest.mark.oracle
def test_a_sparse_gate_is_no_part_of_a_stack(make_checkpoint: Any, wgpu_device: Device) -> None:
    """Where gate and up are one matmul, a layer whose gate has a cut of its own computes them apart."""
    oracle = pytest.importorskip("tests.train.peft_oracle")
    folder = make_checkpoint("Gemma3nForCausalLM", hidden_size=64, intermediate_size=256)
    config, ids = load_model_config(folder), oracle.random_ids()
    weights = (load_frozen(folder, config, wgpu_device, stacked=stacked) for stacked in (True, False))
    stacked, apart = (Model(config, part, wgpu_device, positions=64) for part in weights)
    assert "model.layers.0.mlp.gate_up_proj.weight" in stacked.weights
    assert distance(oracle.our_logits(stacked, ids), oracle.our_logits(apart, ids)) < 1e-5


@pytest.mark.parametrize("layer", [1, 3])
def test_files_may_have_keys_of_layers_that_use_anothers(layer: int, tmp_path: Path) -> None:
    """As published: the last two of these four layers have them in vain."""
    raw = tiny_config("Gemma4ForCausalLM")
    extra = {f"model.layers.{layer}.self_attn.{name}.weight": np.ones(3) for name in ("v_norm", "k_norm", "v_proj")}
    folder = write_checkpoint(tmp_path / "model", raw, extra | random_weights(raw))
    if layer == 3:
        ModelFiles(folder).check(load_model_config(folder))
        return
    with pytest.raises(WgradError, match=r"does not use: model\.layers\.1\.self_attn\.v_norm\.weight"):
        ModelFiles(folder).check(load_model_config(folder))


def test_every_projection_is_trained_and_full_leaves_the_scales(folder: Path) -> None:
    """By default an adapter of every projection, each by a name of its own, but of MLPs where there are experts; by
    --full all but the layers' scales."""
    config = load_model_config(folder)
    lora = lora_config(RunOptions(), config)
    wanted = [path for path in linear_modules(config) if config.experts is None or ".mlp." not in path]
    assert match_targets(lora.target_modules, list(linear_modules(config))) == wanted
    assert not any(name.isdigit() for name in lora.target_modules)
    built = build_trainable(RunOptions(full=True, max_length=8), config, folder, ReferenceDevice(), positions=8)
    left = set(built.model.weights) - set(built.parameters.tensors)
    assert left == {f"model.layers.{i}.layer_scalar" for i in range(4) if config.layer_scale}
    loaded = build_frozen(config, folder, ReferenceDevice(), positions=8, quantize=False).weights
    assert all(np.array_equal(built.model.weights[name], loaded[name]) for name in left)
    assert built.lora is None and built.total == count_parameters(config)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_kv_shared_layers": 3}, "must leave a layer of full_attention, whose keys and values the others use"),
        ({"per_layer_config": {"1": {"head_dim": 16}}}, r"must give all layers of full_attention one head_dim; got \["),
        ({"num_global_key_value_heads": 3, "attention_k_eq_v": True}, "multiple of num_key_value_heads; got 4 and 3"),
    ],
)
def test_shapes_that_do_not_go_together_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(WgradError, match=said):
        parse_model_config(tiny_config("Gemma4ForCausalLM", **changes))
