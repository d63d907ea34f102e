"""Fitting a run into memory: the search, choices of --vram, `wgrad plan`, and whether runs need what was planned."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.train import conftest
from tests.train.conftest import choose_card, discrete_sibling
from wgrad.autograd.reference import ReferenceDevice
from wgrad.autograd.select_device import gpu_elsewhere
from wgrad.device.errors import TooLarge, WgradError
from wgrad.train.commands.cli import main
from wgrad.train.data.packing import ROW_STEP
from wgrad.train.model.load_config import load_model_config, parse_model_config
from wgrad.train.options.config_yaml import read_config_file
from wgrad.train.options.finetune_config import RunOptions
from wgrad.train.options.option_text import size
from wgrad.train.options.resolve import resolve_options
from wgrad.train.plan import fastest, fewer_layers, speed
from wgrad.train.plan import fit as fit_module
from wgrad.train.plan.fit import Fit, modes, words
from wgrad.train.plan.longest import most_that_fits
from wgrad.train.plan.memory_limit import fewest_offloaded, in_large_chunks
from wgrad.train.plan.plan import run_dry
from wgrad.train.plan.rates import Rates
from wgrad.train.plan.settle import batch_sizes, line, settle
from wgrad.train.ranks.world import World
from wgrad.train.step.resident import plannable
from wgrad.train.step.room import Room, room_of
from wgrad.train.step.search import beside, largest, planned_beside


# ---- the search --------------------------------------------------------------------------------
@dataclass
class Line:
    """A memory need of `first` bytes and `each` per unit, rounded up to `block`. It counts the questions."""

    first: int
    each: float
    limit: int
    block: int = 1
    asked: list[int] = field(default_factory=list)

    def plan(self, count: int) -> Any:
        self.asked.append(count)
        peak = -int(-(self.first + self.each * count) // self.block) * self.block
        return SimpleNamespace(peak_bytes=peak) if peak <= self.limit else None


@pytest.mark.parametrize("limit", [0, 1000, 1001, 1999, 4000, 4321, 90_000, 1_000_000])
@pytest.mark.parametrize(("each", "block"), [(1000, 1), (17.3, 1), (17.3, 256), (3, 4096), (0, 1)])
@pytest.mark.parametrize("most", [0, 1, 5, 1024])
def test_the_search_finds_the_largest_that_fits(limit: int, each: float, block: int, most: int) -> None:
    line = Line(1, each, limit, block)
    found = largest(line.plan, most, limit)
    assert len(set(line.asked)) == len(line.asked) <= 16 and all(1 <= n <= most for n in line.asked)
    wanted = max((n for n in range(1, most + 1) if line.plan(n)), default=0)
    assert found == largest(line.plan, most, limit // 2) == wanted  # the limit is about what a plan may take
    for off in (0, 1, -1, 40, most):  # from a guess, which is seldom wrong
        line.asked.clear()
        assert beside(wanted + off, line.plan, most) == wanted and len(set(line.asked)) == len(line.asked)
        assert len(line.asked) <= (2 if not off else 2 + 2 * abs(off).bit_length())


@pytest.mark.parametrize("wanted", [1, 7, 8, 9, 13, 50, 999])
def test_the_search_looks_around_the_number_that_memory_predicts(wanted: int) -> None:
    """Weights take as much as 300 units: only the numbers within 5 % of the right one are halved."""
    line = Line(300_000, 1000, 300_500 + 1000 * wanted)
    assert largest(line.plan, 1024, line.limit) == wanted
    assert len(line.asked) <= 4 + math.ceil(math.log2(0.1 * wanted + 2))


@pytest.mark.parametrize("fits", range(5))
def test_the_plan_of_the_number_that_is_found_is_returned(fits: int) -> None:
    """The plan of 0, which was made before, is returned if no other number has one."""
    for guess in range(6):
        asked = list[int]()

        def plan(number: int, asked: list[int] = asked) -> str | None:
            asked.append(number)
            return f"plan of {number}" if number <= fits else None

        assert planned_beside("plan of 0", guess, plan, 4) == f"plan of {fits}" and 0 not in asked
        for more in range(2):
            asked.clear()
            further: Any = partial(lambda more, found: fits - int(found[-1]) + more, more)
            found = planned_beside("plan of 0", 1, plan, 4, further)
            assert found == f"plan of {fits}" and len(set(asked)) == len(asked) <= (3 if not more else 4)


def test_where_all_fit_the_search_ends_soon() -> None:
    """The search is short although the first units take more than the others."""
    asked = []

    def plan(count: int) -> Any:
        asked.append(count)
        return SimpleNamespace(peak_bytes=math.isqrt(count << 20))

    assert largest(plan, 640, 26_000) == 640 and len(asked) <= 8


class Card:
    """A device with the attributes that `modes` reads."""

    def __init__(self, shared_memory: bool = False) -> None:
        self.shared_memory = shared_memory


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            {},
            "--no-gradient-checkpointing|--gradient-checkpointing|--offload-activations|--offload-activations "
            "--stream-weights on",
        ),
        ({"gradient_checkpointing": False}, "--no-gradient-checkpointing"),
        ({"gradient_checkpointing": True, "stream_weights": "off"}, "--gradient-checkpointing|--offload-activations"),
        ({"offload_activations": True}, "--offload-activations|--offload-activations --stream-weights on"),
        (
            {"offload_activations": 1},
            "--offload-activations 1|--offload-activations 1 --stream-weights on",
        ),
        ({"stream_weights": "on"}, "--offload-activations --stream-weights on"),
        ({"full": True}, "--no-gradient-checkpointing|--gradient-checkpointing|--offload-activations"),
        ({"qat": "q4_0"}, "--no-gradient-checkpointing|--gradient-checkpointing|--offload-activations"),
    ],
)
def test_what_is_left_open_is_chosen_and_no_more(options: dict[str, Any], expected: str) -> None:
    config = RunOptions(**options)
    assert "|".join(map(words, modes(config, Card()))) == expected  # type: ignore[arg-type]
    shared = "|".join(map(words, modes(config, Card(shared_memory=True))))  # type: ignore[arg-type]
    assert "offload" not in shared and set(shared.split("|")) <= {
        "--no-gradient-checkpointing",
        "--gradient-checkpointing",
        "--gradient-checkpointing --stream-weights on",
    }


def test_batches_divide_the_rows_of_a_step_and_leave_each_rank_one() -> None:
    config = RunOptions(batch_size=3, gradient_accumulation_steps=4)
    assert batch_sizes(config) == [1, 2, 3, 4, 6, 12]
    assert batch_sizes(config, ranks=5) == [1, 2] and batch_sizes(config, ranks=99) == [3]
    assert len(batch_sizes(RunOptions(batch_size=10**9, gradient_accumulation_steps=10**9))) < 1024


# ---- on a device -------------------------------------------------------------------------------
ROWS: dict[str, Any] = {
    "max_length": 70,
    "batch_size": 1,
    "gradient_accumulation_steps": 12,
    "lora_r": 4,
    "sample": False,
}


def test_the_first_mode_and_the_largest_batch_that_fit_are_chosen(make_checkpoint: Any, card: Any) -> None:
    """For each limit, down to the least of any mode: the choice fits, and the next better one does not."""
    folder = make_checkpoint(num_hidden_layers=5)
    config, model = RunOptions(**ROWS, gradient_checkpointing=None), load_model_config(folder)
    ladder = list(modes(config, card))
    whole = run_dry(RunOptions(**{**ROWS, **ladder[0], "batch_size": 12}), model, folder, card, 1, None)
    limit, seen = 2 * whole.reserved_bytes, list[tuple[int, int]]()
    while True:
        fit = Fit(replace(config, vram=str(limit)), model, folder, card, 1, limit)
        try:
            plan = fit.choose(batch_sizes(config))
        except WgradError as error:
            assert "even with --batch-size 1 --offload-activations --stream-weights on the run takes" in str(error)
            break
        chosen = plan.config
        assert chosen.batch_size * chosen.gradient_accumulation_steps == 12 and plan.reserved_bytes <= limit
        way = mode_of(chosen)
        way |= {name: bool(way[name]) for name in ("gradient_checkpointing", "offload_activations")}
        number = ladder.index(way)
        larger = [n for n in (1, 2, 3, 4, 6, 12) if n > chosen.batch_size][:1]
        assert not any(fit.plan(batch_size=n, **ladder[number]) for n in larger)
        assert not number or fit.plan(batch_size=1, **ladder[number - 1]) is None
        seen.append((number, -chosen.batch_size))
        limit = limit * 2 // 3
    assert seen == sorted(seen) and seen[0] == (0, -12) and len({number for number, _ in seen}) >= 2, seen


OFFLOADED: dict[str, Any] = {
    "max_length": 256,
    "batch_size": 1,
    "gradient_accumulation_steps": 1,
    "lora_r": 4,
    "sample": False,
}
STREAM = 256 * 48 * 4  # bytes of a layer's input of such a row


def least_limit(config: RunOptions, folder: Path, card: Any) -> int:
    """Return a limit in bytes that the run fits, at most a tenth of a layer's input above the least."""
    model = load_model_config(folder)

    def fits(limit: int) -> bool:
        return Fit(config, model, folder, card, 24, limit).plan() is not None

    high = run_dry(config, model, folder, card, 24, None).reserved_bytes
    low = high - 4 * STREAM
    while fits(low):
        low, high = low - 4 * STREAM, low
    while high - low > STREAM // 10:
        limit = (low + high) // 2
        low, high = (low, limit) if fits(limit) else (limit, high)
    return high


