"""Held-out loss and sample before and after a run: a part that is drawn once, bars, and ways to leave them out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.train.conftest import scale_last_norm
from wgrad.device.errors import WgradError
from wgrad.train.commands.cli import main
from wgrad.train.data.packing import Document
from wgrad.train.data.tokenizer import load_tokenizer
from wgrad.train.options.finetune_config import RunOptions
from wgrad.train.plan import lengths
from wgrad.train.plan.lengths import SAMPLE_TOKENS
from wgrad.train.run import evaluation
from wgrad.train.run.evaluation import eval_subset
from wgrad.train.terminal.progress import Phase

pytestmark = pytest.mark.usefixtures("short_samples")


def documents(lengths: list[int]) -> list[Document]:
    return [Document(np.full(n, i, np.int32), np.ones(n, bool)) for i, n in enumerate(lengths)]


def numbers(chosen: list[Document]) -> list[int]:
    return [int(document.ids[0]) for document in chosen]


LENGTHS = [3 + (7 * i) % 19 for i in range(400)]  # 12 tokens on average


def test_all_is_measured_where_it_is_little_or_asked_for() -> None:
    whole = documents(LENGTHS)
    for limit in (0, sum(LENGTHS), sum(LENGTHS) + 1):
        assert numbers(eval_subset(whole, RunOptions(eval_tokens=limit))) == list(range(400))


@pytest.mark.parametrize("limit", [1, 100, 1000, sum(LENGTHS) - 1])
def test_the_subset_has_about_the_tokens_asked_for(limit: int) -> None:
    chosen = eval_subset(documents(LENGTHS), RunOptions(eval_tokens=limit))
    assert limit <= sum(map(len, chosen)) < limit + max(LENGTHS)
    assert numbers(chosen) == sorted(set(numbers(chosen)))  # in the file's order, none twice


def test_the_part_is_drawn_by_the_seed_alone_and_from_everywhere() -> None:
    config = RunOptions(eval_tokens=1000, seed=3)
    first = numbers(eval_subset(documents(LENGTHS), config))
    assert first == numbers(eval_subset(documents(LENGTHS), config))
    assert first != numbers(eval_subset(documents(LENGTHS), RunOptions(eval_tokens=1000, seed=4)))
    assert min(first) < 60 and max(first) > 340 and 60 < len(first) < 110
    # Length has no say: a part that favored short documents would have another mean.
    assert np.mean([LENGTHS[i] for i in first]) == pytest.approx(np.mean(LENGTHS), rel=0.15)


def finetune(out: Path, model: Path, data: Path, *more: object) -> int:
    options = ["--max-length", 64, "--batch-size", 2, "--gradient-accumulation-steps", 1, "--max-steps", 2]
    options += ["--eval-fraction", 0.5]
    given = ["finetune", "--model", model, "--data", data, "--out", out, "--device", "cpu", *options, *more]
    return main([str(item) for item in given])


@pytest.fixture
def phases(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[tuple[int, int | None]]]:
    """Record the updates of each phase by its name."""
    told: dict[str, list[tuple[int, int | None]]] = {}
    make, update = Phase.__init__, Phase.update

    def begin(self: Phase, display: Any, name: str, *args: Any, **options: Any) -> None:
        told.setdefault(name, [])
        make(self, display, name, *args, **options)

    def note(self: Phase, done: int, total: int | None = None) -> None:
        update(self, done, total)
        told[self.name].append((self.done, self.total))

    monkeypatch.setattr(Phase, "__init__", begin)
    monkeypatch.setattr(Phase, "update", note)
    return told


def test_the_cap_is_said_and_before_and_after_are_the_same_part(
    make_checkpoint: Any, text_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], phases: Any
) -> None:
    model = make_checkpoint()
    assert finetune(tmp_path / "some", model, text_data, "--eval-tokens", 60, "--learning-rate", 1e-30) == 0
    said = ("held-out loss before", "held-out loss after")
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith(said)]
    assert len(lines) == 2 and all("of 16 held-out examples: --eval-tokens 60)" in line for line in lines)
    results = json.loads((tmp_path / "some" / "results.json").read_text())
    assert results["held_out_loss_before"] == pytest.approx(results["held_out_loss_after"], rel=1e-6)
    assert finetune(tmp_path / "all", model, text_data, "--eval-tokens", 0, "--learning-rate", 1e-30) == 0
    assert "--eval-tokens" not in capsys.readouterr().out.partition("held-out loss")[2]
    whole = json.loads((tmp_path / "all" / "results.json").read_text())
    assert whole["held_out_loss_before"] != results["held_out_loss_before"]


def test_every_phase_of_a_run_has_its_bar(
    make_checkpoint: Any, text_data: Path, tmp_path: Path, phases: dict[str, list[tuple[int, int | None]]]
) -> None:
    assert finetune(tmp_path / "out", make_checkpoint(), text_data, "--save-steps", 1) == 0
    assert set(phases) >= {
        "compiling",
        "loading and quantizing weights",
        "held-out loss",
        "sample",
        "training",
        "saving a checkpoint",
        "saving the result",
    }
    for name in ("loading and quantizing weights", "sample", "training"):
        done = [d for d, _ in phases[name]]
        assert done and phases[name][-1][1] is not None
        if name != "sample":  # which may end before its last token
            assert done == sorted(done) and phases[name][-1][0] == phases[name][-1][1]
    assert len(phases["held-out loss"]) >= 2


def test_samples_show_the_control_tokens_that_a_model_writes(
    make_checkpoint: Any, text_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the prompt and in the text, in the sample line and in what the page reads."""
    monkeypatch.setattr(evaluation, "generate_ids", lambda *given: iter([7, *given[-1], 8]))  # the last: what stops it
    given = ("--max-steps", 1, "--sample-prompt", "the<|end|> fox", "--eval-fraction", 0)
    assert finetune(tmp_path / "out", make_checkpoint(), text_data, *given) == 0
    samples = [json.loads(line) for line in (tmp_path / "out" / "samples.jsonl").read_text().splitlines()]
    samples = [sample for sample in samples if "text" in sample]
    assert samples and all("<|end|>" in sample[key] for sample in samples for key in ("prompt", "text"))


