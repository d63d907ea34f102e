"""Mutations of JSON values and their text: wrong types, odd numbers, deep nesting, duplicate keys, broken text."""

from __future__ import annotations

import copy
import json
import math
import sys
from random import Random
from typing import Any


class Raw(str):
    """JSON text that is written unchanged, since json.dumps cannot write it (1e999, duplicate keys, ...)."""


NUMBERS: list[Any] = [
    *(0, -1, 1, 2, 3, 7, 255, 256, 65535, 2**31 - 1, 2**31, -(2**31), 2**32, 2**53, 2**63 - 1, 2**63, 2**64, 2**70),
    *(0.5, -0.0, 1.5, 1e-300, 5e-324, 1e38, 1e308, -1e308, 100_000, 10**9, 10**15),
    *map(Raw, ("1e999", "-1e999", "NaN", "Infinity", "-Infinity", "1e-999", "1" + "0" * 400, "1" * 5000, "-0", "1.0")),
]
TEXTS: list[Any] = [
    *("", " ", "x", "None", "null", "true", "0", "1", "nan", "inf", "1e999", "\x00", "a\x00b", "\n", "\t", "\x1b[31m"),
    *("é", "\u2028", "\ufeff", "\U0001f600", "e\u0301", "x" * 300, "x" * 100_000, "..", "/", "~", "../../etc/passwd"),
    *("/etc/passwd", "/dev/zero", "CON", "{{ x }}", "{% for %}", "%s%n", "<|end|>", "</s>", "__class__", "(a+)+$", "["),
    *map(Raw, ('"\\ud800"', '"a\\udc80b"', '"\\udfff\\ud800"', '"\\u0000"')),
]
TREES: list[Any] = [
    *([], [[]], {}, [None], [1, "a"], [-1], [0.5], [True], {"a": 1}, {"": ""}, {"type": "x"}, {"content": None}, [{}]),
    *([1] * 1000, [""] * 3, {"a": {"b": {"c": []}}}, {"content": "x"}, [[1, 2], [3]], {"0": 0}),
    *map(Raw, ("[" * 200 + "]" * 200, "[" * 5000 + "]" * 5000, '{"a":' * 3000 + "1" + "}" * 3000, "[" * 100_000)),
    Raw('{"a": 1, "a": 2}'),
]


def hostile(rng: Random) -> Any:
    """A value of any type."""
    value = rng.choice(rng.choice(([None, True, False], NUMBERS, NUMBERS, TEXTS, TREES)))
    return copy.deepcopy(value) if isinstance(value, (list, dict)) else value  # which may be changed in its place


def near(rng: Random, value: Any) -> Any:
    """A value of much the same kind, that may be as valid as `value`, or off by little."""
    if isinstance(value, bool):
        return rng.choice([not value, str(value).lower(), int(value)])
    if isinstance(value, int):
        changed = [
            value + 1,
            value - 1,
            value * 2,
            value // 2,
            -value,
            value * 1000,
            float(value),
            value + 0.5,
            str(value),
        ]
        return rng.choice([*changed, [value], value << 20, value << 40])
    if isinstance(value, float):
        whole = int(value) if math.isfinite(value) else 0
        return rng.choice([-value, value * 1e6, value * 1e-6, value * 1e300, whole, str(value), [value]])
    if isinstance(value, str):
        changed = [value + "x", value[:-1], value * 2, value.upper(), value[::-1], value + "\x00", " " + value]
        octets = value.encode("utf-8", "replace")
        return rng.choice([*changed, [value], {value: value}, octets, "../" + value, "/" + value])
    if isinstance(value, list):
        changed = [
            value * 2,
            value[:-1],
            value[::-1],
            [*value, None],
            [*value, value[:1]],
            [value],
            dict.fromkeys("ab", value),
        ]
        return rng.choice([*changed, *value[:1], value * 50 if len(value) < 50 else value[:2]])
    if isinstance(value, dict):
        return rng.choice([list(value.items()), list(value.values()), [value], list(value), {**value, "extra": 1}])
    return rng.choice([0, "", False, [], {}])


def _spots(value: Any, rng: Random) -> tuple[Any, Any] | None:
    """A random (container, key) within `value`; shallow ones are likelier."""
    spot, here = None, value
    while isinstance(here, (dict, list)) and here:
        key = rng.choice(list(here)) if isinstance(here, dict) else rng.randrange(len(here))
        spot, here = (here, key), here[key]
        if rng.random() < 0.55:
            break
    return spot


def mutate_value(rng: Random, value: Any) -> Any:
    """A copy with one to four places changed; now and then something else altogether."""
    if rng.random() < 0.04:
        return hostile(rng)
    value = copy.deepcopy(value)
    for _ in range(rng.choice((1, 1, 1, 2, 2, 4))):
        spot = _spots(value, rng)
        if spot is None:
            return hostile(rng)
        _change(rng, value, *spot)
    return value


