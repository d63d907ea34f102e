"""Training data that is not JSON lines: a JSON array, CSV, Parquet; Alpaca and ShareGPT records. All as their JSONL."""

from __future__ import annotations

import csv
import io
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.tools import PARQUET, PYARROW
from tests.train.test_data_files import MEMORY, load
from wgrad.device.errors import WgradError
from wgrad.train.data.csv_records import csv_rows
from wgrad.train.data.data import Dataset
from wgrad.train.data.data_files import _BLOCK, open_data
from wgrad.train.data.tokenizer import Tokenizer

TURNS = [{"role": "user", "content": 'Say "no", [then] go\n'}, {"role": "assistant", "content": "é, {知}\\"}]
RECORDS: list[dict[str, Any]] = [
    {"prompt": 'a, "b"\n]', "completion": "\\ c\u2028[d"},
    {"prompt": "", "completion": "end \\\\"},
]
CHATS: list[dict[str, Any]] = [{"messages": TURNS, "other": 1}, {"messages": TURNS[::-1], "other": 2}]


def array(records: list[dict[str, Any]]) -> bytes:
    return json.dumps(records, indent=2, ensure_ascii=False).encode()


def table(records: list[dict[str, Any]], delimiter: str = ",") -> bytes:
    text = io.StringIO(newline="")
    rows = csv.writer(text, delimiter=delimiter)
    rows.writerow(["", *records[0]])  # the index that pandas writes has no name
    for i, record in enumerate(records):
        rows.writerow([i, *(v if isinstance(v, str) else json.dumps(v) for v in record.values())])
    return text.getvalue().encode()


def parquet(records: list[dict[str, Any]]) -> bytes:
    sink = io.BytesIO()
    PARQUET.write_table(PYARROW.Table.from_pylist(records), sink, compression="none")
    return sink.getvalue()


def tsv(records: list[dict[str, Any]]) -> bytes:
    return table(records, "\t")


def contents(data: Dataset) -> list[tuple[list[int], list[bool]]]:
    return [(d.ids.tolist(), d.loss_mask.tolist()) for d in data.train]


@pytest.mark.parametrize("records", [RECORDS, CHATS])
@pytest.mark.parametrize(
    ("write", "name", "kind"),
    [
        (array, "a.json", "a JSON array"),
        (array, "a", "a JSON array"),
        (table, "a.csv", "CSV"),
        (tsv, "a.tsv", "TSV"),
        (parquet, "a.parquet", "Parquet"),
        (parquet, "a", "Parquet"),
    ],
)
def test_a_kind_gives_what_its_lines_give(
    tokenizer: Tokenizer, tmp_path: Path, write_lines, records: list, write: Callable, name: str, kind: str
) -> None:
    wanted = contents(load(write_lines(*records), tokenizer))
    (tmp_path / name).write_bytes(write(records))
    data = load(tmp_path / name, tokenizer)
    assert contents(data) == wanted and len(wanted) == 2
    assert data.remarks[0].startswith(f"note: {tmp_path / name} is taken for {kind}, ")


def test_csv_is_recognized_by_its_header(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"prompt,completion\r\na,b\r\n")
    assert "taken for CSV" in load(tmp_path / "a", tokenizer).remarks[0]
    (tmp_path / "a").write_bytes(b"text, he said\nHear.\n")
    assert "taken for plain text" in load(tmp_path / "a", tokenizer).remarks[0]


