"""`wgrad eval --choices`: the log-likelihoods, acc and acc_norm of lm-eval, and one line for a record that is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from wgrad.device.errors import WgradError
from wgrad.train.commands.cli import main
from wgrad.train.data.choices import read_questions
from wgrad.train.data.tokenizer import Tokenizer, load_tokenizer
from wgrad.train.inference.choice_scores import choice_batches, log_likelihoods
from wgrad.train.inference.scoring import score
from wgrad.train.model.adapter_files import save_adapter
from wgrad.train.model.load_config import load_model_config
from wgrad.train.model.lora import LoraConfig, init_lora, linear_modules, lora_shapes
from wgrad.train.model.model import Model
from wgrad.train.options.choice_options import ChoiceOptions
from wgrad.train.options.finetune_config import RunOptions
from wgrad.train.step.build import build_frozen

RECORDS: list[dict[str, Any]] = [
    {"question": "A soft answer turneth away", "choices": ["wrath", "the sun and all the stars", "bread"], "answer": 0},
    {"question": "Go to the ant, thou ", "choices": ["sluggard; consider her ways", "king"], "answer": "king"},
    {"question": "Question: é?\nAnswer:", "choices": ["A", "B", "C", "D"], "answer": 3, "subject": "passed over"},
    {"question": "Hear, my son, " * 12, "choices": ["the law of thy mother", "nothing", "the"], "answer": 2},
    {"question": "A wise son maketh a glad", "choices": ["father", "mother", "father"], "answer": "father"},
]


def of_lm_eval(model: Model, tokenizer: Tokenizer, max_length: int) -> tuple[list[list[float]], dict[str, float]]:
    """Return lm-eval's sums and accuracies, with each text in its own forward.

    Source: TemplateLM._encode_pair, HFLM._loglikelihood_tokens and ConfigurableTask.process_results (0.4.13).
    """
    sums, right, right_norm = [], [], []
    for record in RECORDS:
        values = []
        for choice in record["choices"]:
            context, continuation = record["question"], " " + choice
            blanks = len(context) - len(context.rstrip())
            if blanks > 0:
                continuation = context[-blanks:] + continuation
                context = context[:-blanks]
            whole, before = tokenizer.encode(context + continuation), tokenizer.encode(context)
            count = len(whole) - len(before)
            kept = whole[-(max_length + 1) :]
            values.append(float(score(model, kept).given.of_tokens[-count:].astype(np.float64).sum()))
        sums.append(values)
        gold = record["answer"] if isinstance(record["answer"], int) else record["choices"].index(record["answer"])
        characters = np.array([float(len(choice)) for choice in record["choices"]])
        right.append(float(np.argmax(values) == gold))
        right_norm.append(float(np.argmax(np.array(values) / characters) == gold))
    return sums, {"acc": float(np.mean(right)), "acc_norm": float(np.mean(right_norm))}


@pytest.fixture
def adapter(make_checkpoint: Callable[..., Path], tmp_path: Path) -> Path:
    """One that changes every answer, and names its model."""
    model, lora = make_checkpoint(), LoraConfig(r=2, alpha=4.0)
    values = init_lora(lora_shapes(lora, linear_modules(load_model_config(model))), 0)
    rng = np.random.default_rng(0)
    values = {name: rng.standard_normal(v.shape, np.float32) for name, v in values.items()}
    save_adapter(tmp_path / "adapter", lora, values, str(model))
    return tmp_path / "adapter"


@pytest.fixture
def questions(write_lines: Callable[..., str]) -> str:
    return write_lines(*RECORDS[:2], "", *RECORDS[2:], name="questions.jsonl")


@pytest.mark.parametrize("seq_len", [192, 40])
def test_the_scores_are_those_of_lm_eval(
    seq_len: int, questions: str, adapter: Path, tmp_path: Path, cpu: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Packed or not, at any size of a batch; at 40 tokens a question is cut at its begin."""
    tokenizer, config = load_tokenizer(tmp_path / "model"), load_model_config(tmp_path / "model")
    expected = {}
    read, _ = read_questions(ChoiceOptions(choices=questions), tokenizer, seq_len, 0)
    for name, folder in (("base", None), ("adapter", str(adapter))):
        model = build_frozen(config, tmp_path / "model", cpu, positions=256, adapter=folder)
        sums, expected[name] = of_lm_eval(model, tokenizer, seq_len)
        for words in ({"batch_size": 2}, {"batch_size": 3, "packing": False}):
            options = RunOptions(max_length=seq_len, **words)  # type: ignore[arg-type]
            found = log_likelihoods(model, choice_batches(read, options, 0))
            values = np.array([found[choice] for question in read for choice in question.choices])
            assert np.abs(values - np.concatenate(sums)).max() < 2e-4  # of sums down to -270
    assert expected["base"]["acc"] != expected["adapter"]["acc"]
    asked = ["--adapter", str(adapter), "--choices", questions, "--max-length", str(seq_len), "--device", "cpu"]
    capsys.readouterr()
    assert main(["eval", *asked, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["questions"] == 5 and told["truncated"] == (3 if seq_len == 40 else 0)
    for name, entry in expected.items():
        assert {key: told[name][key] for key in entry} == entry
        assert told[name]["acc_stderr"] == pytest.approx((entry["acc"] * (1 - entry["acc"]) / 4) ** 0.5)
    assert main(["eval", *asked]) == 0
    first, head, *rows = capsys.readouterr().out.splitlines()
    cut = ", 3 choices cut to --max-length" if seq_len == 40 else ""
    assert first == f"{questions}: 5 questions{cut}; +- is the standard error" and head.split() == ["acc", "acc_norm"]
    for row, name in zip(rows, ("base", "adapter"), strict=True):
        shown = [f"{told[name][m]:.4f} +- {told[name][m + '_stderr']:.4f}" for m in ("acc", "acc_norm")]
        assert row.split() == [name, *" ".join(shown).split()]


GOOD = RECORDS[0]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not valid JSON"),
        ("[1]", "expected a JSON object, got a list"),
        ({"question": "x", "answer": 0}, "needs 'question', 'choices' and 'answer'; it has 'question', 'answer'"),
        (GOOD | {"question": 3}, "'question' must be text; got a number"),
        (GOOD | {"question": " \n"}, "'question' is blank"),
        (GOOD | {"choices": "AB"}, "'choices' must be a list of at least two texts; got text"),
        (GOOD | {"choices": ["A"]}, "'choices' must be a list of at least two texts; got 1"),
        (GOOD | {"choices": ["A", None]}, "'choices[1]' must be text; got null"),
        (GOOD | {"choices": ["", "A"]}, "'choices[0]' is empty"),
        (GOOD | {"choices": ["A", "\ud800"]}, "half of a surrogate pair"),
        (GOOD | {"choices": ["A", "b " * 99]}, "'choices[1]' has 1"),
        (GOOD | {"answer": 3}, "'answer' must be a number from 0 to 2 or the text of a choice; got 3"),
        (GOOD | {"answer": -1}, "got -1"),
        (GOOD | {"answer": True}, "got true or false"),
        (GOOD | {"answer": "Wrath"}, "got 'Wrath'"),
        (GOOD | {"answer": [0]}, "got a list"),
    ],
)
def test_a_wrong_record_is_named(line: Any, message: str, write_lines: Any, make_tokenizer: Any) -> None:
    data = write_lines(GOOD, "", line)
    with pytest.raises(WgradError) as caught:
        read_questions(ChoiceOptions(choices=data), load_tokenizer(make_tokenizer()), 64, 0)
    said = str(caught.value)
    assert said.startswith(f"{data}:3: ") and message in said and "\n" not in said


