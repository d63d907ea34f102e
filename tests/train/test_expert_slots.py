"""Experts in slots on the device while all are in main memory: the same text, and what is copied."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import wgpu_sibling
from tests.train.conftest import discrete_sibling
from wgrad.train.commands.cli import main
from wgrad.train.inference.compile_ahead import Placing, compile_ahead
from wgrad.train.inference.generation import generate_batch, generate_ids
from wgrad.train.inference.scoring import score
from wgrad.train.model import load_streamed, streamed_weights
from wgrad.train.model.expert_slots import CannotKeep, ExpertSlots
from wgrad.train.model.load_config import load_model_config
from wgrad.train.model.lora import LoraConfig, expert_modules, linear_modules, lora_shapes
from wgrad.train.model.model import Model
from wgrad.train.model.streamed_weights import StreamedWeights
from wgrad.train.model.weights import EMBEDDING, HEAD
from wgrad.train.options.generate_config import Sampling
from wgrad.train.step.build import build_frozen, frozen_adapter
from wgrad.train.terminal.progress import Display

# Nested scales need whole groups of 256 blocks in each expert.
EXPERTS: dict[str, dict[str, Any]] = {
    "Qwen3MoeForCausalLM": {"num_experts": 19, "hidden_size": 128, "moe_intermediate_size": 128},
    "GptOssForCausalLM": {"num_experts": 19, "num_local_experts": 19},
    "Glm4MoeForCausalLM": {"n_routed_experts": 18, "first_k_dense_replace": 1},
}
LATENTS = {"n_routed_experts": 18, "moe_latent_size": 22, "hybrid_override_pattern": "ME*E"}
SAMPLING = Sampling(temperature=1.5, seed=3)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_streamed, "cache_folder", lambda name: tmp_path / "cache" / name)


@pytest.mark.parametrize("architecture", [*EXPERTS, pytest.param("NemotronHForCausalLM", marks=pytest.mark.all)])
def test_the_text_is_that_of_experts_on_the_device(architecture: str, make_checkpoint: Any, card: Any) -> None:
    """The first layer of GLM-4.5 has no experts, and those of gpt-oss have biases."""
    shape = {**EXPERTS, "NemotronHForCausalLM": LATENTS}[architecture]
    folder = make_checkpoint(architecture, **shape, num_experts_per_tok=2, num_hidden_layers=4)
    model, texts = load_model_config(folder), []
    streamed: dict[str, Any] = {"stream_weights": "on"}
    for placed in ({}, streamed, *[streamed | {"slots": 8}] * 2):  # at last from the cache
        built: Any = build_frozen(model, folder, card, positions=64, quantize="hidden_size" in shape, **placed)
        texts.append(list(generate_ids(built, [5, 6, 7], 24, SAMPLING)))
        assert texts[0] == texts[-1] and len(set(texts[0])) > 9
    weights = built.weights
    head = EMBEDDING if model.tie_word_embeddings else HEAD
    assert weights.table(head) is weights.table(head), "all but the experts stays"
    needed, missing = weights.use
    layers = sum(map(model.has_experts, range(4)))
    assert needed == 23 * 2 * layers and layers < missing < needed


def test_sequences_that_choose_more_experts_than_slots_have_them_gathered(
    make_checkpoint: Any, card: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three sequences choose up to 6 experts of a layer at once, for which 8 slots are too few to be sure. With many
    rows of each expert, and without a cache of keys and values, whole layers are copied."""
    folder = make_checkpoint("GptOssForCausalLM", **EXPERTS["GptOssForCausalLM"], num_experts_per_tok=2)
    model, texts, scores = load_model_config(folder), [], []
    staying: dict[str, Any] = {"stream_weights": "on", "slots": 8}
    for placed, rows in (({}, 0), (staying, 0), (staying, streamed_weights._GATHERED_ROWS)):
        monkeypatch.setattr(streamed_weights, "_GATHERED_ROWS", rows)
        built: Any = build_frozen(model, folder, card, positions=64, quantize=False, **placed)
        with monkeypatch.context() as patch:
            if not rows:
                patch.setattr(ExpertSlots, "gather", None)
            texts.append(generate_batch(built, [[5, 6, 7], [8], [9, 10, 11, 12, 13]], 16, SAMPLING))
            patch.setattr(ExpertSlots, "gather", None)
            scores.append(score(built, [5, 6, 7, 8, 9]).given.of_tokens)
    assert texts[0] == texts[1] == texts[2] and len(set(map(tuple, texts[0]))) == 3
    np.testing.assert_array_equal(scores[1:], [scores[0]] * 2)
    needed, missing = built.weights.use
    layers = model.num_hidden_layers
    assert 15 * 2 * layers <= needed <= 15 * 6 * layers and layers < missing < needed // 2, "few copies: slots fill"


