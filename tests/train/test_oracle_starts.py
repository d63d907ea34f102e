"""Adapters and their training steps compared with PEFT: LoRA+, PiSSA, whole embedding and head, DoRA."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.tools import oracle_package
from tests.train.conftest import distance
from tests.train.peft_oracle import (
    ACCUMULATE,
    NAMES,
    TOKENS,
    dequantized_base,
    our_logits,
    random_ids,
    side_by_side,
    their_base,
    their_logits,
)
from wgrad.device.contract import Device
from wgrad.train.commands.cli import main
from wgrad.train.model.adapter_files import save_adapter
from wgrad.train.model.load_config import load_model_config
from wgrad.train.options.finetune_config import RunOptions
from wgrad.train.step.build import TrainableModel, build_frozen, build_trainable

torch = oracle_package("torch")
peft = oracle_package("peft")

pytestmark = pytest.mark.oracle

STEPS = 5


def build(folder: Path, device: Device, **options: Any) -> tuple[RunOptions, TrainableModel]:
    settings: dict[str, Any] = {
        "lora_r": 4,
        "lora_alpha": 8.0,
        "learning_rate": 5e-3,
        "warmup_steps": 0.1,
        "max_grad_norm": 0.5,
    }
    settings |= {"compute": "float32"} | options
    config = RunOptions(max_length=TOKENS, batch_size=2, gradient_accumulation_steps=ACCUMULATE, **settings)
    return config, build_trainable(config, load_model_config(folder), folder, device, positions=TOKENS)


def their_adapter(folder: Path, device: Device, built: TrainableModel, out: Path) -> Any:
    """Return PEFT's model on the decoded values of our weights, with the current adapter."""
    assert built.lora is not None
    arrays = {name: built.parameters.get(name) for name in built.parameters.tensors}
    save_adapter(out, built.lora, arrays, str(folder))
    base = dequantized_base(folder, dict(built.model.weights), device)
    return peft.PeftModel.from_pretrained(base, out, is_trainable=True)


def test_lora_plus_trains_as_in_peft(make_checkpoint: Any, cpu: Device, tmp_path: Path) -> None:
    """Losses, and at the end every matrix, of AdamW with two rates."""
    from peft.optimizers import create_loraplus_optimizer

    folder = make_checkpoint("LlamaForCausalLM")
    config, built = build(folder, cpu, learning_rate=1e-3, loraplus_lr_ratio=16.0, weight_decay=0.1)
    theirs = their_adapter(folder, cpu, built, tmp_path)
    decay = {"weight_decay": 0.1, "loraplus_weight_decay": 0.1}
    optimizer = create_loraplus_optimizer(theirs, torch.optim.AdamW, lr=1.0, loraplus_lr_ratio=16.0, **decay)
    for group in optimizer.param_groups:
        group["rate"] = group["lr"]
    ours, others = side_by_side(config, built, theirs, optimizer, STEPS)
    np.testing.assert_allclose(ours, others, rtol=1e-4)
    assert others[-1] < 0.95 * others[0]
    for name, value in peft.get_peft_model_state_dict(theirs).items():
        wanted = value.numpy()
        found = built.parameters.get(name.removeprefix("base_model.model.").removesuffix(".weight"))
        assert np.linalg.norm(found - wanted) <= 1e-3 * np.linalg.norm(wanted), name


# ---- PiSSA -------------------------------------------------------------------------------------
def saved_as_theirs(folder: Path, device: Device, built: TrainableModel, out: Path, true: np.ndarray) -> None:
    """PEFT and wgrad read the adapter onto the base model as its files have it, and find these logits."""
    save_adapter(out, *built.adapter(), str(folder))
    again = build_frozen(load_model_config(folder), folder, device, positions=64, adapter=str(out), quantize=False)
    ids = random_ids()
    for found in (our_logits(again, ids), their_logits(peft.PeftModel.from_pretrained(their_base(folder), out), ids)):
        assert distance(found, true) <= 1e-5
    assert distance(their_logits(their_base(folder), ids), true) > 0.03  # training did something


