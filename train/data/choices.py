"""Questions of a file with their choices, tokenized as lm-eval does.

A record is {"question": "...", "choices": ["...", ...], "answer": 1}: `answer` is the number of the right choice, from
0, or its text. Other keys are ignored. The text that is scored is the question, a blank and a choice, preceded by
`shots` other questions with their answers. In a chat template a question is a user's turn and an answer the model's.
Source: lm-eval 0.4.13, a task of output_type multiple_choice with target_delimiter " " and fewshot_delimiter "\\n\\n"
(api/task.py, api/samplers.py, api/model.py).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from wgrad.device.errors import WgradError
from wgrad.device.shown import counted
from wgrad.train.data.conversation_forms import type_name
from wgrad.train.data.data_files import JSON, Progress, open_data
from wgrad.train.data.samples import keys_of, of_line, parse_object, text_of
from wgrad.train.data.template_process import shared_process
from wgrad.train.data.tokenizer import Tokenizer, check_text
from wgrad.train.options.choice_options import ChoiceOptions

_KEYS = ("question", "choices", "answer")
_DELIMITER, _BETWEEN_SHOTS = " ", "\n\n"


@dataclass(frozen=True)
class Choice:
    """A choice after its question. ids: tokens of both; count: tokens of the choice; characters: of its text."""

    ids: tuple[int, ...]
    count: int
    characters: int


@dataclass(frozen=True)
class Question:
    """The choices of a question, and the number of the right one."""

    choices: list[Choice]
    answer: int


@dataclass(frozen=True)
class _Record:
    """A checked record. answer: number of the right choice; value: the record as read; line: its line in the file."""

    question: str
    choices: list[str]
    answer: int
    value: dict[str, Any]
    line: int


def read_questions(
    options: ChoiceOptions, tokenizer: Tokenizer, longest: int, seed: int, progress: Progress | None = None
) -> tuple[list[Question], tuple[str, ...]]:
    """Return the questions of --choices ("-": standard input), and notes for the user about the file.

    Blank lines are skipped.

    Args:
        longest: most tokens of a choice.
        seed: seed of the choice of shots.

    Raises:
        WgradError: a record is wrong; the error names the first such line.
    """
    records, name, notes = _read(options.choices, "--choices", progress)
    pool = records
    if options.shots_from:
        pool, _, more = _read(options.shots_from, "--shots-from", None)
        notes += more
    draw = _drawer(pool, options, seed)
    try:
        questions = []
        for record in records:
            with of_line(name, record.line):
                context = _context(record, draw(record), options, tokenizer)
                delimiter = "" if options.chat else _DELIMITER
                questions.append(_question(record, context, delimiter, tokenizer, longest))
    finally:
        shared_process().close()  # no more templates to render
    return questions, notes


def _read(path: str, option: str, progress: Progress | None) -> tuple[list[_Record], str, tuple[str, ...]]:
    records = []
    with open_data(path, option, progress) as file:
        if file.kind not in JSON:
            kind = {"text": "plain text"}.get(file.kind, file.kind.upper())
            raise WgradError(
                f"{option}: {file.name} is {kind}: give JSON lines (.jsonl) with 'question', 'choices' and 'answer'"
            )
        for line, data in file.records():
            with of_line(file.name, line):
                if isinstance(data, str):
                    raise WgradError(data)
                if isinstance(data, dict) or data.strip():
                    records.append(_record(parse_object(data), line))
    if not records:
        raise WgradError(f"{option}: {file.name} is empty: give a file with at least one question")
    return records, file.name, file.notes


def _record(value: dict[str, Any], line: int) -> _Record:
    if not value.keys() >= set(_KEYS):
        raise WgradError(f"needs 'question', 'choices' and 'answer'; it has {keys_of(value)}")
    question, texts = text_of(value["question"], "question"), value["choices"]
    if not question.strip():
        raise WgradError("'question' is blank: write the text that the choices follow")
    if not isinstance(texts, list) or len(texts) < 2:
        raise WgradError(f"'choices' must be a list of at least two texts; got {_amount(texts)}")
    for number, text in enumerate(texts):
        check_text(question + text_of(text, f"choices[{number}]"))
    return _Record(question, texts, _answer(value["answer"], texts), value, line)


# ---- the text before the choices ---------------------------------------------------------------
def _drawer(pool: Sequence[_Record], options: ChoiceOptions, seed: int) -> Callable[[_Record], list[_Record]]:
    """Return a function from a question to its shots. Call it in the order of the questions: draws are sequential."""
    generator, shots, own = random.Random(seed), options.shots, not options.shots_from

    def without(record: _Record, records: Iterable[_Record]) -> Iterator[_Record]:
        return (other for other in records if not own or other.value != record.value)

    def draw(record: _Record) -> list[_Record]:
        if options.shots_order == "first":
            found = list(islice(without(record, pool), shots))
        else:
            # One more than needed, since the question itself may be drawn. If it is drawn twice, draw from the rest.
            drawn = generator.sample(pool, shots + own) if len(pool) >= shots + own else ()
            found = list(without(record, drawn))[:shots]
            if len(found) < shots and len(rest := list(without(record, pool))) >= shots:
                found = generator.sample(rest, shots)
        if len(found) < shots:
            what = "--shots-from has" if options.shots_from else "without the one that is asked --choices has"
            count = sum(1 for _ in without(record, pool))
            raise WgradError(f"--shots: {what} {counted(count, 'question')}; got {shots}: give fewer, or a longer file")
        return found

    return draw if shots else lambda record: []


def _context(record: _Record, shots: Sequence[_Record], options: ChoiceOptions, tokenizer: Tokenizer) -> str:
    """Return the text before a choice: shots and question."""
    if not options.chat:
        solved = [f"{s.question}{_DELIMITER}{s.choices[s.answer]}{_BETWEEN_SHOTS}" for s in shots]
        return "".join(solved) + record.question
    turns = [{"role": "system", "content": options.system}] if options.system else []
    for shot in shots:
        turns += [
            {"role": "user", "content": shot.question},
            {"role": "assistant", "content": shot.choices[shot.answer]},
        ]
    turns.append({"role": "user", "content": record.question})
    return tokenizer.chat_template.render(turns, add_generation_prompt=True)


def _question(record: _Record, prompt: str, delimiter: str, tokenizer: Tokenizer, longest: int) -> Question:
    # Blanks at the end of a question count to the choice, since tokenizers join them to the word that follows.
    context = prompt.rstrip()
    begins = tokenizer.special_tokens.get("bos_token") or tokenizer.special_tokens.get("eos_token")
    special = begins is None or not context.startswith(begins)
    before = tokenizer.encode(context, add_special_tokens=special)
    if not before:
        raise WgradError("'question' has no token: write the text that the choices follow")
    choices = []
    for number, text in enumerate(record.choices):
        ids = tokenizer.encode(prompt + delimiter + text, add_special_tokens=special)
        if len(ids) <= len(before):
            raise WgradError(f"'choices[{number}]' adds no token to the question: write another text")
        if (count := len(ids) - len(before)) > longest:
            raise WgradError(f"'choices[{number}]' has {count} tokens: raise --max-length, or shorten it")
        choices.append(Choice(tuple(ids), count, len(text)))
    return Question(choices, record.answer)


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
