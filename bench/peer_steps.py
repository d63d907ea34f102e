"""Shared by peer_peft.py and peer_unsloth.py: arguments, a checkpoint with random weights, timed steps, rows."""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
OF_EXPERTS = ("experts.gate_up_proj", "experts.down_proj")


def targets_of(config: Mapping[str, object], adapt_experts: bool) -> dict[str, Any]:
    """Return the options of an adapter that name what it adapts: with experts attention, and maybe these."""
    experts = any("num" in key and "experts" in key for key in config)
    targets = TARGETS[:4] if experts else TARGETS  # PEFT would take those of an MLP for the experts'
    return {"target_modules": list(targets), "target_parameters": list(OF_EXPERTS) if adapt_experts else None}


def save(config: Mapping[str, object], folder: str) -> None:
    """Write a checkpoint with random weights in bfloat16."""
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        AutoModelForCausalLM.from_config(AutoConfig.for_model(**{"pad_token_id": 3, **config})).save_pretrained(folder)
    torch.set_default_dtype(torch.float32)
    torch.cuda.empty_cache()


def row_of(step: Callable[[], Any], trained: list[torch.nn.Parameter], batch: int, seq_len: int) -> dict[str, Any]:
    """Time steps after some to warm up, and return the figures of a row."""

    def steps(count: int) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            step()
        torch.cuda.synchronize()
        return (time.perf_counter() - start) / count

    steps(3)
    torch.cuda.reset_peak_memory_stats()
    samples = [steps(4) for _ in range(5)]
    seconds = statistics.median(samples)
    return {
        "compute": "bfloat16",
        "batch": batch,
        "seq_len": seq_len,
        "tokens_per_second": batch * seq_len / seconds,
        "ms_per_step": 1e3 * seconds,
        "spread": (max(samples) - min(samples)) / seconds,
        "peak_gib": torch.cuda.max_memory_allocated() / (1 << 30),
        "reserved_gib": torch.cuda.max_memory_reserved() / (1 << 30),
        "trainable": sum(parameter.numel() for parameter in trained),
    }


def main(stack: str, measure: Callable[..., dict[str, Any]], also_saved: Callable[[str], None] | None = None) -> None:
    """Print a row for each setting of the command line, as a JSON object.

    measure(folder, config, seq_len, checkpointing, batch, adapt_experts) returns one. also_saved writes further files
    of the checkpoint.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("config", type=json.loads, help="config.json")
    parser.add_argument("seq_len", type=int)
    parser.add_argument("ways", type=int, nargs="+", help="CHECKPOINTING BATCH ADAPT_EXPERTS [...]")
    args = parser.parse_args()
    args.config.pop("architectures")
    with tempfile.TemporaryDirectory() as folder:
        save(args.config, folder)
        if also_saved:
            also_saved(folder)
        for checkpointing, batch, experts in zip(args.ways[::3], args.ways[1::3], args.ways[2::3]):
            way = bool(checkpointing), batch, bool(experts)
            try:
                row = measure(folder, args.config, args.seq_len, *way)
                row = {"stack": stack, "checkpointing": way[0], "adapt_experts": way[2], **row}
                print(json.dumps(row), flush=True)
            except torch.OutOfMemoryError as error:
                print(f"checkpointing {checkpointing}, batch {batch}, experts {experts}:", error, file=sys.stderr)
            gc.collect()
            torch.cuda.empty_cache()
