"""Records of preferences: the texts to compare, and where the answer begins in each.

A record is one of
    {"prompt": ..., "chosen": ..., "rejected": ...}      a pair, or two examples with labels
    {"chosen": ..., "rejected": ...}                     a pair whose prompt is the common beginning of both
    {"prompt": ..., "completion": ..., "label": true}    a desirable or undesirable example
All of these values are texts, or all are lists of messages, with further variables of the template (`samples.py`).
Instead of the prompt there may be a question as in Alpaca, or a conversation; the record then counts as messages. The
answer is the text after the prompt with the template's generation prompt. Source of the forms and rules: TRL's "Dataset
formats"; tests/train/test_oracle_preferences.py compares with its trainers.
"""

from __future__ import annotations

import os.path
from collections.abc import Mapping, Sequence
from typing import Any

from wgrad.device.errors import WgradError
from wgrad.train.data.conversation_forms import question_turns, turns_of, with_system
from wgrad.train.data.left_out import left_out
from wgrad.train.data.record_keys import Keys, is_filled, is_learned
from wgrad.train.data.samples import (
    Sample,
    check_messages,
    conversation_of,
    keys_of,
    label_of,
    of_line,
    parse_object,
    text_of,
    without_null_columns,
)
from wgrad.train.data.tokenizer import Tokenizer, check_text
from wgrad.train.options.objectives import OBJECTIVES, objectives_with
from wgrad.train.options.record_names import ANSWERS, CONVERSATIONS, LABELS, PAIRS, QUESTIONS

_PAIR, _IMPLICIT = "preference pairs", "preference pairs whose prompt is what chosen and rejected begin with"
_UNPAIRED = ": each is one desirable example and one that is not"


def parse_preference(
    record: bytes | dict[str, Any], name: str, line: int, objective: str, tokenizer: Tokenizer
) -> list[Sample]:
    """Return the samples of a record (an object or JSON text); for a pair the chosen and the rejected one.

    Raises:
        BadLine: the record cannot be used.
        WgradError: no record with messages can be used.
    """
    kind = OBJECTIVES[objective]
    labeled = kind.records == "labels"
    with of_line(name, line):
        keys = Keys(without_null_columns(parse_object(record)))
        pair = next((names for names in PAIRS if names[0] in keys and names[1] in keys), None)
        if pair:
            form, prompt, answers = _pair(keys, *pair)
            labels = [1, -1] if labeled else [0, 0]
            form += _UNPAIRED if labeled else ""
        elif labeled and keys.named(LABELS) and (found := _labeled(keys)):
            form, (prompt, answers) = "KTO's records", found
            labels = [_label(keys)]
        else:
            raise WgradError(_needs(keys.value, objective))
        texts = [_text_and_start(prompt, answer, key, keys, tokenizer) for key, answer in answers.items()]
        if kind.records == "pairs":  # a template may begin one answer as the prompt ends, and not the other
            first = min(text[1] for text in texts)
            texts = [(text, first, turns, lost) for text, _, turns, lost in texts]
        whole = not isinstance(prompt, list)
        unread = keys.unread(tokenizer.templates.values())
        return [
            Sample(
                text,
                [(start, len(text))],
                whole,
                line,
                form,
                label,
                more=len(texts) == 2 and i == 0 and not label,
                framed=kind.framed,
                unread=() if i else unread,
                turns=turns,
                lost=lost,
            )
            for i, ((text, start, turns, lost), label) in enumerate(zip(texts, labels))
        ]


def _needs(value: dict[str, Any], objective: str) -> str:
    labeled = OBJECTIVES[objective].records == "labels"
    form = "'chosen' and 'rejected'" + (", or 'prompt', 'completion' and 'label'," if labeled else "")
    more = f"; a 'label' is for --objective {objectives_with('labels')}" if not labeled and "label" in value else ""
    return f"needs {form} for --objective {objective}; it has {keys_of(value)}{more}"


def _label(keys: Keys) -> int:
    name = keys.named(LABELS)
    label = label_of(keys.get(name))
    if label is None:
        raise WgradError(f"{name!r} must be true or false; got {str(keys.get(name))[:40]!r}")
    for other in LABELS:
        if other in keys and is_filled(part := keys.get(other)) and label_of(part) != label:
            raise WgradError(f"{name!r} and {other!r} differ: keep one of the two")
    return 1 if label else -1


def _labeled(keys: Keys) -> tuple[Any, dict[str, Any]] | None:
    """Return the prompt of a labeled example, and its answer by the answer's key; None if it has neither."""
    if "prompt" in keys and "completion" in keys:
        return keys.get("prompt"), {"completion": keys.get("completion")}
    if keys.named(QUESTIONS) and (name := keys.named(ANSWERS)):
        return question_turns(keys), {name: _said(keys.get(name), name)}
    if name := keys.named(CONVERSATIONS):
        turns = turns_of(keys.get(name), name, keys)
        if len(turns) < 2 or turns[-1].get("role") != "assistant":
            raise WgradError(f"{name!r} must end in a turn of the assistant, which the label is about")
        return turns[:-1], {name: turns[-1:]}
    return None