def test_a_sample_of_a_long_prompt_ends_at_the_last_position(
    make_checkpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model with embeddings of positions continues the end of the prompt."""
    monkeypatch.setattr(lengths, "SAMPLE_TOKENS", SAMPLE_TOKENS)
    prompts, tokens = list[list[int]](), 91

    def noted(model: object, prompt: list[int], *_: object) -> Iterator[int]:
        prompts.append(prompt)
        return iter([8])

    monkeypatch.setattr(evaluation, "generate_ids", noted)
    data, text = tmp_path / "long.jsonl", "the quick brown fox " * 3 + "end"
    data.write_text(json.dumps({"prompt": text, "completion": "a"}) + "\n")
    model = make_checkpoint("GPT2LMHeadModel", n_positions=tokens, max_position_embeddings=tokens)
    assert finetune(tmp_path / "out", model, data, "--max-steps", 1, "--eval-fraction", 0) == 0
    ids = load_tokenizer(model).encode(text)
    assert len(ids) > tokens - SAMPLE_TOKENS and prompts[0] == ids[SAMPLE_TOKENS - tokens :]


def test_a_model_of_few_positions(
    make_checkpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows, prompts and samples are shortened, those of a dry run too. Without samples, none counts."""
    monkeypatch.setattr(lengths, "SAMPLE_TOKENS", SAMPLE_TOKENS)
    positions = 40
    model = make_checkpoint("GPT2LMHeadModel", n_positions=positions, max_position_embeddings=positions)
    data, asked = tmp_path / "long.txt", list[int]()
    data.write_text("the quick brown fox jumps over " * 40)

    def noted(model: Any, prompt: list[int], most: int, *_: object) -> Iterator[int]:
        asked.append(most)
        assert len(prompt) + most == positions == model.positions
        return iter([8])

    monkeypatch.setattr(evaluation, "generate_ids", noted)
    few = ("--max-steps", 1, "--eval-fraction", 0)
    assert finetune(tmp_path / "out", model, data, *few, "--max-length", 1024) == 0
    assert finetune(tmp_path / "given", model, data, *few, "--sample-prompt", "x" * 30) == 0
    assert asked == [20, 20, 10, 10]
    assert "note: sequences have at most 40 tokens, not --max-length 1024: the model has" in capsys.readouterr().out
    assert finetune(tmp_path / "none", model, data, *few, "--max-length", 40, "--no-sample") == 0
    assert "sequences have at most" not in capsys.readouterr().out
    assert main(["plan", "--model", str(model), "--device", "wgpu", "--json", "--vram", "1GiB"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["tokens_per_step"] == 8 * positions and found["fits"][0]["longest_seq_len"] == positions


def test_the_sample_can_be_left_out(
    make_checkpoint: Any, text_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], phases: Any
) -> None:
    assert finetune(tmp_path / "out", make_checkpoint(), text_data, "--no-sample") == 0
    assert "sample" not in phases and "sample before" not in capsys.readouterr().out
    assert not [k for k in json.loads((tmp_path / "out" / "results.json").read_text()) if "sample" in k]
    with pytest.raises(WgradError, match="--sample-prompt: --no-sample"):
        RunOptions(sample=False, sample_prompt=("x",))


def test_a_model_that_computes_no_numbers_has_no_sample_and_no_result(
    make_checkpoint: Any, text_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_checkpoint()
    scale_last_norm(model, 1e38)
    with np.errstate(all="ignore"):
        assert finetune(tmp_path / "out", model, text_data) == 1
    said = capsys.readouterr()
    assert "note: no sample before: the model's logits are not finite" in said.out
    assert "all 2 steps were skipped" in said.err and not (tmp_path / "out" / "adapter_model.safetensors").exists()


def test_a_result_that_computes_no_numbers_is_not_recommended(
    make_checkpoint: Any, text_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its parameters are finite, as steps without a finite gradient are skipped."""
    with np.errstate(all="ignore"):
        assert finetune(tmp_path / "out", make_checkpoint(), text_data, "--learning-rate", "1e30", "--no-sample") == 0
    said = capsys.readouterr().out
    assert "this result is of no use: train anew, in another --out and with a lower --learning-rate than 1e+30" in said
    assert "next: wgrad" not in said


def test_a_resumed_run_measures_the_same_part(make_checkpoint: Any, text_data: Path, tmp_path: Path) -> None:
    model = make_checkpoint()
    assert finetune(tmp_path / "out", model, text_data, "--eval-tokens", 60) == 0
    more = ["--resume", "--max-steps", 3, "--eval-tokens", 70]
    assert finetune(tmp_path / "out", model, text_data, *more) == 2


def test_done_in_covers_all_parts_of_a_run(
    make_checkpoint: Any, text_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each part is made to take an hour more, before its first step and after its last."""
    late = [0.0]
    real = __import__("time").monotonic
    monkeypatch.setattr("wgrad.train.run.finetune.time.monotonic", lambda: real() + late[0])
    measure = __import__("wgrad.train.run.evaluation", fromlist=["Evaluation"]).Evaluation.measure

    def slow(self: Any, *args: Any, **options: Any) -> Any:
        late[0] += 3600.0
        return measure(self, *args, **options)

    monkeypatch.setattr("wgrad.train.run.evaluation.Evaluation.measure", slow)
    model = make_checkpoint()
    assert finetune(tmp_path / "out", model, text_data) == 0
    first = json.loads((tmp_path / "out" / "results.json").read_text())["seconds"]
    assert first == pytest.approx(7200, abs=600)
    assert finetune(tmp_path / "out", model, text_data, "--resume", "--max-steps", 3) == 0
    # The second part began with the checkpoint of the last step, which knows nothing of the hour after it.
    second = json.loads((tmp_path / "out" / "results.json").read_text())["seconds"]
    assert second == pytest.approx(7200, abs=600)
