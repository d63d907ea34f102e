"""`wgrad data show`: what is marked as learned is what the loss counts; escape sequences do not come through."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from wgrad.train.commands.cli import main
from wgrad.train.commands.data_show import LEARNED, example_text
from wgrad.train.data.data import load_data
from wgrad.train.data.packing import BatchStream, Document
from wgrad.train.data.tokenizer import load_tokenizer
from wgrad.train.options.finetune_config import RunOptions


def show(folder: Path, data: str, *words: str) -> int:
    return main(["data", "show", data, "--model", str(folder), "--eval-fraction", "0", *words])


@pytest.fixture
def folder(make_checkpoint: Any) -> Path:
    return make_checkpoint()


def test_what_is_learned_is_marked(folder: Path, write_lines: Any, capsys: Any) -> None:
    data = write_lines({"prompt": "the cat", "completion": " sat\u001b[31m"}, "no object", {"text": "a dog"})
    assert show(folder, data, "--max-length", "32", "--batch-size", "2", "--gradient-accumulation-steps", "2") == 0
    out = capsys.readouterr().out
    tokenizer = load_tokenizer(folder)
    config = RunOptions(data=(data,), max_length=32, eval_fraction=0.0)
    stream = BatchStream(load_data(config, tokenizer).train, config)
    targets, rows = sum(batch.num_targets for batch in stream.get(0).batches), len(stream.get(0).batches)
    assert f"trained on: {targets} of " in out
    assert f"sequences of 32 tokens: {rows}, " in out and "an epoch has 1 step of 4 sequences" in out
    assert "note: the run has only 1 step, which is little to learn from: --epochs 50 makes it 50 or more" in out
    assert "the cat« sat\\x1b[31m" in out and "\x1b" not in out
    assert "1 bad line skipped" in out and "skipped" in out.split("1 bad line skipped")[1]
    assert show(folder, data, "--examples", "0") == 0
    assert "the cat" not in capsys.readouterr().out


def test_sequences_are_as_long_as_embeddings_of_positions(make_checkpoint: Any, write_lines: Any, capsys: Any) -> None:
    folder = make_checkpoint("GPT2LMHeadModel", n_positions=32, max_position_embeddings=32)
    data = write_lines({"text": "the cat sat on the mat " * 4})
    assert show(folder, data, "--max-length", "64") == 0
    said = capsys.readouterr()
    assert "sequences of 32 tokens" in said.out
    assert "note: sequences have at most 32 tokens, not --max-length 64" in said.err
    (folder / "config.json").write_text('{"architectures": ["UnknownForCausalLM"]}')  # the tokenizer is enough
    assert show(folder, data, "--max-length", "64") == 0
    assert "sequences of 64 tokens" in capsys.readouterr().out


def test_learned_text_is_colored_and_long_examples_are_cut(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    ids = np.array(tokenizer.encode("cats and dogs", add_special_tokens=False), np.int32)
    learned = np.arange(len(ids)) >= 4
    text = example_text(Document(ids, learned), tokenizer, colors=True)
    assert text.plain == "cats and dogs"
    (span,) = [span for span in text.spans if span.style == LEARNED]
    assert text.plain[span.start : span.end] == tokenizer.decode(ids[4:].tolist())
    long = np.resize(ids, 1000)
    text = example_text(Document(long, np.ones(1000, bool)), tokenizer, colors=False)
    assert " ... 600 tokens ... " in text.plain
    first = tokenizer.decode(long[:1].tolist())
    assert text.plain.startswith(f"{first}«") and text.plain.endswith("»") and text.plain.count("«") == 2
    assert len(text.plain) < 12 * 400


def test_without_packing_sequences_are_counted_by_example(folder: Path, write_lines: Any, capsys: Any) -> None:
    data = write_lines({"text": "x"}, {"text": "the cat sat"}, {"prompt": "the cat sat on the mat", "completion": "."})
    assert show(folder, data, "--no-packing", "--max-length", "8") == 0
    out = capsys.readouterr().out
    assert "sequences of 8 tokens (--no-packing: an example each): 2, " in out
    assert "1 left out" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--examples", "-1"], "--examples: expected a whole number, 0 or more, got '-1'"),
        (["--data", "x"], "--data: the file is named without it"),
        (["--model", ""], "--model is required"),
    ],
)
def test_wrong_options_are_refused(words: list[str], message: str, folder: Path, text_data: Path, capsys: Any) -> None:
    assert show(folder, str(text_data), *words) == 2
    assert message in capsys.readouterr().err