def _pair(keys: Keys, chosen_name: str, rejected_name: str) -> tuple[str, Any, dict[str, Any]]:
    """Return the form of a pair, its prompt, and both answers by their keys."""
    answers = {name: _listed(keys.get(name)) for name in (chosen_name, rejected_name)}
    chosen, rejected = answers.values()
    names = f"{chosen_name!r} and {rejected_name!r}"
    if chosen == rejected:
        raise WgradError(f"{names} are the same: there is nothing to prefer: remove the line")
    prompt, is_chat = keys.value.get("prompt"), isinstance(chosen, list) and isinstance(rejected, list)
    if isinstance(prompt, list) or (isinstance(prompt, str) and not is_chat):
        return _PAIR, keys.get("prompt"), answers
    if not is_chat and not (isinstance(chosen, str) and isinstance(rejected, str)):
        raise WgradError(f"{names} must both be text, or both lists of messages")
    at = _common(chosen, rejected)
    if not _have_the_question(answers, chosen[:at], keys) and (asked := _asked(keys)):
        return _PAIR, asked, {name: _said(answer, name) for name, answer in answers.items()}
    if is_chat and not at:
        raise WgradError(f"{names} begin with no message in common: give the prompt's as 'prompt'")
    return _IMPLICIT, chosen[:at], {chosen_name: chosen[at:], rejected_name: rejected[at:]}


def _listed(part: Any) -> Any:
    return [part] if isinstance(part, dict) else part


def _said(answer: Any, name: str) -> list[Any]:
    """Return an answer as messages."""
    return answer if isinstance(answer, list) else [{"role": "assistant", "content": text_of(answer, name)}]


def _have_the_question(answers: Mapping[str, Any], begin: Any, keys: Keys) -> bool:
    """Return whether both answers begin with the question. begin: their common beginning."""
    if isinstance(begin, list):
        first = [turns_of(answer, name, keys)[0] for name, answer in answers.items()]
        return any(turn["role"] != "assistant" for turn in first)
    question = keys.value.get(keys.named(QUESTIONS))
    return isinstance(question, str) and bool(question.strip()) and question.strip() in begin


def _asked(keys: Keys) -> list[dict[str, Any]] | None:
    """Return a pair's question from other keys than a prompt of the answers' kind; None if there is none."""
    if is_filled(keys.value.get("prompt")):
        return [{"role": "user", "content": text_of(keys.get("prompt"), "prompt")}]
    if (name := keys.named(CONVERSATIONS)) and is_filled(keys.value[name]):
        return turns_of(keys.get(name), name, keys)
    given = keys.value.get("input")
    if isinstance(given, dict) and "messages" in given:  # OpenAI's
        keys.take("input")
        return turns_of(keys.get("messages"), "messages", keys)
    if is_filled(keys.value.get(keys.named(QUESTIONS))):
        return question_turns(keys)
    return None


def _common(a: Sequence[Any], b: Sequence[Any]) -> int:
    """Return the length of the common beginning of two texts or lists of messages, which is their prompt.

    It leaves at least one character or message of the shorter, and a space before the answers belongs to them.
    """
    shorter = min(len(a), len(b))
    at = next((i for i in range(shorter) if a[i] != b[i]), max(shorter - 1, 0))
    return at - 1 if at and a[at - 1] == " " else at


def _text_and_start(
    prompt: Any, answer: Any, key: str, keys: Keys, tokenizer: Tokenizer
) -> tuple[str, int, tuple[tuple[str, bool], ...], tuple[str, ...]]:
    """Return the text that the model sees, where the answer begins in it, and `turns` and `lost` of its `Sample`."""
    roles, lost = list[tuple[str, bool]](), list[str]()
    if isinstance(prompt, list) != isinstance(answer, list):
        raise WgradError(f"'prompt' and {key!r} must both be text, or both lists of messages")
    if isinstance(prompt, list):
        turns, more = with_system(turns_of(prompt, "prompt", keys), keys), turns_of(answer, key, keys)
        check_messages(turns + more)
        for number, turn in enumerate(more, start=len(turns) + 1):
            if turn["role"] == "assistant" and not is_learned(turn, number):
                raise WgradError(f"turn {number} says that it is not trained on, and {key!r} is compared as a whole")
        before = tokenizer.chat_template.render(conversation_of(turns, keys), add_generation_prompt=True)
        text = tokenizer.chat_template.render(conversation_of(turns + more, keys))
        start = len(os.path.commonprefix([before, text]))
        if start == len(text):
            raise WgradError(f"the chat template leaves out {key!r}: there is nothing to learn: remove the line")
        roles = [(turn["role"], False) for turn in turns] + [(turn["role"], True) for turn in more]
        lost = left_out(more, text[start:])
    else:
        prompt = text_of(prompt, "prompt", may_be_empty=True)
        text, start = prompt + text_of(answer, key), len(prompt)
        keys.asked.append(prompt)
    check_text(text)
    return text, start, tuple(roles), tuple(lost)
