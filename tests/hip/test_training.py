"""Training on the HIP device: tests of tests/train that other devices pass, steps compared with NumPy and PEFT, and
whole commands."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from wgrad.device.contract import Device
from wgrad.train.commands.cli import main
from wgrad.train.plan import lengths
from wgrad.train.run import kept_state, recovery

TRAIN = Path(__file__).parents[1] / "train"


def train_tests(name: str) -> ModuleType:
    """A file of tests/train, for its tests and fixtures."""
    spec = importlib.util.spec_from_file_location(f"train_{name}", TRAIN / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


FIXTURES, LOOP, GENERATE, RESUME = (train_tests(n) for n in ("conftest", "test_loop", "test_generation", "test_resume"))
RECOVERY = train_tests("test_recovery")
make_checkpoint, text_data = FIXTURES.make_checkpoint, FIXTURES.text_data
# These take the fixture `device`, which is the HIP device here: of one wave size, as they are about the room above.
test_one_batch_of_eight_is_eight_batches_of_one = LOOP.test_one_batch_of_eight_is_eight_batches_of_one
test_every_matrix_moves = LOOP.test_every_matrix_moves
test_nothing_grows = LOOP.test_nothing_is_compiled_and_memory_does_not_grow_after_the_first_steps
test_a_replayed_step_is_the_step_itself = LOOP.test_a_replayed_step_is_the_step_itself
test_dropout_follows_the_seed = pytest.mark.all(LOOP.test_dropout_follows_the_seed_and_is_off_in_evaluation)
test_16_bits_follow_float32 = LOOP.test_16_bits_follow_float32_as_closely_as_plain_ones
test_a_trainer_is_not_in_a_cycle = LOOP.test_a_trainer_is_not_in_a_cycle
test_greedy_is_the_likeliest_token = GENERATE.test_greedy_is_the_likeliest_token_of_the_whole_sequence
test_sampling_follows_its_seed_and_limits = pytest.mark.all(GENERATE.test_sampling_follows_its_seed_and_limits)
test_nothing_is_compiled_once_two_tokens_are_out = GENERATE.test_nothing_is_compiled_once_two_tokens_are_out
test_tokens_cost_only_reading = GENERATE.test_tokens_cost_the_host_nothing_but_reading_them_in_blocks


@pytest.fixture
def device(emulator: Any) -> Any:
    yield emulator.device("gfx1100")
    emulator.clear()


@pytest.mark.parametrize("steps", [15, pytest.param(30, marks=pytest.mark.all)])
def test_steps_have_the_losses_of_numpy(make_checkpoint: Any, hip_device: Device, cpu: Device, steps: int) -> None:
    """QLoRA with dropout and clipping; a loss may be off by four roundings of float32 a step."""
    folder, histories = make_checkpoint(), []
    for where in (cpu, hip_device):
        options = {"max_steps": steps, "gradient_accumulation_steps": 1, "lora_dropout": 0.1, "max_grad_norm": 0.5}
        trainer, _, config = LOOP.trainer_for(folder, where, **options)
        for step in LOOP.BatchStream(LOOP.documents(), config):
            trainer.step(step, config.learning_rate)
        histories.append(trainer.read_history()[:, 0])
    wanted, found = histories
    assert wanted.shape == (steps,) and wanted[-5:].mean() < 0.9 * wanted[:5].mean()
    np.testing.assert_allclose(found, wanted, rtol=steps * 4 * float(np.finfo(np.float32).eps))


@pytest.mark.all
@pytest.mark.oracle
def test_thirty_steps_follow_peft(make_checkpoint: Any, device: Device, tmp_path: Path) -> None:
    """One wave size suffices: the other is compared with NumPy above, four hundred times as closely."""
    train_tests("test_oracle_adapter").beside_peft(make_checkpoint(), device, tmp_path)


@pytest.mark.parametrize("compute", ["float16", "bfloat16"])
def test_16_bit_training_is_on_the_matrix_units(
    make_checkpoint: Any, hip_device: Device, launched: list[tuple[str, str]], cpu: Device, compute: str
) -> None:
    """A model with heads of 64: attention by its flash kernels, and the losses those of 16 bits in NumPy."""
    folder, histories = make_checkpoint(head_dim=64), []
    for where, kind in ((cpu, "float32"), (cpu, compute), (hip_device, compute)):
        trainer, _, config = LOOP.trainer_for(folder, where, compute=kind, max_steps=8)
        for step in LOOP.BatchStream(LOOP.documents(), config):
            trainer.step(step, config.learning_rate)
        histories.append(trainer.read_history()[:, 0])
    true, plain, ours = histories
    assert np.abs(ours - true).max() <= 3 * np.abs(plain - true).max()
    seen = {source for source, _ in launched}
    assert {"attention_forward", "attention_backward_dq", "attention_backward_dkv", "linear"} <= seen
    assert "attention_plain" not in seen


# ---- the commands ------------------------------------------------------------------------------
@pytest.fixture(params=["gfx942", "gfx1100"])
def card(emulator: Any, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`--device hip` takes an emulated GPU of this name."""
    emulator.select(request.param, monkeypatch)
    yield request.param
    emulator.clear()


