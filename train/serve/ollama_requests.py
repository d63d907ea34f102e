"""Requests of Ollama's API, turned into those of a conversation or a completion."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, Struct

from wgrad.device.errors import WgradError
from wgrad.train.data.thoughts import thought_of
from wgrad.train.files.decode import convert
from wgrad.train.options.option_names import did_you_mean
from wgrad.train.serve.embeddings import EmbeddingRequest
from wgrad.train.serve.errors import ApiError
from wgrad.train.serve.requests import MOST_TOP, Body, ChatRequest, CompletionRequest, Penalty, Stop

# Options for loading a model in Ollama, or without effect here.
OF_LOADING = {
    "num_ctx", "num_keep", "num_batch", "num_gpu", "main_gpu", "num_thread", "numa", "low_vram", "f16_kv", "vocab_only",
    "use_mmap", "use_mlock", "logits_all", "embedding_only", "draft_num_predict",
}  # fmt: skip
MESSAGE_KEYS = ("role", "content", "thinking", "tool_calls", "tool_name", "tool_call_id", "name")
_DURATION = re.compile(r"[-+]?(0|(\d+\.?\d*|\.\d+)(ns|us|µs|μs|ms|s|m|h))+")
# By which templates write a thought, or leave it out; and how long it is to be.
_SWITCH = re.compile(r"(?<![\w.'\"</\[])(enable_thinking|thinking)(?![\w'\"])")
_EFFORT = "reasoning_effort"
_LATEST = ":latest"
# Names in this API of a conversation's keys, for errors.
NAMES = {"response_format": "format", "max_tokens": "options.num_predict"}


class Options(Struct, forbid_unknown_fields=True):
    """How tokens are drawn: Ollama's defaults, but no repetition penalty."""

    temperature: Annotated[float, Meta(ge=0, le=2)] = 0.8
    top_k: Annotated[int, Meta(ge=-1, le=1 << 30)] = 40
    top_p: Annotated[float, Meta(ge=0, le=1)] = 0.9
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    seed: int | None = None
    num_predict: Annotated[int, Meta(ge=-2, le=1 << 30)] = -1
    stop: Stop | Annotated[list[Stop], Meta(max_length=16)] = []
    repeat_penalty: Annotated[float, Meta(ge=0.01, le=100)] = 1.0
    repeat_last_n: int = -1
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    typical_p: float = 1.0
    mirostat: int = 0
    mirostat_eta: float = 0.1
    mirostat_tau: float = 5.0
    tfs_z: float = 1.0
    penalize_newline: bool = True

    def fields(self) -> dict[str, Any]:
        """Return the fields of `requests.Request`. Raises ApiError for unsupported options."""
        for name, value, off in (
            ("typical_p", self.typical_p, 1.0), ("mirostat", self.mirostat, 0), ("tfs_z", self.tfs_z, 1.0),
            ("penalize_newline", self.penalize_newline, True),
        ):  # fmt: skip
            if value != off:
                raise _wrong(f"options.{name} is not supported: leave it out", "options")
        if self.repeat_last_n not in (-1, 0) and self.repeat_penalty != 1:
            raise _wrong("options.repeat_last_n must be -1, as the penalty is for the whole text; or 0", "options")
        return {
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "min_p": self.min_p,
            "seed": None if self.seed is None or self.seed < 0 else self.seed,
            "stop": self.stop,
            "repetition_penalty": self.repeat_penalty if self.repeat_last_n else 1.0,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
        }


