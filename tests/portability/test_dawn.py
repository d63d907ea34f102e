"""Every shader variant through Tint, Chromium's WGSL compiler, and their results through Dawn, on a software driver.

Needed: node 18 or newer; Dawn's binding for Node, as fetch_dawn.py gets it; and a Vulkan driver:
Mesa's lavapipe 22.3 or newer with a C compiler, or SwiftShader (Debian: chromium-common), or whatever VK_ICD_FILENAMES
names. Where one is missing the tests are skipped and say which, or fail when WGRAD_REQUIRE_TOOLS=1,
as in .ci/run.

Tint reads all variants, and makes a pipeline of one of each entry point in each precision. Software drivers need
seconds to compile one large shader, so that what runs by default is a part: each shader and entry point in one
precision, and the constants that it is specialized by in float32 and in float16, every value at least once, in the
shortest variant that has it, as far as that one is short. Those run as the tests of tests/wgsl have them: loops over a
tile's depth stay loops, and tiles are small (tests/conftest.py). WGRAD_DAWN_ALL=1 runs all, as a run has them, with a
pipeline of each. SwiftShader has no shader-f16: there, variants with it are compiled, not run.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from tests.portability.conftest import bundled_cases
from tests.portability.dawn import ALL, Dawn, find_driver
from tests.tools import DAWN, NODE, give_up
from wgrad.autograd.selftest.bundle import Bundle, make_bundle

LONGEST = 2_000  # characters of a shader that is run by default, where no shorter one has its entry point


@pytest.fixture(scope="session")
def dawn(tmp_path_factory: pytest.TempPathFactory) -> Dawn:
    NODE.require()
    DAWN.require()
    node = shutil.which("node")
    version = subprocess.run([str(node), "--version"], capture_output=True, text=True).stdout
    if int((re.match(r"v(\d+)", version) or [0, 0])[1]) < 18:
        give_up(f"node is too old: {version.strip()}, 18 or newer is needed")
    folder = tmp_path_factory.mktemp("dawn")
    driver = find_driver(str(node), folder)
    if driver is None:
        give_up("Dawn takes no Vulkan driver: install mesa-vulkan-drivers or chromium-common, or set VK_ICD_FILENAMES")
    return Dawn(str(node), driver, folder)


def with_cases(bundle: Bundle, chosen: list[dict[str, Any]]) -> Bundle:
    return Bundle({**bundle.document, "cases": chosen}, bundle.block)


def key(one: dict[str, Any]) -> tuple[str, str]:
    """Return the key of a case or its result."""
    return (one["name"], one["profile"])


def shaders_of(case: dict[str, Any]) -> Iterator[int]:
    return (step[1] for step in case["steps"] if step[0] == "run")


def kind(shader: dict[str, Any]) -> tuple[str, str, bool]:
    return (shader["label"], shader["entry"], shader["float16"])


def declarations(shader: dict[str, Any]) -> set[tuple[Any, ...]]:
    """A shader's entry point in its precision, and each constant and type that the loader put on top of it."""
    head = shader["code"].split("//", 1)[0].splitlines()
    return {kind(shader)} | {(*kind(shader), line) for line in head if line.startswith(("const ", "alias "))}


def chosen_cases(bundle: Bundle, float16: bool) -> list[dict[str, Any]]:
    """All, or the part that the top of this file describes, of what a driver with or without shader-f16 can run."""
    shaders = bundle.document["shaders"]
    if ALL:
        return list(bundle.document["cases"])
    length = {key(c): max(len(shaders[s]["code"]) for s in shaders_of(c)) for c in bundle.document["cases"]}
    found, seen = [], set[tuple[Any, ...]]()
    for case in sorted(bundle.document["cases"], key=lambda c: (length[key(c)], len(set(shaders_of(c))))):
        new = set().union(*(declarations(shaders[s]) for s in shaders_of(case))) - seen
        first = {kind(shaders[s])[:2] for s in shaders_of(case)} - {known[:2] for known in seen}
        wanted = first or (new and length[key(case)] <= LONGEST)
        if wanted and (float16 or not case["float16"]):
            found.append(case)
            seen |= new
    for case in [case for case in found if length[key(case)] > LONGEST]:
        entries = {kind(shaders[s])[:2] for s in shaders_of(case)}
        others = {kind(shaders[s])[:2] for one in found if one is not case for s in shaders_of(one)}
        if entries <= others:
            found.remove(case)
    return found


def test_every_variant_compiles_in_tint(dawn: Dawn, bundle: Bundle, capsys: pytest.CaptureFixture[str]) -> None:
    result = dawn.compile(bundle)
    shaders = bundle.document["shaders"]
    wrong = [f"{shaders[f['shader']]['label']}: {f['message']}" for f in result["failed"]]
    assert wrong == []
    assert result["parsed"] == len(shaders) > 600
    assert result["compiled"] + result["alike"] + sum(result["left"].values()) == len(shaders)
    assert (result["alike"] == 0) if ALL else result["compiled"] >= len({kind(s)[:2] for s in shaders})
    with capsys.disabled():
        print(
            f"\nTint: {len(shaders)} variants are valid, {sum(s['float16'] for s in shaders)} of them with shader-f16;",
            end=" ",
        )
        print(f"{result['compiled']} pipelines; beyond the adapter's limits: {result['left']}")


