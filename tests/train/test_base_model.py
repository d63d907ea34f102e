"""The script that makes the embedded base model, on a few sentences."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from wgrad.device.contract import Device
from wgrad.train.data.tokenizer import load_tokenizer
from wgrad.train.inference.generation import generate_ids
from wgrad.train.model.load_config import load_model_config
from wgrad.train.model.model_files import ModelFiles
from wgrad.train.options.generate_config import GREEDY
from wgrad.train.step.build import build_frozen, count_parameters

SCRIPT = Path(__file__).parents[2] / "examples" / "make_base_model.py"


def test_it_trains_a_checkpoint_in_bfloat16(
    tmp_path: Path, cpu: Device, monkeypatch: pytest.MonkeyPatch, text_data: Any
) -> None:
    spec = importlib.util.spec_from_file_location("make_base_model", SCRIPT)
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    text = tmp_path / "text.txt"
    text.write_text(text_data.read_text() * 3)
    out = tmp_path / "base"
    options = f"{text} --out {out} --work {tmp_path / 'work'} --vocab-size 320 --steps 2 --batch-size 1 --max-length 32"
    monkeypatch.setattr(sys, "argv", ["make_base_model.py", *options.split(), "--device", "cpu"])
    assert script.main() == 0
    config, tokenizer = load_model_config(out), load_tokenizer(out)
    assert config.vocab_size == tokenizer.vocab_size <= 320 and config.tie_word_embeddings
    assert {e.dtype for e in ModelFiles(out).entries.values()} == {"BF16"}
    assert sum(e.nbytes for e in ModelFiles(out).entries.values()) == 2 * count_parameters(config)
    prompt = tokenizer.encode("the quick")
    assert prompt and tokenizer.decode(prompt) == "the quick"
    model = build_frozen(config, out, cpu, positions=32)
    assert len(list(generate_ids(model, prompt, 5, GREEDY))) == 5