@pytest.mark.parametrize("shift", range(-3, 4))
def test_a_json_array_reads_the_same_across_blocks(
    tokenizer: Tokenizer, tmp_path: Path, write_lines, shift: int
) -> None:
    """An escape, a quote, a bracket or a comma at the border of two blocks."""
    records = [{"text": "x" * (_BLOCK - 20 + shift) + '\\"\\'}, {"text": '"],'}]
    (tmp_path / "a.json").write_bytes(b"\xef\xbb\xbf" + json.dumps(records).encode())
    wanted = contents(load(write_lines(*records), tokenizer))
    assert contents(load(tmp_path / "a.json", tokenizer)) == wanted


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.json", b"[]", "is empty: give a file"),
        ("a.json", b'[{"text": "a"}', "a.json:1: the file ends within the array: it is cut short"),
        ("a.json", b'[{"text": "a}]', "a.json:1: the file ends within the array"),
        ("a.json", b'[{"text": "a"},\n]', "a.json:2: a comma of the array with nothing next to it"),
        ("a.json", b'[,{"text": "a"}]', "a.json:1: a comma of the array with nothing next to it"),
        ("a.json", b'[{"text": "a"}]\n[]', "a.json:2: more follows the end of the array"),
        ("a.json", b'[{"text": "a"}}', "closed by a brace"),
        ("a.json", b'[\n"Hear."]', "a.json:2: expected a JSON object, got text"),
        ("a.json", b"[Chapter 1]", "a.json:1: not valid JSON"),
        ("a", b"[Chapter 1]\nSee.", "a:2: more follows the end of the array"),
        ("a.csv", b"Hear.,See.\na,b\n", "a.csv:1: needs columns named 'text', .*it has 'Hear.', 'See.': rename them"),
        ("a.csv", b'{"text": "Hear."}\n', "a.csv:1: needs columns"),
        ("a.csv", b"text,text\na,b\n", "a.csv:1: two columns have one name"),
        ("a.csv", b"\xff,text\na,b\n", "a.csv:1: the header cannot be read: not UTF-8 .byte 0xff"),
        ("a.csv", b"text,n\n", "is empty"),
        ("a.csv", b"text,n\na\n", "a.csv:2: the header names 2 columns; the row has 1 cells"),
        ("a.csv", b'text,n\n"a,1\nb,2\n', "a.csv:2: a quote in this row is never closed"),
        ("a.csv", b'text,n\n"a" b,2\n', "a.csv:2: not valid CSV"),
        ("a.csv", b"text,n\n" + b"a" * (1 << 20) + b",1\n", "a.csv:2: longer than 1 MiB"),
        ("a.csv", b"text,n\n\xff,1\n", "a.csv:2: not UTF-8"),
        ("a.csv", b"messages,n\n[{,1\n", "a.csv:2: 'messages' must be JSON in CSV"),
        ("a.csv", b"messages,n\n" + b"[" * 100_000 + b",1\n", "a.csv:2: 'messages' must be JSON in CSV"),
        ("a.parquet", b"text\na\n", "is Parquet by its name, but does not begin with PAR1"),
        ("a.parquet", b"PAR1rest", "cannot be read as Parquet"),
        ("a.parquet", lambda: parquet(RECORDS)[:-20], "cannot be read as Parquet"),
        ("a.parquet", lambda: parquet([{"body": "a"}]), "needs columns named .*it has 'body': rename them"),
        ("a.parquet", lambda: parquet([{"text": 1}]), "a.parquet:1: 'text' must be text; got a number"),
        ("a.parquet", lambda: parquet([{"text": b"\xff"}]), "a.parquet:1: 'text' must be text; got bytes"),
    ],
)
def test_bad_input_is_a_line(
    tokenizer: Tokenizer, tmp_path: Path, name: str, content: bytes | Callable[[], bytes], words: str
) -> None:
    (tmp_path / name).write_bytes(content() if callable(content) else content)
    with pytest.raises(WgradError, match=words) as caught:
        load(tmp_path / name, tokenizer)
    assert "\n" not in str(caught.value) and name in str(caught.value)


@pytest.mark.parametrize("delimiter", [",", "\t"])
def test_a_quote_opens_a_cell_at_its_beginning_alone(delimiter: str) -> None:
    """Rows are those of Python's csv: a stray quote is its own cell's, and no later row is drawn into it."""
    words = ['5" a', "b", '"c"', 'd "e" f', "", " ", '""', 'g""h', "i\nj", "k,l", "m\tn", '"', 'o"']
    rng = random.Random(0)
    text = f"text{delimiter}prompt\n"
    for number in range(400):
        cells = [rng.choice(words) for _ in range(2)]
        plain = [cell for cell in cells if not cell.startswith('"') and not set(cell) & {"\n", delimiter}]
        if number % 2 and len(plain) == 2:  # as somebody typed it
            text += delimiter.join(plain) + "\n"
        else:
            row = io.StringIO()
            csv.writer(row, delimiter=delimiter, lineterminator="\n").writerow(cells)
            text += row.getvalue()
    lines = [(n, line.encode()) for n, line in enumerate(text.splitlines(), 1)]
    read = [record for _, record in csv_rows(iter(lines), delimiter, "a.csv", "--data")]
    wanted = list(csv.DictReader(io.StringIO(text), delimiter=delimiter))
    blank = [row for row in wanted if delimiter == "\t" and not "".join(row.values()).strip()]  # passed over
    assert len(read) > 300 and read == [row for row in wanted if row not in blank]