@pytest.mark.parametrize("streamed", ["off", "on"])
def test_as_few_layers_are_offloaded_as_fit(make_checkpoint: Any, card: Any, streamed: Any) -> None:
    """Each number from none to all is the choice under some limit. Options that are given stay."""
    folder = make_checkpoint(num_hidden_layers=6)
    config = RunOptions(**OFFLOADED, gradient_checkpointing=True, stream_weights=streamed, resident_layers=0)
    limit = least_limit(config, folder, card)
    for number in range(5):
        fit = Fit(replace(config, vram=str(limit)), load_model_config(folder), folder, card, 24, limit)
        chosen = fit.choose([1]).config
        assert chosen.offload_activations == number and fit.plan(offload_activations=number) is not None
        said = line(chosen, mode_of(chosen), limit)
        assert f" --offload-activations {number}" in said if number else "--offload" not in said
        if number:
            assert fit.plan(offload_activations=number - 1) is None
        for given in (True, 5) if number == 2 else ():
            asked = replace(fit, config=replace(fit.config, offload_activations=given))
            assert asked.choose([1]).config.offload_activations is given
        limit -= STREAM * 64 // 63
    with pytest.raises(WgradError, match="even with --batch-size 1 --offload-activations"):
        replace(fit, config=replace(fit.config, vram=str(limit)), limit=limit).choose([1])


def mode_of(config: RunOptions) -> dict[str, Any]:
    return {name: getattr(config, name) for name in ("gradient_checkpointing", "offload_activations", "stream_weights")}


