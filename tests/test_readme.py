"""The README says what is so: its figures are those of bench/results, its commands parse, its links lead somewhere."""

from __future__ import annotations

import importlib
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from wgrad.train.commands.cli import main
from wgrad.train.data.data import load_data
from wgrad.train.data.tokenizer import load_tokenizer
from wgrad.train.options.finetune_config import RunOptions

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def _blocks(page: Path, language: str = "") -> list[str]:
    text = page.read_text(encoding="utf-8")
    found = re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return [block for named, block in found if named == language]


def test_figures_are_those_of_the_results() -> None:
    command = [sys.executable, str(ROOT / "bench" / "make_table.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"checkpointing": False, "offload_checkpoints": False}, "off"),
        ({"checkpointing": True}, "on"),
        ({"checkpointing": True, "offload_checkpoints": True}, "on, parked"),
        ({"checkpointing": True, "offload_checkpoints": 0, "layers": 32}, "on"),
        ({"checkpointing": True, "offload_checkpoints": 1, "layers": 32}, "on, 1 of 32 parked"),
        ({"checkpointing": True, "offload_checkpoints": 14, "layers": 32}, "on, 14 of 32 parked"),
        ({"checkpointing": True, "attention_kept": True}, "on, attention kept"),
        ({"checkpointing": True, "offload_checkpoints": True, "attention_kept": True}, "on, parked, attention kept"),
    ],
)
def test_rows_say_how_many_layers_are_parked(row: dict, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    assert importlib.import_module("make_table").recomputed(row) == said


def test_hip_tables_take_what_rows_there_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table of no rows is left out; forward rows stand beside the peer's, and a loss to it is named."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    render_hip = importlib.import_module("hip_tables").render_hip
    assert "62.2" in render_hip(tmp_path) and "backward" not in render_hip(tmp_path)
    row = {"arch": "gfx942", "kernel": "attention_forward_bf16_rtne_128", "vgpr": 248, "lds": 32768, "spills": 0}
    row |= {"scratch": 0, "busy": {"300": 0.8, "600": 0.5, "1200": 0.42}, "busy_loop": {"600": 0.7}}
    (tmp_path / "hip_attention.jsonl").write_text(json.dumps(row) + "\n")
    text = render_hip(tmp_path)
    assert "| 248 | 32 KiB | 80.0 / 50.0 / 42.0 | – / 70.0 / – | – | – |" in text
    assert "It loses to the peer at 600 clocks." in text


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
        assert "://" in target or (page.parent / target).exists(), target


def test_the_sample_lines_are_data(tmp_path: Path) -> None:
    (block,) = _blocks(ROOT / "README.md", "json")
    (tmp_path / "data.jsonl").write_text(block, encoding="utf-8")
    shutil.copytree(ROOT / "examples" / "base_model", tmp_path / "model")
    template = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\\n' }}{% endfor %}"
    (tmp_path / "model" / "chat_template.jinja").write_text(template, encoding="utf-8")
    data = load_data(
        RunOptions(data=(str(tmp_path / "data.jsonl"),), eval_fraction=0), load_tokenizer(tmp_path / "model")
    )
    assert len(data.train) == 3


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    named = re.findall(r"^make ([\w-]+)", "".join(_blocks(ROOT / "README.md")), re.MULTILINE)
    assert set(named) >= {"finetune", "test", "test-fast"}
    for target in named:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_the_workflow_runs_tests_that_are_there() -> None:
    named = re.findall(r"tests/[\w/]+\.py", (ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8"))
    assert named and not [path for path in named if not (ROOT / path).exists()]


def _workflow_commands() -> list[str]:
    steps = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8"))["jobs"]["other-systems"][
        "steps"
    ]
    return [step["run"] for step in steps if step.get("run", "").startswith("wgrad ")]


def test_commands_are_understood(capsys: pytest.CaptureFixture[str]) -> None:
    """Every option that the commands of README and CI use is in that command's --help."""
    lines = [line for block in _blocks(ROOT / "README.md") for line in block.splitlines() if line.startswith("wgrad ")]
    assert {line.split()[1] for line in lines} >= {"finetune", "generate", "devices", "selftest"}
    lines += _workflow_commands()
    assert sum("--report" in line for line in lines) == 1
    for line in lines:
        _, command, *rest = shlex.split(line, comments=True)
        assert main([command, "--help"]) == 0
        text = capsys.readouterr().out
        for option in (word for word in rest if word.startswith("--")):
            assert option in text, (command, option)
