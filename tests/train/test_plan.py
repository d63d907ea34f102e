"""Plans of a run's needs: all shaders are compiled, and the measured memory is the planned one."""

from __future__ import annotations

import gc
import io
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import wgpu_sibling
from tests.train.conftest import choose_card, tiny_config, write_checkpoint
from wgrad.autograd import chunks, select_device
from wgrad.autograd.decoded_weights import DecodedWeights
from wgrad.autograd.reference import ReferenceDevice
from wgrad.device.contract import Device
from wgrad.device.dry_run import DryRuntime
from wgrad.device.errors import OutOfMemory, WgradError
from wgrad.train.commands import cli
from wgrad.train.commands import plan as plan_command
from wgrad.train.data.packing import BatchStream, Document, eval_batches
from wgrad.train.inference.generation import generate_ids
from wgrad.train.model import attention
from wgrad.train.model.load_config import load_model_config
from wgrad.train.model.model_files import ModelFiles, opened_once
from wgrad.train.model.rope_scaling import rope_tables
from wgrad.train.model.weights import weight_specs
from wgrad.train.options.finetune_config import RunOptions
from wgrad.train.options.generate_config import GREEDY
from wgrad.train.plan import plan as plan_module
from wgrad.train.plan.lengths import SAMPLE_TOKENS
from wgrad.train.plan.plan import plan_run, run_dry
from wgrad.train.run import evaluation
from wgrad.train.step import build
from wgrad.train.step.activations import estimate_activations
from wgrad.train.step.build import build_optimizer, build_trainable
from wgrad.train.step.trainer import Trainer
from wgrad.wgsl.device import WgpuDevice
from wgrad.wgsl.loss import loss
from wgrad.wgsl.runtime.dry_run import DryRun

PROMPT = [5, 6, 7]
SHAPES: dict[str, dict[str, Any]] = {
    "plain": {"max_length": 123, "batch_size": 3},
    "gradient_checkpointing": {"max_length": 70, "batch_size": 2, "gradient_checkpointing": True},
    "float16, checkpointing, dropout": {
        "max_length": 41,
        "compute": "float16",
        "gradient_checkpointing": True,
        "lora_dropout": 0.1,
    },
    "everything trained": {"full": True},
    "DoRA": {"use_dora": True},
    "embedding and head": {"train_embeddings": True, "train_head": True, "loraplus_lr_ratio": 4.0},
    "simple scales, few modules": {"double_quant": False, "target_modules": ("q_proj", "down_proj"), "lora_r": 3},
}


def config_of(**options: Any) -> RunOptions:
    return RunOptions(
        **(
            {"max_length": 21, "gradient_accumulation_steps": 2, "lora_r": 4, "max_steps": 3, "logging_steps": 1}
            | options
        )
    )


def documents(config: RunOptions) -> list[Document]:
    """Return documents of all lengths up to that of a row."""
    generator = np.random.default_rng(0)
    lengths = [2 + (13 * i) % (config.max_length - 1) for i in range(12)] + [config.max_length]
    return [Document(generator.integers(0, 40, n).astype(np.int32), np.ones(n, bool)) for n in lengths]


def run(config: RunOptions, folder: Path, device: Any) -> None:
    """Do what `wgrad finetune` does on the device: load, evaluate, write a sample, train, evaluate."""
    built = build_trainable(config, load_model_config(folder), folder, device, positions=len(PROMPT) + SAMPLE_TOKENS)
    trainer = Trainer(built.model, build_optimizer(config, built.parameters), config)
    batches = eval_batches(documents(config)[:5], config)
    trainer.evaluate(batches, lambda done: None)
    with device.borrowing():
        list(generate_ids(built.model, PROMPT, SAMPLE_TOKENS, GREEDY))
    for step in BatchStream(documents(config), config):
        trainer.step(step, 1e-4)
        trainer.read_history()
    trainer.evaluate(batches)
    device.synchronize()


@pytest.fixture
def fresh(wgpu_device: Device) -> Any:
    """A device of this test's own, with nothing in its pool."""
    return type(wgpu_device)()


