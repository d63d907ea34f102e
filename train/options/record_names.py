"""Names of the keys, or columns, of data records, and --columns, which translates other names.

Source of the names: TRL's "Dataset formats", OpenAI's fine-tuning files, the data sets Alpaca, Dolly, OpenOrca and
ShareGPT, and the documentation of LLaMA-Factory, Axolotl and Unsloth.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import product

from wgrad.device.errors import WgradError
from wgrad.train.options.option_names import did_you_mean

CONVERSATIONS = ("messages", "conversations", "conversation")
QUESTIONS, INPUTS = ("instruction", "question", "query"), ("input", "context")
ANSWERS = ("output", "response", "answer")
SYSTEMS = ("system", "system_prompt", "system_message")
PAIRS = (
    ("chosen", "rejected"),
    ("chosen_response", "rejected_response"),
    ("preferred_output", "non_preferred_output"),
)
LABELS = ("label", "kto_tag")
_MEDIA = ("image", "images", "video", "videos", "audio", "audios")

# Keys that make up a record (`samples.py` reads them).
FORMS = (
    *((name,) for name in CONVERSATIONS),
    ("prompt", "completion"),
    *product(QUESTIONS, ANSWERS),
    ("text",),
    *PAIRS,
)
IN_JSON = (*CONVERSATIONS, "tools", "functions", "documents", "chat_template_kwargs", "history")  # JSON text in CSV

# Keys of a turn or record that say whether it is learned: true or 1 means yes for LEARNED, and no for NOT_LEARNED.
LEARNED = (
    "train",
    "training",
    "trainable",
    "train_on_turn",
    "loss",
    "weight",
    "loss_weight",
    "loss_scale",
    "loss_mask",
)
NOT_LEARNED = ("masked", "mask", "ignore_loss")
DETAILS = ("train_detail", "training_detail")  # which characters of a turn are learned

# Keys that carry a part of the question: a record cannot be learned without them.
CARRYING = {"prompt", *QUESTIONS, *INPUTS, *SYSTEMS, "history", "choices", "options", "tools", "functions", "documents"}
CARRYING |= set(_MEDIA)

NAMES = {name for form in FORMS for name in form} | CARRYING
NAMES |= {*IN_JSON, *LABELS, *LEARNED, *NOT_LEARNED, *DETAILS}

COLUMNS_HELP = "names of keys or columns in the data: prompt=question,completion=answer; NAME= leaves one out"


def has_form(keys: Iterable[str]) -> bool:
    """Return whether records with these keys can be learned from."""
    there = set(keys)
    return any(there.issuperset(form) for form in FORMS)


def columns_of(values: Sequence[str]) -> dict[str, str]:
    """Parse the values of --columns, each OURS=THEIRS, or several separated by commas.

    Returns:
        The data's name for each of our names; "": the column is left out.

    Raises:
        WgradError: A value is malformed, or a name is unknown or given twice.
    """
    found: dict[str, str] = {}
    for pair in (part for value in values for part in re.split(r",\s*(?=\w+=)", value)):
        ours, sign, theirs = (part.strip() for part in pair.partition("="))
        if not sign or not ours:
            raise WgradError(f"--columns: expected OURS=THEIRS, got {pair[:80]!r}: for example prompt=question")
        if ours not in NAMES:
            near = did_you_mean(ours, NAMES)
            raise WgradError(
                f"--columns: {ours[:80]!r} is no column that training reads{near}: for example prompt, completion, "
                "messages, text"
            )
        if ours in found:
            raise WgradError(f"--columns: {ours!r} is given twice: give it once")
        found[ours] = theirs
    return found


A_COLUMN = ("must be pairs such as prompt=question", lambda values: columns_of(values) is not None)
