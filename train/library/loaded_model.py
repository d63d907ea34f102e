"""`wgrad.load` and `wgrad.generate`: a model on a device that generates and scores texts."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from types import TracebackType
from typing import Any, Literal, Self

from wgrad.device.errors import WgradError
from wgrad.device.shown import counted
from wgrad.train.data.sample_tokens import encode_record
from wgrad.train.data.samples import parse_prompt
from wgrad.train.data.template_process import shared_process
from wgrad.train.data.tokenizer import Tokenizer
from wgrad.train.inference.generation import check_positions, generate_batch
from wgrad.train.inference.guide import Grammars
from wgrad.train.inference.guide_options import guides_of
from wgrad.train.inference.guided import Anything, Guides, guided_batch, text_ids
from wgrad.train.inference.open_model import Opened, context_of, open_model
from wgrad.train.inference.scoring import most_work, score
from wgrad.train.inference.text_models import build_text_models
from wgrad.train.library.arguments import BatchArguments, GenerateArguments, LoadArguments, TextArguments
from wgrad.train.library.signature import make_options, takes, takes_beside_one
from wgrad.train.model.model import Model
from wgrad.train.options.finetune_config import RunOptions
from wgrad.train.options.generate_config import BatchOptions, PromptOptions, Sampling, TextOptions
from wgrad.train.options.model_options import LoadOptions, OneModel

_SEEDS = 2**32
Messages = Sequence[Mapping[str, Any]]
Prompt = str | Messages | Mapping[str, Any]  # text, messages, or an object like a line of --prompts


@dataclass(frozen=True)
class Generated:
    """A generated text.

    Attributes:
        text: The text.
        tokens: Its token ids.
        prompt_tokens: Number of tokens of the prompt.
        finish: "stop" if the model or a grammar ended the text, "length" if max_new_tokens did.
    """

    text: str
    tokens: tuple[int, ...]
    prompt_tokens: int
    finish: Literal["stop", "length"]


@dataclass(frozen=True)
class TokenScore:
    """A scored token.

    Attributes:
        id: Token id.
        text: Its text.
        log_prob: Natural logarithm of its probability, given the tokens before it; None for the first token.
        in_loss: Whether it counts, as in training.
    """

    id: int
    text: str
    log_prob: float | None
    in_loss: bool


@dataclass(frozen=True)
class Scores:
    """Log-probabilities of a text's tokens. Sums and means are over the tokens that count."""

    tokens: tuple[TokenScore, ...]

    @property
    def counted(self) -> list[float]:
        """Log-probabilities of the tokens that count."""
        return [t.log_prob for t in self.tokens if t.in_loss and t.log_prob is not None]

    @property
    def log_prob(self) -> float:
        """Sum over the tokens that count, in nats."""
        return math.fsum(self.counted)

    @property
    def loss(self) -> float:
        """Mean nats per token that counts, as in training."""
        return -self.log_prob / len(self.counted)

    @property
    def perplexity(self) -> float:
        """e to the loss."""
        return math.exp(min(self.loss, 700.0))


