"""`wgrad export ollama|lmstudio|llama.cpp`: files, commands that are printed or run, and an answer of llama.cpp."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.train.chat_model import TEMPLATE, make_adapter, make_model
from wgrad.train.commands.cli import build_parser, main
from wgrad.train.commands.export_model import _plain_name
from wgrad.train.data.ollama_template import render_go
from wgrad.train.data.tokenizer import load_tokenizer
from wgrad.train.options.finetune_config import RunOptions
from wgrad.train.run.result import next_commands

pytest.importorskip("gguf")
SAMPLING = {"temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.1, "eos_token_id": 0}


@pytest.fixture
def adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An adapter with a template, on a model that only ends turns; no Ollama and no LM Studio are here."""
    folder = make_model(tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps(SAMPLING))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return make_adapter(tmp_path / "my chat", folder, template=TEMPLATE)


def export(tool: str, adapter: Path, *words: str) -> int:
    return main(["export", tool, "--adapter", str(adapter), "--device", "cpu", *words])


def program(folder: Path, text: str) -> Path:
    """A program named ollama."""
    folder.mkdir()
    path = folder / "ollama"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_an_export_for_ollama_renders_and_ends_as_the_tokenizer_does(adapter: Path, capsys: Any) -> None:
    (adapter / "config.yaml").write_text("max_length: 6000\n")
    assert export("ollama", adapter, "--name", "me/mine:8b") == 0
    said = capsys.readouterr()
    text = (adapter / "ollama" / "Modelfile").read_text()
    found = re.fullmatch(r'FROM \./model\.gguf\nTEMPLATE """(.*)"""\n(.*)', text, re.DOTALL)
    assert found
    messages = [{"role": "user", "content": "the fox"}]
    assert render_go(found[1], messages) == load_tokenizer(adapter / "ollama").chat_template.render(messages, True)
    assert found[2].splitlines() == [
        'PARAMETER stop "<|end|>"', 'PARAMETER stop "<turn/>"', "PARAMETER temperature 0.6", "PARAMETER top_p 0.9",
        "PARAMETER repeat_penalty 1.1", "PARAMETER num_ctx 256",
    ]  # fmt: skip
    create = ["ollama", "create", "me/mine:8b", "-f", f"{adapter}/ollama/Modelfile"]
    assert said.out.splitlines()[-1] == f"next: {shlex.join(create)} && ollama run me/mine:8b"
    assert export("ollama", adapter) == 2  # nothing is overwritten
    assert "is there already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("folder", "name"),
    [("my chät", "my-chat"), ("Größe №2!", "Groe-No2"), ("聊天", "model"), ("聊天-v2", "v2"), (".hidden_", "hidden")],
)
def test_a_name_has_letters_that_ollama_takes(folder: str, name: str) -> None:
    assert _plain_name(folder) == name


def test_an_export_without_the_gguf_package_says_how_to_get_it(
    adapter: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert export("ollama", adapter) == 2
    error = "export ollama: model.gguf is a GGUF file, which takes a package: pip install 'wgrad[gguf]'"
    assert capsys.readouterr().err == f"wgrad: error: {error}\n"


@pytest.mark.skipif(os.name == "nt", reason="a shell script")
def test_ollama_is_run_where_it_is_installed(adapter: Path, tmp_path: Path, capsys: Any) -> None:
    ollama = program(tmp_path / "bin", f'echo "$@" > {tmp_path}/asked')
    assert export("ollama", adapter, "--no-create", "--out", str(tmp_path / "a")) == 0
    assert not (tmp_path / "asked").exists()
    assert export("ollama", adapter, "--out", str(tmp_path / "b")) == 0
    assert (tmp_path / "asked").read_text() == f"create my-chat -f {tmp_path}/b/Modelfile\n"
    assert "created my-chat in Ollama; run it: ollama run my-chat" in capsys.readouterr().out
    ollama.write_text("#!/bin/sh\necho could not connect >&2\nexit 1\n")
    assert export("ollama", adapter, "--out", str(tmp_path / "c")) == 2
    assert "c is written, but `ollama create` failed (could not connect)" in capsys.readouterr().err
    assert (tmp_path / "c" / "model.gguf").exists()


def test_a_template_of_ones_own_replaces_the_derived_one(adapter: Path, tmp_path: Path, capsys: Any) -> None:
    (adapter / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content|upper }}{% endfor %}")
    assert export("ollama", adapter) == 2
    assert "has no equal in Ollama's TEMPLATE" in capsys.readouterr().err and not (adapter / "ollama").exists()
    (tmp_path / "own").write_text("{{ .Prompt }}<turn/>\n")
    assert export("ollama", adapter, "--template", str(tmp_path / "own")) == 0
    assert 'TEMPLATE """{{ .Prompt }}<turn/>"""' in (adapter / "ollama" / "Modelfile").read_text()
    (tmp_path / "own").write_text('"""')
    assert export("ollama", adapter, "--template", str(tmp_path / "own")) == 2
    assert "ends a TEMPLATE" in capsys.readouterr().err


