"""Mutations of safetensors files (header, entries, offsets, data, bitsandbytes' quant_state) and of GGUF files."""

from __future__ import annotations

import json
import re
from random import Random
from typing import Any

import numpy as np

from tests.fuzz.values import Raw, hostile, mutate_bytes, mutate_json, write_json

DTYPES = ["F64", "F32", "F16", "BF16", "I64", "I32", "I8", "U8", "BOOL", "F8_E4M3", "F4", "C64", "", "f32", "bf16"]
OFFSETS = [0, 1, 2, 7, -1, 2**31, 2**32, 2**53, 2**63, 2**64, 2**70, Raw("1e999"), Raw("NaN"), 0.5, "0", None, []]

WORDS = [0, 1, 2, 3, 7, 8, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**60, 2**63 - 1, 2**63, 2**64 - 1]


def split(data: bytes) -> tuple[dict[str, Any], bytes]:
    """Split a file into its header and the tensors' bytes."""
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def join(header: bytes, body: bytes, length: int | None = None) -> bytes:
    return (len(header) if length is None else length).to_bytes(8, "little") + header + body


def mutate_safetensors(rng: Random, data: bytes) -> bytes:
    """A changed file; one time in eight by bytes alone."""
    chance = rng.random()
    if chance < 0.12:
        return mutate_bytes(rng, data)
    header, body = split(data)
    if chance < 0.2:
        return join(json.dumps(header).encode(), body, rng.choice((0, 1, 7, 2**20, 2**27, 2**31, 2**63, 2**64 - 1)))
    if chance < 0.3:
        return join(mutate_json(rng, json.dumps(header).encode()), body)
    if chance < 0.45:
        return join(json.dumps(header).encode(), _mutate_body(rng, body))
    for _ in range(rng.choice((1, 1, 2, 3))):
        _mutate_header(rng, header)
    return join(write_json(rng, header), body)


