"""Chat templates in Jinja: the environment of transformers, and marks that show which message a character comes from.

Runs in the process of `template_process.py`, never in that of a run, because a template is untrusted code.

The marks, between two characters that the conversation does not contain: the number of the message at the start of each
pass through a loop over the messages, the end of the loop, and the beginning and end of each {% generation %} block.
They are removed again, and the rest must equal the text that the template renders without them.

Source of the behavior: `render_jinja_template` of transformers (utils/chat_template_utils.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any

import jinja2
import jinja2.parser
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

Range = tuple[int, int, int]  # characters [start, end) of the text, and a message's number

_LONGEST = 64 << 20  # characters of a rendered conversation
_TEMPLATE = "<template>"  # Jinja's name for the source of a template that has no file
_PRIVATE = range(0xF0000, 0xFFFFE)  # characters that Unicode leaves to private use


class TemplateFailure(Exception):
    """A template failed. kind: "compile", "refuse" (raised by the template itself) or "fail"; line: 0 if unknown."""

    def __init__(self, kind: str, message: str, line: int = 0) -> None:
        super().__init__(message)
        text = " ".join(message.split())[:300]
        self.kind, self.message, self.line = kind, text if text.isprintable() else ascii(text)[1:-1], line


# ---- the environment -----------------------------------------------------------------------------
class _Marks(Extension):
    """The {% generation %} blocks, and the calls that `_instrument` adds to a template."""

    tags = {"generation"}

    def __init__(self, environment: jinja2.Environment) -> None:
        super().__init__(environment)
        self.seen = False  # a {% generation %} block
        self.stop()

    def start(self, messages: list[dict[str, Any]], opening: str, closing: str) -> None:
        self._numbers = {id(message): number for number, message in enumerate(messages)}
        self._over_messages: set[int] = set()  # loops that are at one
        self._opening, self._closing = opening, closing

    def stop(self) -> None:
        """Stop writing marks."""
        self.start([], "", "")

    def _mark(self, kind: str, loop: int, number: int) -> str:
        return f"{self._opening}{kind}{loop},{number}{self._closing}" if self._opening else ""

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        self.seen = True
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_generation"), [], [], body).set_lineno(line)

    def _generation(self, caller: Callable[[], str]) -> str:
        return self._mark("g", 0, 0) + caller() + self._mark("h", 0, 0)

    def _pass(self, loop: int, *values: Any) -> str:
        """Mark the start of a pass through a loop; values: those of its variables, which may be a message."""
        number = next((n for value in values if (n := self._numbers.get(id(value))) is not None), None)
        if number is None:
            return ""
        self._over_messages.add(loop)
        return self._mark("m", loop, number)

    def _after(self, loop: int) -> str:
        # Only after a loop over messages: with a mark, the empty text of a macro would not be empty.
        if loop not in self._over_messages:
            return ""
        self._over_messages.discard(loop)
        return self._mark("e", loop, 0)


class _Dict:
    """`dict` in a template, without attributes that lead to the class."""

    def __call__(self, *args: Any, **values: Any) -> dict[Any, Any]:
        return dict(*args, **values)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(jinja2.utils.Namespace):
    """`namespace` in a template, without names that begin with an underscore, which no template needs."""

    def __init__(*args: Any, **values: Any) -> None:  # so that a template may use any name, `self` too
        attributes = dict(*args[1:], **values)
        for name in attributes:
            _Namespace._check(name)
        jinja2.utils.Namespace.__init__(args[0], attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _Namespace._check(name)
        jinja2.utils.Namespace.__setitem__(self, name, value)

    @staticmethod
    def _check(name: Any) -> None:
        if str(name).startswith("_"):
            raise jinja2.exceptions.SecurityError(f"namespace: {name!r} begins with an underscore")


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(str(message))


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    # Jinja's own filter escapes for HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> jinja2.Environment:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Marks, loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    environment.globals["dict"] = _Dict()
    environment.globals["namespace"] = _Namespace
    return environment


# ---- marking the loops ---------------------------------------------------------------------------
def _instrument(node: nodes.Node, marks: _Marks, loops: list[int], in_loop: bool = False) -> None:
    """Add a call of `_pass` at the start of each loop's body and one of `_after` after the loop. loops: [their number].

    Also refuses `break` and `continue` outside a loop, which Jinja would hand to Python.
    """
    if isinstance(node, (nodes.Break, nodes.Continue)) and not in_loop:
        word = type(node).__name__.lower()
        raise TemplateFailure("compile", f"'{word}' outside a loop", node.lineno)
    if isinstance(node, (nodes.Macro, nodes.CallBlock, nodes.Block)):
        in_loop = False
    for name in node.fields:
        value = getattr(node, name, None)
        if isinstance(value, nodes.Node):
            _instrument(value, marks, loops, in_loop)
        elif isinstance(value, list):
            inside = (name == "body") if isinstance(node, nodes.For) else in_loop
            changed: list[Any] = []
            for child in value:
                if isinstance(child, nodes.Node):
                    _instrument(child, marks, loops, inside)
                changed.append(child)
                if isinstance(child, nodes.For):
                    changed.append(_mark_loop(child, marks, loops))
            setattr(node, name, changed)


def _mark_loop(loop: nodes.For, marks: _Marks, loops: list[int]) -> nodes.Node:
    """Mark the passes through `loop`, and return the node to put after it."""
    loops[0] += 1
    number = nodes.Const(loops[0])
    names = [n for n in [loop.target, *loop.target.find_all(nodes.Name)] if isinstance(n, nodes.Name)]
    values: list[nodes.Expr] = [nodes.Name(name.name, "load") for name in names]
    indexed = dict.fromkeys(
        (found.node.name, found.arg.name)
        for child in loop.body
        for found in child.find_all(nodes.Getitem)
        if isinstance(found.node, nodes.Name) and isinstance(found.arg, nodes.Name)
    )
    for name, index in indexed:
        # In `for i in range(messages|length)` the message is messages[i], or the same index of another list.
        if index in {n.name for n in names}:
            listed = nodes.Name(name, "load")
            item = nodes.Getitem(listed, nodes.Name(index, "load"), "load")
            is_there = nodes.Test(listed, "defined", [], [], None, None)
            values.append(nodes.CondExpr(is_there, item, nodes.Const(None)))
    call = marks.call_method("_pass", [number, *values], lineno=loop.lineno)
    loop.body.insert(0, nodes.Output([call]).set_lineno(loop.lineno, override=True))
    after = marks.call_method("_after", [number], lineno=loop.lineno)
    return nodes.Output([after]).set_lineno(loop.lineno, override=True)


# ---- compiled templates ----------------------------------------------------------------------------
class CompiledTemplate:
    """A template ready to render. Raises TemplateFailure if it does not compile."""

    def __init__(self, source: str) -> None:
        environment = _environment()
        self._marks: _Marks = environment.extensions[_Marks.identifier]  # type: ignore[assignment]
        self.source = source
        try:
            tree = environment.parse(source)
            _instrument(tree, self._marks, [0])
            self._template = environment.from_string(tree)
        except TemplateFailure:
            raise
        except jinja2.TemplateSyntaxError as error:
            raise TemplateFailure("compile", error.message or "a mistake", error.lineno) from None
        except RecursionError as error:
            raise TemplateFailure("compile", "it is nested too deeply", _line_compiled(error)) from None
        except Exception as error:  # of Python's own compiler too: too large, not valid after all
            raise TemplateFailure(
                "compile", f"{type(error).__name__}: {error}".rstrip(": "), _line_compiled(error)
            ) from None

    @property
    def tells_generated(self) -> bool:
        """Return whether there is a {% generation %} block in it."""
        return self._marks.seen

    def render(self, values: dict[str, Any]) -> str:
        """Return the text. Raises TemplateFailure if the template raises anything."""
        pieces, length = [], 0
        try:
            for piece in self._template.generate(values):
                pieces.append(piece)
                length += len(piece)
                if length > _LONGEST:
                    raise TemplateFailure("fail", f"it writes more than {_LONGEST} characters")
            return "".join(pieces)
        except TemplateFailure:
            raise
        except jinja2.TemplateError as error:
            raise TemplateFailure("refuse", error.message or type(error).__name__, _line_of(error)) from None
        except Exception as error:  # whatever the template's own code meets
            raise TemplateFailure("fail", f"{type(error).__name__}: {error}".rstrip(": "), _line_of(error)) from None

    def render_marked(self, values: dict[str, Any]) -> tuple[str, list[Range] | None, list[tuple[int, int]]]:
        """Return the text, the ranges of the messages (None: unknown), and the ranges of {% generation %} blocks."""
        text = self.render(values)
        opening, closing = _unused(self.source + json.dumps(values, ensure_ascii=False))
        self._marks.start(values["messages"], opening, closing)
        try:
            marked = self.render(values)
        finally:
            self._marks.stop()
        plain, messages, generated = _unmark(marked, opening, closing)
        return (text, messages, generated) if plain == text else (text, None, [])


def _line_of(error: BaseException) -> int:
    """Return the line of the template at which `error` was raised; 0: unknown."""
    line, trace = 0, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == _TEMPLATE:
            line = trace.tb_lineno
        trace = trace.tb_next
    return line


def _line_compiled(error: BaseException) -> int:
    """Return the line that Jinja was parsing or compiling when `error` was raised; 0: unknown."""
    line, trace = 0, error.__traceback__
    while trace is not None:
        names = trace.tb_frame.f_locals
        if isinstance(names.get("self"), jinja2.parser.Parser):
            line = names["self"].stream.current.lineno
        elif isinstance(names.get("node"), nodes.Node):
            line = names["node"].lineno or line
        trace = trace.tb_next
    return line


def _unused(text: str) -> tuple[str, str]:
    """Return two characters that `text` does not contain."""
    found: Iterator[str] = (c for code in _PRIVATE if (c := chr(code)) not in text)
    return next(found), next(found)


def _unmark(marked: str, opening: str, closing: str) -> tuple[str, list[Range], list[tuple[int, int]]]:
    """Return the text without marks, the ranges of messages (ascending, not empty), and those of generation blocks."""
    pieces: list[str] = []
    messages: list[Range] = []
    generated: list[tuple[int, int]] = []
    loops: list[tuple[int, int]] = []  # (loop, message) from the outermost to the innermost
    begun: list[int] = []
    at = 0
    for position, piece in enumerate(re.split(f"{opening}([megh]\\d+,\\d+){closing}", marked)):
        if position % 2 == 0:
            if piece and loops:
                messages.append((at, at + len(piece), loops[-1][1]))
            at += len(piece)
            pieces.append(piece)
            continue
        loop, number = map(int, piece[1:].split(","))
        if piece[0] == "g":
            begun.append(at)
        elif piece[0] == "h":
            start = begun.pop() if begun else at
            if start < at and not begun:
                generated.append((start, at))
        else:
            places = [place for place, entry in enumerate(loops) if entry[0] == loop]
            if places:
                del loops[places[0] :]
            if piece[0] == "m":
                loops.append((loop, number))
    return "".join(pieces), _joined(messages), generated


def _joined(ranges: list[Range]) -> list[Range]:
    """Join neighboring ranges of the same message."""
    joined: list[Range] = []
    for start, end, number in ranges:
        if joined and joined[-1][1:] == (start, number):
            start = joined.pop()[0]
        joined.append((start, end, number))
    return joined
