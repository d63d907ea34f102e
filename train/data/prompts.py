"""Prompts of a file: JSON lines, each with "prompt" (text or messages) or "messages", tokenized in order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from wgrad.device.errors import WgradError
from wgrad.train.data.data_files import open_data
from wgrad.train.data.samples import parse_prompt
from wgrad.train.data.template_process import shared_process
from wgrad.train.data.tokenizer import Tokenizer

ANSWER = "generated"  # the key of the text that a model writes, beside those of its prompt


@dataclass(frozen=True)
class Prompt:
    """A prompt. value: the object of its line; ids: its tokens; where: file and line, for errors."""

    value: dict[str, Any]
    ids: list[int]
    where: str


def read_prompts(path: str, tokenizer: Tokenizer, chat: bool = False) -> tuple[list[Prompt], tuple[str, ...]]:
    """Return the prompts of --prompts ("-": standard input), and notes for the user about the file.

    Blank lines are skipped. chat: treat a prompt that is text as a user's message.

    Raises:
        WgradError: a line is wrong; the error names the first such line.
    """
    prompts = []
    try:
        with open_data(path, "--prompts") as file:
            if file.kind != "lines":
                names = {"text": "plain text", "array": "a JSON array", "objects": "JSON over several lines"}
                kind = names.get(file.kind, "JSON with a list" if file.kind == "wrapped" else file.kind.upper())
                raise WgradError(f"--prompts: {file.name} is {kind}: give JSON lines (.jsonl) with 'prompt'")
            for line, data in file.records():
                where = f"{file.name}:{line}"
                if not isinstance(data, bytes):
                    raise WgradError(f"{where}: {data}")
                if not data.strip():
                    continue
                value, text, whole = parse_prompt(data, file.name, line, chat, tokenizer)
                if ANSWER in value:
                    raise WgradError(f"{where}: has {ANSWER!r}, the key that the answer gets: rename it")
                ids = tokenizer.encode(text, add_special_tokens=whole)
                if not ids:
                    raise WgradError(f"{where}: the prompt has no token: give some text to go on from")
                prompts.append(Prompt(value, ids, where))
    finally:
        shared_process().close()  # no more templates to render
    if not prompts:
        raise WgradError(f"--prompts: {file.name} is empty: give a file with at least one prompt")
    return prompts, file.notes
