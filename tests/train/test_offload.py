"""--offload-activations and --memory-limit: the same bits in the planned memory, and errors for what does not fit."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.conftest import wgpu_sibling
from wgrad.autograd import functional as F
from wgrad.autograd.checkpoint import checkpoint
from wgrad.autograd.offload import Offloading
from wgrad.autograd.reference import ReferenceDevice
from wgrad.autograd.tensor import Tensor, parameter
from wgrad.device.errors import OutOfMemory, WgradError
from wgrad.train.commands import cli
from wgrad.train.data.packing import BatchStream, Document
from wgrad.train.model.load_config import load_model_config
from wgrad.train.model.model_inputs import Inputs
from wgrad.train.options.finetune_config import RunOptions
from wgrad.train.options.option_text import parse_size, size
from wgrad.train.plan.memory_limit import beyond_limit
from wgrad.train.plan.plan import plan_run
from wgrad.train.step.build import build_optimizer, build_trainable
from wgrad.train.step.trainer import Trainer
from wgrad.wgsl.runtime import transfers


def options(**given: Any) -> RunOptions:
    shape: dict[str, Any] = {
        "max_length": 70,
        "batch_size": 2,
        "gradient_accumulation_steps": 1,
        "lora_r": 4,
        "max_steps": 3,
        "logging_steps": 1,
    }
    shape |= {"lora_dropout": 0.1, "sample": False, "gradient_checkpointing": True, "stream_weights": "off"}
    return RunOptions(**(shape | given))


def train(config: RunOptions, folder: Path, device: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return the losses of steps, of which all but the first two are replayed, and the trained parameters."""
    built = build_trainable(config, load_model_config(folder), folder, device, positions=config.max_length)
    trainer = Trainer(built.model, build_optimizer(config, built.parameters), config)
    generator = np.random.default_rng(0)
    documents = [Document(generator.integers(0, 40, 70).astype(np.int32), np.ones(70, bool)) for _ in range(16)]
    losses = []
    for step in BatchStream(documents, config):
        trainer.step(step, 1e-2)
        losses.append(trainer.read_history()[0, 0])
        trainer.evaluate(step.batches[:1])  # what a replay has offloaded is none of an evaluation's
    return np.array(losses), device.download(built.parameters.data)


def test_the_bits_are_those_without_and_the_memory_is_as_planned(make_checkpoint: Any, card: Any) -> None:
    folder = make_checkpoint(num_hidden_layers=5)
    model = load_model_config(folder)
    twice: dict[str, Any] = {"gradient_accumulation_steps": 2}
    losses, trained = train(options(**twice), folder, wgpu_sibling())
    config = options(offload_activations=True, **twice)
    plan, before = plan_run(config, model, folder, card, 1), plan_run(options(**twice), model, folder, card, 1)
    assert plan is not None and before is not None
    kept = card.memory().in_use_bytes
    offloaded_losses, offloaded_trained = train(config, folder, card)
    np.testing.assert_array_equal(offloaded_losses, losses)
    np.testing.assert_array_equal(offloaded_trained, trained)
    assert len(set(losses.tolist())) == 3 and np.abs(trained).max() > 0
    assert plan.peak_bytes == pytest.approx(card.memory().peak_bytes - kept, rel=0.05)
    stream = 2 * 70 * model.hidden_size * 4  # of a layer's input
    table = before.host_bytes  # the embedding, which is no head
    # The last layer's input never leaves.
    assert plan.host_bytes == card.host_memory().peak_bytes and 4 <= (plan.host_bytes - table) / stream < 5
    assert plan.host_weight_bytes == before.host_weight_bytes == table
    # Of five inputs three are left where the peak is: the last layers' and the one on its way back.
    assert before.peak_bytes - plan.peak_bytes >= 2 * stream