def _change(rng: Random, root: Any, at: Any, key: Any) -> None:
    chance = rng.random()
    if chance < 0.40:
        at[key] = hostile(rng)
    elif chance < 0.70:
        at[key] = near(rng, at[key])
    elif chance < 0.82:
        del at[key]
    elif isinstance(at, list):
        at.insert(rng.randrange(len(at) + 1), copy.deepcopy(rng.choice(at)) if chance < 0.9 else hostile(rng))
    elif chance < 0.86:
        at[rng.choice([str(key).upper(), str(key) + "_", "", "\x00", "__proto__", "x" * 300])] = at.pop(key)
    elif chance < 0.90:
        other = rng.choice(list(at))
        at[key], at[other] = at[other], at[key]
    elif chance < 0.94:
        at[key] = Raw(_write(at[key]) + ", " + json.dumps(str(key)) + ": " + _write(hostile(rng)))  # a duplicate key
    elif chance < 0.97:
        at[key] = Raw(_write(copy.deepcopy(root)))  # the whole within itself
    else:
        at[str(hostile(rng))[:300]] = hostile(rng)


def _write(value: Any) -> str:
    """Return JSON text of values that may be nested deeper than Python's limit.

    The limit stays unchanged for the command that reads the text.
    """
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(20 * limit)
    try:
        return _text(value)
    except RecursionError:  # put into itself again and again
        return "[" * 10_000 + "]" * 10_000
    finally:
        sys.setrecursionlimit(limit)


def _text(value: Any) -> str:
    if isinstance(value, Raw):
        return str(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(str(k))}: {_text(v)}" for k, v in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_text, value)) + "]"
    if isinstance(value, bytes):
        return json.dumps(value.decode("latin-1"))
    return json.dumps(value)


def write_json(rng: Random, value: Any) -> bytes:
    """JSON text of a (changed) value; one time in twelve the text is broken as well."""
    text = _write(value).encode()
    return mutate_bytes(rng, text) if rng.random() < 0.08 else text


def mutate_json(rng: Random, text: bytes) -> bytes:
    """Return JSON text with changed values, or broken text."""
    if rng.random() < 0.1:
        return mutate_bytes(rng, text)
    return write_json(rng, mutate_value(rng, json.loads(text)))


# ---- bytes -------------------------------------------------------------------------------------
LFS_POINTER = (
    b"version https://git-lfs.github.com/spec/v1\n"
    b"oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 12345\n"
)


def mutate_bytes(rng: Random, data: bytes) -> bytes:
    """Any file: cut, flipped bits, other encodings, other files."""
    at = rng.randrange(len(data) + 1)
    piece = data[at : at + rng.choice((1, 8, 64))]
    kind = rng.randrange(16)
    if kind == 0:
        return data[:at]
    if kind == 1:
        return data[at:]
    if kind in (2, 3, 4) and data:
        changed = bytearray(data)
        for _ in range(rng.choice((1, 1, 3, 20))):
            changed[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        return bytes(changed)
    if kind == 5:
        return data[:at] + rng.randbytes(rng.choice((1, 4, 100))) + data[at:]
    if kind == 6:
        return data[:at] + data[at + len(piece) :]
    if kind == 7:
        return data[:at] + piece * rng.choice((2, 50)) + data[at:]
    if kind == 8:
        return data.decode("utf-8", "replace").encode(rng.choice(("utf-16", "utf-16-le", "utf-32", "utf-8-sig")))
    if kind == 9:
        return (
            data[:at]
            + rng.choice((b"\x00", b"\xff", b"\xed\xa0\x80", b"\xc3", b"\xf4\x90\x80\x80", b"\x85"))
            + data[at:]
        )
    if kind == 10:
        return data + rng.choice((data, b"\x00" * 100, b"}", b"]", b"\n\n", b","))
    if kind == 11:
        return rng.choice((b"", b" ", b"\n", b"\x00" * 64, b"\xef\xbb\xbf", b"null", b"[]", b"{}", b'""'))
    if kind == 12:
        return LFS_POINTER
    if kind == 13:
        return (
            rng.choice(
                (b"<!DOCTYPE html>\n<html>", b"%PDF-1.7\n", b"PK\x03\x04", b"\x1f\x8b\x08\x00", b"\x7fELF", b"GGUF")
            )
            + data[:50]
        )
    if kind == 14:
        return data.replace(b"\n", rng.choice((b"\r\n", b"\r", b"", b"\xe2\x80\xa8", b"\n\n")))
    return data.replace(b'"', rng.choice((b"'", b"", b'""')))