@pytest.mark.parametrize("shape", SHAPES)
def test_all_shaders_are_prepared_and_memory_peaks_where_it_was_said(
    make_checkpoint: Any, fresh: Any, shape: str
) -> None:
    """Limit: 5 % of the peak. The pool lends a free block even where it is up to a quarter too large, and which ones
    are free depends on what went before."""
    config = config_of(**SHAPES[shape])
    if config.compute == "float16" and not fresh.float16:
        pytest.skip(f"{fresh.description} has no float16")
    folder = make_checkpoint(dtype="bfloat16")
    kept = fresh.memory().in_use_bytes
    plan = plan_run(config, load_model_config(folder), folder, fresh, len(PROMPT))
    assert plan is not None and fresh.memory().in_use_bytes == kept
    fresh.prepare(plan.dry)
    compiled = fresh.pipelines_compiled()
    run(config, folder, fresh)
    assert fresh.pipelines_compiled() == compiled, "a shader was compiled in the run"
    assert plan.peak_bytes == pytest.approx(fresh.memory().peak_bytes - kept, rel=0.05)
    assert plan.held_bytes + plan.activation_bytes <= plan.peak_bytes < plan.held_bytes + 1.5 * plan.activation_bytes


STREAMED = ("--stream-weights", "on", "--gradient-checkpointing")
LATENTS = {"moe_latent_size": 22, "hybrid_override_pattern": "M*E"}


