"""`wgrad generate`: continue a text with a model, with or without an adapter."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import chain, islice

from wgrad.device.shown import counted
from wgrad.train.inference.generation import check_positions, generate_batch
from wgrad.train.inference.guide import Grammars
from wgrad.train.inference.guide_options import guides_of
from wgrad.train.inference.guided import Anything, guided_batch, text_ids
from wgrad.train.inference.open_model import Opened, open_model
from wgrad.train.inference.text_models import build_text_models
from wgrad.train.model.model import Model
from wgrad.train.options.generate_config import GenerateConfig
from wgrad.train.terminal.output import harmless, say


def open_to_generate(args: GenerateConfig) -> Opened[GenerateConfig]:
    """Open the model, with messages on standard error. WgradError: it cannot be used."""
    opened = open_model(args)
    if opened.head_note:
        say(f"note: {opened.head_note}", "stderr")
    return opened


def build_model(opened: Opened[GenerateConfig], prompts: Sequence[Sequence[int]], guided: bool) -> Model:
    """Load the model and compile its shaders, with a progress bar for each.

    Args:
        opened: Model files, options and device.
        prompts: As many prompts as will be answered at once, as long as the longest.
        guided: Whether the host constrains the answers to a grammar.
    """
    args = opened.args
    positions = max(map(len, prompts)) + args.max_new_tokens

    def run(model: Model) -> None:  # three tokens: the first step runs directly, the second is recorded
        if guided:
            guides = [Anything(opened.config.vocab_size)] * len(prompts)
            guided_batch(model, prompts, min(args.max_new_tokens, 3), args, (), guides)
        else:
            generate_batch(model, prompts, min(args.max_new_tokens, 3), args)

    return build_text_models(opened, {"": args.adapter}, positions, run, len(prompts))[""]


def run_generate(args: GenerateConfig) -> int:
    """Stream the text to standard output, and everything else to standard error. Return the exit status."""
    opened = open_to_generate(args)
    args, tokenizer, display = opened.args, opened.tokenizer, opened.display
    if args.chat:
        prompt = tokenizer.encode_chat([{"role": "user", "content": args.prompt}])
    else:
        prompt = tokenizer.encode(args.prompt)
    check_positions(prompt, args.max_new_tokens, opened.config, "--max-new-tokens")
    guides = guides_of(args, Grammars(tokenizer, opened.config.vocab_size), tokenizer, [prompt])
    model = build_model(opened, [prompt], bool(guides))
    ids = text_ids(model, prompt, args.max_new_tokens, args, tokenizer.stop_ids, guides)
    with display.phase(f"reading the prompt of {counted(len(prompt), 'token')}"):  # its bar disappears before any text
        first = list(islice(ids, 1))
    shown = harmless if sys.stdout.isatty() else str
    if not args.chat:
        sys.stdout.write(shown(args.prompt))
    try:
        for text in tokenizer.decode_stream(prompt).pieces(chain(first, ids)):
            sys.stdout.write(shown(text))
            sys.stdout.flush()
    finally:  # also after Ctrl-C
        sys.stdout.write("\n")
    if use := model.expert_use:
        display.say(use)
    return 0
