"""`wgrad eval --choices --shots`, and `--chat`: the prompts that lm-eval makes, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import wgrad.train.data.choices as module
from wgrad.device.errors import WgradError
from wgrad.train.commands.cli import main
from wgrad.train.data.choices import read_questions
from wgrad.train.data.tokenizer import load_tokenizer
from wgrad.train.options.choice_options import ChoiceOptions
from wgrad.train.options.eval_options import eval_options

QUESTIONS: list[dict[str, Any]] = [
    {"question": f"{word}?", "choices": ["no", word.upper()], "answer": word.upper()}
    for word in ("one", "two", "three", "four")
]
QUESTIONS += [QUESTIONS[1], {"question": "six?\n", "choices": ["no", "yes"], "answer": "yes"}]  # one is there twice
SHOTS = [
    {"question": f"{word}:", "choices": ["left", "right"], "answer": answer}
    for word, answer in (("up", 0), ("down", 1), ("out", 0))
]
# What fewshot_context of lm-eval 0.4.13 gave for these questions, tasks of fewshot_delimiter "\n\n" and
# target_delimiter " ", samplers "default" (fewshot seeds 1234 and 5) and "first_n".
OF_LM_EVAL: list[tuple[dict[str, Any], int, list[str]]] = [
    ({"shots": 2}, 1234, [
        "four? FOUR\n\ntwo? TWO\n\none?", "one? ONE\n\nsix?\n yes\n\ntwo?", "six?\n yes\n\none? ONE\n\nthree?",
        "three? THREE\n\ntwo? TWO\n\nfour?", "one? ONE\n\nsix?\n yes\n\ntwo?", "two? TWO\n\nfour? FOUR\n\nsix?\n",
    ]),
    ({"shots": 2}, 5, [
        "two? TWO\n\nthree? THREE\n\none?", "six?\n yes\n\none? ONE\n\ntwo?", "four? FOUR\n\ntwo? TWO\n\nthree?",
        "two? TWO\n\none? ONE\n\nfour?", "four? FOUR\n\nsix?\n yes\n\ntwo?", "two? TWO\n\none? ONE\n\nsix?\n",
    ]),
    ({"shots": 4}, 1234, [
        "four? FOUR\n\ntwo? TWO\n\nsix?\n yes\n\nthree? THREE\n\none?",
        "one? ONE\n\nsix?\n yes\n\nfour? FOUR\n\nthree? THREE\n\ntwo?",
        "six?\n yes\n\ntwo? TWO\n\nfour? FOUR\n\ntwo? TWO\n\nthree?",
        "two? TWO\n\none? ONE\n\nsix?\n yes\n\nthree? THREE\n\nfour?",
        "one? ONE\n\nfour? FOUR\n\nsix?\n yes\n\nthree? THREE\n\ntwo?",
        "two? TWO\n\nfour? FOUR\n\none? ONE\n\nthree? THREE\n\nsix?\n",
    ]),
    ({"shots": 2, "shots_from": "shots.jsonl"}, 1234, [
        "down: right\n\nup: left\n\none?", "up: left\n\nout: left\n\ntwo?", "out: left\n\nup: left\n\nthree?",
        "out: left\n\nup: left\n\nfour?", "up: left\n\ndown: right\n\ntwo?", "up: left\n\nout: left\n\nsix?\n",
    ]),
    ({"shots": 2, "shots_order": "first"}, 1234, [
        "two? TWO\n\nthree? THREE\n\none?", "one? ONE\n\nthree? THREE\n\ntwo?", "one? ONE\n\ntwo? TWO\n\nthree?",
        "one? ONE\n\ntwo? TWO\n\nfour?", "one? ONE\n\nthree? THREE\n\ntwo?", "one? ONE\n\ntwo? TWO\n\nsix?\n",
    ]),
    ({"shots": 1, "shots_from": "shots.jsonl", "shots_order": "first"}, 1234, [
        f"up: left\n\n{record['question']}" for record in QUESTIONS
    ]),
]  # fmt: skip


@pytest.fixture(autouse=True)
def files(write_lines: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """questions.jsonl and shots.jsonl in the folder that a test is in."""
    write_lines(*QUESTIONS, name="questions.jsonl")
    write_lines(*SHOTS, name="shots.jsonl")
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def prompts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the text before the choices of each question that is read."""
    seen: list[str] = []
    make = module._context

    def note(*args: Any) -> str:
        seen.append(make(*args))
        return seen[-1]

    monkeypatch.setattr(module, "_context", note)
    return seen


