"""Unusual text in command lines and standard input: bytes that are not UTF-8, impossible file names, `~`."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from wgrad.train.commands import cli

GENERATE = ["generate", "--device", "cpu", "--max-new-tokens", "2", "--temperature", "0"]
PATHS = [
    *(("finetune", name) for name in ("--model", "--data", "--out", "--eval-data", "--adapter", "--config")),
    *(("generate", name) for name in ("--model", "--adapter")),
]


def words(command: str, model: Path, data: Path, option: str, value: str) -> list[str]:
    """A command line that is sound but for one option."""
    options = {"--model": str(model), "--device": "cpu"}
    if command == "generate":
        options |= {"--prompt": "x", "--max-new-tokens": "1"}
    else:
        options |= {"--data": str(data), "--out": "out", "--max-steps": "1", "--max-length": "16"}
    return [command, *(word for pair in (options | {option: value}).items() for word in pair)]


@pytest.fixture
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("command", "option"), PATHS)
@pytest.mark.parametrize(
    ("value", "rule"),
    [
        ("a\0b", "has a NUL character"),
        ("x" * 300, "a name must have at most 255"),
        ("é" * 130 + "/y", "a name must have at most 255"),
        ("a\ud800", "is not Unicode text"),
    ],
)
def test_a_name_that_no_file_can_have_is_refused_by_its_option(
    capsys: pytest.CaptureFixture[str],
    in_folder: Path,
    make_checkpoint: Callable[..., Path],
    text_data: Path,
    command: str,
    option: str,
    value: str,
    rule: str,
) -> None:
    before = sorted(in_folder.rglob("*"))
    assert cli.main(words(command, make_checkpoint(), text_data, option, value)) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("device: ")]
    assert len(lines) == 1 and lines[0].startswith(f"wgrad: error: {option}: ") and rule in lines[0]
    assert len(lines[0]) < 400 and lines[0].isprintable()
    assert sorted(p for p in in_folder.rglob("*") if p not in before and "model" not in p.parts) == []


@pytest.mark.parametrize(("command", "option"), PATHS)
def test_home_is_expanded_in_every_path(
    capsys: pytest.CaptureFixture[str],
    in_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    make_checkpoint: Callable[..., Path],
    text_data: Path,
    command: str,
    option: str,
) -> None:
    """Errors name a missing file with the home folder in front; written files lie there."""
    home = in_folder / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("USERPROFILE", str(home))
    status = cli.main(words(command, make_checkpoint(), text_data, option, "~/nope"))
    if option == "--out":
        assert status == 0 and (home / "nope" / "adapter_model.safetensors").exists()
    else:
        assert status == 2 and str(home / "nope") in capsys.readouterr().err
    assert not (in_folder / "~").exists()


# ---- texts -------------------------------------------------------------------------------------
def run(words: list[str | bytes], stdin: bytes, environment: dict[str, str]) -> tuple[int, bytes, list[str]]:
    """Run a new process, since Python decodes bytes at its start, and return status, stdout and lines of stderr."""
    code = "import sys; from wgrad.train.commands.cli import main; sys.exit(main())"
    given = {k: v for k, v in os.environ.items() if not k.startswith("LC_") and k not in ("LANG", "PYTHONIOENCODING")}
    done = subprocess.run(
        [sys.executable, "-c", code, *words], input=stdin, capture_output=True, env=given | environment
    )
    return done.returncode, done.stdout, done.stderr.decode("utf-8").splitlines()


LOCALES = [
    {"LC_ALL": "C"},
    {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"},
    {"PYTHONIOENCODING": "latin-1"},
]


@pytest.mark.skipif(os.name == "nt", reason="Windows passes no bytes")
@pytest.mark.parametrize("environment", LOCALES, ids=["C", "ascii", "latin-1"])
def test_prompts_are_utf_8_in_every_locale(make_checkpoint: Callable[..., Path], environment: dict[str, str]) -> None:
    """UTF-8 is taken, whatever the locale; other bytes are refused by name."""
    model = str(make_checkpoint())
    text = "naïve → \U0001f600"
    status, out, errors = run([*GENERATE, "--model", model, "--prompt", "-"], text.encode(), environment)
    assert status == 0, errors
    assert out.startswith(
        "naïve".encode("latin-1" if "PYTHONIOENCODING" in environment else "utf-8")
    ) or out.startswith(b"na\\xefve")
    status, _, errors = run([*GENERATE, "--model", model, "--prompt", "-"], b"ok \xff", environment)
    assert (status, errors) == (
        2,
        ["wgrad: error: --prompt: standard input must be UTF-8 text; got byte 0xff at 3: convert it"],
    )
    status, _, errors = run([*GENERATE, "--model", model, "--prompt", b"ok \xff"], b"", environment)
    assert status == 2 and len(errors) == 1
    assert "--prompt: must be UTF-8 text; got byte 0xff at character 3" in errors[0]


@pytest.mark.parametrize("value", ["a\udc80", "\ud800"])
@pytest.mark.parametrize("option", ["--sample-prompt", "--device", "--lr-scheduler-type"])
def test_texts_of_a_run(capsys: pytest.CaptureFixture[str], in_folder: Path, option: str, value: str) -> None:
    assert cli.main(["finetune", "--model", "m", "--data", "d", "--out", "o", option, value]) == 2
    assert f"{option}: must be UTF-8 text; got" in capsys.readouterr().err
    assert list(in_folder.iterdir()) == []


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")
def test_generate_reports_a_full_disk(make_checkpoint: Callable[..., Path]) -> None:
    code = "import sys; from wgrad.train.commands.cli import main; sys.exit(main())"
    with open("/dev/full", "wb") as full:
        words = [sys.executable, "-c", code, *GENERATE, "--model", str(make_checkpoint()), "--prompt", "x"]
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True)
    lines = done.stderr.splitlines()
    assert done.returncode == 2 and lines[-1].startswith("wgrad: error: cannot write to standard output: ")
    assert [line.split(": ")[0] for line in lines[:-1]] == ["device", "compute"]


def test_what_is_beyond_the_models_positions_is_refused_at_once(
    capsys: pytest.CaptureFixture[str], in_folder: Path, make_checkpoint: Callable[..., Path], text_data: Path
) -> None:
    model = make_checkpoint()
    for prompt, tokens in (("x " * 50_000, "100,000"), ("x " * 128, "256")):
        assert cli.main(words("finetune", model, text_data, "--sample-prompt", prompt)) == 2
        said = f"--sample-prompt: {tokens} tokens must be fewer than the 256 positions"
        assert said in capsys.readouterr().err
    assert cli.main([*GENERATE, "--model", str(model), "--prompt", "x " * 50_000]) == 2
    assert "--max-new-tokens: 100,000 tokens of the prompt and 2 new ones must be" in capsys.readouterr().err
    assert cli.main([*GENERATE, "--model", str(model), "--prompt", "x", "--max-new-tokens", "1000000000"]) == 2
    assert "--max-new-tokens: 1 token of the prompt" in capsys.readouterr().err


def test_a_message_is_one_printable_line_of_bounded_length(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["finetune", "--lora-r", "\x1b[31m\n" * 9999]) == 2
    line = capsys.readouterr().err.removesuffix("\n")
    assert (
        line.isprintable() and len(line) < 1100 and "\\x1b[31m" in line and line.startswith("wgrad: error: --lora-r: ")
    )
