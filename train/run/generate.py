"""Text from a model, token by token, with a cache of keys and values; and the command `wgrad generate`."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from wgrad.autograd import functional as F
from wgrad.autograd.select_device import select_device
from wgrad.autograd.tensor import no_grad
from wgrad.device.contract import Device
from wgrad.device.errors import UnusableResult, WgradError
from wgrad.train.data.tokenizer import Tokenizer, load_tokenizer
from wgrad.train.files.adapter import adapter_note
from wgrad.train.files.hub import resolve_model
from wgrad.train.files.weights import Checkpoint, use_own_head
from wgrad.train.model.build import build_frozen
from wgrad.train.model.model import Inputs, KVCache, Model
from wgrad.train.model.model_config import ModelConfig, load_model_config
from wgrad.train.run.generate_config import GenerateConfig
from wgrad.train.run.loop import Recorded
from wgrad.train.run.output import make_console, say
from wgrad.train.run.progress import Display

LOOK_EVERY = 64  # tokens between two looks at whether logits are finite: each is a wait for the device


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen. temperature 0: the likeliest. top_k 0 and top_p 1: off."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0


def generate_ids(
    model: Model,
    prompt: Sequence[int],
    max_new_tokens: int,
    sampling: Sampling,
    stop_ids: Collection[int] = (),
) -> Iterator[int]:
    """Yield the ids that follow `prompt`, up to one of `stop_ids` (which is not yielded).

    The rotary tables of `model` must hold len(prompt) + max_new_tokens positions. The decoding step is recorded and
    replayed: each token costs the host three small writes and one read. UnusableResult where logits are not finite.
    """
    if not prompt:
        raise WgradError("--prompt: has no token: give some text to go on from")
    device, length = model.device, len(prompt) + max_new_tokens
    if length > model.cos.shape[0]:
        raise ValueError(f"{length} tokens, but the model was built for {model.cos.shape[0]} positions")
    cache = KVCache.empty(model.config, 1, length, model.dtype, device)
    uniform = device.zeros((1,))
    generator = np.random.Generator(np.random.PCG64(sampling.seed))
    options: dict[str, Any] = {k: v for k, v in vars(sampling).items() if k != "seed"}

    def draw() -> None:
        device.write(uniform, generator.random(1, np.float32))

    def choose(logits: object) -> None:
        F.add_to(device, odd, F.grad_norm(device, logits))  # the operator that counts what is not finite
        device.copy(F.sample(device, logits, uniform, **options), ids)

    draw()
    ids, odd = device.upload(np.zeros(1, np.int32)), device.zeros((2,))
    choose(_prefill(model, prompt, cache))
    inputs = _inputs(model, ids, np.zeros(1, np.int32), None)

    def decode() -> None:
        with no_grad():
            logits = model.logits(model.hidden(inputs, cache).data)
        choose(device.view(logits, (model.config.vocab_size,)))

    step = Recorded(device)
    for position in range(len(prompt), length):
        token = int(device.download(ids)[0])
        count = position - len(prompt) + 1
        if (count % LOOK_EVERY == 1 or token in stop_ids or position + 1 == length) and device.download(odd)[1]:
            raise _not_finite(model, count)
        if token in stop_ids:
            return
        yield token
        if position + 1 < length:
            draw()
            device.write(inputs.positions, np.array([position], np.int32))
            device.write(inputs.cache_len, np.array([position], np.int32))
            step(decode)


def _not_finite(model: Model, tokens: int) -> UnusableResult:
    """tokens: of the continuation, up to the one at which it was found."""
    wide = "the weights, or the adapter, are damaged or come of a training that failed: fetch them again"
    return UnusableResult(
        f"the model's logits are not finite (NaN or infinity) within the first {tokens} token{'s' * (tokens > 1)}, so "
        "that no text can be chosen by them: "
        + (
            wide
            if model.dtype == np.float32
            else f"--compute {model.dtype} is too narrow for it: use --compute float32"
        )
    )


def _inputs(model: Model, ids: object, positions: np.ndarray, start: int | None) -> Inputs:
    """start: index of the first key that is appended to the cache; None: written before each step."""
    upload, tokens = model.device.upload, len(positions)
    return Inputs(
        ids=ids,
        positions=upload(positions),
        doc_start=upload(np.zeros((1, tokens), np.int32)),
        cache_len=upload(np.array([start or 0], np.int32)),
        start=start,
    )


def _prefill(model: Model, prompt: Sequence[int], cache: KVCache) -> object:
    """Run the prompt, fill the cache -> logits float32 [V] of its last token."""
    device, tokens = model.device, len(prompt)
    ids = device.upload(np.asarray(prompt, np.int32))
    with no_grad():
        hidden = model.hidden(_inputs(model, ids, np.arange(tokens, dtype=np.int32), 0), cache)
        # A row by its number is a look-up; a view would have to start at a multiple of 64.
        last = F.embedding(hidden, device.upload(np.array([tokens - 1], np.int32)), dtype=hidden.dtype)
    return device.view(model.logits(last.data), (model.config.vocab_size,))


def generate_text(
    model: Model, tokenizer: Tokenizer, prompt: Sequence[int], max_new_tokens: int, sampling: Sampling
) -> str:
    """The continuation of a prompt as text."""
    ids = list(generate_ids(model, prompt, max_new_tokens, sampling, tokenizer.stop_ids))
    decode = tokenizer.decode_stream(prompt)
    return "".join(decode(token) for token in ids)


def check_positions(prompt: Sequence[int], max_new_tokens: int, config: ModelConfig, option: str) -> None:
    """WgradError, naming `option`, where prompt and continuation need more positions than the model was made for."""
    limit = config.max_position_embeddings
    if len(prompt) + max_new_tokens > limit:
        raise WgradError(
            f"{option}: {len(prompt)} tokens of the prompt and {max_new_tokens} new ones must be at most the {limit} "
            "positions that the model was made for: shorten the one or the other"
        )


def _build(
    args: GenerateConfig, config: ModelConfig, folder: Path, device: Device, prompt: list[int], display: Display
) -> Model:
    """The model on the device, its shaders compiled, with a bar for each of the two."""
    build = partial(
        build_frozen,
        config,
        folder,
        positions=len(prompt) + args.max_new_tokens,
        adapter=args.adapter,
        quantize=args.quantize,
        compute=args.compute,
    )
    with display.phase("compiling", unit="shaders") as phase:
        dry = device.dry_run()
        if dry is not None:  # three tokens: the first step of one runs as it is, the second is recorded
            for _ in generate_ids(build(dry, contents=False), prompt, min(args.max_new_tokens, 3), _sampling(args)):
                pass
            device.prepare(dry, phase.update)
    with display.phase(f"loading {'and quantising ' if args.quantize else ''}weights", unit="tensors") as phase:
        return build(device, progress=phase.update)


def _sampling(args: GenerateConfig) -> Sampling:
    return Sampling(args.temperature, args.top_k, args.top_p, args.seed)


def run_generate(args: GenerateConfig) -> int:
    """`wgrad generate`: text goes to stdout as it comes, everything else to stderr. -> exit status."""
    device = select_device(args.device)
    say(f"device: {device.description} ({device.reason})", "stderr")
    folder = resolve_model(args.model)
    config, tokenizer = load_model_config(folder), load_tokenizer(folder)
    tokenizer.check_fits(config.vocab_size)
    checkpoint = Checkpoint(folder)
    config, head_note = use_own_head(config, checkpoint)
    checkpoint.check(config)
    if head_note:
        say(f"note: {head_note}", "stderr")
    if args.chat:
        prompt = tokenizer.encode_chat([{"role": "user", "content": args.prompt}])
    else:
        prompt = tokenizer.encode(args.prompt)
    check_positions(prompt, args.max_new_tokens, config, "--max-new-tokens")
    display = Display(make_console("stderr"))
    model = _build(args, config, folder, device, prompt, display)
    if note := adapter_note(model.adapter.config if model.adapter else None):
        say(f"note: {note}", "stderr")
    decode = tokenizer.decode_stream(prompt)
    ids = generate_ids(model, prompt, args.max_new_tokens, _sampling(args), tokenizer.stop_ids)
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
