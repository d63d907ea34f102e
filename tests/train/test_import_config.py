"""`wgrad import-config`: files of axolotl, LLaMA-Factory and TRL, and what has no counterpart."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from wgrad.train.commands.cli import main
from wgrad.train.options.finetune_config import RunOptions
from wgrad.train.options.foreign_config import _DEFAULTS, _WHY, TOOLS, import_config
from wgrad.train.options.foreign_keys import SPECIAL
from wgrad.train.options.option_names import _ELSEWHERE
from wgrad.train.options.resolve import resolve_options

AXOLOTL = """
base_model: NousResearch/Llama-3.2-1B
model_type: AutoModelForCausalLM
load_in_8bit: false
load_in_4bit: true
datasets:
  - path: org/set
    split: train
    type: chat_template
    field_messages: conversation
val_set_size: 0.1
output_dir: ./outputs/out
adapter: qlora
sequence_len: 2048
sample_packing: true
eval_sample_packing: true
lora_r: 32
lora_alpha: 16
lora_dropout: 0.05
lora_target_linear: true
lora_modules_to_save: [embed_tokens, lm_head]
gradient_accumulation_steps: 4
micro_batch_size: 2
num_epochs: 3
optimizer: paged_adamw_8bit
lr_scheduler: cosine
learning_rate: 2e-4
train_on_inputs: false
bf16: auto
gradient_checkpointing: true
flash_attention: true
warmup_ratio: 0.1
evals_per_epoch: 4
saves_per_epoch: 1
wandb_project: mine
weight_decay: 0.0
special_tokens:
  pad_token: "<|end_of_text|>"
