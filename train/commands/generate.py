"""`wgrad generate`: a text continued by a model, and an adapter if there is one."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from pathlib import Path

from wgrad.autograd.select_device import select_device
from wgrad.device.contract import Device
from wgrad.train.data.tokenizer import Tokenizer, load_tokenizer
from wgrad.train.files.hub import resolve_model
from wgrad.train.model.adapter_files import adapter_note, base_of_adapter
from wgrad.train.model.model import Model
from wgrad.train.model.model_config import ModelConfig, load_model_config
from wgrad.train.model.model_files import open_files
from wgrad.train.options.generate_config import GenerateConfig
from wgrad.train.run.build import build_frozen
from wgrad.train.run.compile_ahead import compile_ahead
from wgrad.train.run.compute import choose_compute
from wgrad.train.run.generation import check_positions, generate_batch, generate_ids
from wgrad.train.run.memory_limit import hold_to_limit
from wgrad.train.terminal.output import make_console, say
from wgrad.train.terminal.progress import Display


@dataclass(frozen=True)
class Opened:
    """What is known before weights are read. args: the command's, with --compute and --model settled."""

    args: GenerateConfig
    device: Device
    folder: Path
    config: ModelConfig
    tokenizer: Tokenizer
    display: Display


def open_model(args: GenerateConfig) -> Opened:
    """Device, configuration and tokenizer of what generates; all that is said goes to stderr. WgradError."""
    device = select_device(args.device)
    say(f"device: {device.description} ({device.reason})", "stderr")
    compute = choose_compute(args.compute, device)
    for line in compute.lines:
        say(line, "stderr")
    if remark := hold_to_limit(device, args.memory_limit):
        say(f"note: {remark}", "stderr")
    args = replace(args, compute=compute.dtype, model=args.model or base_of_adapter(args.adapter or ""))
    folder = resolve_model(args.model)
    config, tokenizer = load_model_config(folder), load_tokenizer(folder)
    tokenizer.check_fits(config.vocab_size)
    _, config, head_note = open_files(folder, config)
    if head_note:
        say(f"note: {head_note}", "stderr")
    return Opened(args, device, folder, config, tokenizer, Display(make_console("stderr")))


def build_model(opened: Opened, prompts: Sequence[Sequence[int]]) -> Model:
    """The model on the device, its shaders compiled, with a bar for each of the two. prompts: as many as will be
    answered at once, as long as the longest."""
    args, device, display = opened.args, opened.device, opened.display
    build = partial(
        build_frozen,
        opened.config,
        opened.folder,
        positions=max(map(len, prompts)) + args.max_new_tokens,
        adapter=args.adapter,
        quantize=args.quantize,
        compute=args.compute,
    )

    def run(dry: Device, stream: str) -> None:  # three tokens: the first step runs as it is, the second is recorded
        model = build(dry, contents=False, stream_weights=stream)
        generate_batch(model, prompts, min(args.max_new_tokens, 3), args)

    stream = compile_ahead(device, args.stream_weights, args.memory_limit, run, display)
    remarks = list[str]()
    with display.phase(f"loading {'and quantising ' if args.quantize else ''}weights", unit="tensors") as phase:
        model = build(device, progress=phase.update, stream_weights=stream, remarks=remarks)
    for remark in remarks:
        say(f"note: {remark}", "stderr")
    if note := adapter_note(model.adapter.config if model.adapter else None):
        say(f"note: {note}", "stderr")
    return model


def run_generate(args: GenerateConfig) -> int:
    """`wgrad generate`: text goes to stdout as it comes, everything else to stderr. -> exit status."""
    opened = open_model(args)
    args, tokenizer, display = opened.args, opened.tokenizer, opened.display
    if args.chat:
        prompt = tokenizer.encode_chat([{"role": "user", "content": args.prompt}])
    else:
        prompt = tokenizer.encode(args.prompt)
    check_positions(prompt, args.max_new_tokens, opened.config, "--max-new-tokens")
    model = build_model(opened, [prompt])
    decode = tokenizer.decode_stream(prompt)
    ids = generate_ids(model, prompt, args.max_new_tokens, args, tokenizer.stop_ids)
    with display.phase(f"reading the prompt of {len(prompt)} tokens"):  # gone before any text
        first = list(islice(ids, 1))
    if not args.chat:
        sys.stdout.write(args.prompt)
    try:
        for token in chain(first, ids):
            sys.stdout.write(decode(token))
            sys.stdout.flush()
    finally:  # Ctrl-C ends the line as well
        sys.stdout.write("\n")
    return 0