def test_more_rows_do_not_fit_where_fewer_do_not(make_checkpoint: Any, card: Any, monkeypatch: Any) -> None:
    """Few rows also go through the MLP in chunks if they do not fit otherwise: whole, they take more than many rows in
    chunks."""
    monkeypatch.setattr("wgrad.train.step.activations.LEAST_MLP_CHUNK_BYTES", 1 << 20)
    for module in ("model.model", "plan.memory_limit"):
        monkeypatch.setattr(f"wgrad.train.{module}.MLP_CHUNKS_ABOVE", 256)
    folder = make_checkpoint(intermediate_size=1024)
    model, mode = load_model_config(folder), {"gradient_checkpointing": True, "offload_activations": False}
    config = RunOptions(**AUTO | {"batch_size": 1, "compute": "float32", "memory_limit": "32MiB"} | mode)
    whole, chunked = (run_dry(replace(config, batch_size=n), model, folder, card, 24, None).peak_bytes for n in (4, 5))
    assert chunked < 0.8 * whole
    limit = (chunked + whole) // 2
    fit = Fit(config, model, folder, card, 24, limit)
    most = fit.largest_batch(mode)
    plans = [fit.plan(batch_size=n, **mode) for n in range(1, most + 2)]
    assert most > 5 and [plan is not None for plan in plans] == [True] * most + [False]
    found = plans[3]
    assert found is not None and found.config.mlp_chunk == "1MiB" and found.peak_bytes <= limit
    assert plans[0] is not None and plans[0].config.mlp_chunk is None


def test_chunks_of_the_mlp_are_large_where_they_fit() -> None:
    options: dict[str, Any] = {"memory_limit": "8GiB", "gradient_checkpointing": True, "max_length": 8192}
    for changed, fits, chosen, plans in (
        (dict[str, Any](), True, "768MiB", 1),
        ({}, False, None, 1),
        ({"mlp_chunk": "300MiB"}, True, "300MiB", 0),
        ({"memory_limit": None}, True, None, 0),  # they are large
        ({"memory_limit": "30GiB"}, True, None, 0),  # the same
        ({"max_length": 4096}, True, None, 0),  # there are none
        ({"gradient_checkpointing": False}, True, None, 0),
    ):
        planned = list[RunOptions]()

        def fitting(config: RunOptions) -> Any:
            planned.append(config)  # noqa: B023
            return SimpleNamespace(config=config) if fits else None  # noqa: B023

        found = SimpleNamespace(config=RunOptions(**(options | changed)))
        assert in_large_chunks(found, found.config, fitting).config.mlp_chunk == chosen and len(planned) == plans


def test_few_plans_find_the_fewest() -> None:
    """Find the fewest of 80 layers, and all if only that fits."""
    for wanted in range(80):
        asked: list[int] = []

        def fitting(config: RunOptions, wanted: int = wanted, asked: list[int] = asked) -> Any:
            asked.append(config.offload_activations)
            return SimpleNamespace(config=config) if config.offload_activations >= wanted else None

        found = SimpleNamespace(config=RunOptions(offload_activations=True))
        number = fewest_offloaded(found, 80, fitting).config.offload_activations
        assert number is True if wanted == 79 else number == wanted
        assert len(asked) <= 8 and asked[0] == 0  # where none has to be, one plan says so
        for bytes_for in (-1, 0, 79 - wanted, 90 - wanted, 40, 79):  # there seems to be room for so many inputs
            asked.clear()
            number = fewest_offloaded(found, 80, fitting, bytes_for).config.offload_activations
            assert number is True if wanted == 79 else number == wanted
            assert len(asked) <= (bytes_for.bit_length() + 1 if bytes_for >= 79 - wanted else 13)


AUTO: dict[str, Any] = {**OFFLOADED, "max_length": 64, "batch_size": 4, "stream_weights": "off"}


def test_as_few_layers_are_recomputed_as_fit(make_checkpoint: Any, card: Any, monkeypatch: Any) -> None:
    """Each number is the choice under some limit. If copies cost nothing, all inputs are offloaded."""
    monkeypatch.setattr(type(card), "copied_alongside", lambda self, work: float(work))
    monkeypatch.setattr("wgrad.train.plan.memory_limit.MLP_CHUNKS_ABOVE", 0)
    folder, layers = make_checkpoint(num_hidden_layers=3), 3
    config, model, world = RunOptions(**AUTO), load_model_config(folder), World()
    peaks = []
    for number in range(layers + 1):
        plan = run_dry(
            replace(config, gradient_checkpointing=number, offload_activations=number), model, folder, card, 24, None
        )
        peaks.append(plan.reserved_bytes)
    for number in (0, 1, layers):
        limit = peaks[number] * 64 // 63 + 64
        fit = Fit(replace(config, memory_limit=str(limit)), model, folder, card, 24, limit)
        chosen = settle(fit.config, fit, room_of(fit.config, card), world, pinned=False)
        recomputed = chosen.mode["gradient_checkpointing"]
        recomputed = layers if recomputed is True else int(recomputed)
        assert recomputed <= number and chosen.plan is not None
        assert int(chosen.mode["offload_activations"]) == recomputed
        assert chosen.mode.get("mlp_chunk") == ("768MiB" if recomputed else None)
        if recomputed:
            fewer = recomputed - 1
            assert fit.plan(gradient_checkpointing=fewer, offload_activations=fewer) is None
        kept = layers - recomputed
        (said,) = chosen.lines
        assert f"those of {'all' if kept == layers else f'{kept} of' if kept else 'no'} " in said, said
        assert f"of {size(limit)} (--memory-limit)" in said
    # Another rank has less memory: both recompute as many layers.
    few = {**chosen.mode, "gradient_checkpointing": False, "offload_activations": False}
    ample = replace(fit, config=replace(config, memory_limit="1GiB"), limit=1 << 30)
    both = settle(ample.config, ample, room_of(ample.config, card), Other((4, layers)), pinned=True, before=few)
    assert both.mode["gradient_checkpointing"] is True and both.plan is None
    assert peaks[0] > peaks[-1]