def test_an_export_for_lm_studio_lies_where_it_looks(adapter: Path, tmp_path: Path, capsys: Any) -> None:
    assert export("lmstudio", adapter, "--quantize", "none") == 0
    assert (adapter / "lmstudio/wgrad/my-chat/my-chat.gguf").exists()
    said = capsys.readouterr().out
    assert f"copy {adapter}/lmstudio/wgrad into its models folder" in said
    assert f"renamed it to {adapter}/lmstudio/wgrad/my-chat/my-chat.gguf" in said
    models = tmp_path / "home/.lmstudio/models"
    models.mkdir(parents=True)
    assert export("lmstudio", adapter, "--name", "me/mine") == 0
    assert (models / "me/mine/mine-Q8_0.gguf").exists() and not (models / "me/mine/model.gguf").exists()
    assert f"LM Studio shows it as me/mine, in {models}" in capsys.readouterr().out


@pytest.mark.oracle
def test_llama_cpp_stops_by_itself(adapter: Path, tmp_path: Path, capsys: Any) -> None:
    """In llama.cpp (xllamacpp), asked in the words of TEMPLATE and by its own reading of the chat template."""
    llama_cpp = pytest.importorskip("xllamacpp")
    assert export("llama.cpp", adapter) == 0
    file = adapter / "llama.cpp" / "model.gguf"
    command = ["llama-cli", "-m", str(file), "--temp", "0.6", "--top-p", "0.9", "--repeat-penalty", "1.1"]
    assert capsys.readouterr().out.splitlines()[-1] == f"run it: {shlex.join(command)}"
    params = llama_cpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel, params.warmup = str(file), 64, 1, False
    params.verbosity, params.cpuparams.n_threads = -1, 1
    server = llama_cpp.Server(params)
    asked: dict[str, Any] = {"prompt": "user: the fox<turn/>\nassistant: ", "n_predict": 5, "temperature": 0}
    assert server.handle_completions(asked)["choices"][0]["finish_reason"] == "stop"
    chat = {"messages": [{"role": "user", "content": "the fox"}], "max_tokens": 5, "temperature": 0}
    answer = server.handle_chat_completions(chat)
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["prompt_tokens"] == len(load_tokenizer(adapter.parent / "model").encode(asked["prompt"]))


@pytest.mark.parametrize(
    ("full", "chats", "lines"),
    [
        (False, True, ["next: wgrad chat --adapter 'my out'", "      wgrad export ollama --adapter 'my out'"]),
        (False, False, ["next: wgrad generate --adapter 'my out' --prompt 'Once upon a time'"]),
        (True, True, ["next: wgrad chat --model 'my out'"]),
    ],
)
def test_a_run_ends_with_the_next_commands(
    full: bool, chats: bool, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    found = next_commands(RunOptions(out="my out", full=full), chats)
    assert found[: len(lines)] == lines and len(found) == (1 if full else 2)
    assert next_commands(RunOptions(out="my out", full=full), chats, in_gguf=False) == found[:1]
    for line in found:  # both are understood
        build_parser().parse_args(shlex.split(line.strip().removeprefix("next: "))[1:])


@pytest.mark.parametrize(
    ("started", "shown"),
    [(".venv/bin/wgrad", ".venv/bin/wgrad"), ("train.py", shlex.join([sys.executable, "-m", "wgrad"]))],
)
def test_the_next_commands_run_where_wgrad_is_not_on_the_path(
    started: str, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`make finetune` runs the wgrad of an environment that is not activated."""
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(sys, "argv", [started])
    assert next_commands(RunOptions(out="out"), True)[0] == f"next: {shown} chat --adapter out"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("ollama --adapter a --quantize q4_k_l", "--quantize: must be one of none, q8_0, q6_k, q5_k_m, q5_0, q4_k_m, "),
        ("ollama --adapter a --gguf-lora x.gguf", "--gguf-lora: writes the adapter alone, and export ollama the model"),
        ("lmstudio --adapter a --template x", "--template: is for export ollama, not lmstudio: leave it out"),
        ("llama.cpp --adapter a --no-create", "--create: is for export ollama, not llama.cpp"),
        ("--adapter a --quantize q8_0", "--quantize: is for wgrad export ollama|lmstudio|llama.cpp: name one"),
        ("--adapter a", "--gguf-lora is required: give it"),
        ("ollama", "--adapter is required"),
        ("olama --adapter a", "argument TOOL: invalid choice: 'olama'"),
        ("ollama --adapter a --name a/b/c", "--name: must be NAME or OWNER/NAME"),
        ("ollama --adapter nowhere", "--adapter: nowhere has no adapter_config.json"),
    ],
)  # fmt: skip
def test_mistakes_are_refused(words: str, message: str, capsys: Any) -> None:
    assert main(["export", *words.split()]) == 2
    assert message in capsys.readouterr().err