def finetune_options(model: Path, data: Path, out: Path) -> list[str]:
    options = RESUME.options_for(model, data, out)
    for name, value in (
        ("--device", "hip"),
        ("--max-steps", "4"),
        ("--save-steps", "2"),
        ("--gradient-accumulation-steps", "1"),
    ):
        options[options.index(name) + 1] = value
    return options


@pytest.mark.parametrize("card", ["gfx1100"], indirect=True)
def test_finetune_resume_and_generate(
    card: str, make_checkpoint: Any, text_data: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One wave size suffices: the tests above compare steps and tokens of the other, and the next one a resumed run."""
    model, whole, again = make_checkpoint(), tmp_path / "whole", tmp_path / "again"
    monkeypatch.setattr(lengths, "SAMPLE_TOKENS", 4)  # 64 take a third of the time
    assert main(finetune_options(model, text_data, whole)) == 0
    printed = capsys.readouterr()
    assert f"Emulated {card}" in printed.out + printed.err
    assert "\ncompute: bfloat16 (the GPU's matrix cores take it, and it needs no loss scale)\n" in printed.out
    results = json.loads((whole / "results.json").read_text())
    assert results["held_out_loss_after"] < results["held_out_loss_before"]
    # From the checkpoint in the middle: the same adapter, bit for bit.
    RESUME.interrupted(whole, again)
    RESUME.shutil.rmtree(again / "checkpoints" / "step-4", ignore_errors=True)
    assert main([*finetune_options(model, text_data, again), "--resume"]) == 0
    assert "resuming from" in capsys.readouterr().out
    assert (again / RESUME.WEIGHTS_FILE).read_bytes() == (whole / RESUME.WEIGHTS_FILE).read_bytes()
    assert RESUME.losses(again) == RESUME.losses(whole)
    words = ["generate", "--device", "hip", "--model", str(model), "--adapter", str(whole), "--prompt", "the quick"]
    assert main([*words, "--max-new-tokens", "6", "--temperature", "0.8", "--top-k", "20", "--top-p", "0.9"]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("the quick") and card in captured.err


def test_a_fault_in_a_kernel_loses_nothing(
    emulator: Any, make_checkpoint: Any, text_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Older versions of ROCm end the process; what is on the disk goes on to the same bits. Newer ones answer every
    call with the fault from then on; the command goes on in a new process, from what is in main memory."""
    emulator.select("gfx1100", monkeypatch)
    model, whole, again = make_checkpoint(), tmp_path / "whole", tmp_path / "again"
    run = lambda out: [*finetune_options(model, text_data, out), "--no-sample", "--eval-fraction", "0"]  # noqa: E731
    begun = emulator.library.emulator_launches()
    assert main(run(whole)) == 0
    in_all = emulator.library.emulator_launches() - begun
    kept = {name: value for name, value in os.environ.items() if name != "WGRAD_EMULATED_FAULTS"}
    environment = {
        **kept,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "LD_LIBRARY_PATH": str(emulator.folder),
        "WGRAD_HIP_OBJECTS": str(emulator.folder),
        "WGRAD_EMULATED_ARCH": "gfx1100",
        "WGRAD_EMULATED_FAULT_AT": str(in_all * 3 // 4),
    }
    command = [sys.executable, "-m", "wgrad", *run(again)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == -signal.SIGABRT, done.stderr[-3000:]
    assert "a planted fault" in done.stderr
    assert [path.name for path in (again / "checkpoints").iterdir()] == ["step-2"]
    assert not (again / RESUME.WEIGHTS_FILE).exists()
    capsys.readouterr()
    assert main([*run(again), "--resume"]) == 0
    assert "resuming from" in capsys.readouterr().out
    assert (again / RESUME.WEIGHTS_FILE).read_bytes() == (whole / RESUME.WEIGHTS_FILE).read_bytes()
    assert RESUME.losses(again) == RESUME.losses(whole)

    later, launches = tmp_path / "later", emulator.library.emulator_launches
    moments = [in_all * random.Random(in_all).randrange(30, 70) // 100, in_all // 4]

    def plant() -> None:
        emulator.clear()
        at = launches() + moments.pop(0) if moments else 0
        monkeypatch.setenv("WGRAD_EMULATED_FAULT_AT", str(at))

    monkeypatch.setenv("WGRAD_LOST_AT", "")
    monkeypatch.setattr(recovery, "_PAUSE", 0.0)
    monkeypatch.setattr(kept_state, "_SECONDS", 0.0)
    plant()
    assert RECOVERY.as_program(monkeypatch, plant, run(later)) == 0
    said = capsys.readouterr()
    assert said.err.count("the GPU is lost to this process") == 2 == said.err.count(": starting again")
    assert (later / RESUME.WEIGHTS_FILE).read_bytes() == (whole / RESUME.WEIGHTS_FILE).read_bytes()
    assert RESUME.losses(later) == RESUME.losses(whole) and "Exception ignored" not in said.err
    emulator.clear()


def test_devices_and_selftest_name_the_emulated_gpu(card: str, capsys: Any) -> None:
    assert main(["devices"]) == 0
    assert f"hip:0: Emulated {card}" in capsys.readouterr().out
    assert main(["selftest", "--device", "hip", "--only", "rms_norm/"]) == 0
    assert card in capsys.readouterr().out