class LoadedModel:
    """A model that stays on its device until `close`, or the end of a with block. `load` opens it.

    It may only be used by one thread at a time.

    Attributes:
        context: Most tokens of a prompt with its continuation.
        device: Description of the device.
    """

    def __init__(self, opened: Opened[LoadOptions], model: Model, context: int, grammars: Grammars) -> None:
        self._opened, self._tokenizer = opened, opened.tokenizer
        self._model: Model | None = model
        self._grammars = grammars
        self.context = context
        self.device = opened.device.description

    # ---- writing -------------------------------------------------------------------------------
    @takes_beside_one(TextArguments)
    def generate(self, prompt: Prompt, **given: Any) -> Generated:
        """Continue a prompt.

        Args:
            prompt: A text, a mapping with `prompt` or `messages`, or a list of messages.
            OPTIONS

        Returns:
            The text, its token ids and why it ended. `json_schema` may also be the schema as a mapping.

        Raises:
            WgradError: The prompt or an option cannot be used.
            UnusableResult: Logits are not finite, or no token continues the grammar.
        """
        options, model = make_options(TextOptions, given, "generate"), self._open_model()
        ids = _encode(self._tokenizer, prompt, options.chat, 1)
        self._check_room(ids, options)
        guides = self._guides(options, [ids])
        tokens = list(self._ids(model, ids, options, guides))
        return self._generated(ids, tokens, options, any(guide.ended for guide in guides))

    @takes_beside_one(TextArguments)
    def stream(self, prompt: Prompt, **given: Any) -> Iterator[str]:
        """Continue a prompt, and yield the text in pieces as it is generated.

        Args:
            prompt: As for `generate`, like all options.
            OPTIONS

        Returns:
            An iterator of the pieces.

        Raises:
            WgradError: The prompt or an option cannot be used.
            UnusableResult: Logits are not finite, or no token continues the grammar.
        """
        options, model = make_options(TextOptions, given, "stream"), self._open_model()
        ids = _encode(self._tokenizer, prompt, options.chat, 1)
        self._check_room(ids, options)
        tokens = self._ids(model, ids, options, self._guides(options, [ids]))
        return filter(None, self._tokenizer.decode_stream(ids).pieces(tokens))

    @takes_beside_one(BatchArguments)
    def generate_many(self, prompts: Iterable[Prompt], **given: Any) -> list[Generated]:
        """Continue many prompts, `batch_size` at once; the n-th is sampled with seed + n.

        Args:
            prompts: Prompts, as for `generate`.
            OPTIONS

        Returns:
            The texts, in the order of the prompts.

        Raises:
            WgradError: A prompt or an option cannot be used.
            UnusableResult: Logits are not finite, or no token continues the grammar.
        """
        options, model = make_options(BatchOptions, given, "generate_many"), self._open_model()
        if isinstance(prompts, (str, Mapping)):
            raise WgradError("generate_many: expected several prompts, got one: give a list, or use generate")
        if not isinstance(prompts, Iterable):
            raise WgradError(f"generate_many: expected a list of prompts, got {type(prompts).__name__}: give one")
        encoded = [
            _encode(self._tokenizer, prompt, options.chat, number) for number, prompt in enumerate(prompts, start=1)
        ]
        for ids in encoded:
            self._check_room(ids, options)
        guides = self._guides(options, encoded)
        answers: list[Generated] = []
        for first in range(0, len(encoded), options.batch_size):
            group = encoded[first : first + options.batch_size]
            sampling = replace(options, seed=(options.seed + first) % _SEEDS)
            work = model, group, options.max_new_tokens, sampling, self._tokenizer.stop_ids
            bound = guides[first : first + options.batch_size]
            texts = guided_batch(*work, bound) if bound else generate_batch(*work)
            ended = [guide.ended for guide in bound] or [False] * len(group)
            made = zip(group, texts, ended, strict=True)
            answers += [self._generated(ids, tokens, options, end) for ids, tokens, end in made]
        return answers

    # ---- scoring -------------------------------------------------------------------------------
    def score(self, text: str | Mapping[str, Any]) -> Scores:
        """Compute the log-probabilities of a text's tokens.

        Args:
            text: A text, of which all tokens but the first count. Or a record as for `finetune`, scored as in training:
                {"prompt": ..., "completion": ...} counts the completion and the end of text after it, {"messages":
                [...]} the assistant's turns.

        Returns:
            Each token with its log-probability, and their sum, mean and perplexity.

        Raises:
            WgradError: The text has too few or too many tokens.
            UnusableResult: Logits are not finite.
        """
        model, tokenizer = self._open_model(), self._tokenizer
        if isinstance(text, Mapping):
            config = RunOptions(max_length=self.context + 1)
            ids, in_loss = (a.tolist() for a in encode_record(text, config, tokenizer, "score"))
        elif not isinstance(text, str):
            raise WgradError(f"score: expected a text or a record, got {type(text).__name__}: give one")
        else:
            ids = tokenizer.encode(text)
            in_loss = [True] * len(ids)
        if not 2 <= len(ids) <= self.context:
            raise WgradError(
                f"score: a text must have 2 to {self.context} tokens (context); got {len(ids)}: give another, or load "
                "with a larger context"
            )
        found = [None, *score(model, ids).given.of_tokens.tolist()]
        *texts, last, rest = tokenizer.decode_stream(skip_special_tokens=False).pieces(ids)
        tokens = zip(ids, [*texts, last + rest], found, in_loss, strict=True)
        return Scores(tuple(TokenScore(*token) for token in tokens))

    # ---- the end -------------------------------------------------------------------------------
    def close(self) -> None:
        """Free the device's memory. The model cannot be used afterwards."""
        if self._model is not None:
            self._model = None
            gc.collect()  # recordings hold their arrays in reference cycles
            trim = getattr(self._opened.device, "trim", None)
            if trim is not None:
                trim()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- shared parts --------------------------------------------------------------------------
    def _open_model(self) -> Model:
        if self._model is None:
            raise WgradError("this model is closed: load it again")
        return self._model

    def _check_room(self, prompt: Sequence[int], options: TextOptions) -> None:
        if len(prompt) + options.max_new_tokens > self.context:
            raise WgradError(
                f"--max-new-tokens: {counted(len(prompt), 'token')} of the prompt and {options.max_new_tokens} new ones"
                f" must be at most the {self.context} that the model was loaded for (context): shorten the one or the "
                "other, or load it with a larger context"
            )

    def _guides(self, options: TextOptions, prompts: Sequence[Sequence[int]]) -> list[Guides]:
        return guides_of(options, self._grammars, self._tokenizer, prompts)

    def _ids(self, model: Model, prompt: list[int], options: TextOptions, guides: Sequence[Guides]) -> Iterator[int]:
        """Yield the tokens that continue a prompt. guides: grammars of this prompt."""
        return text_ids(model, prompt, options.max_new_tokens, options, self._tokenizer.stop_ids, guides)

    def _generated(
        self, prompt: Sequence[int], tokens: Sequence[int], options: TextOptions, ended: bool = False
    ) -> Generated:
        """Return a generated text. ended: whether its grammar allows no more tokens."""
        text = self._tokenizer.decode_after(prompt, tokens)
        is_cut = len(tokens) == options.max_new_tokens and not ended
        finish: Literal["stop", "length"] = "length" if is_cut else "stop"
        return Generated(text, tuple(tokens), len(prompt), finish)


