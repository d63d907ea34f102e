"""Files of other people: typed, bounded, never waited for, and refused in one form of message."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from msgspec import Meta, Struct

from wgrad.device.errors import WgradError
from wgrad.train.files import input_files
from wgrad.train.files.decode import JSON_LIMIT, YAML_LIMIT, convert, decode_json, parse_json, read_json, read_yaml
from wgrad.train.files.input_files import exists, open_input, read_input
from wgrad.train.options.config_yaml import read_config_file
from wgrad.train.options.finetune_config import FinetuneConfig


class Inner(Struct):
    factor: Annotated[float, Meta(gt=0, lt=1e6)] = 1.0

    def __post_init__(self) -> None:
        if self.factor == 13:
            raise ValueError("factor must not be 13; got 13")


class Outer(Struct):
    size: Annotated[int, Meta(ge=1, le=1 << 24)]
    eps: float | None = None
    flag: bool | None = None
    files: dict[str, str] = {}
    inner: Inner | None = None
    more: dict[str, Inner] = {}
    nested: dict[str, dict[str, int]] = {}
    sizes: list[int] = []
    pair: tuple[int, int] | None = None
    level: bool | Literal["low", "high"] | None = None


WRONG = [
    ("{}", "size is missing"),
    ("[1]", r"the whole must be an object; got \[1\]"),
    ("3", "the whole must be an object; got 3"),
    ("null", "the whole must be an object; got null"),
    ('{"size": 0}', "size must be a whole number of at least 1; got 0"),
    ('{"size": -7}', "size must be a whole number of at least 1; got -7"),
    (f'{{"size": {2**70}}}', f"size must be a whole number of at most 16777216; got {2**70}"),
    ('{"size": 1.5}', "size must be a whole number; got 1.5"),
    ('{"size": true}', "size must be a whole number; got true"),
    ('{"size": "300"}', "size must be a whole number; got '300'"),
    ('{"size": null}', "size must be a whole number; got null"),
    ('{"size": {"a": {"b": [1]}}}', "size must be a whole number; got {'a': {'b': \\[...\\]}}"),
    ('{"size": 1, "eps": "1e-5"}', "eps must be a number or null; got '1e-5'"),
    ('{"size": 1, "flag": 1}', "flag must be true or false or null; got 1"),
    ('{"size": 1, "inner": {"factor": 0}}', "inner.factor must be a number above 0; got 0"),
    ('{"size": 1, "inner": {"factor": 1e6}}', "inner.factor must be a number below 1000000; got 1000000.0"),
    ('{"size": 1, "inner": {"factor": 13}}', "inner: factor must not be 13; got 13"),
    ('{"size": 1, "level": "%s"}' % ("x" * 2000), r"level must be one of .*'low', 'high'.*; got 'x{30,}\.\.\.x+'"),
    ('{"size": 1, "inner": [2]}', r"inner must be an object or null; got \[2\]"),
    ('{"size": 1, "files": {"a": "b", "c d": 3}}', r"files\[c d\] must be text; got 3"),
    ('{"size": 1, "more": {"a": {}, "b": {"factor": -1}, "c": 3}}', r"more\[b\].factor .* above 0; got -1"),
    ('{"size": 1, "nested": {"a": {}, "b": {"c": 1, "d": "x"}, "e": {"f": "x"}}}', r"nested\[b\]\[d\] .* got 'x'"),
    ('{"size": 1, "sizes": [1, 2, "x"]}', r"sizes\[2\] must be a whole number; got 'x'"),
    ('{"size": 1, "pair": [1, 2, 3]}', r"pair must be a list of length 2; got \[1, 2, 3\]"),
    ('{"size": "%s"}' % ("x" * 1000), "got 'x+\\.\\.\\.x+': fetch"),
    ('{"size": "a\\nb\\u2028c"}', r"got 'a\\nb\\u2028c'"),
]  # fmt: skip
NOT_JSON = [
    (b"", "line 1 is not valid JSON: Expecting value"),
    (b"{", "line 1 is not valid JSON"),
    (b'{"size": 1,\n}', "line [12] is not valid JSON"),
    (b'{"size": 1} x', "line 1 is not valid JSON: Extra data"),
    (b'{"size": 1, "eps": NaN}', "eps must be a finite number; got NaN"),
    (b'{"size": 1, "x": -Infinity}', "x must be a finite number; got -Infinity"),
    (b'{"size": 1, "x": 1e999}', "x must be a finite number; got 1e999"),
    (b'{"size": 1, "x": ' + b"9" * 5000 + b"}", "is not valid JSON: Exceeds the limit"),
    (b'{"size": 1, "x": "\xff"}', "must be UTF-8 text; got byte 0xff at 18"),
    (b'{"size": 1, "x": "\\ud800"}', r"must be Unicode text; got half of a surrogate pair, '\\ud800'"),
    (b'{"size": 1, "\\udfff": 1}', r"must be Unicode text; got half of a surrogate pair, '\\udfff'"),
    (b'{"size": 1, "x": ' + b"[" * 70 + b"]" * 70 + b"}", "must be nested at most 64 deep; got more"),
    (b'{"size": 1, "x": ' + b'{"a":' * 70 + b"1" + b"}" * 71, "must be nested at most 64 deep; got more"),
    (b"[" * 200_000, "must be nested at most 64 deep; got more"),
]


@pytest.mark.parametrize("text, message", WRONG)
def test_a_wrong_value_says_key_rule_and_value(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(WgradError, match=message) as caught:
        read_json(path, Outer, "--model")
    said = str(caught.value)
    assert said.startswith(f"--model: {path}: ") and said.endswith(": fetch the file again")
    assert "\n" not in said and len(said) < 500


@pytest.mark.parametrize("data, message", NOT_JSON, ids=[m for _, m in NOT_JSON])
def test_what_is_not_json_is_told(data: bytes, message: str) -> None:
    with pytest.raises(WgradError, match=f"^--model: a.json:? {message}.*: fetch the file again$"):
        decode_json(data, Outer, "--model: a.json")


def test_valid_json_is_read() -> None:
    data = b'\xef\xbb\xbf{"size": 3, "eps": 1, "x": "\\ud83d\\ude00", "inner": {"factor": 2}, "unknown": [[1]]}'
    assert decode_json(data, Outer, "") == Outer(3, 1.0, inner=Inner(2.0))
    assert parse_json(b'"\\ud83d\\ude00"', "") == "\U0001f600"
    assert parse_json(b"[" * 64 + b"]" * 64, "") is not None


def test_nan_breaks_every_rule_of_a_number() -> None:
    with pytest.raises(WgradError, match="x: factor must be a number above 0; got nan: y"):
        convert({"factor": float("nan")}, Inner, "x", "y")


# ---- YAML --------------------------------------------------------------------------------------
NOT_YAML = [
    ("rank: [1", "line 1: not valid YAML"),
    ("rank: 1\n\tlr: 2", "line 2: not valid YAML"),
    (
        "\n".join(f"{c}: &{c} [{'1, ' * 20 if c == 'a' else f'*{b}, ' * 20}]" for b, c in zip(" abcd", "abcde")),
        "line 4: not valid YAML: there are more than 20000 values, with those of aliases",
    ),
    ("&a [*a]", r"line 1: not valid YAML: \*a stands within &a"),
    ("a: &a [1]\nb: {<<: *a}", "line 1: not valid YAML: << takes a mapping, or a list of mappings"),
    ("b: *a", "line 1: not valid YAML: found undefined alias 'a'"),
    ("rank: !!int ''", "not valid YAML"),
    ("rank: !!bool x", "not valid YAML"),
    ("rank: !!timestamp x", "not valid YAML"),
    ("rank: !!python/object/apply:os.getcwd []", "could not determine a constructor"),
    ("rank: 1\nlr: 2\nrank: 3", "line 3: not valid YAML: 'rank' is given twice"),
    ("b:\n  <<: {r: 1, r: 2}", "line 2: not valid YAML: 'r' is given twice"),
    ("b: {<<: {r: 1},\n  <<: {s: 2}}", "line 2: not valid YAML: '<<' is given twice"),
    ("rank: 010", "line 1: not valid YAML: 010 is another number in YAML: write it in decimal"),
    ("rank: 1:30", "line 1: not valid YAML: 1:30 is another number in YAML"),
    ("rank: 2026-13-45", "not valid YAML: month must be in"),
    ("rank: " + "9" * 5000, "not valid YAML: Exceeds the limit"),
    ("? {a: b}\n: c", "line 1: not valid YAML"),
    ("[" * 5000, "nested at most 64 deep"),
    ("[" * 70 + "]" * 70, "nested at most 64 deep"),
    ("rank: \x07", "not valid YAML: special characters"),
    ("- 3", "expected lines like 'lora_r: 16'"),
    ("3: 4", "unknown key 3"),
]


@pytest.mark.parametrize("text, message", NOT_YAML, ids=[m for _, m in NOT_YAML])
def test_what_is_not_yaml_is_told(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(WgradError, match=message) as caught:
        read_config_file(path)
    assert str(caught.value).startswith(f"--config: {path}")


def test_anchors_are_read(tmp_path: Path) -> None:
    """Merged keys may be given again, and merged again; a key of the mapping itself wins."""
    path = tmp_path / "run.yaml"
    path.write_text("a: &a {r: 1, s: 2}\nb: &b {<<: *a, r: 3}\nc: [{<<: *b, t: 4}, *a, *b]\nd: &d x\ne: *d\n")
    b = {"r": 3, "s": 2}
    assert read_yaml(path, "") == {"a": {"r": 1, "s": 2}, "b": b, "c": [b | {"t": 4}, {"r": 1, "s": 2}, b],
                                   "d": "x", "e": "x"}  # fmt: skip
    path.write_text("a: &a [{<<: &b {r: 1}, s: 2}]\nb: {<<: *b, r: 5}")
    assert read_yaml(path, "") == {"a": [{"r": 1, "s": 2}], "b": {"r": 5}}
    path.write_text("a: &a {r: 1, s: 2}\nb: &b {s: 3, t: 4}\nc: {<<: [*b, *a], =: 5}")
    assert read_yaml(path, "")["c"] == {"r": 1, "s": 3, "t": 4, "=": 5}
    path.write_text("{<<: {<<: {r: 1, s: 2}, s: 3}}")
    assert read_yaml(path, "") == {"r": 1, "s": 3}


def test_invalid_utf8_in_yaml_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(b"rank: '\xff'")
    with pytest.raises(WgradError, match="--config: .*run.yaml must be UTF-8 text; got byte 0xff at 7: "):
        read_yaml(path, "--config")
    path.write_bytes(b"")
    assert read_yaml(path, "--config") is None


# ---- files -------------------------------------------------------------------------------------
def test_a_size_beyond_sense_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    with open(path, "wb") as file:
        file.truncate(1 << 40)  # a terabyte of holes
    with pytest.raises(WgradError, match=f"a.json must have at most {JSON_LIMIT} bytes; got {1 << 40}: "):
        read_json(path, Outer, "--model")
    with pytest.raises(WgradError, match=f"a.json must have at most {YAML_LIMIT} bytes; got {1 << 40}: "):
        read_yaml(path, "--config")
    with pytest.raises(WgradError, match=f"a.json must have at most {1 << 39} bytes; got {1 << 40}: "):
        read_input(path, "--model", 1 << 39)  # no memory holds so much


def not_files(folder: Path) -> dict[str, str]:
    """Return paths that are no regular files, with the error for each."""
    os.mkfifo(folder / "pipe")
    (folder / "loop").symlink_to(folder / "loop")
    (folder / "link").symlink_to(folder / "pipe")
    (folder / "file").write_text("x")
    return {
        str(folder): "is a folder: give a regular file",
        str(folder / "pipe"): "is a named pipe: give a regular file",
        str(folder / "link"): "is a named pipe: give a regular file",
        "/dev/zero": "is a device: give a regular file",
        str(folder / "loop"): "cannot read .*: too many levels of symbolic links",
        str(folder / "none"): "no such file: .*none: check the path",
        str(folder / "file" / "x"): "cannot read .*: not a directory",
        str(folder / ("n" * 300)): r"a part of .*n+\.\.\.n+ .* has 300 bytes: a name must have at most 255",
        str(folder / "a\0b"): r"'.*a\\x00b' has a NUL character",
        str(folder / "a\ud800b"): r"'.*a\\ud800b' is no name of a file here",
        "": "no such file",
    }


@pytest.mark.skipif(os.name == "nt", reason="named pipes of Windows are no files in folders")
def test_what_is_no_regular_file_is_refused_without_waiting(tmp_path: Path) -> None:
    for path, message in not_files(tmp_path).items():
        for read in (open_input, lambda p, s: read_input(p, s, 100)):
            with pytest.raises(WgradError, match=message) as caught:
                read(path, "--data")
            said = str(caught.value)
            assert said.startswith("--data: ") and len(said) < 400 and said.isprintable()


@pytest.mark.skipif(os.name == "nt", reason="named pipes of Windows are no files in folders")
def test_a_pipe_that_takes_the_place_of_a_file_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").write_text("x")
    regular = os.stat(tmp_path / "file")
    monkeypatch.setattr(input_files.os, "stat", lambda path: regular)
    with pytest.raises(WgradError, match="is a named pipe"):
        open_input(tmp_path / "pipe", "--data")


def test_a_missing_permission_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> int:
        raise PermissionError(13, "Permission denied")

    (tmp_path / "a").write_text("x")
    monkeypatch.setattr(input_files.os, "open", refuse)  # root may read everything
    with pytest.raises(WgradError, match="--data: cannot read .*a: permission denied: check the path and its perm"):
        read_input(tmp_path / "a", "--data", 100)
    monkeypatch.setattr(input_files.os, "stat", refuse)
    with pytest.raises(WgradError, match="permission denied"):
        exists(tmp_path / "a", "--out")


def test_exists_refuses_a_name_that_no_file_can_have(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("x")
    found = [exists(tmp_path / name, "--out") for name in ("", "a", "b", "a/b")]
    assert found == [True, True, False, False]
    with pytest.raises(WgradError, match="has 300 bytes: a name must have at most 255"):
        exists(tmp_path / ("n" * 300), "--out")


def test_a_pointer_of_git_lfs_is_recognized(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n")
    with pytest.raises(WgradError, match=rf"pointer of Git LFS, not the file itself: run 'git lfs pull' in {tmp_path}"):
        read_json(path, Outer, "--model")


# ---- the home folder ---------------------------------------------------------------------------
def test_every_path_of_a_run_knows_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    names = ("model", "data", "out", "eval_data", "adapter")
    values: dict[str, Any] = {name: f"~/{name}" for name in names}
    config = FinetuneConfig(**values)
    for name in names:
        expanded = os.path.expanduser(f"~/{name}")
        assert getattr(config, name) == ((expanded,) if name in ("data", "eval_data") else expanded)
        assert str(tmp_path) in expanded
    kept = FinetuneConfig(model="org/name", data=("a~b",), out="./~c", sample_prompt=("~/x",))
    assert (kept.model, kept.data, kept.out, kept.sample_prompt) == ("org/name", ("a~b",), "./~c", ("~/x",))


def test_the_command_line_knows_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from wgrad.train.options.generate_config import GenerateConfig
    from wgrad.train.options.resolve import resolve_config

    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    args = GenerateConfig(model="~/m", adapter="~/a", prompt="~/p")
    assert (args.model, args.adapter, args.prompt) == (str(tmp_path / "m"), str(tmp_path / "a"), "~/p")
    (tmp_path / "run.yaml").write_text("data: ~/d.txt\nmodel: ~/m\n")
    config = resolve_config({"config": "~/run.yaml", "out": "~/out"})
    assert config.data == (str(tmp_path / "d.txt"),)
    (tmp_path / "out").mkdir()
    config.save(config.out)
    assert resolve_config({"resume": True, "out": "~/out"}).data == config.data


def test_msgspec_words_are_all_known() -> None:
    """A message of msgspec that is not rewritten would show its own backticks."""
    for text, _ in WRONG:
        with pytest.raises(WgradError) as caught:
            decode_json(text.encode(), Outer, "x")
        assert "`" not in str(caught.value)


def test_nan_and_infinity_are_read_from_python_only(tmp_path: Path) -> None:
    """Read where a file comes of Python and the key is not looked at; elsewhere, the key is named."""
    text = b'{"size": 1, "unknown": [Infinity, -Infinity, NaN, 1e999], "more": {"a": {"factor": NaN}}}'
    value = parse_json(text, "a.json", from_python=True)
    assert value["unknown"][:2] == [math.inf, -math.inf] and math.isnan(value["unknown"][2])
    with pytest.raises(WgradError, match=r"^a.json: unknown\[0\] must be a finite number; got Infinity: "):
        parse_json(text, "a.json")
    with pytest.raises(WgradError, match=r"^a.json: more.a.factor must be a finite number; got NaN: "):
        parse_json(text.replace(b"[Infinity, -Infinity, NaN, 1e999]", b"3"), "a.json")
    (tmp_path / "a.json").write_bytes(text)
    with pytest.raises(WgradError, match=r"more\[a\].factor must be a number above 0; got nan"):
        read_json(tmp_path / "a.json", Outer, "--model", from_python=True)
