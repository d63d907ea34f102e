"""`wgrad report-gpu`: its parts, what a driver that dies leaves, and the file."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import wgrad
from wgrad.autograd.bench import timing
from wgrad.autograd.bench.entries import operator_names
from wgrad.autograd.bench.entry import Entry
from wgrad.autograd.reference import ReferenceDevice
from wgrad.device.child import Silent
from wgrad.device.roof import Expectation
from wgrad.train.commands import cli, code_version, report_gpu, report_parts, report_run
from wgrad.train.commands.report_gpu import _run_part, _text, summary, take, where_to_send
from wgrad.train.commands.report_parts import by_turns, cpu_rates, describe_device, finite, in_order, rates, self_test
from wgrad.train.options.report_config import PARTS, ReportConfig


def fails_with(error: Exception) -> Callable[..., Any]:
    def fail(*given: Any, **options: Any) -> Any:
        raise error

    return fail


def gathered(lines: Iterator[dict[str, Any]]) -> dict[str, Any]:
    part: dict[str, Any] = {}
    for line in lines:
        take(part, json.dumps(finite(line), allow_nan=False))
    return part


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "SAMPLE_SECONDS", 0.0)
    monkeypatch.setattr(timing, "SAMPLES", 1)
    for name in ("WARM_SECONDS", "LONG_WARM_SECONDS"):
        monkeypatch.setattr(report_parts, name, 0.0)


def test_a_report_has_the_settings_of_drivers_and_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.path.expanduser", lambda path: "/home/ada")
    given = {
        "WGRAD_API_KEY": "secret", "WGRAD_HIP_GRAPHS": "0", "HIP_TOKEN": "x", "PATH": "/bin",
        "WGPU_SECRET": "x", "GPU_PASSWORD": "x",
        "RADV_PERFTEST": "cswave32", "VK_DRIVER_FILES": "/home/ada/icd.json", "HSA_OVERRIDE_GFX_VERSION": "11.0.0",
        "MESA_DEBUG": "x" * 1000,
    }  # fmt: skip
    assert report_gpu._settings(given) == {
        "HSA_OVERRIDE_GFX_VERSION": "11.0.0", "MESA_DEBUG": "x" * 300, "RADV_PERFTEST": "cswave32",
        "VK_DRIVER_FILES": "~/icd.json", "WGRAD_HIP_GRAPHS": "0",
    }  # fmt: skip
    monkeypatch.setattr("os.path.expanduser", lambda path: "/")  # as in some containers
    assert report_gpu._settings({"VK_DRIVER_FILES": "/etc/icd.json"}) == {"VK_DRIVER_FILES": "/etc/icd.json"}


def test_a_report_names_the_distribution_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESA_DEBUG", "silent")
    missing = fails_with(OSError("no os-release"))
    for release, name in ((lambda: {"PRETTY_NAME": "Debian 13"}, "Debian 13"), (dict, ""), (missing, "")):
        monkeypatch.setattr(report_gpu.platform, "freedesktop_os_release", release)
        system = report_gpu._system()
        assert system["distribution"] == name and system["environment"]["MESA_DEBUG"] == "silent"


def test_a_report_tells_sources_by_their_names_and_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled files and line ends do not count. A folder behind a link does, as in a checkout."""
    linked, package = tmp_path / "wgsl", tmp_path / "package"
    linked.mkdir()
    package.mkdir()
    (package / "wgsl").symlink_to(linked, target_is_directory=True)
    shader, seen = linked / "fill.wgsl", set[str]()
    for text in (b"fn a() {}\n", b"fn b() {}\n"):
        shader.write_bytes(text)
        seen.add(code_version.sources_digest(package))
    (package / "a.pyc").write_bytes(b"1")
    shader.write_bytes(b"fn b() {}\r\n")
    seen.add(code_version.sources_digest(package))
    assert len(seen) == 2 and all(re.fullmatch("[0-9a-f]{16}", digest) for digest in seen)
    shader.rename(linked / "copy.wgsl")
    assert code_version.sources_digest(package) not in seen
    for name in ("a.py", "gemm.hip", "tile.hpp", "tables.json"):
        seen.add(code_version.sources_digest(package))
        (package / name).touch()
        assert code_version.sources_digest(package) not in seen
    digest, walk = code_version.sources_digest(package), os.walk

    def backwards(*given: Any, **options: Any) -> Any:
        return [(at, folders, names[::-1]) for at, folders, names in walk(*given, **options)][::-1]

    monkeypatch.setattr(code_version.os, "walk", backwards)  # as another file system may list them
    assert code_version.sources_digest(package) == digest


