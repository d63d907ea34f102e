"""Data files with unusual layouts: wrapped, over several lines, with other delimiters, encodings and names.

Also folders of data sets, and tables of Python callers.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.tools import PARQUET, PYARROW
from wgrad.device.errors import WgradError
from wgrad.train.data import table_records
from wgrad.train.data.data_files import list_data, open_data
from wgrad.train.data.given_records import given_records, records_of
from wgrad.train.data.json_records import json_kind
from wgrad.train.data.record_keys import with_our_names
from wgrad.train.options.finetune_config import RunOptions
from wgrad.train.options.record_names import columns_of

RECORDS: list[dict[str, Any]] = [
    {"prompt": 'a, "b"\n]', "completion": "\\ c\u2028[d{"},
    {"prompt": "", "completion": "end \\\\"},
    {"prompt": "é;|知", "completion": "x"},
]
ONE = {"prompt": "a", "completion": "b"}


def read(path: Path | str, columns: str = "") -> tuple[list[Any], tuple[str, ...]]:
    """The records of a file, decoded, and what is said of it."""
    with open_data(str(path), "--data", columns=columns_of([columns] if columns else [])) as file:
        records = [json.loads(r) if isinstance(r, bytes) else r for _, r in file.records()]
        return records, (*file.notes, *file.remarks)


def wrapped(records: list, key: str = "data", **others: Any) -> str:
    return json.dumps({"version": "1", "of": {"a": [1, {"b": 2}]}, key: records, **others})


@pytest.mark.parametrize(
    "text",
    [
        wrapped(RECORDS),
        wrapped(RECORDS) + "\n",
        wrapped(RECORDS, "instances"),
        wrapped(RECORDS, "rows", after=[1, 2], more={"x": [{}]}),
        json.dumps({"data": RECORDS}, indent=2),
        json.dumps({"type": "text2text", "instances": RECORDS}, indent="\t"),
        json.dumps({"train": RECORDS, "test": RECORDS[:1]}),
        json.dumps({"about": "x" * 10_000, "data": RECORDS}) if False else json.dumps({"data": RECORDS}, indent=0),
        "\n".join(json.dumps(record, indent=4) for record in RECORDS),
        ",\n".join(json.dumps(record, indent=1) for record in RECORDS),
        "".join(map(json.dumps, RECORDS)),
        " ".join(map(json.dumps, RECORDS)),
        ",\n".join(map(json.dumps, RECORDS)),
        "\n".join(json.dumps(record, indent=2).replace("{\n ", "{") for record in RECORDS),
    ],
)
@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a"])
def test_every_layout_of_json_is_read(text: str, name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    records, notes = read(tmp_path / name)
    assert records == RECORDS
    assert any("is taken for JSON with a list under" in note or "taken for objects of JSON" in note for note in notes)
    assert ("the list under 'test', which is not read: give it as --eval-data FILE" in notes) == ('"test"' in text)


@pytest.mark.parametrize(
    ("start", "kind"),
    [
        ('{"prompt": "a", "completion": "b"}\n', "lines"),
        ('{"turns": [{"role": "x"}]}\n{"turns": []}\n', "lines"),
        ('{"messages": [{"role": "user"', "lines"),  # a line that is longer than what is looked at
        ('{"data": [{"role": "user"', "wrapped"),
        ('{"id": 1, "turns": [{"role": "user"}], "text": "a', "lines"),
        ('{"text": "cut short"\n{"text": "a"}\n', "lines"),
        ('{"text": "cut short",\n{"text": "a"}\n', "lines"),
        ('{"text": "a"} x\n', "lines"),
        ('{"text": "a", "meta": [{}]}\n', "lines"),
        ('{\n "text": "a"', "objects"),
        ('{"messages": [\n {"role": "user"', "objects"),
        ('{"text": "a"},\n{"text": "b"}', "objects"),
        ('{"data": {"train": [{"text": "a"}]}}\n', "lines"),
        ('{"data": []}\n', "lines"),
        ('{"data": ["a"]}\n', "lines"),
    ],
)
def test_the_kind_of_json_is_told_by_its_beginning(start: str, kind: str) -> None:
    assert json_kind(start.encode(), ())[0] == kind
    if kind == "wrapped":
        assert json_kind(start.encode(), {"data"})[0] == "lines"  # --columns names it


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (json.dumps({"test": [ONE], "valid": [ONE]}), "a.json: has lists under 'test' and 'valid': keep one list"),
        (wrapped([ONE]) + "\n" * 9000 + wrapped([ONE]), "more follows the object with 'data': keep one object"),
        (wrapped([ONE])[:-3], "a.json:1: the file ends within the array"),
        ('{\n"text": "a"\n}\n{\n"text"', "a.json:4: the object is not closed"),
    ],
)
def test_wrong_layouts_of_json_are_refused(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(WgradError, match=words):
        read(tmp_path / "a.json")


def test_text_between_two_objects_is_a_bad_line(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{\n"text": "a"}\n\nand\n{"text":\n"b"}')
    assert read(tmp_path / "a.json")[0] == [{"text": "a"}, "text between two objects: 'and'", {"text": "b"}]


# ---- tables as text --------------------------------------------------------------------------------
def cells(records: list[dict[str, Any]], mark: str, quote: str = '"') -> str:
    rows = [list(records[0]), *(record.values() for record in records)]
    return "".join(mark.join(quote + cell.replace('"', '""') + quote for cell in row) + "\r\n" for row in rows)


@pytest.mark.parametrize("mark", [",", ";", "\t", "|"])
@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-be", "utf-32"])
def test_delimiters_and_encodings_are_recognized(mark: str, name: str, encoding: str, tmp_path: Path) -> None:
    text = cells(RECORDS, mark)
    if name == "a":  # a header of plain names is what such a file is known by
        text = text.replace('"prompt"', "prompt", 1).replace('"completion"', "completion", 1)
    (tmp_path / name).write_bytes((("\ufeff" if encoding == "utf-16-be" else "") + text).encode(encoding))
    assert read(tmp_path / name)[0] == [{k: v.replace("\n", "\n") for k, v in r.items()} for r in RECORDS]


@pytest.mark.parametrize("mark", [",", ";", "\t", "|"])
def test_the_index_of_pandas_is_a_column_of_its_own(mark: str, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(f"{mark}text\n0{mark}wise\n1{mark}son\n")
    assert read(tmp_path / "a.csv")[0] == [{"text": "wise"}, {"text": "son"}]


def test_a_header_with_a_records_columns_outweighs_more_cells(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text;x, y, z\nwise, my son;1\n")
    assert read(tmp_path / "a.csv")[0] == [{"text": "wise, my son"}]


def test_excels_line_of_the_separator_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("sep=;\r\ntext;id\r\na, b;1\r\n")
    assert read(tmp_path / "a.csv") == (
        [{"text": "a, b"}],
        (*read(tmp_path / "a.csv")[1][:1], "columns that are not read: 'id'"),
    )


@pytest.mark.parametrize("kind", ["lines", "objects", "text"])
def test_json_and_text_in_utf_16_are_read(kind: str, tmp_path: Path) -> None:
    text = {"lines": "\n".join(map(json.dumps, RECORDS)), "objects": json.dumps(ONE, indent=1), "text": "Höre.\r\n知"}[
        kind
    ]
    path = tmp_path / ("a.txt" if kind == "text" else "a.json")
    path.write_bytes(text.encode("utf-16"))
    if kind == "text":
        with open_data(str(path), "--data") as file:
            assert "".join(file.blocks()) == "Höre.\n知"
    else:
        assert read(path)[0] == (RECORDS if kind == "lines" else [ONE])


# ---- --columns ---------------------------------------------------------------------------------
THEIRS = [{"question": "a", "answer text": "b", "prompt": "not this", "id": 3}]
COLUMNS = "prompt=question,completion=answer text"


def write(kind: str, records: list[dict[str, Any]], folder: Path) -> Path:
    path = folder / f"a.{kind}"
    table = PYARROW.Table.from_pylist(records)
    if kind == "csv":
        path.write_text(cells([{k: str(v) for k, v in r.items()} for r in records], ";"))
    elif kind == "parquet":
        PARQUET.write_table(table, path)
    elif kind == "arrow":
        with PYARROW.ipc.new_stream(path, table.schema) as sink:
            sink.write_table(table)
    elif kind == "feather":
        with PYARROW.ipc.new_file(path, table.schema) as sink:
            sink.write_table(table)
    else:
        path.write_text(json.dumps(records) if kind == "json" else "\n".join(map(json.dumps, records)))
    return path


@pytest.mark.parametrize("kind", ["csv", "parquet", "arrow", "feather", "json", "jsonl"])
def test_columns_rename_keys_of_every_kind(kind: str, tmp_path: Path) -> None:
    records, notes = read(write(kind, THEIRS, tmp_path), COLUMNS)
    assert [with_our_names(record, columns_of([COLUMNS])) for record in records] in (
        [ONE],
        [ONE | {"id": 3}],  # JSON, whose keys are told apart later
    )
    if kind not in ("json", "jsonl"):
        assert "columns that are not read: 'prompt', 'id'" in notes
        with pytest.raises(
            WgradError, match="no column 'answr', which --columns gives for 'completion'; it has 'quest"
        ):
            read(write(kind, THEIRS, tmp_path), "prompt=question,completion=answr")


def test_columns_rename_messages_of_every_kind(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "a"}]
    for kind in ("csv", "parquet", "jsonl"):
        given = [{"asked": json.dumps(turns) if kind == "csv" else turns, "completion": "b", "talk": "[]"}]
        columns = "prompt=asked,messages="
        (record,) = read(write(kind, given, tmp_path), columns)[0]
        assert with_our_names(record, columns_of([columns]))["prompt"] == turns


def test_columns_may_be_swapped_and_left_out_but_not_lack() -> None:
    columns = columns_of(["prompt=completion,completion=prompt, input="])
    assert with_our_names(ONE | {"input": "x"}, columns) == {"prompt": "b", "completion": "a"}
    assert with_our_names({"text": "a"}, columns) == {"text": "a"}  # of another form
    with pytest.raises(WgradError, match="has no 'q', which --columns gives for 'prompt'; it has 'completion'"):
        with_our_names({"completion": "b"}, columns_of(["prompt=q"]))


def test_columns_as_they_may_be_given() -> None:
    for given in ("prompt=q,completion=a, b", ["prompt=q", "completion=a, b"], {"prompt": "q", "completion": "a, b"}):
        assert columns_of(RunOptions(columns=given).columns) == {"prompt": "q", "completion": "a, b"}  # type: ignore[arg-type]
    for nothing in (None, "", False):
        assert columns_of(RunOptions(columns={"input": nothing}).columns) == {"input": ""}  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("prompt", "expected OURS=THEIRS, got 'prompt': for example prompt=question"),
        ("promt=q", "'promt' is no column that training reads .did you mean prompt"),
        ("prompt=q,prompt=r", "'prompt' is given twice"),
    ],
)
def test_wrong_columns_are_refused(value: str, words: str) -> None:
    with pytest.raises(WgradError, match=f"--columns: {words}"):
        RunOptions(columns=(value,))


# ---- folders of datasets -----------------------------------------------------------------------
def save(folder: Path, records: list[dict[str, Any]], files: int = 1) -> None:
    folder.mkdir(parents=True)
    names = [f"data-{i:05d}-of-{files:05d}.arrow" for i in range(files)]
    for number, name in enumerate(names):
        table = PYARROW.Table.from_pylist(records[number::files])
        with PYARROW.ipc.new_stream(folder / name, table.schema) as sink:
            sink.write_table(table)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": n} for n in names], "_split": None}))
    (folder / "dataset_info.json").write_text("{}")


def test_one_split_of_a_saved_dataset_is_read(tmp_path: Path) -> None:
    splits = tmp_path / "saved"
    for name, records in (("train", RECORDS[:2]), ("test", RECORDS[2:])):
        save(splits / name, records, len(records))
    (splits / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    files, notes = list_data(str(splits), "--data")
    assert [read(file)[0] for file in files] == [RECORDS[:1], RECORDS[1:2]]
    assert notes == (
        f"note: {splits} is a data set with splits, of which train is read; for another give {splits}:test",
    )
    assert [read(f)[0] for f in list_data(f"{splits}:test", "--data")[0]] == [RECORDS[2:]]
    assert list_data(str(splits), "--eval-data", held_out=True)[0] == list_data(f"{splits}:test", "--data")[0]
    assert list_data(str(splits / "test"), "--data")[0] == list_data(f"{splits}:test", "--data")[0]
    with pytest.raises(WgradError, match="has no split 'dev'; it has train, test: name one, as .*saved:train"):
        list_data(f"{splits}:dev", "--data")
    for state, words in (
        ({"_data_files": [{"filename": "../x.arrow"}]}, "filename"),
        ({"_data_files": []}, "is a data set without rows"),
        (
            {"_data_files": [{"filename": "a.arrow"}], "_indices_data_files": [{"filename": "i.arrow"}]},
            "a selection of",
        ),
    ):
        (splits / "test" / "state.json").write_text(json.dumps(state))
        with pytest.raises(WgradError, match=words):
            list_data(f"{splits}:test", "--data")


def test_files_and_objects_of_datasets_are_read(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="the oracle writes with datasets: pip install wgrad[oracle]")
    made = datasets.DatasetDict({name: datasets.Dataset.from_list(RECORDS) for name in ("train", "test")})
    made.save_to_disk(tmp_path / "saved")
    (file,) = list_data(str(tmp_path / "saved"), "--data")[0]
    assert read(file)[0] == RECORDS
    for given in (made, made["train"], made["train"].to_pandas(), made["train"].data.table):
        assert [r for _, r in given_records("<data>", "--data", records_of(given, "data")).records()] == RECORDS


# ---- tables in memory --------------------------------------------------------------------------
class Pandas:
    """A table that iterates over its columns, like one of pandas."""

    columns = ["messages", "n", "missing"]

    def __iter__(self) -> Any:
        return iter(self.columns)

    def itertuples(self, index: bool, name: str | None) -> Any:
        assert not index and name is None
        turns = np.array([{"role": "user", "content": "a"}, {"role": "assistant", "content": np.str_("b")}], object)
        return iter([(turns, np.int64(3), float("nan")), (turns, np.int64(4), "x")])


class Polars:
    columns = ["text", "missing"]

    def iter_rows(self, named: bool) -> Any:
        assert named
        return iter([{"text": "a", "missing": None}])


def test_tables_of_pandas_and_polars_are_records() -> None:
    def rows(value: Any) -> list[Any]:
        return [record for _, record in given_records("<data>", "--data", records_of(value, "data")).records()]

    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    wanted = [{"messages": turns, "n": 3}, {"messages": turns, "n": 4, "missing": "x"}]
    assert rows(Pandas()) == wanted and json.dumps(rows(Pandas())) == json.dumps(wanted)
    assert rows(Polars()) == [{"text": "a"}]
    assert rows(PYARROW.Table.from_pylist(RECORDS)) == RECORDS
    assert rows({"train": RECORDS, "test": [ONE]}) == RECORDS and rows({"only": [ONE]}) == [ONE]
    assert records_of({"train": RECORDS, "test": [ONE]}, "eval_data") == [ONE]
    odd = {"messages": np.array(turns, object), "t": (np.int64(3), np.float32("nan")), "b": np.True_}
    assert rows([odd]) == [{"messages": turns, "t": [3, None], "b": True}]
    assert records_of({"train": RECORDS, "more": [ONE]}, "eval_data") == RECORDS


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (ONE, "got dict: give a list such as"),
        ({"a": [ONE], "b": [ONE]}, "has the splits a, b: give one, as data=splits"),
        (3, "expected a path or an iterable of records, got int"),
        (b"x", "expected a path or an iterable of records, got bytes"),
        (type("LazyFrame", (), {"collect": None, "lazy": None})(), "a lazy table has no rows yet"),
    ],
)
def test_objects_that_are_no_table_are_refused(value: Any, words: str) -> None:
    with pytest.raises(WgradError, match=f"^data: .*{words}"):
        records_of(value, "data")


# ---- what a table expands to -------------------------------------------------------------------
def bomb(kind: str) -> bytes:
    sink = io.BytesIO()
    if kind == "rows":
        text = PYARROW.array(["x"]).take(PYARROW.array(np.zeros(300_000, np.int32)))
        PARQUET.write_table(PYARROW.table({"text": text}), sink, compression="zstd")
    elif kind == "pages":
        text = PYARROW.array(["x" * (40 << 20) + str(i) for i in range(8)])
        options = {"use_dictionary": False, "write_statistics": False}  # which compare 320 MiB
        PARQUET.write_table(PYARROW.table({"text": text}), sink, compression="zstd", **options)
    elif kind == "dictionary":
        values = PYARROW.DictionaryArray.from_arrays(np.zeros(1000, np.int32), PYARROW.array(["x" * (20 << 20)]))
        PARQUET.write_table(PYARROW.table({"text": values}), sink, compression="zstd")
    elif kind == "nested":
        turns = [[{"role": "user", "content": "x" * 4096}] * 20_000] * 4
        PARQUET.write_table(PYARROW.table({"messages": turns}), sink, compression="zstd")
    else:
        table = PYARROW.table({"text": PYARROW.array(["x" * (1 << 20)] * 200)})
        options = PYARROW.ipc.IpcWriteOptions(compression="zstd")
        with PYARROW.ipc.new_file(sink, table.schema, options=options) as file:
            file.write_table(table)
    return sink.getvalue()


MEMORY = """
import re, sys
import pyarrow, pyarrow.parquet, pyarrow.ipc
from wgrad.device.errors import WgradError
from wgrad.train.data.data_files import open_data
def peak(): return int(re.search(r"VmHWM:\\s*(\\d+)", open("/proc/self/status").read())[1]) >> 10
for path in sys.argv[1:]:
    before = peak()
    try:
        with open_data(path, "--data") as file:
            for _ in file.records(): pass
    except WgradError as error: print(peak() - before, error)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="what a process took at most is counted in other units there")
