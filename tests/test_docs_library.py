"""docs/library.md: its first program runs as it stands, and its callback is one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


def test_the_programs_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "docs" / "library.md").read_text(encoding="utf-8")
    first, second = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    space: dict[str, Any] = {}
    for short in (
        ("max_steps=20", 'max_steps=2, device="cpu"'),
        ("result.out)", 'result.out, device="cpu", context=64)'),
    ):
        assert short[0] in first
        first = (
            first.replace(*short, 1) if "max_steps" in short[0] else first.replace(short[0] + " as", short[1] + " as")
        )
    exec(first, space)
    assert space["result"].steps == 2 and "out/mine" in capsys.readouterr().out
    exec(second, space)
    options = {"model": "examples/base_model", "data": space["records"], "device": "cpu", "sample": False}
    options |= {"seq_len": 64, "accumulate": 1, "max_steps": 1}
    space["wgrad"].finetune(out="out/watched", callbacks=[space["Watch"](), print], **options)
    said = capsys.readouterr().out
    assert "checkpoints/step-1" in said and "StepReport(step=1" in said
