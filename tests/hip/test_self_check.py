"""The self-check of `auto`, and with it `wgrad selftest`, launches every kernel that a training step can launch on a
card: compared by dry runs of training, for all families, computes and kinds of weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.hip.test_operators import CASES as OPERATORS
from tests.train.conftest import random_weights, tiny_config, write_checkpoint
from wgrad.autograd.selftest.matrix_kernels import bfloat16_cases
from wgrad.autograd.selftest.probe import chosen_cases
from wgrad.autograd.selftest.run import call_case, check_case, selftest_cases
from wgrad.device.errors import OperatorMissing
from wgrad.device.formats.frozen_weight import formats
from wgrad.hip.elements import implements
from wgrad.hip.gemm.plan import DECODED_IN_PRODUCTS
from wgrad.train.model.families import FAMILIES
from wgrad.train.model.load_config import load_model_config
from wgrad.train.options.finetune_config import RunOptions
from wgrad.train.options.objectives import OBJECTIVES, SFT
from wgrad.train.plan.plan import plan_run

COMPUTE_UNITS = {"gfx90a": 104, "gfx942": 304, "gfx1100": 96, "gfx1201": 64}  # of the GPUs
COMPUTES = ("float32", "float16", "bfloat16")
WIDE = {"hidden_size": 1088, "intermediate_size": 1096}  # above one wave's row; sizes that divide by 8
OPTIONS: list[dict[str, Any]] = [
    {},
    {"double_quant": False},
    {"full": True},
    {"use_dora": True},
    {"lora_r": 40, "lora_dropout": 0.1},
    {"gradient_checkpointing": True},
    {"max_length": 1200, "batch_size": 1},
]
PREFERENCES: list[dict[str, Any]] = [{"objective": name} for name in OBJECTIVES if name != SFT]  # of one model


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A tiny model of each family; LLaMAs with heads for the tensor cores, and rows of a wave."""
    kinds: list[tuple[str, dict[str, Any]]] = [(family, {}) for family in FAMILIES]
    kinds += [("LlamaForCausalLM", {"head_dim": width, **WIDE}) for width in (64, 128, 256)]
    kinds += [("Qwen3ForCausalLM", {"head_dim": 64, "hidden_size": 320}), ("PhiForCausalLM", {"hidden_size": 1088})]
    folder, made = tmp_path_factory.mktemp("models"), []
    for number, (family, changes) in enumerate(kinds):
        config = tiny_config(family, **changes)
        made.append(write_checkpoint(folder / str(number), config, random_weights(config), "bfloat16"))
    return made


def launched_by_training(device: Any, models: list[Path]) -> set[tuple[str, str]]:
    found: set[tuple[str, str]] = set()
    for number, model in enumerate(models):
        # Families differ in their operators, which take either 16 bits by one kernel.
        a_family = 0 < number < len(FAMILIES)
        for compute in COMPUTES[1 + number % 2 :][:1] if a_family else COMPUTES:
            several = OPTIONS if number in (0, len(FAMILIES)) else OPTIONS[:1]
            for more in [*several, *(PREFERENCES if model.name == "0" else [])]:
                options = {
                    "lora_r": 3,
                    "max_length": 40,
                    "batch_size": 2,
                    "gradient_accumulation_steps": 2,
                    "compute": compute,
                    **more,
                }
                try:
                    plan = plan_run(RunOptions(**options), load_model_config(model), model, device, 5)
                except OperatorMissing as missing:  # a family whose operators have not landed here
                    assert missing.operator in implements.lacks
                    continue
                assert plan is not None
                found |= set(plan.dry.kernels)
    # A product of a weight in one format is one of a weight in any other that has kernels of all products.
    of_formats = {(s, k.replace("nf4_nested", v)) for s, k in found if "_nf4_nested" in k for v in DECODED_IN_PRODUCTS}
    others = formats().keys() - {*DECODED_IN_PRODUCTS, "tq1_0"}  # whose kernels are TQ2_0's
    of_others = {(s, k) for n in others for s, k in (("quantize", f"{n}_dequantize"), ("gemv", f"gemv_{n}"))}
    return found | of_formats | of_others


def launched_by(device: Any, cases: list[Any]) -> set[tuple[str, str]]:
    dry = device.dry_run()
    for case in cases:
        if case.op not in implements.lacks:
            call_case(case, dry)
    return set(dry.kernels)


@pytest.mark.parametrize("architecture", COMPUTE_UNITS)
def test_every_kernel_of_training_is_checked(emulator: Any, architecture: str, models: list[Path]) -> None:
    device = emulator.new(architecture)
    training: set[tuple[str, str]] = set()
    # One unit is filled by any product, as a large GPU is by a large one: by those of one family as of any other.
    for units, planned in ((COMPUTE_UNITS[architecture], models), (1, [models[0], *models[len(FAMILIES) :]])):
        with device.planned_for(units):
            training |= launched_by_training(device, planned)
    with device.planned_for(COMPUTE_UNITS[architecture]):
        checked = launched_by(device, chosen_cases())
    assert len(training) > 80 and any(kernel.endswith("_big") for _, kernel in training)
    assert training - checked == set()
    assert {case.name for case in chosen_cases()} <= {case.name for case in selftest_cases(device)}


def test_the_check_passes_and_bfloat16_with_it(hip_device: Any, pytestconfig: pytest.Config) -> None:
    """On both wave sizes, the self-test's cases in bfloat16 on the smaller one; a case has one name. `make test-all`
    runs all on both, and those of test_operators.py here, too."""
    names = [case.name for case in selftest_cases(hip_device)]
    assert len(set(names)) == len(names)
    everything = pytestconfig.getoption("--all")
    # On gfx942 their kernels run in chosen_cases() and test_operators.py, too.
    more = bfloat16_cases() if everything or hip_device.wave == 32 else []
    chosen = {case.name: case for case in [*chosen_cases(), *more]}
    if not everything:
        chosen = {name: case for name, case in chosen.items() if name not in {case.name for case in OPERATORS}}
        assert chosen
    failed = [r for r in (check_case(case, hip_device) for case in chosen.values()) if not r.ok]
    assert failed == []
