"""`wgrad generate`: a text continued by a model, and an adapter if there is one."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import chain, islice

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
    """All that is said goes to stderr. WgradError."""
    opened = open_model(args)
    if opened.head_note:
        say(f"note: {opened.head_note}", "stderr")
    return opened


def build_model(opened: Opened[GenerateConfig], prompts: Sequence[Sequence[int]], guided: bool) -> Model:
    """The model on the device, its shaders compiled, with a bar for each of the two. prompts: as many as will be
    answered at once, as long as the longest. guided: the host watches their answers."""
    args = opened.args
    positions = max(map(len, prompts)) + args.max_new_tokens

    def run(model: Model) -> None:  # three tokens: the first step runs as it is, the second is recorded
        if guided:
            guides = [Anything(opened.config.vocab_size)] * len(prompts)
            guided_batch(model, prompts, min(args.max_new_tokens, 3), args, (), guides)
        else:
            generate_batch(model, prompts, min(args.max_new_tokens, 3), args)

    return build_text_models(opened, {"": args.adapter}, positions, run)[""]


def run_generate(args: GenerateConfig) -> int:
    """`wgrad generate`: text goes to stdout as it comes, everything else to stderr. -> exit status."""
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
    with display.phase(f"reading the prompt of {len(prompt)} tokens"):  # gone before any text
        first = list(islice(ids, 1))
    shown = harmless if sys.stdout.isatty() else str
    if not args.chat:
        sys.stdout.write(shown(args.prompt))
    try:
        for text in tokenizer.decode_stream(prompt).pieces(chain(first, ids)):
            sys.stdout.write(shown(text))
            sys.stdout.flush()
    finally:  # Ctrl-C ends the line as well
        sys.stdout.write("\n")
    return 0
