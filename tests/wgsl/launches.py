"""What a device launches while a test runs."""

from __future__ import annotations

from typing import Any

import pytest


def launched(device: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the shaders, as they come."""
    names: list[str] = []
    launch = device.launch

    def noted(shader: str, *arguments: Any, **options: Any) -> None:
        names.append(shader)
        launch(shader, *arguments, **options)

    monkeypatch.setattr(device, "launch", noted)
    return names