def test_what_expands_without_bound_is_refused(tmp_path: Path) -> None:
    import resource

    kinds, paths = ("rows", "dictionary", "nested", "pages", "arrow"), []
    for kind in kinds:
        paths.append(tmp_path / f"{kind}.{'arrow' if kind == 'arrow' else 'parquet'}")
        paths[-1].write_bytes(bomb(kind))
        assert paths[-1].stat().st_size < 1 << 20
    start = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    command = [sys.executable, "-c", MEMORY, *map(str, paths)]
    run = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=500)
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    assert len(lines) == len(kinds), run.stdout
    for kind, line in zip(kinds, lines):
        grown, _, words = line.partition(" ")
        assert int(grown) <= 256, line
        bounds = ("262,144 rows",) if kind == "rows" else ("expands to more than 64 MiB", "of memory to read")
        assert f"{kind}." in words and any(bound in words for bound in bounds), line
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - start < 60


def test_what_a_large_file_expands_to_is_bounded_as_it_is_read(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(table_records, "_MEASURED_FIRST", 0)
    monkeypatch.setattr(table_records, "_LEAST", 1 << 16)
    path = write("parquet", [{"text": "x" * 100}] * 2000, tmp_path)
    with pytest.raises(WgradError, match="has [0-9,]+ bytes and expands to more than 0 MiB: write it as JSON lines"):
        read(path)
    monkeypatch.setattr(table_records, "_TIMES", 1000)
    assert len(read(path)[0]) == 2000
