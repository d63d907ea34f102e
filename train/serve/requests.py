"""Parsing and checking the requests of OpenAI's API.

Unsupported keys are refused if they would change the answer, else ignored. A null counts as a missing key.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Collection, Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from msgspec import Meta, Struct, field

from wgrad.device.errors import WgradError
from wgrad.train.data.conversation_forms import type_name
from wgrad.train.files.decode import convert, parse_json
from wgrad.train.options.generate_config import Sampling
from wgrad.train.options.option_names import did_you_mean
from wgrad.train.serve.errors import ApiError
from wgrad.train.serve.logit_edits import LogitEdits

MOST_PROMPTS = 256  # of one request, counting each `n` times
MOST_STOPS, LONGEST_STOP = 16, 1000
MOST_TOP = 20  # likeliest tokens that are reported at each place
_LEAST_TOP_P = 1e-6  # 0 takes the likeliest token, as this does
_WHERE, _ADVICE = "the request", "correct it"

# Keys without effect on an answer.
_PASSED_OVER = {
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "parallel_tool_calls", "prediction",
}  # fmt: skip

# Keys of vLLM's clients, with the values that ask for what this server does.
_OF_VLLM: dict[str, tuple[Any, ...]] = {
    "ignore_eos": (False,), "include_stop_str_in_output": (False,), "length_penalty": (1,), "min_tokens": (0,),
    "skip_special_tokens": (True,), "spaces_between_special_tokens": (True,), "stop_token_ids": ([],),
    "use_beam_search": (False,),
}  # fmt: skip

Penalty = Annotated[float, Meta(ge=-2, le=2)]
Stop = Annotated[str, Meta(min_length=1, max_length=LONGEST_STOP)]
Text = str | list[Any]


class StreamOptions(Struct):
    include_usage: bool = False


class Body(Struct):
    """The body of a request.

    passed_over: keys without effect. unsupported: keys that would have an effect, with the values that do not.
    in_place: advice for a wrong value of an unsupported key.
    """

    passed_over: ClassVar[Collection[str]] = _PASSED_OVER
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    in_place: ClassVar[Mapping[str, str]] = {}

    model: str


class Request(Body):
    """Fields of the requests that draw tokens."""

    temperature: Annotated[float, Meta(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Meta(ge=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=-1, le=1 << 30)] = 0
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] = 1.0
    logit_bias: dict[str, Annotated[float, Meta(ge=-100, le=100)]] = {}
    n: Annotated[int, Meta(ge=1, le=MOST_PROMPTS)] = 1
    seed: int | None = None
    response_format: dict[str, Any] = field(default_factory=lambda: {"type": "text"})
    stop: Stop | Annotated[list[Stop], Meta(max_length=MOST_STOPS)] = []
    stream: bool = False
    stream_options: StreamOptions | None = None

    @property
    def top(self) -> int | None:
        """Number of likeliest tokens to report at each place; None: no log-probabilities at all."""
        raise NotImplementedError

    @property
    def sampling(self) -> Sampling:
        """The sampling options, with a random seed if none is given."""
        seed = secrets.randbits(32) if self.seed is None else self.seed % 2**32
        top_p = max(self.top_p, _LEAST_TOP_P)
        top_k = max(self.top_k, 0)  # -1: off, in vLLM's API
        return Sampling(temperature=self.temperature, top_k=top_k, top_p=top_p, min_p=self.min_p, seed=seed)

    def edits(self, vocab_size: int) -> LogitEdits | None:
        """Return the changes of logits, or None. Raises ApiError for a bias of an id that the model lacks."""
        bias = dict[int, float]()
        for name, value in self.logit_bias.items():
            if not (name.isascii() and name.isdigit() and len(name) < 12 and int(name) < vocab_size):
                rule = f"names must be token ids between 0 and {vocab_size - 1}; got {name[:40]!r}: {_ADVICE}"
                raise ApiError(400, f"{_WHERE}: logit_bias: {rule}", "logit_bias")
            bias[int(name)] = value
        return LogitEdits(self.presence_penalty, self.frequency_penalty, self.repetition_penalty, bias) or None

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def tells_usage(self) -> bool:
        """Return whether a stream ends with the usage."""
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionRequest(Request, kw_only=True):
    unsupported = {"best_of": (1,), "suffix": ("",), "add_special_tokens": (True,)} | _OF_VLLM

    prompt: Text
    max_tokens: Annotated[int, Meta(ge=0, le=1 << 30)] = 16
    echo: bool = False
    logprobs: Annotated[int, Meta(ge=0, le=MOST_TOP)] | None = None

    @property
    def top(self) -> int | None:
        return self.logprobs

    def prompts(self) -> list[str | list[int]]:
        """Return the texts and lists of token ids. Raises ApiError."""
        return texts_of(self.prompt, "prompt", MOST_PROMPTS)


def texts_of(given: Text, name: str, most: int) -> list[str | list[int]]:
    """Return the texts and lists of token ids of a key. Raises ApiError."""

    def wrong() -> ApiError:
        got = f"a list of {len(given)}" if given else type_name(given)
        rule = f"must be text, token ids, or a list of 1 to {most} of either"
        return ApiError(400, f"{_WHERE}: {name} {rule}; got {got}: {_ADVICE}", name)

    if isinstance(given, str):
        return [given]
    if given and all(type(item) is int for item in given):
        return [given]
    kind = str if given and isinstance(given[0], str) else list
    if not given or len(given) > most or any(type(item) is not kind for item in given):
        raise wrong()
    if any(not item or any(type(i) is not int for i in item) for item in given if isinstance(item, list)):
        raise wrong()
    return given


class ChatRequest(Request, kw_only=True):
    unsupported = {
        "functions": ([],), "function_call": ("none",), "modalities": (["text"],), "add_special_tokens": (False,),
        "add_generation_prompt": (True,), "continue_final_message": (False,), **_OF_VLLM,
    }  # fmt: skip

    messages: Annotated[list[dict[str, Any]], Meta(min_length=1)]
    max_tokens: Annotated[int, Meta(ge=1, le=1 << 30)] | None = None
    max_completion_tokens: Annotated[int, Meta(ge=1, le=1 << 30)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Meta(ge=0, le=MOST_TOP)] = 0
    chat_template_kwargs: dict[str, Any] = {}
    reasoning_effort: str | None = None  # for templates that know it
    tools: list[dict[str, Any]] = []
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] = "auto"

    @property
    def top(self) -> int | None:
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, f"{_WHERE}: top_logprobs goes with logprobs: give that as true", "top_logprobs")
        return self.top_logprobs if self.logprobs else None

    @property
    def most_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def tool_names(self) -> list[str]:
        """Return the names of the tools that may be called.

        Raises:
            ApiError: a tool has no name, or tool_choice does not fit the tools.
        """
        names = [_tool_name(tool, f"tools[{number}]") for number, tool in enumerate(self.tools)]
        chosen = self.chosen_tool
        if chosen is not None and chosen not in names:
            raise ApiError(400, f"{_WHERE}: tool_choice: {chosen[:100]!r} is none of the tools", "tool_choice")
        if self.tool_choice == "required" and not names:
            raise ApiError(400, f"{_WHERE}: tool_choice 'required' goes with tools: give some", "tool_choice")
        return [] if self.tool_choice == "none" else names

    @property
    def chosen_tool(self) -> str | None:
        """The name in tool_choice, or None. Raises ApiError."""
        return None if isinstance(self.tool_choice, str) else _tool_name(self.tool_choice, "tool_choice")

    def template_options(self) -> dict[str, Any]:
        """Return the variables of the chat template."""
        effort = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        return {**effort, **self.chat_template_kwargs}

    def turns(self) -> list[dict[str, Any]]:
        """Return the messages with contents as text. Raises ApiError."""
        return [_turn(number, message) for number, message in enumerate(self.messages)]


def _tool_name(tool: Mapping[str, Any], where: str) -> str:
    function = tool.get("function")
    name = function.get("name") if isinstance(function, dict) and tool.get("type") == "function" else None
    if not isinstance(function, dict) or not isinstance(name, str) or not name:
        rule = "must be an object with type 'function' and function.name"
        raise ApiError(400, f"{_WHERE}: {where} {rule}: {_ADVICE}", where.partition("[")[0])
    for key, kind, called in (("description", str, "text"), ("parameters", dict, "an object, a JSON schema")):
        given = function.get(key)
        if given is not None and not isinstance(given, kind):
            rule = f"{where}.function.{key} must be {called}; got {type_name(given)}: {_ADVICE}"
            raise ApiError(400, f"{_WHERE}: {rule}", where.partition("[")[0])
    return name


def _turn(number: int, message: Mapping[str, Any]) -> dict[str, Any]:
    where = f"messages[{number}]"
    if not isinstance(message.get("role"), str):
        got = type_name(message.get("role"))
        raise ApiError(400, f"{_WHERE}: {where}.role must be text; got {got}: {_ADVICE}", "messages")
    content = message.get("content")
    if isinstance(content, list):
        parts = [part.get("text") for part in content if isinstance(part, dict) and part.get("type") == "text"]
        texts = [part for part in parts if isinstance(part, str)]
        if len(texts) < len(content):
            raise ApiError(400, f"{_WHERE}: {where}.content: only parts of type 'text' can be read", "messages")
        content = "".join(texts)
    if content is not None and not isinstance(content, str):
        raise ApiError(400, f"{_WHERE}: {where}.content must be text; got {type_name(content)}: {_ADVICE}", "messages")
    return {**message, "content": content}


R = TypeVar("R", bound=Body)


def parse_request(body: bytes, kind: type[R]) -> R:
    """Parse and check the body of a request.

    Raises:
        ApiError: it is not JSON, or a key is unknown, missing, of a wrong type, or unsupported.
    """
    try:
        value = parse_json(body, _WHERE, _ADVICE)
        if not isinstance(value, dict):
            raise ApiError(400, f"{_WHERE} must be a JSON object; got {type_name(value)}: {_ADVICE}")
        value = {name: item for name, item in value.items() if item is not None}
        _check_names(value, kind)
        return convert(value, kind, _WHERE, _ADVICE)
    except WgradError as error:
        found = re.match(rf"{_WHERE}: (\w+)", str(error))
        raise ApiError(400, str(error), found[1] if found else None) from error


def _check_names(value: Mapping[str, Any], kind: type[Body]) -> None:
    fields = kind.__struct_fields__
    for name, item in value.items():
        if name in fields or name in kind.passed_over:
            continue
        if name not in kind.unsupported:
            near = did_you_mean(name, fields)
            raise ApiError(400, f"{_WHERE}: {name[:100]!r} is no key of this server{near}: leave it out", name[:100])
        if item not in kind.unsupported[name]:
            advice = kind.in_place.get(name, "leave it out")
            raise ApiError(400, f"{_WHERE}: {name} is not supported: {advice}", name)
