"""Continuous batching: sequences that join and leave grow as they do alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.train.growing_batches import alone, grow, model_for
from wgrad.autograd.reference import ReferenceDevice
from wgrad.device.contract import PAGE, Device
from wgrad.device.errors import OutOfMemory
from wgrad.train.inference import continuous
from wgrad.train.inference import warm_up as warm_ups
from wgrad.train.inference.all_kernels import run_all_kernels
from wgrad.train.inference.continuous import Batch
from wgrad.train.inference.growing import Growing
from wgrad.train.inference.warm_up import warm_up
from wgrad.train.model.load_config import load_model_config
from wgrad.train.model.model import Model
from wgrad.train.options.generate_config import GREEDY, Sampling
from wgrad.train.step.build import build_frozen

LONGROPE = {"rope_type": "longrope", "short_factor": [1.1] * 6, "long_factor": [4.5, 7.0, 9.0, 3.0, 2.0, 1.5]}


# (turn, tokens of the prompt, tokens to draw): a row is freed and taken, rows are moved, the cache grows, the keys are
# moved to its beginning, and two prompts are longer than a chunk.
COMES = [(0, 5, 40), (0, 3, 4), (0, 9, 3), (0, 2, 30), (2, 70, 9), (3, 1, 25), (9, 150, 6), (12, 33, 4), (15, 40, 50)]
FEW = [(0, 5, 12), (0, 3, 2), (0, 2, 9), (3, 66, 3)]


def test_in_company_each_is_as_alone(
    make_checkpoint: Any, device: Device, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    monkeypatch.setattr(continuous, "CHUNK", 64)
    monkeypatch.setattr(continuous, "FEW", 1)
    monkeypatch.setattr(continuous, "GROUP", 3)  # of the first four, three are read together, and one by itself
    model = model_for(make_checkpoint(sliding_window=None), device)
    comes = COMES if isinstance(device, ReferenceDevice) else FEW
    prompts = [rng.integers(1, 90, tokens).tolist() for _, tokens, _ in comes]
    samplings = [GREEDY if n % 2 else Sampling(temperature=1.5, top_p=0.9, seed=n) for n in range(len(comes))]
    members = [Growing.begin(p, most, s) for (_, _, most), p, s in zip(comes, prompts, samplings)]
    batch = Batch(model, 4)
    found = grow(batch, [(at, one) for (at, _, _), one in zip(comes, members)], [1, 3, 2, 5])
    assert found == [alone(model, p, most, s) for (_, _, most), p, s in zip(comes, prompts, samplings)]
    assert batch.used_keys == 0 < batch.total_keys and batch.free == 4


def test_a_cache_that_is_good_for_no_more_is_filled_anew(make_checkpoint: Any) -> None:
    """Phi-3 with longrope, whose texts pass the length at which its angles change."""
    changes = {"rope_scaling": LONGROPE, "original_max_position_embeddings": 16, "max_position_embeddings": 256}
    model = model_for(make_checkpoint("Phi3ForCausalLM", **changes), ReferenceDevice())
    assert model.config.read_again_at == 17
    prompts, most = [[5, 9, 2], [7] * 12, [3, 8] * 10], [24, 8, 4]
    members = [Growing.begin(p, m, GREEDY) for p, m in zip(prompts, most)]
    found = grow(Batch(model, 4), [(n, one) for n, one in enumerate(members)], [4])
    assert found == [alone(model, p, m, GREEDY) for p, m in zip(prompts, most)]


def test_a_long_prompt_goes_on_when_the_others_have_left(make_checkpoint: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(continuous, "CHUNK", 64)
    model = model_for(make_checkpoint(), ReferenceDevice())
    prompt, batch = list(range(1, 68)) * 2, Batch(model, 4)
    first, long, late = Growing.begin([8], 9, GREEDY), Growing.begin(prompt, 4, GREEDY), Growing.begin([6], 5, GREEDY)
    gone = Growing.begin([5], 9, GREEDY)
    batch.join([gone, first])
    batch.leave(gone)
    batch.join([long])  # to the first row: nothing may be written in front of it
    assert batch.reads and batch.growing == [first]
    batch.leave(first)
    batch.read_chunk()
    batch.join([late])
    found: dict[Growing, list[int]] = {long: [], late: []}
    while batch.members:
        block = batch.queue(1)
        tokens = block.tokens()
        for part in block.parts:
            found[part.sequence] += tokens[: part.steps, part.row].tolist()
        if batch.reads:
            batch.read_chunk()
    assert list(found.values()) == [alone(model, prompt, 4, GREEDY), alone(model, [6], 5, GREEDY)]


def test_a_step_has_no_more_rows_than_it_needs(make_checkpoint: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are moved into the first ones as soon as a step can have half as many."""
    monkeypatch.setattr(continuous, "GROUP_TOKENS", 0)  # prompts that come together are read at once
    model = model_for(make_checkpoint(), ReferenceDevice())
    batch = Batch(model, 8)
    members = [Growing.begin([n, 4], 4 if n == 4 else 1, GREEDY) for n in range(5)]
    batch.join(members)
    first, second = batch.queue(1).tokens(), batch.queue(1).tokens()
    assert (first.shape, second.shape) == ((1, 8), (1, 1))
    assert [[token] for token in first[0, :5].tolist()] == [alone(model, [n, 4], 1, GREEDY) for n in range(5)]
    assert [first[0, 4], second[0, 0]] == alone(model, [4, 4], 2, GREEDY)
    goes, stays = Growing.begin([7, 4], 9, GREEDY), Growing.begin([8, 4], 9, GREEDY)
    batch.join([goes, stays])
    batch.leave(goes)
    batch.join(members[:3])  # in rows that do not follow one another
    assert [one.row for one in members[:3]] == [1, 3, 4]
    third = batch.queue(1).tokens()
    assert third.shape == (1, 8) and third[0, [1, 3, 4]].tolist() == first[0, :3].tolist()