@pytest.mark.parametrize("stream", ["off", "on"])
def test_copies_beside_launches_change_neither_bits_nor_memory(
    make_checkpoint: Any, card: Any, monkeypatch: pytest.MonkeyPatch, stream: str
) -> None:
    """Inputs of layers are copied in pieces alongside each GEMM, both ways. With `stream`, weights come too."""
    folder, config = make_checkpoint(num_hidden_layers=5), options(offload_activations=True, stream_weights=stream)
    expected_losses, expected = train(config, folder, card)
    beside = wgpu_sibling()
    beside.shared_memory, beside.copies_beside = False, True
    monkeypatch.setattr(transfers, "LEAST_WORK", 1e5)
    monkeypatch.setattr(transfers, "_PASS", 256)
    for way in ("_TO_HOST", "_FROM_HOST"):
        monkeypatch.setattr(transfers, way, transfers._Way(2, 1024 / 1e6))
    ways, record = Counter[bool](), beside._record

    def noted(name: str, dispatch: Any, work: float) -> None:
        if name == "transfer":
            ways[dispatch[0] is not None] += 1
        record(name, dispatch, work)

    monkeypatch.setattr(beside, "_record", noted)
    losses, trained = train(config, folder, beside)
    assert ways[True] > 50 and ways[False] > 5, "pieces and commands"
    np.testing.assert_array_equal(losses, expected_losses)
    np.testing.assert_array_equal(trained, expected)
    # Not the same byte: the second run finds its quantized weights in the cache.
    assert beside.memory().peak_bytes == pytest.approx(card.memory().peak_bytes, rel=0.01)


NUMBERS: tuple[bool | int, ...] = (False, 0, 1, 3, 4, 5, True)  # of five layers


def layers_of(number: bool | int) -> int:
    """Return the number of inputs that leave the device."""
    return 4 if number is True else min(number, 4)


@pytest.mark.parametrize("kind", ["cpu", "wgpu"])
def test_no_number_of_offloaded_layers_changes_a_bit(make_checkpoint: Any, card: Any, kind: str) -> None:
    """Compare the loss and gradients of a pass, with attention kept or recomputed."""
    device: Any = card if kind == "wgpu" else ReferenceDevice()
    device.shared_memory = False
    folder = make_checkpoint(num_hidden_layers=5)
    generator = np.random.default_rng(0)
    ids, start = generator.integers(0, 40, 140).astype(np.int32), generator.standard_normal(1 << 16).astype(np.float32)
    passes, moved = list[tuple[np.ndarray, np.ndarray]](), list[int]()
    whole = device.transfer

    def transfer(src: Any, out: Any) -> None:
        moved.append(src.nbytes)
        whole(src, out)

    device.transfer = transfer
    for number, keep in product(NUMBERS if kind == "cpu" else (False, 1, 4, True), (False, True)):
        config = options(offload_activations=number, keep_attention=keep)
        built = build_trainable(config, load_model_config(folder), folder, device, positions=70)
        inputs, trained = Inputs.empty(built.model, 2, 70), built.parameters
        device.write(inputs.ids, ids)
        device.write(inputs.targets, np.roll(ids, -1))
        device.write(inputs.positions, np.tile(np.arange(70, dtype=np.int32), 2))
        device.write(trained.data, np.resize(0.1 * start, trained.data.shape))
        inputs.seed = device.upload(np.array([3, 4], np.uint32))
        moved.clear()
        loss = built.model.loss(inputs)
        loss.backward()
        passes.append((device.download(loss.data), device.download(trained.grad)))
        # Back and forth: the input, and with `keep` attention's two outputs and the seven products with A.
        assert len(moved) == 2 * layers_of(number) * (10 if keep else 1), (number, keep)
    for loss_bits, gradients in passes:
        np.testing.assert_array_equal(loss_bits, passes[0][0])
        np.testing.assert_array_equal(gradients, passes[0][1])
    assert np.isfinite(passes[0][0]).all() and np.count_nonzero(passes[0][1]) > passes[0][1].size / 2


