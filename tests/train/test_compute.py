"""`--compute auto`: what it takes on which device, what is said of it, and that a resumed run keeps what it has."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from wgrad.autograd import matrix_units
from wgrad.autograd.reference import ReferenceDevice
from wgrad.device.errors import WgradError
from wgrad.hip.device import HipDevice
from wgrad.train.commands.cli import main
from wgrad.train.model.load_config import load_model_config
from wgrad.train.options.config_yaml import read_config_file
from wgrad.train.options.finetune_config import RunOptions
from wgrad.train.run import session
from wgrad.train.step.build import build_frozen, build_optimizer, build_trainable
from wgrad.train.step.compute import choose_compute
from wgrad.train.step.optim import FlatParameters, ParameterSpec
from wgrad.wgsl.runtime import matrix_units as units
from wgrad.wgsl.runtime.experimental_gate import Gate
from wgrad.wgsl.runtime.runtime import Runtime


def card(*, listed: bool = True, in_use: bool = False, float16: bool = True) -> Any:
    """Return a wgpu device with the attributes read here: its GPU lists tensor cores, which are in use or not."""
    device: Any = Runtime.__new__(Runtime)
    device.matrix_units, device.float16, device.bfloat16 = in_use, float16, False
    features = ["shader-f16", units.FEATURE] if listed else ["shader-f16"]
    device.facts = {"name": "a card", "driver": "driver 1", "features": features, "backend": "Vulkan"}
    device.description = "a card (Vulkan, driver 1)"
    return device


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No verdicts but those of the test; the library is one that was tried."""
    monkeypatch.setattr(units, "folder", lambda: tmp_path / "units")
    monkeypatch.setattr(units, "gate_of", lambda path: Gate(0, b""))
    monkeypatch.delenv(units.SWITCH, raising=False)


def test_auto_is_what_the_device_is_fastest_in() -> None:
    hip: Any = SimpleNamespace(name="hip", fastest_compute=HipDevice.fastest_compute, facts={})
    for device, dtype, words in (
        (card(in_use=True), "float16", "tensor cores take it; with loss scaling"),
        (card(), "float32", "the GPU's tensor cores are idle: wgrad matrix-units enable makes steps 2.9 to 6"),
        (card(listed=False), "float32", "no tensor cores are in use"),
        (card(float16=False), "float32", "no tensor cores are in use"),
        (hip, "bfloat16", "needs no loss scale"),
        (ReferenceDevice(), "float32", "no tensor cores are in use"),
    ):
        found = choose_compute("auto", device)
        assert found.dtype == dtype and len(found.lines) == 1
        assert found.lines[0].startswith(f"compute: {dtype} (") and words in found.lines[0]


def test_idle_matrix_units_are_told_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    for asked in ("float32", "float16"):  # also to one who chose the type
        (line,) = choose_compute(asked, card()).lines
        assert line.startswith("note: the GPU's tensor cores are idle: wgrad matrix-units enable makes")
        assert choose_compute(asked, card(in_use=True)).lines == choose_compute(asked, card(listed=False)).lines == []
    units.keep_verdict(units.identity("a card", "driver 1"), False, "attention is wrong")
    assert "because their check failed: attention is wrong; " in matrix_units.idle(card())
    assert matrix_units.left_idle(card()) == matrix_units.idle(card())
    monkeypatch.setattr(units, "gate_of", lambda path: None)
    units.keep_verdict(units.identity("a card", "driver 1"), True, "")
    assert "wgpu's library refuses them" in matrix_units.idle(card()) and not matrix_units.left_idle(card())
    metal = card()
    metal.facts["backend"] = "Metal"
    assert "on Metal they have a shape that there are no kernels for" in matrix_units.idle(metal)
    assert not matrix_units.left_idle(metal)
    monkeypatch.setenv(units.SWITCH, "off")
    assert matrix_units.idle(card()) == f"the GPU's tensor cores are idle by {units.SWITCH}=off"
    assert not matrix_units.left_idle(card())


def test_float16_scales_the_loss_also_where_auto_chose_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for fastest, scaled in (("float16", True), ("bfloat16", False), ("float32", False)):
        device = ReferenceDevice()
        monkeypatch.setattr(ReferenceDevice, "fastest_compute", fastest)
        parameters = FlatParameters([ParameterSpec("a", (3, 5))], device)
        optimizer = build_optimizer(RunOptions(), parameters)
        assert (device.download(optimizer.loss_scale)[0] > 1) == scaled


# ---- runs --------------------------------------------------------------------------------------
@pytest.fixture
def run(make_checkpoint: Any, text_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return run(fastest, *words), the exit status of a run on a NumPy device for which `fastest` is fastest."""
    model = make_checkpoint()

    def take(fastest: str, *words: str) -> int:
        device: Any = ReferenceDevice()
        device.fastest_compute = fastest
        device.bfloat16 = fastest != "float32"
        monkeypatch.setattr(session, "select_device", lambda spec, needs=None: device)
        options = ["--model", model, "--data", text_data, "--out", tmp_path / "out", "--max-length", 48, "--no-sample"]
        return main(
            [
                "finetune",
                *map(str, options),
                "--lora-r",
                "3",
                "--gradient-accumulation-steps",
                "1",
                "--save-steps",
                "1",
                *words,
            ]
        )

    return take


def test_a_resumed_run_keeps_what_it_was_begun_with(run: Any, tmp_path: Path, capsys: Any) -> None:
    config = tmp_path / "out" / "config.yaml"
    assert run("float16", "--max-steps", "2") == 0
    assert "\ncompute: float16 (" in capsys.readouterr().out
    assert read_config_file(config)["compute"] == "float16"
    # On a GPU that would take another; saying auto again changes nothing.
    for words in ([], ["--compute", "auto"]):
        steps = str(3 + len(words))
        assert run("bfloat16", "--resume", "--max-steps", steps, *words) == 0
        out = capsys.readouterr().out
        assert "\ncompute: float16, as the run was begun\nnote: a new run would take bfloat16 on this device" in out
        assert "resuming from" in out and read_config_file(config)["compute"] == "float16"
    assert run("float16", "--resume", "--max-steps", "9", "--compute", "float32") == 2
    assert "--compute: the run in" in capsys.readouterr().err


def test_a_run_is_not_resumed_on_a_device_without_its_dtype(run: Any, tmp_path: Path, capsys: Any) -> None:
    assert run("bfloat16", "--max-steps", "2") == 0
    capsys.readouterr()
    assert run("float32", "--resume", "--max-steps", "3") == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "--resume: the run was begun with --compute bfloat16, which NumPy" in err
    assert "go on with a --device that can, or begin anew in another --out" in err


@pytest.mark.parametrize(("compute", "dtype"), [("auto", "float32"), ("float16", "float16")])
def test_models_compute_in_the_dtype_asked_for(compute: Any, dtype: str, make_checkpoint: Any) -> None:
    folder, device = make_checkpoint(num_hidden_layers=1), ReferenceDevice()
    given = load_model_config(folder), folder, device
    trained = build_trainable(RunOptions(max_length=8, compute=compute), *given, positions=5).model
    assert trained.positions == 8  # its sequences are longer than its sample
    assert [m.dtype for m in (trained, build_frozen(*given, positions=8, compute=compute))] == [dtype, dtype]


def test_what_a_device_cannot_is_no_choice() -> None:
    with pytest.raises(WgradError, match="has no shader-f16: use --compute float32"):
        choose_compute("float16", card(float16=False))
