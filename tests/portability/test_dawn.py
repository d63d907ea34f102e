"""Every shader variant through Tint, Chromium's WGSL compiler, and their results through Dawn, on a software driver.

Needed: node 18 or newer; `npm ci --ignore-scripts` in this folder (Dawn's binding for Node); and SwiftShader (Debian:
chromium-common), or whatever Vulkan driver VK_ICD_FILENAMES names. Where one is missing the tests are skipped and say
which, or fail when WGRAD_REQUIRE_DAWN=1, as in .ci/run.

SwiftShader needs seconds to compile one large shader and minutes for all, so that what runs by default is a part: of
each shader and entry point the constants that it is specialised by, every value at least once, in the shortest variant
that has it, as far as that one is short. WGRAD_DAWN_ALL=1 runs all. It has no shader-f16: variants with it are
compiled, not run.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from wgrad.autograd.selftest.bundle import Bundle

HERE = Path(__file__).parent
SWIFTSHADER = [f"{folder}/vk_swiftshader_icd.json" for folder in ("/usr/lib/chromium", "/opt/google/chrome")]
PROCESSES = 2
SECONDS = 3600 if os.environ.get("WGRAD_DAWN_ALL") == "1" else 300
LONGEST = 9_000  # characters of a shader that is run by default, where no shorter one has its entry point


@dataclass(frozen=True)
class Dawn:
    """environment: of the processes, with the Vulkan driver to use."""

    node: str
    environment: dict[str, str]
    folder: Path

    def _start(self, bundle: Path, output: Path, *arguments: str) -> subprocess.Popen[str]:
        command = [self.node, str(HERE / "dawn.mjs"), str(bundle), str(output), *arguments]
        return subprocess.Popen(command, env=self.environment, stderr=subprocess.PIPE, text=True)

    def _put(self, bundle: Bundle, name: str) -> Path:
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        (folder / "bundle.json").write_text(json.dumps(bundle.document))
        (folder / "block.bin").write_bytes(bundle.block)
        return folder

    def _lines(self, process: subprocess.Popen[str], output: Path) -> list[dict[str, Any]]:
        _, errors = process.communicate(timeout=SECONDS)
        assert process.returncode == 0, f"node ended with {process.returncode}: {errors[-2000:]}"
        return [json.loads(line) for line in output.read_text().splitlines()]

    def compile(self, bundle: Bundle) -> dict[str, Any]:
        """What compileAll of bundle_runner.mjs gives, on Dawn's backend that has every feature and computes nothing."""
        folder = self._put(bundle, "compile")
        output = folder / "result"
        _, result = self._lines(self._start(folder, output, "null", "compile"), output)
        return result

    def run(self, bundle: Bundle, name: str) -> list[dict[str, Any]]:
        """The result of each case, on the Vulkan driver."""
        folder = self._put(bundle, name)
        outputs = [folder / f"result-{i}" for i in range(PROCESSES)]
        started = [self._start(folder, output, "vulkan", str(i), str(PROCESSES)) for i, output in enumerate(outputs)]
        found = [self._lines(process, output) for process, output in zip(started, outputs)]
        return [result for lines in found for result in lines[1:]]


@pytest.fixture(scope="session")
def dawn(tmp_path_factory: pytest.TempPathFactory, give_up: Any) -> Dawn:
    node = shutil.which("node")
    if node is None:
        give_up("node is not installed")
    version = subprocess.run([str(node), "--version"], capture_output=True, text=True).stdout
    if int((re.match(r"v(\d+)", version) or [0, 0])[1]) < 18:
        give_up(f"node is too old: {version.strip()}, 18 or newer is needed")
    if not (HERE / "node_modules" / "webgpu").is_dir():
        give_up("Dawn's binding is not installed: npm ci --ignore-scripts in tests/portability")
    driver = os.environ.get("VK_ICD_FILENAMES") or next((f for f in SWIFTSHADER if Path(f).exists()), None)
    if driver is None:
        give_up(f"no SwiftShader at {SWIFTSHADER[0]}: install chromium-common, or set VK_ICD_FILENAMES")
    return Dawn(str(node), {**os.environ, "VK_ICD_FILENAMES": str(driver)}, tmp_path_factory.mktemp("dawn"))


Change = Callable[[str, str], str]


def with_shaders(bundle: Bundle, change: Change) -> Bundle:
    """The same bundle with change(label, code) in the place of each shader's code."""
    shaders = [{**s, "code": change(s["label"], s["code"])} for s in bundle.document["shaders"]]
    return Bundle({**bundle.document, "shaders": shaders}, bundle.block)


def with_cases(bundle: Bundle, chosen: list[dict[str, Any]]) -> Bundle:
    return Bundle({**bundle.document, "cases": chosen}, bundle.block)


def shaders_of(case: dict[str, Any]) -> Iterator[int]:
    return (step[1] for step in case["steps"] if step[0] == "run")


def declarations(shader: dict[str, Any]) -> set[tuple[str, ...]]:
    """A shader's entry point, and each constant and type that the loader put on top of it."""
    here = (shader["label"], shader["entry"])
    head = shader["code"].split("//", 1)[0].splitlines()
    return {here} | {(*here, line) for line in head if line.startswith(("const ", "alias "))}