def test_a_report_tells_the_commit_of_a_checkout_or_of_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts: list[str | None] = [None]
    found = SimpleNamespace(read_text=lambda name: texts[0])
    monkeypatch.setattr(code_version.metadata, "distribution", lambda name: found)
    package = tmp_path / "site-packages" / "wgrad"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "Of another project"]):
        subprocess.run([*git, *words], check=True)
    assert code_version.code_version(package)["commit"] == ""
    for words in (["add", "."], ["commit", "-q", "-m", "Of this one"]):
        subprocess.run([*git, *words], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    assert code_version.code_version(package)["commit"] == head and len(head) == 40
    for texts[0] in ('{"url": "x", "dir_info": {}}', "[", '{"vcs_info": 3}'):
        assert code_version.code_version(package)["commit"] == head
    texts[0] = '{"url": "https://x.org", "vcs_info": {"vcs": "git", "commit_id": "c0ffee"}}'
    assert code_version.code_version(package)["commit"] == "c0ffee"
    for error in (FileNotFoundError("git"), subprocess.TimeoutExpired("git", 10)):
        with monkeypatch.context() as patch:
            patch.setattr(code_version.metadata, "distribution", fails_with(metadata.PackageNotFoundError("wgrad")))
            assert code_version.code_version(package)["commit"] == head
            patch.setattr(code_version.subprocess, "run", fails_with(error))
            assert code_version.code_version(package)["commit"] == ""


# ---- the parts -----------------------------------------------------------------------------------
class Wrong(ReferenceDevice):
    reason = "made wrong"

    def silu(self, x: np.ndarray) -> np.ndarray:
        return np.full_like(x, np.nan)


def test_a_report_describes_the_device() -> None:
    part = gathered(describe_device(ReferenceDevice()))
    assert part["name"] == "cpu" and part["facts"]["name"] and part["fastest_compute"] == "float32"
    assert part["lacks"] == [] and part["details"] == {} and part["identity"]


def test_the_self_test_has_every_operator_first() -> None:
    cases = report_parts.selftest_cases(ReferenceDevice())
    kinds = [(c.op, c.direction, c.dtype) for c in in_order(cases)]
    count = len(set(kinds))
    assert len(set(kinds[:count])) == count < len(kinds) == len(cases)


def test_a_report_lists_failed_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_parts, "CHUNK", 2)
    chosen = [c for c in report_parts.selftest_cases(ReferenceDevice()) if c.op in ("silu", "scale")][:4]
    monkeypatch.setattr(report_parts, "selftest_cases", lambda device: chosen)
    part = gathered(self_test(Wrong()))
    failed = [row for row in part["cases"] if "failed" in row]
    assert len(part["cases"]) == len(chosen) and len(failed) == sum(c.op == "silu" for c in chosen)
    assert failed[0]["error"] is None
    part = gathered(self_test(ReferenceDevice(), start=1, most=1))
    assert len(part["cases"]) == 1 and part["number"] == 1
    part = gathered(self_test(ReferenceDevice(), seconds=-1.0))
    assert part["left"] == len(chosen) and "cases" not in part


def test_a_report_measures_within_its_time(at_once: None) -> None:
    part = gathered(rates(ReferenceDevice(), "tiny", seconds=-1.0))
    assert part["left"] > 20 and "rows" not in part
    assert {roof["name"] for roof in part["roofs"]} == {"memory", "float32"}
    assert re.fullmatch(r"memory [\d.,e-]+ GB/s, float32 [\d.,e-]+ TFLOP/s", part["said_in_short"])
    assert gathered(cpu_rates("tiny"))["roofs"][0]["per_second"] > 0


def test_operators_that_were_asked_for_are_all_timed(at_once: None) -> None:
    part = gathered(rates(ReferenceDevice(), "tiny", ("silu", "rope"), seconds=-1.0))
    wanted = report_parts.entries(ReferenceDevice(), report_parts.SIZES["tiny"], ("silu", "rope"))
    assert {row["name"] for row in part["rows"]} == {entry.name for entry in wanted} and "left" not in part
    assert all(row["spread"] >= 0 for row in part["rows"])


