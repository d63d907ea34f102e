"""Decoding untrusted JSON and YAML files into typed structures (msgspec), with one form of error:

    OPTION: FILE: KEY must be RULE; got VALUE: ADVICE

`kind` below is any type that msgspec knows, such as a Struct whose fields have rules (`msgspec.Meta`), and whose
`__post_init__` raises ValueError for rules between fields. Unknown keys are ignored.
"""

from __future__ import annotations

import json
import math
import os
import re
import reprlib
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec
import yaml

from wgrad.device.errors import WgradError
from wgrad.train.files.input_files import one_line, read_input

T = TypeVar("T")

FETCH = "fetch the file again"
JSON_LIMIT = 16 << 20  # bytes; the largest of these files, a tokenizer_config.json of 2026, has about 1 MiB
YAML_LIMIT = 64 << 10  # PyYAML reads some 300 kB a second
_MOST_YAML_VALUES = 20_000  # with repetitions by aliases, of which a few lines can fill any memory
_DEPTH = 64  # of nesting; far below Python's limit, so that any value that is read can be written
_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "bool": "true or false",
    "object": "an object",
    "array": "a list",
    "null": "null",
}
_LIMITS = {">=": "of at least", "<=": "of at most", ">": "above", "<": "below"}
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def read_json(
    path: str | os.PathLike[str], kind: type[T], source: str, advice: str = FETCH, *, from_python: bool = False
) -> T:
    """Read a JSON file as a `kind`.

    source: the option that named it; advice: how to mend a wrong file; from_python: see `parse_json`.

    Raises:
        WgradError: the file cannot be read, or is not of the kind.
    """
    data, where = read_input(path, source, JSON_LIMIT), f"{source}: {os.fspath(path)}"
    return convert(parse_json(data, where, advice, from_python=from_python), kind, where, advice)


def decode_json(data: bytes, kind: type[T], where: str, advice: str = FETCH) -> T:
    """Decode JSON text as a `kind`. Raises WgradError, which begins with `where`."""
    return convert(parse_json(data, where, advice), kind, where, advice)


def parse_json(data: bytes, where: str, advice: str = FETCH, *, from_python: bool = False) -> Any:
    """Decode JSON text as plain values that can be written again: without lone surrogates, NaN and infinities.

    from_python: accept NaN and infinities, which Python's json, and so transformers, writes.

    Raises:
        WgradError: it is not such JSON.
    """
    not_finite = list[str]()

    def number(text: str) -> float:
        value = float(text)
        if not math.isfinite(value):
            not_finite.append(text[:40])
        return value

    try:
        value = json.loads(_text(data, where, advice), parse_constant=number, parse_float=number)
        if _SURROGATE.search(data):
            json.dumps(value, ensure_ascii=False).encode()
        _check_depth(value)
    except UnicodeEncodeError as error:
        got = ascii(error.object[error.start])
        raise WgradError(f"{where} must be Unicode text; got half of a surrogate pair, {got}: {advice}") from error
    except RecursionError:
        raise _too_deep(where, advice) from None
    except json.JSONDecodeError as error:
        raise WgradError(f"{where} line {error.lineno} is not valid JSON: {error.msg}: {advice}") from error
    except ValueError as error:
        raise WgradError(f"{where} is not valid JSON: {error}: {advice}") from error
    if not_finite and not from_python and (key := _not_finite_at(value)) is not None:
        got = not_finite[0]
        raise WgradError(f"{where}: {key or 'the whole'} must be a finite number; got {got}: {advice}")
    return value


def _not_finite_at(value: Any, path: str = "") -> str | None:
    """Return the path of the first NaN or infinity; None if there is none."""
    if isinstance(value, float):
        return None if math.isfinite(value) else path
    if isinstance(value, dict):
        parts = [(f"{path}.{one_line(key)}".removeprefix("."), part) for key, part in value.items()]
    else:
        parts = [(f"{path}[{i}]", part) for i, part in enumerate(value)] if isinstance(value, list) else []
    return next((found for at, part in parts if (found := _not_finite_at(part, at)) is not None), None)


