"""The same QLoRA step in PEFT + bitsandbytes (CUDA), which bench_train.py starts.

    python bench/peer_peft.py CONFIG_JSON SEQ_LEN CHECKPOINTING BATCH ADAPT_EXPERTS [...]

NF4 with double quantization, bf16 compute, r = 16 on all seven projections, fused AdamW. Prints a JSON object for each
three of the last arguments.
Of a mixture of experts bitsandbytes quantizes attention alone: transformers has the experts as arrays of three
dimensions, which stay bf16. LoRA is on attention there, as wgrad has it by default, and with ADAPT_EXPERTS 1 on the
experts' two weights as well.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import peer_steps
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig


def adapted(model: torch.nn.Module, config: dict[str, Any], adapt_experts: bool) -> torch.nn.Module:
    """Freeze a model and add the adapter."""
    # The lean way: what prepare_model_for_kbit_training does besides casting everything unquantized to float32.
    model.requires_grad_(False)
    targets = peer_steps.targets_of(config, adapt_experts)
    return get_peft_model(model, LoraConfig(r=16, lora_alpha=32, task_type="CAUSAL_LM", **targets))


def load(folder: str) -> torch.nn.Module:
    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    return AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=quantization, dtype=torch.bfloat16, device_map={"": 0}
    )


def measure(
    folder: str, config: dict[str, Any], seq_len: int, checkpointing: bool, batch: int, adapt_experts: bool
) -> dict[str, Any]:
    """Load the checkpoint, warm up, and return the row of one setting."""
    model = load(folder)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    model = adapted(model, config, adapt_experts)
    model.train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
    ids = torch.randint(0, config["vocab_size"], (batch, seq_len), device="cuda")

    def step() -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    versions = {name: version(name) for name in ("peft", "bitsandbytes", "transformers")}
    return peer_steps.row_of(step, trained, batch, seq_len) | versions


if __name__ == "__main__":
    peer_steps.main("peft+bitsandbytes", measure)
