"""A variant of LoRA from outside of the package, in whole runs: a file with a class and its registration."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import wgrad
from tests.train.conftest import SENTENCES
from wgrad import Tensor, WgradError
from wgrad.train.commands.cli import main
from wgrad.train.files.safetensors_files import read_entries
from wgrad.train.model.adapter_files import WEIGHTS_FILE
from wgrad.train.model.lora import LoraConfig
from wgrad.train.model.lora_variants import VARIANTS
from wgrad.train.model.stacks import _apart

pytestmark = pytest.mark.usefixtures("short_samples")


class Gated(wgrad.LoraVariant):
    """A number for each rank: B diag(gate) A."""

    def start(self, rank: int, out: int, width: int) -> Mapping[str, np.ndarray]:
        return {"gate": np.ones(rank, np.float32)}

    def factors(self, a: Tensor, b: Tensor, own: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        return a * own["gate"].unsqueeze(1), b


@pytest.fixture
def gated() -> Iterator[None]:
    wgrad.register_lora_variant("toy", Gated())
    yield
    VARIANTS.pop("toy", None)


@pytest.fixture
def options(make_checkpoint: Any, tmp_path: Path) -> dict[str, Any]:
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
    }
    return {
        "model": make_checkpoint(num_hidden_layers=1, **sizes), "data": [{"text": text} for text in SENTENCES * 3],
        "out": tmp_path / "out", "device": "cpu", "lora_r": 3, "max_length": 24, "max_steps": 4, "save_steps": 2,
        "eval_fraction": 0.2, "sample": False, "learning_rate": 2e-2, "gradient_checkpointing": True, "seed": 3,
        "batch_size": 2, "lora_variant": "toy",
    }  # fmt: skip


@pytest.mark.usefixtures("gated")
def test_a_run_its_resume_and_what_reads_its_adapter(options: dict[str, Any], tmp_path: Path, capsys: Any) -> None:
    found = wgrad.finetune(**options)
    assert found.held_out_loss_after < found.held_out_loss_before  # type: ignore[operator]
    entries = dict(read_entries(found.out / WEIGHTS_FILE, ""))
    gates = [entry.finite_array() for name, entry in entries.items() if "lora_variant_gate" in name]
    assert len(gates) == 7 and all(gate.shape == (3,) and not np.array_equal(gate, np.ones(3)) for gate in gates)
    again = tmp_path / "again"
    shutil.copytree(found.out, again)
    for path in (again / WEIGHTS_FILE, again / "results.json", again / "checkpoints" / "step-4"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    wgrad.finetune(**{**options, "out": again, "resume": True})
    assert (again / WEIGHTS_FILE).read_bytes() == (found.out / WEIGHTS_FILE).read_bytes()
    with (
        wgrad.load(adapter=found.out, device="cpu", context=64) as model,
        wgrad.load(options["model"], device="cpu", context=64) as base,
    ):
        texts = [SENTENCES[0], SENTENCES[1]]
        assert sum(model.score(t).loss for t in texts) < sum(base.score(t).loss for t in texts)
    # It goes on from the adapter, and the others refuse it by name.
    given = {name: value for name, value in options.items() if name not in ("lora_r", "lora_variant")}
    more = wgrad.finetune(**{**given, "out": tmp_path / "more", "adapter": found.out, "max_steps": 1})
    assert json.loads((more.out / "adapter_config.json").read_text())["peft_type"] == "WGRAD:toy"
    capsys.readouterr()
    for words in (["merge", "--out", str(tmp_path / "merged")], ["export", "--gguf-lora", str(tmp_path / "a.gguf")]):
        assert main([*words, "--adapter", str(found.out)]) == 2
        assert (
            "is of the LoRA variant 'toy', which can be loaded but not merged or converted" in capsys.readouterr().err
        )
    del VARIANTS["toy"]
    assert main(["generate", "--adapter", str(found.out), "--prompt", "x", "--device", "cpu"]) == 2
    assert "the LoRA variant 'toy' is not registered: call wgrad.register_lora_variant" in capsys.readouterr().err
    with pytest.raises(WgradError, match="is not registered"):
        wgrad.finetune(**{**options, "out": again, "resume": True, "max_steps": 6})


@pytest.mark.usefixtures("gated")
def test_the_gradient_is_that_of_the_factors(options: dict[str, Any], tmp_path: Path) -> None:
    """A gate that stays 1 leaves plain LoRA; one that starts at 2 is an A twice as large."""

    class Doubled(Gated):
        def factors(self, a: Tensor, b: Tensor, own: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
            return a * (own["gate"] * 0 + 1).unsqueeze(1), b

    VARIANTS["toy"] = Doubled()
    variant = wgrad.finetune(**options)
    plain = wgrad.finetune(**{**options, "out": tmp_path / "plain", "lora_variant": ""})
    assert variant.held_out_loss_after == pytest.approx(plain.held_out_loss_after, rel=1e-4)


def test_projections_of_a_variant_are_not_stacked() -> None:
    assert _apart(LoraConfig(1, 1.0, variant="toy")) and not _apart(LoraConfig(1, 1.0))


def test_unusable_variants_are_refused(options: dict[str, Any], capsys: Any) -> None:
    with pytest.raises(WgradError, match="--lora-variant: the LoRA variant 'toy' is not registered"):
        wgrad.finetune(**options)
    with pytest.raises(WgradError, match="--use-dora: cannot be combined with --lora-variant toy"):
        wgrad.finetune(**{**options, "use_dora": True})
    wrong: list[tuple[Any, Any, str]] = [
        ("a b", Gated(), "must be a word"), ("x", Gated, "must be a LoraVariant"), (3, Gated(), "a word; got 3"),
        ("x", wgrad.LoraVariant(), "LoraVariant has no method factors: write it"),
    ]  # fmt: skip
    for name, given, message in wrong:
        with pytest.raises(WgradError, match=message):
            wgrad.register_lora_variant(name, given)
    wgrad.register_lora_variant("toy", Gated())
    try:
        with pytest.raises(WgradError, match="a variant is called toy already"):
            wgrad.register_lora_variant("toy", Gated())
    finally:
        del VARIANTS["toy"]


WRONG: dict[str, tuple[str, Any, str]] = {
    "shapes": ("factors", lambda s, a, b, own: (b, a), r"must return A' \[r, 16\] and B' \[16, r\] in float32; got "),
    "ranks": ("factors", lambda s, a, b, own: (a[:2], b), r"got float32 \[2, 16\] and float32 \[16, 3\]"),
    "dtype": ("factors", lambda s, a, b, own: (a.half(), b), r"got float16 \[3, 16\] and"),
    "one": ("factors", lambda s, a, b, own: a, "must return two Tensors, A' and B'; got Tensor"),
    "arrays": ("factors", lambda s, a, b, own: (np.ones((3, 16)), b), "must return two Tensors, A' and B'; got tuple"),
    "read": (
        "factors",
        lambda s, a, b, own: (a * own["gate"].sum().item(), b),
        r"factors of .*: reads values \(item, n",
    ),
    "no dict": ("start", lambda s, rank, out, width: None, "start of toy must return a dict of arrays; got NoneType"),
    "list": ("start", lambda s, rank, out, width: {"gate": [1.0]}, "must return finite NumPy arrays; got gate: "),
    "nan": ("start", lambda s, rank, out, width: {"gate": np.array([np.nan])}, "must return finite NumPy arrays"),
    "name": ("start", lambda s, rank, out, width: {"a b": np.ones(1)}, "must name its arrays by words; got 'a b'"),
}


@pytest.mark.usefixtures("gated")
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_variant_is_explained(name: str, options: dict[str, Any]) -> None:
    method, wrong, message = WRONG[name]
    VARIANTS["toy"] = type("Wrong", (Gated,), {method: wrong})()
    with pytest.raises(WgradError, match=message):
        wgrad.finetune(**options)
