"""Outputs of projections that recomputed layers keep (--keep-projections): bits, memory, and the number chosen."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.train.conftest import tiny_config
from wgrad.autograd.reference import ReferenceDevice
from wgrad.device.memory import size_class
from wgrad.train.commands import cli
from wgrad.train.commands.bench_model import random_step
from wgrad.train.model.load_config import load_model_config, parse_model_config
from wgrad.train.model.model_inputs import Inputs
from wgrad.train.model.projections import NOTHING, kept_chunks, projection_widths
from wgrad.train.options.finetune_config import MOST_KEPT, RunOptions
from wgrad.train.plan import keep_projections as keep_module
from wgrad.train.plan import speed
from wgrad.train.plan.fit import Fit
from wgrad.train.plan.keep_projections import with_fewer_recomputed, with_gate_up
from wgrad.train.plan.plan import plan_run
from wgrad.train.plan.rates import Rates
from wgrad.train.plan.settle import settle
from wgrad.train.ranks.world import World
from wgrad.train.step.activations import (
    gate_up_bytes,
    keeps_attention,
    kept_projections,
    offloaded_bytes,
    projection_bytes,
)
from wgrad.train.step.build import build_optimizer, build_trainable
from wgrad.train.step.room import Room
from wgrad.train.step.trainer import Trainer

LAYERS, ROWS, TOKENS = 4, 3, 64
CHUNKED = {"mlp_chunk": str(6 * 88 * 4 * 100)}  # chunks of 128 and 64 rows


def options(**given: Any) -> RunOptions:
    shape: dict[str, Any] = {"max_length": TOKENS, "batch_size": ROWS, "gradient_accumulation_steps": 1, "lora_r": 4}
    kept: dict[str, Any] = {"gradient_checkpointing": True, "keep_attention": True, "stream_weights": "off"}
    kept |= {"lora_dropout": 0.0, "sample": False}
    return RunOptions(**(shape | kept | given))


def one_pass(config: RunOptions, folder: Any, device: Any) -> tuple[list[np.ndarray], list[int], int]:
    """Return loss and gradients, the bytes of each copy, and the number of matmuls with frozen weights."""
    built = build_trainable(config, load_model_config(folder), folder, device, positions=TOKENS)
    inputs, trained = Inputs.empty(built.model, config.rows, TOKENS), built.parameters
    generator = np.random.default_rng(0)
    ids = generator.integers(0, 40, config.rows * TOKENS).astype(np.int32)
    device.write(inputs.ids, ids)
    device.write(inputs.targets, np.roll(ids, -1))
    device.write(inputs.positions, np.tile(np.arange(TOKENS, dtype=np.int32), config.rows))
    device.write(trained.data, 0.1 * generator.standard_normal(trained.data.shape).astype(np.float32))
    moved, matmuls, transfer, linear = list[int](), Counter[str](), device.transfer, device.linear_quantized

    def copied(src: Any, out: Any) -> None:
        moved.append(src.nbytes)
        transfer(src, out)

    def multiplied(*args: Any, **given: Any) -> Any:
        matmuls["forward"] += 1
        return linear(*args, **given)

    device.transfer, device.linear_quantized = copied, multiplied
    loss = built.model.loss(inputs)
    loss.backward()
    return [device.download(loss.data), device.download(trained.grad)], moved, matmuls["forward"]


@pytest.mark.parametrize("more", [{}, CHUNKED], ids=["whole", "chunks"])
@pytest.mark.parametrize("offloaded", [0, 2])
def test_no_number_changes_a_bit(make_checkpoint: Any, more: dict[str, Any], offloaded: int) -> None:
    """Kept projections are not multiplied again, but copied there and back."""
    folder = make_checkpoint(num_hidden_layers=LAYERS)
    expected, before, matmuls = list[np.ndarray](), list[int](), 0
    for kept in range(MOST_KEPT + 1):
        device: Any = ReferenceDevice()
        device.shared_memory = False
        found, moved, count = one_pass(
            options(keep_projections=kept, offload_activations=offloaded, **more), folder, device
        )
        if not kept:
            expected, before, matmuls = found, moved, count
            assert np.isfinite(found[0]).all() and np.count_nonzero(found[1]) > found[1].size / 2
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_array_equal(one, other)
        chunks = [kept_chunks(kept, layer) if more else min(kept_chunks(kept, layer), 1) for layer in range(LAYERS)]
        assert matmuls - count == (3 * LAYERS + 2 * sum(chunks) if kept else 0), kept
        # Of a chunk also the three products with A, which are kept anyway of an MLP without chunks.
        extra = 3 * bool(kept) * offloaded + (5 if more else 2) * sum(chunks[:offloaded])
        assert len(moved) - len(before) == 2 * extra, kept


@pytest.mark.parametrize(
    ("architecture", "rows", "chunk"),
    [("PhiForCausalLM", ROWS, 100), ("LlamaForCausalLM", 1, 10)],
    ids=["work after chunks", "one chunk"],
)
@pytest.mark.parametrize("offloaded", [0, 2])
def test_a_chunk_takes_its_own_results_alone(
    make_checkpoint: Any, architecture: str, rows: int, chunk: int, offloaded: int
) -> None:
    """Attention's output projection follows chunks in layers where both read one norm; 64 tokens are one chunk."""
    folder, expected = make_checkpoint(architecture, num_hidden_layers=3), list[np.ndarray]()
    matmuls = list[int]()
    given = {"batch_size": rows, "offload_activations": offloaded, "mlp_chunk": str(6 * 88 * 4 * chunk)}
    for kept in (0, 3, 5):
        device: Any = ReferenceDevice()
        device.shared_memory = False
        found, _, count = one_pass(options(keep_projections=kept, **given), folder, device)
        expected = expected or found
        matmuls.append(count)
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_array_equal(one, other)
    assert matmuls[0] > matmuls[1] >= matmuls[2]


