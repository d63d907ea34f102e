"""`wgrad.finetune`, `load` and `generate`: the command's options and results from Python, and nothing printed."""

from __future__ import annotations

import dataclasses
import gc
import inspect
import json
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest

import wgrad
from tests.train.conftest import SENTENCES, MakeCheckpoint
from wgrad.device.formats.nf4 import BLOCK_SIZES
from wgrad.train.commands.cli import main
from wgrad.train.library.finetune import Arguments
from wgrad.train.options.finetune_config import RunOptions
from wgrad.train.options.generate_config import GenerateConfig, PromptOptions
from wgrad.train.options.model_options import LoadOptions
from wgrad.train.output.metrics import read_steps
from wgrad.train.terminal.interrupts import Interrupts

pytestmark = pytest.mark.usefixtures("short_samples")

RECORDS = [{"text": text} for text in SENTENCES] + [{"prompt": "still", "completion": " waters run"}] * 4
OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "max_length": 32,
    "batch_size": 2,
    "gradient_accumulation_steps": 1,
    "max_steps": 4,
    "lora_r": 2,
    "sample": False,
    "eval_fraction": 0.25,
}


@pytest.mark.parametrize(
    "given",
    [{"max_steps": 10**5000}, {"max_steps": -(10**5000)}, {"learning_rate": 10**5000}, {"target_modules": [10**5000]},
     {"columns": {"a": 10**5000}}, {"memory_limit": 10**5000}, {"model": 10**5000}, {"callbacks": 10**5000}],
    ids=lambda given: next(iter(given)),
)  # fmt: skip
def test_a_number_that_python_does_not_write_is_an_error_in_one_line(given: dict[str, Any]) -> None:
    with pytest.raises(wgrad.WgradError, match="^[^\n]*$") as caught:
        wgrad.finetune(**{"model": "none", "data": "none", "out": "none", **given})
    assert len(str(caught.value)) < 500
    with pytest.raises(wgrad.WgradError, match="--trials: must be a whole number .* got a number of 16610 bits"):
        wgrad.sweep(model="none", data="none", out="none", vary={"seed": [1]}, trials=10**5000)


def adapter(out: Path) -> bytes:
    return (out / "adapter_model.safetensors").read_bytes()


@pytest.fixture
def model(make_checkpoint: MakeCheckpoint) -> str:
    return str(make_checkpoint())


