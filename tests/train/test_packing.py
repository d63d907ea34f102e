"""Packing, batches and the order of the data."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wgrad.device.errors import WgradError
from wgrad.train.data.packing import IGNORE_INDEX, BatchStream, Document, eval_batches, make_batch, pack_documents
from wgrad.train.options.finetune_config import RunOptions


def document(length: int, seed: int = 0, learn: int = 0) -> Document:
    """Random ids; tokens from number `learn` on count."""
    generator = np.random.default_rng(seed)
    return Document(generator.integers(5, 400, length).astype(np.int32), np.arange(length) >= learn, f"line {seed}")


def documents(count: int, longest: int, seed: int = 3) -> list[Document]:
    generator = np.random.default_rng(seed)
    return [document(int(n), i, int(n) // 3) for i, n in enumerate(generator.integers(2, longest + 1, count))]


def rows_as_documents(batch) -> list[tuple[int, ...]]:
    """The documents of a batch, found again from `doc_start` and `positions` alone (padding left out)."""
    found = []
    for ids, targets, positions, doc_start in zip(batch.ids, batch.targets, batch.positions, batch.doc_start):
        for start in np.unique(doc_start):
            where = np.flatnonzero(doc_start == start)
            assert np.array_equal(where, np.arange(start, start + len(where)))
            assert np.array_equal(positions[where], np.arange(len(where)))
            if len(where) > 1:
                found.append(tuple(ids[where].tolist()))
            else:
                assert targets[where] == IGNORE_INDEX
    return found


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 37), max_size=80), st.randoms(use_true_random=False))
def test_every_document_is_packed_once_and_rows_do_not_overflow(lengths: list[int], random) -> None:
    order = list(range(len(lengths)))
    random.shuffle(order)
    rows = pack_documents(lengths, 37, order)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    assert all(0 < sum(lengths[i] for i in row) <= 37 for row in rows)
    # The order of equal documents changes who lies where, never how many rows there are.
    assert len(rows) == len(pack_documents(lengths, 37))
    # Best fit leaves at most one row half empty or emptier.
    assert sum(2 * sum(lengths[i] for i in row) <= 37 for row in rows) <= 1


def test_best_fit_takes_the_fullest_row_with_room() -> None:
    assert pack_documents([7, 6, 4, 3], 10) == [[0, 3], [1, 2]]
    assert pack_documents([5, 5, 5], 10) == [[0, 1], [2]]
    assert pack_documents([], 10) == []


@pytest.mark.parametrize("length", [0, 11])
def test_a_length_that_no_row_holds_is_refused(length: int) -> None:
    with pytest.raises(ValueError, match=rf"lengths\[1\].*got {length}"):
        pack_documents([3, length], 10)


def test_a_batch_has_ids_targets_positions_and_starts() -> None:
    a = Document(np.array([10, 11, 12], np.int32), np.array([True, False, True]))
    b = Document(np.array([20, 21], np.int32), np.array([False, True]))
    batch = make_batch([[a, b]], 2, 7, pad_id=9)
    no = IGNORE_INDEX
    assert batch.ids.tolist() == [[10, 11, 12, 20, 21, 9, 9], [9] * 7]
    assert batch.targets.tolist() == [[no, 12, no, 21, no, no, no], [no] * 7]
    assert batch.positions.tolist() == [[0, 1, 2, 0, 1, 0, 0], [0] * 7]
    assert batch.doc_start.tolist() == [[0, 0, 0, 3, 3, 5, 6], list(range(7))]
    assert (batch.num_targets, batch.num_tokens) == (2, 5)
    assert {x.dtype for x in (batch.ids, batch.targets, batch.positions, batch.doc_start)} == {np.dtype(np.int32)}


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize(("batch_size", "accumulate"), [(1, 1), (2, 3), (3, 8)])
def test_an_epoch_is_every_document_once(packing: bool, batch_size: int, accumulate: int) -> None:
    data = documents(53, 41)
    config = RunOptions(
        max_length=41, batch_size=batch_size, gradient_accumulation_steps=accumulate, packing=packing, epochs=2
    )
    stream = BatchStream(data, config)
    steps = list(stream)
    assert len(steps) == len(stream) == stream.total_steps == 2 * stream.steps_per_epoch
    for epoch in (0, 1):
        mine = [s for s in steps if s.epoch == epoch]
        seen = [d for s in mine for b in s.batches for d in rows_as_documents(b)]
        assert sorted(seen) == sorted(tuple(d.ids.tolist()) for d in data)
        assert sum(s.num_targets for s in mine) == sum(d.num_targets for d in data)
        assert sum(s.num_tokens for s in mine) == sum(map(len, data))
        assert all(len(s.batches) == accumulate for s in mine[:-1]) and 1 <= len(mine[-1].batches) <= accumulate
    for step in steps:
        assert step.num_targets == sum(int((b.targets != IGNORE_INDEX).sum()) for b in step.batches)
        assert all(b.ids.shape == (batch_size, 41) for b in step.batches)
    if packing:
        assert stream.rows_per_epoch < len(data)


def same(a, b) -> bool:
    return (a.index, a.epoch, len(a.batches)) == (b.index, b.epoch, len(b.batches)) and all(
        np.array_equal(getattr(x, n), getattr(y, n))
        for x, y in zip(a.batches, b.batches)
        for n in ("ids", "targets", "positions", "doc_start")
    )


def test_the_order_depends_on_seed_and_epoch_only() -> None:
    data = documents(53, 41)
    config = RunOptions(max_length=41, gradient_accumulation_steps=2, epochs=2)
    steps = list(BatchStream(data, config))
    assert all(map(same, steps, BatchStream(data, config)))
    other = RunOptions(max_length=41, gradient_accumulation_steps=2, epochs=2, seed=1)
    assert not all(map(same, steps, BatchStream(data, other)))
    half = len(steps) // 2
    assert not all(np.array_equal(a.batches[0].ids, b.batches[0].ids) for a, b in zip(steps[:half], steps[half:]))
    longer = RunOptions(max_length=41, gradient_accumulation_steps=2, max_steps=len(steps) + 5)
    assert all(map(same, steps, BatchStream(data, longer)))


@pytest.mark.parametrize("step", [0, 1, 4, 7])
def test_a_restored_stream_goes_on_where_it_was(step: int) -> None:
    data = documents(53, 41)
    config = RunOptions(max_length=41, gradient_accumulation_steps=3, batch_size=2, epochs=3)
    steps = list(BatchStream(data, config))
    assert len(steps) > 7
    first = BatchStream(data, config)
    for _ in zip(range(step), first):
        pass
    assert first.step == step
    second = BatchStream(data, config)
    second.restore(first.step, first.fingerprint())
    rest = list(second)
    assert len(rest) == len(steps) - step and all(map(same, rest, steps[step:]))


def test_other_data_is_noticed_on_resume() -> None:
    config = RunOptions(max_length=41)
    fingerprint = BatchStream(documents(9, 41), config).fingerprint()
    changed = documents(9, 41)
    changed[4].ids[1] += 1
    for data, options in ((changed, config), (documents(9, 41), RunOptions(max_length=41, seed=1))):
        with pytest.raises(WgradError, match="--resume: the training data"):
            BatchStream(data, options).restore(0, fingerprint)


def test_a_checkpoint_beyond_the_end() -> None:
    stream = BatchStream(documents(5, 41), RunOptions(max_length=41, max_steps=3))
    stream.restore(3)
    assert list(stream) == []
    with pytest.raises(WgradError, match="--max-steps: the checkpoint already has 4 steps, more than the 3 asked for"):
        stream.restore(4)


def test_max_steps_goes_beyond_the_epochs() -> None:
    stream = BatchStream(documents(5, 41), RunOptions(max_length=41, gradient_accumulation_steps=1, max_steps=23))
    steps = list(stream)
    assert [s.index for s in steps] == list(range(23))
    assert steps[-1].epoch == 22 // stream.steps_per_epoch


def test_evaluation_takes_every_document_in_a_fixed_order() -> None:
    data = documents(17, 41)
    batches = eval_batches(data, RunOptions(max_length=41, batch_size=3, seed=1))
    again = eval_batches(data, RunOptions(max_length=41, batch_size=3, seed=2))
    assert sum(b.num_targets for b in batches) == sum(d.num_targets for d in data)
    assert all(np.array_equal(a.ids, b.ids) for a, b in zip(batches, again)) and len(batches) == len(again)
    assert eval_batches([], RunOptions()) == []


def test_nothing_to_train_on() -> None:
    with pytest.raises(WgradError, match="--data: no example"):
        BatchStream([], RunOptions())
