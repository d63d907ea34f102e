"""Data files: kinds by name and content, encodings, standard input, long files and lines."""

from __future__ import annotations

import gzip
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from wgrad.device.errors import WgradError
from wgrad.train.data import table_records
from wgrad.train.data.data import Dataset, load_data
from wgrad.train.data.text_windows import WINDOW
from wgrad.train.data.tokenizer import Tokenizer
from wgrad.train.options.finetune_config import RunOptions

EOS = 1
LINES = b'{"text": "Hear."}\n{"text": "See."}\n'


def load(path: Path | str, tokenizer: Tokenizer, **options) -> Dataset:
    return load_data(RunOptions(data=(str(path),), **({"eval_fraction": 0, "max_length": 200} | options)), tokenizer)


# ---- kinds ---------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("a.xlsx", r"a table by its name \(.xlsx\): save it as CSV or Parquet"),
        ("a.ARROW", "is Arrow by its name, but does not begin as such"),
        ("a.ORC", "a table by its name"),
        ("a.jsonl.gz", "compressed by its name .*unpack it first"),
        ("a.tar", "compressed"),
        ("a.pdf", "a document with formatting by its name .*save its text"),
        ("a.docx", "a document"),
        ("a.png", "an image"),
        ("a.mp3", "sound or video"),
        ("a.safetensors", "weights or arrays"),
        ("a.exe", "a program"),
    ],
)
def test_what_a_name_says_is_no_text_is_refused(tokenizer: Tokenizer, tmp_path: Path, name: str, words: str) -> None:
    (tmp_path / name).write_bytes(LINES)
    with pytest.raises(WgradError, match=f"^--data: .*{words}"):
        load(tmp_path / name, tokenizer)
    with pytest.raises(WgradError, match=f"^--eval-data: .*{words}"):
        (tmp_path / "good.jsonl").write_bytes(LINES)
        load(tmp_path / "good.jsonl", tokenizer, eval_data=str(tmp_path / name))


def zstd(data: bytes) -> bytes:
    return bytes(pytest.importorskip("pyarrow").compress(data, codec="zstd", asbytes=True))