@pytest.mark.parametrize(("words", "seed", "wanted"), OF_LM_EVAL)
def test_the_prompts_are_those_of_lm_eval(
    words: dict[str, Any], seed: int, wanted: list[str], make_tokenizer: Any, prompts: list[str]
) -> None:
    tokenizer = load_tokenizer(make_tokenizer())
    options = ChoiceOptions(choices="questions.jsonl", **words)
    questions, _ = read_questions(options, tokenizer, 64, seed)
    assert prompts == wanted
    for question, prompt, record in zip(questions, prompts, QUESTIONS, strict=True):
        for choice, text in zip(question.choices, record["choices"], strict=True):
            assert list(choice.ids) == tokenizer.encode(f"{prompt} {text}")
            assert choice.count == len(choice.ids) - len(tokenizer.encode(prompt.rstrip()))


def test_in_a_chat_template_shots_are_turns(make_tokenizer: Any, prompts: list[str]) -> None:
    tokenizer = load_tokenizer(make_tokenizer(bos_in_json=True))
    options = ChoiceOptions(choices="questions.jsonl", shots=1, shots_order="first", chat=True, system="Be brief.")
    questions, _ = read_questions(options, tokenizer, 64, 0)
    turns = [("system", "Be brief."), ("user", "one?"), ("assistant", "ONE"), ("user", "six?\n")]
    text = "".join(f"<|im_start|>{role}\n{said}<|im_end|>\n" for role, said in turns) + "<|im_start|>assistant\n"
    assert prompts[-1] == text
    # No blank before the choice; the line's end goes with it; the tokenizer puts its bos before, as lm-eval has it.
    for choice, said in zip(questions[-1].choices, ("no", "yes"), strict=True):
        assert list(choice.ids) == tokenizer.encode(text + said) and choice.ids[0] == tokenizer.bos_id
        assert choice.count == len(choice.ids) - len(tokenizer.encode(text.rstrip()))


def test_the_command_says_what_stood_before(make_checkpoint: Any, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["eval", "--model", str(make_checkpoint()), "--device", "cpu", "--choices", "questions.jsonl"]
    assert main([*words, "--shots", "2", "--seed", "7"]) == 0
    assert capsys.readouterr().out.startswith("questions.jsonl: 6 questions, 2 shots before each; +- is ")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--shots", "6"], "--shots: without the one that is asked --choices has 5 questions; got 6: give fewer"),
        (["--shots", "4", "--shots-from", "shots.jsonl"], "--shots: --shots-from has 3 questions; got 4: give fewer"),
        (
            ["--shots", "6", "--shots-order", "first"],
            "--shots: without the one that is asked --choices has 5 questions",
        ),
        (["--shots", "-1"], "--shots: must not be negative; got -1"),
        (["--shots", "1", "--shots-order", "last"], "--shots-order: must be one of random, first; got 'last'"),
        (["--shots", "1", "--shots-from", "none.jsonl"], "--shots-from: no such file: none.jsonl"),
        (["--shots-from", "shots.jsonl"], "--shots-from: needs --shots: add it, or leave this out"),
        (
            ["--shots", "1", "--shots-order", "first", "--seed", "2"],
            "--seed: would be ignored: nothing is drawn with --shots-order first",
        ),
        (["--seed", "2"], "--seed: would be ignored: nothing is drawn without --shots"),
        (["--system", "Be brief."], "--system: needs --chat: add it, or leave this out"),
        (["--chat"], "has no chat template"),
    ],
)
def test_wrong_options_are_refused(words: list[str], message: str, make_checkpoint: Any, capsys: Any) -> None:
    model = str(make_checkpoint())
    assert main(["eval", "--model", model, "--device", "cpu", "--choices", "questions.jsonl", *words]) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_shots_are_drawn_by_the_seed_of_lm_eval_where_none_is_given() -> None:
    shots = ChoiceOptions(choices="q.jsonl", shots=1)
    assert eval_options({"model": "m"}, shots).seed == 1234
    assert eval_options({"model": "m", "data": "d"}, ChoiceOptions()).seed == 0
    assert eval_options({"model": "m", "seed": 5}, shots).seed == 5


def test_shots_and_chat_need_choices(capsys: Any) -> None:
    for words in (["--shots", "1"], ["--chat"]):
        assert main(["eval", "--model", "m", "--data", "d", *words]) == 2
        assert f"{words[0]}: needs --choices: add it" in capsys.readouterr().err


def test_too_few_others_where_a_question_is_there_twice(write_lines: Any, make_tokenizer: Any) -> None:
    write_lines(QUESTIONS[0], QUESTIONS[0], QUESTIONS[1], name="questions.jsonl")
    with pytest.raises(WgradError, match="^--shots: .* has 1 question; got 2"):
        read_questions(ChoiceOptions(choices="questions.jsonl", shots=2), load_tokenizer(make_tokenizer()), 64, 1234)