def replace_values(rng: Random, data: bytes) -> bytes:
    """A file in which one tensor's bytes are others: noise, ones, the largest and the least of its numbers."""
    header, body = split(data)
    begin, end = header[rng.choice([n for n in header if n != "__metadata__"])]["data_offsets"]
    size = end - begin
    fill = rng.choice(
        (b"\xff", b"\x00", b"\x7f", b"\x80", b"\xff\xff\xff\x7f", b"\x00\x00\x00\x80", b"\x40\x00\x00\x00")
    )
    filled = rng.randbytes(size) if rng.random() < 0.3 else (fill * size)[:size]
    if rng.random() < 0.5 and size > 4:  # one number alone
        at = rng.randrange(size // 4) * 4
        filled = body[begin : begin + at] + filled[at : at + 4] + body[begin + at + 4 : end]
    return join(json.dumps(header).encode(), body[:begin] + filled + body[end:])


def _mutate_body(rng: Random, body: bytes) -> bytes:
    """Not-a-number, infinities and huge numbers among the values; bytes missing or too many."""
    kind = rng.randrange(5)
    if kind == 0:
        return body[: rng.randrange(len(body) + 1)]
    if kind == 1:
        return body + rng.randbytes(rng.choice((1, 8, 1000)))
    values = np.frombuffer(body[: len(body) // 2 * 2], np.uint16).copy()
    if not len(values):
        return rng.randbytes(8)
    pattern = rng.choice((0x7FC0, 0x7F80, 0xFF80, 0x7F7F, 0x0001, 0x0000, 0xFFFF))  # of bfloat16
    if kind == 2:
        values[rng.randrange(len(values))] = pattern
    elif kind == 3:
        at = rng.randrange(len(values))
        values[at : at + rng.choice((8, 300))] = pattern
    else:
        values[:] = pattern
    return values.tobytes()


def _mutate_header(rng: Random, header: dict[str, Any]) -> None:
    names = [n for n in header if n != "__metadata__"]
    if not names:
        return
    name, chance = rng.choice(names), rng.random()
    entry = header[name]
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= set(entry) or chance < 0.1:
        header[name] = hostile(rng)
    elif chance < 0.2:
        del header[name]
    elif chance < 0.3:
        header[rng.choice([name + "x", name.upper(), "", "\x00", "../x", name.replace("0", "1"), "x" * 300])] = (
            header.pop(name)
        )
    elif chance < 0.4:
        entry["dtype"] = rng.choice([*DTYPES, hostile(rng)])
    elif chance < 0.6:
        _mutate_shape(rng, entry)
    elif chance < 0.8:
        _mutate_offsets(rng, entry, header[rng.choice(names)])
    elif chance < 0.86:
        other = rng.choice(names)
        header[name], header[other] = header[other], header[name]
    elif chance < 0.92:
        header["__metadata__"] = hostile(rng)
    else:
        entry[rng.choice(("dtype", "shape", "data_offsets", "extra"))] = hostile(rng)


def _mutate_shape(rng: Random, entry: dict[str, Any]) -> None:
    shape = entry["shape"]
    if not isinstance(shape, list):
        return
    changed: list[Any] = [shape[::-1], [*shape, 1], shape[1:], [], [0], [-1, *shape[1:]], [2**32, 2**32], [2**63, 0]]
    changed += [
        [1] * 70,
        [str(n) for n in shape],
        [float(n) if isinstance(n, int) else n for n in shape],
        [hostile(rng), *shape[1:]],
    ]
    entry["shape"] = rng.choice(changed)


def _mutate_offsets(rng: Random, entry: dict[str, Any], other: Any) -> None:
    offsets = entry["data_offsets"]
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(isinstance(v, int) for v in offsets):
        return
    begin, end = offsets
    changed = [[end, begin], [begin, end - 1], [begin + 1, end + 1], [begin], [begin, end, end], [0, end - begin]]
    changed += [[rng.choice(OFFSETS), end], [begin, rng.choice(OFFSETS)], [rng.choice(OFFSETS), rng.choice(OFFSETS)]]
    if isinstance(other, dict) and isinstance(other.get("data_offsets"), list):
        changed.append(other["data_offsets"])  # two tensors on the same bytes
    entry["data_offsets"] = rng.choice(changed)


def mutate_quant_state(rng: Random, data: bytes) -> bytes:
    """bitsandbytes' JSON inside a tensor of uint8, changed; the offsets behind it move along."""
    header, body = split(data)
    names = [n for n in header if n.endswith("quant_state.bitsandbytes__nf4")]
    if not names or rng.random() < 0.4:
        return mutate_safetensors(rng, data)
    name = rng.choice(names)
    begin, end = header[name]["data_offsets"]
    text = mutate_json(rng, body[begin:end])[:20_000]
    shift = len(text) - (end - begin)
    for entry in header.values():
        if "data_offsets" in entry and entry["data_offsets"][0] >= end:
            entry["data_offsets"] = [v + shift for v in entry["data_offsets"]]
    header[name] |= {"shape": [len(text)], "data_offsets": [begin, begin + len(text)]}
    return join(json.dumps(header).encode(), body[:begin] + text + body[end:])


def mutate_gguf(rng: Random, data: bytes) -> bytes:
    """The header's numbers (counts, lengths, types, dimensions, offsets) overwritten, bits flipped, an alignment of any
    value and type added, a tensor of another type, or data changed."""
    chance, header = rng.random(), data.rfind(b".weight") + 48  # the last tensor's name, and what is said of it
    if chance < 0.12:
        return mutate_bytes(rng, data)
    if chance < 0.25:
        return data[:header] + _mutate_body(rng, data[header:])
    if chance < 0.4:
        return _with_alignment(rng, data)
    changed = bytearray(data)
    if chance < 0.5:
        at = rng.choice([found.end() for found in re.finditer(rb"\.(weight|in_sum2|counts)(?=[\x01\x02]\0\0\0)", data)])
        at += 4 + 8 * data[at]  # dimensions
        changed[at : at + 4] = rng.randrange(42).to_bytes(4, "little")
        return bytes(changed)
    for _ in range(rng.choice((1, 1, 2, 4))):
        at, width = rng.randrange(header), rng.choice((1, 4, 8, 8))
        word = changed[at] ^ 1 << rng.randrange(8) if width == 1 else rng.choice(WORDS) % (1 << 8 * width)
        changed[at : at + width] = word.to_bytes(width, "little")
    return bytes(changed)


def _with_alignment(rng: Random, data: bytes) -> bytes:
    """Insert the key general.alignment before all others, mostly with its own type, a u32. Tensors stay in place."""
    kind, key = rng.choice((4, 4, 4, *range(14))), b"general.alignment"
    value = rng.choice((0, 1, 2, 3, 8, 32, 48, 64, 1 << 16, 1 << 31, (1 << 32) - 1, rng.getrandbits(64)))
    width = {0: 1, 1: 1, 2: 2, 3: 2, 7: 1, 10: 8, 11: 8, 12: 8}.get(kind, 4)
    number = (value % (1 << 8 * width)).to_bytes(width, "little")
    entry = len(key).to_bytes(8, "little") + key + kind.to_bytes(4, "little") + number
    count = int.from_bytes(data[16:24], "little") + 1
    return data[:16] + count.to_bytes(8, "little") + entry + data[24:]
