"""Keys of axolotl, LLaMA-Factory and TRL whose values mean something else than ours: a converter for each."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, get_args

from wgrad.device.shown import short
from wgrad.train.options.choices import REPORTERS, TEMPLATES, Schedule
from wgrad.train.options.foreign_data import Left, data_set, data_sets, test_data
from wgrad.train.options.objectives import OBJECTIVES

Convert = Callable[[Any, Mapping[str, Any]], dict[str, Any]]


def _kind_of_adapter(value: Any, _: Mapping[str, Any]) -> dict[str, Any]:
    if value in ("lora", "qlora", "full"):
        return {}  # `_adapter` of foreign_config.py reads it
    raise Left("only LoRA and full fine-tuning are implemented")


def _bits(value: Any, _: Mapping[str, Any]) -> dict[str, Any]:
    if value in (4, True, False, "4"):
        return {}
    raise Left("weights are kept in 4 or 16 bits")


def _eight_bits(value: Any, _: Mapping[str, Any]) -> dict[str, Any]:
    raise Left("weights are kept in 4 or 16 bits" if value else "")


def _objective(value: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    name = str(value).lower()
    if name == "dpo" and values.get("pref_loss", "sigmoid") != "sigmoid":
        name = str(values["pref_loss"])
    name = {"pt": "sft", "sigmoid": "dpo", "nll": "sft", "apo_zero_unpaired": "?"}.get(name, name)
    if name not in OBJECTIVES:
        raise Left(f"the objectives are {', '.join(OBJECTIVES)}")
    return {"objective": name}


def _preference_loss(value: Any, _: Mapping[str, Any]) -> dict[str, Any]:
    if value == "sigmoid" or value in OBJECTIVES:
        return {}  # `_objective` reads it
    raise Left(f"the objectives are {', '.join(OBJECTIVES)}")


def _names(value: Any) -> list[Any]:
    """Return the names in a list, or in text with commas or blanks."""
    return value.replace(",", " ").split() if isinstance(value, str) else list(value)


def _modules(value: Any, _: Mapping[str, Any]) -> dict[str, Any]:
    names = _names(value)
    if names in (["all"], ["all-linear"]):
        return {}
    return {"target_modules": names}


def _nothing(value: Any, _: Mapping[str, Any]) -> dict[str, Any]:
    return {}  # wgrad always does that, or it is read with another key


def _whole_modules(value: Any, _: Mapping[str, Any]) -> dict[str, Any]:
    names = _names(value)
    known = {"embed_tokens": "train_embeddings", "embeddings": "train_embeddings", "lm_head": "train_head"}
    if not set(names) <= set(known):
        raise Left("whole modules are embed_tokens and lm_head alone")
    return {known[name]: True for name in names}


def _epochs(value: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    number = _number(value)
    if number != int(number) or number < 1:
        raise Left("epochs are whole: give max_steps for a part of one")
    return {"epochs": int(number)}


def _steps(value: Any, _: Mapping[str, Any]) -> dict[str, Any]:
    return {"max_steps": value} if _number(value) > 0 else {}


def _every(name: str) -> Convert:
    def convert(value: Any, _: Mapping[str, Any]) -> dict[str, Any]:
        number = _number(value)
        if 0 < number < 1:
            raise Left("it is a whole number of steps here, not a fraction of the run")
        return {name: int(number)}

    return convert


def _warmup(value: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    number = _number(value)
    if number and "constant" in (values.get("lr_scheduler"), values.get("lr_scheduler_type")):
        raise Left("transformers' schedule 'constant' has no warm-up: constant_with_warmup has one")
    return {"warmup_steps": number if number < 1 else int(number)}


def _warmup_ratio(value: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    return {} if values.get("warmup_steps") else _warmup(value, values)


def _scheduler(value: Any, _: Mapping[str, Any]) -> dict[str, Any]:
    if value == "constant":
        return {"lr_scheduler_type": value, "warmup_steps": 0}
    name = {"constant_with_warmup": "constant"}.get(str(value), value)
    if name not in get_args(Schedule):
        nearest = "cosine" if "cosine" in str(value) else "linear"
        schedules = ", ".join(get_args(Schedule))
        raise Left(f"the schedules are {schedules}: {nearest} is taken", {"lr_scheduler_type": nearest})
    return {"lr_scheduler_type": name}


def _optimizer(value: Any, _: Mapping[str, Any]) -> dict[str, Any]:
    name = str(value).removeprefix("paged_")
    if not name.startswith("adamw"):
        raise Left("AdamW is the only optimizer")
    if "bit" in name or str(value) != name:
        raise Left("AdamW is used, with states in float32 on the device")
    return {}


def _checkpointing(value: Any, _: Mapping[str, Any]) -> dict[str, Any]:
    offloads = {"offload_activations": True} if value in ("offload", "offload_disk") else {}
    return {"gradient_checkpointing": value not in (False, "false"), **offloads}


def _held_out(value: Any, _: Mapping[str, Any]) -> dict[str, Any]:
    if _number(value) >= 1:
        raise Left("it is a fraction here: give eval_fraction, or a file as eval_data")
    return {"eval_fraction": _number(value)}


def _keep_best(value: Any, _: Mapping[str, Any]) -> dict[str, Any]:
    return {"keep_best": 1} if value else {}


def _template(value: Any, _: Mapping[str, Any]) -> dict[str, Any]:
    if value in ("tokenizer_default", "default"):
        return {}
    if value in TEMPLATES or str(value).endswith((".jinja", ".jinja2")):
        return {"chat_template": value}
    if "{" in str(value):
        raise Left("write this template to a file, and give that as --chat-template")
    raise Left("the model's own chat template is used: give --chat-template for another")


def _reporters(value: Any, _: Mapping[str, Any]) -> dict[str, Any]:
    names = [value] if isinstance(value, str) else list(value)
    names = [name for name in names if name not in ("none", "all")]
    if not set(names) <= set(REPORTERS):
        raise Left(f"the trackers are {', '.join(REPORTERS)}")
    return {"report_to": names} if names else {}


def _wandb(value: Any, _: Mapping[str, Any]) -> dict[str, Any]:
    return {"report_to": ["wandb"]}


def _loss_on(value: Any, _: Mapping[str, Any]) -> dict[str, Any]:
    return {"loss_on": "all"} if value else {}


def _loss_on_completions(value: Any, _: Mapping[str, Any]) -> dict[str, Any]:
    return {"loss_on": "completion" if value else "all"}


def _pissa(value: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Convert LLaMA-Factory's pissa_init."""
    iterations = values.get("pissa_iter", 16)
    return {"init_lora_weights": "pissa" if iterations == -1 else f"pissa_niter_{iterations}"} if value else {}


