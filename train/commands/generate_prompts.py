"""`wgrad generate --prompts`: answer many prompts in batches; JSON lines in and out, in the file's order."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

from wgrad.device.errors import UnusableResult, WgradError
from wgrad.device.files import writing
from wgrad.train.commands.generate import build_model, open_to_generate
from wgrad.train.data.prompts import ANSWER, Prompt, read_prompts
from wgrad.train.inference.generation import check_positions, generate_batch
from wgrad.train.inference.guide import Grammars
from wgrad.train.inference.guide_options import guides_of
from wgrad.train.inference.guided import Guides, guided_batch
from wgrad.train.inference.open_model import Opened
from wgrad.train.model.model import Model
from wgrad.train.options.generate_config import GenerateConfig
from wgrad.train.terminal.interrupts import Interrupted
from wgrad.train.terminal.output import say

_SEEDS = 2**32


def run_prompts(args: GenerateConfig) -> int:
    """Write each line with its answer as soon as its batch is done, and return the exit status.

    Raises:
        WgradError: A prompt is wrong; no line is written.
        UnusableResult: The model's logits are not finite; earlier lines are written.
        Interrupted: Earlier lines are written.
    """
    if args.out is not None:
        _refuse_existing(args.out)
    opened = open_to_generate(args)
    prompts, notes = read_prompts(args.prompts or "", opened.tokenizer, args.chat)
    for note in notes:
        say(note, "stderr")
    for prompt in prompts:
        check_positions(prompt.ids, args.max_new_tokens, opened.config, prompt.where)
    longest = max((prompt.ids for prompt in prompts), key=len)
    grammars = Grammars(opened.tokenizer, opened.config.vocab_size)
    guides = guides_of(args, grammars, opened.tokenizer, [prompt.ids for prompt in prompts])
    model = build_model(opened, [longest] * min(args.batch_size, len(prompts)), bool(guides))
    done = 0
    try:
        with _lines_to(args.out) as write:
            for first in range(0, len(prompts), args.batch_size):
                group = prompts[first : first + args.batch_size]
                for value in _answer(opened, model, group, first, guides[first : first + args.batch_size]):
                    write(value)
                    done += 1
    except KeyboardInterrupt as asked:
        number = getattr(asked, "number", signal.SIGINT)
        raise Interrupted(number, f"interrupted: {done} of {len(prompts)} prompts are answered") from None
    return 0


def _answer(
    opened: Opened[GenerateConfig], model: Model, group: list[Prompt], first: int, guides: list[Guides]
) -> Iterator[dict[str, Any]]:
    """Yield the objects of a batch with their answers.

    Args:
        opened: Model files, options and device.
        model: The model.
        group: Prompts of the batch.
        first: Number of its first prompt. Each prompt has its own seed, so that --batch-size does not change answers.
        guides: Grammars that answers keep to.
    """
    args, tokenizer = opened.args, opened.tokenizer
    sampling = replace(args, seed=(args.seed + first) % _SEEDS)
    name = f"batch of prompts {first + 1} to {first + len(group)}"
    with opened.display.phase(name):  # its bar disappears before any line, which may go to the same terminal
        try:
            given = [prompt.ids for prompt in group], args.max_new_tokens, sampling, tokenizer.stop_ids
            texts = guided_batch(model, *given, guides) if guides else generate_batch(model, *given)
        except UnusableResult as error:
            others = f" and the {len(group) - 1} after it" if len(group) > 1 else ""
            raise UnusableResult(f"{group[0].where}{others}: {error}") from error
    for prompt, ids in zip(group, texts, strict=True):
        yield {**prompt.value, ANSWER: tokenizer.decode_after(prompt.ids, ids)}


def _refuse_existing(path: str) -> None:
    if os.path.lexists(path):
        raise WgradError(f"--out: {path} is there already: give the name of a new file")
    folder = os.path.dirname(path) or "."
    if not os.path.isdir(folder):
        raise WgradError(f"--out: {folder} is no folder: make it, or choose another --out")


@contextmanager
def _lines_to(path: str | None) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Yield a function that writes an object as a line to a new file, or to standard output, without buffering.

    Whatever interrupts it, the file has only whole lines. A file without lines is removed.
    """
    if path is None:
        yield _say
        return
    with writing(path):
        file = open(path, "xb", buffering=0)
    whole = 0

    def write(value: dict[str, Any]) -> None:
        nonlocal whole
        line = memoryview(_line(value, "utf-8").encode())
        with writing(path):
            while line:
                line = line[file.write(line) :]
        whole = file.tell()

    try:
        yield write
    finally:
        with file, suppress(OSError):
            file.truncate(whole)
        if not whole:
            with suppress(OSError):
                os.unlink(path)


def _say(value: dict[str, Any]) -> None:
    sys.stdout.write(_line(value, getattr(sys.stdout, "encoding", None) or "utf-8"))
    sys.stdout.flush()


def _line(value: dict[str, Any], encoding: str) -> str:
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode(encoding)
    except UnicodeEncodeError:  # the encoding lacks a character, or another key has half a surrogate pair
        text = json.dumps(value)
    return text + "\n"
