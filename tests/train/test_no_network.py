"""Nothing is fetched where files are local: whole runs with sockets refused, and a model of the hub from its cache."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

import pytest

import wgrad
from tests.train.conftest import MakeCheckpoint
from wgrad.device.errors import WgradError
from wgrad.train.commands.cli import main
from wgrad.train.files.hub import resolve_model

BASE = str(Path(__file__).parents[2] / "examples" / "base_model")
RECORDS = [{"text": "better late than never"}, {"text": "still waters run deep"}] * 8


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let all network access fail, and return a list of the attempts."""
    asked: list[str] = []

    def refuse(*args: Any, **options: Any) -> NoReturn:
        asked.append(repr(args[-2:]))
        raise ConnectionRefusedError("no network here")

    for name in ("connect", "connect_ex", "sendto"):
        monkeypatch.setattr(socket.socket, name, refuse)
    for name in ("getaddrinfo", "gethostbyname", "create_connection"):
        monkeypatch.setattr(socket, name, refuse)
    return asked


def run(model: str, out: Path) -> list[str]:
    """Train and use a model, and return the options by which a command takes both."""
    options: dict[str, Any] = {"device": "cpu", "max_length": 32, "lora_r": 2, "max_steps": 1}
    result = wgrad.finetune(model=model, data=RECORDS, out=out / "adapter", **options)
    with wgrad.load(model, result.out, device="cpu", context=64) as loaded:
        assert loaded.generate("better", max_new_tokens=2).tokens and loaded.score("still waters").loss > 0
    return ["--adapter", str(result.out), "--model", model]


def test_a_model_in_a_folder_needs_no_network(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, no_network: list[str]
) -> None:
    given = run(str(make_checkpoint()), tmp_path)
    assert main(["merge", *given, "--out", str(tmp_path / "merged"), "--device", "cpu", "--no-compare"]) == 0
    assert main(["export", *given, "--gguf-lora", str(tmp_path / "adapter.gguf")]) == 0
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    assert main(["eval", *given, "--data", str(tmp_path / "data.jsonl"), "--device", "cpu"]) == 0
    assert no_network == []


def test_a_hub_that_is_not_there_is_said_in_one_line(tmp_path: Path) -> None:
    """In a process that has imported no more of the hub's client than a command does."""
    pytest.importorskip("huggingface_hub")
    away = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    for words in (["generate", "--prompt", "x", "--model", "org/name"], ["data", "show", "org/name", "--model", BASE]):
        command = [sys.executable, "-m", "wgrad", *words]
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **away}, cwd=tmp_path)
        last = done.stderr.splitlines()[-1]
        assert done.returncode == 2 and last.startswith("wgrad: error: ") and "org/name" in last
        assert "cannot be reached" in last


@pytest.fixture
def cached(make_checkpoint: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The model org/name as the hub's client keeps it."""
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    folder = tmp_path / "hub" / "models--org--name"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("0" * 40)
    shutil.copytree(make_checkpoint(shards=2), folder / "snapshots" / ("0" * 40))
    return folder / "snapshots" / ("0" * 40)


def test_a_model_in_the_cache_needs_no_network(cached: Path, tmp_path: Path, no_network: list[str]) -> None:
    run("org/name", tmp_path)
    assert no_network == []


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "model-00002-of-00002.safetensors"])
def test_one_that_is_not_whole_is_fetched(
    cached: Path, missing: str, monkeypatch: pytest.MonkeyPatch, no_network: list[str]
) -> None:
    """Another tool left the folder, or a fetch was cut short."""
    (cached / missing).unlink()
    asked = []

    def download(hub_id: str, local_files_only: bool = False, **patterns: Any) -> str:
        asked.append(local_files_only)
        return str(cached)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    resolve_model("org/name")
    assert asked == [True, False]
    for index in ("[]", 100_000 * "[", '{"weight_map":'):
        asked.clear()
        (cached / "model.safetensors.index.json").write_text(index)
        resolve_model("org/name")
        assert asked == [True, False]


def test_one_that_is_not_there_is_asked_for(cached: Path, no_network: list[str]) -> None:
    """The sockets that this file refuses are those that the hub's client would take."""
    with pytest.raises(WgradError, match="from the Hugging Face Hub"):
        resolve_model("org/other")
    assert no_network
