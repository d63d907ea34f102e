"""Free main memory as Linux tells it."""

from __future__ import annotations

from pathlib import Path

import pytest

from wgrad.device import main_memory


@pytest.mark.parametrize(
    ("told", "wanted"), [("MemTotal: 9 kB\n\nMemAvailable: 5 kB\n", 5120), ("MemTotal: 9 kB\n", None)]
)
def test_free_memory_is_what_the_system_tells(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, told: str, wanted: int | None
) -> None:
    (tmp_path / "meminfo").write_text(told)
    monkeypatch.setattr(main_memory, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(main_memory, "_GROUP", tmp_path)
    assert main_memory.free_memory() == wanted