def test_only_chosen_experts_are_gathered_and_those_in_slots_are_not_read_again(card: Any) -> None:
    source, place = card.empty_host((7, 3, 4), np.float32), card.upload(np.full((7, 3, 4), -1, np.float32))
    values = np.random.default_rng(0).normal(size=(7, 3, 4)).astype(np.float32)
    card.write(source, values)
    slots = ExpertSlots({"w": source}, 7, 3, card, {"w": place})

    def gather(*rows: int) -> np.ndarray:
        slots.gather(card.upload(np.cumsum([0, *rows]).astype(np.int32)), counted=True)
        found: np.ndarray = card.download(slots.gathered["w"])
        return found

    found = gather(0, 3, 0, 1, 2, 0, 1)
    chosen = [1, 3, 4, 6]
    np.testing.assert_array_equal(found[chosen], values[chosen])
    assert (np.delete(found, chosen, axis=0) == -1).all() and slots.use == (4, 4)
    np.testing.assert_array_equal(card.download(slots.weights["w"]), values[[1, 3, 4]], "those with most rows")
    card.write(source, np.zeros_like(values))
    found = gather(0, 1, 0, 1, 0, 2, 1)
    np.testing.assert_array_equal(found[[1, 3, 5, 6]], [values[1], values[3], np.zeros((3, 4)), np.zeros((3, 4))])
    np.testing.assert_array_equal(card.download(slots.weights["w"]), [values[1], values[3], np.zeros((3, 4))])
    assert slots.use == (8, 6)