class OllamaBody(Body, kw_only=True):
    passed_over: ClassVar[set[str]] = set()

    options: dict[str, Any] = {}
    keep_alive: str | float = ""

    @property
    def served(self) -> str:
        """The model's name without Ollama's tag."""
        return self.model.removesuffix(_LATEST)

    @property
    def drawing(self) -> Options:
        """The checked options. Raises ApiError."""
        known = {name: value for name, value in self.options.items() if name not in OF_LOADING and value is not None}
        try:
            return convert(known, Options, "the request: options", "correct it")
        except WgradError as error:
            raise ApiError(400, str(error), "options") from error

    def check(self) -> None:
        """ApiError: an option that is not known, or how long to stay loaded is no time."""
        self.drawing.fields()
        if isinstance(self.keep_alive, str) and self.keep_alive and not _DURATION.fullmatch(self.keep_alive):
            got = self.keep_alive[:100]
            raise _wrong(f"keep_alive must be seconds, or a time such as '5m'; got {got!r}", "keep_alive")

    @property
    def unloads(self) -> bool:
        """True if a request without a prompt asks to unload the model: its `keep_alive` is 0."""
        return self.keep_alive != "" and not re.search("[1-9]", str(self.keep_alive))


class OllamaRequest(OllamaBody, kw_only=True):
    """Common fields of conversations and completions."""

    unsupported = {
        "suffix": ("",), "template": ("",), "images": ([],), "shift": (False,), "_debug_render_only": (False,),
    }  # fmt: skip
    in_place = {
        "images": "this model reads only text",
        "shift": "an answer ends where the context is full: leave it out",
        "suffix": "this model does not write text between others: leave it out",
        "template": "the chat template that the model was trained with is used: leave it out, or give raw",
    }

    format: str | dict[str, Any] = ""
    logprobs: bool = False
    top_logprobs: Annotated[int, Meta(ge=0, le=MOST_TOP)] = 0
    think: bool | Literal["high", "medium", "low", "max"] | None = None
    truncate: bool = True
    stream: bool = True

    @property
    def limit(self) -> int | None:
        """Most tokens of the answer; None: as many as fit."""
        return self.drawing.num_predict if self.drawing.num_predict > 0 else None

    def conversation(
        self, template: str, turns: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] = ()
    ) -> ChatRequest:
        """template: the source of the chat template. Raises ApiError."""
        return ChatRequest(
            model=self.served,
            messages=[*turns],
            tools=[*tools],
            max_tokens=self.limit,
            response_format=self._format(),
            logprobs=self.logprobs,
            top_logprobs=self.top_logprobs if self.logprobs else 0,
            chat_template_kwargs=self._thinking(template),
            stream=self.stream,
            **self.drawing.fields(),
        )

    def _thinking(self, template: str) -> dict[str, Any]:
        """Return the variables of a chat template that thinks, or does not. ApiError: it has none that do."""
        if self.think is None:
            return {}
        if thought_of(template) is None:
            if self.think:
                raise _wrong(f"think: {self.model[:100]!r} does not support thinking: leave it out", "think")
            return {}
        switches: dict[str, Any] = {name: bool(self.think) for name in set(_SWITCH.findall(template))}
        if isinstance(self.think, str):
            if _EFFORT not in template:
                raise _wrong("think: the chat template knows no levels: give true or false", "think")
            return {**switches, _EFFORT: "high" if self.think == "max" else self.think}
        if not self.think and not switches:
            raise _wrong("think: the chat template cannot leave thoughts out: leave it out", "think")
        return switches

    def _format(self) -> dict[str, Any]:
        if isinstance(self.format, dict):
            return {"type": "json_schema", "json_schema": {"name": "format", "schema": self.format}}
        if self.format not in ("", "json"):
            raise _wrong(f"format must be 'json' or a JSON schema; got {self.format[:100]!r}", "format")
        return {"type": "json_object"} if self.format else {"type": "text"}


class OllamaChat(OllamaRequest, kw_only=True):
    messages: list[dict[str, Any]] = []
    tools: list[dict[str, Any]] = []

    def as_chat(self, template: str) -> ChatRequest:
        """ApiError."""
        turns = [_turn(number, turn) for number, turn in enumerate(self.messages)]
        return self.conversation(template, turns, self.tools)


