"""Option names of other tools: errors suggest the option that is meant."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from wgrad.device.errors import WgradError
from wgrad.train.commands import cli
from wgrad.train.commands.cli_options import with_current_options
from wgrad.train.library.signature import checked_names
from wgrad.train.options.chat_config import ChatConfig
from wgrad.train.options.config_yaml import config_from_mapping
from wgrad.train.options.finetune_config import RunOptions
from wgrad.train.options.former_names import FORMER
from wgrad.train.options.generate_config import GenerateConfig
from wgrad.train.options.option_names import _ELSEWHERE, option_hint
from wgrad.train.options.options import flag
from wgrad.train.options.serve_config import ServeConfig

FIELDS = [f.name for f in dataclasses.fields(RunOptions)]


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("--learning-rat", "--learning-rate"),
        ("--learning_rate=1e-4", "--learning-rate"),
        ("--use-gradient-checkpointing", "--gradient-checkpointing"),
        ("--no-use-gradient-checkpointing", "--no-gradient-checkpointing"),
        ("--r", "--lora-r"),
        ("-r", "--lora-r"),
        ("-lr", "--learning-rate"),
        ("--lora_r", "--lora-r"),
        ("--lora_rank", "--lora-r"),
        ("--per_device_train_batch_size", "--batch-size"),
        ("--grad-accum", "--gradient-accumulation-steps"),
        ("--max-seq-length", "--max-length"),
        ("--num_train_epochs", "--epochs"),
        ("--warmup_ratio", "--warmup-steps"),
        ("--output-dir", "--out"),
        ("--seq_len", "--max-length"),
        ("--rnak", "--lora-r"),
        ("--no-pakcing", "--no-packing"),
        ("--bf16", "--compute bfloat16"),
        ("--train_on_inputs", "--loss-on all"),
        ("--no-cuda", "--device cpu"),
        ("--pref-beta", "--beta"),
    ],
)
def test_finetune_guesses_an_option_of_another_tool(word: str, meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["finetune", word]) == 2
    error = capsys.readouterr().err
    assert error.endswith(f"{word.split('=')[0]} (did you mean {meant}?): see wgrad finetune --help\n")


@pytest.mark.parametrize(
    ("word", "meant"),
    [("--max-tokens", "--max-new-tokens"), ("--temp", "--temperature"), ("--lora", "--adapter"), ("-p", "--prompt")],
)
def test_generate_guesses_an_option_of_another_tool(word: str, meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", word, "x"]) == 2
    assert f"(did you mean {meant}?)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("lora_rank", "(did you mean lora_r?)"),
        ("learning_rat", "(did you mean learning_rate?)"),
        ("micro_batch_size", "(did you mean batch_size?)"),
        ("fp16", "(did you mean compute: float16?)"),
        ("load_in_4bit", "(the base model is NF4 anyway, unless --no-quantize is given)"),
        ("optim", "(AdamW is the only optimizer: leave it out)"),
        ("zzzz", ": see wgrad finetune --help"),
    ],
)
def test_a_key_of_another_tool_is_guessed(key: str, words: str) -> None:
    with pytest.raises(WgradError) as caught:
        config_from_mapping({key: 1}, "--config: c.yaml")
    assert str(caught.value) == f"--config: c.yaml: unknown key {key!r}{words if words[0] == ':' else ' ' + words}"


def test_all_keys_of_another_tool_are_named_at_once() -> None:
    file = {
        "base_model": "m", "lora_r": 4, "micro_batch_size": 2, "do_train": True, "rnak": 3,
        "optimizer": {"lr": 1e-4, "fused": True}, "dataset": {"packed": False}, "profiler": {},
    }  # fmt: skip
    with pytest.raises(WgradError) as caught:
        config_from_mapping(file, "--config: c.yaml")
    assert str(caught.value) == (
        "--config: c.yaml: unknown keys 'base_model' (did you mean model?), 'micro_batch_size' (did you mean "
        "batch_size?), 'do_train', 'rnak', 'optimizer.lr' (did you mean "
        "learning_rate?), 'optimizer.fused', 'dataset.packed' (did "
        "you mean packing?), 'profiler': see wgrad finetune --help"
    )
    with pytest.raises(WgradError, match=" and 40 more: see"):
        config_from_mapping({f"zzzz{i}": 1 for i in range(100)}, "--config: c.yaml")


def test_every_name_elsewhere_leads_to_a_value_that_is_taken() -> None:
    kinds = (RunOptions, GenerateConfig, ChatConfig, ServeConfig)
    here: dict[str, Any] = {f.name: f for o in kinds for f in dataclasses.fields(o)}
    for other, told in _ELSEWHERE.items():
        field, _, value = told.partition("=")
        assert other not in FIELDS, f"{other} is an option of ours"
        assert " " in told or field in here, told
        if value:
            RunOptions(**dict[str, Any]({field: value}))


def test_a_no_form_is_suggested_where_there_is_one() -> None:
    for switches, wanted in ((None, "--no-quantize"), ({"quantize"}, "--no-quantize"), (set[str](), "--quantize")):
        assert option_hint("--no-quantise", ["quantize"], "--", switches) == f" (did you mean {wanted}?)"


@pytest.mark.oracle
def test_every_name_of_the_libraries_is_known() -> None:
    """Their own dataclasses: what we have under another name is hinted at."""
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    theirs = {f.name for c in (transformers.TrainingArguments, peft.LoraConfig) for f in dataclasses.fields(c)}
    used = """learning_rate lr_scheduler_type warmup_steps weight_decay max_grad_norm per_device_train_batch_size
        gradient_accumulation_steps num_train_epochs max_steps gradient_checkpointing save_steps logging_steps
        output_dir seed bf16 fp16 optim r lora_alpha lora_dropout target_modules use_rslora use_dora""".split()
    assert set(used) <= theirs
    for name in used:
        assert name in FIELDS or option_hint(flag(name), FIELDS, "--"), name


# ---- former names ------------------------------------------------------------------------------
def test_former_names_lead_to_fields_and_are_none_themselves() -> None:
    assert set(FORMER.values()) <= set(FIELDS) and not set(FORMER) & set(FIELDS)


@pytest.mark.parametrize("former", FORMER)
def test_a_former_name_is_accepted(former: str, capsys: pytest.CaptureFixture[str]) -> None:
    """On the command line with a note, in a file without one, in Python with a DeprecationWarning."""
    field = next(f for f in dataclasses.fields(RunOptions) if f.name == FORMER[former])
    value: Any = {"init": "pissa", "schedule": "linear"}.get(former, 0.25 if isinstance(field.default, float) else 7)
    value = True if field.default is False or field.default is None else value
    words = [flag(former)] if value is True else [flag(former), str(value)]
    (now, *_), found = with_current_options(words)
    assert (now, found) == (flag(field.name), {flag(former): flag(field.name)})
    args = vars(cli.build_parser().parse_args(["finetune", *words]))
    assert args[field.name] in (value, str(value))
    assert config_from_mapping({former: value}, "--config: c.yaml") == {field.name: value}
    assert config_from_mapping({former.replace("_", "-"): value}, "--config: c.yaml") == {field.name: value}
    with pytest.warns(DeprecationWarning, match=f"finetune: '{former}' is now '{field.name}'"):
        assert checked_names({former: value}, FIELDS, "finetune") == {field.name: value}
    with pytest.raises(WgradError, match=f"'{former}' is the former name of '{field.name}'"):
        checked_names({former: value, field.name: value}, FIELDS, "finetune")
    assert cli.main(["finetune", *words]) == 2
    note, error = capsys.readouterr().err.splitlines()
    assert note == f"note: {flag(former)} is now {flag(field.name)}; the next release takes only that"
    assert error.startswith("wgrad: error: --")


def test_options_take_a_former_name_but_not_both() -> None:
    assert RunOptions(seq_len=128).max_length == 128  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="seq_len"):
        RunOptions(seq_len=128, max_length=64)  # type: ignore[call-arg]


def test_a_former_switch_may_be_negated() -> None:
    args = vars(cli.build_parser().parse_args(["finetune", "--no-gradient-checkpointing", "--no-offload-activations"]))
    assert (args["gradient_checkpointing"], args["offload_activations"]) == (False, False)
    assert with_current_options(["finetune", "--no-gradient-checkpointing", "--learning-rate=1"])[0] == [
        "finetune", "--no-gradient-checkpointing", "--learning-rate=1"
    ]  # fmt: skip
