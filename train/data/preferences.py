"""A record of preferences -> the texts that are compared, and where the answer begins in each.

The record is one of
    {"prompt": ..., "chosen": ..., "rejected": ...}      a pair (dpo, orpo; kto takes it for two examples)
    {"chosen": ..., "rejected": ...}                     a pair whose prompt is what both begin with
    {"prompt": ..., "completion": ..., "label": true}    an example that is desirable, or not (kto)
and each of these is text, or all are lists of messages, with what else a template is given (`samples.py`). The answer
is all that follows the prompt as the template ends it for generation. Source of the forms and of these rules: TRL's
"Dataset formats"; tests/train/test_oracle_preferences.py compares with its trainers.
"""

from __future__ import annotations

import os.path
from collections.abc import Sequence
from typing import Any

from wgrad.device.errors import WgradError
from wgrad.train.data.samples import (
    Sample,
    conversation_of,
    keys_of,
    label_of,
    messages_of,
    of_line,
    parse_object,
    text_of,
    without_null_columns,
)
from wgrad.train.data.tokenizer import Tokenizer, check_text
from wgrad.train.options.finetune_config import KTO, ORPO

_PAIR, _IMPLICIT = "preference pairs", "preference pairs whose prompt is what chosen and rejected begin with"
_UNPAIRED = ": each is one desirable example and one that is not"


def parse_preference(
    record: bytes | dict[str, Any], name: str, line: int, objective: str, tokenizer: Tokenizer
) -> list[Sample]:
    """The samples of a record, decoded or JSON text: of a pair the chosen and the rejected one. BadLine; WgradError
    where no record with messages could be used."""
    with of_line(name, line):
        value = without_null_columns(parse_object(record))
        if "chosen" in value and "rejected" in value:
            form, prompt, answers = _pair(value)
            labels = [1, -1] if objective == KTO else [0, 0]
            form += _UNPAIRED if objective == KTO else ""
        elif objective == KTO and {"prompt", "completion", "label"} <= value.keys():
            form, prompt, answers = "KTO's records", value["prompt"], {"completion": value["completion"]}
            labels = [_label(value)]
        else:
            raise WgradError(_needs(value, objective))
        texts = [_text_and_start(prompt, answer, key, value, tokenizer) for key, answer in answers.items()]
        whole = not isinstance(prompt, list)
        return [
            Sample(
                text,
                [(start, len(text))],
                whole,
                line,
                form,
                label,
                more=len(texts) == 2 and i == 0 and not label,
                framed=objective == ORPO,
            )
            for i, ((text, start), label) in enumerate(zip(texts, labels))
        ]


def _needs(value: dict[str, Any], objective: str) -> str:
    form = "'chosen' and 'rejected'" + (", or 'prompt', 'completion' and 'label'," if objective == KTO else "")
    more = "; a 'label' is for --objective kto" if objective != KTO and "label" in value else ""
    return f"needs {form} for --objective {objective}; it has {keys_of(value)}{more}"


def _label(value: dict[str, Any]) -> int:
    label = label_of(value)
    if label is None:
        raise WgradError(f"'label' must be true or false; got {str(value['label'])[:40]!r}")
    return 1 if label else -1


def _pair(value: dict[str, Any]) -> tuple[str, Any, dict[str, Any]]:
    """-> its form, the prompt, and both answers by their names."""
    chosen, rejected, prompt = value["chosen"], value["rejected"], value.get("prompt")
    if chosen == rejected:
        raise WgradError("'chosen' and 'rejected' are the same: there is nothing to prefer: remove the line")
    if prompt is not None and isinstance(prompt, list) == isinstance(chosen, list):
        return _PAIR, prompt, {"chosen": chosen, "rejected": rejected}
    is_chat = isinstance(chosen, list) and isinstance(rejected, list)
    if not is_chat and not (isinstance(chosen, str) and isinstance(rejected, str)):
        raise WgradError("'chosen' and 'rejected' must both be text, or both lists of messages")
    at = _common(chosen, rejected)
    if is_chat and not at:
        raise WgradError("'chosen' and 'rejected' begin with no message in common: give the prompt's as 'prompt'")
    return _IMPLICIT, chosen[:at], {"chosen": chosen[at:], "rejected": rejected[at:]}


def _common(a: Sequence[Any], b: Sequence[Any]) -> int:
    """How much of two texts, or lists of messages, is the prompt: what they begin with alike, up to the last character
    or message of the shorter. A space before the answers is theirs."""
    shorter = min(len(a), len(b))
    at = next((i for i in range(shorter) if a[i] != b[i]), max(shorter - 1, 0))
    return at - 1 if at and a[at - 1] == " " else at


def _text_and_start(prompt: Any, answer: Any, key: str, value: dict[str, Any], tokenizer: Tokenizer) -> tuple[str, int]:
    """-> the text that the model sees, and where the answer begins in it."""
    if isinstance(prompt, list) != isinstance(answer, list):
        raise WgradError(f"'prompt' and {key!r} must both be text, or both lists of messages")
    if isinstance(prompt, list):
        turns, more = messages_of(prompt, "prompt"), messages_of(answer, key)
        before = tokenizer.chat_template.render(conversation_of(turns, value), add_generation_prompt=True)
        text = tokenizer.chat_template.render(conversation_of(turns + more, value))
        start = len(os.path.commonprefix([before, text]))
        if start == len(text):
            raise WgradError(f"the chat template leaves out {key!r}: there is nothing to learn: remove the line")
    else:
        prompt = text_of(prompt, "prompt", may_be_empty=True)
        text, start = prompt + text_of(answer, key), len(prompt)
    check_text(text)
    return text, start
