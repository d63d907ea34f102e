"""--keep-dequantized: steps of the same bits without decoding, chosen by memory, and as much of it as was planned."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.train.conftest import tiny_config
from tests.wgsl.launches import launched
from wgrad.device.errors import WgradError
from wgrad.device.memory import Array
from wgrad.train.data.packing import Batch, Step
from wgrad.train.model.load_config import load_model_config, parse_model_config
from wgrad.train.options.finetune_config import RunOptions
from wgrad.train.plan import fastest
from wgrad.train.plan.fit import Fit, words
from wgrad.train.plan.plan import Plan, plan_run, run_dry
from wgrad.train.plan.settle import Settled, settle
from wgrad.train.ranks.world import World
from wgrad.train.step.build import build_optimizer, build_trainable
from wgrad.train.step.dequantized import candidates, kept_share
from wgrad.train.step.room import Room
from wgrad.train.step.trainer import Trainer

SHAPE: dict[str, Any] = {
    "max_length": 64,
    "batch_size": 2,
    "gradient_accumulation_steps": 1,
    "lora_r": 4,
    "sample": False,
    "compute": "float32",
}


def options(**changes: Any) -> RunOptions:
    return RunOptions(**(SHAPE | {"gradient_checkpointing": False, "stream_weights": "off"} | changes))


def step_of(index: int, config: RunOptions) -> Step:
    rows, length = config.batch_size, config.max_length
    ids = np.random.default_rng(index).integers(0, 40, (rows, length)).astype(np.int32)
    positions = np.tile(np.arange(length, dtype=np.int32), (rows, 1))
    return Step(index, 0, [Batch(ids, np.roll(ids, -1, axis=1), positions, np.zeros_like(ids), ids.size, ids.size)])


KINDS: dict[str, dict[str, Any]] = {
    "lora": {"double_quant": False},
    "half recomputed, dropout": {"gradient_checkpointing": 2, "lora_dropout": 0.25},
    "dora": {"use_dora": True},
}


@pytest.mark.parametrize("kind", KINDS)
def test_steps_and_evaluations_have_the_same_bits(
    kind: str, make_checkpoint: Any, card: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three steps, of which the last is a replay; with all weights kept nothing is decoded, with some less is. With all
    weights gated activations are kept, too."""
    folder = make_checkpoint(num_hidden_layers=4)
    found, counts = list[Any](), list[int]()
    for keep in (None, 5, True):
        config = options(keep_dequantized=keep, keep_gated=keep is True, **KINDS[kind])
        built = build_trainable(config, load_model_config(folder), folder, card, positions=64)
        trainer = Trainer(built.model, build_optimizer(config, built.parameters), config)
        decodes = launched(card, monkeypatch, "quantize_decode")
        for index in range(3):
            trainer.step(step_of(index, config), 1e-2)
        losses, held_out = trainer.read_history()[:, 0], trainer.evaluate(step_of(9, config).batches)
        counts.append(len(decodes))
        monkeypatch.undo()
        found.append([losses, card.download(built.parameters.data), np.array(held_out)])
        assert trainer.dequantized.count == (len(trainer.dequantized.sizes) if keep is True else keep or 0)
        del trainer, built
    for others in found[1:]:
        for first, second in zip(found[0], others, strict=True):
            np.testing.assert_array_equal(first, second)
    dora = KINDS[kind].get("use_dora", False)  # which decodes weights for the lengths of their rows besides
    assert counts[0] > counts[1] > counts[2] and (dora or counts[2] == 0)
    assert np.ptp(found[0][0]) > 0


# Families whose layers multiply with other weights: stacks of q, k and v, or of gate and up, or their parts; experts.
# Their projections are large enough for stacks.
WIDE = {"hidden_size": 128, "intermediate_size": 192, "num_key_value_heads": 2, "head_dim": 32}
FAMILIES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {},
    "Qwen3ForCausalLM": {},
    "Phi3ForCausalLM": {},
    "Qwen3MoeForCausalLM": {},
    "Qwen3NextForCausalLM": {},
    "FalconH1ForCausalLM": {"mlp_multipliers": [0.5, 0.25]},
    "DeepseekV2ForCausalLM": {"num_key_value_heads": 4},
}
RUNS: dict[str, dict[str, Any]] = {
    "qat": {"qat": "q4_0", "target_modules": ("q_proj", "down_proj")},
    "parts adapted": {"target_modules": ("q_proj", "up_proj")},
}
CASES = [(architecture, "") for architecture in FAMILIES] + [("LlamaForCausalLM", run) for run in RUNS]


