"""`wgrad warm`: what a run will compile is compiled, and what is said of the driver's cache is what folders show."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from wgrad.train.commands import warm
from wgrad.train.commands.cli import main
from wgrad.wgsl.runtime.driver_caches import driver_caches

BASE = Path(__file__).parents[2] / "examples" / "base_model"
SMALL = ["--max-length", "64", "--batch-size", "2"]


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The first three variants only, to be quick; the plans that were made."""
    plans: list[Any] = []
    whole = warm.plan_as_run

    def plan_as_run(*args: Any) -> Any:
        plan = whole(*args)
        assert plan is not None and len(plan.dry.variants) > 20
        plan.dry.variants = dict.fromkeys(list(plan.dry.variants)[:3])
        plans.append(plan)
        return plan

    monkeypatch.setattr(warm, "plan_as_run", plan_as_run)
    return plans


def test_it_compiles_and_says_where_it_is_kept(
    wgpu_device: Any, few: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in ("HOME", "XDG_CACHE_HOME", "MESA_SHADER_CACHE_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.delenv("MESA_SHADER_CACHE_DISABLE", raising=False)
    assert main(["warm", "--model", str(BASE), "--device", "wgpu", *SMALL]) == 0
    out = capfd.readouterr().out
    assert "shaders: 3 compiled in" in out and len(few) == 1
    kept = [folder for folder in driver_caches() if folder.is_dir() and any(folder.rglob("*"))]
    if kept:  # this driver has a cache, in a folder that is known
        assert f"cache: the driver keeps them in {kept[0]} (" in out
    else:
        assert "cache: no folder of a driver's cache was found" in out


def test_sequences_are_as_long_as_in_a_run(wgpu_device: Any, few: list[Any], make_checkpoint: Any) -> None:
    model = make_checkpoint("GPT2LMHeadModel", n_positions=32, max_position_embeddings=32)
    assert main(["warm", "--model", str(model), "--device", "wgpu", *SMALL]) == 0
    assert [plan.config.max_length for plan in few] == [32]


def test_what_the_folders_show_is_said(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    nothing = warm._contents([one, two])
    assert nothing == {} and "no folder" in warm._kept([one, two], nothing, nothing)
    assert "none is known" in warm._kept([], {}, {})
    (two / "sub").mkdir(parents=True)
    (two / "sub" / "a").write_bytes(b"x" * (3 << 20))
    after = warm._contents([one, two])
    assert f"keeps them in {two} (3.0 MiB more)" in warm._kept([one, two], nothing, after)
    assert f"nothing was added to {two}" in warm._kept([one, two], after, warm._contents([one, two]))
    (two / "sub" / "a").write_bytes(b"y" * (4 << 20))  # one file grows, as where a cache is a single file
    assert "(1.0 MiB more)" in warm._kept([one, two], after, warm._contents([one, two]))


def test_numpy_has_nothing_to_compile(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["warm", "--model", str(BASE), "--device", "cpu"]) == 0
    assert "nothing to compile" in capsys.readouterr().out


def test_only_the_model_is_needed_and_options_are_those_of_a_run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["warm", "--device", "cpu"]) == 2
    assert "--model is required" in capsys.readouterr().err
    assert main(["warm", "--model", str(BASE), "--device", "cpu", "--lora-r", "0"]) == 2
    assert "--lora-r: must be at least 1" in capsys.readouterr().err
    (tmp_path / "run.yaml").write_text(f"model: {BASE}\nrank: 4\n")
    assert main(["warm", "--config", str(tmp_path / "run.yaml"), "--device", "cpu"]) == 0


@pytest.mark.parametrize("platform", ["linux", "win32", "darwin"])
def test_the_driver_caches_of_every_system_are_known(platform: str, tmp_path: Path) -> None:
    code = (
        f"import os, sys; sys.path[:] = {sys.path!r}; sys.platform = {platform!r}\n"
        f"os.confstr = lambda name: {str(tmp_path)!r}\n"
        "from wgrad.wgsl.runtime.driver_caches import driver_caches\n"
        "print(*driver_caches(), sep='\\n')"
    )
    (tmp_path / "com.x" / "com.apple.metal").mkdir(parents=True)
    environment = {**os.environ, "HOME": str(tmp_path), "LOCALAPPDATA": str(tmp_path / "Local")}
    environment = {k: v for k, v in environment.items() if k not in ("XDG_CACHE_HOME", "MESA_SHADER_CACHE_DIR")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    found = done.stdout.splitlines()
    wanted = {"linux": ".cache/mesa_shader_cache", "win32": "Local/NVIDIA/DXCache", "darwin": "com.x/com.apple.metal"}
    assert str(tmp_path / wanted[platform]) in found
