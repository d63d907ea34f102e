"""Suggestions for unknown options: names that other tools use, and similar names.

The names are those of Hugging Face's Trainer, TRL and PEFT, of Unsloth, Axolotl, LLaMA-Factory, torchtune and mlx-lm.
"""

from __future__ import annotations

import difflib
from collections.abc import Container, Iterable

from wgrad.train.options.former_names import FORMER

# Another tool's name, with underscores: our field, or field=value, or (if it has a blank) what to say.
_ELSEWHERE = {
    # files
    "model_name_or_path": "model", "model_name": "model", "model_id": "model", "base_model": "model",
    "pretrained_model_name_or_path": "model", "m": "model", "dataset": "data", "datasets": "data", "d": "data",
    "dataset_name": "data", "dataset_path": "data", "train_file": "data", "train_data": "data", "train_dataset": "data",
    "output_dir": "out", "output": "out", "save_path": "out", "o": "out", "eval_dataset": "eval_data",
    "validation_file": "eval_data", "valid_data": "eval_data", "test_datasets": "eval_data", "eval_file": "eval_data",
    "adapter_name_or_path": "adapter", "adapter_path": "adapter", "peft_model_id": "adapter", "lora": "adapter",
    "lora_model_dir": "adapter", "resume_adapter_file": "adapter", "lora_path": "adapter",
    "resume_from_checkpoint": "resume", "auto_resume_from_checkpoints": "resume",
    "overwrite_output_dir": "a run is never overwritten: give another --out, or --resume",
    # adapter
    "r": "lora_r", "lora_rank": "lora_r", "lora_dim": "lora_r", "lora_target_modules": "target_modules",
    "lora_target": "target_modules", "lora_modules": "target_modules",
    "modules_to_save": "--train-embeddings and --train-head",
    "additional_target": "--train-embeddings and --train-head", "full_finetuning": "full", "full_finetune": "full",
    "bnb_4bit_use_double_quant": "double_quant", "double_quantization": "double_quant",
    "bnb_4bit_blocksize": "block_size", "load_in_4bit": "the base model is NF4 anyway, unless --no-quantize is given",
    "load_in_8bit": "the base model is NF4 anyway, unless --no-quantize is given",
    "quantization_bit": "the base model is NF4 anyway, unless --no-quantize is given",
    # objective
    "rl": "objective", "loss_type": "objective", "stage": "objective", "pref_loss": "objective", "pref_beta": "beta",
    "dpo_beta": "beta", "rl_beta": "beta", "kto_beta": "beta", "orpo_alpha": "beta", "orpo_beta": "beta",
    "lambda": "beta", "dpo_label_smoothing": "label_smoothing", "kto_desirable_weight": "desirable_weight",
    "kto_undesirable_weight": "undesirable_weight", "kto_chosen_weight": "desirable_weight",
    "kto_rejected_weight": "undesirable_weight",
    # training
    "moe_aux_loss_coef": "router_aux_loss_coef", "output_router_logits": "router_aux_loss_coef",
    "loraplus": "loraplus_lr_ratio", "lr_scheduler": "lr_scheduler_type", "scheduler": "lr_scheduler_type",
    "lr_find": "lr_sweep", "auto_lr_find": "lr_sweep", "lr_schedule": "lr_scheduler_type",
    "warmup_ratio": "warmup_steps", "num_warmup_steps": "warmup_steps", "wd": "weight_decay",
    "gradient_clipping": "max_grad_norm", "clip_grad_norm": "max_grad_norm", "grad_clip": "max_grad_norm",
    "per_device_train_batch_size": "batch_size", "train_batch_size": "batch_size", "micro_batch_size": "batch_size",
    "grad_accum": "gradient_accumulation_steps", "grad_accumulation_steps": "gradient_accumulation_steps",
    "gradient_accumulation": "gradient_accumulation_steps", "max_seq_length": "max_length", "max_seq_len": "max_length",
    "sequence_len": "max_length", "cutoff_len": "max_length", "model_max_length": "max_length",
    "context_length": "max_length", "block": "max_length", "num_train_epochs": "epochs", "num_epochs": "epochs",
    "n_epochs": "epochs", "iters": "max_steps", "num_steps": "max_steps", "steps": "max_steps",
    "max_iters": "max_steps", "sample_packing": "packing", "pack": "packing", "packed": "packing",
    "train_on_inputs": "loss_on=all", "completion_only_loss": "loss_on=completion",
    "assistant_only_loss": "loss_on=completion", "mask_prompt": "loss_on=completion",
    "train_on_responses_only": "loss_on=completion", "val_set_size": "eval_fraction", "val_size": "eval_fraction",
    "test_size": "eval_fraction", "max_eval_samples": "eval_tokens", "val_batches": "eval_tokens",
    "eval_split": "eval_fraction", "validation_split_percentage": "eval_fraction", "random_state": "seed",
    "eval_interval": "eval_steps", "steps_per_eval": "eval_steps", "val_every": "eval_steps",
    "evals_per_epoch": "eval_steps", "early_stopping": "early_stopping_patience", "patience": "early_stopping_patience",
    "load_best_model_at_end": "keep_best", "save_total_limit": "keep_best", "save_best": "keep_best",
    "random_seed": "seed", "data_seed": "seed", "optim": "AdamW is the only optimizer: leave it out",
    "optimizer": "AdamW is the only optimizer: leave it out",
    # machine
    "fp16": "compute=float16", "bf16": "compute=bfloat16", "tf32": "compute=float32", "dtype": "compute",
    "torch_dtype": "compute", "mixed_precision": "compute", "precision": "compute", "compute_dtype": "compute",
    "bnb_4bit_compute_dtype": "compute", "no_cuda": "device=cpu", "use_cpu": "device=cpu", "cpu": "device=cpu",
    "cuda": "device=wgpu", "gpu": "device=wgpu", "device_map": "device",
    "use_gradient_checkpointing": "gradient_checkpointing", "enable_activation_checkpointing": "gradient_checkpointing",
    "grad_checkpoint": "gradient_checkpointing", "activation_checkpointing": "gradient_checkpointing",
    "checkpoint_every": "save_steps", "steps_per_report": "logging_steps", "log_interval": "logging_steps",
    "log_with": "report_to", "logger": "report_to", "use_wandb": "report_to=wandb",
    "use_tensorboard": "report_to=tensorboard",
    # merge
    "modelfile": "wgrad export ollama writes it",
    # generate
    "max_tokens": "max_new_tokens", "num_tokens": "max_new_tokens", "n_predict": "max_new_tokens",
    "n_tokens": "max_new_tokens", "temp": "temperature", "message": "prompt", "p": "prompt", "input": "prompt",
    "text": "prompt",
    # serve, chat
    "max_model_len": "context", "ctx_size": "context", "n_ctx": "context", "max_num_seqs": "batch_size",
    "parallel": "batch_size", "allowed_hosts": "allow_host", "system_prompt": "system",
}  # fmt: skip


