"""Checks for options of a run that contradict each other."""

from __future__ import annotations

from typing import Any

from wgrad.device.errors import WgradError
from wgrad.train.options.choices import LORA
from wgrad.train.options.objectives import OBJECTIVES
from wgrad.train.options.options import flag


def refuse_contradictions(c: Any) -> None:
    """Raise WgradError for an option that others rule out. c: RunOptions, a class that imports this module."""
    _of_what_is_trained(c)
    _of_measures(c)
    _of_the_machine(c)


# Quantization-aware training rounds base weight plus B A, and nothing else. Options that would need more, and why.
_NOT_ROUNDED = {
    "full": "trains all parameters, not an adapter",
    "use_dora": "scales the rows of the sum",
    "lora_variant": "makes A and B of others",
    "lora_dropout": "drops inputs that the rounded weight does not",
    "train_embeddings": "trains the embedding, which is not rounded",
    "train_head": "trains the output layer, which is not rounded",
}


def _of_qat(c: Any) -> None:
    for name, why in _NOT_ROUNDED.items():
        if getattr(c, name):
            raise WgradError(f"--qat: cannot be combined with {flag(name)}, which {why}: leave one of the two out")
    if c.init_lora_weights != LORA:
        raise WgradError(
            f"--qat: cannot be combined with --init-lora-weights {c.init_lora_weights}, which changes the base "
            "weights: leave one of the two out"
        )
    if c.stream_weights == "on":
        raise WgradError(
            "--qat: cannot be combined with --stream-weights on, because rounded weights stay on the device: leave "
            "one of the two out"
        )


def _of_what_is_trained(c: Any) -> None:
    if c.qat:
        _of_qat(c)
    if c.full and c.adapter:
        raise WgradError("--adapter: --full trains all parameters and has no adapter: give only one of the two")
    if c.full and c.lora_dropout:
        raise WgradError(f"--lora-dropout: works on adapters, and --full trains all parameters; got {c.lora_dropout:g}")
    if c.full and not c.objective_kind.trains_head:
        raise WgradError(
            f"--objective: {c.objective} trains an adapter, and --full all parameters: give only one of the two"
        )
    without = [name for name, kind in OBJECTIVES.items() if not kind.reference and kind.records == "pairs"]
    if c.init_lora_weights != LORA and c.objective_kind.reference:
        raise WgradError(
            f"--init-lora-weights: {c.init_lora_weights} leaves no base model "
            f"for --objective {c.objective} to measure against: use "
            f"--init-lora-weights lora, or --objective {', '.join(without)}"
        )
    if c.use_dora and c.lora_dropout:
        raise WgradError(
            f"--lora-dropout: {c.lora_dropout:g} cannot be combined with --use-dora: leave one of the two out"
        )
    if c.use_dora and c.init_lora_weights != LORA:
        raise WgradError(
            f"--init-lora-weights: {c.init_lora_weights} cannot be combined with --use-dora: leave one of the two out"
        )
    if c.lora_variant and (c.use_dora or c.init_lora_weights != LORA):
        other = "--use-dora" if c.use_dora else "--init-lora-weights"
        raise WgradError(f"{other}: cannot be combined with --lora-variant {c.lora_variant}: leave one of the two out")
    if c.train_head and not c.objective_kind.trains_head:
        raise WgradError(
            f"--train-head: the loss of --objective {c.objective} has no gradient of the output layer: leave it out, "
            "or use --objective sft"
        )


def _of_measures(c: Any) -> None:
    for name in ("early_stopping_patience", "keep_best"):
        if getattr(c, name) and not c.eval_steps:
            raise WgradError(f"{flag(name)}: goes by the measures of --eval-steps, which is 0: give --eval-steps N")
    if c.eval_steps and not c.eval_fraction and not c.eval_data:
        raise WgradError("--eval-steps: nothing is held out: give --eval-data, or --eval-fraction above 0")
    if c.lr_sweep and c.resume:
        raise WgradError("--resume: --lr-sweep keeps nothing to go on from: leave one of the two out")
    if c.lr_sweep and not c.eval_fraction and not c.eval_data:
        raise WgradError("--lr-sweep: nothing is held out to compare by: give --eval-data, or --eval-fraction above 0")


def _of_the_machine(c: Any) -> None:
    if c.sample_prompt and not c.sample:
        raise WgradError("--sample-prompt: --no-sample leaves it without effect: give only one of the two")
    recomputed = c.gradient_checkpointing
    if c.offload_activations and recomputed == 0:  # or False
        raise WgradError(
            "--offload-activations: --no-gradient-checkpointing leaves it nothing to offload: give only one of them"
        )
    layers = recomputed if type(recomputed) is int else None
    if layers is not None and type(c.offload_activations) is int and c.offload_activations > layers:
        raise WgradError(
            f"--offload-activations: must be at most {layers}, the layers of --gradient-checkpointing; got "
            f"{c.offload_activations}: offload no more layers than are recomputed"
        )
    if c.keep_attention and recomputed == 0:
        raise WgradError("--keep-attention: --no-gradient-checkpointing computes nothing again: give only one of them")
    for name in ("keep_projections", "keep_gate_up"):
        if getattr(c, name) and (recomputed == 0 or c.keep_attention is False):
            given = "--no-keep-attention would recompute attention outputs, which it keeps too"
            given = "--no-gradient-checkpointing computes nothing again" if recomputed == 0 else given
            raise WgradError(f"{flag(name)}: {given}: give only one of them")
    if c.stream_weights == "on" and (recomputed is False or layers is not None):
        given = "--no-gradient-checkpointing" if recomputed is False else f"--gradient-checkpointing {layers}"
        raise WgradError(f"--stream-weights: cannot be on with {given}: leave one of them out")
    if c.stream_weights == "on" and c.keep_dequantized:
        raise WgradError("--keep-dequantized: --stream-weights on keeps no weight on the GPU: give only one of them")
    if c.vram and c.memory_limit:
        raise WgradError("--memory-limit: --vram is such a limit, which chooses what fits too: give only one of them")
    if c.objective_kind.mismatched and c.chooses_batch:
        option = "--vram" if c.vram else "--auto-find-batch-size"
        raise WgradError(
            f"{option}: chooses --batch-size, on which the loss of --objective {c.objective} hangs: leave it out"
        )