def _start(value: Any, _: Mapping[str, Any]) -> dict[str, Any]:
    return {} if value is True or value == "lora" else {"init_lora_weights": value}


def _quant_type(value: Any, _: Mapping[str, Any]) -> dict[str, Any]:
    if value != "nf4":
        raise Left("4 bits are NF4, with scales in float32 or quantized")
    return {}


def _switch(name: str) -> Convert:
    return lambda value, _: {name: True} if value else {}


def _number(value: Any) -> float:
    try:
        if math.isfinite(number := float(value)):
            return number
        raise ValueError
    except (TypeError, ValueError, OverflowError):
        raise Left(f"it is no number: {short(value)}") from None


# Each gets the value and the whole configuration, and raises Left if there is no counterpart.
SPECIAL: dict[str, Convert] = {
    "adapter": _kind_of_adapter, "finetuning_type": _kind_of_adapter, "use_peft": _bits, "load_in_4bit": _bits,
    "quantization_bit": _bits, "load_in_8bit": _eight_bits, "quantization_method": _nothing,
    "rl": _objective, "stage": _objective, "pref_loss": _preference_loss, "loss_type": _objective,
    "lora_target_modules": _modules, "lora_target": _modules, "lora_target_linear": _nothing,
    "lora_modules_to_save": _whole_modules, "modules_to_save": _whole_modules, "additional_target": _whole_modules,
    "num_epochs": _epochs, "num_train_epochs": _epochs, "max_steps": _steps, "warmup_steps": _warmup,
    "warmup_ratio": _warmup_ratio, "lr_scheduler": _scheduler, "lr_scheduler_type": _scheduler,
    "optimizer": _optimizer, "optim": _optimizer, "gradient_checkpointing": _checkpointing,
    "val_set_size": _held_out, "val_size": _held_out, "load_best_model_at_end": _keep_best,
    "chat_template": _template, "template": _template, "report_to": _reporters, "use_wandb": _wandb,
    "wandb_project": _wandb, "train_on_inputs": _loss_on, "train_on_prompt": _loss_on, "datasets": data_sets,
    "test_datasets": test_data, "dataset": data_set, "dataset_name": data_set, "dataset_train_split": _nothing,
    "dataset_test_split": _nothing, "eval_steps": _every("eval_steps"), "save_steps": _every("save_steps"),
    "logging_steps": _every("logging_steps"), "dataset_dir": _nothing, "peft_use_dora": _switch("use_dora"),
    "peft_use_rslora": _switch("use_rslora"), "pissa_init": _pissa, "peft_init_lora_weights": _start,
    "bnb_4bit_quant_type": _quant_type, "completion_only_loss": _loss_on_completions,
    "mask_prompt": _loss_on_completions, "activation_offloading": _switch("offload_activations"),
    "disable_dropout": _nothing, "cpo_alpha": _nothing,
}  # fmt: skip
