"""Data as records of many keys, as CSV, and as Parquet and Arrow, with and without --columns."""

from __future__ import annotations

import csv
import io
import json
from functools import cache
from random import Random
from typing import Any

from tests.fuzz.base import FINETUNE, LABELS, LINES, PREFERENCES
from tests.fuzz.case import Case
from tests.fuzz.texts import conversation
from tests.fuzz.values import Raw, hostile, mutate_bytes, near, write_json
from wgrad.train.options.record_names import FORMS, NAMES

_TEXTS = [
    "a b",
    "What is it?",
    "It is not.",
    "",
    " ",
    "<s>x</s>",
    "é\n",
    "x" * 300,
    "true",
    "0",
    "null",
    "[]",
    "\ufffd",
]
_ODD_KEYS = ["id", "source", "Prompt", "prompt ", "text\x00", "", "x" * 300, "\u2028", "\x1b[1m", "meta", "score", "0"]
_FLAGS: list[Any] = [0, 1, 0.5, -1, True, False, None, "0", "true", "no", [], [0, 1], {"a": 1}, 10**30]
SHOW = ["data", "show", "--model", "model"]


@cache
def _arrow() -> Any:
    """Import pyarrow, which starts threads, when it is used: collecting tests must start none."""
    import pyarrow
    import pyarrow.ipc
    import pyarrow.parquet

    return pyarrow


def _value(rng: Random, name: str) -> Any:
    """Return the value of a record under a name: of the expected kind, or of any."""
    if rng.random() < 0.15:
        return hostile(rng)
    if name in ("messages", "conversations", "conversation", "history", "preferred_output", "non_preferred_output"):
        turns: list[Any] = conversation(rng)
        if rng.random() < 0.4:
            turns = [{"from": t["role"], "value": t["content"]} for t in turns]
        for turn in rng.sample(turns, min(len(turns), rng.choice((0, 0, 1)))):
            turn[rng.choice(sorted(NAMES))] = rng.choice(_FLAGS)
        return turns if rng.random() < 0.9 else json.dumps(turns)
    if name in ("tools", "functions"):
        return rng.choice(([], [{"type": "function", "function": {"name": "f"}}], [{"name": "f"}], "[]", {}, "x"))
    if name in ("label", "kto_tag", "train", "loss", "weight", "mask", "masked") or rng.random() < 0.1:
        return rng.choice(_FLAGS)
    return rng.choice(_TEXTS)


def _record(rng: Random, names: list[str]) -> dict[str, Any]:
    """A record of these keys, less or more of one now and then."""
    chosen = [name for name in names if rng.random() < 0.95]
    if rng.random() < 0.2:
        chosen.append(rng.choice(sorted(NAMES)))
    return {name: _value(rng, name) for name in chosen}


def _names(rng: Random) -> list[str]:
    names = list(rng.choice(FORMS)) + rng.sample(sorted(NAMES), rng.choice((0, 0, 1, 2)))
    return names + rng.sample(_ODD_KEYS, rng.choice((0, 0, 0, 1)))


def _command(rng: Random, name: str) -> list[str]:
    if rng.random() < 0.7:
        return ["data", "show", name, "--model", "model"]
    objective = rng.choice(([], [], ["--objective", rng.choice(("dpo", "orpo", "kto", "simpo"))]))
    return [*FINETUNE, "--data", name, "--max-steps", "1", "--max-length", "64", "--batch-size", "2", *objective]


def keys_case(rng: Random, groups: Any) -> Case:
    """Records whose keys carry a question, a label or a flag, in every combination."""
    names = _names(rng)
    lines = [_record(rng, names) for _ in range(rng.choice((1, 1, 2, 5)))]
    text = b"\n".join(write_json(rng, line) for line in lines)
    if rng.random() < 0.2:
        text = rng.choice((b'{"data": [%s]}', b'{"train": [%s], "test": []}', b"[%s]", b'{"a": {"b": [%s]}}')) % (
            text.replace(b"\n", b",")
        )
    return Case(_command(rng, name := rng.choice(("data.jsonl", "data.json"))), ["model"], {name: text})


def _pair(rng: Random, theirs: list[str]) -> str:
    ours = rng.choice((*sorted(NAMES), *_ODD_KEYS))
    return rng.choice((f"{ours}={rng.choice([*theirs, 'nope', ''])}", f"{ours}=", ours, "=", "", "a=b=c", f"={ours}"))


def columns_case(rng: Random, groups: Any) -> Case:
    """Records of other names, and --columns that says what they mean, or does not."""
    ours = list(rng.choice(FORMS))
    theirs = {name: rng.choice(("q", "Answer", "col 1", "x.y", "a,b", "é", "=", name)) for name in ours}
    lines = [{theirs[n]: v for n, v in _record(rng, ours).items() if n in theirs} for _ in range(3)]
    pairs = [f"{name}={other}" for name, other in theirs.items()]
    for _ in range(rng.choice((0, 0, 1, 2))):
        pairs.insert(rng.randrange(len(pairs) + 1), _pair(rng, list(theirs.values())))
    given = [",".join(pairs)] if rng.random() < 0.5 else pairs
    if rng.random() < 0.3:
        name, text = "data.csv", _csv(rng, lines)
    else:
        name, text = "data.jsonl", b"\n".join(write_json(rng, line) for line in lines)
    if rng.random() < 0.3:
        value = rng.choice((given, given[0], hostile(rng), dict.fromkeys(theirs, near(rng, "q"))))
        yaml = b"columns: " + write_json(rng, value) + b"\n"
        argv = [*FINETUNE, "--data", name, "--max-steps", "1", "--config", "run.yaml"]
        return Case(argv, ["model"], {name: text, "run.yaml": yaml})
    words = [*_command(rng, name), "--columns", *(pair for pair in given)]
    return Case([word.replace("\x00", "") for word in words], ["model"], {name: text})