def test_importing_is_light() -> None:
    """`import wgrad` imports none of what it depends on; the functions import no driver."""
    code = """
import sys, wgrad
heavy = {"numpy", "wgpu", "rich", "msgspec", "tokenizers", "jinja2", "yaml", "safetensors", "torch", "transformers"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
from wgrad import finetune, generate, load
assert not {"wgpu", "hip", "mpi4py", "torch", "transformers", "datasets", "starlette"} & set(sys.modules)
assert set(wgrad.__all__) <= set(dir(wgrad))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_options_are_the_commands() -> None:
    names = lambda kind: {f.name for f in dataclasses.fields(kind)}  # noqa: E731
    given = lambda function: set(inspect.signature(function).parameters)  # noqa: E731
    assert (
        given(wgrad.finetune)
        == names(RunOptions) | {"config", "callbacks", "loss", "metrics", "progress"}
        == names(Arguments)
    )
    of_the_command = {"prompts", "out", "batch_size"}
    assert given(wgrad.generate) == names(GenerateConfig) - of_the_command == names(PromptOptions)
    assert given(wgrad.load) == names(LoadOptions) == names(GenerateConfig) & names(LoadOptions) | {"context"}
    assert inspect.signature(wgrad.finetune).parameters["lora_r"].default == RunOptions().lora_r
    assert inspect.signature(wgrad.sweep).parameters["vary"].default is inspect.Parameter.empty


def test_the_text_of_help_is_of_python() -> None:
    """Defaults are as Python writes them, and words of the command line alone are not in it."""
    shown = [wgrad.finetune.__doc__, wgrad.sweep.__doc__, wgrad.load.__doc__, wgrad.generate.__doc__]
    text = " ".join(" ".join(map(str, shown)).split())
    assert "Default: False." in text and "Default: 'skip'." in text
    for words in (
        "object at 0x",
        "<factory>",
        "everal times for",
        "repeat the option",
        "standard input",
        "Default: no.",
    ):
        assert words not in text, words


def test_records_are_learned_as_the_command_learns_a_file(
    model: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    words = [w for k, v in OPTIONS.items() if k != "sample" for w in ("--" + k.replace("_", "-"), str(v))]
    files = ["--model", model, "--data", str(data), "--out", str(tmp_path / "command"), "--no-sample"]
    assert main(["finetune", *files, *words]) == 0
    capfd.readouterr()
    result = wgrad.finetune(model=model, data=iter(RECORDS), out=tmp_path / "library", **OPTIONS)
    assert capfd.readouterr() == ("", "")
    assert adapter(result.out) == adapter(tmp_path / "command")
    told = json.loads((tmp_path / "command" / "results.json").read_text())
    assert (result.held_out_loss_before, result.held_out_loss_after) == (
        told["held_out_loss_before"],
        told["held_out_loss_after"],
    )
    assert (result.steps, result.result_step, result.skipped_steps) == (4, 4, 0)
    assert not result.stopped_early and not result.stopped_by_callback
    assert [r.loss for r in result.metrics()] == [r["loss"] for r in read_steps(tmp_path / "command/metrics.jsonl")]
    wgrad.finetune(model=model, data=data, out=tmp_path / "shown", progress=True, **OPTIONS | {"max_steps": 1})
    assert "training: 1 step, " in capfd.readouterr().out


class Watching(wgrad.Callback):
    """Keeps what it is told; ends the run after a step."""

    def __init__(self, last: int | None = None) -> None:
        self.reports: list[Any] = []
        self.last = last

    def on_step(self, report: wgrad.StepReport) -> bool | None:
        self.reports.append(report)
        return report.step == self.last

    def on_evaluation(self, report: wgrad.EvaluationReport) -> bool | None:
        self.reports.append(report)
        return None

    def on_save(self, report: wgrad.SaveReport) -> bool | None:
        assert (report.folder / "adapter_config.json").exists()
        self.reports.append(report)
        return None


def test_callbacks_are_told_and_end_a_run(model: str, tmp_path: Path) -> None:
    options = OPTIONS | {"model": model, "data": RECORDS, "save_steps": 1, "eval_steps": 2}
    options |= {"max_steps": None, "epochs": 2}
    whole = wgrad.finetune(out=tmp_path / "whole", **options)
    watching, losses = Watching(last=3), list[float]()
    stopped = wgrad.finetune(
        out=tmp_path / "stopped", callbacks=[watching, lambda report: losses.append(report.loss)], **options
    )
    told = [(type(r).__name__.removesuffix("Report"), r.step) for r in watching.reports]
    steps = [("Step", 1), ("Save", 1), ("Step", 2), ("Evaluation", 2), ("Save", 2), ("Step", 3), ("Save", 3)]
    assert told == [("Evaluation", 0), *steps, ("Evaluation", 3)]
    assert (stopped.steps, stopped.stopped_by_callback, stopped.stopped_early) == (3, True, False)
    reports = [r for r in watching.reports if isinstance(r, wgrad.StepReport)]
    assert losses == [r.loss for r in reports] == [r.loss for r in stopped.metrics()]
    assert [(r.step, r.loss, r.lr) for r in reports] == [(r.step, r.loss, r.lr) for r in whole.metrics()[:3]]
    assert {r.total_steps for r in reports} == {whole.steps} != {3} and all(r.tokens_per_second > 0 for r in reports)
    assert watching.reports[0].loss == whole.held_out_loss_before
    assert watching.reports[-1].loss == stopped.held_out_loss_after
    again = wgrad.finetune(out=tmp_path / "stopped", resume=True, **options)
    assert again.steps == whole.steps and not again.stopped_by_callback
    assert adapter(again.out) == adapter(whole.out)


@pytest.mark.parametrize("answer, steps", [(np.True_, 1), (np.False_, 4), (1, 4), (None, 4)])
def test_a_callback_ends_the_run_only_by_true(model: str, tmp_path: Path, answer: Any, steps: int) -> None:
    done = wgrad.finetune(model=model, data=RECORDS, out=tmp_path / "out", callbacks=[lambda report: answer], **OPTIONS)
    assert (done.steps, done.stopped_by_callback) == (steps, steps == 1)


def test_records_that_are_left_out_are_told(model: str, tmp_path: Path) -> None:
    data = [*RECORDS, {"txt": "x"}, {"text": "a " * 100}]
    with pytest.warns(UserWarning, match="1 truncated .*; 1 bad line skipped; skipped .*needs 'text'"):
        wgrad.finetune(model=model, data=data, out=tmp_path / "out", **OPTIONS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wgrad.finetune(model=model, data=RECORDS, out=tmp_path / "other", **OPTIONS)


def test_an_exception_of_a_callback_reaches_the_caller(model: str, tmp_path: Path) -> None:
    def fail(report: wgrad.StepReport) -> None:
        if report.step == 2:
            raise LookupError("mine")

    options = OPTIONS | {"model": model, "data": RECORDS, "out": tmp_path / "out", "save_steps": 1}
    with pytest.raises(LookupError, match="mine"):
        wgrad.finetune(callbacks=[fail], **options)
    assert wgrad.finetune(resume=True, **options).steps == 4  # the folder is free again, and step 1 was saved


class Table:
    """Gives rows as a data set of the package datasets does: each has every column."""

    column_names = ("text", "prompt", "completion")

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return ({name: record.get(name) for name in self.column_names} for record in RECORDS)


def test_rows_of_a_table_have_nulls(model: str, tmp_path: Path) -> None:
    given: tuple[Any, ...] = (RECORDS, Table())
    losses = [
        wgrad.finetune(model=model, data=data, out=tmp_path / str(number), **OPTIONS).held_out_loss_after
        for number, data in enumerate(given)
    ]
    assert losses[0] == losses[1]


@pytest.mark.oracle
def test_a_data_set_of_the_package_datasets_is_read(model: str, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list(list(Table()))
    losses = [
        wgrad.finetune(model=model, data=data, out=tmp_path / str(number), **OPTIONS).held_out_loss_after
        for number, data in enumerate((RECORDS, rows, rows.to_iterable_dataset()))
    ]
    assert losses[0] == losses[1] == losses[2]


def wrong(**given: Any) -> str:
    with pytest.raises(wgrad.WgradError) as caught:
        wgrad.finetune(**given)
    return str(caught.value)


class Misspelled(wgrad.Callback):
    def on_steps(self, report: wgrad.StepReport) -> None: ...


class FromElsewhere(wgrad.Callback):
    def on_train_begin(self) -> None: ...


class Asynchronous(wgrad.Callback):
    async def on_step(self, report: wgrad.StepReport) -> bool | None: ...  # type: ignore[override]


class Greedy(wgrad.Callback):
    def on_save(self, report: Any, more: Any) -> None: ...  # type: ignore[override]


class Underived:
    def on_step(self, report: Any) -> None: ...

    def __call__(self, report: Any) -> None: ...


WRONG_CALLBACKS: list[tuple[Any, str]] = [
    (
        Misspelled(),
        "a run never calls Misspelled.on_steps (did you mean on_step?): the methods are on_step, on_learning_rate",
    ),
    (FromElsewhere(), "a run never calls FromElsewhere.on_train_begin"),
    (Asynchronous(), "Asynchronous.on_step is asynchronous, and a run awaits nothing"),
    (Greedy(), "Greedy.on_save must take one argument, the report"),
    (Underived(), "Underived has on_step, which only a wgrad.Callback is asked for"),
    (lambda: None, "a function of a step's report must take one argument"),
]


def test_mistakes_are_told_as_the_command_tells_them(model: str, tmp_path: Path) -> None:
    rest = {"model": model, "out": tmp_path / "out", **OPTIONS}
    assert wrong(modle=model) == "finetune: unknown argument 'modle' (did you mean model?)"
    assert wrong(learning_rat=1) == "finetune: unknown argument 'learning_rat' (did you mean learning_rate?)"
    assert wrong(**rest) == "--data is required: give it, or set 'data' in a --config file"
    assert wrong(**rest, data=RECORDS, learning_rate=-1) == "--learning-rate: must be above 0; got -1"
    assert wrong(**rest, data={"text": "x"}).startswith("data: expected a path or an iterable of records, got dict")
    assert "got dict" in wrong(**rest, data={"train": {"train": RECORDS}})
    assert wrong(**rest, data=[]) == "--data: <data> is empty: give a file with at least one example"
    assert "<data>:2: expected a mapping" in wrong(**rest, data=[{"text": "a b"}, 3, 4])
    assert "<data>:1: needs 'text', 'prompt'" in wrong(**rest, data=[{"txt": "a"}])
    assert wrong(**rest, data=RECORDS, ranks=2).startswith("--ranks: starts the command anew")
    assert wrong(**rest, data=RECORDS, callbacks=[3]).startswith("callbacks: must be wgrad.Callback objects")
    assert "put it into a list" in wrong(**rest, data=RECORDS, callbacks=Watching())
    assert "call it, to make one" in wrong(**rest, data=RECORDS, callbacks=[Watching])
    for made, words in WRONG_CALLBACKS:
        assert words in wrong(**rest, data=RECORDS, callbacks=[made])
    assert not (tmp_path / "out").exists()


def test_a_loaded_model_writes_and_scores(model: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    trained = wgrad.finetune(model=model, data=RECORDS, out=tmp_path / "out", learning_rate=0.02, **OPTIONS)
    command = ["--model", model, "--adapter", str(trained.out), "--device", "cpu"]
    prompts = ["the quick", "all that glitters is"]
    how: dict[str, Any] = {"max_new_tokens": 6, "seed": 3}
    said = ["--prompt", prompts[0], "--max-new-tokens", "6", "--seed", "3"]
    assert main(["generate", *command, *said]) == 0
    text = capfd.readouterr().out
    with wgrad.load(model, trained.out, device="cpu", context=40) as loaded:
        one = loaded.generate(prompts[0], **how)
        assert text == prompts[0] + one.text + "\n"
        assert "".join(loaded.stream(prompts[0], **how)) == one.text
        assert wgrad.generate(model=model, adapter=trained.out, device="cpu", prompt=prompts[0], **how) == one
        assert one.finish == "length" and len(one.tokens) == 6
        alone = [loaded.generate(p, max_new_tokens=6, seed=3 + n) for n, p in enumerate(prompts * 2)]
        assert [a.text for a in loaded.generate_many(prompts * 2, batch_size=3, **how)] == [a.text for a in alone]
        record = {"prompt": "still", "completion": " waters run deep"}
        scores = loaded.score(record)
        assert capfd.readouterr() == ("", "")
        (tmp_path / "one.jsonl").write_text(json.dumps(record))
        assert main(["eval", *command, "--data", str(tmp_path / "one.jsonl"), "--json"]) == 0
        measured = json.loads(capfd.readouterr().out)
        assert scores.loss == pytest.approx(measured["adapter"]["nats"], rel=1e-6)
        assert scores.tokens[0].log_prob is None and not scores.tokens[0].in_loss
        assert "".join(t.text for t in scores.tokens).startswith("still waters run deep")
        plain = loaded.score("still waters run deep")
        assert all(t.in_loss for t in plain.tokens) and plain.perplexity > 1
        with pytest.raises(wgrad.WgradError, match="at most the 40 that the model was loaded for"):
            loaded.generate("the", max_new_tokens=40)
        with pytest.raises(wgrad.WgradError, match="generate: unknown argument 'temp' .did you mean temperature"):
            loaded.generate("the", temp=1)  # type: ignore[call-arg]
        with pytest.raises(wgrad.WgradError, match="--model: the tokenizer of .* has no chat template"):
            loaded.generate([{"role": "user", "content": "hello"}])
        for wrong in (None, [1, 2], 5):
            with pytest.raises(wgrad.WgradError, match="score: expected a text or a record, got"):
                loaded.score(wrong)  # type: ignore[arg-type]
        several: Any = ["a", "b"]
        for function in (loaded.generate, loaded.stream, lambda texts: wgrad.generate(model="x", prompt=texts)):
            with pytest.raises(wgrad.WgradError, match="got a list of 2 texts: load the model and use generate_many"):
                function(several)
        with pytest.raises(wgrad.WgradError, match="generate_many: expected a list of prompts, got int"):
            loaded.generate_many(5)  # type: ignore[arg-type]
        with pytest.raises(wgrad.WgradError, match="a text must have 2 to 40 tokens"):
            loaded.score("x " * 50)
    with pytest.raises(wgrad.WgradError, match="load: model is given twice, with its name and without"):
        wgrad.load("chatm", model=model)  # type: ignore[misc]
    with pytest.raises(wgrad.WgradError, match="closed: load it again"):
        loaded.generate("the")


def test_closing_a_model_frees_its_memory(model: str, wgpu_device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing gives the device's memory back; what little a recording used as scratch stays for the next."""
    monkeypatch.setattr("wgrad.train.inference.open_model.select_device", lambda spec, needs=None: wgpu_device)
    gc.collect()  # what other tests left on their device goes now or stays
    before = wgpu_device.memory()
    loaded = wgrad.load(model, context=32)
    loaded.generate("the", max_new_tokens=3)
    taken = wgpu_device.memory().in_use_bytes - before.in_use_bytes
    loaded.close()
    after = wgpu_device.memory()
    assert after.in_use_bytes - before.in_use_bytes < taken / 10
    assert after.reserved_bytes - before.reserved_bytes < taken / 10