def name_here(other: str) -> str:
    """Return our counterpart of another tool's option: a field, field=value, or words with a blank; "": unknown."""
    return _ELSEWHERE.get(other, "")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return ' (did you mean NAME?)' with the name of `known` that is most similar to a word, or ""."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f" (did you mean {close[0]}?)" if close else ""


def option_hint(
    word: str, fields: Iterable[str], spelling: str, switches: Container[str] | None = None, *, near: bool = True
) -> str:
    """Return ' (did you mean ...?)' with the option that an unknown one may have meant, or "".

    Args:
        word: The unknown option or key.
        fields: Fields of the command.
        spelling: "--" for a command line, "" for the keys of a file.
        switches: Fields that have a --no- form; None: all.
        near: Whether to suggest names that only look similar.
    """
    fields = list(fields)
    name = word.lstrip("-").replace("-", "_").lower()
    negated = name.startswith("no_") and name not in _ELSEWHERE
    name = name.removeprefix("no_") if negated else name
    here = {former: now for former, now in FORMER.items() if now in fields}
    here |= {other: told for other, told in _ELSEWHERE.items() if " " in told or told.partition("=")[0] in fields}
    here |= {field: field for field in fields}
    close = [name] if name in here else difflib.get_close_matches(name, list(here), n=1, cutoff=0.6) if near else []
    if not close:
        return ""
    told = here[close[0]]
    if " " in told:
        return f" ({told})"
    field, _, value = told.partition("=")
    negated = negated and (switches is None or field in switches)
    option = f"--{'no-' * negated}{field.replace('_', '-')}" if spelling else field
    return f" (did you mean {option}{(' ' if spelling else ': ') + value if value else ''}?)"