class OllamaGenerate(OllamaRequest, kw_only=True):
    prompt: str = ""
    system: str = ""
    raw: bool = False
    context: list[int] = []  # of an earlier answer, which this one continues

    def as_chat(self, template: str) -> ChatRequest:
        """Return a conversation with the prompt as the user's message. Raises ApiError."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return self.conversation(template, [*system, {"role": "user", "content": self.prompt}])

    def check_plain(self) -> None:
        """ApiError: something that only a chat template has a place for."""
        why = "raw is given" if self.raw else "the model has no chat template"
        for name, value in (("system", self.system), ("think", self.think), ("context", self.context)):
            if value and (self.raw or name != "context"):
                raise _wrong(f"{name} is not supported where {why}: leave it out", name)

    def as_completion(self, ids: Sequence[int], most: int) -> CompletionRequest:
        """Return a completion of the prompt. ids: its tokens; most: tokens that fit after it. Raises ApiError."""
        return CompletionRequest(
            model=self.served,
            prompt=[*ids],
            max_tokens=most if self.limit is None else self.limit,
            logprobs=self.top_logprobs if self.logprobs else None,
            response_format=self._format(),
            stream=self.stream,
            **self.drawing.fields(),
        )


class OllamaEmbed(OllamaBody, kw_only=True):
    passed_over = {"stream"}

    input: str | list[str] = ""
    truncate: bool = True
    dimensions: Annotated[int, Meta(ge=0)] = 0

    @property
    def texts(self) -> list[str]:
        found = [self.input] if isinstance(self.input, str) else self.input
        return [] if found == [""] else found

    def as_embedding(self, width: int) -> EmbeddingRequest:
        """ApiError."""
        if self.dimensions > width:
            raise _wrong(f"dimensions must be at most {width}; got {self.dimensions}", "dimensions")
        return EmbeddingRequest(model=self.served, input=self.texts)


class OllamaEmbedding(OllamaEmbed, kw_only=True):
    """A request of `/api/embeddings`, by which older clients ask for one vector."""

    prompt: str = ""

    @property
    def texts(self) -> list[str]:
        return [self.prompt] if self.prompt else super().texts


class OllamaShow(OllamaBody, kw_only=True):
    unsupported = {"system": ("",), "template": ("",), "verbose": (False,)}
    in_place = {"verbose": "tensors and tokens are not listed: leave it out"}

    model: str = ""
    name: str = ""  # the key of older clients

    @property
    def served(self) -> str:
        return (self.model or self.name).removesuffix(_LATEST)


def _wrong(rule: str, key: str) -> ApiError:
    return ApiError(400, f"the request: {rule}", key)


def _turn(number: int, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message in the form of OpenAI's API. Raises ApiError."""
    turn = {name: value for name, value in given.items() if value not in (None, "", [])}
    turn.setdefault("content", "")
    if "images" in turn:
        raise _wrong(f"messages[{number}].images: this model reads only text", "messages")
    unknown = next((name for name in turn if name not in MESSAGE_KEYS), None)
    if unknown is not None:
        near = did_you_mean(unknown, MESSAGE_KEYS)
        raise _wrong(f"messages[{number}].{unknown[:100]!r} is no key of this server{near}: leave it out", "messages")
    if isinstance(turn.get("role"), str):
        turn["role"] = turn["role"].lower()
    if "thinking" in turn:
        turn["reasoning_content"] = turn.pop("thinking")
    if "tool_name" in turn:
        turn["name"] = turn.pop("tool_name")
    if "tool_calls" in turn:
        calls = turn["tool_calls"] if isinstance(turn["tool_calls"], list) else [None]
        turn["tool_calls"] = [
            _call(f"messages[{number}].tool_calls[{place}]", call) for place, call in enumerate(calls)
        ]
    return turn


def _call(where: str, call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments", {}), dict):
        raise _wrong(f"{where} must have function.name and function.arguments, an object: correct it", "messages")
    arguments = json.dumps(function.get("arguments", {}), ensure_ascii=False)
    return {"type": "function", "function": {"name": function.get("name"), "arguments": arguments}}
