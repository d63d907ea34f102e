"""Convert configurations of axolotl, LLaMA-Factory and TRL to options of a run.

`option_names.py` translates names, `foreign_keys.py` values with another meaning. This module knows defaults that
differ, and why an option has no counterpart.
Source of the names: axolotl's, LLaMA-Factory's and TRL's documentation of their options.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from wgrad.device.errors import WgradError
from wgrad.device.shown import short
from wgrad.train.options.finetune_config import RunOptions
from wgrad.train.options.foreign_data import Left
from wgrad.train.options.foreign_keys import SPECIAL
from wgrad.train.options.objectives import OBJECTIVES
from wgrad.train.options.option_names import name_here
from wgrad.train.options.unused_options import unused_options

TOOLS = ("axolotl", "llama-factory", "trl")

# Defaults of each tool that differ from ours, by our names: a file without the option means these.
_TRAINER: dict[str, Any] = {"learning_rate": 5e-5, "epochs": 3, "batch_size": 8, "gradient_accumulation_steps": 1,
                            "lr_scheduler_type": "linear", "warmup_steps": 0, "seed": 42, "packing": False,
                            "eval_fraction": 0.0}  # fmt: skip
_DEFAULTS: dict[str, dict[str, Any]] = {
    "axolotl": {
        "epochs": 1,
        "batch_size": 1,
        "gradient_accumulation_steps": 1,
        "max_length": 512,
        "seed": 42,
        "packing": False,
        "eval_fraction": 0.0,
    },
    "llama-factory": _TRAINER | {"lora_r": 8, "max_length": 2048},
    "trl": _TRAINER | {"learning_rate": 2e-5, "max_length": 1024, "lora_dropout": 0.05},
}

_KERNELS = "PyTorch's kernels are chosen by it, and wgrad has its own"
_RANKS = "several GPUs are used with --ranks"
_LOADING = "data and models are read in wgrad's own way"
_TOKENS = "the tokenizer is used as it is"
# TRL's files do not name their trainer. SFTConfig has none of these.
_OF_TRL_TRAINERS = ("beta", "max_prompt_length", "max_completion_length", "desirable_weight", "simpo_gamma",
                    "num_generations", "precompute_ref_log_probs", "reference_free", "rpo_alpha")  # fmt: skip
# Patterns of names -> why there is no counterpart. A pattern must match the whole name.
_WHY = {
    r"flash_attention|flash_attn.*|attn_implementation|sdp_attention|xformers_attention|.*_attention": _KERNELS,
    r"liger_.*|enable_liger_kernel|use_liger.*|torch_compile.*|use_unsloth.*|unsloth_.*|fused_.*": _KERNELS,
    r"lora_(mlp|qkv|o|embedding)_kernel|use_kernels|kernel_config|use_scattermoe|use_sonicmoe|plugins": _KERNELS,
    r"gradient_checkpointing_kwargs|cut_cross_entropy|disable_gradient_checkpointing|use_cache": _KERNELS,
    r"bf16|fp16|tf32|dtype|torch_dtype|bfloat16|float16|pure_bf16|bnb_4bit_compute_dtype|bf16_full_eval": (
        "the device decides what it computes in; --compute asks for a type"
    ),
    r"deepspeed|fsdp.*|ddp_.*|tensor_parallel.*|context_parallel.*|sequence_parallel.*|dp_.*|local_rank": _RANKS,
    r"dataset_prepared_path|dataset_processes|preprocessing_.*|dataloader_.*|overwrite_cache|streaming|buffer_size": (
        _LOADING
    ),
    r"trust_remote_code|model_type|tokenizer_type|is_.*_derived_model|use_fast_tokenizer|tokenizer_use_fast": _LOADING,
    r"tokenizer_config|cache_dir|dataset_num_proc|remove_unused_columns|low_cpu_mem_usage|dataset_kwargs": _LOADING,
    r"max_samples|dataset_exact_deduplication|skip_prepare_dataset": "all records of the data are used",
    r"max_prompt_length|max_completion_length": "max_length is for prompt and completion together",
    r"special_tokens|added_tokens_overrides|(eot_|add_|add_special_)?tokens|eos_token|resize_.*": _TOKENS,
    r"pad_to_sequence_len|pad_token|eval_sample_packing|group_by_length|neat_packing|padding_.*": (
        "sequences are padded or packed without it"
    ),
    r"(eval|evaluation|save|logging)_strategy|evals_per_epoch|saves_per_epoch": "these are given in steps",
    r"save_total_limit": "checkpoints are pruned by themselves; --keep-best keeps the best",
    r"save_only_model|save_safetensors|save_.*": "a checkpoint is always whole",
    r"overwrite_output_dir|resume_from_checkpoint|auto_resume_from_checkpoints": "a run goes on with --resume",
    r"hub_.*|push_to_hub.*|hf_use_auth_token": "a model is uploaded with wgrad push",
    r"(wandb|comet|mlflow|trackio|swanlab|run_name).*": "a tracker is configured by its own variables",
    r"log_level|do_(train|eval|predict)|strict|plot_loss|predict_with_generate|include_.*|logging_first_step": "",
    r"per_device_eval_batch_size|eval_batch_size|eval_accumulation_steps|eval_on_start": (
        "an evaluation has the batch size of training"
    ),
    r"neftune_.*|mixture_of_depths|use_llama_pro|use_galore|use_badam|use_apollo|lisa_.*|relora.*": "not implemented",
    r"adam_beta[12]|adam_epsilon|optim_args|lr_scheduler_kwargs": "AdamW has fixed beta and epsilon",
}


@dataclass
class Imported:
    """Converted options, and what was left out (`left`): another tool's key, its value, and the reason.

    no_objective: why the file tells no objective of wgrad, or "".
    """

    no_objective: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    left: list[tuple[str, Any, str]] = field(default_factory=list)


def find_tool(values: Mapping[str, Any]) -> str:
    """Return the tool that a file was written for. WgradError: its keys do not tell."""
    if "base_model" in values:
        return "axolotl"
    if {"finetuning_type", "stage", "cutoff_len", "dataset_dir"} & set(values):
        return "llama-factory"
    if "model_name_or_path" in values:
        return "trl"
    raise WgradError(f"import-config: no key tells whose file this is: give --from, one of {', '.join(TOOLS)}")


def import_config(values: Mapping[str, Any], tool: str, objective: str | None = None) -> Imported:
    """Return the options that a file of another tool means, and what has no counterpart.

    objective: taken in place of the file's.
    """
    found = Imported()
    taken: dict[str, Any] = {}
    for key, value in values.items():
        name = str(key).replace("-", "_")
        try:
            for ours, one in _convert(name, value, values, tool).items():
                _check(ours, one)
                taken[ours] = one
        except (TypeError, ValueError, AttributeError, LookupError):  # a value of a wrong type
            found.left.append((str(key), value, "its value cannot be read"))
        except Left as left:
            taken |= left.nearest
            if str(left):
                found.left.append((str(key), value, str(left)))
    if objective is not None:
        taken["objective"] = objective
    elif "objective" not in taken:
        found.no_objective = _no_objective(values, tool)
    options = _DEFAULTS[tool] | _adapter(values, tool) | taken
    if tool == "trl":
        found.left += _of_trl(options, taken, values)
    if tool == "llama-factory" and "lora_alpha" not in taken:
        options["lora_alpha"] = 2.0 * float(options["lora_r"])
    held_out = options.get("eval_data") or options.get("eval_fraction")
    for name in ("eval_steps", "early_stopping_patience", "keep_best"):
        if name in options and not (held_out and options.get("eval_steps")):
            value = options.pop(name)
            found.left.append((name, value, "nothing is held out" if not held_out else "there are no eval_steps"))
    if "adapter" in taken:
        options.pop("full", None)
    if options.get("full"):
        options.pop("lora_dropout", None)
    for name, reason in unused_options(RunOptions().to_dict() | options).items():
        if name in taken:
            found.left.append((name, taken[name], reason))
        options.pop(name, None)
    defaults = RunOptions().to_dict()
    order = [f.name for f in fields(RunOptions)]
    kept = {name: options[name] for name in order if name in options}
    found.options = {name: value for name, value in kept.items() if name in taken or value != defaults[name]}
    _leave_contradictions(found)
    return found


def _no_objective(values: Mapping[str, Any], tool: str) -> str:
    """Return why a file tells no objective of wgrad, or "" if it is plain fine-tuning."""
    named = {"axolotl": ("rl", "reward_model"), "llama-factory": ("stage",), "trl": ("loss_type",)}[tool]
    for key in (key for key in named if values.get(key) not in (None, "", False)):
        return f"{key}: the objectives are {', '.join(OBJECTIVES)}; got {short(values[key])}"
    of_others = [key for key in _OF_TRL_TRAINERS if tool == "trl" and values.get(key) is not None]
    if not of_others:
        return ""
    told = "is an option" if len(of_others) == 1 else "are options"
    return f"{' and '.join(of_others)} {told} of other trainers of TRL than SFT's, and the file does not tell which"


def _of_trl(options: dict[str, Any], taken: Mapping[str, Any], values: Mapping[str, Any]) -> list[tuple[str, Any, str]]:
    """Complete the options by defaults of TRL that depend on the trainer, the model or the data.

    Args:
        options: Options with the usual defaults, which are changed.
        taken: Options that the file gives.
        values: The file.

    Returns:
        What to tell about them, as in `Imported.left`.
    """
    told: list[tuple[str, Any, str]] = []
    if not options.get("full") and not values.get("lora_target_modules"):
        options["target_modules"] = ["q_proj", "v_proj"]
        told.append(("lora_target_modules", None, "q_proj and v_proj are taken, PEFT's default for most models"))
    objective = options.get("objective", "sft")
    if objective == "sft":
        if "loss_on" not in options:
            reason = (
                "TRL trains on all turns of a conversation without it, wgrad on the assistant's if loss_on is not all"
            )
            told.append(("assistant_only_loss", None, reason))
        return told
    if "learning_rate" not in taken:
        options["learning_rate"] = 1e-6
    if values.get("disable_dropout", True):
        options["lora_dropout"] = 0.0
        if taken.get("lora_dropout"):
            told.append(("lora_dropout", taken["lora_dropout"], "disable_dropout is true, TRL's default beyond SFT"))
    if objective == "simpo" and (weight := values.get("cpo_alpha", 1.0)):
        reason = "SimPO has no cross-entropy of chosen here; TRL adds it with this weight, 1 where the file names none"
        told.append(("cpo_alpha", weight, reason))
    return told


def _leave_contradictions(found: Imported) -> None:
    """Leave out options that contradict others. WgradError: the file cannot be converted."""
    while True:
        try:
            RunOptions(**found.options)
            return
        except WgradError as error:
            told = re.match(r"--([\w-]+): (.*)", str(error))
            name = told[1].replace("-", "_") if told else ""
            if name == "objective" and found.options.get("full"):
                name = "full"  # a run with another objective would be another run
            if told is None or name not in found.options:
                raise
            found.left.append((name, found.options.pop(name), told[2].partition(": ")[0]))


def _check(name: str, value: Any) -> None:
    """Raise Left where an option cannot have this value."""
    try:
        RunOptions(**{name: value})
    except WgradError as error:
        if str(error).startswith(f"--{name.replace('_', '-')}: ") and "give --" not in str(error):
            raise Left(str(error).partition(": ")[2]) from None


def _convert(name: str, value: Any, values: Mapping[str, Any], tool: str) -> dict[str, Any]:
    """Return our options for one key. Left: there are none."""
    if value is None or value == "" or value == [] or value == {}:
        return {}
    if "${" in str(value):
        raise Left("it names a variable: write its value")
    if name in SPECIAL:
        return SPECIAL[name](value, values)
    why = next((reason for pattern, reason in _WHY.items() if re.fullmatch(pattern, name)), None)
    if why is not None:
        raise Left(why if value is not False else "")
    own = {f.name for f in fields(RunOptions)}
    told = name if name in own else name_here(name)
    if not told or (" " not in told and told.partition("=")[0] not in own):
        raise Left("wgrad has no such option" if value is not False else "")
    if " " in told:
        raise Left(told)
    ours, _, meant = told.partition("=")
    if meant:
        return {ours: meant} if value is True else {}
    return {ours: value}


def _adapter(values: Mapping[str, Any], tool: str) -> dict[str, Any]:
    """Return the options of adapter and quantization, which each tool expresses in its own way."""
    four = values.get("load_in_4bit") is True or str(values.get("quantization_bit")) == "4"
    if tool == "axolotl":
        kind = values.get("adapter")
        return {"full": True} if not kind else {"quantize": four or kind == "qlora"}
    if tool == "llama-factory":
        return {"full": True} if values.get("finetuning_type") == "full" else {"quantize": four}
    return {"quantize": four} if values.get("use_peft") or values.get("lora_r") else {"full": True}
