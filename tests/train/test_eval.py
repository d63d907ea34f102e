"""`wgrad eval`: to the last digit what a run reports as its held-out loss, and one line for what is wrong."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.train.conftest import scale_last_norm
from wgrad.train.commands.cli import main
from wgrad.train.step.trainer import Trainer

SHAPE = ["--max-length", "64", "--batch-size", "2", "--device", "cpu"]


def measure(capsys: Any, *words: object) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["eval", "--json", *SHAPE, *map(str, words)]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.fixture
def run(make_checkpoint: Any, text_data: Path, tmp_path: Path) -> tuple[Path, Path, dict[str, Any]]:
    """The model, the folder of a run on it that was measured on text_data, and its results."""
    model, out = make_checkpoint(), tmp_path / "out"
    words = ["--data", text_data, "--eval-data", text_data, "--eval-tokens", 300, "--gradient-accumulation-steps", 1]
    words += ["--max-steps", 4, "--model", model, "--out", out, "--learning-rate", 0.02, "--lora-r", 4]
    words += ["--lora-dropout", 0.1, "--no-sample"]
    assert main(["finetune", *SHAPE, *map(str, words)]) == 0
    return model, out, json.loads((out / "results.json").read_text())


def test_eval_reads_the_split_that_was_held_out(make_checkpoint: Any, tmp_path: Path, capsys: Any) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    for name, text in (("train", "some words"), ("test", "other words"), ("valid", "a bird")):
        (folder / f"{name}.jsonl").write_text(json.dumps({"text": text}) + "\n")
    model = make_checkpoint()
    whole, file = (measure(capsys, "--model", model, "--data", path) for path in (folder, folder / "valid.jsonl"))
    assert whole["base"] == file["base"] and whole["tokens"] == file["tokens"]


def test_the_numbers_of_a_run_to_the_last_digit(run: Any, text_data: Path, capsys: Any) -> None:
    model, out, results = run
    found = measure(capsys, "--adapter", out, "--data", text_data, "--eval-tokens", 300)  # the model: the adapter's own
    before, after = results["held_out_loss_before"], results["held_out_loss_after"]
    assert found["base"]["nats"] == before and found["adapter"]["nats"] == after and after < before
    assert found["adapter"]["perplexity"] == math.exp(after)
    alone = measure(capsys, "--model", model, "--data", text_data, "--eval-tokens", 300)
    assert alone == {key: value for key, value in found.items() if key != "adapter"}
    whole = measure(capsys, "--model", model, "--data", text_data)
    assert whole["examples"] == 32 > found["examples"] and whole["tokens"] > found["tokens"]


def test_rows_beyond_the_positions_are_told(make_checkpoint: Any, tmp_path: Path, capsys: Any) -> None:
    folder = make_checkpoint(max_position_embeddings=16)
    (tmp_path / "long.txt").write_text("a wise man will hear " * 40)
    words = ["--model", str(folder), "--data", str(tmp_path / "long.txt"), "--max-length", "32"]
    for command in (["eval", "--device", "cpu"], ["plan", "--device", "wgpu"]):
        assert main([command[0], *words, *command[1:]]) == 0
        assert "--max-length 32 is beyond the 16 positions that the model was made for" in capsys.readouterr().err
        assert main([command[0], *words[:-1], "16", *command[1:]]) == 0
        assert "is beyond" not in capsys.readouterr().err


def test_sequences_are_as_long_as_embeddings_of_positions(make_checkpoint: Any, tmp_path: Path, capsys: Any) -> None:
    model = make_checkpoint("GPT2LMHeadModel", n_positions=32, max_position_embeddings=32)
    data, choices = tmp_path / "long.txt", tmp_path / "choices.jsonl"
    data.write_text("a wise man will hear " * 40)
    choices.write_text(json.dumps({"question": "a wise man", "choices": [" will", " hear"], "answer": 0}) + "\n")
    for source in (["--data", str(data)], ["--choices", str(choices)]):
        found = measure(capsys, "--model", model, *source)  # with --max-length 64
        assert found == measure(capsys, "--model", model, *source, "--max-length", 32)


def test_the_batches_are_those_of_a_run(
    make_checkpoint: Any, text_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the data is shorter than a row too."""
    seen: list[list[np.ndarray]] = []

    def note(self: Trainer, batches: Any, progress: Any = None) -> tuple[float, dict]:
        seen.append([batch.ids for batch in batches])
        return 1.0, {}

    monkeypatch.setattr(Trainer, "measure", note)
    text_data.write_text("".join(text_data.read_text().splitlines(keepends=True)[:5]))
    words = ["--model", str(make_checkpoint()), "--device", "cpu", "--data", str(text_data)]
    run = ["--eval-data", str(text_data), "--out", str(tmp_path / "out"), "--gradient-accumulation-steps", "1"]
    run += ["--no-sample"]
    assert main(["finetune", *words, *run]) == 0 and main(["eval", *words]) == 0
    before, after, alone = seen
    assert len(before) == len(alone) and all(np.array_equal(a, b) for a, b in zip(before, alone))
    assert 1 < alone[0].shape[1] < 1024


def test_eval_prints_a_table(run: Any, text_data: Path, capsys: Any) -> None:
    _, out, _ = run
    found = measure(capsys, "--adapter", out, "--data", text_data)
    assert main(["eval", *SHAPE, "--adapter", str(out), "--data", str(text_data)]) == 0
    first, head, base, adapter = capsys.readouterr().out.splitlines()
    assert first == f"{text_data}: 32 examples, {found['tokens']} tokens that count"
    assert head.split() == ["nats", "a", "token", "perplexity"] and len({len(x) for x in (head, base, adapter)}) == 1
    for line, name in ((base, "base"), (adapter, "adapter")):
        assert line.split() == [name, f"{found[name]['nats']:.4f}", f"{found[name]['perplexity']:.4f}"]


def test_damaged_weights_are_no_number(make_checkpoint: Any, text_data: Path, capsys: Any) -> None:
    model = make_checkpoint()
    scale_last_norm(model, 1e38)
    with np.errstate(all="ignore"):
        assert main(["eval", "--json", *SHAPE, "--model", str(model), "--data", str(text_data)]) == 1
    said = capsys.readouterr()
    assert json.loads(said.out)["base"] == {"nats": None, "perplexity": None} and "loss is not finite" in said.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--data", "d"], "--model is required: give it, or an --adapter that names it"),
        (["--model", "m"], "--data is required: give it"),
        (["--model", "m", "--data", "d", "--no-quantize", "--block-size", "128"], "--block-size: would be ignored"),
        (["--model", "m", "--data", "d", "--lora-r", "3"], "unknown argument --lora-r"),
        (["--eval-batch-size", "3"], "unknown argument --eval-batch-size (did you mean --batch-size?)"),
        (["--adapter", "nowhere", "--data", "d", "--device", "cpu"], "--adapter: nowhere has no adapter_config.json"),
    ],
)
def test_wrong_options_are_refused(words: list[str], message: str, capsys: Any) -> None:
    assert main(["eval", *words]) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