class Other(World):
    """A world with one other rank, which votes for this."""

    size = 2

    def __init__(self, vote: Any) -> None:
        super().__init__()
        self.vote = vote

    def all_gather(self, value: Any, what: str) -> list[Any]:
        return [value, self.vote]


def test_a_mode_of_before_that_no_longer_fits_is_chosen_anew(make_checkpoint: Any, card: Any) -> None:
    """So is one that options contradict or a damaged file has. More memory than before changes nothing."""
    folder = make_checkpoint(num_hidden_layers=3)
    config, model = RunOptions(**AUTO), load_model_config(folder)
    fit = Fit(config, model, folder, card, 24, 1 << 30)
    before = {"gradient_checkpointing": 2, "offload_activations": 1, "stream_weights": "off"}
    room = Room(1 << 30, "free")

    def mode(config: RunOptions, before: Any, limit: int = 1 << 30) -> Any:
        found = replace(fit, config=config, limit=limit)
        return settle(config, found, replace(room, limit=limit), World(), pinned=True, before=before).mode

    assert mode(config, before) == before
    assert mode(replace(config, offload_activations=2), before)["offload_activations"] == 2
    for damaged in ({"gradient_checkpointing": 9}, {"gradient_checkpointing": "x"}, {"color": 1}):
        assert mode(config, damaged)["gradient_checkpointing"] is False
    limit = least_limit(replace(config, gradient_checkpointing=True), folder, card)
    assert mode(config, before, limit) != before
    # Into less than any mode takes: the device has the last word.
    chosen = settle(config, replace(fit, limit=1000), Room(1000, "free"), World(), pinned=False)
    assert chosen.plan is None and chosen.mode["offload_activations"] is True and "do not fit" in chosen.lines[0]


def test_a_device_that_is_not_planned_for_says_so(make_checkpoint: Any) -> None:
    """NumPy keeps activations by their estimate alone, whatever --vram says."""
    folder = make_checkpoint(num_hidden_layers=3)
    for room, why in ((Room(None, "shared"), "shared"), (Room(1 << 30, "--vram"), "--vram is not planned for")):
        fit = Fit(RunOptions(**AUTO), load_model_config(folder), folder, ReferenceDevice(), 24, room.limit or 0)
        (line,) = settle(fit.config, fit, room, World(), pinned=False).lines
        assert line.startswith(f"activations: those of all 3 layers are kept: {why}")
        assert "may take up to 2.00 GiB" in line and line.endswith("(--gradient-checkpointing N changes that)")


class Told(ReferenceDevice):
    """A device whose driver reports this memory."""

    shared_memory = False

    def __init__(self, free: int | None, total: int | None) -> None:
        super().__init__()
        self.free, self.facts = free, {"memory_bytes": total}

    def free_memory(self) -> Any:
        return self.free


@pytest.mark.parametrize(
    ("most", "each", "before", "found", "planned"),
    [
        (20, 40, 0, 20, [20]),  # all fit by forecast, and do
        (20, 40, 20, 20, []),  # as with more memory, too
        (20, 40, 19, 20, [20]),
        (30, 40, 0, 25, [25, 26]),
        (30, 40, 30, 25, [25, 26]),  # a forecast says that they do not fit
        (25, 40, 0, 25, [25]),  # by so little that only a plan of all layers knows
        (101, 10, 101, 100, [100, 101]),
        (9, 200, 0, 5, [5, 6]),
    ],
)
def test_the_largest_number_is_found_with_few_plans(
    most: int, each: int, before: int, found: int, planned: list[int]
) -> None:
    """Few plans of all layers, and none of few layers where a forecast without a limit is clear."""
    limit, asked, short = 1024, list[int](), list[int]()

    def plan(n: int) -> Any:
        asked.append(n)
        return SimpleNamespace(peak_bytes=n * each) if n * each <= plannable(limit) else None

    def fits(n: int, room: float) -> Any:
        short.append(n)
        return SimpleNamespace(peak_bytes=n * each / 4) if n * each / 4 <= room else None

    forecast = SimpleNamespace(peak=lambda n: n * each, others=lambda n: n * each * 3 / 4, fits=fits)
    fit = SimpleNamespace(limit=limit, forecast=forecast, plan=lambda n: plan(n), changed=lambda n: n)
    assert most_that_fits(fit, lambda n: {"n": n}, most, before) == found
    assert asked == planned and 1 not in short and (8 in short) == (8 * each > limit / 2 and most != 20)


def test_main_memory_has_no_limit_but_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for free, said in ((3 << 30, " (3.00 GiB are free)"), (None, "")):
        monkeypatch.setattr("wgrad.train.step.room.free_memory", lambda free=free: free)
        room = room_of(RunOptions(), ReferenceDevice())
        assert room == Room(None, f"main memory is shared with other programs{said}")


def test_a_part_of_the_memory_stays_free() -> None:
    config = RunOptions()
    assert room_of(config, Told(16 << 30, 24 << 30)) == Room(15 << 30, "free, less a reserve of 1.00 GiB")
    assumed = room_of(config, Told(None, 24 << 30))
    assert assumed.limit == 18 << 30 and "three quarters of the GPU's 24.00 GiB" in assumed.words
    assert room_of(config, Told(None, None)).limit is None
    assert room_of(config, Told(0, 24 << 30)).limit == 0  # others have all of it
    assert room_of(RunOptions(vram="2GiB"), Told(1, 1)) == Room(2 << 30, "--vram")


