"""`wgrad push` to a Hub on localhost, and the model card that a run writes."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Event
from typing import Any
from unittest.mock import Mock

import pytest
import yaml

from tests.train.conftest import random_weights, tiny_config, write_checkpoint
from tests.train.upload_hub import UploadHub
from wgrad.train.commands.cli import main
from wgrad.train.files import hub_answers, hub_upload
from wgrad.train.output.card_use import Contents
from wgrad.train.output.model_card import MARK, Card, is_own_card

constants = pytest.importorskip("huggingface_hub.constants")
utils = pytest.importorskip("huggingface_hub.utils")
REPO = "me/mine"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of two steps; its base model is a folder."""
    folder = tmp_path_factory.mktemp("push")
    config = tiny_config()
    write_checkpoint(folder / "secret place" / "base", config, random_weights(config))
    lines = [json.dumps({"text": f"better late than never {n}"}) for n in range(20)]
    (folder / "secret place" / "lines.jsonl").write_text("\n".join(lines))
    words = ["--model", f"{folder}/secret place/base", "--data", f"{folder}/secret place/lines.jsonl", "--out"]
    words += [f"{folder}/run", "--device", "cpu", "--max-steps", "2", "--max-length", "16", "--lora-r", "3"]
    assert main(["finetune", *words, "--batch-size", "1", "--gradient-accumulation-steps", "1", "--no-sample"]) == 0
    return folder / "run"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[UploadHub]:
    found = UploadHub("hf_write")
    monkeypatch.setattr(constants, "ENDPOINT", found.address)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", found.token)
    yield found
    found.close()


def push(run: Path, *words: str) -> int:
    return main(["push", "--adapter", str(run), REPO, *words])