@takes(LoadArguments)
def load(*names: Any, **given: Any) -> LoadedModel:
    """Open a model, with or without an adapter: load("DIR_OR_HUB_ID", adapter="DIR").

    Compiles shaders and reads weights before it returns.

    Args:
        OPTIONS

    Returns:
        A model that generates and scores texts until it is closed, or until the end of a with block.

    Raises:
        WgradError: The model cannot be read, or an option cannot be used.
        DeviceError: The device failed.
    """
    positional = [field.name for field in fields(LoadOptions) if not field.kw_only]
    if len(names) > len(positional):
        raise WgradError(f"load: only {' and '.join(positional)} may be given without a name: name the others")
    if twice := [name for name in positional[: len(names)] if name in given]:
        raise WgradError(f"load: {twice[0]} is given twice, with its name and without: leave one out")
    return _load(make_options(LoadOptions, {**dict(zip(positional, names)), **given}, "load"))


def _load(options: LoadOptions) -> LoadedModel:
    options.require()
    opened = open_model(options, silent=True)
    return _build(opened, context_of(opened), Grammars(opened.tokenizer, opened.config.vocab_size))


def _build(opened: Opened[LoadOptions], context: int, grammars: Grammars, guided: bool = False) -> LoadedModel:
    """Load a model and compile its shaders.

    guided: whether to compile the kernels of constrained generation too; else they are compiled when needed.
    """

    def run(model: Model) -> None:
        most_work(model, context, 1, context)
        if guided:
            sampling, guides = Sampling(temperature=1.0, repetition_penalty=1.1), [Anything(opened.config.vocab_size)]
            guided_batch(model, [[0] * max(context - 3, 1)], min(context - 1, 3), sampling, (), guides)

    model = build_text_models(opened, {"": opened.args.adapter}, context, run)[""]
    return LoadedModel(opened, model, context, grammars)


def _encode(tokenizer: Tokenizer, prompt: Prompt, chat: bool, number: int) -> list[int]:
    """Return the token ids of a prompt. number: of the prompt, for errors. WgradError: it is empty or malformed."""
    _refuse_several(prompt)
    value = dict(prompt) if isinstance(prompt, Mapping) else {"prompt": prompt}
    value = {key: list(item) if isinstance(item, tuple) else item for key, item in value.items()}
    try:
        _, text, whole = parse_prompt(value, "prompt", number, chat, tokenizer)
    finally:
        shared_process().close()
    ids = tokenizer.encode(text, add_special_tokens=whole)
    if not ids:
        raise WgradError(f"prompt:{number}: has no token: give some text to continue")
    return ids


def _refuse_several(prompt: Any) -> None:
    """Raise WgradError for a list of texts."""
    if isinstance(prompt, (list, tuple)) and prompt and all(isinstance(one, str) for one in prompt):
        raise WgradError(
            f"expected one prompt, got a list of {len(prompt)} texts: load the model and use generate_many"
        )


@takes(GenerateArguments)
def generate(**given: Any) -> Generated:
    """Load a model and continue one prompt: generate(model="DIR_OR_HUB_ID", prompt="...").

    Each call loads the model; use `load` to keep it open.

    Args:
        OPTIONS

    Returns:
        The text, its token ids and why it ended.

    Raises:
        WgradError: The model cannot be read, or an option cannot be used.
        DeviceError: The device failed.
        UnusableResult: Logits are not finite, or no token continues the grammar.
    """
    _refuse_several(given.get("prompt"))
    options = make_options(PromptOptions, given, "generate")
    options.require()
    if not options.prompt:
        raise WgradError("--prompt is required: give it")
    opened = open_model(LoadOptions(**{field.name: getattr(options, field.name) for field in fields(OneModel)}), True)
    ids = _encode(opened.tokenizer, options.prompt, options.chat, 1)
    check_positions(ids, options.max_new_tokens, opened.config, "--max-new-tokens")
    text = {field.name: getattr(options, field.name) for field in fields(TextOptions)}
    grammars = Grammars(opened.tokenizer, opened.config.vocab_size)
    guides_of(options, grammars, opened.tokenizer, [ids])  # a wrong grammar is refused before weights are read
    with _build(opened, len(ids) + options.max_new_tokens, grammars, options.is_watched) as loaded:
        return loaded.generate(options.prompt, **text)