@pytest.mark.parametrize(("kind", "full"), [("cpu", False), ("cpu", True), ("wgpu", False)])
def test_no_number_of_recomputed_layers_changes_a_bit(make_checkpoint: Any, card: Any, kind: str, full: bool) -> None:
    """Compare the loss and gradients of packed rows, with inputs offloaded or not and norms recomputed or not, for
    adapters or all weights."""
    device: Any = card if kind == "wgpu" else ReferenceDevice()
    device.shared_memory, layers = False, 3
    folder, moved = make_checkpoint(num_hidden_layers=layers), list[int]()
    generator = np.random.default_rng(0)
    ids = generator.integers(0, 40, 64).astype(np.int32)
    starts = np.repeat(np.array([[0, 20], [0, 9]], np.int32), [20, 12], axis=1)[:, :32]
    built = build_trainable(
        options(lora_dropout=0.0, full=full), load_model_config(folder), folder, device, positions=64
    )
    model, trained = built.model, built.parameters
    inputs = Inputs.empty(model, 2, 32)
    device.write(inputs.ids, ids)
    device.write(inputs.targets, np.roll(ids, -1))
    device.write(inputs.doc_start, starts)
    if not full:
        start = generator.standard_normal(trained.data.shape).astype(np.float32)
        device.write(trained.data, 0.1 * start)
    whole = device.transfer

    def transfer(src: Any, out: Any) -> None:
        moved.append(src.nbytes)
        whole(src, out)

    device.transfer = transfer
    choices = [(n, offloaded, bool(n % 2)) for n in range(layers + 1) for offloaded in range(n + 1)]
    expected = None
    few = [(0, 0, True), (0, 0, False), (1, 1, True), (2, 1, False), (3, 3, True)]
    for recomputed, offloaded, norms in choices if kind == "cpu" else few:
        model.recompute, model.offload, model.keep_norms = recomputed, offloaded, norms
        device.fill(trained.grad, 0.0)
        moved.clear()
        loss = model.loss(inputs)
        loss.backward()
        found = device.download(loss.data), device.download(trained.grad)
        # There and back; the last layer's input stays.
        assert len(moved) == 2 * min(offloaded, layers - 1), (recomputed, offloaded)
        expected = expected or found
        for array, other in zip(found, expected):
            np.testing.assert_array_equal(array, other)
    assert expected is not None and np.isfinite(expected[0]).all() and np.count_nonzero(expected[1])


def test_each_offloaded_layer_takes_its_input_off_the_peak(make_checkpoint: Any, card: Any) -> None:
    """The last two do not, as the backward begins with them. Runs with a number learn the same, in that memory."""
    folder = make_checkpoint(num_hidden_layers=5)
    model, shape = load_model_config(folder), {"batch_size": 16, "max_length": 64}
    stream = 16 * 64 * model.hidden_size * 4
    plans = [plan_run(options(offload_activations=n, **shape), model, folder, card, 1) for n in (*range(6), True)]
    peaks, hosts = ([getattr(p, name) for p in plans] for name in ("peak_bytes", "host_bytes"))
    assert [peaks[0] - peak for peak in peaks] == [n * stream for n in (0, 1, 2, 3, 3, 3, 3)]
    assert [host - hosts[0] for host in hosts] == [n * stream for n in (0, 1, 2, 3, 4, 4, 4)]
    kept = card.memory().in_use_bytes
    losses, trained = train(options(), folder, wgpu_sibling())
    config = options(offload_activations=3)
    found = train(config, folder, card)
    np.testing.assert_array_equal(found[0], losses)
    np.testing.assert_array_equal(found[1], trained)
    plan = plan_run(config, model, folder, card, 1)
    assert plan is not None
    assert plan.peak_bytes == pytest.approx(card.memory().peak_bytes - kept, rel=0.05)


def test_more_layers_than_there_are_is_refused(make_checkpoint: Any, card: Any) -> None:
    folder = make_checkpoint(num_hidden_layers=5)
    for device in (card, ReferenceDevice()):
        with pytest.raises(WgradError) as refused:
            build_trainable(
                options(offload_activations=6), load_model_config(folder), folder, device, positions=70, contents=False
            )
        assert str(refused.value) == (
            "--offload-activations: must be at most 5, the layers of the model; got 6: leave the number out for all of "
            "them"
        )