class Predicted(ReferenceDevice):
    """A device with a model of its kernels, and sensors."""

    def kernels_of(self, work: Any) -> list[tuple[str, str]]:
        work(ReferenceDevice())
        return [("elementwise", "silu_f32")]

    def expect(self, kernels: Any, flop: float, nbytes: float) -> Expectation:
        assert kernels == [("elementwise", "silu_f32")] and nbytes > flop > 0
        return Expectation(1e-12, "memory", 0.5)

    def sensors(self) -> dict[str, float]:
        return {"sclk_mhz": 2400.0}


def test_a_prediction_stands_next_to_each_rate(at_once: None, monkeypatch: pytest.MonkeyPatch) -> None:
    (silu,) = [e for e in report_parts.entries(ReferenceDevice(), report_parts.SIZES["tiny"]) if e.op == "silu"][:1]
    monkeypatch.setattr(report_parts, "entries", lambda device, sizes, ops: [silu])
    part = gathered(rates(Predicted(), "tiny"))
    (row,) = part["rows"]
    assert row["kernels"] == ["silu_f32"] and row["expected_bound"] == "memory" and row["expected_share"] == 0.5
    assert row["expected_ratio"] == pytest.approx(row["expected_seconds"] / row["seconds"], rel=0.02)
    assert part["sensors"] == {"sclk_mhz": [2400.0] * 3}
    case = next(c for c in report_parts.selftest_cases(ReferenceDevice()) if c.op == "silu")
    monkeypatch.setattr(report_parts, "selftest_cases", lambda device: [case])
    found = gathered(self_test(Predicted()))
    assert 0 <= found["worst_by_kernel"]["silu_f32"] <= 1 and "first_failed" not in found
    assert gathered(self_test(Wrong()))["first_failed"] == 0


def test_one_of_each_operator_is_timed_first_and_products_before_others() -> None:
    listed = report_parts.entries(ReferenceDevice(), report_parts.SIZES["tiny"])
    order = by_turns(listed)
    ops = [entry.op for entry in order]
    first = ops[: len(set(ops))]
    assert len(set(first)) == len(first) < len(order) == len(listed)
    products = [op in report_parts.PRODUCTS for op in first]
    assert products == sorted(products, reverse=True) and any(products) and not all(products)
    large = [Entry("gemm", "", shape, dtype, lambda device: {}) for shape in ("8x8x8", "4x4x4") for dtype in ("a", "b")]
    assert [(entry.shape, entry.dtype) for entry in by_turns(large, "b")][:2] == [("8x8x8", "b"), ("4x4x4", "b")]


def test_the_fine_tune_is_the_same_in_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("ROWS", 1), ("TOKENS", 32), ("LAYERS", 1)):
        monkeypatch.setattr(report_run, name, value)
    part = gathered(report_run.compare_runs("cpu", steps=2))
    assert part["ok"] and part["worst"] == 0.0 and len(part["losses"]) == len(part["losses_cpu"]) == 2
    assert part["compute"] == "float32" and part["losses"][0] > part["losses"][1] > 0


