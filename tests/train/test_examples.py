"""The programs in examples/ run, on few steps and NumPy's device, and do what they say."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

import wgrad
from tests.train.conftest import CHATML, MakeCheckpoint
from wgrad.autograd.gradcheck import LIMIT
from wgrad.train.commands.cli import main

pytestmark = pytest.mark.usefixtures("short_samples")

EXAMPLES = Path(__file__).parents[2] / "examples"
QUICK: dict[str, Any] = {"device": "cpu", "max_steps": 2, "sample": False}
RECORDS = [{"text": "better late than never"}, {"text": "still waters run deep"}] * 10


def example(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_chat_example_trains_and_answers(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_checkpoint()
    (model / "chat_template.jinja").write_text(CHATML)
    options = QUICK | {
        "max_steps": 30,
        "max_length": 96,
        "batch_size": 4,
        "gradient_accumulation_steps": 1,
        "learning_rate": 0.02,
        "lora_r": 4,
    }
    answer = example("chat_data").main(str(model), out=str(tmp_path / "out"), **options)
    before, after = map(float, re.findall(r"\d+\.\d+", capsys.readouterr().out)[:2])
    assert after < before and answer


def test_the_pretraining_example_prints_perplexity(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "text.txt"
    data.write_text("\n".join(record["text"] for record in RECORDS * 5))
    options = QUICK | {"max_steps": 4, "max_length": 32, "lora_r": 4, "eval_steps": 2}
    result = example("continued_pretraining").main(str(make_checkpoint()), str(data), str(tmp_path / "out"), **options)
    said = capsys.readouterr().out
    assert result.steps == 4 and "held out, after step 2: " in said and "with the adapter: perplexity" in said


def test_the_preference_example_raises_margins(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    options = QUICK | {"max_steps": 8, "learning_rate": 0.02, "lora_r": 4}
    before, after = example("preferences").main(str(make_checkpoint()), str(tmp_path / "out"), **options)
    assert after > before + 1


def test_the_gguf_example_writes_a_model(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The base is a GGUF file alone; what comes out is one again, and a model."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    options = QUICK | {"max_length": 32, "lora_r": 2, "eval_fraction": 0.1}
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
    first = wgrad.finetune(model=make_checkpoint(**sizes), data=RECORDS, out=tmp_path / "first", **options)
    words = ["--out", str(tmp_path / "base"), "--format", "gguf", "--quantize", "q8_0", "--no-compare"]
    assert main(["merge", "--adapter", str(first.out), *words, "--device", "cpu"]) == 0
    base = tmp_path / "base" / "model.gguf"
    adapter, merged = example("gguf_to_gguf").main(str(base), RECORDS, out=str(tmp_path / "out"), **options)
    assert adapter.read_bytes()[:4] == merged.read_bytes()[:4] == b"GGUF"
    with wgrad.load(merged, device="cpu", context=32) as loaded:
        assert loaded.score("still waters run deep").loss > 0


def test_the_operator_example_runs(device: Any) -> None:
    module = example("squared_relu")
    assert module.gradient_error(device) < (LIMIT if device.name == "cpu" else 1e-5)
    forward = module.compute
    module.compute = lambda device, x, dy=None: forward(device, x, dy if dy is None else device.scale(dy, 0.99))
    assert module.gradient_error(device) > 1e-3  # it would find a gradient that is wrong


def test_the_notebook_runs(make_checkpoint: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its cells in order, in one namespace; the format is the one that notebooks have."""
    notebook = json.loads((EXAMPLES / "first_finetune.ipynb").read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(not cell.get("outputs") for cell in notebook["cells"]) and len({c["id"] for c in notebook["cells"]}) > 8
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(EXAMPLES)
    changes = {'"examples/base_model"': repr(str(make_checkpoint())), "max_steps=30": "max_steps=3"}
    space: dict[str, Any] = {}
    for cell in cells:
        for old, new in changes.items():
            cell = cell.replace(old, new)
        exec(cell.replace("OUT,", "OUT, device='cpu', ").replace("result.out,", "result.out, device='cpu',"), space)
    assert len(space["losses"]) == space["result"].steps == 3
    assert "polyline" in space["Picture"]()._repr_html_() and len(space["texts"]) == 2


def _cells_without_magics() -> dict[str, str]:
    """The hosted notebook's code cells by id, as Python: lines for the shell or for IPython do nothing."""
    cells = json.loads((EXAMPLES / "colab_kaggle.ipynb").read_text(encoding="utf-8"))["cells"]
    assert all(not cell.get("outputs") and cell.get("execution_count") is None for cell in cells)
    code = {cell["id"]: "".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"}
    return {name: re.sub(r"^[!%].*", "pass", text, flags=re.MULTILINE) for name, text in code.items()}


def test_hosted_notebook_makes_data_that_can_be_trained_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    cells = _cells_without_magics()
    for text in cells.values():
        compile(text, "cell", "exec")
    exec(cells["data"], {})
    records = [json.loads(line) for line in Path("data.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [[turn["role"] for turn in record["messages"]] for record in records] == [["user", "assistant"]] * 6


@pytest.mark.parametrize(
    ("offered", "installed"),
    [
        ("580.65.06-0ubuntu1 580.82.07-0ubuntu1", "libnvidia-gl-580=580.82.07-0ubuntu1"),
        ("580.82.077-1", None),  # of another version: the driver would refuse
        ("", None),
    ],
)
def test_hosted_notebook_installs_the_driver_of_the_kernel(
    offered: str, installed: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[str, ...]] = []

    def run(command: tuple[str, ...], **_: Any) -> subprocess.CompletedProcess[str]:
        asked.append(command)
        packages = "".join(f" libnvidia-gl-580 | {version} | https://a.host\n" for version in offered.split())
        said = {"nvidia-smi": "580.82.07\n580.82.07\n", "apt-cache": packages}.get(command[0], "")
        return subprocess.CompletedProcess(command, 0, said, "")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(shutil, "which", lambda name: name)
    exec(_cells_without_magics()["driver"], {})
    got = [command[-1] for command in asked if command[:2] == ("apt-get", "install") and "nvidia" in command[-1]]
    assert got == ([installed] if installed else [])
    assert ("training uses the processor" in capsys.readouterr().out) == (installed is None)