@pytest.mark.parametrize("silent", ["POST .*/create", "GET ", "POST .*/preupload", "PUT ", "POST .*/commit"])
def test_a_hub_that_stops_answering_is_an_error_in_time(
    silent: str, run: Path, hub: UploadHub, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(hub_answers, "ANSWER_SECONDS", 0.3)
    monkeypatch.setattr(hub_upload, "ANSWER_SECONDS", None)
    monkeypatch.setattr(hub_upload, "_COMMIT_SECONDS", 0.3)
    hub.silence, hub.silent = Event(), silent
    begun = time.monotonic()
    assert push(run) == 2 and time.monotonic() - begun < 4
    error = f"wgrad: error: push: the upload to {REPO} failed (no answer in 0.3 s): check the network; the same"
    assert capsys.readouterr().err.splitlines()[-1].startswith(error)
    assert (hub.repos.get(REPO, (True, {}))[1] == {}) and "create" in silent or REPO in hub.repos


def test_an_error_does_not_follow_a_progress_bar_on_its_line(hub: UploadHub, capsys: Any) -> None:
    of_caller, bars = pytest.importorskip("tqdm").tqdm(total=5), []
    with pytest.raises(OSError, match="lost"), hub_answers.answers_in_time():
        bars.append(utils.tqdm(total=3, disable=False))
        raise OSError("lost")
    assert capsys.readouterr().err.endswith("\n")
    assert of_caller in of_caller._instances and bars[0] not in of_caller._instances
    of_caller.close()


def test_an_adapter_is_uploaded_to_a_private_repository(run: Path, hub: UploadHub, capsys: Any) -> None:
    assert push(run) == 0
    said = capsys.readouterr()
    assert f"uploaded: {hub.address}/{REPO}" in said.out and ", private" in said.out
    assert "give its id on the Hub as --base" in said.err
    private, files = hub.repos[REPO]
    names = {"README.md", "adapter_config.json", "adapter_model.safetensors", "loss.svg"}
    names |= {"tokenizer.json", "tokenizer_config.json"}
    assert private and names <= set(files) <= names | {"generation_config.json"}
    assert files["adapter_model.safetensors"] == (run / "adapter_model.safetensors").read_bytes()
    assert json.loads(files["adapter_config.json"])["base_model_name_or_path"] == "base"
    # No file tells where it was on this machine.
    assert not any(b"secret place" in content or str(run.parent).encode() in content for content in files.values())
    raw = json.loads((run / "adapter_config.json").read_text()) | {"alpha_pattern": {"v_proj": 2, "q_proj": 1}}
    (run / "adapter_config.json").write_text(json.dumps(raw))
    assert push(run, "--base", "org/base") == 0
    text = hub.repos[REPO][1]["README.md"].decode()
    assert yaml.safe_load(text.split("---")[1]) == {
        "library_name": "peft", "pipeline_tag": "text-generation", "base_model": "org/base",
        "base_model_relation": "adapter", "tags": ["wgrad", "lora"],
    }  # fmt: skip
    pushed = json.loads(hub.repos[REPO][1]["adapter_config.json"])
    assert pushed["base_model_name_or_path"] == "org/base" and list(pushed["alpha_pattern"]) == ["v_proj", "q_proj"]


def test_the_model_card_describes_the_run(run: Path) -> None:
    text = (run / "README.md").read_text()
    results = json.loads((run / "results.json").read_text())
    before, after = results["held_out_loss_before"], results["held_out_loss_after"]
    assert MARK in text and f"| held-out loss | {before:.4f} | {after:.4f} |" in text
    assert "A LoRA adapter for `base`, trained on `lines.jsonl`, with wgrad" in text and "secret place" not in text
    assert "| `lora_r` | 3 |" in text and "| `learning_rate` | 0.0002 |" in text and "`max_steps` | 2" in text
    assert 'PeftModel.from_pretrained(model, "OWNER/NAME")' in text and "![Loss by step](loss.svg)" in text
    assert "wgrad export ollama --adapter model --model BASE_MODEL" in text


def test_a_card_of_ones_own_is_kept(run: Path, hub: UploadHub) -> None:
    before = (run / "README.md").read_text()
    try:
        (run / "README.md").write_text("# Mine\n")
        assert push(run) == 0 and hub.repos[REPO][1]["README.md"] == b"# Mine\n"
    finally:
        (run / "README.md").write_text(before)


@pytest.mark.parametrize("kind", ["model", "gguf"])
def test_a_merged_model_is_uploaded_whole(kind: str, run: Path, hub: UploadHub, tmp_path: Path) -> None:
    words = ["--adapter", str(run), "--device", "cpu"]
    if kind == "gguf":
        pytest.importorskip("gguf")
        assert main(["export", "llama.cpp", *words, "--out", str(tmp_path / "m")]) == 0
    else:
        assert main(["merge", *words, "--no-compare", "--out", str(tmp_path / "m")]) == 0
    assert push(run, "--folder", str(tmp_path / "m"), "--base", "org/base") == 0
    files = hub.repos[REPO][1]
    weights = "model.gguf" if kind == "gguf" else "model.safetensors"
    assert files[weights] == (tmp_path / "m" / weights).read_bytes() and "adapter_model.safetensors" not in files
    card = files["README.md"].decode()
    meta = yaml.safe_load(card.split("---")[1])
    assert meta["base_model_relation"] == ("quantized" if kind == "gguf" else "finetune") and "loss.svg" in files
    assert ("llama-cli -m model/model.gguf" if kind == "gguf" else f"wgrad chat --model {REPO}") in card
    assert str(run.parent).encode() not in b"".join(c for name, c in files.items() if name != weights)


def test_an_upload_goes_on(run: Path, hub: UploadHub, tmp_path: Path, capsys: Any) -> None:
    """Two large files, of which one gets through; the next try sends the other alone."""
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(name.encode() * 100)
    words = ("--folder", str(tmp_path))
    hub.fail_after = 1
    assert push(run, *words) == 2
    assert "the same command goes on where this one ended" in capsys.readouterr().err
    assert len(hub.stored) == 1 and hub.repos[REPO][1] == {}
    hub.fail_after, hub.puts = None, 0
    assert push(run, *words) == 0
    assert hub.puts == 1 and {"a.gguf", "b.gguf"} <= set(hub.repos[REPO][1])


def test_it_is_private_unless_asked(run: Path, hub: UploadHub, capsys: Any) -> None:
    hub.repos[REPO] = (False, {})
    assert push(run) == 2
    assert "me/mine is there already and public: add --public" in capsys.readouterr().err
    assert hub.repos[REPO][1] == {} and not hub.stored
    del hub.repos[REPO]
    assert push(run, "--public") == 0 and hub.repos[REPO][0] is False


def test_mistakes_are_explained(run: Path, hub: UploadHub, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    def refused(message: str, *words: str) -> None:
        assert main(["push", *words]) == 2
        assert message in capsys.readouterr().err

    good = ("--adapter", str(run))
    refused("--repo: must be OWNER/NAME", *good, "mine")
    refused("--adapter is required", REPO)
    refused("nowhere has no adapter, no model and no GGUF file", "--adapter", "nowhere", REPO)
    refused(f"--folder: {tmp_path} has no adapter", *good, "--folder", str(tmp_path), REPO)
    monkeypatch.setenv("HF_TOKEN", "hf_read")
    refused("the Hub refuses to write to me/mine", *good, REPO)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    refused("check the network; the same command goes on", *good, REPO)


def test_nothing_is_sent_by_another_command(run: Path, hub: UploadHub) -> None:
    assert main(["eval", "--adapter", str(run), "--data", f"{run.parent}/secret place/lines.jsonl", "--device", "cpu",
                 "--eval-tokens", "16"]) == 0  # fmt: skip
    assert hub.writes == [] and hub.puts == 0


@pytest.mark.parametrize(
    ("source", "name", "on_hub"),
    [
        ("org/set:train", "org/set:train", True),
        ("-", "standard input", False),
        ("/a/b/c.jsonl", "c.jsonl", False),
        ("x/y.jsonl", "y.jsonl", False),
        ("<data>", "data", False),
    ],
)
def test_the_names_of_data(source: str, name: str, on_hub: bool) -> None:
    text = Card("adapter", "org/base", True, {"data": [source]}, {}).text()
    assert f"trained on `{name}`" in text and ("datasets:\n- org/set" in text) == on_hub


@pytest.mark.parametrize(
    ("file", "raw", "lines", "never"),
    [
        ("adapter_config.json", {"target_modules": ["model.layers.0.self_attn.q_proj"]},
         ["A LoRA adapter", "import AutoModelForCausalLM", "With PEFT:"], "ImageText"),
        ("adapter_config.json", {"target_modules": ["model.language_model.layers.0.self_attn.q_proj"]},
         ["import AutoModelForImageTextToText", "pipeline_tag: image-text-to-text"], "CausalLM"),
        ("adapter_config.json", {"target_modules": "all-linear", "use_dora": True}, ["A DoRA adapter for"], "LoRA"),
        ("adapter_config.json", {"target_parameters": ["mlp.experts.down_proj"]}, ["With PEFT (0.17 or newer"], "DoRA"),
        ("adapter_config.json", {"peft_type": "WGRAD:gated"},
         ['wgrad.register_lora_variant("gated", ...)', 'wgrad.load("org/base", adapter="model")'], "PeftModel"),
        ("config.json", {"architectures": ["SmolVLMForConditionalGeneration"]},
         ["import AutoModelForImageTextToText"], "AutoModelForCausalLM"),
        ("adapter_config.json", {"auto_mapping": {"base_model_class": "VoxtralForConditionalGeneration"}},
         ["import AutoModelForMultimodalLM", "pipeline_tag: audio-text-to-text"], "CausalLM"),
        ("config.json", {"architectures": ["LlamaForCausalLM"]}, ["import AutoModelForCausalLM"], "ImageText"),
    ],
)  # fmt: skip
def test_a_card_says_how_its_files_are_loaded(
    file: str, raw: dict[str, Any], lines: list[str], never: str, tmp_path: Path
) -> None:
    (tmp_path / file).write_text(json.dumps(raw))
    kind = "adapter" if file == "adapter_config.json" else "model"
    text = Card(kind, "org/base", True, {}, {}, "me/mine", contents=Contents.of(tmp_path)).text()
    assert all(line in text for line in lines) and never not in text


def test_a_card_that_cannot_be_read_is_left_to_its_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    card = tmp_path / "README.md"
    assert is_own_card(card)
    card.write_text(f"# A model\n{MARK}\n")
    assert is_own_card(card)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", Mock(side_effect=OSError(5, "Input/output error")))
        assert not is_own_card(card)
    card.write_text("# My own\n")
    assert not is_own_card(card)
    monkeypatch.setattr(Path, "open", lambda *_: pytest.fail("what is no file may never end"))
    assert not is_own_card(tmp_path)