@pytest.mark.parametrize("loss", [5.1, float("nan")])
def test_a_wrong_fine_tune_is_reported(loss: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("compute: float32\n")
    losses = iter(([5.0, loss], [5.0, 5.0]))

    def train(*_: Any) -> Any:
        steps = [SimpleNamespace(loss=value) for value in next(losses)]
        return SimpleNamespace(metrics=lambda: steps, seconds=1.0, out=tmp_path)

    monkeypatch.setattr(report_run, "_train", train)
    assert gathered(report_run.compare_runs("gpu"))["ok"] is False


# ---- processes that die --------------------------------------------------------------------------
_DIES = """
import json, os, signal, sys, time
name, spec, size, start, *most = {arguments!r}
for number in range(int(start), int(start) + 1 if most else 6):
    print(json.dumps({{"set": {{"doing": f"case {{number}}", "number": number}}}}), flush=True)
    for kernel in ("fill", "k" + str(number)) * (os.environ.get("WGRAD_HIP_SYNC") == "trace"):
        print("launch: kernel " + kernel + ", arguments 7", file=sys.stderr, flush=True)
    print("Memory access fault", file=sys.stderr, flush=True)
    if number in %s:
        %s
    print("a driver's chatter", json.dumps({{"x": 1}}), flush=True)
    print(json.dumps({{"add": ["cases", {{"name": number}}]}}), flush=True)
"""


def dying(monkeypatch: pytest.MonkeyPatch, at: tuple[int, ...], how: str = "os.kill(os.getpid(), 9)") -> None:
    monkeypatch.setattr(report_gpu, "_CODE", _DIES % (at, how))


def part_of(name: str) -> dict[str, Any]:
    part: dict[str, Any] = {}
    for _ in _run_part(name, "hip", "tiny", part):
        pass
    return part


def ran(part: dict[str, Any]) -> list[int]:
    return [case["name"] for case in part["cases"]]


def test_a_self_test_goes_on_behind_the_case_that_killed_it(monkeypatch: pytest.MonkeyPatch) -> None:
    dying(monkeypatch, (2,))
    part = part_of("self-test")
    assert ran(part) == [0, 1, 3, 4, 5] and part["state"] == "done"
    (death,) = part["deaths"]
    assert death["at"] == "case 2" and death["ending"] == "crashed (signal 9)"
    assert death["last_launch"] == "kernel k2, arguments 7" and death["said"] == "Memory access fault"


def test_the_launches_of_the_first_wrong_case_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    dying(monkeypatch, (), "pass")
    first = 'print(json.dumps({{"set": {{"first_failed": 3}}}}), flush=True)\n'
    monkeypatch.setattr(report_gpu, "_CODE", report_gpu._CODE + first)
    part = part_of("self-test")
    launches = ["kernel fill, arguments 7", "kernel k3, arguments 7"]
    assert part["state"] == "done" and part["first_failed"] == {"at": "case 3", "launches": launches}


def test_results_of_all_processes_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 0 is wrong, case 2 ends the first process, case 3 lacks its operator, and case 4 is wrong in the second."""
    dying(monkeypatch, (2,))
    wrong = """
    if number in (0, 4):
        print(json.dumps({{"set": {{"first_failed": number}}}}), flush=True)
        print(json.dumps({{"add": ["cases", {{"name": number, "failed": "off"}}]}}), flush=True)
    if number == 3:
        print(json.dumps({{"add": ["cases", {{"name": number, "lacks": "gelu"}}]}}), flush=True)
    print(json.dumps({{"set": {{"worst_by_kernel": {{"k": 9.0 - number, str(number % 3): number}}}}}}), flush=True)
"""
    monkeypatch.setattr(report_gpu, "_CODE", report_gpu._CODE.rstrip() + wrong)
    part = part_of("self-test")
    assert (part["passed"], part["failed"], part["lacking"]) == (5, 2, 1)
    assert part["first_failed"]["at"] == "case 0"
    assert part["worst_by_kernel"] == {"1": 1, "2": 5, "k": 8.0}


def test_a_self_test_that_dies_again_and_again_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    dying(monkeypatch, (1, 3, 4), "sys.exit(7)")
    part = part_of("self-test")
    assert ran(part) == [0, 2] and part["state"] == "ended with status 7 at case 4" and len(part["deaths"]) == 3


def test_a_part_that_dies_is_reported_with_its_last_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    dying(monkeypatch, (1,))
    part = part_of("rates")
    assert part["state"] == "crashed (signal 9) at case 1" and ran(part) == [0]
    assert part["deaths"][0]["last_launch"] == "kernel k1, arguments 7"


def test_operators_reach_the_process_of_the_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    said = 'print(json.dumps({{"set": {{"given": {arguments!r}}}}}))'
    monkeypatch.setattr(report_gpu, "_CODE", f"import json; {said}")
    found = list[Any]()
    for name in ("rates", "cpu"):
        part: dict[str, Any] = {}
        list(_run_part(name, "hip", "tiny", part, ("silu", "rope")))
        found.append(part["given"])
    assert found == [["rates", "hip", "tiny", "0", "0", "silu", "rope"], ["cpu", "hip", "tiny", "0"]]


def test_a_part_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    dying(monkeypatch, (1,), "time.sleep(60)")
    monkeypatch.setattr(report_gpu, "SILENCE", 1.0)
    assert part_of("rates")["state"] == "hung: no answer for 1 s at case 1"


@pytest.mark.parametrize(("name", "seconds"), [("device", 180), ("self-test", 180), ("fine-tune", 1200)])
@pytest.mark.parametrize("speaks", [False, True])
def test_a_fine_tune_may_be_silent_for_longer(
    name: str, seconds: int, speaks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until its first line, and between its last one and its end."""

    def silent(limit: float) -> Any:
        assert limit == seconds
        raise Silent

    line = (lambda limit: None) if speaks else silent
    child = SimpleNamespace(line=line, status=silent, end=lambda: None, errors=[])
    monkeypatch.setattr(report_gpu, "Child", lambda *_: child)
    assert part_of(name)["state"] == f"hung: no answer for {seconds} s"


def test_a_part_runs_in_a_process_of_its_own() -> None:
    part: dict[str, Any] = {}
    for _ in _run_part("device", "cpu", "tiny", part):
        pass
    assert part["state"] == "done" and part["name"] == "cpu"


def test_an_error_is_a_line(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def leave(status: int) -> None:
        raise SystemExit(status)

    monkeypatch.setattr(report_parts.os, "_exit", leave)
    monkeypatch.setattr(report_parts.os, "dup2", lambda *_: None)
    with pytest.raises(SystemExit, match="3"):
        report_parts.main("device", "abacus", "tiny")
    assert capfd.readouterr().err.startswith("device 'abacus' is not known")


# ---- the file ------------------------------------------------------------------------------------
def test_the_text_is_json_with_a_line_for_each_row() -> None:
    value = {"a": [{"x": 1, "y": "\u0000 \\u0000 é"}, {"x": []}], "b": {"c": [1, 2.5, None], "d": []}, "e": "0"}
    text = _text(value)
    assert json.loads(text) == value
    assert '  {"x": 1, ' in text and '"c": [1, 2.5, null]' in text


GOOD: dict[str, dict[str, Any]] = {
    "device": {"facts": {"name": "GPU", "backend": "Vulkan", "driver": "1.2"}, "fastest_compute": "float16"},
    "self-test": {"passed": 3, "failed": 0},
    "rates": {"roofs": [{"name": "float32", "per_second": 4e12}, {"name": "tensor cores", "per_second": 8e13}]},
    "fine-tune": {"ok": True, "worst": 1e-4, "limit": 1e-3},
    "cpu": {"roofs": [{"name": "float32", "per_second": 1e11}]},
}


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, Any]]:
    """Set the results of the parts of a report, which do not run."""
    found = {name: {"state": "done", **values} for name, values in GOOD.items()}

    def run(name: str, spec: str, size: str, part: dict[str, Any], ops: tuple[str, ...]) -> Iterator[None]:
        found["rates"]["ops"] = ops
        kept = json.loads(Path(spec.removeprefix("wgpu:")).read_text(encoding="utf-8"))
        assert kept[name] == {"state": "running"} and kept["packages"]["numpy"] == np.__version__  # saved before
        part.update(found[name])
        yield

    monkeypatch.setattr(report_gpu, "_run_part", run)
    monkeypatch.setattr(report_gpu, "list_devices", list)
    monkeypatch.setattr(report_gpu, "_doctor", list)
    return found