def test_a_gpu_without_free_memory_has_room_for_nothing(
    make_checkpoint: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    choose_card(monkeypatch)
    monkeypatch.setattr(type(discrete_sibling()), "free_memory", lambda self: 0)
    found = planned(capsys, "--model", make_checkpoint(), "--lora-r", 4, "--max-length", 32, "--no-sample")
    assert found["limit_bytes"] == 0 and found["peak_bytes"] > 0
    assert {(entry["longest_seq_len"], entry["largest_batch_size"]) for entry in found["fits"]} == {(0, 0)}


def test_an_array_larger_than_the_device_has_does_not_fit(make_checkpoint: Any, card: Any) -> None:
    """The amount of memory does not matter."""
    folder = make_checkpoint()
    config, model = RunOptions(**ROWS, gradient_checkpointing=False, stream_weights="off"), load_model_config(folder)
    fit = Fit(config, model, folder, card, 1, 1 << 40)
    assert fit.plan(batch_size=64) is not None
    card.max_buffer_bytes = 1 << 20
    assert fit.plan(batch_size=64) is None and fit.plan(batch_size=1) is not None


def test_ranks_take_the_batch_that_fits_all_of_them(make_checkpoint: Any, card: Any) -> None:
    """A resumed run keeps its batch size, whatever would fit."""
    folder = make_checkpoint()
    config = RunOptions(**ROWS, vram="1GiB")
    fit = Fit(config, load_model_config(folder), folder, card, 1, 1 << 30)

    class Three(World):
        size = 3

        def all_gather(self, value: Any, what: str) -> list[Any]:
            return [value, (2, 0), (None, 0)]  # a smaller GPU, and NumPy

    room = room_of(config, card)
    chosen = settle(config, fit, room, Three(), pinned=False)
    settled, mode, said = chosen.config, chosen.mode, chosen.lines[0]
    assert (settled.batch_size, settled.gradient_accumulation_steps, mode["gradient_checkpointing"]) == (2, 6, False)
    assert said.endswith(
        "--batch-size 2 --gradient-accumulation-steps 6 --no-gradient-checkpointing --keep-gated --keep-dequantized; a "
        "step is 12 sequences, as asked"
    )
    numpy = Fit(config, fit.model_config, folder, ReferenceDevice(), 1, 1 << 30)
    chosen = settle(config, numpy, room, Three(), pinned=False)
    settled, mode, said = chosen.config, chosen.mode, chosen.lines[0]
    assert (
        settled.batch_size == 2
        and not mode
        and said.endswith("--gradient-accumulation-steps 6; a step is 12 sequences, as asked")
    )
    assert settle(config, fit, room, World(), pinned=False).config.batch_size == 12
    assert settle(config, fit, room, World(), pinned=True).config == config


SHAPES = {
    "LlamaForCausalLM": {"num_hidden_layers": 10},
    "GptOssForCausalLM": {"num_hidden_layers": 12},  # every second layer slides
}


@pytest.mark.parametrize("architecture", SHAPES)
def test_few_dry_runs_of_all_layers_find_what_fits(architecture: str, make_checkpoint: Any, monkeypatch: Any) -> None:
    """Plans from fewer layers equal those of all layers."""
    model, ran = make_checkpoint(architecture, **SHAPES[architecture]), list[tuple[int, RunOptions]]()
    config = load_model_config(model)
    for module in (fit_module, fewer_layers):
        plain = module.run_dry

        def noted(options: RunOptions, config: Any, *rest: Any, plain: Any = plain) -> Any:
            ran.append((config.num_hidden_layers, options))
            return plain(options, config, *rest)

        monkeypatch.setattr(module, "run_dry", noted)
    options = RunOptions(max_length=64, batch_size=4, vram="12MiB", sample=False, compute="float32")
    fit = Fit(options, config, model, gpu_elsewhere(""), 24, 12 << 20)
    mode: dict[str, Any] = {"gradient_checkpointing": True, "offload_activations": False, "stream_weights": "off"}
    most = fit.largest_batch(mode)
    assert fit.plan(batch_size=most, **mode) is not None and fit.plan(batch_size=most + 1, **mode) is None
    whole = [layers for layers, _ in ran].count(config.num_hidden_layers) - 1  # what does not fit is planned once
    forecast = fit.forecast
    assert forecast is not None and 2 <= whole <= 4 and len(ran) <= 20
    plan = run_dry(replace(options, **mode), config, model, fit.device, 24, None)
    assert forecast.peak(replace(options, **mode)) == pytest.approx(plan.peak_bytes, rel=0.01)
    # A run that keeps attention's outputs recomputes; that of another mode does not.
    kept = replace(fit, config=replace(options, keep_attention=True), limit=1 << 30)
    assert kept.plan(gradient_checkpointing=False, offload_activations=False, stream_weights="off") is not None


@pytest.mark.parametrize("architecture", ["GPT2LMHeadModel", "Mamba2ForCausalLM"])
def test_models_whose_files_have_other_names_are_shortened(architecture: str, make_checkpoint: Any) -> None:
    folder = make_checkpoint(architecture, num_hidden_layers=11)
    shorter = fewer_layers.Shorter.of(load_model_config(folder), folder)
    assert shorter is not None and (shorter.model.num_hidden_layers, shorter.left_out) == (2, 9)


def test_what_a_binding_cannot_hold_does_not_fit(
    make_checkpoint: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Memory is ample, but no array may be larger than the hidden states of 500 tokens, or the logits of 80."""
    folder = make_checkpoint(num_hidden_layers=10, intermediate_size=88, max_position_embeddings=4096)
    model = load_model_config(folder)
    device = gpu_elsewhere("")
    monkeypatch.setattr(device, "max_binding_bytes", 500 * 4 * model.hidden_size)
    monkeypatch.setattr("wgrad.train.commands.plan.select_device", lambda *_: device)
    options = RunOptions(max_length=48, vram="1GiB", sample=False, compute="float32", lora_r=4)
    fit = Fit(options, model, folder, device, 24, 1 << 30)
    plain: dict[str, Any] = {"gradient_checkpointing": False, "offload_activations": False, "stream_weights": "off"}
    longest, most = fit.longest_rows(plain), fit.largest_batch(plain)
    assert 0 < longest < 500 and longest % ROW_STEP == 0 and 0 < 48 * most < 500
    beyond: list[dict[str, Any]] = [{"batch_size": 1, "max_length": longest + ROW_STEP}, {"batch_size": most + 1}]
    for more in beyond:
        with pytest.raises(TooLarge, match="fit one binding of this device"):
            run_dry(replace(options, **plain, **more), model, folder, device, 24, None)
        assert fit.unlimited(replace(options, **plain, **more)) is None
    least = run_dry(replace(options, **fit.last_mode), model, folder, device, 24, None)
    with monkeypatch.context() as patch:  # what keeps more is too large as well
        patch.setattr(Fit, "unlimited", lambda self, config: None if config.keep_dequantized else least)
        assert fit.freely() is least
        patch.setattr(Fit, "_as_run", lambda *_: None)
        assert fit.curve(least) == [least]
    bounds = fastest.least_seconds(fit, {n: replace(options, max_length=20, batch_size=n) for n in (1, 2, 16)}, Rates())
    assert bounds[1] < bounds[2] < bounds[16] == math.inf
    small = make_checkpoint(name="small", num_hidden_layers=2, max_position_embeddings=1024)
    asked = ["plan", "--model", str(small), "--compute", "float32", "--lora-r", "4", "--no-sample"]
    # Larger batches of a step of 32 are too large as well, and so are points of the table that keep more.
    assert main([*asked, "--max-length", "48", "--vram", "1GiB", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["options"]["batch_size"] * 48 < 500 and len(found["curve"]) > 1
    assert {entry["longest_seq_len"] < 500 for entry in found["fits"]} == {True}
    # What was asked for is refused as ever.
    for limit in (["--memory-limit", "1GiB"], []):
        assert main([*asked, "--max-length", "800", "--batch-size", "1", *limit]) == 2
        assert "fit one binding of this device" in capsys.readouterr().err


def planned(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["plan", *map(str, words), "--device", "wgpu", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_what_is_said_to_fit_is_the_most_that_does(
    make_checkpoint: Any, wgpu_device: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_checkpoint(max_position_embeddings=4096)
    small = ["--model", model, "--lora-r", 4, "--max-length", 128, "--compute", "float32"]
    found = planned(capsys, *small, "--memory-limit", "12MiB")
    assert [entry["gradient_checkpointing"] for entry in found["fits"]] == [False, True]
    assert found["tokens_per_step"] == 8 * 128 and found["tokens_per_second"] is None  # of a software driver
    assert found["fits"][0]["longest_seq_len"] < found["fits"][1]["longest_seq_len"]
    device = type(wgpu_device)()
    for entry in found["fits"]:
        mode = {name: entry[name] for name in ("gradient_checkpointing", "stream_weights")}
        config = RunOptions(lora_r=4, max_length=128, compute="float32", **mode)
        fit = Fit(config, load_model_config(model), model, device, 24, 12 << 20)
        for name, unit, one in (("longest_seq_len", ROW_STEP, "max_length"), ("largest_batch_size", 1, "batch_size")):
            most = entry[name]
            assert fit.plan(**{one: most}) is not None and fit.plan(**{one: most + unit}) is None, (mode, name)
    assert main(["plan", *map(str, small), "--device", "wgpu", "--vram", "12MiB"]) == 0
    table = capsys.readouterr().out
    assert "chosen for --vram (12.0 MiB): --batch-size" in table and "  activations and scratch" in table
    found = planned(capsys, *small, "--gradient-checkpointing", "--vram", "12MiB")
    assert [point["peak_bytes"] for point in found["curve"]] == [found["peak_bytes"]]  # the choice, and no other
    assert main(["plan", *map(str, small), "--device", "wgpu", "--vram", "9KiB"]) == 2
    (line,) = [text for text in capsys.readouterr().err.splitlines() if "error" in text]
    assert (
        "--vram: even with --batch-size 1 --gradient-checkpointing the run takes about" in line
        and "allow it that" in line
    )
    least = ["--batch-size", "1", "--gradient-checkpointing", "--memory-limit", "9KiB", "--stream-weights", "off"]
    assert main(["plan", *map(str, small), "--device", "wgpu", *least]) == 2
    (line,) = [text for text in capsys.readouterr().err.splitlines() if "error" in text]
    assert "even" not in line and "allow it that" in line


def test_more_memory_is_faster(
    make_checkpoint: Any, wgpu_device: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are at least five points between the least memory and the most. A limit in the middle gets a choice in the
    middle, with --vram also a smaller batch, and --batch-size auto takes the largest batch that fits."""
    endless = replace(Rates(), projections=math.inf)  # in so small a model launches take the most time
    monkeypatch.setattr(fit_module, "Rates", lambda: endless)
    model = make_checkpoint(num_hidden_layers=4)
    small = ["--model", model, "--lora-r", 4, "--max-length", 128, "--compute", "float32", "--batch-size", 4]
    curve = planned(capsys, *small)["curve"]
    peaks, speeds = ([point[name] for point in curve] for name in ("peak_bytes", "relative_speed"))
    assert len(curve) >= 5 and peaks == sorted(peaks) and peaks[0] < peaks[-1]
    assert speeds == sorted(speeds) and speeds[0] < 0.9 and speeds[-1] == 1.0
    limit, folder = (peaks[0] + peaks[-1]) // 2, Path(model)
    given: dict[str, Any] = {"lora_r": 4, "max_length": 128, "compute": "float32", "batch_size": 4}
    config = RunOptions(**given, gradient_accumulation_steps=1)
    fit = Fit(config, load_model_config(folder), folder, type(wgpu_device)(), 24, limit)

    def chosen(**options: Any) -> Any:
        asked = replace(config, **options)
        found = settle(asked, replace(fit, config=asked), room_of(asked, fit.device), World(), pinned=False)
        assert found.plan is not None and found.plan.peak_bytes <= limit
        return found.plan.config

    assert 0 < chosen(memory_limit=str(limit)).gradient_checkpointing < 4
    smaller = chosen(vram=str(limit))  # little is lost, and all is kept
    assert (smaller.batch_size, smaller.gradient_checkpointing) == (2, False)
    auto = resolve_options({"batch_size": "auto", "gradient_accumulation_steps": 2, "memory_limit": str(limit)})
    assert (auto.batch_size, auto.chooses_batch) == (1, True)
    automatic = chosen(batch_size=1, gradient_accumulation_steps=2, auto_find_batch_size=True, memory_limit=str(limit))
    assert (automatic.batch_size, automatic.gradient_accumulation_steps) == (2, 1)


@pytest.mark.parametrize("kept", range(1, 5))
def test_a_bound_offloads_what_is_asked_of_the_layers_that_are_recomputed(kept: int) -> None:
    """Nothing is offloaded where the activations of all layers may fit."""
    model = parse_model_config(conftest.tiny_config(num_hidden_layers=4))
    config = RunOptions(offload_activations=2)
    fit = Fit(config, model, "", ReferenceDevice(), 1, 1 << 30)
    mode = {"gradient_checkpointing": True, "offload_activations": 2, "stream_weights": "off"}
    bound = fastest._freest(fit, config, mode, kept, 0.0)
    asked = (4 - kept, min(4 - kept, 2)) if kept < 4 else (False, False)
    assert (bound.gradient_checkpointing, bound.offload_activations) == asked


# Of a step's parts, by the rate that they go by, in micro-batches of 128 tokens of a model with 2 layers: FLOP of a
# layer's matmuls and of its attention, bytes of all layers' activations and of a layer's decoded weights, bytes of the
# inputs and of the outputs of a layer's projections.
_MATMUL, _ATTENTION, _ACTIVATIONS, _WEIGHTS = 2.0 * 128 * 19584, 2.0 * 128 * 64 * 48, 2.0 * 128 * 2592, 4.0 * 19584
_AGAIN, _HEAD, _INPUT = _MATMUL - 2.0 * 128 * 48 * 88, 2.0 * 128 * 48 * 251, 4.0 * 128 * 48
_READ, _WRITTEN, _PRODUCT = 4.0 * 128 * (6 * 48 + 88), 4.0 * 128 * (3 * 48 + 2 * 24 + 2 * 88), 4.0 * 128 * 88
_ADAPTER, _ALL_AGAIN = 4 * _READ + 2 * _WRITTEN, 4 * _MATMUL + 2 * _AGAIN
_RECOMPUTED = (_ALL_AGAIN, 2 * _HEAD, 9, _ADAPTER + 2 * _READ, 4 * _ACTIVATIONS + 6 * _WEIGHTS)
_STREAMED: dict[str, Any] = {"stream_weights": "on", "gradient_checkpointing": True}


@pytest.mark.parametrize(
    "options, parts",
    [
        ({}, (4 * _MATMUL, 2 * _HEAD, 7, _ADAPTER, 3 * _ACTIVATIONS + 4 * _WEIGHTS, 0, 14)),
        ({"keep_dequantized": True}, (4 * _MATMUL + 2 * _HEAD, 0, 7, _ADAPTER, 3 * _ACTIVATIONS, 0, 14)),
        (
            {"keep_dequantized": True, "keep_gated": True},
            (4 * _MATMUL + 2 * _HEAD, 0, 7, _ADAPTER, 3 * _ACTIVATIONS - 2 * _PRODUCT, 0, 14),
        ),
        ({"full": True, "quantize": False}, (0, 6 * _MATMUL + 3 * _HEAD, 7, 0, 3 * _ACTIVATIONS, 0, 14)),
        (
            {"target_modules": ("q_proj", "o_proj")},
            (4 * _MATMUL, 2 * _HEAD, 7, 12 * _INPUT, 3 * _ACTIVATIONS + 4 * _WEIGHTS, 0, 14),
        ),
        (
            {"gradient_checkpointing": 1},
            (4 * _MATMUL + _AGAIN, 2 * _HEAD, 8, _ADAPTER + _READ, 3.5 * _ACTIVATIONS + 5 * _WEIGHTS, 0, 16.1),
        ),
        (
            {"gradient_checkpointing": True, "keep_attention": True},
            (_ALL_AGAIN, 2 * _HEAD, 7, _ADAPTER, 4 * _ACTIVATIONS + 6 * _WEIGHTS, 0, 18.2),
        ),
        (
            {"gradient_checkpointing": True, "offload_activations": 1},
            (*_RECOMPUTED, 2 * (_INPUT - 100 + speed._ALONGSIDE * 100), 18.2),
        ),
        (_STREAMED, (*_RECOMPUTED, 2 * (0.55 * 19584 - 100), 18.2)),
        ({**_STREAMED, "resident_layers": 1}, (*_RECOMPUTED, 0.55 * 19584 - 200, 18.2)),
    ],
)
def test_the_seconds_of_a_step_are_those_of_its_parts(options: dict[str, Any], parts: tuple[float, ...]) -> None:
    """Each part is set by its own rate if the others are infinite. A layer copies 100 bytes during its matmuls."""
    model = parse_model_config(conftest.tiny_config(vocab_size=251))
    wide = parse_model_config(conftest.tiny_config(vocab_size=251, head_dim=96, num_attention_heads=2))
    settled: dict[str, Any] = {"compute": "float32", "gradient_checkpointing": False, **options}
    config = RunOptions(batch_size=2, max_length=64, gradient_accumulation_steps=3, **settled)
    device: Any = SimpleNamespace(shared_memory=False, stacks_weights=False)
    device.copied_alongside = lambda work: 100.0 * work / _MATMUL
    matmul, dense, attention, *others = parts
    endless = Rates(*[math.inf] * 8)
    names = ("matmul", "dense", "attention", "narrow", "adapter", "memory", "link", "projections")
    for name, part in zip(names, (matmul, dense, 0, attention * _ATTENTION, *others), strict=True):
        seconds = speed.step_seconds(config, model, device, replace(endless, **{name: 7.0}))
        assert seconds == pytest.approx(3 * part / 7.0, rel=1e-12), name
        rates = replace(endless, **{name: 7.0})
        assert speed.step_seconds(replace(config, compute="auto"), model, device, rates) == seconds
    seconds = speed.step_seconds(config, wide, device, replace(endless, attention=7.0))
    assert seconds == pytest.approx(12 * attention * _ATTENTION / 7.0, rel=1e-12)
    rates = replace(endless, link=7.0)
    device.copied_alongside = lambda work: math.inf
    hidden = 2 * speed._ALONGSIDE * _INPUT * bool(config.offload_activations)
    assert speed.step_seconds(config, model, device, rates) == pytest.approx(3 * hidden / 7.0, rel=1e-12)  # of the link


@pytest.mark.usefixtures("shared_pipelines")
def test_a_run_takes_what_was_planned_and_keeps_its_batch_when_it_goes_on(
    make_checkpoint: Any, text_data: Path, tmp_path: Path, wgpu_device: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    shape = ["--model", make_checkpoint(), "--lora-r", 4, "--max-length", 64, "--batch-size", 1]
    shape += ["--gradient-accumulation-steps", 4, "--compute", "float32", "--no-gradient-checkpointing", "--vram"]
    whole = planned(capsys, *shape[:-1], "--batch-size", 4, "--no-gradient-checkpointing")
    limit = whole["peak_bytes"] - 1
    found = planned(capsys, *shape, limit)
    assert found["options"]["batch_size"] == 2 and found["options"]["gradient_accumulation_steps"] == 2, found
    more = ["--data", text_data, "--out", out, "--device", "wgpu", "--eval-tokens", 100, "--no-sample"]
    for last in ([], ["--resume"]):
        words = ["finetune", *shape, limit, *more, "--max-steps", 2 + len(last), *last]
        assert main([*map(str, words)]) == 0
        said = capsys.readouterr().out
        assert (
            f"chosen for --vram ({size(limit)}): --batch-size 2 --gradient-accumulation-steps "
            f"2 {words_of(found)}; a step is 4 sequences" in said
        )
        results = json.loads((out / "results.json").read_text())
        assert results["peak_bytes"] == pytest.approx(found["peak_bytes"], rel=0.05)
    saved = read_config_file(out / "config.yaml")
    assert (saved["batch_size"], saved["gradient_accumulation_steps"]) == (2, 2)
    assert saved["gradient_checkpointing"] is False


def test_a_run_offloads_as_few_layers_as_were_planned_and_goes_on_with_others(
    make_checkpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The result has the bits of a run that offloads none."""
    choose_card(monkeypatch)
    folder, data = make_checkpoint(num_hidden_layers=4), tmp_path / "data.txt"
    data.write_text("\n".join(f"{n} and {n * n}." for n in range(200)))
    shape = ["--model", folder, "--lora-r", 4, "--max-length", 256, "--batch-size", 1]
    shape += ["--gradient-accumulation-steps", 1, "--compute", "float32", "--stream-weights", "off"]
    config = RunOptions(**OFFLOADED, compute="float32", stream_weights="off", offload_activations=2)
    limit = least_limit(config, folder, discrete_sibling())
    found = planned(capsys, *shape, "--no-sample", "--vram", limit)
    assert found["options"]["offload_activations"] == 2, found
    assert found["fits"][-1]["offload_activations"] is True  # of which the most is said
    more = ["--data", data, "--eval-tokens", 100, "--no-sample"]
    for out, steps, options in (
        ("whole", 3, ["--gradient-checkpointing"]),
        ("offloaded", 2, ["--vram", limit]),
        ("offloaded", 3, ["--resume", "--offload-activations", 3]),
    ):
        words = ["finetune", *shape, *more, "--out", tmp_path / out, "--max-steps", steps, *options]
        assert main([*map(str, words)]) == 0
        said, results = capsys.readouterr().out, json.loads((tmp_path / out / "results.json").read_text())
        if "--resume" in options:
            assert results["peak_bytes"] < found["peak_bytes"] and "--offload-activations 3" in said
        elif out == "offloaded":
            assert (
                f"chosen for --vram ({size(limit)}): --batch-size 1 "
                f"--gradient-accumulation-steps 1 --offload-activations 2;" in said
            )
            assert results["peak_bytes"] == pytest.approx(found["peak_bytes"], rel=0.02)
            assert read_config_file(tmp_path / out / "config.yaml")["offload_activations"] is False
    adapters = [(tmp_path / out / "adapter_model.safetensors").read_bytes() for out in ("whole", "offloaded")]
    assert adapters[0] == adapters[1]


def words_of(found: dict[str, Any]) -> str:
    return words({name: found["options"][name] for name in ("gradient_checkpointing", "stream_weights")})
