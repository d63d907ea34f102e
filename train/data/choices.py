"""Questions of a file with their choices, tokenised as lm-eval does.

A record is {"question": "...", "choices": ["...", ...], "answer": 1}: `answer` is the number of the right choice, from
0, or its text. Other keys are passed over. What is scored is the question, a blank, and a choice.
Source: lm-eval 0.4.13, a task of output_type multiple_choice with target_delimiter " " (api/task.py, api/model.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from wgrad.device.errors import WgradError
from wgrad.train.data.conversation_forms import type_name
from wgrad.train.data.data_files import Progress, open_data
from wgrad.train.data.samples import keys_of, of_line, parse_object, text_of
from wgrad.train.data.tokenizer import Tokenizer, check_text

_KEYS = ("question", "choices", "answer")
_DELIMITER = " "


@dataclass(frozen=True)
class Choice:
    """ids: the question's tokens and behind them `count` of the choice; characters: of the choice's own text."""

    ids: tuple[int, ...]
    count: int
    characters: int


@dataclass(frozen=True)
class Question:
    """Its choices, and the number of the right one."""

    choices: list[Choice]
    answer: int


def read_questions(
    path: str, tokenizer: Tokenizer, longest: int, progress: Progress | None = None
) -> tuple[list[Question], tuple[str, ...]]:
    """All questions of --choices, or of standard input for "-", and what a user should know of the file. Blank lines
    are passed over. longest: most tokens of a choice. WgradError, naming the first record that is wrong."""
    questions = []
    with open_data(path, "--choices", progress) as file:
        if file.kind not in ("lines", "array"):
            kind = {"text": "plain text"}.get(file.kind, file.kind.upper())
            raise WgradError(
                f"--choices: {file.name} is {kind}: give JSON lines (.jsonl) with 'question', 'choices' and 'answer'"
            )
        for line, data in file.records():
            with of_line(file.name, line):
                if isinstance(data, str):
                    raise WgradError(data)
                if isinstance(data, dict) or data.strip():
                    questions.append(_question(parse_object(data), tokenizer, longest))
    if not questions:
        raise WgradError(f"--choices: {file.name} is empty: give a file with at least one question")
    return questions, file.notes


def _question(value: dict[str, Any], tokenizer: Tokenizer, longest: int) -> Question:
    if not value.keys() >= set(_KEYS):
        raise WgradError(f"needs 'question', 'choices' and 'answer'; it has {keys_of(value)}")
    question, texts = text_of(value["question"], "question"), value["choices"]
    if not question.strip():
        raise WgradError("'question' is blank: write what the choices follow")
    if not isinstance(texts, list) or len(texts) < 2:
        raise WgradError(f"'choices' must be a list of at least two texts; got {_amount(texts)}")
    for number, text in enumerate(texts):
        check_text(question + text_of(text, f"choices[{number}]"))
    answer = _answer(value["answer"], texts)
    # Blanks at the end of a question are the begin of the choice: tokenizers join them to the word behind.
    context = question.rstrip()
    begins = tokenizer.special_tokens.get("bos_token") or tokenizer.special_tokens.get("eos_token")
    special = begins is None or not context.startswith(begins)
    before = tokenizer.encode(context, add_special_tokens=special)
    if not before:
        raise WgradError("'question' has no token: write what the choices follow")
    choices = []
    for number, text in enumerate(texts):
        ids = tokenizer.encode(question + _DELIMITER + text, add_special_tokens=special)
        if len(ids) <= len(before):
            raise WgradError(f"'choices[{number}]' adds no token to the question: write another text")
        if (count := len(ids) - len(before)) > longest:
            raise WgradError(f"'choices[{number}]' has {count} tokens: raise --seq-len, or shorten it")
        choices.append(Choice(tuple(ids), count, len(text)))
    return Question(choices, answer)


def _answer(answer: Any, texts: list[str]) -> int:
    if isinstance(answer, str) and answer in texts:
        return texts.index(answer)
    if isinstance(answer, int) and not isinstance(answer, bool) and 0 <= answer < len(texts):
        return answer
    got = answer if isinstance(answer, int) and not isinstance(answer, bool) else type_name(answer)
    got = repr(answer[:40]) if isinstance(answer, str) else got
    raise WgradError(f"'answer' must be a number from 0 to {len(texts) - 1} or the text of a choice; got {got}")


def _amount(value: Any) -> str:
    return f"{len(value)}" if isinstance(value, list) else type_name(value)