@pytest.mark.parametrize("rslora", [False, True])
def test_pissa_starts_and_learns_as_pefts(rslora: bool, make_checkpoint: Any, cpu: Device, tmp_path: Path) -> None:
    """On the weights as they are PEFT does all of it by itself, the way to plain LoRA included."""
    folder = make_checkpoint("LlamaForCausalLM")
    patterns = () if rslora else ("q_proj=3",)  # PEFT converts no two of rsLoRA and patterns
    modules = (*patterns, "k_proj", "o_proj", "down_proj")
    config, built = build(
        folder,
        cpu,
        learning_rate=3e-3,
        init_lora_weights="pissa",
        quantize=False,
        use_rslora=rslora,
        target_modules=modules,
    )
    names = [name.partition("=")[0] for name in modules]
    settings = {"target_modules": names, "rank_pattern": {} if rslora else {"q_proj": 3}, "use_rslora": rslora}
    wanted = peft.LoraConfig(r=4, lora_alpha=8, init_lora_weights="pissa", task_type="CAUSAL_LM", **settings)
    theirs = peft.get_peft_model(their_base(folder), wanted)
    theirs.peft_config["default"].init_lora_weights = True  # as PEFT's example has it before the start is saved
    theirs.save_pretrained(tmp_path / "start")
    trained = [p for p in theirs.parameters() if p.requires_grad]
    ours, others = side_by_side(config, built, theirs, torch.optim.AdamW(trained, weight_decay=0.0), STEPS)
    np.testing.assert_allclose(ours, others, rtol=1e-3)
    assert others[-1] < 0.95 * others[0]
    theirs.save_pretrained(tmp_path / "theirs", path_initial_model_for_weight_conversion=str(tmp_path / "start"))
    saved_as_theirs(folder, cpu, built, tmp_path / "ours", our_logits(built.model, random_ids()))
    converted = peft.PeftModel.from_pretrained(their_base(folder), tmp_path / "theirs")
    assert distance(our_logits(built.model, random_ids()), their_logits(converted, random_ids())) < 1e-2


def test_pissa_over_nf4_trains_as_in_peft(make_checkpoint: Any, cpu: Device, tmp_path: Path) -> None:
    """The residual is frozen in NF4: together with the start it is nearer to the weights than their own NF4 is."""
    folder = make_checkpoint("LlamaForCausalLM", hidden_size=64, head_dim=16)
    config, built = build(folder, cpu, learning_rate=3e-3, init_lora_weights="pissa", lora_r=16, lora_alpha=16.0)
    plain, true = build(folder, cpu)[1].model.weights, their_base(folder).state_dict()
    for name, value in built.parameters.tensors.items():
        if not name.endswith("lora_A"):
            continue
        module = name.removesuffix(".lora_A")
        weight = true[module + ".weight"].numpy()
        start = built.parameters.get(module + ".lora_B") @ built.parameters.get(name)
        frozen, before = (cpu.download(cpu.dequantize(w[module + ".weight"])) for w in (built.model.weights, plain))
        assert distance(frozen + start, weight) < 0.9 * distance(before, weight), (name, value.shape)
    theirs = their_adapter(folder, cpu, built, tmp_path / "start")
    trained = [p for p in theirs.parameters() if p.requires_grad]
    ours, others = side_by_side(config, built, theirs, torch.optim.AdamW(trained, weight_decay=0.0), STEPS)
    np.testing.assert_allclose(ours, others, rtol=0.005)
    assert others[-1] < 0.95 * others[0]
    lora, arrays = built.adapter()
    assert lora.r == 32 and lora.alpha == 32 and set(arrays) == set(built.parameters.tensors)
    wanted = their_base(folder)
    for module in {name.rpartition(".")[0] for name in arrays}:
        change = arrays[module + ".lora_B"] @ arrays[module + ".lora_A"]
        wanted.get_submodule(module).weight.data += torch.tensor(change)
    saved_as_theirs(folder, cpu, built, tmp_path / "saved", their_logits(wanted, random_ids()))
    assert len(NAMES) * 4 == len(arrays)


# ---- embedding and head ------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("architecture", "tied", "whole"),
    [
        ("PhiForCausalLM", False, ("embed_tokens", "lm_head")),  # whose head has a bias
        ("LlamaForCausalLM", True, ("embed_tokens",)),
        ("LlamaForCausalLM", True, ("embed_tokens", "lm_head")),
    ],
)
def test_whole_modules_train_as_in_peft(
    architecture: str, tied: bool, whole: tuple[str, ...], make_checkpoint: Any, cpu: Device, tmp_path: Path
) -> None:
    """If a model ties the two, a trained one becomes a weight of its own, and the other stays as it was."""
    from peft.optimizers import create_loraplus_optimizer

    folder = make_checkpoint(architecture, tie_word_embeddings=tied)
    chosen = {"train_embeddings": "embed_tokens" in whole, "train_head": "lm_head" in whole}
    config, built = build(
        folder, cpu, learning_rate=4e-3, weight_decay=0.1, loraplus_lr_ratio=4.0, quantize=False, **chosen
    )
    assert built.lora is not None and built.lora.modules_to_save == whole
    before = their_logits(their_base(folder), random_ids())
    assert distance(our_logits(built.model, random_ids()), before) <= 1e-5
    theirs = their_adapter(folder, cpu, built, tmp_path / "start")
    decay = {"weight_decay": 0.1, "loraplus_weight_decay": 0.1}
    optimizer = create_loraplus_optimizer(theirs, torch.optim.AdamW, lr=1.0, loraplus_lr_ratio=4.0, **decay)
    for group in optimizer.param_groups:
        group["rate"] = group["lr"]
    ours, others = side_by_side(config, built, theirs, optimizer, STEPS)
    np.testing.assert_allclose(ours, others, rtol=1e-3)
    assert others[-1] < 0.95 * others[0]
    _, arrays = built.adapter()
    trained = peft.get_peft_model_state_dict(theirs)
    assert len(trained) == len(arrays)
    for name, value in trained.items():
        short = name.removeprefix("base_model.model.")
        found, wanted = arrays[short.removesuffix(".weight") if "lora_" in short else short], value.numpy()
        assert np.linalg.norm(found - wanted) <= 1e-3 * np.linalg.norm(wanted), name
    saved_as_theirs(folder, cpu, built, tmp_path / "saved", our_logits(built.model, random_ids()))
    with built.model.without_adapter():  # what dpo and kto measure against
        assert distance(our_logits(built.model, random_ids()), before) <= 1e-5
    for kind in ("safetensors", "gguf")[: 2 - (architecture != "LlamaForCausalLM")]:
        out = tmp_path / kind
        words = ["merge", "--adapter", str(tmp_path / "saved"), "--out", str(out), "--onto", "original"]
        assert main([*words, "--device", "cpu", "--dtype", "float32", "--format", kind, "--no-compare"]) == 0
        merged = build_frozen(load_model_config(out), out, cpu, positions=64, quantize=False)
        assert distance(our_logits(merged, random_ids()), our_logits(built.model, random_ids())) <= 1e-5


