"""Several weighted sources of training data: how they are given, their share of an epoch, and from which step on."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.train.ranks_runs import words
from wgrad.device.errors import WgradError
from wgrad.train.commands.cli import main
from wgrad.train.data.mix import Mix
from wgrad.train.data.packing import BatchStream, Document
from wgrad.train.options.choice_options import ChoiceOptions
from wgrad.train.options.data_sources import Source, sources_of
from wgrad.train.options.eval_options import eval_options
from wgrad.train.options.finetune_config import RunOptions


# ---- how they are given ------------------------------------------------------------------------
def test_a_value_is_a_file_or_a_file_and_its_weight(tmp_path: Path) -> None:
    odd = tmp_path / "run=3"
    odd.write_text("x")
    assert sources_of(["a.jsonl=3", "b=c=0.5", ".=.25"]) == [
        Source("a.jsonl", 3),
        Source("b=c", 0.5),
        Source(".", 0.25),
    ]
    assert sources_of([str(odd), "-"]) == [Source(str(odd)), Source("-")]
    assert sources_of([f"{odd}=2", "b=1"])[0] == Source(str(odd), 2)
    for plain in ("a=", "=3", "a=x", "a=-1", "a=1e3", "a=" + "9" * 12):
        assert sources_of([plain]) == [Source(plain)]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (["a=1", "b"], "--data: b has no weight, and others have: give each one"),
        (["a=0", "b=1"], "--data: a weight must be above 0; got a=0"),
        (["a=2"], "--data: a=2 is the only source: its weight would be ignored"),
        (["-=1", "-=2"], "--data: standard input can be read once"),
    ],
)
def test_wrong_lists_of_sources_are_refused(values: list[str], message: str) -> None:
    with pytest.raises(WgradError, match=message):
        sources_of(values)


def test_eval_has_no_weights(tmp_path: Path) -> None:
    with pytest.raises(WgradError, match="--data: a weight has no effect here"):
        eval_options({"model": "m", "data": ["a=2", "b=1"]}, ChoiceOptions())


# ---- an epoch ----------------------------------------------------------------------------------
def test_shares_are_the_weights() -> None:
    assert Mix((100, 900), (3, 1)).shares() == [750, 250]
    assert Mix((7, 5, 3), (1, 1, 0.5)).shares() == [6, 6, 3]
    assert Mix((10, 10), (1, 1e-9)).shares() == [20, 1]  # none is forgotten


@pytest.mark.parametrize("counts", [(4, 9), (1, 1), (13, 2, 5)])
def test_each_example_comes_once_before_any_comes_again(counts: tuple[int, ...]) -> None:
    mix = Mix(counts, tuple(range(1, len(counts) + 1)))
    epochs = [mix.epoch(5, epoch) for epoch in range(9)]
    first = 0
    for count, share in zip(counts, mix.shares()):
        seen: Counter[int] = Counter()
        for epoch in epochs:
            ours = [int(n) for n in epoch if first <= n < first + count]
            assert len(ours) == share
            seen.update(ours)
            assert len(seen) == count or max(seen.values()) == 1
            assert max(seen.values()) - min(seen[n] for n in range(first, first + count)) <= 1
        first += count
    assert all(np.array_equal(mix.epoch(5, n), epochs[n]) for n in (7, 2))
    if max(counts) > 1:
        assert any(not np.array_equal(mix.epoch(6, n), epochs[n]) for n in range(9))


def stream_of(**options: Any) -> BatchStream:
    """Two sources: 5 long documents and 12 short ones, whose ids are their numbers."""
    documents = [Document(np.full(n, i, np.int32), np.ones(n, bool)) for i, n in enumerate([17] * 5 + [3] * 12)]
    config = RunOptions(**({"max_length": 20, "batch_size": 2, "gradient_accumulation_steps": 2, "seed": 1} | options))
    return BatchStream(documents, config, mix=Mix((5, 12), (1, 2)))


def ids_of(stream: BatchStream, index: int) -> list[Any]:
    return [batch.ids.tolist() for batch in stream.get(index).batches]


def test_any_step_is_reached_without_those_before_it() -> None:
    whole = stream_of(epochs=4)
    steps = [[batch.ids.tolist() for batch in step.batches] for step in whole]
    assert len(steps) == whole.total_steps == stream_of(max_steps=len(steps)).total_steps
    epochs = [whole.get(i).epoch for i in range(len(steps))]
    assert epochs == sorted(epochs) and set(epochs) == {0, 1, 2, 3} and all(steps)
    for index in (len(steps) - 1, 0, len(steps) // 2):
        assert ids_of(stream_of(max_steps=9), index) == steps[index]
    for epoch in range(4):  # every example that the mix names, and no other
        ids = np.concatenate([np.array(s).ravel() for s, e in zip(steps, epochs) if e == epoch])
        counted = Counter({i: int((ids == i).sum()) // (17 if i < 5 else 3) for i in range(1, 17)})
        assert +counted == Counter(int(n) for n in whole.mix.epoch(1, epoch) if n)  # type: ignore[union-attr]


def test_weights_are_part_of_what_a_checkpoint_must_agree_with() -> None:
    stream = stream_of()
    other = BatchStream(stream.documents, stream.config, mix=Mix((5, 12), (1, 3)))
    plain = BatchStream(stream.documents, stream.config)
    assert len({s.fingerprint() for s in (stream, other, plain)}) == 3
    with pytest.raises(WgradError, match="weights of --data"):
        other.restore(1, stream.fingerprint())
    with pytest.raises(WgradError, match="--epochs: must be at most 100 where sources have weights; got 101"):
        stream_of(epochs=101)


# ---- a run -------------------------------------------------------------------------------------
def test_a_run_of_weighted_sources_resumes_to_the_same_bits(
    make_checkpoint: Any, text_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "num_hidden_layers": 1}
    model = make_checkpoint(hidden_size=16, intermediate_size=24, **sizes)
    other = tmp_path / "other.jsonl"
    other.write_text("".join(json.dumps({"text": f"still waters run deep {i}"}) + "\n" for i in range(6)))
    sources = [f"{text_data}=1", f"{other}=3"]
    values = {"--model": model, "--data": sources, "--out": tmp_path / "whole", "--device": "cpu", "--max-length": 24}
    values |= {
        "--lora-r": 2,
        "--gradient-accumulation-steps": 2,
        "--lr-scheduler-type": "constant",
        "--warmup-steps": 0,
        "--no-sample": True,
    }
    values |= {"--max-steps": 24, "--learning-rate": 1e-2, "--eval-fraction": 0.1}
    assert main(["finetune", *words(values)]) == 0
    said = capsys.readouterr().out
    assert f"sources: {text_data} 23.5 % of the examples" in said and "weight 3: each 5.2 times an epoch" in said, said
    parts = values | {"--out": tmp_path / "parts"}
    assert main(["finetune", *words(parts | {"--max-steps": 17})]) == 0
    assert main(["finetune", *words(parts), "--resume"]) == 0
    adapters = [(tmp_path / name / "adapter_model.safetensors").read_bytes() for name in ("whole", "parts")]
    assert adapters[0] == adapters[1]
    capsys.readouterr()
    assert main(["data", "show", *sources, "--model", str(model), "--max-length", "24", "--eval-fraction", "0.1"]) == 0
    shown = capsys.readouterr().out
    (line,) = [text for text in said.splitlines() if "sources: " in text]
    assert line in shown and "the first epoch has" in shown
    assert main(["finetune", *words(values | {"--data": [f"{text_data}=1", str(other)]}), "--resume"]) == 2
