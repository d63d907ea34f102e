"""The same QLoRA step in PEFT + bitsandbytes (CUDA). Usage: peer_peft.py CONFIG_JSON SEQ_LEN CHECKPOINTING BATCH [...]

NF4 with double quantization, bf16 compute, r = 16 on all seven projections, fused AdamW. Prints a JSON object for each
pair of the last two.
Of a mixture of experts bitsandbytes quantizes attention alone: transformers has the experts as arrays of three
dimensions, which stay bf16. LoRA is on attention there, as wgrad has it by default.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import tempfile
import time
from importlib.metadata import version

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def load(config: dict[str, object], checkpointing: bool) -> torch.nn.Module:
    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    with tempfile.TemporaryDirectory() as folder:
        torch.set_default_dtype(torch.bfloat16)
        with torch.device("cuda"):
            AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).save_pretrained(folder)
        torch.set_default_dtype(torch.float32)
        torch.cuda.empty_cache()
        model = AutoModelForCausalLM.from_pretrained(
            folder, quantization_config=quantization, dtype=torch.bfloat16, device_map={"": 0}
        )
    # The lean way: what prepare_model_for_kbit_training does besides casting everything unquantized to float32.
    model.requires_grad_(False)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    experts = any("num" in key and "experts" in key for key in config)
    targets = TARGETS[:4] if experts else TARGETS  # PEFT would take those of an MLP for the experts'
    return get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules=targets, task_type="CAUSAL_LM"))


def measure(config: dict[str, object], seq_len: int, checkpointing: int, batch: int) -> dict[str, object]:
    """Make the model, warm up, and return the row of one setting."""
    model = load(config, bool(checkpointing))
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4, fused=True)
    ids = torch.randint(0, config["vocab_size"], (batch, seq_len), device="cuda")

    def steps(count: int) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            model(input_ids=ids, labels=ids).loss.backward()
            torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 1.0)
            optimizer.step()
            optimizer.zero_grad()
        torch.cuda.synchronize()
        return (time.perf_counter() - start) / count

    steps(3)
    torch.cuda.reset_peak_memory_stats()
    samples = [steps(4) for _ in range(5)]
    seconds = statistics.median(samples)
    return {
        "stack": "peft+bitsandbytes",
        "compute": "bfloat16",
        "batch": batch,
        "seq_len": seq_len,
        "checkpointing": bool(checkpointing),
        "tokens_per_second": batch * seq_len / seconds,
        "ms_per_step": 1e3 * seconds,
        "spread": (max(samples) - min(samples)) / seconds,
        "peak_gib": torch.cuda.max_memory_allocated() / (1 << 30),
        "reserved_gib": torch.cuda.max_memory_reserved() / (1 << 30),
        "peft": version("peft"),
        "bitsandbytes": version("bitsandbytes"),
        "transformers": version("transformers"),
    }


def main() -> None:
    config, (seq_len, *pairs) = json.loads(sys.argv[1]), map(int, sys.argv[2:])
    config.pop("architectures")
    for checkpointing, batch in zip(pairs[::2], pairs[1::2]):
        try:
            print(json.dumps(measure(config, seq_len, checkpointing, batch)), flush=True)
        except torch.OutOfMemoryError as error:
            print(f"checkpointing {checkpointing}, batch {batch}:", error, file=sys.stderr)
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