# ---- DoRA --------------------------------------------------------------------------------------
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "PhiForCausalLM"])
def test_dora_learns_as_pefts(architecture: str, make_checkpoint: Any, cpu: Device, tmp_path: Path) -> None:
    """From the start on, where nothing of the base model is changed; Phi's projections have biases."""
    folder = make_checkpoint(architecture)
    config, built = build(folder, cpu, quantize=False, use_dora=True, use_rslora=True)
    before = their_logits(their_base(folder), random_ids())
    assert distance(our_logits(built.model, random_ids()), before) <= 1e-5
    theirs = their_adapter(folder, cpu, built, tmp_path / "start")
    trained = {n: p for n, p in theirs.named_parameters() if p.requires_grad}
    assert sum("magnitude" in name for name in trained) == len(trained) // 3
    ours, others = side_by_side(config, built, theirs, torch.optim.AdamW(trained.values(), weight_decay=0.0), 8)
    np.testing.assert_allclose(ours, others, rtol=1e-3)
    assert others[-1] < 0.95 * others[0]
    _, arrays = built.adapter()
    for name, value in peft.get_peft_model_state_dict(theirs).items():
        found = arrays[name.removeprefix("base_model.model.").removesuffix(".weight")]
        assert np.linalg.norm(found - value.numpy()) <= 1e-3 * np.linalg.norm(value.numpy()), name
    saved_as_theirs(folder, cpu, built, tmp_path / "saved", our_logits(built.model, random_ids()))
    with built.model.without_adapter():
        assert distance(our_logits(built.model, random_ids()), before) <= 1e-5
    out = tmp_path / "merged"
    words = ["merge", "--adapter", str(tmp_path / "saved"), "--out", str(out), "--onto", "original"]
    assert main([*words, "--device", "cpu", "--dtype", "float32", "--no-compare"]) == 0
    wanted = peft.PeftModel.from_pretrained(their_base(folder), tmp_path / "saved").merge_and_unload()
    assert distance(their_logits(their_base(out), random_ids()), their_logits(wanted, random_ids())) < 1e-5


def test_dora_over_nf4_on_a_gpu_trains_as_in_peft(make_checkpoint: Any, wgpu_device: Device, tmp_path: Path) -> None:
    """Recorded and replayed, recomputed, on NF4 of which others would be stacked, in float16 where there is that."""
    compute = "float16" if wgpu_device.float16 else "float32"
    folder = make_checkpoint("LlamaForCausalLM", hidden_size=64, head_dim=16)
    config, built = build(
        folder, wgpu_device, use_dora=True, loraplus_lr_ratio=4.0, compute=compute, gradient_checkpointing=True
    )
    theirs = their_adapter(folder, wgpu_device, built, tmp_path / "start")
    fast = [p for n, p in theirs.named_parameters() if p.requires_grad and ("lora_B" in n or p.ndim == 1)]
    slow = [p for n, p in theirs.named_parameters() if p.requires_grad and "lora_A" in n]
    optimizer = torch.optim.AdamW([{"params": slow}, {"params": fast, "rate": 4.0}], weight_decay=0.0)
    ours, others = side_by_side(config, built, theirs, optimizer, STEPS)
    np.testing.assert_allclose(ours, others, rtol=0.01)
    assert others[-1] < 0.95 * others[0]
