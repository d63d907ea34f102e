"""Metadata of GGUF files, key by key and with types of its own: values changed, keys gone, twice or of another type, a
vocabulary of byte-level BPE, and models in several parts."""

from __future__ import annotations

import struct
from functools import cache
from random import Random
from typing import Any, NamedTuple

from tests.fuzz.base import FINETUNE, GENERATE
from tests.fuzz.case import Case, Files, Special
from tests.fuzz.values import mutate_bytes

_TEXT, _LIST = 8, 9
_WIDTHS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<B", 10: "<Q", 11: "<q", 12: "<d"}
_NUMBERS = (0, 1, 2, 3, 4, 8, 16, 32, 64, 255, 1000, 2**31 - 1, 2**32 - 1, 2**63, -1, 0.0, 0.5, 1e-5, 1e4, 1e38)
_FLOATS = (*_NUMBERS, float("nan"), float("inf"), -1e30, 1e308)
_TEXTS = (
    b"",
    b"llama",
    b"gpt2",
    b"none",
    b"yarn",
    b"linear",
    b"longrope",
    b"qwen2",
    b"\xff\xfe",
    b"a\x00b",
    b"x" * 5000,
    b"\n",
    b"{% for m in messages %}{{ m.content }}{% endfor %}",
    b"smollm",
    b"default",
    b"gemma",
    b"\x1b[31m",
    b"phi3",
)
_OTHERS = (
    "rope.scaling.type", "rope.scaling.factor", "rope.scaling.attn_factor", "rope.scaling.original_context_length",
    "rope.scaling.finetuned", "rope.scaling.yarn_log_multiplier", "rope.dimension_count", "attention.sliding_window",
    "attention.sliding_window_pattern", "expert_count", "expert_used_count", "expert_feed_forward_length", "vocab_size",
    "attention.key_length", "attention.value_length", "attention.layer_norm_epsilon", "attention.scale", "logit_scale",
    "embedding_scale", "residual_scale", "attn_logit_softcapping", "final_logit_softcapping",
    "leading_dense_block_count",
    "attention.causal", "expert_gating_func", "use_parallel_residual", "tensor_data_layout", "rope.dimension_sections",
)  # fmt: skip
_OF_TOKENIZER = (
    "model", "pre", "tokens", "token_type", "scores", "merges", "bos_token_id", "eos_token_id", "unknown_token_id",
    "padding_token_id", "add_bos_token", "add_eos_token", "add_space_prefix", "eot_token_id", "eom_token_id",
    "chat_template", "chat_templates", "precompiled_charsmap", "remove_extra_whitespaces", "token_type_count",
)  # fmt: skip
_ARCHITECTURES = (
    b"llama",
    b"qwen2",
    b"qwen3",
    b"gemma",
    b"gemma2",
    b"gemma3",
    b"phi3",
    b"mistral3",
    b"smollm3",
    b"olmo2",
    b"x",
    b"granite",
    b"stablelm",
    b"command-r",
    b"deepseek2",
    b"qwen3moe",
    b"gpt-oss",
    b"mamba2",
    b"clip",
    b"bert",
)


class Entry(NamedTuple):
    """A key. kind: its type's number in GGUF; value: number, bytes, or a pair of a type and a list."""

    key: bytes
    kind: int
    value: Any


def _text(data: bytes, at: int) -> tuple[bytes, int]:
    (size,) = struct.unpack_from("<Q", data, at)
    return data[at + 8 : at + 8 + size], at + 8 + size


def _value(data: bytes, at: int, kind: int) -> tuple[Any, int]:
    if kind == _TEXT:
        return _text(data, at)
    if kind == _LIST:
        of, count = struct.unpack_from("<IQ", data, at)
        at, values = at + 12, []
        for _ in range(count):
            value, at = _value(data, at, of)
            values.append(value)
        return (of, values), at
    form = _WIDTHS[kind]
    return struct.unpack_from(form, data, at)[0], at + struct.calcsize(form)