@pytest.mark.parametrize(("architecture", "run"), CASES)
def test_what_is_kept_is_what_layers_multiply_with(
    architecture: str, run: str, make_checkpoint: Any, card: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers multiply with each that is kept, and decode no other weight of a linear layer."""
    card.stacks_weights = True
    folder, dry = make_checkpoint(architecture, **(WIDE | FAMILIES[architecture])), card.dry_run()
    get, keep, cache = dry.dequantized.get, dry.dequantized.keep, dry.dequantized
    kept, used, decoded = list[Any](), Counter[int](), list[Any]()

    def noted_get(weight: Any, form: Any, decode: Any) -> Any:
        def noted() -> Any:
            decoded.append(weight)
            return decode()

        used[id(weight)] += 1
        return get(weight, form, noted)

    def noted_keep(weight: Any, form: Any, values: Any) -> None:
        kept.append(weight)
        keep(weight, form, values)

    monkeypatch.setattr(cache, "get", noted_get)
    monkeypatch.setattr(cache, "keep", noted_keep)
    monkeypatch.setattr(card, "dry_run", lambda: dry)
    config = options(keep_dequantized=True, gradient_checkpointing=True, **RUNS.get(run, {}))
    plan = run_dry(config, load_model_config(folder), folder, card, 8, None)
    assert kept and all(used[id(weight)] >= 4 for weight in kept)  # an evaluation, a sample, forward and backward
    rounded = 2 * 2 if run == "qat" else 0  # weights, which are decoded in each pass
    assert len({id(weight) for weight in decoded} - {id(weight) for weight in kept}) == rounded
    assert {id(weight) for weight in kept} <= {id(weight) for weight in decoded}
    assert len(kept) >= sum(map(bool, plan.dequantized.sizes)) > 0


AUTO: dict[str, Any] = {"gradient_checkpointing": "auto", "compute": "float32"}


def settled(config: RunOptions, folder: Any, card: Any, limit: int, before: Any = None) -> Settled[RunOptions]:
    fit = Fit(config, load_model_config(folder), folder, card, 8, limit)
    return settle(config, fit, Room(limit, "free"), World(), pinned=True, before=before)


def peak(plan: Plan) -> int:
    taken: int = plan.reserved_bytes
    return taken


def test_as_many_are_kept_as_memory_allows(make_checkpoint: Any, card: Any) -> None:
    """All, some or none by the limit: a byte less than all take keeps fewer. What options ask for stays."""
    folder, config = make_checkpoint(num_hidden_layers=4), options(**AUTO)
    model, fixed = load_model_config(folder), {**AUTO, "gradient_checkpointing": False}
    none = run_dry(options(**fixed), model, folder, card, 8, None)
    whole = run_dry(options(**fixed, keep_dequantized=True), model, folder, card, 8, None)
    count = len(candidates(model, 0))
    assert whole.held_bytes - none.held_bytes == whole.dequantized.nbytes == sum(none.dequantized.sizes) > 0
    assert whole.activation_bytes == none.activation_bytes

    def kept(limit: int, **options: Any) -> tuple[Any, Settled[RunOptions]]:
        found = settled(replace(config, **options), folder, card, limit)
        assert found.plan is not None and peak(found.plan) <= limit
        return found.mode.get("keep_dequantized"), found

    # Then gated activations, which the backward computes again otherwise.
    gated = run_dry(options(**fixed, keep_dequantized=True, keep_gated=True), model, folder, card, 8, None)
    products = 4 * 128 * model.mlp_width * 4
    assert 0 < gated.activation_bytes - whole.activation_bytes <= products
    for limit in (peak(whole) + products, 1 << 30):
        number, found = kept(limit)
        assert number is True and found.mode["keep_gated"] is True and found.plan.peak_bytes == gated.peak_bytes  # type: ignore[union-attr]
        assert words(found.mode) == "--no-gradient-checkpointing --keep-gated --keep-dequantized"
        assert found.lines[0].endswith("with less, gate times up is recomputed")
    assert kept(1 << 30, memory_limit="1GiB")[1].mode["keep_gated"] is True
    assert all("keep_gated" not in kept(1 << 30, **more)[1].mode for more in ({"keep_dequantized": 3}, {"full": True}))
    number, found = kept(1 << 30, target_modules=("q_proj",))  # nothing saves them
    assert number is True and "keep_gated" not in found.mode
    number, found = kept(peak(whole) + products - 1)
    assert number is True and "keep_gated" not in found.mode
    number, found = kept(peak(whole))
    (line,) = found.lines
    assert number is True and f"weights: all {count} are kept dequantized (" in line, line
    assert words(found.mode) == "--no-gradient-checkpointing --keep-dequantized"
    assert found.plan.dequantized.nbytes == whole.dequantized.nbytes  # type: ignore[union-attr]
    some, found = kept(peak(whole) - 1)
    assert 0 < some < count and found.mode["gradient_checkpointing"] is False
    assert f"weights: {some} of {count} are kept" in found.lines[0]
    assert kept(peak(none))[0] is None
    assert kept(peak(whole), keep_dequantized=False)[0] is False
    assert kept(peak(whole), keep_dequantized=3)[0] == 3
    # Held to a limit, some less.
    limit = (peak(none) + peak(whole)) // 2
    limited, found = kept(limit, memory_limit=str(limit))
    assert 0 < limited < count and found.plan.dequantized.count == limited  # type: ignore[union-attr]
    # Layers are kept before weights are.
    limit = none.peak_bytes * 9 // 10
    open_, forbidden = (kept(limit, keep_dequantized=keep)[1].mode for keep in (None, False))
    assert open_["gradient_checkpointing"] == forbidden["gradient_checkpointing"] > 0
    # An integrated GPU shares its memory, of which no more is taken than has to be.
    card.shared_memory = True
    assert kept(peak(whole))[0] is None


@pytest.mark.parametrize("keep", [3, True])
def test_steps_take_what_was_planned(keep: Any, make_checkpoint: Any, card: Any) -> None:
    folder, config = make_checkpoint(), options(keep_dequantized=keep)
    model, before = load_model_config(folder), card.memory().in_use_bytes
    plan = run_dry(config, model, folder, card, 8, None)
    built = build_trainable(config, model, folder, card, positions=0)
    trainer = Trainer(built.model, build_optimizer(config, built.parameters), config)
    assert card.memory().in_use_bytes - before == plan.held_bytes
    card.reset_peak()
    for index in range(2):
        trainer.step(step_of(index, config), 1e-2)
    trainer.evaluate(step_of(9, config).batches)
    assert card.memory().peak_bytes - before == plan.held_bytes + plan.activation_bytes


def test_a_run_that_goes_on_keeps_its_choice(make_checkpoint: Any, card: Any) -> None:
    folder, config = make_checkpoint(), options(**AUTO)
    before = {"gradient_checkpointing": False, "offload_activations": False, "stream_weights": "off"}
    for kept in (True, 3):
        found = settled(config, folder, card, 1 << 30, before | {"keep_dequantized": kept})
        assert found.mode["keep_dequantized"] == kept and found.plan is not None
    forbidden = replace(config, keep_dequantized=False)
    found = settled(forbidden, folder, card, 1 << 30, before | {"keep_dequantized": True})
    assert found.mode["keep_dequantized"] is False and found.plan is not None and not found.plan.dequantized.nbytes


def test_too_little_memory_names_what_it_would_take(make_checkpoint: Any, card: Any) -> None:
    folder = make_checkpoint(num_hidden_layers=4)
    model, config = load_model_config(folder), options(keep_dequantized=True)
    limit = run_dry(replace(config, keep_dequantized=None), model, folder, card, 8, None).reserved_bytes
    with pytest.raises(WgradError, match=r"--memory-limit: .* with --no-keep-dequantized it takes"):
        plan_run(replace(config, memory_limit=str(limit)), model, folder, card, 8)
    with pytest.raises(WgradError, match="--keep-dequantized: --stream-weights on"):
        replace(config, gradient_checkpointing=True, stream_weights="on")


@pytest.mark.parametrize("lacks", ["", "while weights are dequantized", "in the first step"])
def test_where_others_take_the_memory_a_run_goes_on_without(lacks: str, make_checkpoint: Any, card: Any) -> None:
    folder, said, before = make_checkpoint(num_hidden_layers=3), list[str](), card.memory().in_use_bytes
    config, model = options(keep_dequantized=True), load_model_config(folder)
    least = run_dry(replace(config, keep_dequantized=None, gradient_checkpointing=True), model, folder, card, 8, None)
    built = build_trainable(config, model, folder, card, positions=0)
    optimizer = build_optimizer(config, built.parameters)
    card.trim()
    if lacks:
        card.limit_memory((card.memory().reserved_bytes if lacks.startswith("while") else peak(least)) + (1 << 16))
    trainer = Trainer(built.model, optimizer, config, say=said.append)
    if not lacks.startswith("in"):
        card.limit_memory(None)
    trainer.step(step_of(0, config), 1e-2)
    assert np.isfinite(trainer.read_history()[0, 0])
    assert card.memory().in_use_bytes - before <= least.held_bytes + (0 if lacks else 1 << 30)
    assert bool(said) == bool(lacks) and bool(trainer.dequantized.nbytes) == (not lacks)


@pytest.mark.parametrize("tied", [False, True])
def test_the_output_layer_is_kept_where_a_device_has_a_faster_copy(
    tied: bool, make_checkpoint: Any, card: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, config, kept = make_checkpoint(tie_word_embeddings=tied), options(keep_dequantized=1), list[Any]()
    built = build_trainable(config, load_model_config(folder), folder, card, positions=64)
    monkeypatch.setattr(card, "dequantized_bytes", lambda weight, *_: 7 if isinstance(weight, Array) else 3)
    monkeypatch.setattr(card, "keep_dequantized", lambda weight, *_: kept.append(weight))
    found = Trainer(built.model, build_optimizer(config, built.parameters), config).dequantized
    assert kept == [built.model.head] and found.count == 1 and found.sizes[0] == 7


def test_small_weights_and_recomputed_layers_come_first(make_checkpoint: Any) -> None:
    model = load_model_config(make_checkpoint(num_hidden_layers=2))
    every = candidates(model, 1)
    modules = [candidate.modules[-1].removeprefix("model.layers.") for candidate in every]
    assert modules.pop(0) == "lm_head.weight" and every.pop(0).dense
    assert modules == [
        "0.self_attn.o_proj", "1.self_attn.o_proj", "0.self_attn.v_proj", "0.mlp.down_proj",
        "1.mlp.down_proj", "1.self_attn.v_proj", "0.mlp.up_proj", "1.mlp.up_proj",
    ]  # fmt: skip
    assert kept_share(RunOptions(), model, 1) == 0 and kept_share(RunOptions(keep_dequantized=True), model, 1) == 1
    first = every[0].uses * every[0].elements
    share = first / sum(candidate.uses * candidate.elements for candidate in every)
    assert kept_share(RunOptions(keep_dequantized=1), model, 1) == share
    assert kept_share(RunOptions(keep_dequantized=True, full=True), model, 1) == 0


def test_a_bound_of_the_speed_leaves_no_room_for_the_output_layer() -> None:
    """Many devices keep nothing of it: with room for it alone, they keep all weights of the layers."""
    fit = SimpleNamespace(model_config=parse_model_config(tiny_config(num_hidden_layers=2, vocab_size=5000)))
    head, *others = candidates(fit.model_config, 0)
    kept = 2 * sum(candidate.elements for candidate in others[:3])
    assert kept < 2 * head.elements
    for free, count in ((kept, 3), (kept - 1, 2), (2 * head.elements, len(others))):
        assert fastest._most_weights(fit, options(), free) == count
