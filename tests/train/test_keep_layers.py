"""Number of layers whose activations are kept: few dry runs find the choice of a search that leaves nothing out."""

from __future__ import annotations

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
from wgrad.train.plan.keep_layers import cannot_fit
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
    assert found == [chosen(limit) for limit in LIMITS]
    assert few <= 12 < runs[0]


def test_what_far_exceeds_the_limit_is_not_planned() -> None:
    """Nor is anything left out that may fit, or that was asked for."""
    fit: Any = SimpleNamespace(config=RunOptions(), limit=1000, forecast=SimpleNamespace(peak=lambda config: 1021))
    fit.changed = lambda **changes: replace(fit.config, **changes)
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
