"""--train-embeddings and --train-head: runs, readers of the adapter, and options that exclude them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from wgrad.device.errors import WgradError
from wgrad.train.commands.cli import main
from wgrad.train.files.safetensors_files import read_entries
from wgrad.train.model.adapter_config import CONFIG_FILE
from wgrad.train.model.adapter_files import WEIGHTS_FILE, load_adapter
from wgrad.train.model.load_config import load_model_config
from wgrad.train.model.lora import linear_modules
from wgrad.train.model.weights import whole_modules

KEYS = {"base_model.model.model.embed_tokens.weight", "base_model.model.lm_head.weight"}


def options(model: Path, data: Path, out: Path, *more: str) -> list[str]:
    given = ["--model", str(model), "--data", str(data), "--out", str(out), "--device", "cpu", "--max-length", "48"]
    return ["finetune", *given, "--gradient-accumulation-steps", "2", "--train-embeddings", "--train-head", *more]


@pytest.fixture
def whole(make_checkpoint: Any, text_data: Path, tmp_path: Path, capsys: Any) -> Path:
    """A run of four steps."""
    more = (
        "--max-steps 4 --lr-scheduler-type constant --warmup-steps 0 --learning-rate 0.01 --sample-prompt the"
    ).split()
    more += ["--eval-data", str(text_data), "--save-steps", "2"]
    assert main(options(make_checkpoint(tie_word_embeddings=True), text_data, tmp_path / "whole", *more)) == 0
    capsys.readouterr()
    return tmp_path / "whole"


def test_what_reads_the_adapter_finds_what_the_run_measured(whole: Path, text_data: Path, capsys: Any) -> None:
    """The base beside it has the embedding and the head that it had."""
    results = json.loads((whole / "results.json").read_text())
    assert (
        main(
            [
                "eval",
                "--adapter",
                str(whole),
                "--data",
                str(text_data),
                "--max-length",
                "48",
                "--device",
                "cpu",
                "--json",
            ]
        )
        == 0
    )
    found = json.loads(capsys.readouterr().out)
    assert found["base"]["nats"] == pytest.approx(results["held_out_loss_before"], rel=1e-6)
    assert found["adapter"]["nats"] == pytest.approx(results["held_out_loss_after"], rel=1e-6)
    words = ["--adapter", str(whole), "--prompt", "the", "--max-new-tokens", "64", "--temperature", "0"]
    assert main(["generate", *words, "--device", "cpu"]) == 0
    assert capsys.readouterr().out.strip("\n") == ("the" + results["sample_after"]).strip("\n")
    assert results["sample_after"] != results["sample_before"]


def test_a_run_that_goes_on_ends_in_the_same_bits(whole: Path, text_data: Path, tmp_path: Path) -> None:
    wanted = (whole / WEIGHTS_FILE).read_bytes()
    assert set(read_entries(whole / WEIGHTS_FILE, "")) >= KEYS
    for name in (WEIGHTS_FILE, "results.json"):
        (whole / name).unlink()
    for name in (WEIGHTS_FILE, "trainer.json"):
        (whole / "checkpoints" / "step-4" / name).unlink()  # what is left is the one of step 2
    assert main(["finetune", "--out", str(whole), "--resume"]) == 0
    assert (whole / WEIGHTS_FILE).read_bytes() == wanted


def test_an_adapter_with_whole_modules_goes_on_being_trained(whole: Path, text_data: Path, tmp_path: Path) -> None:
    model = whole.parent / "model"
    words = ["--model", str(model), "--data", str(text_data), "--out", str(tmp_path / "more"), "--device", "cpu"]
    words += ["--max-length", "48", "--adapter", str(whole), "--max-steps", "1", "--gradient-accumulation-steps", "1"]
    words += ["--no-sample"]
    assert main(["finetune", *words]) == 0
    before, after = (read_entries(folder / WEIGHTS_FILE, "") for folder in (whole, tmp_path / "more"))
    assert set(before) == set(after)
    for key in KEYS:
        assert (np.array(before[key].array()) != np.array(after[key].array())).any()


def test_options_that_exclude_whole_modules_are_refused(
    whole: Path, text_data: Path, tmp_path: Path, capsys: Any
) -> None:
    model = whole.parent / "model"

    def refused(*words: str) -> str:
        assert main(list(words)) == 2
        return str(capsys.readouterr().err).strip().splitlines()[-1]

    begun = options(model, text_data, tmp_path / "out")
    assert "--train-head: the loss of --objective orpo has no gradient" in refused(*begun, "--objective", "orpo")
    assert "--train-embeddings: would be ignored: --adapter brings its own" in refused(*begun, "--adapter", str(whole))
    assert "--train-embeddings: would be ignored: --full" in refused(*begun, "--full")
    preferences = tmp_path / "pairs.jsonl"
    preferences.write_text(json.dumps({"prompt": "the", "chosen": " quick", "rejected": " lazy"}) + "\n")
    words = ["finetune", "--model", str(model), "--data", str(preferences), "--out", str(tmp_path / "out")]
    words += ["--adapter", str(whole), "--objective", "dpo", "--device", "cpu", "--eval-fraction", "0"]
    assert "--adapter: " in (said := refused(*words)) and "has lm_head whole, and the loss of --objective dpo" in said
    gguf = ["export", "--adapter", str(whole), "--gguf-lora", str(tmp_path / "a.gguf")]
    assert "modules_to_save has embed_tokens: whole modules" in (said := refused(*gguf)) and "wgrad merge" in said


def test_what_cannot_be_read_is_refused(whole: Path) -> None:
    config = load_model_config(whole.parent / "model")
    raw = json.loads((whole / CONFIG_FILE).read_text())
    for changes, message in (
        ({"modules_to_save": ["norm"]}, "has norm: of whole modules only model.embed_tokens and lm_head can be read"),
        ({"ensure_weight_tying": True}, "ensure_weight_tying is true: tied whole modules cannot be read"),
        ({"modules_to_save": ["lm_head"]}, "holds the whole model.embed_tokens.weight, which modules_to_save"),
    ):
        (whole / CONFIG_FILE).write_text(json.dumps(raw | changes))
        with pytest.raises(WgradError, match=message):
            load_adapter(whole, linear_modules(config), whole_modules(config))