def test_any_damage_of_parquet_is_a_line(tokenizer: Tokenizer, tmp_path: Path) -> None:
    good = parquet(RECORDS * 20)
    for place in range(4, len(good), max(len(good) // 150, 1)):
        (tmp_path / "a.parquet").write_bytes(good[:place] + bytes([good[place] ^ 0xA5]) + good[place + 1 :])
        try:
            load(tmp_path / "a.parquet", tokenizer)
        except WgradError as error:
            assert "\n" not in str(error)


def test_parquet_takes_its_package(tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.parquet").write_bytes(parquet(RECORDS))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(WgradError, match=r"^--data: .*a.parquet is a Parquet file.*: pip install 'wgrad\[parquet\]'$"):
        load(tmp_path / "a.parquet", tokenizer)


def test_a_structure_of_parquet_has_no_keys_that_its_row_lacked(tmp_path: Path) -> None:
    tools: list[dict[str, Any]] = [{"name": "add", "more": {"a": 1}}, {"name": "call", "why": "x"}]
    records = [{"messages": TURNS, "tools": [tool]} for tool in tools]
    (tmp_path / "a.parquet").write_bytes(parquet(records))
    with open_data(str(tmp_path / "a.parquet"), "--data") as file:
        assert list(file.records()) == [(1, records[0]), (2, records[1])]


# ---- folders -------------------------------------------------------------------------------------
def test_a_folder_is_its_files_by_name(tokenizer: Tokenizer, tmp_path: Path, write_lines) -> None:
    wanted = contents(load(write_lines(*RECORDS, *CHATS, *RECORDS), tokenizer))
    folder = tmp_path / "data"
    folder.mkdir()
    for name, content in (("c.parquet", parquet(RECORDS)), ("a.csv", table(RECORDS)), ("b.json", array(CHATS))):
        (folder / name).write_bytes(content)
    (folder / ".hidden").write_bytes(b"text")
    data = load(folder, tokenizer)
    assert contents(data) == wanted and sum("is taken for" in remark for remark in data.remarks) == 3
    assert [Path(d.source.rsplit(":", 1)[0]).name for d in data.train] == ["a.csv"] * 2 + ["b.json"] * 2 + [
        "c.parquet"
    ] * 2


@pytest.mark.parametrize(
    ("train", "other"),
    [
        ("train.jsonl", "valid.jsonl"),
        ("data/train-00000-of-00001.jsonl", "data/test-00000-of-00001.jsonl"),
        ("train.jsonl", "README.md"),
        ("a.jsonl", "LICENSE"),
    ],
)
def test_a_folder_with_splits_gives_one(tokenizer: Tokenizer, tmp_path: Path, train: str, other: str) -> None:
    """As the package datasets does; what tells of data is not read."""
    folder = tmp_path / "data set"
    for name, text in ((train, "good"), (other, "held out")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps({"text": text}))
    if "/" in train:
        (folder / "README.md").write_text("---\nlicense: mit\n---\n")
    data = load(folder, tokenizer)
    assert [tokenizer.decode(d.ids.tolist()) for d in data.train] == ["good"]
    if other.endswith(".jsonl"):
        split = "validation" if "valid" in other else "test"
        assert f"for another split give {folder}:{split}" in " ".join(data.remarks)
        assert tokenizer.decode(load(f"{folder}:{split}", tokenizer).train[0].ids.tolist()) == "held out"
        data = load(folder, tokenizer, eval_data=str(folder))
        assert [tokenizer.decode(part[0].ids.tolist()) for part in (data.train, data.held_out)] == ["good", "held out"]
        assert f"note: --eval-data reads 1 file of the split {split} in {folder}" in " ".join(data.remarks)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ([], "is a folder without files"),
        (["a.csv", "b.txt"], "must hold plain text or records; got both .*b.txt and .*a.csv"),
        (["a.txt", "b.csv"], "must hold plain text or records; got both .*a.txt and .*b.csv"),
        (["a.csv", "b.pdf"], "b.pdf is a document"),
        (["a.csv", "more/"], "more is a folder within .*data: move its files up"),
    ],
)
def test_folders_without_one_kind_of_data_are_refused(
    tokenizer: Tokenizer, tmp_path: Path, files: list[str], words: str
) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    for name in files:
        (folder / name).mkdir() if name.endswith("/") else (folder / name).write_bytes(table(RECORDS))
    with pytest.raises(WgradError, match=f"^--data: .*{words}"):
        load(folder, tokenizer)


# ---- Alpaca, ShareGPT ----------------------------------------------------------------------------
ASK, ANSWER = {"role": "user", "content": "Add.\n\n1, 2"}, {"role": "assistant", "content": "3"}
SYSTEM = {"role": "system", "content": "Be terse."}
TOLD = [{"from": "human", "value": "Add.\n\n1, 2"}, {"from": "gpt", "value": "3"}]


@pytest.mark.parametrize(
    ("record", "messages", "form"),
    [
        ({"instruction": "Add.", "input": "1, 2", "output": "3", "text": "all"}, [ASK, ANSWER], "Alpaca"),
        ({"instruction": "Add.\n\n1, 2", "input": "", "output": "3"}, [ASK, ANSWER], "Alpaca"),
        ({"instruction": "Add.\n\n1, 2", "input": None, "output": "3"}, [ASK, ANSWER], "Alpaca"),
        (
            {"instruction": "Add.", "input": "1, 2", "output": "3", "system": "Be terse."},
            [SYSTEM, ASK, ANSWER],
            "Alpaca",
        ),
        ({"conversations": TOLD}, [ASK, ANSWER], "ShareGPT"),
        ({"conversations": TOLD, "system": "Be terse."}, [SYSTEM, ASK, ANSWER], "ShareGPT"),
        (
            {"conversations": [{"from": "system", "value": "Be terse."}, *TOLD, *TOLD]},
            [SYSTEM, *[ASK, ANSWER] * 2],
            "ShareGPT",
        ),
        ({"conversations": [ASK, ANSWER]}, [ASK, ANSWER], "ShareGPT"),
        ({"conversations": json.dumps(TOLD)}, [ASK, ANSWER], "ShareGPT"),
        (
            {"conversations": [{**ASK, "role": "User"}, {**ANSWER, "role": "Assistant "}]},
            [ASK, ANSWER],
            "ShareGPT",
        ),
        ({"conversations": [{**TOLD[0], "from": "Human"}, {**TOLD[1], "from": "GPT"}]}, [ASK, ANSWER], "ShareGPT"),
        ({"conversations": {"from": ["human", "gpt"], "value": ["Add.\n\n1, 2", "3"]}}, [ASK, ANSWER], "ShareGPT"),
    ],
)
def test_other_forms_are_messages(tokenizer: Tokenizer, write_lines, record: dict, messages: list, form: str) -> None:
    wanted = contents(load(write_lines({"messages": messages}), tokenizer))
    data = load(write_lines(record, record), tokenizer)
    assert contents(data) == wanted * 2
    assert f"has {form} records" in data.remarks[0]


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"instruction": 1, "output": "a"}, "'instruction' must be text; got a number"),
        ({"instruction": "", "output": "a"}, "'instruction' is empty"),
        ({"instruction": "a", "output": ""}, "'output' is empty"),
        ({"instruction": "a", "input": 0, "output": "b"}, "'input' must be text; got a number"),
        ({"instruction": "a", "output": "b", "history": [["c", "d"]]}, "'history' of an Alpaca record is not read"),
        ({"conversations": "x"}, "'conversations' must be a list of turns that is not empty; got text"),
        ({"conversations": []}, "must be a list of turns that is not empty"),
        ({"conversations": {"from": ["gpt"], "value": ["a", "b"]}}, "must be a list of turns .* got an object"),
        ({"conversations": {"from": [], "value": []}}, "must be a list of turns .* got an empty list"),
        ({"conversations": {"from": "gpt", "value": "b"}}, "must be a list of turns .* got an object"),
        ({"conversations": [["human", "x"]]}, "turn 1 must be an object with 'from' and 'value'"),
        (
            {"conversations": [{"from": "narrator", "value": "x"}]},
            "'from' of turn 1 must be one of system, ",
        ),
        ({"conversations": [{"from": "gpt"}]}, "'value of turn 1' must be text; got null"),
    ],
)
def test_incomplete_records_of_other_forms_are_refused(
    tokenizer: Tokenizer, write_lines, record: dict, words: str
) -> None:
    with pytest.raises(WgradError, match=f":1: .*{words}"):
        load(write_lines(record), tokenizer)


