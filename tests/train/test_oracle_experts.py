"""Mixture of experts compared with transformers and PEFT: files, adapters, merging and training steps."""

from __future__ import annotations

import importlib
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import wgpu_sibling
from tests.families.common import GEMMA4_EXPERTS
from tests.families.table import FAMILY_ROWS, of_families
from tests.train.conftest import distance, write_checkpoint
from tests.train.gguf_base import write_base
from tests.train.llama_cpp_oracle import log_probabilities, their_log_probabilities
from tests.train.model_oracle import CORRECTION, full_model, make_inputs
from tests.train.peft_oracle import (
    TOKENS,
    as_theirs,
    dequantized_base,
    our_logits,
    peft,
    random_ids,
    side_by_side,
    their_base,
    their_logits,
    torch,
    transformers,
)
from tests.train.tiny_models import tiny_config
from wgrad.autograd.reference import ReferenceDevice
from wgrad.autograd.tensor import Tensor, no_grad
from wgrad.device.contract import Device
from wgrad.device.errors import WgradError
from wgrad.device.formats.frozen_weight import FrozenWeight
from wgrad.train.commands.cli import main
from wgrad.train.files.safetensors_files import from_arrays, read_entries, write_safetensors
from wgrad.train.model.adapter_files import load_adapter, save_adapter
from wgrad.train.model.experts import Experts
from wgrad.train.model.families import FAMILIES as TABLE
from wgrad.train.model.inputs import whole_inputs
from wgrad.train.model.load_config import load_model_config, parse_model_config
from wgrad.train.model.lora import LoraConfig, adaptable, expert_modules, linear_modules, lora_shapes
from wgrad.train.model.model_files import open_files
from wgrad.train.model.router import choose
from wgrad.train.model.streamed_weights import StreamedWeights
from wgrad.train.model.weights import weight_specs
from wgrad.train.options.finetune_config import RunOptions
from wgrad.train.step.build import balance, build_frozen, build_trainable
from wgrad.train.step.lora_options import lora_config
from wgrad.train.step.optim import ALIGN

pytestmark = pytest.mark.oracle

GPT_OSS = "GptOssForCausalLM"
GRANITE = "GraniteMoeForCausalLM"
GEMMA4 = "Gemma4ForCausalLM"
NEMOTRON = "NemotronHForCausalLM"
FILES = [name for name, row in FAMILY_ROWS.items() if row.files_of_experts]
CHANGES = {GEMMA4: {**GEMMA4_EXPERTS, "tie_word_embeddings": True}, NEMOTRON: {"moe_latent_size": 22}}
UNGATED = ("experts.up_proj", "experts.down_proj")
QWEN3 = {"norm_topk_prob": True, "num_hidden_layers": 3, "mlp_only_layers": [1]}
BOTH = ("experts.gate_up_proj", "experts.down_proj")


def of_experts(architecture: str) -> tuple[str, ...]:
    """Return the names of the experts' weights in an adapter."""
    return UNGATED if architecture == NEMOTRON else BOTH


def save_each(folder: Path, out: Path) -> Any:
    """Save a model with each expert in its own tensor, and return the model."""
    read = their_base(folder)
    fresh = type(read)(read.config).eval()
    fresh.load_state_dict(read.state_dict())
    fresh.save_pretrained(out)
    return fresh


def frozen(folder: Path, device: Device, adapter: Path | None = None) -> np.ndarray:
    config = load_model_config(folder)
    name = str(adapter) if adapter else None
    return our_logits(build_frozen(config, folder, device, positions=64, adapter=name, quantize=False), random_ids())