def test_rows_are_fewer_where_sequences_are_long(make_checkpoint: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four of 64 keys, three of 128: the last three of four go on in the first rows."""
    model = model_for(make_checkpoint(), ReferenceDevice())
    batch, mosts = Batch(model, 4, 384), [9, 70, 66, 68]
    members = [Growing.begin([n, 4], most, GREEDY) for n, most in enumerate(mosts)]
    found = grow(batch, [(0, one) for one in members], [4])
    assert found == [alone(model, [n, 4], most, GREEDY) for n, most in enumerate(mosts)]
    assert batch.total_keys == 384


@pytest.mark.parametrize(("rows", "most_keys"), [(32, 8 * 512), (1, None), (3, 100), (8, None)])
def test_a_dry_run_does_what_a_server_may_do(
    rows: int, most_keys: int | None, make_checkpoint: Any, wgpu_device: Device
) -> None:
    dry, folder = wgpu_device.dry_run(), make_checkpoint()
    model = build_frozen(load_model_config(folder), folder, dry, positions=256, contents=False)
    run_all_kernels(model, rows, 2048, most_keys)
    assert dry.memory().peak_bytes > 0


def test_who_leaves_frees_a_row_and_keeps_no_memory(make_checkpoint: Any) -> None:
    model = model_for(make_checkpoint(), ReferenceDevice())
    batch = Batch(model, 2)
    first, second, third = (Growing.begin([n, 4], 9, GREEDY) for n in (1, 2, 3))
    batch.join([first, second])
    assert not batch.can_join([third])
    batch.queue(2)
    batch.leave(first)
    batch.leave(first)  # no harm
    assert batch.can_join([third]) and not batch.can_join([third, third])
    assert batch.used_keys == PAGE  # of the one that stays
    batch.reset()
    assert batch.free == 2 and batch.total_keys == 0 and second.row == -1


def test_many_prompts_that_come_together_are_read_in_larger_groups(
    make_checkpoint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(continuous, "GROUP", 2)
    monkeypatch.setattr(continuous, "LARGE_GROUP", 4)
    model = model_for(make_checkpoint(), ReferenceDevice())
    for count, groups in ((4, {2}), (7, {4, 2})):
        batch = Batch(model, 8)
        prompts = [[n + 3, 4, 9] for n in range(count)]
        found = grow(batch, [(0, Growing.begin(prompt, 3, GREEDY)) for prompt in prompts], [2])
        assert {size for _, size, *_ in batch._readers} == groups
        assert found == [alone(model, prompt, 3, GREEDY) for prompt in prompts]


def test_after_a_warm_up_the_first_sequences_record_nothing(
    make_checkpoint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does their cache grow; they are as without one."""
    folder, device = make_checkpoint(), ReferenceDevice()
    model = build_frozen(load_model_config(folder), folder, device, positions=160)
    batch, never = Batch(model, 5), Batch(model, 40)
    warm_up(never, 0.0)
    assert not never._steps and never.total_keys == 40 * 192, "its cache never grows"
    monkeypatch.setattr(warm_ups, "_ROWS", 4)
    made = continuous.RowCache
    for room, tokens in ((40, 4 * 192), (4, None)):
        few = Batch(model, 40)

        def full(model: Model, rows: int, pages: int, room: int = room) -> Any:
            if rows >= room:
                raise OutOfMemory("no room")
            return made(model, rows, pages)

        monkeypatch.setattr(continuous, "RowCache", full)
        if tokens is None:
            with pytest.raises(OutOfMemory):
                warm_up(few, 0.0)
        else:
            warm_up(few, 0.0)
            assert few.total_keys == tokens, "it has what there is memory for"
    monkeypatch.setattr(continuous, "RowCache", made)
    waits = list[None]()
    monkeypatch.setattr(device, "synchronize", lambda: waits.append(None))
    warm_up(batch, 1e6)
    assert waits, "the device sees how fast it is"
    assert (
        not batch.members
        and {rows for _, rows, _ in batch._steps} == {1, 2, 4, 5}
        and {(32, 32), (64, 64), (128, 128)} == {(width, keys) for *_, width, keys in batch._readers}
    )
    for name in ("BatchStep", "PromptReader", "RowCache"):
        monkeypatch.setattr(continuous, name, None)
    comes = [(n // 3, Growing.begin([n, 4], 20, GREEDY)) for n in range(6)]
    assert grow(batch, comes, [3])[4] == alone(model, [4, 4], 20, GREEDY)
