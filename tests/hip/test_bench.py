"""`wgrad bench` on an emulated GPU: its own GEMMs set the peak rates, and 16 bits are bfloat16."""

from __future__ import annotations

import re
from typing import Any

import pytest

from wgrad.autograd.bench import timing
from wgrad.train.commands.cli import main


def test_bench_reports_roofs_and_rows_of_an_emulated_gpu(
    emulator: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    emulator.select("gfx1100", monkeypatch)
    monkeypatch.setattr(timing, "_MOST_CALLS", 1)
    monkeypatch.setattr(timing, "SAMPLE_SECONDS", 0.0)
    words = ["bench", "--device", "hip", "--warm-up", "0", "--size", "tiny", "--op", "rms_norm", "clip"]
    try:
        assert main(words) == 0
    finally:
        emulator.clear()
    said = capsys.readouterr().out
    roofs = re.findall(r"^  ([a-z0-9 ]+): .* by (.+)$", said, re.M)
    assert [name for name, _ in roofs] == ["memory", "float32", "tensor cores"] and "matmul of 64³" in roofs[1][1]
    assert set(re.findall(r"^(?:rms_norm|clip)/\S+/(\w+) ", said, re.M)) == {"float32", "bfloat16"}