@pytest.mark.parametrize("architecture", FILES)
def test_files_of_transformers_and_ours_are_read_by_both(
    architecture: str, make_checkpoint: Any, tmp_path: Path
) -> None:
    """Files of transformers 5, like the original ones and ours, have a tensor for each expert.

    gpt-oss, Granite and Gemma 4 have one for all experts of a layer. OLMo Hybrid has three convolutions and other names
    of norms.
    """
    folder, device = make_checkpoint(architecture, **CHANGES.get(architecture, {})), ReferenceDevice()
    wanted = their_logits(save_each(folder, tmp_path / "saved"), random_ids())
    part = FAMILY_ROWS[architecture].files_of_experts
    assert any(part in name for name in read_entries(tmp_path / "saved/model.safetensors", ""))
    assert distance(frozen(tmp_path / "saved", device), wanted) < 1e-5
    adapter = tmp_path / "adapter"
    config = load_model_config(folder)
    lora = LoraConfig(r=2, alpha=4.0, target_modules=("q_b_proj" if config.latent else "q_proj",))
    zeros = {name: np.zeros(shape, np.float32) for name, shape in lora_shapes(lora, linear_modules(config)).items()}
    save_adapter(adapter, lora, zeros, str(folder))
    words = ["merge", "--adapter", str(adapter), "--out", str(tmp_path / "merged"), "--onto", "original"]
    assert main([*words, "--no-compare", "--device", "cpu"]) == 0
    names = [read_entries(tmp_path / f"{name}/model.safetensors", "").keys() for name in ("saved", "merged")]
    if part == ".v_conv1d.":
        merged, owner = read_entries(tmp_path / "merged/model.safetensors", ""), "model.layers.0.linear_attn."
        assert [merged[f"{owner}{part}_conv1d.weight"].shape[0] for part in "qkv"] == [12, 12, 40]
    assert names[0] == names[1] or FAMILY_ROWS[architecture].renamed
    assert distance(their_logits(their_base(tmp_path / "merged"), random_ids()), wanted) < 1e-6


def test_released_files_of_a_x_k1_have_no_corrections_and_more_norms(make_checkpoint: Any) -> None:
    """Corrections of scores are 0 then. The norm of the experts' output is there for layers without experts too."""
    folder = make_checkpoint("AXK1ForCausalLM")
    arrays = {name: entry.array() for name, entry in read_entries(folder / "model.safetensors", "").items()}
    named = {name.replace("mlp.post_mlp_", "post_mlp_"): array for name, array in arrays.items() if "score" not in name}
    norm = "model.layers.{}.post_mlp_layernorm.weight"
    assert len(named) == len(arrays) - 1 and norm.format(0) not in named
    write_checkpoint(
        folder, json.loads((folder / "config.json").read_text()), named | {norm.format(0): named[norm.format(1)]}
    )
    wanted = their_logits(their_base(folder), random_ids())
    assert distance(frozen(folder, ReferenceDevice()), wanted) < 1e-5


def test_sigmoids_smaller_than_what_is_added_to_their_sum_keep_their_shares(
    make_checkpoint: Any, device: Device
) -> None:
    """LFM2 adds 1e-6, so that the weights of a token's experts do not add up to 1."""
    folder = make_checkpoint("Lfm2MoeForCausalLM")
    experts = load_model_config(folder).experts
    assert experts is not None
    theirs = their_base(folder).model.layers[1].feed_forward.gate
    x = np.random.default_rng(0).standard_normal((7, 5)).astype(np.float32) - 13
    theirs.weight = torch.nn.Parameter(torch.eye(5))
    bias = np.linspace(-1, 1, 5, dtype=np.float32) * 1e-5
    _, wanted, numbers = theirs(torch.tensor(x), torch.tensor(bias))
    shares, ids = choose(experts, Tensor(device.upload(x), device), device.upload(bias))
    np.testing.assert_array_equal(as_numbers(device, ids), numbers)
    np.testing.assert_allclose(shares.numpy(), wanted.detach(), rtol=1e-5)
    assert wanted.sum(1).max() < 0.98 * experts.share_scale


