"""Text from a model, token by token, with a cache of keys and values."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Iterator, Sequence

import numpy as np

from wgrad.autograd import functional as F
from wgrad.autograd.ops.decoding import sample_settings
from wgrad.autograd.replay import Recorded
from wgrad.autograd.tensor import no_grad
from wgrad.device.contract import Array, Readback
from wgrad.device.errors import UnusableResult, WgradError
from wgrad.device.shown import counted
from wgrad.train.model.inputs import whole_inputs
from wgrad.train.model.kv_cache import KVCache
from wgrad.train.model.model import Model
from wgrad.train.model.model_config import ModelConfig
from wgrad.train.model.model_inputs import Inputs
from wgrad.train.options.generate_config import Sampling

# The host reads ids in blocks while the device continues. Blocks grow until one takes this long, so that text flows.
READ_SECONDS = 0.05
MOST_IN_A_BLOCK = 32
_BLOCKS_AHEAD = 2  # the device works on the second while the host waits for the first
_VIEW = 64  # elements: where a view may begin


def generate_ids(
    model: Model,
    prompt: Sequence[int],
    max_new_tokens: int,
    sampling: Sampling,
    stop_ids: Collection[int] = (),
) -> Iterator[int]:
    """Yield the ids that follow `prompt`, up to one of `stop_ids` (which is not yielded).

    The rotary tables of `model` must hold len(prompt) + max_new_tokens positions.

    Raises:
        UnusableResult: logits are not finite.
    """
    for count, (token,) in enumerate(Decoder(model, [prompt], max_new_tokens, sampling).tokens(), start=1):
        if token < 0:
            raise not_finite(model, count)
        if token in stop_ids:
            return
        yield token


def generate_batch(
    model: Model,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampling: Sampling,
    stop_ids: Collection[int] = (),
) -> list[list[int]]:
    """Continue several prompts of any lengths at once, each as `generate_ids` does, the b-th with the seed
    sampling.seed + b. The rotary tables must hold max_new_tokens more than the longest prompt."""
    texts: list[list[int]] = [[] for _ in prompts]
    going = set(range(len(prompts)))
    for count, row in enumerate(Decoder(model, prompts, max_new_tokens, sampling).tokens(), start=1):
        for b in sorted(going):
            if row[b] < 0:
                raise not_finite(model, count)
            if row[b] in stop_ids:
                going.discard(b)
            else:
                texts[b].append(row[b])
        if not going:
            break
    return texts


class Decoder:
    """B texts that grow on the device. A step draws ids from the logits, computes the next logits and increments its
    counters, all on the device, so that it is recorded and replayed.

    Prompts are padded on the left, so that all end at the same key; `doc_start` hides the padding.

    seeds: of the texts, by default sampling.seed + b. keep_logits: for `tokens_and_logits`.
    """

    def __init__(
        self,
        model: Model,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        sampling: Sampling,
        seeds: Sequence[int] | None = None,
        keep_logits: bool = False,
    ) -> None:
        if not all(prompts):
            raise WgradError("--prompt: has no token: give some text to go on from")
        longest, batch, self.total = max(map(len, prompts)), len(prompts), max_new_tokens
        if longest + max_new_tokens > model.cos.shape[0]:
            raise ValueError(
                f"{longest + max_new_tokens} tokens, but the model was built for {model.cos.shape[0]} positions"
            )
        self._prompts = prompts
        self.model, self.device, self.sampling, self.batch = model, model.device, sampling, batch
        upload = model.device.upload
        self.cache = KVCache.empty(model.config, batch, longest + max_new_tokens, model.dtype, model.device)
        seeds = range(sampling.seed, sampling.seed + batch) if seeds is None else seeds
        uniforms = np.stack([uniform_numbers(seed, max_new_tokens) for seed in seeds], axis=1)
        self.uniforms, self.uniform = upload(uniforms), upload(uniforms[0].copy())
        self.settings = upload(np.tile(settings_of(sampling), (batch, 1)))
        self.drawn_tokens = upload(np.zeros((max_new_tokens, batch), np.int32))
        self.step_number = upload(np.zeros(1, np.int32))
        lengths = np.array([len(p) for p in prompts], np.int32)
        self.inputs = Inputs(  # of a step; `advance` increments them before the first
            ids=upload(np.zeros(batch, np.int32)),
            positions=upload(lengths - 1),
            doc_start=upload((longest - lengths)[:, None]),
            cache_len=upload(np.array([longest - 1], np.int32)),
        )
        self._kept = model.device.empty((batch, model.config.vocab_size)) if keep_logits else None
        self._recorded = Recorded(model.device)
        self._choose(prefill(model, prompts, self.cache))

    def _choose(self, logits: Array) -> None:
        """Draw the next ids from logits float32 [B, V], and write them into the input of the next step."""
        device, inputs = self.device, self.inputs
        drawn = device.sample(logits, self.uniform, self.settings)
        if self._kept is not None:
            device.copy(logits, self._kept)
        counters = (self.step_number, inputs.ids, inputs.positions, inputs.cache_len)
        device.advance(drawn, self.uniforms, self.drawn_tokens, *counters, self.uniform)

    def _step(self) -> None:
        with no_grad():
            logits = self.model.logits(self.model.hidden(self.inputs, self.cache).data)
        self._choose(logits)

    def _take(self, step: int) -> None:
        """Run the step that draws token number `step`. If a text has reached the length at which the model's angles
        change (`read_again_at`), all texts are read again."""
        again = self.model.config.read_again_at
        if not again or all(len(prompt) + step != again for prompt in self._prompts):
            self._recorded(self._step)
            return
        drawn = np.maximum(self._rows(0, step, self._read(0, step)), 0)  # -1 (not finite) is reported when it is read
        texts = [[*prompt, *drawn[:, b].tolist()] for b, prompt in enumerate(self._prompts)]
        self._choose(prefill(self.model, texts, self.cache))

    @property
    def dispatches(self) -> int:
        """Launches of a step; 0 before it is recorded."""
        return self._recorded.dispatches

    def tokens(self) -> Iterator[list[int]]:
        """Yield the ids [B] of each step; -1 if logits were not finite. The device is up to two blocks ahead."""
        queued, asked, size = 1, 0, 1  # the first token comes from the prompt's logits
        ahead: deque[tuple[int, int, Readback]] = deque()
        while True:
            while len(ahead) < _BLOCKS_AHEAD and asked < self.total:
                count = min(size, self.total - asked)
                for step in range(queued, asked + count):
                    self._take(step)
                queued = max(queued, asked + count)
                ahead.append((asked, count, self._read(asked, count)))
                asked += count
            if not ahead:
                return
            start = time.perf_counter()
            rows = self._rows(*ahead.popleft())
            if time.perf_counter() - start < READ_SECONDS:
                size = min(2 * size, MOST_IN_A_BLOCK)
            yield from rows.tolist()

    def tokens_and_logits(self) -> Iterator[tuple[list[int], np.ndarray]]:
        """Yield the ids of each step as `tokens` does, with the logits float32 [B, V] from which they were drawn."""
        assert self._kept is not None
        for step in range(self.total):
            if step:
                self._take(step)
            copy, logits = self._read(step, 1), self.device.readback(self._kept)
            yield self._rows(step, 1, copy)[0].tolist(), logits.result()

    def _rows(self, first: int, count: int, copy: Readback) -> np.ndarray:
        """Return the ids [count, B] of the steps from `first` on."""
        return copy.result()[first * self.batch % _VIEW :].reshape(count, self.batch)

    def _read(self, first: int, count: int) -> Readback:
        begin = first * self.batch // _VIEW * _VIEW
        return self.device.readback(self.device.view(self.drawn_tokens, ((first + count) * self.batch - begin,), begin))


def settings_of(sampling: Sampling) -> np.ndarray:
    """Return a row of the settings of the operator `sample`."""
    return sample_settings(sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)


def uniform_numbers(seed: int, count: int) -> np.ndarray:
    """Return random numbers float32 [count] in [0, 1) for drawing tokens; the i-th depends only on the seed and i."""
    return np.random.Generator(np.random.PCG64(seed)).random(count, np.float32)


def not_finite(model: Model, tokens: int) -> UnusableResult:
    """Return the error for logits that are not finite. tokens: number of new tokens up to the first such."""
    wide = "the weights, or the adapter, are damaged or come of a training that failed: fetch them again"
    return UnusableResult(
        f"the model's logits are not finite (NaN or infinity) within the first {counted(tokens, 'token')}, so "
        "that no text can be chosen by them: "
        + (
            wide
            if model.dtype == np.float32
            else f"--compute {model.dtype} is too narrow for it: use --compute float32"
        )
    )


def prefill(
    model: Model, prompts: Sequence[Sequence[int]], cache: KVCache, end: int | None = None, width: int | None = None
) -> Array:
    """Run the prompts, fill the cache, and return the logits float32 [B, V] of their last tokens.

    end: the key at which they end. width: tokens to which they are padded on the left. Default: the longest prompt.
    """
    device, batch, longest = model.device, len(prompts), max(map(len, prompts))
    tokens = longest if width is None else width
    ids, positions, doc_start = (np.zeros((batch, tokens), np.int32) for _ in range(3))
    for b, prompt in enumerate(prompts):
        first = tokens - len(prompt)
        ids[b, first:], positions[b, first:], doc_start[b, first:] = prompt, range(len(prompt)), first
    inputs = whole_inputs(model, ids, positions, doc_start, 0 if end is None else end - tokens)
    last = np.arange(1, batch + 1, dtype=np.int32) * tokens - 1
    with no_grad():
        hidden = model.hidden(inputs, cache)
        # Embedding picks any rows; a view would have to start at a multiple of 64 elements.
        rows = F.embedding(hidden, device.upload(last), dtype=hidden.dtype)
    return model.logits(rows.data)


def check_positions(prompt: Sequence[int], max_new_tokens: int, config: ModelConfig, option: str) -> None:
    """Raise WgradError, naming `option`, if prompt and continuation need more positions than the model has."""
    limit = config.positions
    if len(prompt) + max_new_tokens > limit:
        raise WgradError(
            f"{option}: {counted(len(prompt), 'token')} of the prompt and {max_new_tokens} new ones must be at most "
            f"the {limit} positions that the model was made for: shorten the one or the other"
        )