"""
FACTORY = """
model_name_or_path: meta-llama/Meta-Llama-3-8B-Instruct
trust_remote_code: true
stage: dpo
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: all
pref_beta: 0.1
pref_loss: orpo
dataset: dpo_en_demo
template: llama3
cutoff_len: 2048
output_dir: saves/llama3
logging_steps: 10
save_steps: 500
plot_loss: true
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 5.0e-6
num_train_epochs: 3.0
lr_scheduler_type: polynomial
warmup_ratio: 0.1
bf16: true
quantization_bit: 4
val_size: 0.1
eval_strategy: steps
eval_steps: 500
"""
TRL = """
model_name_or_path: Qwen/Qwen2-0.5B
dataset_name: trl-lib/Capybara
dataset_train_split: train
learning_rate: 2.0e-4
num_train_epochs: 1
packing: true
per_device_train_batch_size: 2
gradient_checkpointing: true
eos_token: "<|im_end|>"
use_peft: true
lora_r: 32
lora_alpha: 16
eval_strategy: "no"
max_steps: -1
report_to: none
output_dir: out/qwen
"""


def imported(tmp_path: Path, text: str, capsys: Any) -> tuple[dict[str, Any], dict[str, str]]:
    """The options that are written, and the reason of each key that is left out."""
    (tmp_path / "theirs.yml").write_text(text)
    assert main(["import-config", str(tmp_path / "theirs.yml"), "--out", str(tmp_path / "ours.yaml")]) == 0
    lines = [line.removeprefix("left out: ") for line in capsys.readouterr().err.splitlines() if "left out" in line]
    resolve_options({"config": str(tmp_path / "ours.yaml")})  # finetune takes it
    reasons = {line.partition(":")[0]: line.rpartition(" (")[2].rstrip(")") for line in lines}
    return yaml.safe_load((tmp_path / "ours.yaml").read_text()), reasons


def test_options_of_axolotl_are_imported(tmp_path: Path, capsys: Any) -> None:
    found, left = imported(tmp_path, AXOLOTL, capsys)
    assert found == {
        "model": "NousResearch/Llama-3.2-1B", "data": ["org/set:train"], "columns": ["messages=conversation"],
        "out": "./outputs/out", "lora_r": 32, "lora_alpha": 16, "lora_dropout": 0.05, "train_embeddings": True,
        "train_head": True, "learning_rate": 2e-4, "lr_scheduler_type": "cosine", "warmup_steps": 0.1,
        "weight_decay": 0.0, "batch_size": 2, "gradient_accumulation_steps": 4, "max_length": 2048, "epochs": 3,
        "packing": True, "eval_fraction": 0.1, "seed": 42, "gradient_checkpointing": True, "report_to": ["wandb"],
    }  # fmt: skip
    assert set(left) == {"model_type", "eval_sample_packing", "optimizer", "bf16", "flash_attention",
                         "evals_per_epoch", "saves_per_epoch", "special_tokens"}  # fmt: skip
    assert left["flash_attention"] == "PyTorch's kernels are chosen by it, and wgrad has its own"


def test_options_of_llama_factory_are_imported(tmp_path: Path, capsys: Any) -> None:
    found, left = imported(tmp_path, FACTORY, capsys)
    assert found["objective"] == "orpo" and found["beta"] == 0.1 and found["chat_template"] == "llama3"
    assert (found["lora_r"], found["lora_alpha"]) == (8, 16.0) and "data" not in found
    assert (found["eval_steps"], found["eval_fraction"], found["warmup_steps"]) == (500, 0.1, 0.1)
    assert found["lr_scheduler_type"] == "linear" and "cosine, linear, constant" in left["lr_scheduler_type"]
    assert "dataset_info.json" in left["dataset"] and "do_train" not in left and "plot_loss" not in left


def test_the_files_of_llama_factorys_names(tmp_path: Path, capsys: Any) -> None:
    text = FACTORY.replace("dpo_en_demo", "one, two")
    assert "data" not in imported(tmp_path, text, capsys)[0]
    (tmp_path / "ours.yaml").unlink()
    (tmp_path / "data").mkdir()
    entries = {"one": {"file_name": "one.json"}, "two": {"hf_hub_url": "org/set"}}
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps(entries))
    found, left = imported(tmp_path, text, capsys)
    assert found["data"] == [f"{tmp_path}/data/one.json", "org/set"] and "dataset" not in left
    (tmp_path / "ours.yaml").unlink()
    assert "dataset" in imported(tmp_path, text.replace("two", "three"), capsys)[1]  # which it does not know


def test_options_of_trl_are_imported(tmp_path: Path, capsys: Any) -> None:
    found, left = imported(tmp_path, TRL, capsys)
    assert found["data"] == ["trl-lib/Capybara:train"] and found["quantize"] is False and found["seed"] == 42
    assert found["lora_dropout"] == 0.05 and found["gradient_accumulation_steps"] == 1
    assert "max_steps" not in found and "report_to" not in found
    assert found["target_modules"] == ["q_proj", "v_proj"]
    assert set(left) == {"eos_token", "eval_strategy", "lora_target_modules", "assistant_only_loss"}


@pytest.mark.parametrize(
    ("more", "ours", "told"),
    [
        ({"lora_target_modules": "all-linear"}, {}, ["assistant_only_loss"]),
        (
            {"lora_target_modules": ["o_proj"], "assistant_only_loss": True},
            {"target_modules": ["o_proj"], "loss_on": "completion"},
            [],
        ),
        (
            {"lora_target_modules": ["o_proj"], "assistant_only_loss": False},
            {"target_modules": ["o_proj"]},
            ["assistant_only_loss"],
        ),
        ({"use_peft": False, "completion_only_loss": False}, {"loss_on": "all"}, []),
        ({"use_peft": False, "completion_only_loss": True}, {"loss_on": "completion"}, []),
        ({"lora_target_modules": "all-linear", "loss_type": "dpo"}, {"learning_rate": 1e-6}, []),
        (
            {"lora_target_modules": "all-linear", "lora_dropout": 0.1, "loss_type": "kto"},
            {"learning_rate": 1e-6, "lora_dropout": 0.0},
            ["lora_dropout"],
        ),
        (
            {"lora_target_modules": "all-linear", "lora_dropout": 0.1, "disable_dropout": False, "loss_type": "dpo"}
            | {"learning_rate": 2e-6},
            {"lora_dropout": 0.1, "learning_rate": 2e-6},
            [],
        ),
        ({"lora_target_modules": "all-linear", "loss_type": "simpo"}, {"learning_rate": 1e-6}, ["cpo_alpha"]),
        ({"lora_target_modules": "all-linear", "loss_type": "simpo", "cpo_alpha": 0.0}, {"learning_rate": 1e-6}, []),
    ],
)
def test_defaults_of_trl_that_depend_on_model_and_data_are_taken(
    more: dict[str, Any], ours: dict[str, Any], told: Any
) -> None:
    found = import_config({"model_name_or_path": "m", "use_peft": True} | more, "trl")
    assert [name for name, *_ in found.left] == told
    names = ["target_modules", "loss_on"] + ["learning_rate", "lora_dropout"] * ("loss_type" in more)
    assert {k: v for k, v in found.options.items() if k in names} == ours


def test_options_that_do_not_go_together_are_left_out(tmp_path: Path, capsys: Any) -> None:
    """They are left out, and the rest is written."""
    text = AXOLOTL.replace("lora_modules_to_save", "rl: dpo\nrl_beta: 0.3\nlora_modules_to_save")
    found, left = imported(tmp_path, text, capsys)
    assert (found["objective"], found["beta"], found["train_embeddings"]) == ("dpo", 0.3, True)
    assert "train_head" not in found and "no gradient of the output layer" in left["train_head"]
    assert (tmp_path / "ours.yaml").read_text().startswith("model: "), "a line for each option"


def test_without_an_adapter_the_whole_model_is_trained(tmp_path: Path, capsys: Any) -> None:
    found, left = imported(tmp_path, "base_model: m\nlora_r: 8\nmicro_batch_size: 1\n", capsys)
    assert found["full"] is True and "lora_r" not in found
    assert left["lora_r"] == "--full trains all parameters, not an adapter"


@pytest.mark.parametrize(
    ("key", "value", "ours"),
    [
        ("warmup_steps", 10, {"warmup_steps": 10}),
        ("num_epochs", 0.5, "epochs are whole"),
        ("val_set_size", 500, "it is a fraction here"),
        ("save_steps", 0.1, "a whole number of steps"),
        ("optimizer", "adamw_torch", {}),
        ("optimizer", "muon", "AdamW is the only optimizer"),
        ("rl", "grpo", "the objectives are"),
        ("adapter", "llama-adapter", "only LoRA and full"),
        ("load_in_8bit", True, "4 or 16 bits"),
        ("lr_scheduler", "constant_with_warmup", {"lr_scheduler_type": "constant"}),
        ("lora_target_modules", ["q_proj"], {"target_modules": ["q_proj"]}),
        ("lora_modules_to_save", ["score"], "embed_tokens and lm_head alone"),
        ("learning_rate", -1, "must be above 0"),
        ("learning_rate", "fast", "expected a number"),
        ("num_epochs", [1], "it is no number"),
        ("chat_template", "tokenizer_default", {}),
        ("chat_template", "qwen3", "the model's own chat template"),
        ("early_stopping_patience", 3, "nothing is held out"),
        ("lr_scheduler", "cosine_with_min_lr", "constant: cosine is taken"),
        ("gradient_checkpointing", "offload", {"gradient_checkpointing": True, "offload_activations": True}),
        ("activation_offloading", True, {"offload_activations": True}),
        ("chat_template", "{{ messages }}", "write this template to a file"),
        ("zzzz", 3, "wgrad has no such option"),
        ("zzzz", False, {}),
        ("deepspeed", "zero3.json", "--ranks"),
        ("bnb_4bit_quant_type", "nf4", {}),
        ("bnb_4bit_quant_type", "fp4", "4 bits are NF4"),
        ("output_dir", "${HOME}/out", "it names a variable: write its value"),
        ("datasets", [{"path": "${DATA}/a.jsonl"}], "it names a variable"),
        ("datasets", [{"path": "a.jsonl"}, "b.jsonl"], {"data": ["a.jsonl", "b.jsonl"]}),
        ("test_datasets", ["b.csv", {"path": "a.jsonl"}], {"eval_data": ["b.csv", "a.jsonl"]}),
        ("datasets", [{"path": "data/a.jsonl", "split": "train"}], {"data": ["data/a.jsonl"]}),
        ("datasets", [{"path": "data/a", "split": "train", "ds_type": "json"}], {"data": ["data/a"]}),
        ("peft_use_dora", True, {"use_dora": True}),
        ("peft_use_rslora", True, {"use_rslora": True}),
        ("pissa_init", True, {"init_lora_weights": "pissa_niter_16"}),
        ("peft_init_lora_weights", "pissa", {"init_lora_weights": "pissa"}),
        ("peft_init_lora_weights", "gaussian", "must be one of"),
    ],
)
def test_values_are_converted_or_left_out_with_a_reason(key: str, value: Any, ours: Any) -> None:
    """Text: why it is left out."""
    found = import_config({"adapter": "qlora", key: value}, "axolotl")
    if isinstance(ours, str):
        assert [name for name, *_ in found.left] == [key] and ours in found.left[0][2]
    else:
        assert found.left == [] and ours.items() <= found.options.items()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "base_model: m\nrl: grpo\n",
            "rl: the objectives are .*, simpo; got 'grpo': give --objective",
        ),
        ("model_name_or_path: m\nstage: rm\n", "stage: the objectives are .* got 'rm': give"),
        ("model_name_or_path: m\nloss_type: apo_zero\nbeta: 0.3\n", "loss_type: the objectives are .* 'apo_zero'"),
        ("model_name_or_path: m\nbeta: 0.3\n", "beta is an option of other trainers of TRL .* tell which: give --obj"),
    ],
)
def test_the_objective_is_never_guessed(text: str, message: str, tmp_path: Path, capsys: Any) -> None:
    """A file of another method does not become one of plain fine-tuning."""
    (tmp_path / "c.yml").write_text(text)
    assert main(["import-config", str(tmp_path / "c.yml")]) == 2
    said = capsys.readouterr()
    assert re.search(message, said.err) and said.out == ""
    assert main(["import-config", str(tmp_path / "c.yml"), "--objective", "dpo"]) == 0
    found = yaml.safe_load(capsys.readouterr().out)
    assert (
        found["objective"] == "dpo" and "full" not in found and found.get("beta") == (0.3 if "beta" in text else None)
    )


@pytest.mark.parametrize(
    ("one", "unread", "options"),
    [
        ({"path": "a/b", "split": "train[:10%]", "type": "alpaca"}, "split", {"data": ["a/b:train"]}),
        ({"path": "a/b", "split": "train+test"}, "split", {"data": ["a/b:train"]}),
        ({"path": "a.csv", "type": {"field_instruction": "q", "field_output": "output", "format": "{instruction}"}},
         "format", {"data": ["a.csv"], "columns": ["instruction=q"]}),
        ({"path": "a.csv", "type": "input_output"}, "type", {"data": ["a.csv"]}),
        ({"path": "a.csv", "type": "chatml.intel", "trust_remote_code": True}, "", {"data": ["a.csv"]}),
        ({"path": "a.csv", "message_property_mappings": {"role": "from", "content": "value"}}, "", {}),
        ({"path": "a.csv", "message_property_mappings": {"role": "who"}}, "message_property_mappings", {}),
        ({"path": "a.csv", "roles_to_train": ["assistant"], "train_on_eos": "turn", "revision": None}, "", {}),
        ({"path": "a.csv", "roles_to_train": ["user"], "train_on_eos": "all"}, "roles_to_train, train_on_eos", {}),
        ({"path": "a/b", "name": "en", "revision": "x", "shards": 4}, "name, revision, shards", {"data": ["a/b"]}),
    ],
)  # fmt: skip
def test_keys_of_a_data_set_that_are_not_read_are_told(one: Any, unread: str, options: dict[str, Any]) -> None:
    for key, ours in (("datasets", options), ("test_datasets", {"eval_data": options["data"]} if options else {})):
        found = import_config({"adapter": "qlora", key: [one]}, "axolotl")
        assert ours.items() <= found.options.items()
        told = [f"read without {unread}: wgrad data show tells what a run learns"] if unread else []
        assert [reason for _, _, reason in found.left] == told


@pytest.mark.parametrize("warmup", [{}, {"warmup_steps": 0}, {"warmup_steps": 9}, {"warmup_ratio": 0.1}])
@pytest.mark.parametrize(("tool", "key"), [("axolotl", "lr_scheduler"), ("trl", "lr_scheduler_type")])
def test_a_constant_schedule_has_no_warmup_in_transformers(tool: str, key: str, warmup: Any) -> None:
    given = {"adapter": "qlora", "lora_r": 8, "lora_target_modules": ["q_proj"], "assistant_only_loss": False, **warmup}
    found = import_config({**given, key: "constant"}, tool)
    assert RunOptions(**found.options).warmup_steps == 0
    assert [name for name, *_ in found.left if name.startswith("warmup")] == [name for name in warmup if warmup[name]]
    with_one = import_config({**given, key: "constant_with_warmup"}, tool)
    assert with_one.options["lr_scheduler_type"] == "constant"
    assert not warmup or with_one.options["warmup_steps"] in warmup.values()


def test_a_schedule_that_is_missing_is_not_the_other_tools_default() -> None:
    left_out = import_config({"use_peft": True, "lr_scheduler_type": "cosine_with_min_lr"}, "trl")
    for found, schedule in ((left_out, "cosine"), (import_config({"use_peft": True}, "trl"), "linear")):
        assert RunOptions(**found.options).lr_scheduler_type == schedule


ODD: list[Any] = [5, -1, "x", [1], {"a": 1}, True, math.inf, math.nan, [None], [{}], [[1]], 10**30, b"x",
                  [{"path": None, "split": 3, "data_files": 5}]]  # fmt: skip


@pytest.mark.parametrize("tool", TOOLS)
def test_odd_values_are_left_out(tool: str, pytestconfig: pytest.Config) -> None:
    """Every known key is converted to a valid file, whatever its value. A tool has a ninth of the values (with --all a
    third), each key another part."""
    parts = 3 if pytestconfig.getoption("--all") else 9
    for at, key in enumerate((*SPECIAL, *_ELSEWHERE, "learning_rate", "columns", "eval_data", 5)):
        for value in ODD[(at + TOOLS.index(tool)) % parts :: parts]:
            file: dict[Any, Any] = {"adapter": "qlora", "use_peft": True, key: value}
            RunOptions(**import_config(file, tool).options)


def test_a_key_is_explained_in_one_place() -> None:
    assert not [name for name in SPECIAL for pattern in _WHY if name == pattern]
    assert all(set(values) <= {f.name for f in dataclasses.fields(RunOptions)} for values in _DEFAULTS.values())


@pytest.mark.parametrize(
    ("text", "words", "message"),
    [
        ("x: 1", [], "no key tells whose file this is: give --from, one of axolotl, llama-factory, trl"),
        ("- 1", [], "expected lines like"),
        ("", [], "expected lines like"),
        ("a: [", [], "not valid YAML"),
        ("x: 1", ["--from", "unsloth"], "must be one of axolotl, llama-factory, trl"),
    ],
)
def test_mistakes_are_refused(text: str, words: list[str], message: str, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "c.yml").write_text(text)
    assert main(["import-config", str(tmp_path / "c.yml"), *words]) == 2
    assert message in capsys.readouterr().err


def test_it_is_printed_and_nothing_is_overwritten(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "c.yml").write_text("base_model: org/name\nadapter: qlora\n")
    assert main(["import-config", str(tmp_path / "c.yml")]) == 0
    said = capsys.readouterr()
    assert yaml.safe_load(said.out)["model"] == "org/name" and "note: data is still to give" in said.err
    assert main(["import-config", str(tmp_path / "c.yml"), "--out", str(tmp_path / "c.yml")]) == 2
    assert "is there already" in capsys.readouterr().err
