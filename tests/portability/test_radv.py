"""Variants through Tint and then RADV, Mesa's compiler for AMD, which needs no GPU: RDNA and GCN code is made, not
run.

Needed: what test_dawn.py needs, Mesa's driver (mesa-vulkan-drivers) and a C compiler. By default the variants that are
short, and of each entry point the shortest, in float32 and in float16, for two generations; WGRAD_DAWN_ALL=1: all, for
four.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.portability.dawn import ALL, ask_dawn, front_driver
from tests.tools import C_COMPILER, DAWN, NODE, RADV, c_compiler
from wgrad.autograd.selftest.bundle import Bundle

DRIVER = "libvulkan_radeon.so"
# Names as RADV_FORCE_FAMILY takes them: RDNA 3, GCN 5, RDNA 2, GCN 4. The last has no shader-f16.
FAMILIES = ("gfx1100", "polaris10", "navi21", "vega10") if ALL else ("gfx1100", "polaris10")
LONGEST = 2_000  # characters of a shader


@pytest.fixture(scope="module")
def null_driver(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment in which RADV gives a device without a GPU."""
    for tool in (C_COMPILER, NODE, DAWN, RADV):
        tool.require()
    environment = front_driver(str(c_compiler()), tmp_path_factory.mktemp("radv"), "SWALLOW", DRIVER)
    return {**environment, "MESA_SHADER_CACHE_DISABLE": "true"}


def chosen(bundle: Bundle, float16: bool) -> Bundle:
    """The shaders to compile, without their cases; the float16 ones only where the GPU has them."""
    shaders = [s for s in bundle.document["shaders"] if float16 or not s["float16"]]
    if not ALL:
        shortest: dict[Any, Any] = {}
        for shader in sorted(shaders, key=lambda s: len(s["code"])):
            shortest.setdefault((shader["label"], shader["entry"], shader["float16"]), shader)
        shaders = [s for s in shaders if len(s["code"]) <= LONGEST or s in shortest.values()]
    return Bundle({**bundle.document, "shaders": shaders, "cases": []}, b"")


def compile_for(family: str, bundle: Bundle, environment: dict[str, str], folder: Path) -> list[dict[str, Any]]:
    (folder / "bundle.json").write_text(json.dumps(bundle.document))
    (folder / "block.bin").write_bytes(b"")
    forced = {**environment, "RADV_FORCE_FAMILY": family}
    return ask_dawn(str(shutil.which("node")), forced, str(folder), str(folder / "result"), "vulkan", "compile", "all")


@pytest.mark.parametrize("family", FAMILIES)
def test_variants_compile_for_amd(
    family: str,
    null_driver: dict[str, str],
    bundle: Bundle,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    float16 = family != "polaris10"
    some = chosen(bundle, float16)
    adapter, result = compile_for(family, some, null_driver, tmp_path)
    assert "amd" in adapter["adapter"] and result["failed"] == [] and result["left"] == {}
    assert result["compiled"] == len(some.document["shaders"]) >= 40
    with capsys.disabled():
        total = len(bundle.document["shaders"])
        print(
            f"\nRADV, {family}: code for {result['compiled']} of {total} variants", "" if float16 else "(none with f16)"
        )


def test_a_shader_that_is_wrong_is_found(null_driver: dict[str, str], bundle: Bundle, tmp_path: Path) -> None:
    some = [s for s in bundle.document["shaders"] if s["label"] == "fill"]
    broken = [{**s, "code": s["code"].replace("@workgroup_size(256)", "@workgroup_size(65536)")} for s in some]
    assert broken != some
    bundle = Bundle({**bundle.document, "shaders": [*some, *broken], "cases": []}, b"")
    _, result = compile_for("gfx1100", bundle, null_driver, tmp_path)
    assert result["compiled"] == len(some) and [f["shader"] for f in result["failed"]] == [len(some)]
