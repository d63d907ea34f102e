"""The text of all shaders, and which of them are shared parts."""

from __future__ import annotations

from pathlib import Path

from wgrad.device.formats.frozen_weight import formats
from wgrad.wgsl.formats.formats import FILES
from wgrad.wgsl.runtime import compile as wgsl_compile

ROOM = Path(wgsl_compile.__file__).parents[1]
SHADERS = {file.name: file.read_text(encoding="utf-8") for file in sorted(ROOM.rglob("*.wgsl"))}
SHARED = {name for name in SHADERS if name.endswith(".inc.wgsl")}
FORMATS = {FILES.get(name, f"{name}.inc.wgsl") for name in formats()}  # included by the constant B_FORMAT
