"""Starts and steps of adapters beside peft: LoRA+."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.train.test_oracle_adapter import ACCUMULATE, TOKENS, dequantized_base, side_by_side
from wgrad.device.contract import Device
from wgrad.train.model.adapter_files import save_adapter
from wgrad.train.model.model_config import load_model_config
from wgrad.train.options.finetune_config import RunOptions
from wgrad.train.run.build import TrainableModel, build_trainable

torch = pytest.importorskip("torch", reason="the oracle is torch: pip install wgrad[oracle]")
peft = pytest.importorskip("peft", reason="the oracle is peft: pip install wgrad[oracle]")

pytestmark = pytest.mark.oracle


def build(folder: Path, device: Device, **options: Any) -> tuple[RunOptions, TrainableModel]:
    settings: dict[str, Any] = {"rank": 4, "alpha": 8.0, "lr": 5e-3, "warmup": 0.1, "max_grad_norm": 0.5} | options
    config = RunOptions(seq_len=TOKENS, batch_size=2, accumulate=ACCUMULATE, compute="float32", **settings)
    return config, build_trainable(config, load_model_config(folder), folder, device, positions=TOKENS)


def their_adapter(folder: Path, device: Device, built: TrainableModel, out: Path) -> Any:
    """PEFT on what our weights stand for, with the adapter as it is now."""
    assert built.lora is not None
    arrays = {name: built.parameters.get(name) for name in built.parameters.tensors}
    save_adapter(out, built.lora, arrays, str(folder))
    base = dequantized_base(folder, dict(built.model.weights), device)
    return peft.PeftModel.from_pretrained(base, out, is_trainable=True)


def test_lora_plus_beside_peft(make_checkpoint: Any, cpu: Device, tmp_path: Path) -> None:
    """Losses, and at the end every matrix, of AdamW with two rates."""
    from peft.optimizers import create_loraplus_optimizer

    folder = make_checkpoint("LlamaForCausalLM")
    config, built = build(folder, cpu, lr=1e-3, lora_plus=16.0, weight_decay=0.1)
    theirs = their_adapter(folder, cpu, built, tmp_path)
    decay = {"weight_decay": 0.1, "loraplus_weight_decay": 0.1}
    optimizer = create_loraplus_optimizer(theirs, torch.optim.AdamW, lr=1.0, loraplus_lr_ratio=16.0, **decay)
    for group in optimizer.param_groups:
        group["rate"] = group["lr"]
    ours, others = side_by_side(config, built, theirs, optimizer)
    np.testing.assert_allclose(ours, others, rtol=1e-4)
    assert others[-1] < 0.9 * others[0]
    for name, value in peft.get_peft_model_state_dict(theirs).items():
        wanted = value.numpy()
        found = built.parameters.get(name.removeprefix("base_model.model.").removesuffix(".weight"))
        assert np.linalg.norm(found - wanted) <= 1e-3 * np.linalg.norm(wanted), name
