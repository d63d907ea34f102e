"""Text from a model, token by token, with a cache of keys and values."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import numpy as np

from wgrad.autograd import functional as F
from wgrad.autograd.replay import Recorded
from wgrad.autograd.tensor import no_grad
from wgrad.device.contract import Array
from wgrad.device.errors import UnusableResult, WgradError
from wgrad.train.model.model import Inputs, KVCache, Model
from wgrad.train.model.model_config import ModelConfig
from wgrad.train.options.generate_config import Sampling

LOOK_EVERY = 64  # tokens between two looks at whether logits are finite: each is a wait for the device


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

    def draw() -> None:
        device.write(uniform, generator.random(1, np.float32))

    def choose(logits: Array) -> None:
        device.add(odd, device.grad_norm(logits), out=odd)  # the operator that counts what is not finite
        temperature, top_k, top_p = sampling.temperature, sampling.top_k, sampling.top_p
        device.copy(device.sample(logits, uniform, temperature=temperature, top_k=top_k, top_p=top_p), ids)

    draw()
    ids, odd = device.upload(np.zeros(1, np.int32)), device.zeros((2,))
    choose(_prefill(model, prompt, cache))
    inputs = _inputs(model, ids, np.zeros(1, np.int32))

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


def _inputs(model: Model, ids: Array, positions: np.ndarray) -> Inputs:
    """What is appended to a cache that holds nothing yet; a later step writes its positions and cache_len."""
    upload, tokens = model.device.upload, len(positions)
    return Inputs(
        ids=ids,
        positions=upload(positions),
        doc_start=upload(np.zeros((1, tokens), np.int32)),
        cache_len=upload(np.zeros(1, np.int32)),
    )


def _prefill(model: Model, prompt: Sequence[int], cache: KVCache) -> Array:
    """Run the prompt, fill the cache -> logits float32 [V] of its last token."""
    device, tokens = model.device, len(prompt)
    ids = device.upload(np.asarray(prompt, np.int32))
    with no_grad():
        hidden = model.hidden(_inputs(model, ids, np.arange(tokens, dtype=np.int32)), cache)
        # A row by its number is a look-up; a view would have to start at a multiple of 64.
        last = F.embedding(hidden, device.upload(np.array([tokens - 1], np.int32)), dtype=hidden.dtype)
    return device.view(model.logits(last.data), (model.config.vocab_size,))


def check_positions(prompt: Sequence[int], max_new_tokens: int, config: ModelConfig, option: str) -> None:
    """WgradError, naming `option`, where prompt and continuation need more positions than the model was made for."""
    limit = config.max_position_embeddings
    if len(prompt) + max_new_tokens > limit:
        raise WgradError(
            f"{option}: {len(prompt)} tokens of the prompt and {max_new_tokens} new ones must be at most the {limit} "
            "positions that the model was made for: shorten the one or the other"
        )