def test_the_better_of_equal_groups_or_experts_comes_first(device: Device) -> None:
    """transformers takes any of them. SparseMixer's second share is one of those that are left, as there."""
    rng = np.random.default_rng(0)
    logits = rng.choice(np.array([-1, 0, 3], np.float32), (50, 12))
    for by_best in (False, True):
        rules: dict[str, Any] = {"sigmoid": True, "groups": 4, "top_groups": 2, "groups_by_best": by_best}
        _, ids = choose(Experts(12, 3, 8, (True,), **rules), Tensor(device.upload(logits), device), None)
        parts = np.sort(1 / (1 + np.exp(-logits.reshape(-1, 4, 3))))
        score = parts[..., -1] if by_best else parts[..., 1:].sum(-1, dtype=np.float32)
        groups = np.argsort(-score, axis=1, kind="stable")[:, :2]
        allowed = (np.arange(12) // 3 == groups[:, :, None]).any(1)
        wanted = np.argsort(np.where(allowed, -logits, 9), axis=1, kind="stable")[:, :3]
        np.testing.assert_array_equal(np.sort(as_numbers(device, ids)), np.sort(wanted))
    mixer = transformers.models.phimoe.modeling_phimoe.sparsemixer
    equal = np.zeros((2, 5), np.float32)
    equal[1, 2:4] = 3
    for noise in (0.2, 0.0):  # without noise, each of the two counts alone
        wanted, _ = mixer(torch.tensor(equal), jitter_eps=noise, training=False, top_k=2)
        shares, _ = choose(Experts(5, 2, 8, (True,), mixer=2 * noise), Tensor(device.upload(equal), device), None)
        np.testing.assert_allclose(shares.numpy(), wanted, rtol=1e-6)


def as_numbers(device: Device, ids: Any) -> np.ndarray:
    return ids.numpy() if isinstance(ids, Tensor) else device.download(ids)


def random_of(lora: LoraConfig, folder: Path) -> dict[str, np.ndarray]:
    generator, config = np.random.default_rng(5), load_model_config(folder)
    shapes = lora_shapes(lora, linear_modules(config), experts=expert_modules(config))
    return {name: (0.2 * generator.standard_normal(shape)).astype(np.float32) for name, shape in shapes.items()}


@pytest.mark.parametrize(
    ("architecture", "parameters"),
    [
        ("Qwen3MoeForCausalLM", BOTH),
        ("Qwen3MoeForCausalLM", BOTH[:1]),
        ("Qwen3MoeForCausalLM", ("layers.2.mlp.experts.down_proj",)),
        (GPT_OSS, BOTH),
        (NEMOTRON, UNGATED),
    ],
)
def test_peft_loads_our_adapter_of_experts(
    architecture: str, parameters: tuple[str, ...], make_checkpoint: Any, device: Device, tmp_path: Path
) -> None:
    changes = {} if architecture != "Qwen3MoeForCausalLM" else QWEN3
    folder, adapter = make_checkpoint(architecture, **changes), tmp_path / "adapter"
    ranks = {parameters[0]: 5} if parameters[0].endswith("up_proj") else {}
    lora = LoraConfig(3, 6.0, target_modules=("q_proj",), target_parameters=parameters, rank_pattern=ranks)
    arrays = random_of(lora, folder)
    save_adapter(adapter, lora, arrays, str(folder))
    theirs = peft.PeftModel.from_pretrained(their_base(folder), adapter)
    assert distance(their_logits(theirs, random_ids()), their_logits(their_base(folder), random_ids())) > 0.1
    assert distance(frozen(folder, device, adapter), their_logits(theirs, random_ids())) < 1e-5
    again, read = load_adapter(adapter, *adaptable(load_model_config(folder)))
    assert again.target_parameters == parameters
    for name, array in arrays.items():
        np.testing.assert_array_equal(read[name], array, err_msg=name)


@pytest.mark.parametrize(
    ("architecture", "names"),
    [
        ("MixtralForCausalLM", ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]),
        ("MixtralForCausalLM", ["down_proj"]),
        (GPT_OSS, ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]),
        (GRANITE, ["experts.gate_up_proj", "experts.down_proj"]),
        (GEMMA4, ["experts.gate_up_proj", "experts.down_proj"]),
        (NEMOTRON, ["experts.up_proj", "experts.down_proj"]),
    ],
)
def test_we_load_and_merge_peft_adapters_of_experts(
    architecture: str, names: list[str], make_checkpoint: Any, device: Device, tmp_path: Path
) -> None:
    folder = make_checkpoint(architecture, **CHANGES.get(architecture, {}))
    torch.manual_seed(0)
    settings = {"r": 3, "lora_alpha": 5, "target_modules": ["v_proj"], "target_parameters": names}
    wrapped = peft.get_peft_model(their_base(folder), peft.LoraConfig(task_type="CAUSAL_LM", **settings))
    for name, parameter in wrapped.named_parameters():
        if "lora_B" in name:
            parameter.data = 0.2 * torch.randn_like(parameter)
    wrapped.save_pretrained(tmp_path / "adapter")
    wanted = their_logits(wrapped, random_ids())
    assert distance(frozen(folder, device, tmp_path / "adapter"), wanted) < 1e-5
    words = ["merge", "--adapter", str(tmp_path / "adapter"), "--model", str(folder), "--onto", "original"]
    assert main([*words, "--out", str(tmp_path / "merged"), "--no-compare", "--device", "cpu"]) == 0
    assert distance(their_logits(their_base(tmp_path / "merged"), random_ids()), wanted) < 1e-5


