"""FinetuneConfig: its rules, YAML, and how command line, file and resumed run combine."""

from __future__ import annotations

import argparse
import dataclasses
import re
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import yaml

from wgrad.device.errors import WgradError
from wgrad.train.commands.cli import build_parser, main
from wgrad.train.options import options as options_module
from wgrad.train.options.config_yaml import read_config_file
from wgrad.train.options.finetune_config import CONFIG_FILE, FinetuneConfig, RunOptions
from wgrad.train.options.generate_config import GenerateConfig
from wgrad.train.options.input_options import PROJECTIONS
from wgrad.train.options.options import field_type, fixed_options, flag
from wgrad.train.options.push_config import PushConfig
from wgrad.train.options.resolve import resolve_config

NEEDED: dict[str, Any] = {"model": "m", "data": ("d",), "out": "o"}
# Options that another one is given beside: what they are refused, or without effect, without.
BESIDE: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("early_stopping_patience", "keep_best"), {"eval_steps": 3}),
    **dict.fromkeys(("beta", "label_smoothing"), {"objective": "dpo"}),
    "simpo_gamma": {"objective": "simpo"},
    **dict.fromkeys(("desirable_weight", "undesirable_weight"), {"objective": "kto", "batch_size": 2}),
}


def parse(*words: str) -> FinetuneConfig:
    args = vars(build_parser().parse_args(["finetune", *words]))
    return resolve_config({k: v for k, v in args.items() if k not in ("command", "run")})


def another(field: dataclasses.Field) -> Any:
    """Return a valid value of any option, also future ones, that is not its default."""
    default: Any = field.default
    kind, choices = field_type(FinetuneConfig, field.name), field.metadata["choices"]
    if field.name == "lr_sweep":
        return 0.125, 1e-05
    if field.name == "report_to":
        return "wandb", "tensorboard"
    if field.name == "columns":
        return "prompt=q", "completion=a, b"
    if choices:
        return next(value for value in choices if value != default)
    text = "3 GiB" if field.metadata["metavar"] == "SIZE" else "yes: 3"
    by_type = {int: (default or 0) + 2 if kind is int else 0, tuple: ("q_proj", "v_proj"), str: text}
    return not (True if default is None else default) if kind is bool else by_type.get(kind, 0.125)