def test_a_second_request_ends_no_process_that_is_not_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command ends itself where its main thread does not come back; a notebook's process is another's."""
    ended = list[int]()
    monkeypatch.setattr("wgrad.train.terminal.interrupts.GRACE", 0.0)
    monkeypatch.setattr("wgrad.train.terminal.interrupts.os._exit", ended.append)
    for ends_process in (False, True):
        Interrupts(lambda text: None, ends_process=ends_process)._end_late(2)
    assert ended == [130]


def test_ranks_take_no_callbacks(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of several processes would have to agree on what each of them answers."""
    world = nullcontext(SimpleNamespace(alone=False, size=2))
    monkeypatch.setattr("wgrad.train.run.finetune.open_world", lambda tell: world)
    options = OPTIONS | {"model": model, "data": RECORDS, "out": tmp_path / "out"}
    assert "this is one of 2 ranks: leave them out" in wrong(**options, callbacks=[Watching()])


def test_options_that_are_one_of_a_few_are_literal_types() -> None:
    """So that editors and type checkers know the values; they are those of the command's choices."""
    hints = {name: p.annotation for name, p in inspect.signature(wgrad.finetune).parameters.items()}
    chosen = [field for field in dataclasses.fields(RunOptions) if field.metadata["choices"]]
    assert {"lr_scheduler_type", "objective", "compute"} <= {field.name for field in chosen}
    for field in chosen:
        given = hints[field.name]
        if type(None) in get_args(given):  # by default none of them
            (given,) = (kind for kind in get_args(given) if kind is not type(None))
        assert get_args(given) == tuple(field.metadata["choices"]), field.name
    assert inspect.signature(wgrad.load).parameters["compute"].annotation == hints["compute"]
    assert get_args(hints["block_size"]) == BLOCK_SIZES