def chosen_cases(bundle: Bundle) -> list[dict[str, Any]]:
    """Cases in float32, shortest shaders first, while they have something new; see above."""
    shaders, runnable = bundle.document["shaders"], [c for c in bundle.document["cases"] if not c["float16"]]
    if os.environ.get("WGRAD_DAWN_ALL") == "1":
        return runnable
    length = {c["name"] + c["profile"]: max(len(shaders[s]["code"]) for s in shaders_of(c)) for c in runnable}
    found, seen = [], set[tuple[str, ...]]()
    for case in sorted(runnable, key=lambda c: length[c["name"] + c["profile"]]):
        new = set().union(*(declarations(shaders[s]) for s in shaders_of(case))) - seen
        if any(len(d) == 2 for d in new) or (new and length[case["name"] + case["profile"]] <= LONGEST):
            found.append(case)
            seen |= new
    return found


def test_every_variant_compiles_in_tint(dawn: Dawn, bundle: Bundle, capsys: pytest.CaptureFixture[str]) -> None:
    result = dawn.compile(bundle)
    shaders = bundle.document["shaders"]
    wrong = [f"{shaders[f['shader']]['label']}: {f['message']}" for f in result["failed"]]
    assert wrong == []
    assert result["parsed"] == len(shaders) > 600
    assert result["compiled"] + sum(result["left"].values()) == len(shaders)
    with capsys.disabled():
        print(
            f"\nTint: {len(shaders)} variants are valid, {sum(s['float16'] for s in shaders)} of them with shader-f16;",
            end=" ",
        )
        print(f"{result['compiled']} pipelines; beyond the adapter's limits: {result['left']}")


def test_outputs_are_within_the_limits(dawn: Dawn, bundle: Bundle, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = chosen_cases(bundle)
    results = dawn.run(with_cases(bundle, chosen), "run")
    assert [r["name"] for r in results if r["skipped"] and not r["skipped"].startswith("49152 bytes")] == []
    assert [r for r in results if not r["ok"] and not r["skipped"]] == []
    ran = {r["name"] + r["profile"] for r in results if r["ok"]}
    variants = {s for c in chosen if c["name"] + c["profile"] in ran for s in shaders_of(c)}
    shaders = bundle.document["shaders"]
    assert {(s["label"], s["entry"]) for s in shaders} == {(shaders[v]["label"], shaders[v]["entry"]) for v in variants}
    with capsys.disabled():
        print(
            f"\nDawn: {len(ran)} cases with {len(variants)} of {len(shaders)} variants are within the limits;", end=" "
        )
        print(f"{len(results) - len(ran)} not run for more workgroup memory than there is;", end=" ")
        print(f"{sum(s['float16'] for s in shaders)} variants need shader-f16", end=" ")
        print(f"and {sum(not s['float16'] for s in shaders) - len(variants)} more are left to WGRAD_DAWN_ALL=1")


# ---- what the two tests above are worth ------------------------------------------------------
def changed(bundle: Bundle, label: str, old: str, new: str) -> Bundle:
    """The variants of one shader without their cases, a text in each replaced by another; it must be there."""
    shaders = [s for s in bundle.document["shaders"] if s["label"] == label]
    assert shaders and all(old in s["code"] for s in shaders), f"{label} no longer has {old!r}"
    changed = [{**s, "code": s["code"].replace(old, new)} for s in shaders]
    return Bundle({**bundle.document, "shaders": changed, "cases": []}, b"")


@pytest.mark.parametrize(
    ("label", "old", "new"),
    [
        (
            "quantize_nf4_nested",
            "code(d0 * scale) | (code(d1 * scale) << 8u)",
            "code(d0 * scale) | code(d1 * scale) << 8u",
        ),
        ("norm_rms_backward", "var start = first;", "var start = place - lid / LANES;"),
    ],
)
def test_what_only_tint_refuses_is_found(dawn: Dawn, bundle: Bundle, label: str, old: str, new: str) -> None:
    mutant = changed(bundle, label, old, new)
    assert len(dawn.compile(mutant)["failed"]) == len(mutant.document["shaders"])


MUTANTS = {
    "a mask off by one": ("softmax", r"< p\.columns", "< p.columns - 1u", "softmax/41x7/float32"),
    "a barrier gone": ("norm_rms", r"workgroupBarrier\(\);", "", "rms_norm/plain/7x123/float32>float32"),
    "a window off by one": ("attention_decode", r"p\.window", "(p.window + 1u)", "attention/decode window"),
    "a wrong term": ("rope", r"\* c - b", "* c + b", "rope/forward/37x3x64/float32"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_bug_in_a_shader_is_found(dawn: Dawn, bundle: Bundle, name: str) -> None:
    label, old, new, case = MUTANTS[name]
    chosen = [c for c in bundle.document["cases"] if c["name"].startswith(case) and not c["float16"]][:1]
    assert len(chosen) == 1
    small = with_cases(bundle, chosen)
    texts = {s["code"] for s in bundle.document["shaders"] if s["label"] == label}
    mutant = with_shaders(small, lambda n, code: re.sub(old, new, code) if n == label else code)
    assert texts != {s["code"] for s in mutant.document["shaders"] if s["label"] == label}
    assert [r["ok"] for r in dawn.run(small, "right")] == [True]
    assert [r["ok"] for r in dawn.run(mutant, "mutant")] == [False]