def words_of(name: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [flag(name) if value else "--no-" + name.replace("_", "-")]
    if name in ("data", "eval_data", "columns", "sample_prompt"):
        return [word for text in value for word in (flag(name), text)]
    return [flag(name), *map(str, value)] if isinstance(value, tuple) else [flag(name), str(value)]


def needed(*words: str) -> FinetuneConfig:
    return parse("--model", "m", "--data", "d", "--out", "o", *words)


# ---- one source of names and defaults ----------------------------------------------------------
def test_every_option_of_the_command_is_there() -> None:
    wanted = (
        "model data out lora_r lora_alpha lora_dropout target_modules use_rslora learning_rate "
        "lr_scheduler_type warmup_steps batch_size gradient_accumulation_steps max_length "
        "epochs max_steps eval_fraction eval_data save_steps logging_steps "
        "seed compute device resume full weight_decay "
        "max_grad_norm packing gradient_checkpointing double_quant block_size "
        "profile loss_on adapter sample_prompt on_bad_line "
        "eval_tokens sample"
    )
    assert set(wanted.split()) <= {f.name for f in dataclasses.fields(FinetuneConfig)}


def test_nothing_given_is_the_defaults() -> None:
    assert needed() == FinetuneConfig(**NEEDED)
    assert RunOptions().target_modules == PROJECTIONS and len(PROJECTIONS) == 7


def test_valid_defaults_are_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A default that breaks its rule, as that of --repo, is refused in every call."""
    valid = options_module._valid_defaults(RunOptions)
    assert len(valid) > 60 and {"lora_r", "seed", "target_modules"} <= valid
    monkeypatch.setattr(options_module, "_convert", convert := Mock(wraps=options_module._convert))
    given: dict[str, Any] = {"lora_r": "3", "seed": 9}
    copied = dataclasses.replace(RunOptions(**given), max_length=70)
    looked_at = {call.args[0].name for call in convert.call_args_list}
    assert looked_at - {"lora_r", "seed", "max_length"} == {f.name for f in dataclasses.fields(RunOptions)} - valid
    assert (copied.lora_r, copied.seed, copied.max_length) == (3, 9, 70)
    for _ in range(2):
        with pytest.raises(WgradError, match="^--repo: must be OWNER/NAME"):
            PushConfig()
        with pytest.raises(WgradError, match="^--lora-r: must be at least 1; got 0"):
            RunOptions(lora_r=0)


def test_a_step_has_the_sequences_of_all_its_micro_batches() -> None:
    of_pairs = RunOptions(objective="dpo", batch_size=3, gradient_accumulation_steps=4, max_length=7)
    assert (of_pairs.examples_per_step, of_pairs.tokens_per_step) == (12, 2 * 12 * 7)
    assert (of_pairs.with_batch(2).batch_size, of_pairs.with_batch(2).gradient_accumulation_steps) == (2, 6)


def test_a_default_of_another_type_is_converted() -> None:
    @dataclasses.dataclass(frozen=True)
    class Shares(options_module.Options):
        whole: float = options_module.option(1, "an integer as the default")
        half: float = options_module.option(0.5, "its own type")
        home: str = options_module.option("~/wgrad", "a path that is expanded", path=True)

    assert [type(shares.whole) for shares in (Shares(), Shares(whole=1))] == [float, float]
    assert type(RunOptions(lora_alpha=int(RunOptions().lora_alpha)).lora_alpha) is float  # equal to the default
    assert Shares().home == str(Path("~/wgrad").expanduser())
    assert options_module._valid_defaults(Shares) == {"half"}


@pytest.mark.parametrize("field", dataclasses.fields(FinetuneConfig), ids=lambda f: f.name)
def test_every_field_goes_through_the_command_line_and_yaml(field: dataclasses.Field, tmp_path: Path) -> None:
    value, beside = another(field), BESIDE.get(field.name, {})
    assert value != field.default
    given = NEEDED | beside | {field.name: value}
    config = parse(*(word for name, v in given.items() for word in words_of(name, v)))
    assert getattr(config, field.name) == value and type(getattr(config, field.name)) is type(value)
    expected = dataclasses.replace(FinetuneConfig(**NEEDED), **dict[str, Any]({field.name: value, **beside}))
    assert config == expected
    config.save(tmp_path)
    assert FinetuneConfig(**read_config_file(tmp_path / CONFIG_FILE)) == config
    assert (f" {field.name} " in config.summary()) == (field.name not in NEEDED) and "\n" not in config.summary()


@pytest.mark.parametrize(
    ("words", "text", "value"),
    [
        ("--offload-activations", "true", True),
        ("--offload-activations --lora-r 3", "yes", True),
        ("--no-offload-activations", "false", False),
        ("--offload-activations 14", "14", 14),
        ("--offload-activations=1", "1", 1),
        ("--offload-activations 0", "0", 0),
        ("--offload-activations true", "'true'", True),
    ],
)
def test_a_switch_may_take_a_number(words: str, text: str, value: bool | int, tmp_path: Path) -> None:
    path = write(tmp_path / "c.yaml", f"offload_activations: {text}\n")
    (tmp_path / "a").mkdir()
    for config in (
        needed(*words.split()),
        needed("--config", path),
        FinetuneConfig(**NEEDED, offload_activations=value),
    ):
        assert config.offload_activations == value and type(config.offload_activations) is type(value)
        config.save(tmp_path / "a")
        again = read_config_file(tmp_path / "a" / CONFIG_FILE)["offload_activations"]
        assert again == value and type(again) is type(value)
    assert needed("--config", path, "--no-offload-activations").offload_activations is False
    assert needed("--config", path, "--offload-activations", "7").offload_activations == 7


def test_help_names_defaults_and_choices() -> None:
    commands = next(a for a in build_parser()._actions if isinstance(a, argparse._SubParsersAction)).choices
    for name, options in (("finetune", FinetuneConfig), ("generate", GenerateConfig)):
        parser = commands[name]
        parser.formatter_class = lambda prog: argparse.HelpFormatter(prog, width=300)
        text = parser.format_all()
        for field in dataclasses.fields(options):
            assert flag(field.name) in text and field.metadata["help"][:30] in text
        if name == "finetune":
            assert "{cosine,linear,constant}" in text and "(default: 0.0002)" in text and "--no-packing" in text


@pytest.mark.parametrize("words", [["q_proj,v_proj"], ["q_proj", "v_proj"], ["q_proj,", "v_proj", "q_proj"]])
def test_modules_are_split_at_commas_or_spaces(words: list[str]) -> None:
    assert needed("--target-modules", *words).target_modules == ("q_proj", "v_proj")


# ---- rules -------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"lora_r": 0}, "--lora-r: must be at least 1; got 0"),
        ({"lora_r": 10**400}, "--lora-r: must be at most 9,223,372,036,854,775,807; got 1000"),
        ({"lora_alpha": 10**400}, "--lora-alpha: "),
        ({"lora_r": 2.5}, "--lora-r: expected a whole number, got 2.5"),
        ({"lora_r": "many"}, "--lora-r: expected a whole number, got 'many'"),
        ({"lora_r": True}, "--lora-r: expected a whole number, got True"),
        ({"learning_rate": "inf"}, "--learning-rate: expected a number, got 'inf'"),
        ({"learning_rate": 0}, "--learning-rate: must be above 0; got 0"),
        ({"lora_alpha": -1}, "--lora-alpha: must be above 0; got -1"),
        ({"lora_dropout": 1}, "--lora-dropout: must be at least 0 and below 1; got 1"),
        ({"warmup_steps": 1.5}, "--warmup-steps: must be a share below 1 or a whole number of steps; got 1.5"),
        ({"warmup_steps": -0.1}, "--warmup-steps: must be"),
        (
            {"lr_scheduler_type": "cosin"},
            r"--lr-scheduler-type: must be one of cosine, linear, constant; got 'cosin' \(did you mean cosine",
        ),
        ({"block_size": 63}, "--block-size: must be one of 32, 64, .*; got 63"),
        ({"compute": "float64"}, "--compute: must be one of auto, float32, float16, bfloat16; got 'float64'"),
        ({"max_length": 1}, "--max-length: must be between 2"),
        ({"max_steps": "1e15"}, "--max-steps: must be between 1 and 1,000,000,000; got 1000000000000000"),
        ({"epochs": 10**400}, "--epochs: must be between 1 and 1,000,000,000; got 1000"),
        ({"lora_r": None}, "--lora-r: expected a whole number, got None"),
        ({"learning_rate": "nan"}, "--learning-rate: expected a number, got 'nan'"),
        ({"learning_rate": 10**400}, "--learning-rate: expected a number, got 1000"),
        ({"lora_r": "9" * 5000}, r"--lora-r: expected a whole number, got '9+\.\.\.9+'"),
        ({"target_modules": {"q_proj": 1}}, "--target-modules: expected a list of names, got {'q_proj': 1}"),
        ({"eval_fraction": 1.0}, "--eval-fraction: must be at least 0 and below 1"),
        ({"eval_tokens": -1}, "--eval-tokens: must be between 0 and 1,000,000,000"),
        ({"seed": 2**32}, "--seed: must be between 0 and 4294967295"),
        ({"max_steps": 0}, "--max-steps: must be between 1 and"),
        ({"packing": "yes"}, "--packing: expected true or false, got 'yes'"),
        ({"target_modules": []}, "--target-modules: must name at least one module"),
        ({"target_modules": ["q_proj=0"]}, "--target-modules: must name .* each as NAME or NAME=RANK"),
        ({"target_modules": ["q_proj=x"]}, "--target-modules: must name .* each as NAME or NAME=RANK"),
        ({"data": ["a.jsonl", "b.jsonl", "a.jsonl"]}, "--data: 'a.jsonl' is given twice: give it once"),
        ({"target_modules": ["q_proj=2", "q_proj=8"]}, "--target-modules: must name .* none twice"),
        ({"target_modules": ["all-linear", "q_proj=8"]}, "--target-modules: must name .* all-linear stands alone"),
        ({"target_modules": ["all-linear=8"]}, "--target-modules: must name .* each as NAME or NAME=RANK"),
        ({"target_modules": [3]}, r"--target-modules: expected a list of names, got \[3\]"),
        ({"model": 3}, "--model: expected text, got 3"),
        ({"full": True, "adapter": "x"}, "--adapter: --full trains all parameters"),
        ({"full": True, "lora_dropout": 0.5}, "--lora-dropout: .*--full"),
        (
            {"early_stopping_patience": 2},
            "--early-stopping-patience: goes by the measures of --eval-steps, which is 0: give --eval-steps N",
        ),
        ({"keep_best": 2}, "--keep-best: goes by the measures of --eval-steps"),
        ({"eval_steps": 2, "eval_fraction": 0}, "--eval-steps: nothing is held out: give --eval-data, or"),
        ({"sample_prompt": 3}, "--sample-prompt: expected a list of texts, got 3$"),
        ({"objective": "ppo"}, "--objective: must be one of sft, dpo, orpo, kto, simpo; got 'ppo'"),
        ({"lr_sweep": "1e-4,x"}, "--lr-sweep: expected a list of numbers, got '1e-4,x': for example 1e-4,3e-4"),
        ({"lr_sweep": [1e-4, "inf"]}, "--lr-sweep: expected a list of numbers"),
        ({"lr_sweep": "1e-4"}, "--lr-sweep: must be two or more numbers above 0; got 0.0001"),
        ({"lr_sweep": (1e-4, 0)}, "--lr-sweep: must be two or more numbers above 0; got 0.0001 0"),
        ({"lr_sweep": (1e-4, 2e-4), "resume": True}, "--resume: --lr-sweep keeps nothing"),
        ({"lr_sweep": (1e-4, 2e-4), "eval_fraction": 0}, "--lr-sweep: nothing is held out"),
        ({"objective": "dpo", "full": True}, "--objective: dpo trains an adapter, and --full all parameters"),
        ({"objective": "kto"}, "--batch-size: must be at least 2 with --objective kto, .*got 1"),
        ({"objective": "kto", "batch_size": 2, "vram": "3GiB"}, "--vram: chooses --batch-size, on which the loss of"),
        ({"offload_activations": -1}, "--offload-activations: must be between 0 and 1,000,000,000; got -1"),
        ({"offload_activations": 2.5}, "--offload-activations: expected true or false, or a whole number, got 2.5"),
        (
            {"offload_activations": "half"},
            "--offload-activations: expected true or false, or a whole number, got 'half'",
        ),
        (
            {"offload_activations": 3, "gradient_checkpointing": False},
            "--offload-activations: --no-gradient-checkpointing leaves it",
        ),
        ({"label_smoothing": 0.5}, "--label-smoothing: must be at least 0 and below 0.5; got 0.5"),
    ],
)
def test_a_value_that_breaks_its_rule_is_refused(values: dict, words: str) -> None:
    with pytest.raises(WgradError, match=words) as caught:
        FinetuneConfig(**NEEDED | values)
    assert "\n" not in str(caught.value)


def test_it_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        RunOptions().lora_r = 3  # type: ignore[misc]


@pytest.mark.parametrize("name", ["model", "data", "out"])
def test_python_needs_what_the_command_needs(name: str) -> None:
    """Without `out`, the run would be written to the working directory."""
    with pytest.raises(WgradError, match=f"--{name} is required: give it$"):
        FinetuneConfig(**NEEDED | {name: ""})
    assert not getattr(RunOptions(**NEEDED | {name: ""}), name)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--beta 0.2", "--beta: would be ignored: --objective sft has none"),
        ("--objective dpo --desirable-weight 2", "--desirable-weight: would be ignored: it is of --objective kto"),
        (
            "--objective kto --batch-size 2 --label-smoothing 0.1",
            "--label-smoothing: would be ignored: it is of --objective dpo",
        ),
        ("--objective orpo --label-smoothing 0.1", "--label-smoothing: would be ignored: it is of --objective dpo"),
        ("--objective dpo --no-packing", "--packing: would be ignored: each sequence holds one completion"),
        ("--objective dpo --loss-on all", "--loss-on: would be ignored: preferences and labels are of completions"),
    ],
)
def test_an_option_of_another_objective_is_refused(words: str, message: str) -> None:
    with pytest.raises(WgradError, match=message):
        needed(*words.split())


def test_data_is_required() -> None:
    with pytest.raises(WgradError, match="--data is required"):
        parse("--model", "m", "--out", "o")


# ---- YAML --------------------------------------------------------------------------------------
def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_a_list_given_in_parts_is_put_together() -> None:
    parts = "--target-modules q_proj --target-modules v_proj=4 o_proj --report-to tensorboard --report-to wandb"
    config = needed(*parts.split())
    assert config.target_modules == ("q_proj", "v_proj=4", "o_proj")
    assert config.report_to == ("tensorboard", "wandb")


def test_values_as_other_tools_files_have_them(tmp_path: Path) -> None:
    config = needed("--config", write(tmp_path / "c.yaml", "memory_limit: 8589934592\nreport_to: none\n"))
    assert (config.memory_limit, config.report_to) == ("8589934592", ())
    for text, message in (
        ("vram: 24", "vram: must be a size, as 3GiB or 800MiB; got 24"),
        ("memory_limit: '8'", "memory_limit: must be a size"),
        ("report_to:", "report_to: expected .* got None: for example .tensorboard"),
        ("report_to: [none, wandb]", "report_to: must be among"),
    ):
        with pytest.raises(WgradError, match=message):
            needed("--config", write(tmp_path / "c.yaml", text))


def test_the_command_line_beats_the_file(tmp_path: Path) -> None:
    path = write(
        tmp_path / "c.yaml",
        "model: m\ndata: d\nout: o\nlora_r: 3\nlearning_rate: 2e-3\nmax_length: 77\npacking: false\n",
    )
    config = parse("--config", path, "--lora-r", "5", "--packing")
    assert (config.lora_r, config.learning_rate, config.max_length, config.packing) == (5, 2e-3, 77, True)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("rnak: 3\n", r"unknown key 'rnak' \(did you mean lora_r\?\)"),
        ("zzzzzz: 3\n", "unknown key 'zzzzzz': see wgrad finetune --help"),
        ("lora_r: [\n", "line 2: not valid YAML"),
        ("- lora_r\n", "expected lines like 'lora_r: 16', got a list"),
        ("max_length: 3\nmax_length: 4\n", "'max_length' is given twice"),
        ("lora_r: few\n", ": lora_r: expected a whole number, got 'few'"),
        ("lora_r: \x00\n", "not valid YAML"),
    ],
)
def test_a_bad_file_is_refused_in_one_line(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(WgradError, match=words) as caught:
        needed("--config", write(tmp_path / "c.yaml", text))
    assert "\n" not in str(caught.value)


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    with pytest.raises(WgradError, match="--config: no such file: .*absent.yaml: check the path"):
        needed("--config", str(tmp_path / "absent.yaml"))
    (tmp_path / "c.yaml").write_bytes(b"lora_r: \xff")
    with pytest.raises(WgradError, match="--config: .*c.yaml must be UTF-8 text; got byte 0xff at 8"):
        needed("--config", str(tmp_path / "c.yaml"))


@pytest.mark.parametrize(
    ("text", "words", "message"),
    [
        (
            "learning_rate: 1e-3",
            "--lr-sweep 1e-4,3e-4",
            "learning_rate: would be ignored: --lr-sweep measures .*: remove it there",
        ),
        ("full: true\nlora_r: 8", "", "lora_r: would be ignored: --full trains all parameters.*: remove it there"),
        ("learning_rate: -1", "", "learning_rate: must be above 0; got -1"),
        ("lr_scheduler_type: cosin", "", "lr_scheduler_type: must be one of .* .did you mean cosine"),
        ("max_length: many", "", "max_length: expected a whole number, got 'many'"),
        ("use_dora: true\nlora_dropout: 0.1", "", "lora_dropout: 0.1 cannot be combined with --use-dora"),
    ],
)
def test_a_message_names_the_file_that_the_value_came_from(tmp_path: Path, text: str, words: str, message: str) -> None:
    path = write(tmp_path / "run.yaml", text)
    with pytest.raises(WgradError, match=f"^--config: {re.escape(path)}: {message}"):
        needed("--config", path, *words.split())


def test_a_message_names_the_option_where_that_was_given(tmp_path: Path) -> None:
    path = write(tmp_path / "run.yaml", "learning_rate: 1e-3\nlora_r: 4")
    for words, message in [
        ("--lr-sweep 1e-4,3e-4 --learning-rate 1e-4", "^--learning-rate: would be ignored: .*: leave it out"),
        ("--lora-r 0", "^--lora-r: must be at least 1"),
    ]:
        with pytest.raises(WgradError, match=message):
            needed("--config", path, *words.split())


def test_a_resumed_run_names_the_file_of_what_it_cannot_change(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    write(out / "config.yaml", "model: m\ndata: [d]\nlora_r: 4\nlearning_rate: 1e-3\n")
    path = write(tmp_path / "run.yaml", "lora_r: 8")
    with pytest.raises(WgradError, match=f"^--config: {re.escape(path)}: lora_r: the run in .*: remove it there, or"):
        needed("--config", path, "--out", str(out), "--resume")
    write(out / "config.yaml", "model: m\ndata: [d]\nlora_r: 4\nlearning_rate: -1\n")
    with pytest.raises(
        WgradError, match=f"^--resume: {re.escape(str(out / 'config.yaml'))}: learning_rate: must be above 0"
    ):
        needed("--out", str(out), "--resume")


def test_an_empty_file_changes_nothing(tmp_path: Path) -> None:
    assert needed("--config", write(tmp_path / "c.yaml", "# nothing\n")) == needed()


def test_yaml_is_plain(tmp_path: Path) -> None:
    values = yaml.safe_load(FinetuneConfig(**NEEDED).to_yaml())
    without_effect = {name for name, beside in BESIDE.items() if "objective" in beside}
    names = [f.name for f in dataclasses.fields(FinetuneConfig) if f.name not in without_effect]
    assert list(values) == ["format", *names]
    assert values["target_modules"] == list(PROJECTIONS)


# ---- resume ------------------------------------------------------------------------------------
def begun(out: Path, **values) -> FinetuneConfig:
    config = FinetuneConfig(model="m", data=("d",), out=str(out), **values)
    config.save(out)
    return config


def test_a_resumed_run_takes_its_options_from_the_folder(tmp_path: Path) -> None:
    config = begun(tmp_path, lora_r=3, learning_rate=1e-3, max_length=77)
    resumed = parse("--out", str(tmp_path), "--resume", "--device", "cpu", "--lora-r", "3")
    assert resumed == dataclasses.replace(config, resume=True, device="cpu")


@pytest.mark.parametrize("field", dataclasses.fields(FinetuneConfig), ids=lambda f: f.name)
def test_what_a_checkpoint_depends_on_cannot_change(tmp_path: Path, field: dataclasses.Field) -> None:
    if field.name in ("out", "resume", "lr_sweep"):
        return
    begun(tmp_path, **BESIDE.get(field.name, {}))
    words = ["--out", str(tmp_path), "--resume", *words_of(field.name, another(field))]
    if field not in fixed_options(FinetuneConfig):
        assert getattr(parse(*words), field.name) == another(field)
        return
    with pytest.raises(WgradError, match=f"{flag(field.name)}: the run in .* was begun with .*leave it out"):
        parse(*words)


def test_no_option_that_checkpoints_of_before_depend_on_is_forgotten() -> None:
    names = (
        "lora_r lora_alpha lora_dropout target_modules use_rslora full double_quant "
        "block_size batch_size gradient_accumulation_steps max_length packing "
        "loss_on eval_fraction eval_tokens seed compute adapter"
    )
    assert set(names.split()) <= {field.name for field in fixed_options(FinetuneConfig)}


def test_a_run_of_an_older_version_resumes_unless_it_used_what_is_gone(tmp_path: Path) -> None:
    needed("--out", str(tmp_path), "--lora-r", "3").save(tmp_path)
    before = (tmp_path / CONFIG_FILE).read_text()
    write(tmp_path / CONFIG_FILE, before + "sync_every: 1\nexchange_bits: 32\n")
    assert parse("--out", str(tmp_path), "--resume").lora_r == 3
    for key, value, what in (("sync_every", 4, "DiLoCo"), ("exchange_bits", 16, "16 bits")):
        write(tmp_path / CONFIG_FILE, f"{before}{key}: {value}\n")
        with pytest.raises(
            WgradError, match=rf"config.yaml: {key}: wgrad no longer has .*{what}.*; got {value}: remove"
        ):
            parse("--out", str(tmp_path), "--resume")


def test_without_resume_the_folder_says_nothing(tmp_path: Path) -> None:
    begun(tmp_path, lora_r=3)
    assert parse("--model", "m", "--data", "d", "--out", str(tmp_path)).lora_r == RunOptions().lora_r


@pytest.mark.parametrize(
    ("line", "argv", "words"),
    [
        ("data: absent.jsonl", "finetune --model {base} --out {out}", "data: no such file: absent.jsonl"),
        ("chat_template: absent", "finetune --model {base} --out {out} --data {data}", "chat_template: "),
        ("model: absent", "data show {data}", "model: no such folder: absent"),
        ("model: absent", "warm --device cpu", "model: no such folder: absent"),
    ],
)
def test_errors_of_a_run_name_the_key_of_the_file(
    line: str, argv: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The user did not give the option on the command line, so the key is what helps."""
    path, root = tmp_path / "run.yaml", Path(__file__).parents[2] / "examples"
    path.write_text(f"device: cpu\n{line}\n")
    places = {"base": root / "base_model", "out": tmp_path / "out", "data": root / "data" / "proverbs.jsonl"}
    given = [word.format(**places) for word in argv.split()]
    assert main([*given, "--config", str(path)]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"wgrad: error: --config: {path}: {words}")
    name = line.split(":")[0].replace("_", "-")
    assert main([*given, f"--{name}", "absent"]) == 2
    assert f"wgrad: error: --{name}: " in capsys.readouterr().err