def test_packed_text_is_unpacked(tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.jsonl").write_bytes(LINES)
    wanted = [d.ids.tolist() for d in load(tmp_path / "a.jsonl", tokenizer).train]
    halves = LINES[: (at := LINES.index(b"\n") + 1)], LINES[at:]
    several = b"".join(map(gzip.compress, halves))
    for name, content in (("a.jsonl.gz", several), ("b.jsonl.zst", zstd(LINES)), ("c.JSONL.GZ", gzip.compress(LINES))):
        (tmp_path / name).write_bytes(content)
        assert [d.ids.tolist() for d in load(tmp_path / name, tokenizer).train] == wanted
    monkeypatch.setattr(table_records, "_LEAST", 1 << 20)
    for name, content, words in (
        ("a.jsonl.gz", gzip.compress(LINES)[:-3], "cannot be unpacked .gzip."),
        ("a.jsonl.zst", zstd(LINES)[:-3], "cannot be unpacked .zstd."),
        ("a.txt.gz", gzip.compress(b" " * (1 << 21)), "unpacks to more than 1 MiB"),
        ("a.txt.zst", zstd(b" " * (1 << 21)), "unpacks to more than 1 MiB"),
        ("a.jsonl.gz", gzip.compress(gzip.compress(LINES)), "compressed by its first bytes"),
        ("a.tar.gz", gzip.compress(LINES), "compressed by its name .*tar"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(WgradError, match=f"^--data: .*{words}"):
            load(tmp_path / name, tokenizer)


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a"])
@pytest.mark.parametrize(
    ("content", "words"),
    # mtime: the test has one name in every process.
    [
        # mtime: a test has one name in all processes, which share the tests among them.
        (gzip.compress(LINES, mtime=0), "compressed by its first bytes"),
        (b"PK\x03\x04rest", "compressed by its first bytes"),
        (b"%PDF-1.7\nrest", "a document"),
        (b"\x89PNG\r\n\x1a\n", "an image"),
        (b"ARROW1rest", "cannot be read as Arrow"),
        (b"\x7fELFrest", "a program"),
        ("{}\n".encode("utf-16")[:-1], "begins as UTF-16, but is not valid UTF-16"),
        ("ARROW1\0\0".encode("utf-16"), "is Parquet or Arrow saved as UTF-16 text"),
        ("PAR1".encode("utf-32"), "is Parquet or Arrow saved as UTF-32 text"),
        (b"some\x00text\n", "NUL"),
        (b"version https://git-lfs.github.com/spec/v1\noid", "pointer of Git LFS"),
    ],
)
def test_what_the_content_says_is_no_text_is_refused(
    tokenizer: Tokenizer, tmp_path: Path, name: str, content: bytes, words: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(WgradError, match=f"^--data: .*{words}") as caught:
        load(tmp_path / name, tokenizer)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "note"),
    [
        ("a.jsonl", LINES, None),
        ("a.ndjson", LINES, None),
        ("a.txt", b"Hear. See.", None),
        ("a.md", b"# Hear\nSee.", None),
        ("a.py", b"print(1)\n", "taken for plain text, of which every token is trained on (its name ends in .py"),
        ("a.html", b"<p>Hear.", "taken for plain text, of which every token is trained on (its name ends in .html"),
        ("a", b"Hear. See.", "taken for plain text, of which every token is trained on (its name does not say"),
        ("a.data", LINES, "taken for JSON lines (its name ends in .data"),
        ("a.txt", LINES, "is plain text by its name, and looks like JSON lines"),
    ],
)
def test_what_a_file_is_taken_for_is_said(
    tokenizer: Tokenizer, tmp_path: Path, name: str, content: bytes, note: str | None
) -> None:
    (tmp_path / name).write_bytes(content)
    data = load(tmp_path / name, tokenizer)
    assert len(data.remarks) == (note is not None)
    assert note is None or note in data.remarks[0]
    lines = name.endswith("json") or name.endswith("jsonl") or name in ("a.ndjson", "a.data")
    assert len(data.train) == (2 if lines else 1)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_a_named_pipe_is_not_waited_for(tokenizer: Tokenizer, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.jsonl")
    with pytest.raises(WgradError, match="^--data: .* is a named pipe: give a regular file"):
        load(tmp_path / "a.jsonl", tokenizer)


# ---- standard input ------------------------------------------------------------------------------
class Input(io.TextIOWrapper):
    def __init__(self, content: bytes, terminal: bool = False) -> None:
        super().__init__(io.BufferedReader(io.BytesIO(content)))  # type: ignore[arg-type]
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal


def test_standard_input_is_read_by_what_it_holds(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", Input(LINES))
    data = load("-", tokenizer)
    assert [d.source for d in data.train] == ["standard input:1", "standard input:2"]
    assert data.remarks == ("note: standard input is taken for JSON lines",)
    monkeypatch.setattr(sys, "stdin", Input(b"Hear. See."))
    assert load("-", tokenizer).train[0].source == "standard input: token 1"
    monkeypatch.setattr(sys, "stdin", Input(b"", terminal=True))
    with pytest.raises(WgradError, match="--data: standard input is no file"):
        load("-", tokenizer)
    with pytest.raises(WgradError, match="--eval-data: standard input is --data already"):
        load("-", tokenizer, eval_data="-")


# ---- encodings -----------------------------------------------------------------------------------
@pytest.mark.parametrize("size", [1, 65_530, 65_531, 65_532, 65_533, 131_072])
def test_plain_text_reads_the_same_across_blocks(tokenizer: Tokenizer, tmp_path: Path, size: int) -> None:
    """A character, a \\r\\n or a byte-order mark across a border; every \\r\\n is a \\n, a lone \\r stays."""
    text = "\ufeff" + "x" * size + "é\r\n知\r\n\ry\r"
    (tmp_path / "a.txt").write_bytes(text.encode())
    data = load(tmp_path / "a.txt", tokenizer, max_length=10**6)
    assert tokenizer.decode(data.train[0].ids[1:]) == "x" * size + "é\n知\n\ry\r"


@pytest.mark.parametrize("lines", [0, 3, 40_000])
@pytest.mark.parametrize(("wrong", "words"), [(b"\xe9t\xe9", "not UTF-8 .byte 0xe9"), (b"\x00", "a NUL character")])
def test_plain_text_that_is_none_names_the_line(
    tokenizer: Tokenizer, tmp_path: Path, lines: int, wrong: bytes, words: str
) -> None:
    (tmp_path / "a.txt").write_bytes(b"hear\n" * lines + b"x" + wrong + b"\n")
    if lines < 40_000 and wrong == b"\x00":
        words = "NUL bytes"  # seen before the file is read
    with pytest.raises(WgradError, match=words) as caught:
        load(tmp_path / "a.txt", tokenizer)
    assert "bytes" in words or f"a.txt:{lines + 1}: " in str(caught.value)


# ---- size ----------------------------------------------------------------------------------------
def _in_one_go(tokenizer: Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
    return tokenizer._backend.encode(text, add_special_tokens=add_special_tokens).ids


@pytest.mark.parametrize("seq_len", [50, 10**6])
def test_a_long_line_has_the_tokens_of_one_go(tokenizer: Tokenizer, write_lines, seq_len: int) -> None:
    text = "".join(f"The {i}th wise man will hear, and will increase learning. " for i in range(2500))
    assert len(text) > 3 * WINDOW
    turns = [{"role": "user", "content": text}, {"role": "assistant", "content": "Yes. " + text}]
    lines = ({"text": text}, {"prompt": "", "completion": text}, {"messages": turns[1:]}, {"messages": turns})
    data = load(write_lines(*lines), tokenizer, max_length=seq_len)
    template = tokenizer.chat_template
    chat = [_in_one_go(tokenizer, template.render(t), False) for t in (turns[1:], turns)]
    wanted = [[*_in_one_go(tokenizer, text, True), EOS]] * 2 + chat
    if seq_len == 50:
        assert data.left_out == 1 and data.cut_tokens == sum(map(len, wanted[:3])) - 150
        wanted = wanted[:3]
    assert [d.ids.tolist() for d in data.train] == [ids[:seq_len] for ids in wanted]
    if seq_len > 50:
        header = _in_one_go(tokenizer, template.render(turns[:1], add_generation_prompt=True), False)
        assert not data.train[3].loss_mask[: len(header)].any() and data.train[3].loss_mask[len(header) :].all()


PROVERBS = (Path(__file__).parents[2] / "examples" / "data" / "proverbs.txt").read_text(encoding="utf-8")
MEMORY = """
import json, re, sys
from wgrad.train.data.data import load_data
from wgrad.train.data.tokenizer import load_tokenizer
from wgrad.train.options.finetune_config import RunOptions
folder, path = sys.argv[1:3]
tokenizer = load_tokenizer(folder)
warm = len(sys.argv) == 4
def load(path): return load_data(RunOptions(data=path, eval_fraction=0, max_length=256), tokenizer)
if warm: load(sys.argv[3])
def peak():  # of this program: what getrusage gives begins with what the process that started it had
    return 1024 * int(re.search(r"VmHWM:\\s*(\\d+)", open("/proc/self/status").read())[1])
before = peak()
data = load(path)
print(json.dumps([before, peak(), data.tokens]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="what a process took at most is counted in other units there")
@pytest.mark.parametrize("kind", ["text", "lines", "one JSON line", "messages"])
@pytest.mark.parametrize("size", [1_000_000, 2_500_000])
def test_memory_is_bounded_by_four_times_the_file_or_10_mib(
    make_tokenizer, tmp_path: Path, kind: str, size: int
) -> None:
    words = "A wise man will hear, and will increase learning; "
    turns = [{"role": "user", "content": words * 2}, {"role": "assistant", "content": words * 2}]
    line = {
        "text": PROVERBS,
        "lines": json.dumps({"text": words * 2}) + "\n",
        "one JSON line": PROVERBS,
        "messages": json.dumps({"messages": turns}) + "\n",
    }[kind]
    path = tmp_path / ("a.txt" if kind == "text" else "a.jsonl")
    # For the larger file what stays the same (windows, the tokenizer's cache of words) is warmed by a small one.
    sizes = {path: size} | ({path.with_name("small" + path.suffix): 600_000} if size > 2_000_000 else {})
    for file, length in sizes.items():
        text = line * (length // len(line) + 1)
        text = text if kind in ("lines", "messages") else text[:length]
        file.write_text(json.dumps({"text": text}) + "\n" if kind == "one JSON line" else text)
    # A thread of the tokenizer's has its own memory: as many on every machine.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "RAYON_NUM_THREADS": "2"}
    command = [sys.executable, "-c", MEMORY, str(make_tokenizer()), *map(str, sizes)]
    run = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert run.returncode == 0, run.stderr
    before, after, tokens = json.loads(run.stdout)
    assert tokens > 0
    limit = 4 * size if size > 2_000_000 else 10 << 20
    assert after - before <= limit, f"{after - before:,} bytes, {(after - before) / size:.1f} times the file"


def test_documents_are_views_of_flat_arrays(tokenizer: Tokenizer, write_lines) -> None:
    data = load(write_lines(*({"text": f"Hear {i}."} for i in range(100))), tokenizer, eval_fraction=0.1)
    first, second = data.train[0], data.train[1]
    assert isinstance(first.ids.base, np.ndarray) and not first.ids.flags.owndata
    assert first.ids.tolist() != second.ids.tolist()
    assert data.train[-1].source == data.train[len(data.train) - 1].source
    assert [d.source for d in data.train[2:4]] == [data.train[2].source, data.train[3].source]
    with pytest.raises(IndexError):
        data.train[len(data.train)]