def _text(data: bytes, where: str, advice: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        got = f"byte {data[error.start]:#04x} at {error.start}"
        raise WgradError(f"{where} must be UTF-8 text; got {got}: {advice}") from error


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(_DEPTH):
        level = [
            child
            for item in level
            for child in (item.values() if isinstance(item, dict) else item if isinstance(item, list) else ())
        ]
        if not level:
            return
    raise RecursionError


def _too_deep(where: str, advice: str) -> WgradError:
    return WgradError(f"{where} must be nested at most {_DEPTH} deep; got more: {advice}")


# ---- YAML --------------------------------------------------------------------------------------
class _Loader(yaml.SafeLoader):
    """A loader that refuses aliases of values around them, or of too many; repeated keys, of which the last would win;
    and numbers that have another value in YAML 1.1 than they seem: 010 is 8, 1:30 is 90.
    """

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._depth = self._values = 0
        self._sizes: dict[str, int] = {}  # values of each anchor, once it is composed

    def compose_node(self, parent: Any, index: Any) -> Any:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        if self._depth > _DEPTH:  # long before the stack is full, where anything may fail
            raise RecursionError
        before, self._values, self._depth = self._values, self._values + 1, self._depth + 1
        try:
            if isinstance(event, yaml.AliasEvent):
                if event.anchor in self.anchors and event.anchor not in self._sizes:
                    raise _problem(f"*{event.anchor} stands within &{event.anchor}", event)
                self._values += self._sizes.get(event.anchor or "", 0)
            node = super().compose_node(parent, index)
        finally:
            self._depth -= 1
        if self._values > _MOST_YAML_VALUES:
            raise _problem(f"there are more than {_MOST_YAML_VALUES} values, with those of aliases", event)
        if isinstance(event, yaml.NodeEvent) and not isinstance(event, yaml.AliasEvent):
            if event.anchor:
                self._sizes[event.anchor] = self._values - before
            _check_keys(node)
        return node

    def flatten_mapping(self, node: Any) -> None:
        """Merge mappings (<<), of which the first wins, and the mapping itself over all.

        PyYAML's own mixes up values of keys that Python interns, such as those of one letter.
        """
        merged: list[Any] = []
        own = [pair for pair in node.value if pair[0].tag != "tag:yaml.org,2002:merge"]
        for _, source in (pair for pair in node.value if pair[0].tag == "tag:yaml.org,2002:merge"):
            for one in source.value if isinstance(source, yaml.SequenceNode) else [source]:
                if not isinstance(one, yaml.MappingNode):
                    raise _problem("<< takes a mapping, or a list of mappings", one)
                self.flatten_mapping(one)
                merged = one.value + merged
        for key, _ in own:
            if key.tag == "tag:yaml.org,2002:value":  # the key =
                key.tag = "tag:yaml.org,2002:str"
        node.value = merged + own

    def construct_decimal(self, node: Any) -> int:
        if re.fullmatch(r"[-+]?0[\d_]+|.*:.*", node.value):
            problem = f"{node.value} is another number in YAML: write it in decimal, or in quotes"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        return self.construct_yaml_int(node)


def _problem(text: str, at: Any) -> yaml.MarkedYAMLError:
    return yaml.composer.ComposerError(None, None, text, at.start_mark)


def _check_keys(node: Any) -> None:
    seen = set[str]()
    for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
        if isinstance(key, yaml.ScalarNode) and key.value in seen:
            raise _problem(f"{key.value!r} is given twice", key)
        seen.add(key.value if isinstance(key, yaml.ScalarNode) else "")


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_decimal)


def read_yaml(path: str | os.PathLike[str], source: str, advice: str = "correct it") -> Any:
    """Read a YAML file as plain values; None for an empty file. Raises WgradError, which names file and line."""
    where = f"{source}: {os.fspath(path)}"
    text = _text(read_input(path, source, YAML_LIMIT), where, advice)
    try:
        value = yaml.load(text, _Loader)
        _check_depth(value)
        return value
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or type(error).__name__
        raise WgradError(f"{where}{line}: not valid YAML: {problem}: {advice}") from error
    except RecursionError:
        raise _too_deep(where, advice) from None
    except Exception as error:  # `!!int ""`, a month 13, 5,000 digits: PyYAML's constructors raise any error
        raise WgradError(f"{where}: not valid YAML: {error or type(error).__name__}: {advice}") from error


