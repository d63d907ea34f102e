"""An interpreter of the part of Go's template language that `ollama_template.py` writes.

Text, `{{ value }}`, `if`/`else if`/`else`/`end`, `range $i, $_ := .Messages` and `$name := value`. Values are
fields, variables, numbers, strings, and calls of `and`, `or`, `not`, `eq`, `ne`, `len` and `slice`.
Source of the behavior: pkg.go.dev/text/template.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from wgrad.device.whole_numbers import whole_number

_ACTION = re.compile(r"\{\{((?:\"(?:\\.|[^\"\\])*\"|(?!\}\}).)*)\}\}", re.DOTALL)
_TOKEN = re.compile(r"\s*(\"(?:\\.|[^\"\\])*\"|:=|[(),]|[^\s(),:]+)")
_FIELD = re.compile(r"(\$\w*)?((?:\.\w*)*)")
_ESCAPE = re.compile(r"\\(?:U([0-9a-f]{8})|.)", re.DOTALL)
_NEEDS_QUOTES = re.compile(r"\{\{|\}\}|\"\"\"")

_CALLS: dict[str, Callable[..., Any]] = {
    "and": lambda *values: next((v for v in values if not v), values[-1]),
    "or": lambda *values: next((v for v in values if v), values[-1]),
    "not": lambda value: not value,
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "len": len,
    "slice": lambda values, start: values[start:],
}


class GoTemplateError(Exception):
    """A template uses an unsupported part of the language, or is malformed."""


def literal(text: str) -> str:
    """Return `text` as a piece of a template that can be quoted in a Modelfile."""
    is_kept = all(
        character.isprintable() or character == "\n" for character in text
    )  # Ollama's parser drops other characters
    if is_kept and not _NEEDS_QUOTES.search(text) and not text.endswith('"'):
        return text
    return '{{ "' + "".join(map(_in_quotes, text)) + '" }}'


def _in_quotes(character: str) -> str:
    if character.isprintable() and character not in '"\\':
        return character
    return json.dumps(character)[1:-1] if character.isascii() else f"\\U{ord(character):08x}"


def _unquoted(token: str) -> str:
    """Return the text of a quoted token. Go has escapes such as `\\U0001f689`, which JSON lacks."""
    whole = _ESCAPE.sub(lambda found: chr(int(found[1], 16)) if found[1] else found[0], token)
    text: str = json.loads(whole, strict=False)
    return text


def render(template: str, values: Mapping[str, Any]) -> str:
    """Return the text of a template. Raises GoTemplateError."""
    pieces = _ACTION.split(template)  # text, action, text, ...
    nodes = [("text", piece) if n % 2 == 0 else ("action", piece.strip()) for n, piece in enumerate(pieces)]
    written: list[str] = []
    end = _run(nodes, 0, _Scope(values, {"$": values}), written.append, True)
    if end < len(nodes):
        raise GoTemplateError(f"{{{{ {nodes[end][1]} }}}} closes nothing")
    return "".join(written)


class _Scope:
    """The variables, and the value of the dot."""

    def __init__(self, dot: Any, variables: dict[str, Any]) -> None:
        self.dot, self.variables = dot, variables


def _run(nodes: Sequence[tuple[str, str]], at: int, scope: _Scope, write: Callable[[str], Any], live: bool) -> int:
    """Run nodes up to the `else` or `end` that closes the block, and return its index. live: whether to write."""
    while at < len(nodes):
        kind, text = nodes[at]
        word = text.split(" ", 1)[0]
        if kind == "text":
            if live:
                write(text)
        elif word in ("end", "else"):
            return at
        elif word == "if":
            at = _branches(nodes, at, scope, write, live)
        elif word == "range":
            at = _loop(nodes, at, scope, write, live)
        elif live and ":=" in text:
            name, _, value = text.partition(":=")
            scope.variables[name.strip()] = _value(value, scope)
        elif live:
            write(_shown(_value(text, scope)))
        at += 1
    return at


def _branches(nodes: Sequence[tuple[str, str]], at: int, scope: _Scope, write: Callable[[str], Any], live: bool) -> int:
    taken = False
    while True:
        _, text = nodes[at]
        condition = text.removeprefix("else").strip().removeprefix("if").strip()
        here = live and not taken and (not condition or bool(_value(condition, scope)))
        taken = taken or here
        at = _run(nodes, at + 1, _Scope(scope.dot, dict(scope.variables)), write, here)
        if at >= len(nodes):
            raise GoTemplateError("an if has no end")
        if nodes[at][1] == "end":
            return at


def _loop(nodes: Sequence[tuple[str, str]], at: int, scope: _Scope, write: Callable[[str], Any], live: bool) -> int:
    found = re.fullmatch(r"range (\$\w+), (\$\w+) := (.+)", nodes[at][1])
    if not found:
        raise GoTemplateError(f"{{{{ {nodes[at][1]} }}}} is no range over a list")
    items = list(_value(found[3], scope)) if live else []
    for index, item in enumerate(items):
        inner = _Scope(item, {**scope.variables, found[1]: index, found[2]: item})
        end = _run(nodes, at + 1, inner, write, True)
    if not items:
        end = _run(nodes, at + 1, scope, write, False)
    if end >= len(nodes) or nodes[end][1] != "end":
        raise GoTemplateError("a range has no end")
    return end


def _value(text: str, scope: _Scope) -> Any:
    tokens = _TOKEN.findall(text)
    value = _call(tokens, scope)
    if tokens:
        raise GoTemplateError(f"cannot read {text!r}")
    return value


def _call(tokens: list[str], scope: _Scope) -> Any:
    """Read operands up to a closing parenthesis; the first may be a function."""
    if not tokens:
        raise GoTemplateError("a value is missing")
    name = tokens[0]
    if name not in _CALLS:
        return _operand(tokens, scope)
    tokens.pop(0)
    operands = []
    while tokens and tokens[0] != ")":
        operands.append(_operand(tokens, scope))
    try:
        return _CALLS[name](*operands)
    except (TypeError, IndexError) as error:
        raise GoTemplateError(f"{name}: {error}") from None


def _operand(tokens: list[str], scope: _Scope) -> Any:
    token = tokens.pop(0)
    if token == "(":
        value = _call(tokens, scope)
        if not tokens or tokens.pop(0) != ")":
            raise GoTemplateError("a parenthesis is not closed")
        return value
    if token.startswith('"'):
        return _unquoted(token)
    if (number := whole_number(token)) is not None:
        return number
    field = _FIELD.fullmatch(token)
    if not field or not token:
        raise GoTemplateError(f"cannot read {token!r}")
    try:
        value = scope.variables[field[1]] if field[1] else scope.dot
        for name in filter(None, field[2].split(".")):
            value = value[name]
    except KeyError as error:
        raise GoTemplateError(f"there is no {error.args[0]}") from None
    return value


def _shown(value: Any) -> str:
    if not isinstance(value, str):
        raise GoTemplateError(f"{value!r} is no text")
    return value
