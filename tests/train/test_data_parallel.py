"""A step shared by ranks, here the threads of one process: what a rank does to the others."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from tests.train.thread_world import ThreadWorld, parameters, together
from tests.train.trainers import documents, trainer_for
from wgrad.autograd.reference import ReferenceDevice
from wgrad.device.errors import DeviceHung
from wgrad.train.data.packing import BatchStream
from wgrad.train.ranks.world import RanksLost
from wgrad.train.step import buckets
from wgrad.train.step.buckets import buckets_of
from wgrad.train.step.trainer import Trainer


@pytest.fixture
def ranks(make_checkpoint: Any) -> tuple[list[Trainer], BatchStream]:
    """Two ranks at the start of one run, with steps of four micro-batches."""
    folder, held, barrier = make_checkpoint(), [None, None], threading.Barrier(2)
    trainers = []
    for rank in range(2):
        alone, _, config = trainer_for(folder, ReferenceDevice(), gradient_accumulation_steps=4, packing=False)
        trainers.append(Trainer(alone.model, alone.optimizer, config, ThreadWorld(rank, held, barrier)))
    return trainers, BatchStream(documents(16), config)


def test_a_gradient_that_is_not_finite_on_one_rank_skips_the_step_on_all(ranks: Any) -> None:
    trainers, stream = ranks
    before = parameters(trainers[0])

    def spoiled(trainer: Trainer) -> None:
        if trainer.world.rank:
            trainer.optimizer.parameters.grad[7] = np.inf
        trainer.step(stream.get(0), 1e-3)
        trainer.step(stream.get(1), 1e-3)

    together(trainers, spoiled)
    for trainer in trainers:
        assert trainer.optimizer.skipped() == 1 and trainer.optimizer.applied() == 1
    np.testing.assert_array_equal(parameters(trainers[0]), parameters(trainers[1]))
    assert (parameters(trainers[0]) != before).any()


@pytest.mark.parametrize("kind", ["cpu", "wgpu"])
@pytest.mark.parametrize("recompute", [False, True])
def test_buckets_that_travel_while_the_backward_runs_are_complete(
    make_checkpoint: Any, monkeypatch: Any, request: Any, kind: str, recompute: bool
) -> None:
    """Three layers in three buckets; the third step and those after it are replayed in parts, and each bucket is read
    back before the next part begins. The second micro-batch adds to what the first left."""
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 64)
    device = ReferenceDevice() if kind == "cpu" else request.getfixturevalue("wgpu_device")
    folder = make_checkpoint(num_hidden_layers=3)
    options = {"gradient_accumulation_steps": 2, "packing": False, "gradient_checkpointing": recompute}
    one, built, config = trainer_for(folder, device, **options)
    found = buckets_of(built.parameters)
    assert [bucket.layer for bucket in found] == [2, 1, 0] and found[-1].begin == 0
    assert [bucket.begin for bucket in found[:-1]] == [bucket.end for bucket in found[1:]]
    assert found[0].end == built.parameters.size
    other, _, _ = trainer_for(folder, device, **options)
    shared = Trainer(other.model, other.optimizer, config, ThreadWorld(0, [None], threading.Barrier(1)))
    stream = BatchStream(documents(16), config)
    for index in range(5):
        one.step(stream.get(index), 1e-3)
        shared.step(stream.get(index), 1e-3)
        assert len(shared.data_parallel._reads) == 4  # and the loss
    np.testing.assert_array_equal(parameters(shared), parameters(one))
    np.testing.assert_array_equal(shared.read_history(), one.read_history())
    assert len(shared._micro_step._replays) == 3 and len(one._micro_step._replays) == 1
    assert shared._micro_step.dispatches == one._micro_step.dispatches


class Late:
    """A readback that has come once it was asked for a few times; never, if `hangs`."""

    def __init__(self, readback: Any, hangs: bool = False) -> None:
        self._readback, self._asked, self._hangs = readback, 0, hangs

    def ready(self) -> bool:
        self._asked += 1
        return self._asked > 3 and not self._hangs

    def result(self) -> np.ndarray:
        if self._hangs:
            raise DeviceHung("the device hangs")
        return cast(np.ndarray, self._readback.result())


@pytest.fixture
def alone_in_buckets(make_checkpoint: Any, monkeypatch: Any) -> tuple[Trainer, Callable[[], None]]:
    """One rank with its gradient in three buckets, whose next step is recorded, and that step."""
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 64)
    folder, device = make_checkpoint(num_hidden_layers=3), ReferenceDevice()
    built, _, config = trainer_for(folder, device, gradient_accumulation_steps=1, packing=False)
    trainer = Trainer(built.model, built.optimizer, config, ThreadWorld(0, [None], threading.Barrier(1)))
    stream = BatchStream(documents(8), config)
    for index in range(3):
        trainer.step(stream.get(index), 1e-3)
    return trainer, lambda: trainer.step(stream.get(3), 1e-3)


def test_sums_go_to_the_device_between_the_parts_of_a_backward(alone_in_buckets: Any, monkeypatch: Any) -> None:
    trainer, step = alone_in_buckets
    device, done, grad = trainer.device, list[str](), trainer.optimizer.parameters.grad
    readback, write = device.readback, device.write
    monkeypatch.setattr(
        device,
        "readback",
        lambda array, out=None: done.append("read") or Late(readback(array, out)),  # type: ignore[func-returns-value]
    )
    noted = lambda array, host: done.append("write") if np.shares_memory(array, grad) else None  # noqa: E731
    monkeypatch.setattr(device, "write", lambda array, host: noted(array, host) or write(array, host))  # type: ignore[func-returns-value]
    step()
    *parts, loss = (at for at, what in enumerate(done) if what == "read")
    assert len(parts) == 3 and parts[-1] < done.index("write") < loss and done.count("write") == 3


def test_a_device_that_hangs_ends_the_step(alone_in_buckets: Any, monkeypatch: Any) -> None:
    trainer, step = alone_in_buckets
    monkeypatch.setattr("wgrad.train.ranks.data_parallel._LOOKING", 0.01)
    readback = trainer.device.readback
    monkeypatch.setattr(trainer.device, "readback", lambda *given: Late(readback(*given), hangs=True))
    with pytest.raises(DeviceHung):
        step()


@pytest.mark.parametrize("layers, kib, sizes", [(30, 636, [2, 4, 7, 13, 4]), (2, 6000, [1, 1]), (3, 1, [3])])
def test_buckets_are_smaller_towards_the_end_of_the_backward(layers: int, kib: int, sizes: list[int]) -> None:
    """At least 1, 2, 4, 8 and 8 MiB, of whole layers, all of the gradient once; the last one is what is left."""
    places = {f"layers.{n}.w": (256 * kib * n, 256 * kib * (n + 1)) for n in range(layers)}
    parameters: Any = SimpleNamespace(size=256 * kib * layers, places=lambda: places)
    found = buckets_of(parameters)[::-1]
    assert [(bucket.end - bucket.begin) // (256 * kib) for bucket in found] == sizes
    assert [bucket.layer for bucket in found] == [sum(sizes[:n]) for n in range(len(sizes))]
    assert found[0].begin == 0 and [b.begin for b in found[1:]] == [b.end for b in found[:-1]]
    assert found[-1].end == parameters.size


def test_all_ranks_hold_the_same_bits_and_the_loss_of_the_whole_step(ranks: Any, make_checkpoint: Any) -> None:
    trainers, stream = ranks
    one, _, _ = trainer_for(make_checkpoint(), ReferenceDevice(), gradient_accumulation_steps=4, packing=False)
    for index in range(3):
        step = stream.get(index)
        together(trainers, functools.partial(Trainer.step, step=step, lr=1e-3))
        one.step(step, 1e-3)
    np.testing.assert_array_equal(parameters(trainers[0]), parameters(trainers[1]))
    expected = one.read_history()
    for trainer in trainers:
        np.testing.assert_allclose(trainer.read_history(), expected, rtol=1e-5)


def test_a_signal_on_one_rank_is_known_to_all_after_the_step(ranks: Any) -> None:
    trainers, stream = ranks
    together(trainers, lambda trainer: trainer.step(stream.get(0), 1e-3))
    assert [trainer.data_parallel.asked for trainer in trainers] == [None, None]
    trainers[1].data_parallel.asked_here = 15
    together(trainers, lambda trainer: trainer.step(stream.get(1), 1e-3))
    assert [trainer.data_parallel.asked for trainer in trainers] == [15, 15]


def test_a_step_in_which_ranks_were_lost_is_done_on_none_and_can_be_done_anew(ranks: Any, make_checkpoint: Any) -> None:
    trainers, stream = ranks
    before = parameters(trainers[0])
    for trainer in trainers:
        trainer.world.failing = 1

    def lost(trainer: Trainer) -> None:
        with pytest.raises(RanksLost):
            trainer.step(stream.get(0), 1e-3)

    together(trainers, lost)
    np.testing.assert_array_equal(parameters(trainers[1]), before)
    together(trainers, lambda trainer: trainer.step(stream.get(0), 1e-3))
    one, _, _ = trainer_for(make_checkpoint(), ReferenceDevice(), gradient_accumulation_steps=4, packing=False)
    one.step(stream.get(0), 1e-3)
    np.testing.assert_allclose(parameters(trainers[1]), parameters(one), rtol=1e-5, atol=1e-7)
    # AdamW's first step is the same for a gradient of twice the size; its norm is not.
    np.testing.assert_allclose(trainers[0].read_history(), one.read_history(), rtol=1e-5)


def test_a_rank_that_is_lost_between_steps_is_waited_for_no_more(ranks: Any, make_checkpoint: Any) -> None:
    """As while a checkpoint is written: nothing of a step fails, there are only fewer at the next one."""
    trainers, stream = ranks
    together(trainers, lambda trainer: trainer.step(stream.get(0), 1e-3))
    left = trainers[0].world
    left.members, left.size, left._held, left._barrier = left.members[:1], 1, [None], threading.Barrier(1)
    trainers[0].step(stream.get(1), 1e-3)
    one, _, _ = trainer_for(make_checkpoint(), ReferenceDevice(), gradient_accumulation_steps=4, packing=False)
    for index in range(2):
        one.step(stream.get(index), 1e-3)
    np.testing.assert_allclose(trainers[0].read_history(), one.read_history(), rtol=1e-5)