def report(tmp_path: Path, *more: str) -> tuple[int, dict[str, Any]]:
    out = tmp_path / "report.json"
    status = cli.main(["report-gpu", "--device", f"wgpu:{out}", "--out", str(out), *more])
    return status, json.loads(out.read_text(encoding="utf-8"))


def test_a_report_is_summarized_and_written(
    parts: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, found = report(tmp_path)
    assert status == 0 and found["wgrad"] == wgrad.__version__ and found["system"]["cpus"]
    assert found["code"]["sources"] == code_version.sources_digest(Path(str(wgrad.__file__)).parent)
    assert found["summary"]["times_cpu"] == 800.0 and found["summary"]["right"] is True
    assert found["summary"]["name"] == "GPU" and found["summary"]["fine_tune_worst"] == 1e-4
    said = capsys.readouterr().out
    assert "fine-tune: as NumPy: losses differ by 1.0e-04 at most, 1e-03 allowed" in said
    assert "self-test: 3 cases passed, 0 failed" in said and "report.json is written. Attach it to a GPU report" in said


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("self-test", {"failed": 1}),
        ("self-test", {"deaths": [{"at": "gemm", "ending": "crashed (signal 6)"}]}),
        ("fine-tune", {"ok": False}),
        ("rates", {"state": "crashed (signal 6)"}),
        ("device", {"state": "ended with status 3", "said": "no adapter"}),
    ],
)
def test_what_is_wrong_is_the_status(
    parts: dict[str, Any], tmp_path: Path, part: str, change: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    parts[part].update(change)
    status, found = report(tmp_path)
    assert status == 1 and found["summary"]["right"] is False
    assert ("cpu" in found) == (part != "device")  # without a device there is nothing to measure
    said = capsys.readouterr().out
    if "state" in change:
        assert f"{part}: {change['state']}" in said
    assert ("0 failed, 1 ended the process (first gemm)" in said) == ("deaths" in change)


def test_a_part_alone_is_right_without_the_others(
    parts: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, found = report(tmp_path, "--only", "rates", "--op", "silu,rope")
    assert status == 0 and found["summary"]["right"] is True and found["only"] == ["rates"]
    assert {"device", "rates"} == found.keys() & set(PARTS) and found["rates"]["ops"] == ["silu", "rope"]
    said = capsys.readouterr().out
    assert said.endswith(f"is written. wgrad bench --compare {tmp_path / 'report.json'} compares with it.\n")
    parts["self-test"]["failed"] = 1
    for words, ops, right in (
        (["rates", "cpu"], list(operator_names()), True),
        (["self-test"], None, False),
    ):
        status, found = report(tmp_path, "--only", *words)
        assert (status == 0) == found["summary"]["right"] == right
        assert found.get("rates", {}).get("ops") == ops
        assert ("bench --compare" in capsys.readouterr().out) == ("rates" in words)
    report(tmp_path)
    assert parts["rates"]["ops"] == ()  # what the time allows


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--device", "gpu0"], "device 'gpu0' is not known; use one of: auto, hip"),
        (["--only", "rate"], "--only: must be of self-test, rates, fine-tune, cpu; got rate"),
        (["--op", "silu"], "--op: goes with --only rates: add that, or leave it out"),
        (["--only", "rates", "--op", "sofmax"], "--op: 'sofmax' is no operator (did you mean softmax?)"),
    ],
)
def test_a_wrong_option_is_refused_before_anything_is_written(
    parts: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    out = tmp_path / "report.json"
    assert cli.main(["report-gpu", "--out", str(out), *words]) == 2
    assert said in capsys.readouterr().err and not out.exists()


def test_nothing_measured_makes_a_row_all_the_same() -> None:
    assert set(summary({}).values()) == {None, False}


def test_a_file_that_cannot_be_written_is_told_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report_gpu, "package_versions", lambda: 1 // 0)
    assert cli.main(["report-gpu", "--out", str(tmp_path)]) == 2
    assert "cannot write" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("urls", "said"),
    [
        ([], "issue of the project."),
        (["Issues, https://x.org/a/b/issues"], "issue: https://x.org/a/b/issues/new?template=gpu-report.yml"),
        (["Documentation, https://d", "Source, https://x.org/a/b/"], "https://x.org/a/b/issues/new?template="),
    ],
)
def test_a_report_is_sent_to_the_address_of_the_project(
    urls: list[str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report_gpu.metadata, "metadata", lambda name: SimpleNamespace(get_all=lambda key: urls))
    assert said in where_to_send()


def test_selftest_report_still_runs_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    seen = list[Any]()

    def run(config: ReportConfig) -> int:
        seen.append((config.device, config.out, config.size, config.only))
        return 0

    monkeypatch.setattr(report_gpu, "run_report", run)
    assert cli.main(["selftest", "--device", "cpu", "--report", "x.json"]) == 0
    assert seen == [("cpu", "x.json", "auto", ())]
    assert "selftest --report is now report-gpu --out" in capsys.readouterr().err
    for option in (["--only", "rope"], ["--json"]):
        assert cli.main(["selftest", "--device", "cpu", "--report", "x.json", *option]) == 2
        assert f"{option[0]}: --report is of all cases" in capsys.readouterr().err