def _csv(rng: Random, lines: list[dict[str, Any]]) -> bytes:
    names = list(dict.fromkeys(name for line in lines for name in line))
    text = io.StringIO()
    writer = csv.writer(text, delimiter=rng.choice(",,;\t|"), lineterminator=rng.choice(("\n", "\r\n", "\r")))
    writer.writerow(name.encode("utf-8", "replace").decode() for name in names)
    for line in lines:
        writer.writerow([_cell(line.get(name, "")) for name in names[: rng.choice((9, 9, 9, 1))]])
    data = text.getvalue().encode("utf-8", "replace")
    return mutate_bytes(rng, data) if rng.random() < 0.2 else data


def _cell(value: Any) -> str:
    return value if isinstance(value, str) and not isinstance(value, Raw) else repr(value)[:1000]


# ---- tables in binary form ---------------------------------------------------------------------
@cache
def table_files() -> tuple[bytes, ...]:
    """Whole files: of records of each kind, of types that are none of text, and of what expands."""
    records: list[list[Any]] = [
        [{"text": "a b"}] * 3,
        [{"prompt": "a", "completion": "b", "label": True}],
        PREFERENCES[:2],
    ]
    made = [_arrow().Table.from_pylist(lines) for lines in records]
    made.append(_arrow().Table.from_pylist([{"messages": LINES[2]["messages"], "train": False}]))
    made.append(_arrow().Table.from_pylist(LABELS[:2]))
    made += [_arrow().table({"text": _arrow().array(values, kind)}) for values, kind in _columns()]
    made.append(_arrow().table({"text": ["x" * 1000] * 500}))
    made.append(_arrow().table({"text": _arrow().array(["y"] * 5_000).dictionary_encode()}))
    made.append(_arrow().table({"text": _arrow().nulls(20_000)}))
    made.append(_arrow().table([["a"], ["b"]], names=["text", "text"]))
    made.append(_arrow().table({}))
    return tuple(data for table in made for data in _files(table))


def _columns() -> list[tuple[list[Any], Any]]:
    import datetime

    return [
        ([b"\xff\xfe", None], _arrow().binary()),
        ([1, None], _arrow().int64()),
        ([float("nan")], _arrow().float64()),
        ([datetime.datetime(2020, 1, 1)], _arrow().timestamp("ns", "Europe/Berlin")),
        ([datetime.timedelta(days=1)], _arrow().duration("ns")),
        ([2**62], _arrow().timestamp("s")),
        ([[["a"]]], _arrow().list_(_arrow().list_(_arrow().string()))),
        ([{"a": "b"}], _arrow().struct({"a": _arrow().string()})),
        ([[("k", "v")]], _arrow().map_(_arrow().string(), _arrow().string())),
        (["a"], _arrow().string_view()),
    ]


def _files(table: Any) -> list[bytes]:
    made = []
    for write in (_parquet, _arrow_file, _arrow_stream):
        stream = io.BytesIO()
        try:
            write(table, stream)
        except (_arrow().ArrowException, OSError):  # a type that the form lacks
            continue
        made.append(stream.getvalue())
    return made


def _parquet(table: Any, stream: io.BytesIO) -> None:
    _arrow().parquet.write_table(table, stream, compression="zstd")


def _arrow_file(table: Any, stream: io.BytesIO) -> None:
    with _arrow().ipc.new_file(stream, table.schema) as writer:
        writer.write_table(table)


def _arrow_stream(table: Any, stream: io.BytesIO) -> None:
    with _arrow().ipc.new_stream(stream, table.schema) as writer:
        writer.write_table(table)


def table_case(rng: Random, groups: Any) -> Case:
    """A Parquet or Arrow file, whole or damaged: its data, its footer (whose numbers say how much there is)."""
    tables = table_files()
    data = rng.choice(tables)
    while len(data) > 1 << 20 and rng.random() < 0.9:
        data = rng.choice(tables)
    chance = rng.random()
    if chance < 0.5:
        changed = bytearray(data)
        for _ in range(rng.choice((1, 1, 2, 8))):
            at = rng.randrange(max(len(data) - 1200, 0), len(data))
            changed[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, changed[at] ^ 1 << rng.randrange(8)))
        data = bytes(changed)
    elif chance < 0.85:
        data = mutate_bytes(rng, data)
    argv = _command(rng, name := rng.choice(("data.parquet", "data.parquet", "data.arrow", "data")))
    return Case(argv, ["model"], {name: data})
