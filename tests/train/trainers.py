"""Trainers of small models, and documents for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from wgrad.device.contract import Device
from wgrad.train.data.packing import Document
from wgrad.train.model.load_config import load_model_config
from wgrad.train.options.finetune_config import RunOptions
from wgrad.train.step.build import TrainableModel, build_trainable
from wgrad.train.step.optim import AdamW
from wgrad.train.step.trainer import Trainer

TOKENS = 21


def documents(number: int = 16, seed: int = 0) -> list[Document]:
    """Documents of unequal length, with prompts of unequal length that do not count."""
    generator = np.random.default_rng(seed)
    result = []
    for i in range(number):
        ids = generator.integers(0, 40, 6 + (5 * i) % 15).astype(np.int32)
        result.append(Document(ids, np.arange(len(ids)) >= i % 4))
    return result


def trainer_for(folder: Path, device: Device, **options: Any) -> tuple[Trainer, TrainableModel, RunOptions]:
    settings: dict[str, Any] = {
        "lora_r": 3,
        "lora_alpha": 6.0,
        "max_length": TOKENS,
        "batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 5e-3,
        "logging_steps": 50,
        "compute": "float32",
    }
    config = RunOptions(**(settings | options))
    built = build_trainable(config, load_model_config(folder), folder, device, positions=TOKENS)
    optimizer = AdamW(built.parameters, max_grad_norm=config.max_grad_norm, scale_loss=config.compute == "float16")
    return Trainer(built.model, optimizer, config), built, config


def parameters_of(built: TrainableModel) -> dict[str, np.ndarray]:
    return {name: built.parameters.get(name) for name in built.parameters.tensors}