def test_a_long_row_in_chunks_learns_the_same(make_checkpoint: Any, card: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """LoRA's gradients are summed in another order: the limit is 1e-4 of the largest. Also replayed and offloaded."""
    folder = make_checkpoint()
    config = options(lora_dropout=0.0, max_steps=3)
    losses, trained = train(config, folder, wgpu_sibling())
    monkeypatch.setattr("wgrad.train.model.model.MLP_CHUNKS_ABOVE", 0)
    monkeypatch.setattr("wgrad.train.model.model.MLP_CHUNK_BYTES", 6 * 88 * 4 * 64)
    plan = plan_run(config, load_model_config(folder), folder, card, 1)
    kept = card.memory().in_use_bytes
    chunked_losses, chunked = train(config, folder, card)
    assert plan is not None and plan.peak_bytes == pytest.approx(card.memory().peak_bytes - kept, rel=0.05)
    np.testing.assert_allclose(chunked_losses, losses, rtol=1e-4)
    np.testing.assert_allclose(chunked, trained, atol=1e-4 * np.abs(trained).max())
    assert not np.array_equal(chunked, trained), "no chunks were made"
    offloaded_losses, offloaded = train(options(lora_dropout=0.0, max_steps=3, offload_activations=True), folder, card)
    np.testing.assert_array_equal(offloaded_losses, chunked_losses)
    np.testing.assert_array_equal(offloaded, chunked)


def test_a_offloaded_array_is_gone_from_the_device_while_others_are_made(card: Any) -> None:
    """At most four of six arrays of 1 MiB, each of its own stretch, are on the device at once."""
    weight = parameter(card.upload(np.ones((512, 512), np.float32)), card)
    start = card.memory().in_use_bytes
    x = Tensor(card.upload(np.full((512, 512), 0.5, np.float32)), card, requires_grad=True)
    offloading, h = Offloading(card, 6), x
    card.reset_peak()
    for _ in range(6):
        h = checkpoint(lambda t: F.mul(t, weight), h, offloading=offloading)
    assert card.memory().peak_bytes - start <= 4 << 20
    F.sum(h).backward()
    assert x.gradient is not None
    np.testing.assert_array_equal(card.download(x.gradient), np.ones((512, 512), np.float32))


def test_only_the_first_stretches_are_offloaded(card: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays of two of six stretches leave, each once the next stretch has begun, and return a stretch early."""
    offloading, start = Offloading(card, 2), card.memory().in_use_bytes
    here = []
    for _ in range(6):
        offloading.put([card.empty((512, 512))])
        here.append((card.memory().in_use_bytes - start) >> 20)
    assert here == [1, 1, 1, 2, 3, 4]
    here.clear()
    for index in reversed(range(6)):
        offloading.take(index)
        here.append((card.memory().in_use_bytes - start) >> 20)
    assert here == [3, 2, 1, 1, 1, 0]
    assert card.host_memory().in_use_bytes == 0


def test_an_array_comes_back_a_stretch_before_it_is_asked_for(card: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    offloading = Offloading(card, 4)
    arrays = [card.upload(np.full(4, n, np.float32)) for n in range(4)]
    for array in arrays:
        offloading.put([array])
    moved: list[float] = []
    whole = card.transfer

    def transfer(src: Any, out: Any) -> None:
        moved.append(float(card.download(src)[0]))
        whole(src, out)

    monkeypatch.setattr(card, "transfer", transfer)
    for index, expected in ((3, [2.0]), (2, [2.0, 1.0]), (1, [2.0, 1.0, 0.0]), (0, [2.0, 1.0, 0.0])):
        (array,) = offloading.take(index)
        assert card.download(array)[0] == index and moved == expected


def test_it_says_where_it_moves_nothing(
    make_checkpoint: Any, text_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ["--data", str(text_data), "--out", str(tmp_path / "out"), "--device", "cpu", "--max-length", "32"]
    words = ["finetune", "--model", str(make_checkpoint()), *out, "--max-steps", "1", "--no-sample", "--eval-fraction"]
    assert cli.main([*words, "0", "--offload-activations", "--memory-limit", "1KiB"]) == 0
    said = capsys.readouterr().out
    assert "--offload-activations moves nothing: this device's memory is main memory" in said
    assert "--memory-limit has no effect: NumPy takes main memory" in said
    assert cli.main([*words, "0", "--offload-activations", "--no-gradient-checkpointing"]) == 2
    assert "--offload-activations: --no-gradient-checkpointing leaves it nothing to offload" in capsys.readouterr().err
    assert cli.main([*words, "0", "--keep-attention", "--no-gradient-checkpointing"]) == 2
    assert "--keep-attention: --no-gradient-checkpointing computes nothing again" in capsys.readouterr().err


# ---- the limit ---------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("3GiB", 3 << 30), ("3g", 3 << 30), ("3GB", 3 * 10**9), ("1.5 MiB", 3 << 19), ("65536", 65536), ("12B", 12)],
)
def test_sizes_are_parsed(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "0", "GiB", "3 GiB more", "-1", "1e9", "0.1", "3XB", "nan"])
def test_texts_that_are_no_size_are_refused(text: str) -> None:
    assert parse_size(text) is None
    with pytest.raises(WgradError, match="--memory-limit: must be a size, as 3GiB or 800MiB; got"):
        RunOptions(memory_limit=text)


def test_what_a_limit_leaves_no_room_for_is_refused_with_what_fits(make_checkpoint: Any, card: Any) -> None:
    """The proposed options do fit: the real memory pool runs them within the limit."""
    folder = make_checkpoint(num_hidden_layers=5)
    model = load_model_config(folder)
    offloaded = plan_run(options(offload_activations=True), model, folder, card, 1)
    assert offloaded is not None
    limit, said = offloaded.reserved_bytes, ""
    while "--offload-activations" not in said:  # down to where recomputing alone is not enough
        limit -= limit // 25
        with pytest.raises(WgradError, match="^--memory-limit: the run takes about [^\n]*$") as refused:
            plan_run(options(gradient_checkpointing=None, memory_limit=str(limit)), model, folder, card, 1)
        said = str(refused.value)
    found = re.search(r"with --gradient-checkpointing --offload-activations (\d) it takes (.*)$", said)
    assert found is not None
    number = int(found[1])
    plan = plan_run(options(offload_activations=number, memory_limit=str(limit)), model, folder, card, 1)
    assert plan is not None and size(plan.reserved_bytes) == found[2]
    with pytest.raises(WgradError, match="the run takes about"):  # with one layer fewer
        plan_run(options(offload_activations=number - 1, memory_limit=str(limit)), model, folder, card, 1)
    kept = card.memory().reserved_bytes
    card.limit_memory(kept + limit)
    train(options(offload_activations=number), folder, card)
    assert card.memory().peak_reserved_bytes <= kept + limit
    with pytest.raises(
        WgradError, match=r"even with .* --batch-size 1 it takes about .*: allow it that, or use a smal"
    ):
        plan_run(options(memory_limit="1KiB"), model, folder, card, 1)


@pytest.mark.parametrize(
    ("given", "limit", "streaming", "said"),
    [
        ({}, 650, 500, "--offload-activations 4"),
        ({"offload_activations": 2}, 650, 500, "--offload-activations 4"),
        ({}, 400, 500, "--offload-activations"),
        ({}, 390, 500, "--offload-activations 2 --stream-weights on"),
        ({}, 390, 700, "--stream-weights on"),
        ({"offload_activations": True}, 390, 300, "--stream-weights on"),
        ({"stream_weights": "auto"}, 390, 500, "--offload-activations 2"),
    ],
)
def test_what_is_said_of_a_limit_has_the_fewest_layers(
    card: Any, given: dict[str, Any], limit: int, streaming: int, said: str
) -> None:
    """A run takes 1,000 MiB, 100 less for each of seven layers but the last, and `streaming` less with streaming."""

    def plan(config: RunOptions, within: int | None) -> Any:
        if config.stream_weights == "auto":
            try:
                return plan(replace(config, stream_weights="off"), within)
            except OutOfMemory:
                return plan(replace(config, stream_weights="on"), within)
        offloaded = 7 if config.offload_activations is True else config.offload_activations
        takes = 1000 - 100 * min(offloaded, 6) - streaming * (config.stream_weights == "on")
        if within is not None and takes << 20 > within:
            raise OutOfMemory("no more")
        return SimpleNamespace(config=config, reserved_bytes=takes << 20)

    config = RunOptions(
        **{"gradient_checkpointing": True, "stream_weights": "off", "memory_limit": f"{limit}MiB", **given}
    )
    assert f"the limit is {limit}.0 MiB: with {said} it takes" in str(beyond_limit(config, card, 7, plan))


def test_attention_that_is_kept_is_what_a_limit_takes_first(make_checkpoint: Any, card: Any) -> None:
    folder = make_checkpoint()
    model, rows = load_model_config(folder), {"max_length": 70, "batch_size": 64}
    kept, again = (plan_run(options(**rows, keep_attention=k), model, folder, card, 1) for k in (True, False))
    assert kept is not None and again is not None
    o_and_lse = model.q_size_of(0) * 4 + model.num_attention_heads * 4  # of a token
    assert kept.peak_bytes - again.peak_bytes >= (model.num_hidden_layers - 1) * 64 * 70 * o_and_lse
    limit = str((kept.peak_bytes + again.peak_bytes) // 2)
    with pytest.raises(WgradError, match="with --no-keep-attention"):
        plan_run(options(**rows, keep_attention=True, memory_limit=limit), model, folder, card, 1)


def test_attention_that_is_kept_is_offloaded_with_its_layer(make_checkpoint: Any, card: Any) -> None:
    folder = make_checkpoint(num_hidden_layers=5)
    model, rows = load_model_config(folder), {"max_length": 64, "batch_size": 48, "keep_attention": True}
    plans = [plan_run(options(**rows, offload_activations=n), model, folder, card, 1) for n in (0, 2)]
    before, offloaded = ((p.peak_bytes, p.host_bytes) for p in plans if p is not None)
    a_token = model.hidden_size * 4 + model.q_size_of(0) * 4 + model.num_attention_heads * 4  # the input, o and lse
    a_token += 7 * 4 * 4  # the product with A of seven projections, of rank 4
    assert offloaded[1] - before[1] == 2 * 64 * 48 * a_token
    assert before[0] - offloaded[0] == pytest.approx(2 * 64 * 48 * a_token, rel=0.001)


def test_the_last_recomputed_layers_input_leaves_the_device_too(make_checkpoint: Any, card: Any) -> None:
    """It does so if later layers keep theirs."""
    folder, shape = make_checkpoint(num_hidden_layers=4), {"max_length": 64, "batch_size": 16}
    model = load_model_config(folder)
    configs = [options(gradient_checkpointing=2, offload_activations=n, **shape) for n in (0, 1, 2)]
    peaks = [plan.peak_bytes for config in configs if (plan := plan_run(config, model, folder, card, 1))]
    stream = 16 * 64 * model.hidden_size * 4
    assert [peaks[0] - peak for peak in peaks] == [0, stream, 2 * stream]


@pytest.mark.parametrize("batches", [1, 2])
def test_a_first_step_without_memory_recomputes_all_layers(make_checkpoint: Any, batches: int) -> None:
    """Loss and weights are those of a run that always did. In a later step, the error ends the run."""
    folder, results = make_checkpoint(num_hidden_layers=3), []
    for recomputed, fails_at in ((True, 0), (False, 1), (False, 2)):
        config = options(gradient_checkpointing=recomputed, lora_dropout=0.0, gradient_accumulation_steps=batches)
        device = ReferenceDevice()
        built = build_trainable(config, load_model_config(folder), folder, device, positions=70)
        trainer, said, calls = Trainer(built.model, build_optimizer(config, built.parameters), config), list[str](), 0
        trainer._say = said.append
        whole = trainer._forward_backward

        def forward_backward(
            whole: Any = whole, device: Any = device, trainer: Any = trainer, at: int = fails_at
        ) -> None:
            nonlocal calls
            calls += 1
            whole()
            if calls == at:
                raise OutOfMemory("full")

        trainer._forward_backward = forward_backward  # type: ignore[method-assign]
        document = Document(np.arange(70, dtype=np.int32) % 40, np.ones(70, bool))
        step = BatchStream([document] * 2 * batches * 2, config).get(0)
        if fails_at == 2:
            with pytest.raises(OutOfMemory):
                for _ in range(2):
                    trainer.step(step, 1e-2)
            continue
        trainer.step(step, 1e-2)
        assert len(said) == (fails_at == 1) and built.model.recomputed == 3
        results.append((trainer.read_history()[0, 0], device.download(built.parameters.data)))
    assert results[0][0] == results[1][0]
    np.testing.assert_array_equal(results[0][1], results[1][1])


def test_norms_that_are_not_kept_take_no_memory(make_checkpoint: Any, card: Any) -> None:
    """With adapters, nothing else reads these two outputs of each layer in the backward."""
    folder, shape = make_checkpoint(num_hidden_layers=3), {"max_length": 64, "batch_size": 16, "lora_dropout": 0.0}
    model = load_model_config(folder)
    kept = [options(gradient_checkpointing=False, keep_norms=keep, **shape) for keep in (None, True, False)]
    peaks = [plan.peak_bytes for config in kept if (plan := plan_run(config, model, folder, card, 1))]
    assert peaks[0] == peaks[1] and peaks[1] - peaks[2] >= 2 * 2 * 16 * 64 * model.hidden_size * 4
