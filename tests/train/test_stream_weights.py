"""--stream-weights: the same bits as with weights on the device, in less of its memory; and the cache of quantized
weights."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from tests.conftest import wgpu_sibling
from tests.families.common import GEMMA4_EXPERTS
from tests.train.conftest import choose_card, discrete_sibling
from wgrad.device.errors import OutOfMemory, TooLarge
from wgrad.device.files import TEMPORARY
from wgrad.device.memory import Block, Pool
from wgrad.train.commands import cache as cache_command
from wgrad.train.commands import cli
from wgrad.train.commands.plan import curve, described, memory_table
from wgrad.train.data import standard_input
from wgrad.train.data.packing import BatchStream, Document
from wgrad.train.inference.compile_ahead import Placing, compile_ahead
from wgrad.train.inference.generation import generate_ids
from wgrad.train.model import load_streamed as module
from wgrad.train.model.host_layers import ResidentLayer
from wgrad.train.model.load_config import load_model_config
from wgrad.train.model.load_streamed import cached_files, chosen_share, load_streamed
from wgrad.train.model.load_weights import load_frozen
from wgrad.train.model.stacks import QKV
from wgrad.train.model.streamed_weights import StreamedWeights
from wgrad.train.model.weights import EMBEDDING, HEAD
from wgrad.train.options.finetune_config import RunOptions
from wgrad.train.options.generate_config import GREEDY
from wgrad.train.plan import fit as fit_module
from wgrad.train.plan import plan as plan_module
from wgrad.train.plan.fit import Fit
from wgrad.train.plan.plan import plan_run, run_dry
from wgrad.train.step import find_model
from wgrad.train.step.build import build_frozen, build_optimizer, build_trainable
from wgrad.train.step.trainer import Trainer
from wgrad.train.terminal.progress import Display

SHAPE: dict[str, Any] = {"num_hidden_layers": 5}  # one buffer of the two has three layers
SHAPES_OF_KINDS: dict[str, dict[str, Any]] = {  # whose layers are of several kinds
    "Gemma4ForCausalLM": GEMMA4_EXPERTS,
    "NemotronHForCausalLM": {"hybrid_override_pattern": "EM*E-ME", "moe_latent_size": 22, "mlp_bias": True},
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    for user in (module, find_model, standard_input):  # `cache clear` empties all of them
        monkeypatch.setattr(user, "cache_folder", lambda name: folder / name)
    return folder / "weights"


def options(**given: Any) -> RunOptions:
    shape: dict[str, Any] = {
        "max_length": 21,
        "batch_size": 2,
        "gradient_accumulation_steps": 1,
        "lora_r": 4,
        "max_steps": 3,
    }
    shape |= {"logging_steps": 1, "sample": False, "gradient_checkpointing": True, "stream_weights": "off"}
    return RunOptions(**(shape | given))


def train(config: RunOptions, folder: Path, device: Any) -> list[np.ndarray]:
    """Return losses of steps (all but the first two replayed) and of evaluations between them, a text, and the trained
    parameters."""
    built = build_trainable(config, load_model_config(folder), folder, device, positions=64)
    trainer = Trainer(built.model, build_optimizer(config, built.parameters), config)
    generator = np.random.default_rng(0)
    documents = [Document(generator.integers(0, 40, 21).astype(np.int32), np.ones(21, bool)) for _ in range(16)]
    losses, held_out = [], []
    for step in BatchStream(documents, config):
        trainer.step(step, 1e-2)
        losses.append(trainer.read_history()[0, 0])
        held_out.append(trainer.evaluate(step.batches))
    with device.borrowing():  # as a run's samples
        text = list(generate_ids(built.model, [5, 6, 7], 6, GREEDY))
    return [np.array(losses), np.array(held_out), np.array(text), device.download(built.parameters.data)]


@pytest.mark.parametrize(
    "architecture, resident",
    [
        ("LlamaForCausalLM", 2),
        ("Qwen3MoeForCausalLM", 0),
        ("GptOssForCausalLM", 2),
        ("Gemma4ForCausalLM", 1),
        pytest.param("NemotronHForCausalLM", 2, marks=pytest.mark.all),
    ],
)
def test_the_bits_are_those_of_weights_on_the_device(
    architecture: str, resident: int, make_checkpoint: Any, card: Any
) -> None:
    """Some layers stay on the device, or none. The plan has the memory that it takes."""
    shape = SHAPES_OF_KINDS.get(architecture, SHAPE)
    folder = make_checkpoint(architecture, **shape, tie_word_embeddings=True)
    adapted: dict[str, Any] = {"target_modules": ("q_proj", "o_proj", "down_proj")}  # of experts, where there are any
    adapted["gradient_accumulation_steps"] = 2 if architecture.startswith("Llama") else 1
    config = options(stream_weights="on", resident_layers=resident, offload_activations=True, **adapted)
    expected = train(options(**adapted), folder, wgpu_sibling())
    assert len(set(expected[0].tolist())) == 3
    plan, there = (plan_run(c, load_model_config(folder), folder, card, 3) for c in (config, options(**adapted)))
    assert plan is not None and there is not None and plan.held_bytes < there.held_bytes
    kept = card.memory().in_use_bytes
    for value, wanted in zip(train(config, folder, card), expected, strict=True):
        np.testing.assert_array_equal(value, wanted)
    assert plan.peak_bytes == pytest.approx(card.memory().peak_bytes - kept, rel=0.05)
    assert plan.host_bytes == pytest.approx(card.host_memory().peak_bytes, rel=0.05)


def test_rows_in_chunks_share_what_is_decoded_of_a_streamed_weight(
    make_checkpoint: Any, card: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only this layer's weight is shared, since the next one reuses its memory, also in recordings and plans."""
    monkeypatch.setattr("wgrad.train.model.model.MLP_CHUNKS_ABOVE", 0)
    monkeypatch.setattr("wgrad.train.model.model.MLP_CHUNK_BYTES", 6 * 88 * 4 * 64)
    folder, config = (
        make_checkpoint(**SHAPE),
        options(max_length=70, stream_weights="on"),
    )
    expected = train(replace(config, stream_weights="off"), folder, wgpu_sibling())
    plan, kept = plan_run(config, load_model_config(folder), folder, card, 3), card.memory().in_use_bytes
    for value, wanted in zip(train(config, folder, card), expected, strict=True):
        np.testing.assert_array_equal(value, wanted)
    assert plan is not None and plan.peak_bytes == pytest.approx(card.memory().peak_bytes - kept, rel=0.05)