def test_as_many_experts_stay_as_a_limit_allows(
    make_checkpoint: Any, card: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """It takes the planned memory. If the least slots do not fit, whole layers stay."""
    folder = make_checkpoint("Qwen3MoeForCausalLM", **EXPERTS["Qwen3MoeForCausalLM"], num_hidden_layers=6)
    model, peaks = load_model_config(folder), dict[Placing, int]()

    def write(device: Any, placing: Placing, **more: Any) -> list[int]:
        stream, resident, slots = placing
        staying: dict[str, Any] = {"stream_weights": stream, "resident": resident, "slots": slots}
        built = build_frozen(model, folder, device, positions=64, **staying, **more)
        return list(generate_ids(built, [5, 6, 7], 8, SAMPLING))

    def run(dry: Any, placing: Placing) -> None:
        write(dry, placing, contents=False)
        peaks[placing] = dry.memory().peak_bytes

    def place(limit: int, rows: int = 1) -> Placing:
        return compile_ahead(card, "on", str(limit), model, run, Display(), rows)

    kept, least = card.memory().reserved_bytes, Placing("on", 0, 8)
    place(1 << 30)
    limit = peaks[least] + (peaks[Placing("on", 0, 18)] - peaks[least]) // 2
    found = place(limit)
    assert found.resident == 0 and 10 <= found.slots <= 16
    said = capsys.readouterr().out
    assert f"weights: {found.slots} of 19 experts of each layer, and all else, stay on the device" in said
    card.limit_memory(kept + limit)
    text = write(card, found)
    assert card.memory().peak_reserved_bytes <= kept + limit
    card.limit_memory(None)
    assert text == write(wgpu_sibling(), Placing("off"))
    assert place(peaks[least] - 1).slots == 0 == place(limit, rows=3).slots == place(limit, rows=0).slots


def test_experts_that_share_scales_stay_in_whole_layers(make_checkpoint: Any, card: Any) -> None:
    """Here, a group of 256 nested scales has blocks of several experts."""
    folder = make_checkpoint("Qwen3MoeForCausalLM", num_experts=19)
    check_that_layers_stay_whole(folder, card, "its 19 experts share scales")


@pytest.mark.parametrize("operator", ["place_experts", "copy_experts", "keep_experts", "gather_experts"])
def test_a_device_without_the_operators_keeps_whole_layers(
    operator: str, make_checkpoint: Any, card: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for device in (card, card.dry_run()):
        monkeypatch.setattr(type(device), "lacks", device.lacks | {operator})
    folder = make_checkpoint("Qwen3MoeForCausalLM", **EXPERTS["Qwen3MoeForCausalLM"])
    check_that_layers_stay_whole(folder, card, f"lacks {operator}")


def check_that_layers_stay_whole(folder: str, card: Any, why: str) -> None:
    model = load_model_config(folder)
    with pytest.raises(CannotKeep, match=why):
        build_frozen(model, folder, card, positions=64, stream_weights="on", slots=8)

    def run(dry: Any, placing: Placing) -> None:
        staying: dict[str, Any] = {"stream_weights": placing.stream, "slots": placing.slots}
        build_frozen(model, folder, dry, positions=64, contents=False, **staying)

    assert compile_ahead(card, "on", "1GiB", model, run, Display(), rows=1).slots == 0


def test_adapted_experts_are_read_by_their_own_number(
    make_checkpoint: Any, card: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Adapters have no slots, so experts are gathered, and the text is that of weights on the device. No layer is
    copied whole, with adapters or without."""
    monkeypatch.setattr(StreamedWeights, "_fetch", None)
    folder = make_checkpoint("Qwen3MoeForCausalLM", **EXPERTS["Qwen3MoeForCausalLM"])
    model, texts = load_model_config(folder), []
    lora = LoraConfig(3, 6.0, target_modules=("q_proj",), target_parameters=("layers.1.mlp.experts.down_proj",))
    shapes = lora_shapes(lora, linear_modules(model), experts=expert_modules(model))
    rng = np.random.default_rng(0)
    values = {name: rng.normal(0, 0.3, shape).astype(np.float32) for name, shape in shapes.items()}
    streamed: dict[str, Any] = {"stream_weights": "on", "slots": 8}
    for placed in ({}, streamed):
        base: Any = build_frozen(model, folder, card, positions=64, **placed)
        adapted = Model(model, base.weights, card, adapter=frozen_adapter(lora, values, card), positions=64)
        texts.append([list(generate_ids(of, [5, 6, 7], 12, SAMPLING)) for of in (base, adapted)])
        if placed:
            before = base.weights.use[0]
            monkeypatch.setattr(ExpertSlots, "place", None)
            list(generate_ids(adapted, [5, 6, 7], 5, SAMPLING))
            assert base.weights.use[0] == before + 4 * 2 * model.num_hidden_layers
    assert texts[0] == texts[1] and texts[0][0] != texts[0][1]


def test_generate_says_how_many_stay_and_were_found(
    make_checkpoint: Any, write_lines: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The text is that of a run with all weights on the device."""
    monkeypatch.setattr("wgrad.train.inference.open_model.select_device", lambda *_: discrete_sibling())
    shape = {"num_experts": 19, "hidden_size": 128, "moe_intermediate_size": 256, "num_hidden_layers": 6}
    words = ["generate", "--model", make_checkpoint("Qwen3MoeForCausalLM", **shape), "--prompt", "bird"]
    words += ["--max-new-tokens", 12, "--compute", "float32", "--temperature", 1.5, "--seed", 2]
    texts = []
    for more in ([], ["--stream-weights", "on", "--memory-limit", "8MiB"]):
        assert main([*map(str, [*words, *more])]) == 0
        found = capsys.readouterr()
        texts.append(found.out)
    stay = re.search(r"weights: (\d+) of 19 experts of each layer, and all else, stay on the device", found.err)
    assert stay and 8 <= int(stay[1]) < 19
    assert re.search(r"experts: \d+ % of 132 were on the device", found.err)  # two in each of 6 layers, of 11 tokens
    assert texts[0] == texts[1]
    words[words.index("--prompt") : words.index("--prompt") + 2] = ["--prompts", write_lines(*[{"prompt": "bird"}] * 3)]
    assert main([*map(str, [*words, "--stream-weights", "on", "--memory-limit", "8MiB"])]) == 0
    assert "experts of each layer" not in capsys.readouterr().err, "three sequences need 24 slots"


def test_of_experts_with_equal_rows_those_used_last_are_kept(device: Any) -> None:
    """Expert 0 comes first and is in no slot; expert 3 has no rows."""
    start, held, used, counts = (np.array(a, np.int32) for a in ([0, 1, 2, 3, 3], [2, 1], [1, 5], [6, 0, 0]))
    arrays = [device.upload(a) for a in (start, held, used, counts)]
    origins = device.keep_experts(*arrays, counted=True)
    assert device.download(origins).tolist() == [[-1, -1], [1, -1], [0, -1], [-2, -1]]
    assert [device.download(a).tolist() for a in arrays[1:]] == [[2, 1], [7, 7], [7, 3, 1]]