@cache
def _read(data: bytes) -> tuple[tuple[Entry, ...], int, bytes, bytes]:
    """Return the keys of a sound file, its number of tensors, their description, and their data."""
    tensors, count = struct.unpack_from("<QQ", data, 8)
    entries, at = [], 24
    for _ in range(count):
        key, at = _text(data, at)
        (kind,) = struct.unpack_from("<I", data, at)
        value, at = _value(data, at + 4, kind)
        entries.append(Entry(key, kind, value))
    end = at
    for _ in range(tensors):
        _, end = _text(data, end)
        (dimensions,) = struct.unpack_from("<I", data, end)
        end += 4 + 8 * dimensions + 12
    return tuple(entries), tensors, data[at:end], data[-(-end // 32) * 32 :]


def _pack(kind: int, value: Any) -> bytes:
    if kind == _TEXT:
        text = value if isinstance(value, bytes) else str(value).encode()
        return struct.pack("<Q", len(text)) + text
    if kind == _LIST:
        of, values = value if isinstance(value, tuple) else (4, [value])
        return struct.pack("<IQ", of, len(values)) + b"".join(_pack(of, one) for one in values)
    number = value if isinstance(value, int | float) else 1
    if kind in (6, 12):
        try:
            return struct.pack(_WIDTHS[kind], number)
        except OverflowError:
            return struct.pack(_WIDTHS[kind], 3e38)
    form = _WIDTHS.get(kind, "<I")
    whole = int(number) if number == number and abs(number) < 1e300 else 0
    return (whole % (1 << 8 * struct.calcsize(form))).to_bytes(struct.calcsize(form), "little")


def _write(entries: list[Entry], tensors: int, described: bytes, body: bytes) -> bytes:
    keys = b"".join(_pack(_TEXT, e.key) + struct.pack("<I", e.kind) + _pack(e.kind, e.value) for e in entries)
    head = b"GGUF" + struct.pack("<IQQ", 3, tensors, len(entries)) + keys + described
    return head + bytes(-len(head) % 32) + body


def _hostile(rng: Random, entry: Entry) -> Entry:
    """The key with another value, or another type."""
    kind, value = entry.kind, entry.value
    chance = rng.random()
    if kind == _LIST and chance < 0.7:
        of, values = value
        return entry._replace(value=(of, _changed_list(rng, of, values)))
    if chance < 0.2:
        kind = rng.choice((*_WIDTHS, _TEXT, _LIST, 13, 99))
    if kind == _TEXT:
        return Entry(entry.key, kind, rng.choice(_TEXTS))
    if kind == _LIST:
        of = rng.choice((0, 4, 5, 6, 7, _TEXT))
        some = _TEXTS if of == _TEXT else _NUMBERS
        return Entry(entry.key, kind, (of, [rng.choice(some) for _ in range(rng.choice((0, 1, 2, 4, 300)))]))
    if rng.random() < 0.4 and isinstance(value, int):
        return Entry(entry.key, kind, value + rng.choice((1, -1, value, -value, value * 7)))
    return Entry(entry.key, kind, rng.choice(_FLOATS))


def _changed_list(rng: Random, of: int, values: list[Any]) -> list[Any]:
    changed, chance = list(values), rng.random()
    if chance < 0.2:
        return changed[: rng.randrange(len(changed) + 1)]
    if chance < 0.3:
        return changed + changed[:9]
    if chance < 0.4:
        return changed[::-1]
    for _ in range(rng.choice((1, 1, 5))):
        if changed:
            odd = (
                rng.choice((*_TEXTS, b"<s>", b"<0x00>", b"<0xZZ>", b"\xe2\x96\x81", b"a b", b" "))
                if of == _TEXT
                else rng.choice(_FLOATS)
            )
            changed[rng.randrange(len(changed))] = rng.choice(changed) if rng.random() < 0.3 else odd
    return changed


def _changed(rng: Random, entries: list[Entry]) -> list[Entry]:
    """The keys with one to three changed, added, gone, twice or in another order."""
    entries = list(entries)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        at, chance = rng.randrange(len(entries)), rng.random()
        if chance < 0.5:
            entries[at] = _hostile(rng, entries[at])
        elif chance < 0.6:
            del entries[at]
        elif chance < 0.65:
            entries.append(_hostile(rng, entries[at]) if rng.random() < 0.5 else entries[at])
        elif chance < 0.9:
            name = (
                f"llama.{rng.choice(_OTHERS)}" if rng.random() < 0.6 else f"tokenizer.ggml.{rng.choice(_OF_TOKENIZER)}"
            )
            kind = rng.choice((4, 4, 5, 6, 6, 7, 10, _TEXT, _TEXT, _LIST))
            entries.insert(at, _hostile(rng, Entry(name.encode(), kind, (4, [1, 2]) if kind == _LIST else 1)))
        else:
            entries = [
                e._replace(value=rng.choice(_ARCHITECTURES)) if e.key == b"general.architecture" else e for e in entries
            ]
            if rng.random() < 0.6:  # and its keys under its own name
                own = next((e.value for e in entries if e.key == b"general.architecture"), b"x")
                entries = [
                    e._replace(key=e.key.replace(b"llama.", own + b".", 1)) for e in entries if isinstance(own, bytes)
                ]
        if not entries:
            break
    return entries


def _byte_level(entries: list[Entry]) -> list[Entry]:
    """The same keys with a vocabulary of byte-level BPE instead of pieces."""
    letters = [bytes([n]) for n in range(33, 127)]
    extra = [chr(256 + n).encode() for n in range(68)]
    tokens = [b"<s>", b"</s>", b"<pad>", b"<|user|>", b"<|assistant|>", *letters, *extra, b"th", b"he", b"\xc4\xa0t"]
    count = len(next(e.value[1] for e in entries if e.key == b"tokenizer.ggml.tokens"))
    tokens += [b"[unused%d]" % n for n in range(count - len(tokens))]
    kept = [e for e in entries if e.key not in (b"tokenizer.ggml.scores", b"tokenizer.ggml.add_space_prefix")]
    new = {
        b"tokenizer.ggml.model": b"gpt2",
        b"tokenizer.ggml.tokens": (_TEXT, tokens[:count]),
        b"tokenizer.ggml.token_type": (5, ([3] * 5 + [1] * count)[:count]),
    }
    entries = [e._replace(value=new.get(e.key, e.value)) for e in kept]
    merges = (_TEXT, [b"t h", b"h e", b"\xc4\xa0 t"])
    return [*entries, Entry(b"tokenizer.ggml.merges", _LIST, merges), Entry(b"tokenizer.ggml.pre", _TEXT, b"smollm")]


def _parts(rng: Random, entries: list[Entry], tensors: int, described: bytes, body: bytes) -> Files:
    """A model in two parts; what they say of their number is changed, or a part is gone."""
    numbers = [Entry(b"split.no", 2, 0), Entry(b"split.count", 2, 2), Entry(b"split.tensors.count", 5, tensors)]
    second = [Entry(b"general.architecture", _TEXT, b"llama"), numbers[0]._replace(value=1), *numbers[1:]]
    first = [*entries, *numbers]
    if rng.random() < 0.5:
        first = (
            _changed(rng, first) if rng.random() < 0.5 else [*entries, *(_hostile(rng, number) for number in numbers)]
        )
    if rng.random() < 0.5:
        second = [_hostile(rng, entry) if rng.random() < 0.3 else entry for entry in second]
    names = [f"model/model-0000{n}-of-0000{rng.choice((2, 2, 2, 3))}.gguf" for n in (1, 2)]
    files: Files = {names[0]: _write(first, tensors, described, body), names[1]: _write(second, 0, b"", b"")}
    if rng.random() < 0.2:
        files[rng.choice(names)] = rng.choice((Special("absent"), Special("folder"), Special("fifo"), b"", b"GGUF"))
    return files | {"model/model.gguf": Special("absent")}


def gguf_keys_case(rng: Random, groups: Any) -> Case:
    """A GGUF file that is a whole model, its metadata changed."""
    data = groups["gguf-alone"]["model/model.gguf"]
    entries, tensors, described, body = _read(data)
    known = list(entries) if rng.random() < 0.6 else _byte_level(list(entries))
    if rng.random() < 0.15:
        files = _parts(rng, known, tensors, described, body)
        name = rng.choice((*sorted(files)[1:], "model"))
    else:
        changed = _write(_changed(rng, known), tensors, described, body)
        name = "model/model.gguf"
        files = {name: mutate_bytes(rng, changed) if rng.random() < 0.03 else changed}
    words = (
        [*GENERATE, "a b"]
        if rng.random() < 0.8
        else [*FINETUNE, "--max-steps", "1", *rng.choice(([], ["--loss-on", "all"]))]
    )
    argv = [name if word == "model" else word for word in words] if rng.random() < 0.7 else words
    return Case(argv + rng.choice(([], ["--chat"])) * (argv[0] == "generate"), ["gguf-alone", "data"], files)
