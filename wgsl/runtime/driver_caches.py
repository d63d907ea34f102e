"""Folders in which drivers are known to cache compiled shaders. Drivers cannot be asked."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def driver_caches() -> list[Path]:
    """Return the folders, which need not exist. A driver may use others."""
    if sys.platform == "win32":
        local = Path(os.environ.get("LOCALAPPDATA", Path(os.path.expanduser("~")) / "AppData" / "Local"))
        low = local.parent / "LocalLow"
        names = ("NVIDIA/DXCache", "NVIDIA/GLCache", "AMD/DxCache", "AMD/DxcCache", "AMD/VkCache", "D3DSCache")
        return [local / name for name in names] + [low / "NVIDIA/PerDriverVersion/DXCache", low / "Intel/ShaderCache"]
    if sys.platform == "darwin":
        kept = os.confstr(65538)  # _CS_DARWIN_USER_CACHE_DIR
        return sorted(Path(kept).glob("*/com.apple.metal")) if kept else []
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    mesa = Path(os.environ.get("MESA_SHADER_CACHE_DIR") or cache)
    given = os.environ.get("__GL_SHADER_DISK_CACHE_PATH")
    nvidia = [Path(given)] if given else [cache / "nvidia" / "GLCache", Path(os.path.expanduser("~/.nv/GLCache"))]
    return [mesa / "mesa_shader_cache", mesa / "mesa_shader_cache_db", *nvidia, cache / "AMD" / "VkCache"]