# ---- types -------------------------------------------------------------------------------------
def convert(value: Any, kind: type[T], where: str, advice: str = FETCH) -> T:
    """Convert plain values to a `kind`. Raises WgradError, which begins with `where`."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise WgradError(f"{where}: {_explain(str(error), value, kind)}: {advice}") from error
    except RecursionError:
        raise _too_deep(where, advice) from None


def _explain(message: str, value: Any, kind: Any) -> str:
    """Rewrite msgspec's message as key, rule and value."""
    problem, _, place = message.partition(" - at `$")
    steps = [(name, index) for name, index in re.findall(r"\.([\w-]+)|\[(\d+|\.\.\.)\]", place)]
    path, found, keys = "", value, list[Any]()
    for name, index in steps:
        key: Any = name or (int(index) if isinstance(found, list) else index)
        if index == "...":
            key, value = _first_wrong(value, keys, kind, message)
        keys.append(key)
        path += f".{name}" if name else f"[{key}]"
        found = found[key]
    path = path.removeprefix(".")
    if missing := re.fullmatch(r"Object missing required field `(.*)`", problem):
        return f"{path}.{missing[1]} is missing".removeprefix(".")
    rule = _choices(kind, path) if problem.startswith("Invalid enum value") else _rule(problem)
    if rule is None:  # a complete message of a __post_init__
        problem = one_line(problem, 1000)
        return f"{path}: {problem}" if path else problem
    return f"{path or 'the whole'} must be {rule}; got {show(found)}"


def _structs(kinds: list[Any]) -> list[Any]:
    """Return the structs among types and the members of their unions."""
    parts = [part for kind in kinds for part in (get_args(kind) or (kind,))]
    return [part for part in parts if isinstance(part, type) and issubclass(part, msgspec.Struct)]


def _choices(kind: Any, path: str) -> str | None:
    """'one of ...' for a key of a struct whose type lists its values."""
    found: list[Any] = []
    kinds = [kind]
    for name in path.split("."):
        kinds = [get_type_hints(part).get(name) for part in _structs(kinds)]
    while kinds:
        part = kinds.pop()
        found += get_args(part) if get_origin(part) is Literal else ()
        found += (True, False) if part is bool else ()
        kinds += () if get_origin(part) is Literal else get_args(part)
    return f"one of {', '.join(map(show, found))}" if found else None


def _first_wrong(value: Any, keys: list[Any], kind: Any, message: str) -> tuple[Any, Any]:
    """Return the key whose value msgspec refused in the mapping at `keys`, and `value` with only this key there.

    msgspec reports `[...]` for any key of a mapping, so each is tried alone.
    """
    mapping = value
    for key in keys:
        mapping = mapping[key]

    def alone(key: Any, here: Any, rest: list[Any]) -> Any:
        if not rest:
            return {key: mapping[key]}
        copy = here.copy()
        copy[rest[0]] = alone(key, here[rest[0]], rest[1:])
        return copy

    for key in mapping:
        try:
            msgspec.convert(narrowed := alone(key, value, keys), kind)
        except msgspec.ValidationError as error:
            if str(error) == message:
                return key, narrowed
    raise AssertionError(message)


def _rule(problem: str) -> str | None:
    """Rewrite 'Expected `int` >= 1' as 'a whole number of at least 1'; None for a message that is not msgspec's."""
    match = re.match(r"Expected `([^`]+)`(.*?)(?:, got .*)?$", problem)
    if match is None:
        return None
    words = " or ".join(_WORDS.get(word, word) for word in match[1].split(" | "))
    limit = match[2].strip()
    sign, _, number = limit.partition(" ")
    if sign in _LIMITS:
        return f"{words} {_LIMITS[sign]} {number.removesuffix('.0')}"
    return f"{words} {limit}".rstrip()


def show(value: Any) -> str:
    """Show a value in an error: one line of bounded length."""
    text = json.dumps(value) if value is None or isinstance(value, bool) else _REPR.repr(value)
    return text if text.isprintable() else ascii(text)


_REPR = reprlib.Repr()
_REPR.maxlevel, _REPR.maxstring, _REPR.maxother, _REPR.maxlong = 2, 80, 80, 40
