"""Number of layers whose activations are kept: few dry runs find the choice of a search that leaves nothing out."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from wgrad.autograd.select_device import gpu_elsewhere
from wgrad.device.dry_run import DryRuntime
from wgrad.train.model.load_config import load_model_config
from wgrad.train.options.finetune_config import RunOptions
from wgrad.train.plan import fewer_layers, keep_layers
from wgrad.train.plan import fit as fit_module
from wgrad.train.plan.fit import Fit
from wgrad.train.plan.keep_layers import cannot_fit, most_kept
from wgrad.train.plan.settle import mode_of
from wgrad.train.step.search import beside

LAYERS = 11  # enough for a forecast
LIMITS = (2_600_000, 4_200_000)


def one_by_one(none: Any, guess: int, plan: Callable[[int], Any], most: int, further: Any) -> Any:
    """Return the last plan that fits, from 1 on."""
    found = none
    for number in range(1, most + 1):
        if (made := plan(number)) is None:
            break
        found = made
    return found


def test_few_dry_runs_find_the_choice_of_many(make_checkpoint: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without forecasts, guesses and repeated rehearsals the same layers are kept, in the same chunks."""
    device, folder = gpu_elsewhere(""), make_checkpoint(num_hidden_layers=LAYERS)
    monkeypatch.setattr(type(device), "copied_alongside", lambda self, work: float(work))
    monkeypatch.setattr("wgrad.train.plan.memory_limit.MLP_CHUNKS_ABOVE", 0)
    monkeypatch.setattr("wgrad.train.step.activations.MLP_CHUNKS_ABOVE", 0)
    model, runs = load_model_config(folder), [0]
    for module in (fit_module, fewer_layers):
        plain = module.run_dry

        def counted(config: Any, model: Any, *rest: Any, plain: Any = plain) -> Any:
            runs[0] += model.num_hidden_layers == LAYERS
            return plain(config, model, *rest)

        monkeypatch.setattr(module, "run_dry", counted)

    def chosen(limit: int) -> Any:
        given: dict[str, Any] = {"max_length": 64, "batch_size": 4, "gradient_accumulation_steps": 1, "lora_r": 4}
        config = RunOptions(**given, sample=False, compute="float16", memory_limit=str(limit))
        found = Fit(config, model, folder, device, 1, limit).find([4])
        return None if found is None else (mode_of(found.config), found.dry.memory())

    found = [chosen(limit) for limit in LIMITS]
    few, runs[0] = runs[0], 0
    numbers = [int(mode["gradient_checkpointing"]) for mode, _ in found]
    assert LAYERS > numbers[0] > numbers[1] > 0, numbers
    monkeypatch.setattr(DryRuntime, "repeat", lambda self, rehearsal: False)
    monkeypatch.setattr(fit_module, "cannot_fit", lambda fit, mode, batch: False)
    monkeypatch.setattr(keep_layers, "planned_beside", one_by_one)
    assert found[1] == chosen(LIMITS[1])
    assert few <= 12 < runs[0]


def test_what_far_exceeds_the_limit_is_not_planned() -> None:
    """Nor is anything left out that may fit, or that was asked for."""
    fit: Any = SimpleNamespace(config=RunOptions(), limit=1000, forecast=SimpleNamespace(peak=lambda config: 1021))
    fit.of_batch = lambda batch, mode: replace(fit.config, **mode)
    every: dict[str, Any] = {"gradient_checkpointing": False}
    assert cannot_fit(fit, every, 1)
    assert not cannot_fit(fit, {"gradient_checkpointing": True}, 1)
    fit.forecast = SimpleNamespace(peak=lambda config: 1020 + 100 * (config.keep_norms is not False))
    assert not cannot_fit(fit, every, 1)
    fit.config = RunOptions(keep_norms=True)
    assert cannot_fit(fit, every, 1)
    fit.config = RunOptions(keep_norms=True, gradient_checkpointing=False)
    assert not cannot_fit(fit, every, 1)
    fit.config, fit.forecast = RunOptions(), None
    assert not cannot_fit(fit, every, 1)


@pytest.mark.parametrize(
    ("limit", "keep_norms", "foreseen", "kept", "asked"),
    [
        (650, None, 900.3, 5, [(6, True), (6, False), (5, True), (5, False)]),
        (760, None, 900.3, 6, [(7, True), (7, False), (6, True)]),
        (1500, None, math.inf, 8, [(8, False)]),
        (800, None, 1300.3, 7, [(5, True), (6, False), (7, False), (8, False)]),
        (1500, True, 900.3, 7, [(7, True)]),
    ],
)
def test_large_chunks_are_planned_until_a_number_of_layers_fits(
    limit: int, keep_norms: bool | None, foreseen: float, kept: int, asked: list[tuple[int, bool]]
) -> None:
    """A layer takes 100 bytes, and large chunks 60 more."""

    def planned(config: Any) -> Any:
        number, large = 8 - config.gradient_checkpointing, config.mlp_chunk is not None
        reserved = 100 + 100 * number + 60 * large
        return SimpleNamespace(config=config, peak_bytes=reserved, reserved_bytes=reserved)

    def fitting(config: Any) -> Any:
        plan = planned(config)
        tried.append((8 - config.gradient_checkpointing, config.mlp_chunk is not None))
        return plan if plan.peak_bytes <= limit else None

    tried = list[tuple[int, bool]]()
    fit: Any = SimpleNamespace(layers=8, limit=limit, peaks={3: 7}, fitting=fitting, unlimited=planned)
    fit.forecast = SimpleNamespace(peak=lambda config: foreseen)
    fit.keeping = lambda config, kept: replace(config, gradient_checkpointing=8 - kept)
    none = planned(RunOptions(memory_limit="3GiB", max_length=1 << 14, gradient_checkpointing=8, keep_norms=keep_norms))
    found: Any = most_kept(fit, none)
    assert (8 - found.config.gradient_checkpointing, found.config.keep_norms) == (kept, bool(keep_norms))
    assert tried == asked and fit.peaks == {0: 100, 8: 1300 if foreseen == 1300.3 else 900}


@pytest.mark.parametrize("most", range(9))
def test_steps_up_are_as_large_as_seems_to_fit(most: int) -> None:
    """A guess that is right needs two plans, and one too low by N no more than three."""
    for guess in range(1, 9):
        asked = list[int]()

        def plan(number: int, asked: list[int] = asked) -> Any:
            asked.append(number)
            return number if number <= most else None

        assert beside(guess, plan, 8, lambda number: most - number) == most
        assert len(set(asked)) == len(asked) <= (3 if guess <= most else 6)