@pytest.mark.parametrize("more", [{}, CHUNKED], ids=["whole", "chunks"])
@pytest.mark.parametrize("kept", [0, 2, 4])
def test_gate_and_up_that_stay_change_no_bit(make_checkpoint: Any, more: dict[str, Any], kept: int) -> None:
    """The last recomputed layers keep them, where they are not offloaded; they are never copied."""
    folder = make_checkpoint(num_hidden_layers=LAYERS)
    results = []
    for staying in (0, 2):
        device: Any = ReferenceDevice()
        device.shared_memory = False
        config = options(keep_projections=kept, keep_gate_up=staying, gradient_checkpointing=3, **more)
        results.append(one_pass(replace(config, offload_activations=True), folder, device))
    (expected, before, matmuls), (found, moved, count) = results
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)
    most = 2 if more else 1
    of_layers = [min(kept_chunks(kept, layer), most) for layer in (1, 2)]
    assert matmuls - count == 2 * sum(offloaded < most for offloaded in of_layers)
    # Products with A of an MLP without chunks stay with its gate and up.
    fewer = 0 if more else 2 * 3 * sum(not offloaded for offloaded in of_layers)
    assert len(before) - len(moved) == fewer


@pytest.mark.parametrize("more", [{}, CHUNKED], ids=["whole", "chunks"])
def test_the_memory_is_as_planned_and_foreseen(make_checkpoint: Any, card: Any, more: dict[str, Any]) -> None:
    folder = make_checkpoint(num_hidden_layers=LAYERS)
    model, hosts = load_model_config(folder), []
    for kept in (0, 1, 3, 5):
        config = options(keep_projections=kept, offload_activations=True, **more)
        plan = plan_run(config, model, folder, card, 1)
        assert plan is not None
        hosts.append(plan.host_bytes)
        if kept == 3:
            one_pass(config, folder, card)
            assert card.host_memory().peak_bytes == plan.host_bytes
    # The pool's blocks are larger than gate and up; a product with A is kept anyway of an MLP without chunks.
    config, chunks = options(**more), [128, 64] if more else [ROWS * TOKENS]
    for host, kept in zip(hosts[1:], (1, 3, 5)):
        mixer, mlp = projection_bytes(config, model, kept)
        rows = chunks[: (kept - 1) // 2]
        gates, of_a = [count * model.mlp_width * 4 for count in rows], 3 * 4 * 4 * sum(rows) if more else 0
        assert mlp == 2 * sum(gates)
        assert host - hosts[0] == (LAYERS - 1) * (mixer + 2 * sum(map(size_class, gates)) + of_a)
        assert offloaded_bytes(config, model, kept) - offloaded_bytes(config, model, 0) == mixer + mlp


def test_layers_take_turns() -> None:
    chunks = [[kept_chunks(kept, layer) for layer in range(4)] for kept in range(MOST_KEPT + 1)]
    assert chunks == [[0] * 4, [0] * 4, [0, 1, 0, 1], [1] * 4, [1, 2, 1, 2], [2] * 4]
    model = parse_model_config(tiny_config())
    assert projection_widths(model) == (model.q_size_of(0) + 2 * model.kv_size_of(0), 2 * model.mlp_width)
    assert projection_bytes(options(compute="float16"), model, 2)[1] == ROWS * TOKENS * model.mlp_width * 2


def test_as_much_is_kept_as_is_copied_alongside_matmuls(
    make_checkpoint: Any, card: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It fits main memory too; a number that is given stays."""
    folder, free = make_checkpoint(num_hidden_layers=LAYERS), {"bytes": 1 << 40}
    model, limit = load_model_config(folder), 1 << 40
    monkeypatch.setattr(keep_module, "free_memory", lambda: free["bytes"])
    config = options(gradient_checkpointing="auto", keep_attention=None, compute="float32")
    each = [offloaded_bytes(config, model, kept) for kept in range(MOST_KEPT + 1)]

    def chosen(hidden: float, **given: Any) -> list[Any]:
        ranks = given.pop("ranks", 1)
        monkeypatch.setattr(type(card), "copied_alongside", lambda self, work: hidden)
        modes = Fit(replace(config, **given), model, folder, card, 24, limit, ranks).modes
        return [mode.get("keep_projections") for mode in modes]

    assert chosen(each[1] - 1) == [None, None]
    for kept in (1, 2, 3):
        assert chosen(each[kept]) == [None, kept, None]
    assert chosen(1e12) == [None, 3, None]  # four and five keep no more of an MLP that has no chunks
    assert chosen(1e12, **CHUNKED) == [None, 5, None]
    free["bytes"] = int(2 * LAYERS * each[2])
    assert chosen(1e12) == [None, 2, None]
    assert chosen(1e12, ranks=2) == [None, None]
    assert chosen(1e12, keep_projections=1) == [None, None]
    assert chosen(1e12, keep_attention=False) == [None, None]
    assert chosen(1e12, offload_activations=2) == [None]


def test_a_layer_less_is_recomputed_rather_than_projections_kept(
    make_checkpoint: Any, card: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is if that fits and saves more; what is kept is said."""
    monkeypatch.setattr(type(card), "copied_alongside", lambda self, work: 1e12)
    folder = make_checkpoint(num_hidden_layers=LAYERS)
    model = load_model_config(folder)
    config = options(gradient_checkpointing="auto", keep_attention=None, compute="float32")
    few = options(gradient_checkpointing=1, offload_activations=1, keep_norms=False, compute="float32")
    plan = plan_run(few, model, folder, card, 1)
    assert plan is not None
    peak = plan.reserved_bytes
    for limit, wanted in ((peak * 64 // 63 + 64, 1), (peak * 2 // 3, LAYERS)):
        fit = Fit(replace(config, memory_limit=str(limit)), model, folder, card, 1, limit)
        mode = settle(fit.config, fit, Room(limit, ""), World(), pinned=False)
        assert mode.mode["gradient_checkpointing"] <= wanted
        said = "inputs, attention outputs and projections" if mode.mode.get("keep_projections") else "inputs"
        assert said in mode.lines[-1]


def test_what_is_kept_saves_its_matmuls_in_the_predicted_step() -> None:
    model = parse_model_config(tiny_config())
    config = options(compute="float32", offload_activations=True)
    device: Any = ReferenceDevice()
    device.shared_memory = False
    device.copied_alongside = lambda work: np.inf
    endless = Rates(*[np.inf] * 8)
    rates = replace(endless, matmul=7.0)
    before, after = (
        speed.step_seconds(replace(config, keep_projections=kept), model, device, rates) for kept in (0, 3)
    )
    width = model.q_size_of(0) + 2 * model.kv_size_of(0) + 2 * model.mlp_width
    saved = model.num_hidden_layers * 2.0 * ROWS * TOKENS * model.hidden_size * width
    assert before - after == pytest.approx(saved / 7.0, rel=1e-12)
    device.copied_alongside = lambda work: 0.0
    rates = replace(endless, link=7.0)
    exposed = speed.step_seconds(replace(config, keep_projections=3), model, device, rates)
    assert exposed == pytest.approx(2 * model.num_hidden_layers * offloaded_bytes(config, model, 3) / 7.0, rel=1e-12)


def test_gate_and_up_are_kept_in_place_of_whole_layers(
    make_checkpoint: Any, card: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as fit, if that saves more; a number that is given stays."""
    folder = make_checkpoint(num_hidden_layers=8)
    model = load_model_config(folder)
    config = options(gradient_checkpointing="auto", keep_attention=None, compute="float32", **CHUNKED)
    hidden = offloaded_bytes(config, model, 3)
    monkeypatch.setattr(type(card), "copied_alongside", lambda self, work: hidden)
    rates = Rates(memory=np.inf, link=np.inf, projections=np.inf)  # in so small a model these take the most time
    monkeypatch.setattr(keep_module, "Rates", lambda: rates)
    alone = replace(config, gradient_checkpointing=7, offload_activations=7, keep_norms=False, keep_projections=3)
    plan, more = (plan_run(replace(alone, keep_gate_up=n), model, folder, card, 1) for n in (0, 4))
    assert plan is not None and more is not None
    peak = more.reserved_bytes
    assert 0 < more.peak_bytes - plan.peak_bytes <= 4 * 1.2 * gate_up_bytes(alone, model)
    limit = peak * 64 // 63 + 64
    found = {}
    for given in (None, 1):
        asked = replace(config, memory_limit=str(limit), keep_projections=3 if given else None, keep_gate_up=given)
        fit = Fit(asked, model, folder, card, 1, limit)
        found[given] = settle(asked, fit, Room(limit, ""), World(), pinned=False)
    assert found[1].mode["keep_gate_up"] == 1
    chosen = found[None]
    assert chosen.mode["keep_gate_up"] >= 1 and chosen.plan is not None
    assert chosen.plan.reserved_bytes <= limit
    plain = replace(chosen.plan.config, keep_gate_up=None)
    assert fit.step_seconds(chosen.plan.config, rates) < fit.step_seconds(plain, rates)


def a_plan(config: RunOptions) -> Any:
    """Return a plan that takes 100 bytes."""
    return SimpleNamespace(config=config, reserved_bytes=100)


@pytest.mark.parametrize(
    ("most", "gain", "layers", "kept"),
    [(8, 0.6, 7, 5), (4, 0.6, 7, 4), (3, 0.6, 5, None), (8, 0.3, 5, 1), (8, -0.1, 5, None)],
)
@pytest.mark.parametrize("offloaded", [5, 4])
def test_the_faster_of_layers_and_gate_and_up_are_kept(
    most: int, gain: float, layers: int, kept: int | None, offloaded: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer takes two chunks and saves a second, a chunk saves `gain`; at most `most` chunks fit, whatever free bytes
    let expect. A plan without is left if it is as fast."""
    model = parse_model_config(tiny_config(num_hidden_layers=8))
    given = {"gradient_checkpointing": 5, "offload_activations": offloaded, "keep_projections": 3}
    config = options(**given, **CHUNKED)
    chunk = gate_up_bytes(config, model)
    asked = replace(config, keep_projections=None)
    fit = Fit(asked, model, "", ReferenceDevice(), 1, 100 + int(1.5 * chunk), peaks={0: 0, 2: int(4 * chunk)})

    def seconds(self: Fit, config: Any, rates: Any) -> float:
        return float(config.gradient_checkpointing - gain * (config.keep_gate_up or 0))

    monkeypatch.setattr(Fit, "step_seconds", seconds)
    monkeypatch.setattr(Fit, "fitting", lambda self, c: a_plan(c) if c.keep_gate_up <= most else None)
    plan = a_plan(config)
    found = with_gate_up(fit, plan)
    expected = config
    if kept is not None:
        moved = layers if offloaded == 5 else 4
        expected = replace(config, gradient_checkpointing=layers, offload_activations=moved, keep_gate_up=kept)
    assert found.config == expected and (found is plan) == (kept is None)
    assert with_gate_up(replace(fit, config=replace(asked, keep_gate_up=1)), plan) is plan


@pytest.mark.parametrize(("gain", "fits", "fewer"), [(0.9, True, True), (0.9, False, False), (1.1, True, False)])
def test_a_layer_less_is_recomputed_if_that_fits_and_is_faster(
    gain: float, fits: bool, fewer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gain: seconds that projections of all layers save; a layer that is not recomputed saves one."""
    model = parse_model_config(tiny_config(num_hidden_layers=8))
    plan = a_plan(options(gradient_checkpointing=5, offload_activations=5, keep_projections=3))
    fit = Fit(replace(plan.config, keep_projections=None), model, "", ReferenceDevice(), 1, 100)
    seconds = {3: 5 - gain, None: 4.0}
    monkeypatch.setattr(Fit, "step_seconds", lambda self, c, rates: seconds[c.keep_projections])
    monkeypatch.setattr(Fit, "fitting", lambda self, c: a_plan(c) if fits else None)
    found = with_fewer_recomputed(fit, plan)
    changes = {"gradient_checkpointing": 4, "offload_activations": 4, "keep_projections": None}
    assert found.config == replace(plan.config, **changes if fewer else {}) and (found is plan) != fewer
    given = Fit(plan.config, model, "", ReferenceDevice(), 1, 100)
    assert with_fewer_recomputed(given, plan) is plan


def test_it_needs_what_it_adds_to(capsys: pytest.CaptureFixture[str]) -> None:
    words, model = ["finetune", "--data", "x", "--out", "y", "--keep-projections"], parse_model_config(tiny_config())
    assert cli.main([*words, "1", "--no-keep-attention"]) == 2
    assert (
        "--no-keep-attention would recompute attention outputs, which it keeps too: give only one"
        in capsys.readouterr().err
    )
    assert cli.main([*words, "1", "--no-gradient-checkpointing"]) == 2
    assert "--keep-projections: --no-gradient-checkpointing computes nothing again" in capsys.readouterr().err
    assert cli.main([*words, "6"]) == 2
    assert "must be between 0 and 5" in capsys.readouterr().err
    alone = options(keep_attention=None, keep_projections=1)
    assert keeps_attention(alone, model) and kept_projections(alone, model) == 1
    assert kept_projections(replace(alone, gradient_checkpointing="auto", max_length=8), model) == 0


def test_a_first_step_with_too_little_memory_keeps_nothing(make_checkpoint: Any, card: Any) -> None:
    folder, said = make_checkpoint(num_hidden_layers=8), list[str]()
    model, config = load_model_config(folder), options(keep_gate_up=8, compute="float32")
    plans = [plan_run(replace(config, keep_gate_up=kept), model, folder, card, 1) for kept in (None, 8)]
    peaks = [plan.reserved_bytes for plan in plans if plan is not None]
    built = build_trainable(config, model, folder, card, positions=TOKENS)
    optimizer = build_optimizer(config, built.parameters)
    card.trim()
    card.limit_memory(sum(peaks) // 2)
    trainer = Trainer(built.model, optimizer, config, say=said.append)
    trainer.step(random_step(0, TOKENS, 40, ROWS), 1e-2)
    assert np.isfinite(trainer.read_history()[0, 0])
    assert "too little memory" in said[0] and built.model.kept == NOTHING
