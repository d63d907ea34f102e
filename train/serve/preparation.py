"""From requests to jobs: names of models, chat templates, token ids, and their limits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

from wgrad.device.errors import WgradError
from wgrad.device.shown import counted
from wgrad.train.data.chat import Conversation, MessagesRefused
from wgrad.train.data.tokenizer import Tokenizer
from wgrad.train.inference.guide import Grammars, is_installed
from wgrad.train.options.choices import Pooling
from wgrad.train.options.generate_config import GREEDY
from wgrad.train.serve.answer_parts import Style, style_of
from wgrad.train.serve.embeddings import EmbeddingRequest
from wgrad.train.serve.errors import ApiError
from wgrad.train.serve.formats import arguments_grammar, call_rule, grammar_of
from wgrad.train.serve.jobs import Event, Job
from wgrad.train.serve.requests import MOST_PROMPTS, ChatRequest, CompletionRequest, Request
from wgrad.train.serve.tool_calls import knows_tools

TOO_LONG = "context_length_exceeded"  # code of an error
_SEEDS = 2**32
Emit = Callable[[int, Event], None]  # the number of the prompt in its request


@dataclass(frozen=True)
class ModelFacts:
    """Facts about a model that clients show. bytes: of its files; device_bytes: the part of them on a GPU."""

    family: str = ""
    parameters: int = 0
    quantization: str = ""
    bytes: int = 0
    device_bytes: int = 0


@dataclass(frozen=True)
class Preparation:
    """Maker of jobs. positions: most tokens of a prompt and its answer. Thread-safe; templates are rendered one at a
    time."""

    tokenizers: Mapping[str, Tokenizer]  # by model
    vocab_size: int
    positions: int
    max_new_tokens: int
    max_seconds: float
    template: threading.Lock
    pooling: Pooling = "mean"  # of embeddings
    width: int = 0  # of embeddings
    facts: ModelFacts = ModelFacts()

    def completion_jobs(self, request: CompletionRequest, emit: Emit) -> tuple[list[Job], list[str]]:
        """Return `n` jobs for each prompt, and with echo the prompts' texts (token ids decoded). Raises ApiError."""
        tokenizer = self.tokenizer(request.model)
        given = [prompt for prompt in request.prompts() for _ in range(request.n)]
        if len(given) > MOST_PROMPTS:
            rule = f"n and the prompts must make at most {MOST_PROMPTS} answers; got {len(given)}: ask for fewer"
            raise ApiError(400, f"the request: {rule}", "n")
        ids = [self._ids(tokenizer, prompt, "prompt") for prompt in given]
        texts = [
            p if isinstance(p, str) else tokenizer.decode(p, skip_special_tokens=False) for p in given
        ] if request.echo else [""] * len(given)  # fmt: skip
        if request.max_tokens == 0 and not request.echo:
            raise ApiError(400, "the request: max_tokens 0 goes with echo: ask for a token, or for echo", "max_tokens")
        score = request.echo and (request.top is not None or request.max_tokens == 0)
        jobs = [self._job(request, n, prompt, request.max_tokens, score, emit) for n, prompt in enumerate(ids)]
        jobs = self._guided(request.model, jobs, grammar_of(request.response_format))
        if score:
            jobs = [
                replace(job, around=_around(tokenizer, p, job.prompt)) if isinstance(p, str) else job
                for job, p in zip(jobs, given)
            ]
        return jobs, texts

    def chat_jobs(self, request: ChatRequest, emit: Emit, before: Sequence[int] = ()) -> tuple[list[Job], Style]:
        """Return `n` jobs and the style of their answers. before: ids of a conversation so far. Raises ApiError."""
        tokenizer = self.tokenizer(request.model)
        if not tokenizer.has_chat_template:
            raise self._no_template(request.model)
        names = request.tool_names()
        if names and not knows_tools("\n".join(tokenizer.templates.values())):
            raise ApiError(400, "the request: tools: the chat template has no place for them: leave them out", "tools")
        style = style_of(tokenizer, names)
        grammar, after = self._grammar(request, tokenizer, style), ""
        tools = request.tools if names else None
        conversation = Conversation(request.turns(), tools, options=request.template_options())
        try:
            with self.template:
                text = tokenizer.chat_template.render(conversation, add_generation_prompt=True)
            style = style.after(text)
            if style.begun and style.thought is not None:
                after = style.thought[1]
            if request.tool_choice not in ("none", "auto"):
                if style.format is None:
                    message = "the chat template writes calls of tools in no known form: leave tool_choice out"
                    raise ApiError(400, f"the request: tool_choice: {message}", "tool_choice")
                opening = style.format.opening(request.chosen_tool)
                if after:  # the prompt opens a thought, which remains empty
                    text, after = text + f"\n{after}\n\n", ""
                text, style = text + opening, replace(style, begun=opening)
            ids = tokenizer.encode_up_to(self.positions, text, add_special_tokens=False)
        except MessagesRefused as error:
            raise ApiError(400, str(error), "messages") from error
        except WgradError as error:  # in the template, or a text that is not Unicode
            raise ApiError(400, str(error).removeprefix("--model: "), "messages") from error
        if ids is None:
            raise self._too_long("messages")
        ids = self._continued(tokenizer, before, ids)
        new = request.most_tokens
        if new is None:
            new = max(min(self.max_new_tokens, self.positions - len(ids)), 1)
        jobs = [self._job(request, number, ids, new, False, emit) for number in range(request.n)]
        jobs = self._guided(request.model, jobs, grammar, after)
        return [replace(job, shown=style.markers) for job in jobs], style

    def _no_template(self, model: str) -> ApiError:
        """Return the error of a conversation with a model without a chat template. It names those that have one."""
        others = ", ".join(repr(name) for name, found in self.tokenizers.items() if found.has_chat_template)
        advice = f"ask {others}, or use /v1/completions" if others else "use /v1/completions"
        message = f"model {model!r} has no chat template, which messages need: {advice}"
        return ApiError(400, f"{message}, or start the server with --chat-template", "messages", "chat_template")

    def _grammar(self, request: ChatRequest, tokenizer: Tokenizer, style: Style) -> str:
        """Return the grammar of an answer; "" without one. A forced call has one if llguidance is installed."""
        form, free = style.format, request.tool_choice in ("none", "auto")
        if form is not None and not free and is_installed():
            return arguments_grammar(form, tokenizer, request.tools, request.chosen_tool)
        if not free:
            return ""
        return grammar_of(request.response_format, call_rule(form, tokenizer, style.tools) if form is not None else "")

    def _guided(self, model: str, jobs: list[Job], grammar: str, after: str = "") -> list[Job]:
        """Return the jobs with a grammar. after: the text that ends an open thought. Raises ApiError."""
        if not grammar:
            return jobs
        try:
            guides = self.grammars[model].guides(grammar, [after] * len(jobs))
        except WgradError as error:
            raise ApiError(400, f"the request: response_format: {error}", "response_format") from error
        return [replace(job, guide=guide) for job, guide in zip(jobs, guides)]

    @cached_property
    def grammars(self) -> Mapping[str, Grammars]:
        return {name: Grammars(tokenizer, self.vocab_size) for name, tokenizer in self.tokenizers.items()}

    def embedding_jobs(self, request: EmbeddingRequest, emit: Emit, truncate: bool = False) -> list[Job]:
        """Return a job for each text. truncate: read as much of a text as there is room for. Raises ApiError."""
        tokenizer = self.tokenizer(request.model)
        ids = [self._ids(tokenizer, text, "input", truncate) for text in request.texts(self.width)]
        common: dict[str, Any] = {"max_new_tokens": 0, "sampling": GREEDY, "stops": (), "top": None, "score": False}
        return [
            Job(request.model, prompt, seconds=self.max_seconds, emit=partial(emit, n), pooling=self.pooling, **common)
            for n, prompt in enumerate(ids)
        ]

    def raw_prompt(self, model: str, text: str, before: Sequence[int] = ()) -> tuple[list[int], int]:
        """Return the ids of a prompt, and the most tokens that fit after it. before: as in `chat_jobs`.

        Raises ApiError.
        """
        tokenizer = self.tokenizer(model)
        ids = self._continued(tokenizer, before, self._ids(tokenizer, text, "prompt"))
        return ids, max(min(self.max_new_tokens, self.positions - len(ids)), 1)

    def _continued(self, tokenizer: Tokenizer, before: Sequence[int], ids: list[int]) -> list[int]:
        """Return both joined, with the tokens that begin every text only once. Raises ApiError."""
        if not before:
            return ids
        opening = tokenizer.added_ids()[0]
        ids = ids[len(opening) :] if opening and ids[: len(opening)] == opening else ids
        return [*self._ids(tokenizer, before, "context"), *ids]

    def tokenizer(self, model: str) -> Tokenizer:
        """Return the tokenizer of a model. Raises ApiError if no model of this name is served."""
        if model not in self.tokenizers:
            names = ", ".join(map(repr, self.tokenizers))
            message = f"the request: model {model[:200]!r} is not served: choose one of {names}"
            raise ApiError(404, message, "model", "model_not_found")
        return self.tokenizers[model]

    def _ids(self, tokenizer: Tokenizer, given: str | Sequence[int], where: str, truncate: bool = False) -> list[int]:
        """Token ids of a text, or those that are given. truncate: of a long text the first. ApiError, of the key
        `where`."""
        if not isinstance(given, str):
            wrong = next((i for i in given if not 0 <= i < self.vocab_size), None)
            if wrong is not None:
                rule = f"token ids must be between 0 and {self.vocab_size - 1}; got {str(wrong)[:40]}: correct it"
                raise ApiError(400, f"the request: {where}: {rule}", where)
            return list(given)
        try:
            ids = tokenizer.encode_up_to(self.positions, given)
            if ids is None and truncate:
                ids = tokenizer.encode_first(self.positions, given)
        except WgradError as error:
            raise ApiError(400, str(error).removeprefix("--model: "), where) from error
        if ids is None:
            raise self._too_long(where)
        if not ids:
            raise ApiError(400, f"the request: {where} has no token: give some text", where)
        return ids

    def _too_long(self, where: str, got: str = "") -> ApiError:
        return ApiError(
            400,
            f"the request: {got or 'the tokens of the prompt'} must be at most the {self.positions} positions that "
            "this server has: shorten the one or the other, or start it with more --context",
            where,
            TOO_LONG,
        )

    def _job(self, request: Request, number: int, ids: list[int], new: int, score: bool, emit: Emit) -> Job:
        all_positions = self.max_new_tokens == self.positions - 1  # all but one for the prompt
        if new > self.max_new_tokens:
            raise ApiError(
                400,
                f"the request: max_tokens must be at most {self.max_new_tokens} here; got {new}: ask for fewer, or "
                f"start the server with more {'--context' if all_positions else '--max-new-tokens'}",
                "max_tokens",
            )
        if len(ids) + new > self.positions:
            where = "messages" if isinstance(request, ChatRequest) else "prompt"
            raise self._too_long(where, f"{counted(len(ids), 'token')} of the prompt and {new} new ones")
        sampling = request.sampling
        return Job(
            model=request.model,
            prompt=ids,
            max_new_tokens=new,
            sampling=replace(sampling, seed=(sampling.seed + number) % _SEEDS),
            stops=request.stops,
            top=request.top,
            score=score,
            seconds=self.max_seconds,
            emit=partial(emit, number),
            edits=request.edits(self.vocab_size),
        )


def _around(tokenizer: Tokenizer, text: str, ids: Sequence[int]) -> tuple[int, int]:
    """Return how many ids the tokenizer added before and after the text of a prompt."""
    plain, before = tokenizer.encode(text, add_special_tokens=False), len(tokenizer.added_ids()[0])
    if list(ids[before : before + len(plain)]) != plain:
        before = 0
    return before, len(ids) - len(plain) - before