@pytest.mark.timeout(0 if ALL else 1800)
def test_outputs_are_within_the_limits(dawn: Dawn, bundle: Bundle, capsys: pytest.CaptureFixture[str]) -> None:
    driver = dawn.driver
    chosen = chosen_cases(bundle, driver.float16)
    part = with_cases(bundle, chosen) if ALL else make_bundle(bundled_cases(), only={key(c) for c in chosen})
    shaders, chosen = part.document["shaders"], part.document["cases"]
    ran = dawn.run(part)
    assert [r for r in ran.results if not r["ok"] and not r["skipped"]] == []
    variants = {key(c): set(shaders_of(c)) for c in chosen}
    done = set().union(*(variants[key(r)] for r in ran.results if r["ok"]))
    left = {v: r["skipped"] for r in ran.results if r["skipped"] for v in variants[key(r)] - done}
    if driver.float16 and driver.workgroup_bytes >= max(s["workgroup_bytes"] for s in shaders):
        assert left == {}
    else:  # a driver's limits are the only reasons
        assert {reason for reason in left.values() if not re.search("no shader-f16|workgroup memory", reason)} == set()
    if ALL:
        assert done | set(left) == set(range(len(shaders)))
    every = bundle.document["shaders"]
    assert {kind(shaders[v])[:2] for v in done} == {kind(s)[:2] for s in every if driver.float16 or not s["float16"]}
    assert not driver.float16 or any(shaders[v]["float16"] for v in done)

    def told(some: Iterable[int]) -> str:
        return ", ".join(f"{n} of {label}" for label, n in Counter(shaders[v]["label"] for v in some).items())

    half = sum(shaders[v]["float16"] for v in done)
    beyond = [f"{reason}: {told(v for v in left if left[v] == reason)}" for reason in sorted(set(left.values()))]
    with capsys.disabled():
        print(f"\nDawn on {driver.adapter}: {sum(r['ok'] for r in ran.results)} cases with", end=" ")
        print(f"{len(done)} of {len(every)} variants, {half} of them with shader-f16, are within the limits;", end=" ")
        print(f"{ran.cpu_s:.0f} CPU seconds, at most {ran.peak_bytes / 2**20:.0f} MiB a process;", end=" ")
        print(f"beyond the driver: {'; '.join(beyond) or 'none'};", end=" ")
        print(f"left to WGRAD_DAWN_ALL=1: {len(every) - len(done) - len(left)}")


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


# label of the shader, what to replace, by what, a case that uses it.
MUTANTS = {
    "a mask off by one": ("softmax", r"< p\.columns", "< p.columns - 1u", "softmax/41x7/float32"),
    "a barrier gone": ("norm_rms", r"workgroupBarrier\(\);", "", "rms_norm/plain/7x123/float32>float32"),
    "a place off by one": ("decoding_kv_append", r"token % p\.tokens;", "token % p.tokens + 1u;", "kv_append/float32"),
    "a wrong term": ("rope", r"\* c - b", "* c + b", "rope/forward/13x3x64 of which 48 turn/float32"),
}
FLOAT16_MUTANTS = {
    "a mask off by one": ("softmax", r"< p\.columns", "< p.columns - 1u", "softmax/41x7/float16"),
    "float32 written, float16 meant": ("softmax", "alias X_T = f16;", "alias X_T = f32;", "softmax/41x7/float16"),
}


@pytest.fixture(scope="module")
def mutants_pass(dawn: Dawn, bundle: Bundle) -> dict[str, list[bool]]:
    """Return for each mutant whether its case passes without the bug and with it, in one run of few processes."""
    shaders, cases = list(bundle.document["shaders"]), list[dict[str, Any]]()
    for kind_of, mutants in ((False, MUTANTS), (True, FLOAT16_MUTANTS)):
        for name, (label, old, new, case) in mutants.items() if dawn.driver.float16 or not kind_of else ():
            named = [c for c in bundle.document["cases"] if c["name"].startswith(case) and c["float16"] == kind_of]
            assert named, f"no case {case}"
            steps = []
            for step in named[0]["steps"]:
                if step[0] == "run" and shaders[step[1]]["label"] == label:
                    shader = shaders[step[1]]
                    shaders.append({**shader, "code": re.sub(old, new, shader["code"])})
                    assert shaders[-1]["code"] != shader["code"]
                    step = [step[0], len(shaders) - 1, *step[2:]]
                steps.append(step)
            assert steps != named[0]["steps"]
            cases += [{**named[0], "name": f"{name}, {kind_of}"}]
            cases += [{**named[0], "name": f"{name}, {kind_of}, mutant", "steps": steps}]
    document = {**bundle.document, "shaders": shaders, "cases": cases}
    passed = {result["name"]: result["ok"] for result in dawn.run(Bundle(document, bundle.block)).results}
    return {name: [passed[name], passed[f"{name}, mutant"]] for name in passed if not name.endswith("mutant")}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_bug_in_a_shader_is_found(mutants_pass: dict[str, list[bool]], name: str) -> None:
    assert mutants_pass[f"{name}, False"] == [True, False]


@pytest.mark.parametrize("name", FLOAT16_MUTANTS)
def test_a_bug_in_a_float16_shader_is_found(dawn: Dawn, mutants_pass: dict[str, list[bool]], name: str) -> None:
    if not dawn.driver.float16:
        pytest.skip(f"no shader-f16: {dawn.driver.adapter}")
    assert mutants_pass[f"{name}, True"] == [True, False]