@pytest.mark.parametrize("architecture", ["Qwen3MoeForCausalLM", GPT_OSS, NEMOTRON])
def test_llama_cpp_loads_our_adapter_of_experts(architecture: str, make_checkpoint: Any, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"hidden_size": 64, "head_dim": 16, "norm_topk_prob": True, "moe_intermediate_size": 32}
    sizes |= {"time_step_min": 0.0} if architecture == NEMOTRON else {}
    folder, adapter = make_checkpoint(architecture, **sizes), tmp_path / "adapter"
    lora = LoraConfig(3, 6.0, target_modules=("q_proj",), target_parameters=of_experts(architecture))
    save_adapter(adapter, lora, random_of(lora, folder), str(folder))
    weights = {name: entry.array() for name, entry in read_entries(folder / "model.safetensors", "").items()}
    write_base(tmp_path / "base.gguf", load_model_config(folder), weights)
    assert main(["export", "--adapter", str(adapter), "--gguf-lora", str(tmp_path / "lora.gguf")]) == 0
    wanted = log_probabilities(frozen(folder, ReferenceDevice(), adapter))
    found = their_log_probabilities(tmp_path / "base.gguf", random_ids(), tmp_path / "lora.gguf")
    assert np.abs(found - wanted).max() < 1e-3
    assert np.abs(found - log_probabilities(frozen(folder, ReferenceDevice()))).max() > 0.1


@pytest.mark.parametrize("kind", ["q8_0", "q4_k_m", "mxfp4"])
def test_experts_of_few_bits_in_gguf_train_as_they_are_stored(
    kind: str, make_checkpoint: Any, device: Device, tmp_path: Path
) -> None:
    """They stay as stored, in forward and backward, with gate and up stacked, or interleaved for gpt-oss."""
    sizes = {"hidden_size": 256, "head_dim": 64, "norm_topk_prob": True, "moe_intermediate_size": 256}
    architecture = "Qwen3MoeForCausalLM"
    if kind == "mxfp4":
        architecture, sizes = GPT_OSS, {"hidden_size": 64, "head_dim": 16, "intermediate_size": 32}
    folder, adapter = make_checkpoint(architecture, **sizes), tmp_path / "adapter"
    lora = LoraConfig(2, 2.0, target_modules=("q_proj",), target_parameters=BOTH[1:])
    save_adapter(adapter, lora, random_of(lora, folder), str(folder))
    words = ["--out", str(tmp_path / "out"), "--onto", "original", "--format", "gguf", "--quantize", kind]
    assert main(["merge", "--adapter", str(adapter), *words, "--no-compare", "--device", "cpu"]) == 0
    config = load_model_config(tmp_path / "out")
    settings: dict[str, Any] = {"max_length": TOKENS, "compute": "float32", "target_modules": ("q_proj", *BOTH)}
    built = build_trainable(RunOptions(**settings), config, tmp_path / "out", device, positions=TOKENS)
    stored = {built.model.weights[f"model.layers.1.mlp.experts.{part}_proj"].format for part in ("gate_up", "down")}
    assert stored == ({"q4_k", "q6_k"} if kind == "q4_k_m" else {kind})
    wanted = their_logits(dequantized_experts(folder, built.model.weights, device), random_ids())
    assert distance(our_logits(built.model, random_ids()), wanted) < 1e-5
    ids = random_ids()
    positions = np.arange(ids.size, dtype=np.int32).reshape(ids.shape)
    inputs = whole_inputs(built.model, ids, positions, np.zeros_like(ids))
    inputs.targets = device.upload(ids.reshape(-1))
    built.model.loss(inputs).backward()
    assert all(np.isfinite(device.download(t.gradient)).all() for t in built.parameters.tensors.values())