def test_a_limit_places_what_is_recorded_and_changes_no_bit(
    make_checkpoint: Any, card: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This includes long rows in chunks, whose gradients overwrite arrays that nothing else reads."""
    monkeypatch.setattr("wgrad.train.model.model.MLP_CHUNKS_ABOVE", 0)
    monkeypatch.setattr("wgrad.train.model.model.MLP_CHUNK_BYTES", 6 * 88 * 4 * 64)
    config = options(max_length=70, stream_weights="on", offload_activations=True)
    folder, recorded = make_checkpoint(**SHAPE), list[tuple[bool, int]]()
    end = Pool.end_capture

    def noted(pool: Pool) -> set[Block]:
        size = sum(block.nbytes for block in pool._touched or ())
        recorded.append((pool._placed is not None, size))
        return end(pool)

    monkeypatch.setattr(Pool, "end_capture", noted)
    expected = train(config, folder, card)
    without = max(size for _, size in recorded)
    assert not any(placed for placed, _ in recorded)
    recorded.clear()
    card.trim()
    card.limit_memory(1 << 30)
    for value, wanted in zip(train(config, folder, card), expected, strict=True):
        np.testing.assert_array_equal(value, wanted)
    step = max(recorded, key=lambda found: found[1])
    assert step[0] and step[1] < 0.9 * without


@pytest.mark.parametrize("stream", ["off", "on"])
def test_an_evaluation_lies_where_steps_have_their_arrays(make_checkpoint: Any, card: Any, stream: str) -> None:
    """A recorded step's memory is idle during an evaluation, which takes no more, and changes no step."""
    folder, config = make_checkpoint(**SHAPE), options(stream_weights=stream, max_length=70)
    generator, losses = np.random.default_rng(0), list[list[float]]()
    documents = [Document(generator.integers(0, 40, 70).astype(np.int32), np.ones(70, bool)) for _ in range(16)]
    for evaluated in (False, True):
        built = build_trainable(config, load_model_config(folder), folder, card, positions=96)
        trainer, found = Trainer(built.model, build_optimizer(config, built.parameters), config), list[float]()
        for step in BatchStream(documents, config):
            trainer.step(step, 1e-2)
            found.append(trainer.read_history()[0, 0])
            if evaluated and step.index:
                card.trim()
                before = card.memory().reserved_bytes
                trainer.evaluate(step.batches)
                assert card.memory().reserved_bytes - before < 200_000
        losses.append(found)
        del built, trainer
    assert losses[0] == losses[1] and len(set(losses[0])) == 3


@pytest.mark.parametrize("tied", [False, True])
def test_an_embedding_that_is_no_head_is_read_from_main_memory(make_checkpoint: Any, card: Any, tied: bool) -> None:
    """This needs no option, since nothing else reads it. The bits are the same, and the plan includes it."""
    folder, config = make_checkpoint(tie_word_embeddings=tied, dtype="bfloat16"), options()
    model = load_model_config(folder)
    wanted = train(config, folder, there := wgpu_sibling())
    plan = plan_run(config, model, folder, card, 3)
    assert plan is not None
    for value, expected in zip(train(config, folder, card), wanted, strict=True):
        np.testing.assert_array_equal(value, expected)
    table = 0 if tied else model.vocab_size * model.hidden_size * 2
    assert table <= card.host_memory().peak_bytes <= 1.3 * table and there.host_memory().peak_bytes == 0
    assert plan.host_bytes == plan.host_weight_bytes == card.host_memory().peak_bytes
    assert plan.peak_bytes == pytest.approx(card.memory().peak_bytes, rel=0.05)
    assert there.memory().peak_bytes - card.memory().peak_bytes == pytest.approx(table, rel=0.1)
    without, refusing = card.dry_run(), card.dry_run()
    without.host_buffers, refusing.empty_host = False, Mock(side_effect=OutOfMemory("none that a device may reach"))
    for dry in (without, refusing):
        weights = load_frozen(folder, model, dry, contents=False)
        assert weights[EMBEDDING].lease.of(dry._pool) and dry.host_memory().peak_bytes == 0
    assert refusing.empty_host.called == (not tied)


def test_it_trains_below_a_limit_at_which_the_weights_do_not_fit(
    make_checkpoint: Any, card: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`auto` streams below this limit only. A plan beyond another limit than of memory is passed over."""
    sizes = {"num_hidden_layers": 14, "hidden_size": 96, "intermediate_size": 256, "head_dim": 24}
    folder = make_checkpoint(**sizes, dtype="bfloat16")
    model = load_model_config(folder)
    small = {"target_modules": ("q_proj",), "lora_r": 1, "batch_size": 1, "sample": True}
    there, streamed = (
        plan_run(options(stream_weights=choice, **small), model, folder, card, 3) for choice in ("off", "on")
    )
    assert there is not None and streamed is not None
    kept, needed = card.memory().reserved_bytes, streamed.reserved_bytes
    assert needed < 0.8 * there.dry.memory().peak_reserved_bytes
    auto = options(stream_weights="auto", memory_limit=str(needed + (needed >> 4)), **small)
    plan = plan_run(auto, model, folder, card, 3)
    assert plan is not None and plan.config.stream_weights == "on"
    settled = (plan.config.resident_layers, plan.dry.memory().peak_reserved_bytes)
    assert settled[0] and needed < settled[1] <= needed + (needed >> 4)

    def with_fewer(config: RunOptions, *given: Any) -> Any:
        if config.resident_layers == settled[0]:
            raise TooLarge("beyond a binding")
        return run_dry(config, *given)

    with monkeypatch.context() as patch:
        patch.setattr(plan_module, "run_dry", with_fewer)
        fewer = plan_run(auto, model, folder, card, 3)
    assert fewer is not None and fewer.config.resident_layers == settled[0] - 1
    none = plan_run(replace(auto, resident_layers=0), model, folder, card, 3)
    assert none is not None and none.config.resident_layers == 0
    assert none.dry.memory().peak_reserved_bytes < settled[1] and none.held_bytes < plan.held_bytes
    roomy = plan_run(options(stream_weights="auto", memory_limit="1GiB", **small), model, folder, card, 3)
    assert roomy is not None and roomy.config.stream_weights == "off"
    card.limit_memory(kept + needed + (needed >> 4))
    with pytest.raises(OutOfMemory, match="the memory limit of"):
        train(options(**small), folder, card)
    card.trim()
    losses = train(plan.config, folder, card)[0]
    assert losses[-1] < losses[0] and card.memory().peak_reserved_bytes <= kept + needed + (needed >> 4)


def test_loading_takes_what_its_dry_run_takes(make_checkpoint: Any) -> None:
    """This includes free blocks of quantization, which remain in the pool. None is held while the next is made."""
    folder, device = make_checkpoint("MixtralForCausalLM", dtype="bfloat16"), discrete_sibling()
    model, dry, before = load_model_config(folder), device.dry_run(), device.memory()
    loaded = [load_streamed(folder, model, at, contents=at is device) for at in (dry, device)]
    found, expected = device.memory(), dry.memory()
    assert found.in_use_bytes - before.in_use_bytes == expected.in_use_bytes
    assert found.peak_bytes - before.in_use_bytes == expected.peak_bytes
    assert found.peak_reserved_bytes - before.reserved_bytes == expected.peak_reserved_bytes
    assert expected.peak_reserved_bytes > 2 * expected.in_use_bytes
    del loaded


def test_weights_that_are_not_quantized_stream_too(make_checkpoint: Any, card: Any) -> None:
    card.stacks_weights = True  # of which none fits a stack
    folder = make_checkpoint(**SHAPE, dtype="float16")
    model, texts = load_model_config(folder), []
    for choice in ("off", "on"):
        built = build_frozen(model, folder, card, positions=32, quantize=False, stream_weights=choice)
        assert isinstance(built.weights, StreamedWeights) == (choice == "on")
        texts.append(list(generate_ids(built, [5, 6, 7], 8, GREEDY)))
    assert texts[0] == texts[1] and not cached_files()


def test_weights_that_stay_are_stacked_once(make_checkpoint: Any, card: Any) -> None:
    """The stacks of streamed layers are made whenever a layer comes."""
    card.stacks_weights = True
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}  # q, k and v of whole blocks
    folder, texts = make_checkpoint(**SHAPE, hidden_size=128, intermediate_size=192, **heads), []
    model = load_model_config(folder)
    for placed in ({}, {"stream_weights": "on", "resident": 2}):
        built: Any = build_frozen(model, folder, card, positions=32, **placed)  # type: ignore[arg-type]
        texts.append(list(generate_ids(built, [5, 6, 7], 8, GREEDY)))
    assert texts[0] == texts[1]
    assert sum(name.endswith(f"{QKV}.weight") for name in built.weights._layer_of) == 2


@pytest.mark.parametrize("shared", [False, True])
def test_nothing_moves_where_device_and_host_share_memory(make_checkpoint: Any, card: Any, shared: bool) -> None:
    folder, dry = make_checkpoint(**SHAPE), card.dry_run()
    dry.shared_memory = shared
    config = options(stream_weights="on", offload_activations=True, resident_layers=2)
    built = build_trainable(config, load_model_config(folder), folder, dry, positions=21, contents=False)
    weights = built.model.weights
    assert (built.model.offload > 0, isinstance(weights, StreamedWeights)) == (not shared, not shared)
    if isinstance(weights, StreamedWeights):
        assert sum(isinstance(layer, ResidentLayer) for layer in weights._layers) == 2


def test_layers_come_one_ahead_in_both_directions_and_no_oftener(
    make_checkpoint: Any, card: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_checkpoint(**SHAPE)
    weights = load_streamed(folder, load_model_config(folder), card)
    starts = [source.lease for source in weights._sources]
    moved, ahead = list[int](), list[int]()
    monkeypatch.setattr(card, "transfer", lambda source, out: moved.append(starts.index(source.lease)))
    for layer in (*range(5), *reversed(range(5))):
        weights.enter(layer)
        ahead.append(len(moved))
    assert moved == [0, 1, 2, 3, 4, 2, 1, 0]
    assert ahead == [2, 3, 4, 5, 5, 5, 6, 7, 8, 8]  # copies that were asked for before each layer's own work


def test_with_layers_that_stay_both_buffers_fill_ahead(
    make_checkpoint: Any, card: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one of them computes, two streamed layers are copied. They are spread evenly, beginning with the first."""
    folder = make_checkpoint(num_hidden_layers=7)
    model = load_model_config(folder)
    weights = load_streamed(folder, model, card, resident=3)
    assert weights._streamed == [1, 3, 5, 6]
    starts = [source.lease for source in weights._sources]
    moved, ahead = list[int](), list[int]()
    monkeypatch.setattr(card, "transfer", lambda source, out: moved.append(starts.index(source.lease)))
    for layer in (*range(7), *reversed(range(7))):
        weights.enter(layer)
        assert weights[f"model.layers.{layer}.mlp.up_proj.weight"]
        ahead.append(len(moved))
    assert moved == [0, 1, 2, 3, 1, 0]
    assert ahead == [2, 2, 3, 3, 4, 4, 4, 4, 5, 6, 6, 6, 6, 6]
    for count in (6, 7):
        weights = load_streamed(folder, model, card, resident=count)
        moved.clear()
        starts = [source.lease for source in weights._sources]
        for layer in (*range(7), *reversed(range(7))):
            weights.enter(layer)
            assert weights[f"model.layers.{layer}.mlp.up_proj.weight"]
        assert len(moved) == 7 - count


def test_a_run_keeps_layers_on_the_device_and_goes_on_with_as_many(
    make_checkpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A resumed run does so even with more memory. It says so and takes what was planned, to the same bits."""

    choose_card(monkeypatch)
    folder = make_checkpoint(num_hidden_layers=8, hidden_size=96, intermediate_size=256, head_dim=24)
    model, data = load_model_config(folder), tmp_path / "data.txt"
    data.write_text("\n".join(f"{n} and {n * n}." for n in range(200)))
    given: dict[str, Any] = {"target_modules": ("q_proj",), "lora_r": 1, "max_length": 32, "batch_size": 1}
    config = options(**given, compute="float32", offload_activations=True)
    streamed, there = (
        plan_run(replace(config, stream_weights=how), model, folder, discrete_sibling(), 1) for how in ("on", "off")
    )
    assert streamed is not None and there is not None
    least, most = (plan.dry.memory().peak_reserved_bytes for plan in (streamed, there))
    limit = (least + most) // 2
    given_words = ["finetune", "--model", folder, "--data", data, "--no-sample", "--eval-tokens", 100]
    given_words += ["--compute", "float32"]
    given_words += ["--target-modules", "q_proj", "--lora-r", 1, "--max-length", 32, "--batch-size", 1]
    given_words += ["--gradient-accumulation-steps", 1]
    found, peaks = list[int](), list[int]()
    for steps, *more in ((2, "--memory-limit", limit), (3, "--memory-limit", 3 * limit, "--resume")):
        assert cli.main([*map(str, [*given_words, "--out", tmp_path / "out", "--max-steps", steps, *more])]) == 0
        (line,) = [text for text in capsys.readouterr().out.splitlines() if "layers stay on the device" in text]
        found.append(int(line.split("those of ")[1].split()[0]))
        assert f"weights: those of {found[0]} of 8 layers stay on the device; activations: those of no layer" in line
        peaks.append(json.loads((tmp_path / "out" / "results.json").read_text())["peak_bytes"])
        assert streamed.peak_bytes < peaks[-1] <= limit
    info = json.loads((tmp_path / "out" / "checkpoints" / "step-3" / "trainer.json").read_text())
    assert 1 <= found[0] <= 5 and found[1] == found[0] == info["mode"]["resident_layers"]
    plan = plan_run(replace(config, **info["mode"], memory_limit=str(limit)), model, folder, discrete_sibling(), 1)
    assert plan is not None
    assert peaks[0] == pytest.approx(plan.peak_bytes, rel=0.05)
    fit = Fit(
        replace(config, stream_weights="on", offload_activations=False), model, folder, discrete_sibling(), 1, limit
    )
    points = {fit_module.words(point): point["relative_speed"] for point in curve(fit, plan)}
    (least,) = (speed for option, speed in points.items() if option.endswith("--stream-weights on"))
    (with_layers,) = (speed for option, speed in points.items() if f"--resident-layers {found[0]}" in option)
    assert with_layers >= least
    described_as = {**described(plan, model), "limit_bytes": None, "lacks": []}
    said = memory_table(described_as, plan, model)
    assert f", weights of {found[0]} of 8 layers on the device:" in said and "read for a new token" in said
    whole = [*given_words, "--out", tmp_path / "whole", "--max-steps", 3, "--gradient-checkpointing"]
    assert cli.main([*map(str, whole)]) == 0
    adapters = [(tmp_path / out / "adapter_model.safetensors").read_bytes() for out in ("out", "whole")]
    assert adapters[0] == adapters[1]


def test_text_is_written_with_as_many_layers_on_the_device_as_a_limit_allows(
    make_checkpoint: Any, card: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It takes the planned memory, and the text is the same. Free memory is a limit if streamed weights fit into it."""
    folder = make_checkpoint(num_hidden_layers=12, hidden_size=96, intermediate_size=256, head_dim=24)
    model, placings = load_model_config(folder), dict[Placing, int]()

    def write(device: Any, placing: Placing, **more: Any) -> list[int]:
        placed: dict[str, Any] = {"stream_weights": placing.stream, "resident": placing.resident}
        built = build_frozen(model, folder, device, positions=64, **placed, **more)
        return list(generate_ids(built, [5, 6, 7], 8, GREEDY))

    def run(dry: Any, placing: Placing) -> None:
        write(dry, placing, contents=False)
        placings[placing] = dry.memory().peak_reserved_bytes

    kept = card.memory().reserved_bytes
    for stream in ("on", "off"):
        assert compile_ahead(card, stream, None, model, run, Display()) == Placing(stream)  # without a limit
    least, most = placings[Placing("on")], placings[Placing("off")]
    limit = (least + most) // 2
    assert compile_ahead(card, "on", str(least), model, run, Display()).stream == "on"
    assert card._pool.limit == least  # which holds, though a plan would leave a part of it free
    found = compile_ahead(card, "auto", str(limit), model, run, Display())
    assert found.stream == "on" and 3 <= found.resident <= 9
    assert f"those of {found.resident} of 12 layers stay on the device" in capsys.readouterr().out
    assert found._replace(resident=found.resident + 1) not in placings or placings[found] <= limit
    card.limit_memory(kept + limit)
    text = write(card, found)
    assert card.memory().peak_reserved_bytes <= kept + limit
    card.limit_memory(None)
    assert text == write(wgpu_sibling(), Placing("off"))
    card.facts = {**card.facts, "memory_bytes": limit}
    for free, fits in ((0, False), (least * 17 // 16, False), (limit * 18 // 16, True)):  # 1 / 16 stays free
        monkeypatch.setattr(type(card), "free_memory", lambda self, free=free: free)
        found = compile_ahead(card, "auto", None, model, run, Display())
        assert found.stream == "on" and (found.resident > 2) is fits and (card._pool.limit is not None) is fits


@pytest.mark.parametrize("architecture", ["Qwen3MoeForCausalLM", "GptOssForCausalLM"])
def test_only_the_experts_that_a_token_chose_are_read(
    architecture: str, make_checkpoint: Any, card: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are read from main memory, to the same text: two of 8 experts for a token, one token at a time."""
    monkeypatch.setattr("wgrad.train.model.host_layers._COPIED_BELOW", 700)
    tied = architecture.startswith("Gpt")
    folder = make_checkpoint(architecture, **SHAPE, num_experts=8, num_local_experts=8, tie_word_embeddings=tied)
    model, transfer = load_model_config(folder), type(card).transfer
    assert chosen_share(model) == 0.25
    texts, copied = [], list[int]()

    def noted(self: Any, source: Any, out: Any) -> None:
        copied.append(source.nbytes)
        transfer(self, source, out)

    monkeypatch.setattr(type(card), "transfer", noted)
    for stream, resident, few in (("off", 0, 1), ("on", 0, 1), ("on", 1, 1), ("on", 1, 0)):
        monkeypatch.setattr(module, "chosen_share", lambda config, few=few: chosen_share(config) * few)
        built = build_frozen(model, folder, card, positions=64, stream_weights=stream, resident=resident)
        copied.clear()
        texts.append(list(generate_ids(built, [5, 6, 7], 8, GREEDY)))
        assert texts[0] == texts[-1] and len(set(texts[0])) > 2
        if stream == "on":
            streamed: Any = built.weights
            whole = sum(source.nbytes for source in streamed._sources)
            head = 0 if resident else streamed._tables[EMBEDDING if tied else HEAD].nbytes  # it stays, too
            # The prompt, a step, and the recording of one: others are replayed.
            part = sum(end - begin for spans in streamed._spans for begin, end in spans)
            assert sum(copied) == whole + 2 * part + 3 * head and (part < 0.7 * whole if few else part == whole)
            assert streamed.token_bytes == part + (whole - part) / 4 + head


def test_a_layer_that_was_not_entered_is_no_ones(make_checkpoint: Any, card: Any) -> None:
    folder = make_checkpoint(**SHAPE)
    weights = load_streamed(folder, load_model_config(folder), card)
    weights.enter(0)
    assert weights["model.layers.0.mlp.up_proj.weight"] and len(weights) == len(list(weights))
    with pytest.raises(LookupError, match="layer 2 was not entered"):
        weights["model.layers.2.mlp.up_proj.weight"]


# ---- the file ----------------------------------------------------------------------------
def layers_of(weights: StreamedWeights, device: Any) -> list[np.ndarray]:
    return [layer.read(device) for layer in weights._layers]


def load(folder: Path, device: Any, **more: Any) -> tuple[list[np.ndarray], list[str]]:
    remarks: list[str] = []
    weights = load_streamed(folder, load_model_config(folder), device, remarks=remarks, **more)
    return layers_of(weights, device), remarks


def test_each_checkpoint_and_quantization_has_a_file_and_it_is_said(make_checkpoint: Any, card: Any) -> None:
    folder = make_checkpoint(**SHAPE)
    _, remarks = load(folder, card)
    assert "for the next run (at most 128 GiB in all): wgrad cache clear removes them" in remarks[0]
    assert load(folder, card)[1] == []
    load(folder, card, block_size=128)
    load(folder, card, double_quant=False)
    load(make_checkpoint(name="other", seed=1, **SHAPE), card)
    os.utime(folder / "model.safetensors", (1, 1))  # what was written anew may differ where `digest` does not look
    load(folder, card)
    assert len(cached_files()) == 5


def test_what_an_adapters_start_leaves_is_of_its_run_alone(make_checkpoint: Any, card: Any) -> None:
    """It is neither read from the base model's cache file nor written to one."""
    folder, name = make_checkpoint(**SHAPE), "model.layers.0.self_attn.o_proj.weight"
    plain, _ = load(folder, card)
    off, on = (
        build_trainable(
            options(init_lora_weights="pissa", stream_weights=how),
            load_model_config(folder),
            folder,
            card,
            positions=64,
        )
        for how in ("off", "on")
    )
    weights = on.model.weights
    assert isinstance(weights, StreamedWeights) and len(cached_files()) == 1
    weights.enter(0)
    np.testing.assert_array_equal(*(card.download(card.dequantize(w[name])) for w in (weights, off.model.weights)))
    np.testing.assert_array_equal(*(card.download(built.parameters.data) for built in (on, off)))
    assert any((a != b).any() for a, b in zip(layers_of(weights, card), plain))


@pytest.mark.parametrize("damage", ["a bit", "cut off", "a header", "another layer"])
def test_a_damaged_file_is_named_and_made_again(make_checkpoint: Any, card: Any, damage: str) -> None:
    folder = make_checkpoint(**SHAPE)
    expected, _ = load(folder, card)
    (path,) = cached_files()
    data = bytearray(path.read_bytes())
    if damage == "a bit":
        data[len(data) // 2] ^= 4
    elif damage == "another layer":
        data = bytearray(bytes(data).replace(b'"layer.0"', b'"layer.9"'))
    path.write_bytes(data[:-100] if damage == "cut off" else b"x" * 64 if damage == "a header" else data)
    layers, remarks = load(folder, card)
    assert "the weights are quantized again" in remarks[0] and str(path.parent) in remarks[0] + remarks[1]
    for value, wanted in zip(layers, expected, strict=True):
        np.testing.assert_array_equal(value, wanted)
    assert load(folder, card)[1] == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES, errno.EROFS])
def test_a_disk_that_takes_nothing_costs_only_the_file(
    make_checkpoint: Any, card: Any, cache: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_checkpoint(**SHAPE)
    monkeypatch.setattr(os, "fsync", lambda descriptor: (_ for _ in ()).throw(OSError(number, os.strerror(number))))
    layers, remarks = load(folder, card)
    assert len(layers) == 5 and "are not kept for the next run: cannot write" in remarks[0]
    assert not [path for path in cache.rglob("*") if path.is_file()]


def test_a_kill_while_it_is_written_leaves_nothing_that_is_taken_for_it(make_checkpoint: Any, card: Any) -> None:
    """The temporary file of the killed run lies next to it, and the next run removes it."""
    folder = make_checkpoint(**SHAPE)
    expected, _ = load(folder, card)
    (path,) = cached_files()
    left = path.with_name(f"{path.name}.123.partial")
    left.write_bytes(path.read_bytes()[:1000])
    path.unlink()
    layers, remarks = load(folder, card)
    assert len(remarks) == 1 and not left.exists() and cached_files() == [path]
    for value, wanted in zip(layers, expected, strict=True):
        np.testing.assert_array_equal(value, wanted)


def test_the_disk_it_takes_is_bounded_and_given_back(
    make_checkpoint: Any, card: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_checkpoint(**SHAPE)
    load(folder, card)
    (first,) = cached_files()
    os.utime(first, (1, 1))
    load(folder, card, block_size=128)
    monkeypatch.setattr(module, "MOST_BYTES", int(2.5 * first.stat().st_size))
    load(folder, card, block_size=256)
    assert len(cached_files()) == 2 and first not in cached_files()
    assert cli.main(["cache", "list"]) == 0
    assert "2 base models, 0." in capsys.readouterr().out
    assert cli.main(["cache", "clear"]) == 0
    assert "removed from" in capsys.readouterr().out and cached_files() == []


def test_a_cached_file_that_vanishes_while_it_is_used_is_none(
    make_checkpoint: Any, card: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process may clear the cache at any time."""
    folder = make_checkpoint(**SHAPE)
    load(folder, card)
    (path,) = cached_files()
    with monkeypatch.context() as patch:
        patch.setattr(module.os, "utime", lambda path: os.stat("/no such file"))
        assert load(folder, card)[0]
    monkeypatch.setattr(Path, "glob", lambda self, pattern: iter([path, path.with_name("gone")]))
    assert cached_files() == [path]
    monkeypatch.setattr(module, "cached_files", lambda: [path.with_name("gone"), path])
    monkeypatch.setattr(module, "MOST_BYTES", 0)
    module._make_room(1)
    assert not path.exists()


def test_the_cache_is_cleared_while_others_remove_files(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Entries that have vanished count as empty, and leftovers of interrupted writes are removed."""
    (cache.parent / "gguf" / f"a.1.{'0' * 8}{TEMPORARY}").mkdir(parents=True)
    kinds = [kind._replace(entries=lambda: [cache / "gone"]) for kind in cache_command._KINDS]
    monkeypatch.setattr(cache_command, "_KINDS", kinds)
    assert cli.main(["cache", "clear"]) == 0
    assert "1 base model, 0." in capsys.readouterr().out and not any((cache.parent / "gguf").iterdir())


# ---- the commands ------------------------------------------------------------------------
def test_generation_streams_below_a_limit(
    make_checkpoint: Any, card: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"num_hidden_layers": 14, "hidden_size": 96, "intermediate_size": 256, "head_dim": 24}
    words = ["generate", "--model", str(make_checkpoint(**sizes)), "--prompt", "the fox", "--max-new-tokens", "5"]
    monkeypatch.setattr("wgrad.train.inference.open_model.select_device", lambda spec, needs=None: card)
    assert cli.main(words) == 0
    expected = capsys.readouterr().out
    card.trim()
    assert not cached_files()
    limit = str(card.memory().reserved_bytes + 700_000)
    assert cli.main([*words, "--memory-limit", limit, "--stream-weights", "off"]) == 2
    assert "the memory limit of" in capsys.readouterr().err
    assert cli.main([*words, "--memory-limit", limit]) == 0
    assert capsys.readouterr().out == expected and len(cached_files()) == 1


def test_what_cannot_be_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for words, said in (
        (
            ["--stream-weights", "on", "--no-gradient-checkpointing"],
            "--stream-weights: cannot be on with --no-gradient-checkpointing",
        ),
        (["--stream-weights", "on", "--full"], "--stream-weights: would be ignored: --full has no frozen weights"),
        (["--stream-weights", "yes"], "--stream-weights: must be one of auto, on, off; got 'yes'"),
    ):
        assert cli.main(["finetune", "--model", "m", "--data", "d", "--out", "o", *words]) == 2
        assert said in capsys.readouterr().err