def test_a_question_that_begins_with_bos_gets_no_second(write_lines: Any, make_tokenizer: Any) -> None:
    tokenizer = load_tokenizer(make_tokenizer(bos_in_json=True))
    data = write_lines(GOOD, GOOD | {"question": "<s>" + GOOD["question"]})
    (plain, marked), _ = read_questions(ChoiceOptions(choices=data), tokenizer, 64, 0)
    assert plain == marked and plain.choices[0].ids.count(tokenizer.bos_id) == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--choices", "q.txt"], "--choices: q.txt is plain text: give JSON lines (.jsonl) with 'question'"),
        (["--choices", "none.jsonl"], "--choices: no such file: none.jsonl"),
        (["--choices", "blank.jsonl"], "--choices: blank.jsonl is empty: give a file with at least one question"),
        (["--choices", "q.txt", "--data", "q.txt"], "--data: would be ignored: --choices scores every question"),
        (["--choices", "q.txt", "--loss-on", "all"], "--loss-on: would be ignored"),
    ],
)
def test_wrong_options_are_refused(
    words: list[str], message: str, make_checkpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "q.txt").write_text("Who?")
    (tmp_path / "blank.jsonl").write_text("\n\n")
    assert main(["eval", "--model", str(make_checkpoint()), "--device", "cpu", *words]) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