def dequantized_experts(folder: Path, weights: Any, device: Device) -> Any:
    """Return transformers' model with the decoded values of our weights."""
    model = their_base(folder)
    state = model.state_dict()
    for name, weight in weights.items():
        values = device.dequantize(weight) if isinstance(weight, FrozenWeight) else weight
        value = torch.tensor(device.download(values).astype(np.float32))
        state[name].copy_(as_theirs(model, value, state[name].shape))
    return model


def write_mxfp4(folder: Path) -> dict[str, np.ndarray]:
    """Replace gpt-oss' experts by some in MXFP4, as its original files have them, and return these arrays by name."""
    config, generator, found = load_model_config(folder), np.random.default_rng(11), dict[str, np.ndarray]()
    arrays = {name: np.array(e.array()) for name, e in read_entries(folder / "model.safetensors", "").items()}
    for name, (experts, rows, columns) in expert_modules(config).items():
        del arrays[name]
        blocks = (experts, rows, columns // 32)
        found[f"{name}_blocks"] = generator.integers(0, 256, (*blocks, 16)).astype(np.uint8)
        found[f"{name}_scales"] = generator.integers(120, 126, blocks).astype(np.uint8)
    write_safetensors(folder / "model.safetensors", from_arrays(arrays | found))
    raw = json.loads((folder / "config.json").read_text())
    raw["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (folder / "config.json").write_text(json.dumps(raw))
    return found


def test_mxfp4_experts_are_taken_as_stored(make_checkpoint: Any, device: Device) -> None:
    """Every value has the bits of transformers'."""
    folder = make_checkpoint(GPT_OSS, hidden_size=96, intermediate_size=32)
    stored = write_mxfp4(folder)
    model = build_frozen(load_model_config(folder), folder, device, positions=64, adapter=None)
    theirs = their_base(folder)
    for name in ("model.layers.1.mlp.experts.gate_up_proj", "model.layers.0.mlp.experts.down_proj"):
        weight = model.weights[name]
        assert weight.format == "mxfp4"
        for part, ending in ((weight.codes, "_blocks"), (weight.exponents, "_scales")):
            np.testing.assert_array_equal(device.download(part), stored[name + ending].reshape(-1))
        wanted = theirs.state_dict()[name].transpose(1, 2).numpy()
        np.testing.assert_array_equal(device.download(device.dequantize(weight)).reshape(wanted.shape), wanted)
        pieces = list(open_files(folder, load_model_config(folder))[0].entries[name].blocks(2))
        assert [len(piece) for piece in pieces] == [2] * (len(wanted) // 2) + [1] * (len(wanted) % 2)
        np.testing.assert_array_equal(np.concatenate(pieces), wanted)
    assert distance(our_logits(model, random_ids()), their_logits(theirs, random_ids())) < 1e-5


def test_merging_attention_leaves_mxfp4_experts_as_they_are(make_checkpoint: Any, tmp_path: Path) -> None:
    """They are written in MXFP4 again, with the same values."""
    folder, adapter = make_checkpoint(GPT_OSS, hidden_size=96, intermediate_size=32), tmp_path / "adapter"
    write_mxfp4(folder)
    lora = LoraConfig(2, 2.0, target_modules=("q_proj",))
    save_adapter(adapter, lora, random_of(lora, folder), str(folder))
    words = ["merge", "--adapter", str(adapter), "--out", str(tmp_path / "out"), "--no-compare", "--device", "cpu"]
    assert main([*words, "--format", "gguf", "--quantize", "mxfp4"]) == 0
    before, after = (open_files(path, load_model_config(path))[0].entries for path in (folder, tmp_path / "out"))
    for name in expert_modules(load_model_config(folder)):
        np.testing.assert_array_equal(after[name].array(), before[name].array(), err_msg=name)


def test_mxfp4_experts_streamed_give_the_same_bits(make_checkpoint: Any, wgpu_device: Device) -> None:
    folder = make_checkpoint(GPT_OSS, hidden_size=96, intermediate_size=32)
    write_mxfp4(folder)
    card: Any = wgpu_sibling()
    card.shared_memory = False
    config = load_model_config(folder)
    options: dict[str, Any] = {"positions": 64, "adapter": None}
    here, streamed = (build_frozen(config, folder, card, **options, stream_weights=way) for way in ("off", "on"))
    assert isinstance(streamed.weights, StreamedWeights)
    np.testing.assert_array_equal(our_logits(streamed, random_ids()), our_logits(here, random_ids()))


def test_mxfp4_files_that_do_not_fit_are_refused(make_checkpoint: Any) -> None:
    folder = make_checkpoint(GPT_OSS, hidden_size=96, intermediate_size=32)
    arrays = write_mxfp4(folder) | {n: e.array() for n, e in read_entries(folder / "model.safetensors", "").items()}
    name, config = "model.layers.1.mlp.experts.down_proj", load_model_config(folder)
    for changed, message in (
        ({f"{name}_scales": None}, f"has {name}_blocks, and no {name}_scales: fetch"),
        ({f"{name}_scales": arrays[f"{name}_scales"][:, :-1]}, r"must be U8 \[experts, rows, blocks, 16\] and"),
        ({f"{name}_scales": np.full_like(arrays[f"{name}_scales"], 255)}, "has values that are not finite"),
    ):
        kept = {n: np.ascontiguousarray(a) for n, a in (arrays | changed).items() if a is not None}
        write_safetensors(folder / "model.safetensors", from_arrays(kept))
        with pytest.raises(WgradError, match=message):
            build_frozen(config, folder, ReferenceDevice(), positions=64, adapter=None)


@pytest.mark.parametrize("kind", ["Qwen3MoeForCausalLM", GPT_OSS, "mxfp4", NEMOTRON])
def test_ten_steps_on_few_bits_have_the_losses_of_peft(
    kind: str, make_checkpoint: Any, cpu: Device, tmp_path: Path
) -> None:
    """They train adapters of attention and experts, with experts in NF4 or MXFP4."""
    if kind == "mxfp4":
        folder = make_checkpoint(GPT_OSS, hidden_size=96, intermediate_size=32)
        write_mxfp4(folder)
    else:
        folder = make_checkpoint(kind)
    settings: dict[str, Any] = {"lora_r": 4, "lora_alpha": 8.0, "learning_rate": 5e-3, "compute": "float32"}
    settings |= {
        "target_modules": ("q_proj", "o_proj", *of_experts(kind), *(["in_proj"] if kind == NEMOTRON else [])),
        "max_grad_norm": 0.5,
    }
    config = RunOptions(max_length=TOKENS, batch_size=2, gradient_accumulation_steps=2, **settings)
    built = build_trainable(config, load_model_config(folder), folder, cpu, positions=TOKENS)
    assert built.lora is not None and built.lora.target_parameters == of_experts(kind)
    save_adapter(
        tmp_path, built.lora, {name: built.parameters.get(name) for name in built.parameters.tensors}, str(folder)
    )
    base = dequantized_base(folder, dict(built.model.weights), cpu)
    theirs = peft.PeftModel.from_pretrained(base, tmp_path, is_trainable=True)
    trained = [p for p in theirs.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=config.learning_rate, weight_decay=0.0)
    ours, losses = side_by_side(config, built, theirs, optimizer, steps=10)
    np.testing.assert_allclose(ours, losses, rtol=1e-4)
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize("count", [3, 1])
@pytest.mark.parametrize("architecture", ["OlmoeForCausalLM", GPT_OSS])
def test_experts_with_no_token_or_all_compute_as_in_transformers(
    architecture: str, count: int, make_checkpoint: Any, device: Device, tmp_path: Path
) -> None:
    """The third expert's logit is the mean of the other two, so it is never the largest."""
    counts = {"num_experts": count, "num_local_experts": count, "num_experts_per_tok": 1}
    theirs = their_base(make_checkpoint(architecture, **counts))
    seen = set[int]()
    for layer in theirs.model.layers:
        router = layer.mlp.gate if hasattr(layer.mlp, "gate") else layer.mlp.router
        for _, parameter in router.named_parameters():
            parameter.data[-1] = parameter.data[:2].mean(0)
        router.register_forward_hook(lambda _, __, out: seen.update(out[2].reshape(-1).tolist()))
    wanted = their_logits(theirs, random_ids())
    theirs.save_pretrained(tmp_path / "saved")
    assert distance(frozen(tmp_path / "saved", device), wanted) < 1e-5
    assert seen == {0, 1} if count == 3 else {0}


def test_experts_alone_can_be_adapted(make_checkpoint: Any, cpu: Device) -> None:
    folder = make_checkpoint("Qwen3MoeForCausalLM")
    config = load_model_config(folder)
    settings: dict[str, Any] = {"max_length": TOKENS, "target_modules": ("down_proj",)}
    built = build_trainable(RunOptions(**settings, lora_r=3), config, folder, cpu, positions=TOKENS)
    assert {name.split(".")[-2] for name in built.parameters.tensors} == {"down_proj"}
    with pytest.raises(WgradError, match="--lora-r: must be at most 48, the longest side"):
        build_trainable(RunOptions(**settings, lora_r=1000), config, folder, cpu, positions=TOKENS)


def test_a_shared_expert_alone_can_be_adapted(make_checkpoint: Any, cpu: Device) -> None:
    folder = make_checkpoint("Qwen2MoeForCausalLM")
    settings: dict[str, Any] = {
        "max_length": TOKENS,
        "compute": "float32",
        "target_modules": ("shared_expert.up_proj",),
    }
    built = build_trainable(RunOptions(**settings), load_model_config(folder), folder, cpu, positions=TOKENS)
    ids = random_ids()
    positions = np.arange(ids.size, dtype=np.int32).reshape(ids.shape)
    inputs = whole_inputs(built.model, ids, positions, np.zeros_like(ids))
    inputs.targets = ids.reshape(-1)
    built.model.loss(inputs).backward()
    grads = {name: np.abs(cpu.download(t.gradient)).max() for name, t in built.parameters.tensors.items()}
    assert grads.keys() == {f"model.layers.{i}.mlp.shared_expert.up_proj.lora_{side}" for i in (0, 1) for side in "AB"}
    assert all(grads[name] > 0 for name in grads if name.endswith("B"))


def test_adapters_of_experts_refuse_what_they_do_not_have(make_checkpoint: Any) -> None:
    config = load_model_config(make_checkpoint("OlmoeForCausalLM"))
    assert lora_config(RunOptions(), config).target_modules == ("q_proj", "k_proj", "v_proj", "o_proj")
    given: dict[str, Any] = {"target_modules": ("q_proj", "experts.down_proj=3")}
    lora = lora_config(RunOptions(**given), config)
    assert (lora.target_modules, lora.target_parameters) == (("q_proj",), ("experts.down_proj",))
    assert lora.rank_of("model.layers.1.mlp.experts.down_proj") == 3
    for name, value in (("lora_dropout", 0.1), ("use_dora", True), ("init_lora_weights", "pissa")):
        with pytest.raises(WgradError, match=f"^--{name.replace('_', '-')}: cannot be combined with experts.down_proj"):
            lora_config(RunOptions(**(given | {name: value})), config)


def test_an_expert_that_is_missing_is_named(make_checkpoint: Any, tmp_path: Path) -> None:
    save_each(make_checkpoint("MixtralForCausalLM"), tmp_path / "saved")
    text = (tmp_path / "saved/config.json").read_text()
    (tmp_path / "saved/config.json").write_text(text.replace('"num_local_experts": 5', '"num_local_experts": 6'))
    with pytest.raises(WgradError, match=r"has no tensor model.layers.0.block_sparse_moe.experts.5.w1.weight"):
        frozen(tmp_path / "saved", ReferenceDevice())


def test_biases_of_experts_do_not_decay(make_checkpoint: Any, cpu: Device) -> None:
    folder = make_checkpoint(GPT_OSS)
    config = load_model_config(folder)
    built = build_trainable(RunOptions(max_length=8, full=True), config, folder, cpu, positions=8)
    decayed = [spec for spec in weight_specs(config) if spec.kind not in ("norm", "bias")]
    assert built.parameters.decay_elements == sum(-(-math.prod(spec.shape) // ALIGN) * ALIGN for spec in decayed)


BALANCED = of_families(lambda row: () if row.balanced is None else (row.balanced,))


@pytest.mark.parametrize(("architecture", "changes"), BALANCED)
def test_the_load_balancing_loss_is_that_of_transformers(
    architecture: str, changes: dict[str, Any], make_checkpoint: Any, device: Device
) -> None:
    """Compare loss and gradients, also of a trained router. Padding does not count; recomputed layers count once."""
    folder = make_checkpoint(architecture, **changes, output_router_logits=True, router_aux_loss_coef=0.7)
    ids, real = random_ids(2), np.ones((2, TOKENS), np.int64)
    real[1, 15:] = 0
    labels = np.where(real, ids, -100)
    theirs = their_base(folder)
    told = {"attention_mask": torch.tensor(real), "labels": torch.tensor(labels.astype(np.int64))}
    found = theirs(torch.tensor(ids.astype(np.int64)), **told)
    found.loss.backward()
    wanted = {name: parameter.grad for name, parameter in theirs.named_parameters()}

    model, parameters = full_model(folder, device)
    options: dict[str, Any] = {"max_length": TOKENS, "batch_size": 2}
    model.balance = balance(RunOptions(**options), model.config, device)
    targets = np.full_like(ids, -100)
    targets[:, :-1] = labels[:, 1:]
    doc_start = np.where(real, 0, np.arange(TOKENS)).astype(np.int32)
    inputs, count = make_inputs(device, ids, targets, doc_start), (targets >= 0).sum()
    for model.recompute in (False, True):
        device.fill(parameters.grad, 0.0)
        loss = model.loss(inputs)
        assert float(loss.numpy()[0]) / count == pytest.approx(float(found.loss), rel=1e-5)
        loss.backward()
        for name, tensor in parameters.tensors.items():
            if name.endswith(CORRECTION):  # not trained
                continue
            ours = torch.tensor(device.download(tensor.gradient) / count)
            assert distance(as_theirs(theirs, ours, wanted[name].shape).numpy(), wanted[name].numpy()) < 1e-4, name
    assert float(found.aux_loss) > 1
    with no_grad():  # what is held out is measured without
        plain = float(model.loss(inputs).numpy()[0]) / count
    assert plain == pytest.approx(float(found.loss - 0.7 * found.aux_loss), rel=1e-5)


def test_a_config_asks_for_the_load_balancing_loss_where_transformers_has_one() -> None:
    asked = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
    compared = 0
    for architecture, family in TABLE.items():
        experts = parse_model_config(tiny_config(architecture, **asked)).experts
        if experts is not None:
            kind = transformers.CONFIG_MAPPING[family.model_type].__module__
            theirs = importlib.import_module(kind.replace(".configuration_", ".modeling_"))
            assert (experts.balance == 0.5) == hasattr(theirs, "load_balancing_loss_func"), architecture
            compared += 1
    assert compared > 28


def test_only_fine_tuning_of_experts_has_a_load_balancing_loss(make_checkpoint: Any, cpu: Device) -> None:
    def weight(folder: Path, **options: Any) -> float:
        found = balance(RunOptions(max_length=8, **options), load_model_config(folder), cpu)
        return 0.0 if found is None else found.coefficient

    plain, balanced = (
        make_checkpoint("OlmoeForCausalLM", output_router_logits=on, name=str(on)) for on in (False, True)
    )
    assert (weight(plain), weight(plain, router_aux_loss_coef=0.5)) == (0, 0.5)
    assert (weight(balanced), weight(balanced, router_aux_loss_coef=0.0)) == (0.01, 0)
    assert weight(balanced, objective="dpo") == weight(plain, objective="dpo", router_aux_loss_coef=0.0) == 0
    assert balance(RunOptions(router_aux_loss_coef=0.0), load_model_config(balanced), cpu) is None  # it costs time
    assert weight(make_checkpoint(), router_aux_loss_coef=0.0) == 0
    assert load_model_config(plain).identity() == load_model_config(balanced).identity()
    for folder, objective, words in (
        (plain, "dpo", "--objective dpo has no load-balancing loss, got 0.5: leave it out"),
        (make_checkpoint(), "sft", "LlamaForCausalLM has no experts, got 0.5: leave it out"),
    ):
        with pytest.raises(WgradError, match=f"^--router-aux-loss-coef: {words}"):
            weight(folder, objective=objective, router_aux_loss_coef=0.5)
