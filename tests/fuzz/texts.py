"""Mutations of texts that are programs or lists: chat templates, YAML, JSONL and plain training data."""

from __future__ import annotations

import json
from random import Random
from typing import Any

from tests.fuzz.base import LINES, PLAIN_LINES
from tests.fuzz.case import Content, Special
from tests.fuzz.values import NUMBERS, TEXTS, hostile, mutate_bytes, mutate_value, write_json
from tests.fuzz.words import BAD_LINES, COSTLY, EXPRESSIONS, STATEMENTS, YAML_LINES, YAML_VALUES

# ---- chat templates ------------------------------------------------------------------------------


def _expression(rng: Random) -> str:
    text = rng.choice(EXPRESSIONS)
    kind = rng.randrange(12)
    if kind == 0:
        depth = rng.choice((20, 90, 300, 2000))
        return "(" * depth + text + ")" * depth
    if kind == 1:
        depth = rng.choice((90, 300, 2000))
        return rng.choice(
            ("not " * depth + text, "+".join([text] * depth), "[" * depth + "]" * depth, text + "|list" * depth)
        )
    if kind == 2:
        return f"{text} if {rng.choice(EXPRESSIONS)} else {rng.choice(EXPRESSIONS)}"
    return text


def mutate_template(rng: Random, source: str) -> bytes:
    """A template with a piece put in somewhere, or broken bytes."""
    if rng.random() < 0.15:
        return mutate_bytes(rng, source.encode())
    for _ in range(rng.choice((1, 1, 2, 3))):
        piece = "{{ " + _expression(rng) + " }}" if rng.random() < 0.6 else rng.choice(STATEMENTS)
        if rng.random() < 0.05:
            depth = rng.choice((18, 25, 90, 400))
            piece = "{% for i in [1] %}" * depth + piece + "{% endfor %}" * depth
        at = rng.choice((0, len(source), rng.randrange(len(source) + 1)))
        source = source[:at] + piece + source[at:]
    if rng.random() < 0.1:
        return source.encode(rng.choice(("utf-16", "latin-1", "cp1252", "utf-8-sig", "utf-32")), "replace")
    return source.encode("utf-8", "replace")


# ---- YAML ----------------------------------------------------------------------------------------


def yaml_text(rng: Random, names: list[str]) -> bytes:
    """A --config file: a few options by name with values good, odd and hostile."""
    lines = []
    for name in rng.sample(names, rng.choice((1, 1, 2, 4))):
        if name == "out":  # nothing is to be written elsewhere
            value = rng.choice(("out", "[out]", "1", "{a: 1}"))
        elif name in COSTLY:
            value = rng.choice(("1", "2", "0", "-1", "x", "[1]", "1e999", "{}", "9" * 30, "1e15"))
        elif rng.random() < 0.7:
            value = rng.choice(YAML_VALUES)
        else:
            value = write_json(rng, hostile(rng)).decode("utf-8", "surrogateescape")
        lines.append(f"{rng.choice((name, name.replace('_', '-')))}: {value}")
    if rng.random() < 0.5:
        lines.insert(rng.randrange(len(lines) + 1), rng.choice(YAML_LINES))
    data = ("\n".join(lines) + "\n").encode("utf-8", "surrogateescape")
    return mutate_bytes(rng, data) if rng.random() < 0.15 else data


# ---- conversations -------------------------------------------------------------------------------


def _content(rng: Random) -> Any:
    """Return the content of a turn: text, parts, or something invalid."""
    text = rng.choice(
        ("", " ", "a b", "x" * 300, "<think>r</think>a", "</think>", "user", "\u2042What0?", "{{ 1 }}", "é\n")
    )
    if rng.random() < 0.6:
        return text
    parts: list[Any] = [
        {"type": "text", "text": text},
        text,
        {"type": "image"},
        {"text": text},
        {"type": "text"},
        3,
        {},
    ]
    parts += [{"type": "input_text", "text": "b"}, None, [], {"type": None}, {"type": {}, "text": 1}]
    return rng.choice((None, [rng.choice(parts) for _ in range(rng.randrange(4))], {"text": text}, hostile(rng)))


def conversation(rng: Random) -> list[dict[str, Any]]:
    """Turns of roles known and not, some that call tools or think."""
    roles = ("user", "user", "assistant", "assistant", "system", "developer", "tool", "function", "asistant", "\x1b[1m")
    calls: list[Any] = [
        [{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}], [{"name": "f"}], [{}], {}, "f", [1],
        [{"function": {"name": 1}}], [], None,
    ]  # fmt: skip
    turns = []
    for _ in range(rng.choice((1, 2, 2, 3, 4, 9, 80))):
        turn = {"role": rng.choice(roles), "content": _content(rng)}
        if rng.random() < 0.2:
            turn[rng.choice(("tool_calls", "function_call"))] = rng.choice(calls)
        if rng.random() < 0.1:
            turn[rng.choice(("reasoning", "thinking", "reasoning_content"))] = rng.choice(("r", "", 1, None, ["r"]))
        turns.append(turn)
    if rng.random() < 0.7:
        turns += [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "<think>Hm.</think>He."}]
    return turns


# ---- training data -------------------------------------------------------------------------------


def data_lines(rng: Random, *kinds: list[dict[str, Any]]) -> Content:
    """A JSONL file with changed lines, or none of JSONL at all. kinds: of lines; conversations and plain ones."""
    kinds = kinds or (LINES, PLAIN_LINES, PLAIN_LINES)
    if rng.random() < 0.05:
        text = rng.choice(("x", "a b ", "\n", "é", '{"text": "ab"}\n', "<s>", "\x00"))
        times = rng.choice((10, 1000, 30_000 if text.endswith("}\n") else 100_000))  # a line takes 70 us
        return Special("repeat", [text, times, rng.choice(("", "\n", "\x00", "}"))])
    lines = [json.dumps(line).encode() for line in rng.choice(kinds)]
    for _ in range(rng.choice((1, 1, 2, 3))):
        kind, at = rng.randrange(4), rng.randrange(len(lines))
        if kind == 0:
            lines.insert(at, rng.choice(BAD_LINES).encode())
        elif kind == 1:
            lines[at] = mutate_bytes(rng, lines[at])
        else:
            lines[at] = write_json(rng, mutate_value(rng, json.loads(json.dumps(rng.choice(kinds[0])))))
    data = rng.choice((b"\n", b"\n", b"\n", b"\r\n", b"\n\n", b"\r", b"\n \n")).join(lines) + rng.choice((b"\n", b""))
    return mutate_bytes(rng, data) if rng.random() < 0.15 else data


def odd_text(rng: Random) -> str:
    """A text as a command line may carry it: bytes that are not UTF-8 are lone surrogates there."""
    own = [
        "\udc80",
        "a\udcff\udcfe",
        "\udced\udca0\udc80",
        "<s></s><|user|>",
        "é",
        "x" * 5000,
        "-",
        "--",
        "-1",
        "@x",
        "a\r\nb",
    ]
    choice: Any = rng.choice([*own, *TEXTS, *NUMBERS])
    text = str(choice)
    return text[:20_000].replace("\x00", "" if rng.random() < 0.5 else "\x00")