@pytest.mark.parametrize(
    ("architecture", "changes", "more"),
    [
        ("Qwen3_5ForCausalLM", {}, ("--no-gradient-checkpointing",)),
        pytest.param("NemotronHForCausalLM", LATENTS, STREAMED, marks=pytest.mark.all),
    ],
)
def test_a_run_takes_what_was_planned_to_the_byte(
    architecture: str,
    changes: dict[str, Any],
    more: tuple[str, ...],
    make_checkpoint: Any,
    wgpu_device: Any,
    text_data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Several batches are evaluated before the first step, in the plan too: a second one finds other free blocks.

    Samples lie where steps have their arrays, in the plan and in the run, which else would take more. Evaluations do,
    too: test_stream_weights."""
    borrowed: dict[str, list[bool]] = {}
    for user in (plan_module, evaluation):

        def noted(model: Any, *args: Any, name: str = user.__name__) -> Iterator[int]:
            borrowed.setdefault(name, []).append(model.device._pool.borrowing)
            yield from generate_ids(model, *args)

        monkeypatch.setattr(user, "generate_ids", noted)
    calls: list[str] = []
    for name in ("measure", "step"):
        plain = getattr(Trainer, name)

        def told(*args: Any, plain: Any = plain, name: str = name) -> Any:
            calls.append(name)
            return plain(*args)

        monkeypatch.setattr(Trainer, name, told)
    prepared: list[tuple[Any, Any]] = []
    prepare = WgpuDevice.prepare

    def kept(self: Any, dry: Any, *args: Any) -> int:
        prepared.append((self, dry))
        return prepare(self, dry, *args)

    monkeypatch.setattr(WgpuDevice, "prepare", kept)
    choose_card(monkeypatch)
    words: list[Any] = ["finetune", "--model", make_checkpoint(architecture, **changes), "--data", text_data]
    words += ["--out", tmp_path / "out", "--max-length", 64, "--batch-size", 2, "--lora-r", 4, "--max-steps", 2]
    words += ["--eval-fraction", 0.3, *more]
    assert cli.main([*map(str, words)]) == 0
    assert calls == ["measure", "step", "step", "measure"] * 2  # the order decides which blocks are free for what
    assert borrowed == {plan_module.__name__: [True, True], evaluation.__name__: [True, True]}
    ((device, dry),) = prepared
    found, planned = device.memory(), dry.memory()
    assert found.peak_bytes - wgpu_sibling().memory().in_use_bytes == planned.peak_bytes
    assert device.host_memory().peak_bytes == dry.host_memory().peak_bytes


def test_activations_grow_with_tokens_and_shrink_with_checkpointing(make_checkpoint: Any, fresh: Any) -> None:
    folder = make_checkpoint()

    def activations(**options: Any) -> int:
        plan = plan_run(config_of(**options), load_model_config(folder), folder, fresh, 3)
        assert plan is not None
        return plan.activation_bytes

    one, two = activations(max_length=123), activations(max_length=246)
    assert 1.8 * one < two < 2.2 * one
    assert activations(max_length=246, gradient_checkpointing=True) < 0.8 * two


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("compute", ["float32", "float16"])
def test_the_estimate_for_numpy_is_near_what_it_takes(base_model: Path, checkpointing: bool, compute: str) -> None:
    """Limit: 25 %. Without the decoded weights, which are kept while memory is free."""
    config = config_of(
        max_length=128, compute=compute, gradient_checkpointing=checkpointing, gradient_accumulation_steps=1
    )
    device = ReferenceDevice()
    device._decoded = DecodedWeights(device._pool.track, budget=0)
    model = load_model_config(base_model)
    built = build_trainable(config, model, base_model, device, positions=128)
    trainer = Trainer(built.model, build_optimizer(config, built.parameters), config)
    held = device.memory().in_use_bytes
    device._pool.peak_bytes = held
    trainer.step(BatchStream(documents(config), config).get(0), 1e-4)
    assert estimate_activations(config, model) == pytest.approx(device.memory().peak_bytes - held, rel=0.25)
    assert plan_run(config, model, base_model, device, 3) is None


@pytest.fixture
def base_model() -> Path:
    return Path(__file__).parents[2] / "examples" / "base_model"


@pytest.mark.parametrize("trained", ["", "full", "train_embeddings"])
def test_no_weight_is_read(make_checkpoint: Any, fresh: Any, monkeypatch: pytest.MonkeyPatch, trained: str) -> None:
    """A model of 8B is planned in a second: its tensors are mapped and left alone, also those to be converted. No
    row of a rotary table is computed, and no adapter's start."""
    folder = make_checkpoint(dtype="float16")
    given: list[np.ndarray] = []
    monkeypatch.setattr(build, "init_lora", None)
    monkeypatch.setattr(attention, "rope_tables", lambda rope, rows: rope_tables(rope, rows) if rows == 0 else None)
    monkeypatch.setattr(DryRun, "write", lambda self, array, host: given.append(host))
    whole = DryRun.upload

    def upload(self: DryRun, host: np.ndarray) -> Any:
        given.append(host)
        return whole(self, host)

    monkeypatch.setattr(DryRun, "upload", upload)
    monkeypatch.setattr(fresh, "float16", False)
    model = load_model_config(folder)
    config = config_of(lora_r=1, **{trained: True} if trained else {})
    assert plan_run(config, model, folder, fresh, 3) is not None
    weights = {spec.shape for spec in weight_specs(model)}
    assert given and not [host.shape for host in given if host.shape in weights]


def test_plans_of_one_search_open_the_files_once(make_checkpoint: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """And none asks what the tensors hold: of 128 experts a layer that took four fifths of a short plan."""
    folder, device, opened = make_checkpoint(), select_device.gpu_elsewhere(""), list[Any]()
    whole = ModelFiles.__init__

    def noted(self: ModelFiles, folder: Path) -> None:
        opened.append(folder)
        whole(self, folder)

    monkeypatch.setattr(ModelFiles, "__init__", noted)
    monkeypatch.setattr(ModelFiles, "digest", None)
    model = load_model_config(folder)
    with opened_once():
        for tokens in (8, 16):
            with opened_once():
                run_dry(config_of(max_length=tokens, stream_weights="on"), model, folder, device, 3, None)
    assert len(opened) == 1
    run_dry(config_of(max_length=8, stream_weights="on"), model, folder, device, 3, None)
    assert len(opened) == 2


def test_a_checkpoint_that_does_not_fit_is_told_at_once(make_checkpoint: Any, fresh: Any) -> None:
    folder = make_checkpoint()
    other = load_model_config(make_checkpoint(name="other", hidden_size=64))
    with pytest.raises(WgradError, match="has shape"):
        plan_run(config_of(), other, folder, fresh, 3)


def test_sequences_that_no_device_holds_take_no_main_memory(
    make_checkpoint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their tables and tokens alone would: a plan of 100,000,000 tokens was killed."""
    monkeypatch.setattr(plan_module, "build_trainable", lambda *args, **options: pytest.fail("builds a model"))
    model = make_checkpoint()
    device = select_device.gpu_elsewhere("")
    config = config_of(max_length=10**8, gradient_checkpointing=True)
    pairs = replace(config, objective="dpo", batch_size=2, max_length=4096)
    inputs = 4 * pairs.batch_size * pairs.max_length * load_model_config(model).hidden_size  # bytes of half of them
    for options, limit in ((config, None), (config, 1 << 30), (pairs, inputs + inputs // 2)):
        with pytest.raises(OutOfMemory, match="an array of [0-9,]+ bytes|memory limit"):
            run_dry(options, load_model_config(model), model, device, len(PROMPT), limit)


def test_a_drivers_control_characters_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    plan_command._show("memory of a GPU\x1b[2J\n\tweights")
    assert capsys.readouterr().out == "memory of a GPU\\x1b[2J\n\tweights\n"


def test_a_plan_for_numpy_is_refused_with_a_way_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--device", "cpu", "--model", "examples/base_model"]) == 2
    assert "leave --device out, and give --vram to plan for a GPU that is elsewhere" in capsys.readouterr().err


def test_without_a_gpu_it_plans_for_one_that_is_elsewhere(
    make_checkpoint: Any, fresh: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As for a GPU here of the same kernels."""
    monkeypatch.setattr(select_device, "_list_adapters", lambda: ([], []))
    monkeypatch.setattr(select_device, "_list_hip", lambda: [])
    folder = make_checkpoint(num_hidden_layers=1)
    options = ["plan", "--model", str(folder), "--lora-r", "3", "--max-length", "40", "--batch-size", "1"]
    options += ["--compute", "float32", "--no-sample", "--gradient-accumulation-steps", "2", "--max-steps", "3"]
    assert cli.main([*options, "--json"]) == 0
    said = capsys.readouterr()
    assert "a GPU that is not here (no GPU works here" in said.err
    assert "planning: first the run, then speed against memory; no weights are read" in said.err  # memory is not known
    for name in ("software", "shared_memory", "subgroups"):
        monkeypatch.setattr(fresh, name, False)
    plan = plan_run(
        config_of(lora_r=3, max_length=40, batch_size=1, sample=False), load_model_config(folder), folder, fresh, 3
    )
    assert plan is not None and json.loads(said.out)["peak_bytes"] == pytest.approx(plan.peak_bytes, rel=0.1)
    assert cli.main([*options, "--device", "cpu"]) == 2
    assert "give --vram to plan for a GPU" in capsys.readouterr().err


def test_each_part_of_a_plan_is_printed_as_soon_as_it_is_known(
    make_checkpoint: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The next part may take minutes."""
    monkeypatch.setattr(plan_command, "select_device", lambda *_: select_device.gpu_elsewhere(""))
    file, shown = io.BytesIO(), list[str]()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(file, encoding="utf-8"))
    for name in ("curve", "modes", "not_cached"):
        plain = getattr(plan_command, name)

        def noted(*args: Any, plain: Any = plain) -> Any:
            shown.append(file.getvalue().decode())
            return plain(*args)

        monkeypatch.setattr(plan_command, name, noted)
    folder = make_checkpoint(num_hidden_layers=1, max_position_embeddings=64)
    words = ["plan", "--model", str(folder), "--max-length", "40", "--batch-size", "1", "--lora-r", "3", "--no-sample"]
    assert cli.main([*words, "--compute", "float32", "--vram", "1GiB"]) == 0
    assert "then speed against memory, then the most that fits; no weights are read" in capsys.readouterr().err
    parts = [new.removeprefix(old).splitlines() for old, new in zip(["", *shown], shown)]
    assert parts[0][0].startswith("chosen for --vram (1.00 GiB):") and parts[0][1].startswith("memory of a run")
    assert parts[1][0].startswith("speed against memory")
    assert parts[1][-1].startswith("within 1.00 GiB") and len(parts[1]) > 2
    assert len(parts[2]) == 4 and all(line.startswith("  --") for line in parts[2])


def test_a_software_driver_is_not_what_a_run_takes(
    make_checkpoint: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    software = {"index": 0, "name": "llvmpipe", "type": select_device.SOFTWARE}
    monkeypatch.setattr(select_device, "_list_adapters", lambda: ([software], []))
    monkeypatch.setattr(select_device, "_list_hip", lambda: [])
    folder = make_checkpoint(num_hidden_layers=1)
    assert cli.main(["plan", "--model", str(folder), "--max-length", "40", "--batch-size", "1", "--json"]) == 0
    said = capsys.readouterr()
    found = json.loads(said.out)
    assert found["device"] == "a GPU that is not here" and found["run_device"].startswith("NumPy ")
    assert "no GPU works here: llvmpipe is a software driver, which is slower than NumPy" in said.err


def test_a_dry_run_needs_not_all_chunks(make_checkpoint: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other chunks of the head's logits, and of a recomputed layer's MLP, take and launch the same."""
    monkeypatch.setattr(loss, "CHUNK_BYTES", 1)
    monkeypatch.setattr("wgrad.train.model.model.MLP_CHUNKS_ABOVE", 0)
    monkeypatch.setattr("wgrad.train.model.model.MLP_CHUNK_BYTES", 6 * 88 * 4 * 128)
    folder, device = make_checkpoint(), select_device.gpu_elsewhere("")
    config = config_of(max_length=1000, batch_size=1, gradient_checkpointing=True, stream_weights="on")
    found = []
    for all_of_them in (False, True):
        if all_of_them:
            for module in (chunks, loss):
                monkeypatch.setattr(module, "chunk_starts", lambda _, count, rows: range(0, count, rows))
        plan = run_dry(config, load_model_config(folder), folder, device, 3, None)
        found.append((plan.dry.memory(), plan.host_bytes, list(plan.dry.variants)))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "more",
    [
        {"gradient_checkpointing": 3, "offload_activations": 2, "keep_projections": 3, "keep_dequantized": 2},
        {"gradient_checkpointing": True, "stream_weights": "on"},
        {"objective": "dpo", "lora_dropout": 0.1, "sample": True},
    ],
    ids=["recomputed", "streamed", "pairs"],
)
def test_a_dry_run_needs_not_do_work_twice(
    more: dict[str, Any], make_checkpoint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recorded steps and evaluations take the memory of the first. The same runs fit a limit, in the same memory."""
    folder, device = make_checkpoint(num_hidden_layers=4), select_device.gpu_elsewhere("")
    model, config = load_model_config(folder), config_of(**{"max_length": 64, "batch_size": 2, "sample": False, **more})
    repeated, plain = set[tuple[bool, bool]](), DryRuntime.repeat
    if not config.sample:
        monkeypatch.setattr(plan_module, "generate_ids", lambda *_: pytest.fail("generates a sample"))

    def noted(self: Any, rehearsal: Any) -> bool:
        done = plain(self, rehearsal)
        repeated.add((self._pool.limit is None, done))
        return done

    def found(limit: int | None) -> Any:
        try:
            plan = run_dry(config, model, folder, device, 3, limit)
        except OutOfMemory:
            return None
        return plan.dry.memory(), replace(plan, dry=None), list(plan.dry.variants)

    results = []
    for repeat in (noted, lambda self, rehearsal: False):
        monkeypatch.setattr(DryRuntime, "repeat", repeat)
        ample = found(40 << 20)
        results.append(
            [ample, found(None), *(found(ample[0].peak_reserved_bytes * share // 64) for share in (62, 58, 53))]
        )
    assert results[0] == results[1]
    assert {(False, True), (True, True)} <= repeated  # below a limit, and without one


GPT_OSS_20B = {
    "num_hidden_layers": 24, "num_experts": 32, "num_local_experts": 32, "num_experts_per_tok": 4,
    "hidden_size": 2880, "intermediate_size": 2880, "vocab_size": 201_088, "num_attention_heads": 64,
    "num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128, "max_position_embeddings": 131_072,
}  # fmt: skip


@pytest.mark.all
def test_gpt_oss_20b_fits_8_gib(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The files hold headers alone."""
    monkeypatch.setattr(select_device, "_list_adapters", lambda: ([], []))
    monkeypatch.setattr(select_device, "_list_hip", lambda: [])
    raw = tiny_config("GptOssForCausalLM", **GPT_OSS_20B)
    folder = write_checkpoint(tmp_path / "20b", raw, {})
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    for spec in weight_specs(load_model_config(folder)):
        if spec.kind == "experts":
            experts, rows, columns = spec.shape
            tensors[f"{spec.name}_blocks"] = "U8", (experts, rows, columns // 32, 16)
            tensors[f"{spec.name}_scales"] = "U8", (experts, rows, columns // 32)
        else:
            tensors[spec.name] = "BF16", spec.shape
    header: dict[str, Any] = {}
    end = 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + math.prod(shape) * (2 if dtype == "BF16" else 1)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with open(folder / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    options = ["plan", "--model", str(folder), "--max-length", "1024", "--batch-size", "1", "--stream-weights", "on"]
    assert cli.main([*options, "--gradient-checkpointing", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert 2 << 30 < plan["peak_bytes"] < 4 << 30
    assert end < plan["main_memory_bytes"] < 1.1 * end
    # To decode a token: of 32 experts the four that it chooses, attention, and the head.
    experts = sum(math.prod(shape) for dtype, shape in tensors.values() if dtype == "U8")
    head = 2 * math.prod(tensors["lm_head.weight"][1])
    assert 1.02 * (experts / 8 + head) < plan["decoding_copy_bytes"] < 1.2 * (experts / 8 + head)


@pytest.mark.parametrize("least, wanted", [(700, 100_000), (0, 0), (200_000, 200_000)])
def test_reference_cycles_are_looked_for_less_often_in_a_dry_run(
    least: int, wanted: int, make_checkpoint: Any, fresh: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And as often as before once it ends, also with an error; 0: never."""
    seen, before = list[int](), gc.get_threshold()

    def run(*arguments: Any) -> Any:
        seen.append(gc.get_threshold()[0])
        raise WgradError("it does not fit")

    monkeypatch.setattr(plan_module, "_run_dry", run)
    folder = make_checkpoint()
    try:
        gc.set_threshold(least)
        with pytest.raises(WgradError, match="does not fit"):
            run_dry(RunOptions(stream_weights="off"), load_model_config(folder), folder, fresh, 3, None)
        assert seen == [wanted] and gc.get_threshold()[0] == least
    finally:
        gc.set_threshold(*before)