# ---- size ----------------------------------------------------------------------------------------
@pytest.mark.skipif(sys.platform != "linux", reason="what a process took at most is counted in other units there")
@pytest.mark.parametrize("kind", ["array", "one element", "csv", "parquet"])
def test_memory_is_bounded_by_four_times_the_file_or_ten_mebibytes(make_tokenizer, tmp_path: Path, kind: str) -> None:
    words = "A wise man will hear, and will increase learning; "
    paths = []
    # The first warms what stays the same; of Parquet a page of 1 MiB, and one of distinct values, are part of that.
    for size in (2_500_000, 5_000_000) if kind == "parquet" else (600_000, 2_500_000):
        write, ending = {"csv": (table, ".csv"), "parquet": (parquet, ".parquet")}.get(kind, (array, ".json"))
        path = tmp_path / f"{size}{ending}"
        one = kind == "one element"
        texts = [words * (size // len(words))] if one else [f"{i} {words * 4}" for i in range(size // 210)]
        path.write_bytes(write([{"text": text} for text in texts]))
        paths.append(path)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "RAYON_NUM_THREADS": "2"}
    # What glibc keeps of what was given back, by thread, is not what reading takes: half a megabyte more or less.
    environment |= {"MALLOC_ARENA_MAX": "1", "MALLOC_TRIM_THRESHOLD_": "65536"}
    command = [sys.executable, "-c", MEMORY, str(make_tokenizer()), str(paths[1]), str(paths[0])]
    run = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert run.returncode == 0, run.stderr
    before, after, tokens = json.loads(run.stdout)
    assert tokens > 0 and after - before <= max(4 * paths[1].stat().st_size, 10 << 20)
