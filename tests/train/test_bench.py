"""`wgrad bench`: what it prints and draws, and that --compare names what became slower and nothing else."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from wgrad.autograd.bench import roofline
from wgrad.autograd.bench.timing import Time
from wgrad.autograd.reference import ReferenceDevice
from wgrad.device.formats.frozen_weight import formats
from wgrad.train.commands import against_cpu, bench
from wgrad.train.commands.against_cpu import Row, times_cpu, torch_sizes
from wgrad.train.commands.bench_model import SHAPES
from wgrad.train.commands.cli import main
from wgrad.train.commands.report_gpu import take
from wgrad.train.commands.report_parts import describe_device, rates
from wgrad.train.commands.report_run import compare_runs
from wgrad.train.commands.torch_step import measure as measure_torch

OPS = ("softmax", "rms_norm", "gemm")
QUICK = ["bench", "--device", "cpu", "--size", "tiny", "--warm-up", "0", "--op", *OPS]


class Clock:
    """Stands for the timing: every call takes a millisecond, times `slow` of the operator of that name, times `all`."""

    def __init__(self) -> None:
        self.slow: dict[str, float] = {}
        self.all, self.spread, self.op = 1.0, 0.0, ""

    def __call__(self, device: Any, work: Any, warm_up: float = 0.0) -> Time:
        return Time(1e-3 * self.all * self.slow.get(self.op, 1.0), self.spread)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made, measure = Clock(), bench.measure

    def timed(device: Any, machine: Any, entry: Any, warm_up: float) -> Any:
        made.op = entry.op
        try:
            return measure(device, machine, entry, warm_up)
        finally:
            made.op = ""

    monkeypatch.setattr(roofline, "time_device", made)
    monkeypatch.setattr(bench, "measure", timed)
    return made


_before: dict[str, Any] = {}  # what the fixture has, measured once


@pytest.fixture
def before(clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write the report of a run in which every call took a millisecond."""
    monkeypatch.setattr(ReferenceDevice, "reason", "asked for by name", raising=False)
    if not _before:
        _before.update({"format": 1, "device": {}, "rates": {}})
        for name, lines in (
            ("device", describe_device(ReferenceDevice())),
            ("rates", rates(ReferenceDevice(), "tiny", OPS)),
        ):
            for line in lines:
                take(_before[name], json.dumps(line, allow_nan=False))
    path = tmp_path / "before.json"
    path.write_text(json.dumps(_before))
    return path


def compared(before: Path, capsys: Any) -> tuple[int, str]:
    status = main([*QUICK, "--compare", str(before)])
    found = capsys.readouterr()
    return status, found.out + found.err


def test_only_operators_of_the_report_are_timed(before: Path, capsys: Any) -> None:
    report = json.loads(before.read_text())
    report["rates"]["rows"] = [row for row in report["rates"]["rows"] if row["name"].startswith("softmax/")]
    before.write_text(json.dumps(report))
    status, text = compared(before, capsys)
    timed = {line.split("/")[0] for line in text.splitlines() if line.startswith(OPS)}
    assert status == 0 and timed == {"softmax"}
    assert re.search(r"^\d+ of \d+ operators are not in the file: wgrad report-gpu --only rates times all$", text, re.M)


def test_an_operator_that_became_slower_is_named(before: Path, clock: Clock, capsys: Any) -> None:
    clock.slow = {"softmax": 1.06}
    status, text = compared(before, capsys)
    assert status == 1 and "SLOWER: softmax/16x128/float32: by 6.0%" in text and text.count("SLOWER") == 1
    clock.slow = {"softmax": 1.04, "gemm": 0.5}
    assert compared(before, capsys)[0] == 0


def test_a_slower_machine_is_no_slower_operator(before: Path, clock: Clock, capsys: Any) -> None:
    clock.all = 3.0
    status, text = compared(before, capsys)
    assert status == 0 and "no operator is more than 5% slower than before" in text
    clock.slow = {"rms_norm": 1.2}
    assert compared(before, capsys)[0] == 1


def test_what_the_spread_explains_is_no_slowness(before: Path, clock: Clock, capsys: Any) -> None:
    clock.slow, clock.spread = {"softmax": 1.2}, 0.2  # of the row and of its roof: 20 % in all
    status, text = compared(before, capsys)
    assert status == 0 and "too noisy to be judged by 5%:" in text
    clock.slow = {"softmax": 1.3}
    assert compared(before, capsys)[0] == 1


def test_one_slow_moment_is_timed_again(
    before: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    seen = []

    def once(device: Any, work: Any, warm_up: float = 0.0) -> Time:
        if clock.op == "softmax":
            seen.append(1)
        return Time(1e-3 * (2.0 if clock.op == "softmax" and len(seen) == 1 else 1.0), 0.0)

    monkeypatch.setattr(roofline, "time_device", once)
    assert compared(before, capsys)[0] == 0 and len(seen) == 2


def refused(words: list[str], capsys: Any) -> str:
    assert main(words) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and error.startswith("wgrad: error: ")
    return error


def test_a_file_that_cannot_be_compared_is_one_line(before: Path, tmp_path: Path, capsys: Any) -> None:
    text, path = before.read_text(), tmp_path / "other.json"
    report = json.loads(text)

    def of_rates(**changed: Any) -> str:
        return json.dumps({**report, "rates": {**report["rates"], **changed}})

    for written, words in (
        (text[: len(text) // 2], "is not valid JSON"),
        ("{}", "format is missing"),
        (json.dumps({**report, "format": 2}), "has format 2, and this version of wgrad reads format 1"),
        (
            json.dumps({**report, "launch_seconds": 1e-6}),
            "is of the former wgrad bench --json: make it anew with wgrad ",
        ),
        (json.dumps({**report, "rates": None}), "rates must be an object; got null: make it anew with"),
        (of_rates(rows="none"), "rates.rows must be a list"),
        (
            of_rates(rows=[{"name": "a", "roof": "memory", "share": 0.5}]),
            "rows[0].spread is missing: make it anew with",
        ),
        (of_rates(size="huge"), "rates.size must be one of large, small, tiny; got 'huge'"),
        (json.dumps({**report, "device": {"description": "A card (Vulkan)"}}), "is of A card (Vulkan)"),
        (of_rates(rows=[]), "none of its 0 operators was timed now"),
    ):
        path.write_text(written)
        words_given = ["bench", "--device", "cpu", "--warm-up", "0", "--op", "softmax", "--compare", str(path)]
        more = [] if "huge" in written else ["--size", "tiny"]
        assert words in refused([*words_given, *more], capsys)
    assert "no such file" in refused([*QUICK, "--compare", str(tmp_path / "none")], capsys)


def test_a_wrong_option_is_one_line(tmp_path: Path, capsys: Any) -> None:
    for words, message in (
        (["--op", "sofmax"], "--op: 'sofmax' is no operator (did you mean softmax?)"),
        (["--out", str(tmp_path / "a.png")], "--out: must end in .svg"),
        (["--out", str(tmp_path / "none" / "a.svg")], "no such folder"),
        (["--size", "huge"], "--size: must be one of auto, large, small, tiny"),
        (["--warm-up", "-1"], "--warm-up: must not be negative"),
        (["--device", "abacus"], "abacus"),
        (["--explan"], "unknown argument --explan (did you mean --explain?)"),
    ):
        assert message in refused(["bench", *words], capsys)


def test_the_picture_has_every_operator_and_roof(clock: Clock, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "roofline.svg"
    assert main([*QUICK, "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    picture = ElementTree.fromstring(out.read_text())
    assert picture.tag.endswith("svg")
    space = "{http://www.w3.org/2000/svg}"
    words = [element.text or "" for element in picture.iter(f"{space}text")]
    rows = [line for line in printed.splitlines() if line.startswith(OPS)]
    assert len(rows) >= 5 and sum(word.startswith(OPS) for word in words) == len(rows)
    assert any(word.startswith("memory ") for word in words) and any(word.startswith("float32 ") for word in words)
    width, height = (float(picture.attrib[name]) for name in ("width", "height"))
    for circle in picture.iter(f"{space}circle"):
        assert 0 <= float(circle.attrib["cx"]) <= width and 0 <= float(circle.attrib["cy"]) <= height


def test_ctrl_c_leaves_nothing_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def interrupted(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "measure", interrupted)
    assert main([*QUICK, "--out", str(tmp_path / "a.svg")]) == 130
    assert capsys.readouterr().err.endswith("wgrad: interrupted\n") and list(tmp_path.iterdir()) == []


def test_bench_measures_each_operator(capsys: Any) -> None:
    """Without a clock of the test's: a whole run, of one operator."""
    assert main(["bench", "--device", "cpu", "--warm-up", "0", "--size", "tiny", "--op", "silu"]) == 0
    (row,) = (line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("silu/"))
    assert float(row[1].replace(",", "")) > 0 and row[2].endswith("%") and row[6] in ("memory", "arithmetic")


def test_explain_prints_the_plan_of_every_weight(capsys: pytest.CaptureFixture[str], wgpu_device: Any) -> None:
    """And times nothing; formats with the same kernel share a line."""
    assert main(["bench", "--device", "wgpu", "--explain", "2048x8192x2048"]) == 0
    printed = capsys.readouterr().out
    if wgpu_device.software:
        assert "backward, weight in float32, float16, bfloat16:\n  gemm_direct, tile" in printed
    assert all(printed.count(name) == 2 for name in (*formats(), "bfloat16")) and "GFLOP/s" not in printed


@pytest.mark.parametrize(
    "sizes, device, words",
    [
        ("5x6", "cpu", "--explain: must be three sizes from 1 to 4294967295, as in 2048x8192x2048; got 5x6"),
        ("5x0x7", "cpu", "--explain: must be three sizes"),
        ("5x6x7", "cpu", "--explain: cpu shows no plan: use a wgpu device"),
    ],
)
def test_explain_refuses(sizes: str, device: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--device", device, "--explain", sizes]) == 2
    assert words in capsys.readouterr().err


# ---- --against-cpu -------------------------------------------------------------------------------
class Gpu(ReferenceDevice):
    """NumPy under another name."""

    name = "a gpu"


def test_against_cpu_prints_one_ratio_to_post(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(against_cpu, "select_device", lambda spec: Gpu())
    monkeypatch.setattr(against_cpu, "TOKENS", 16)
    seconds = {"device": 0.002, "NumPy": 0.3}
    monkeypatch.setattr(against_cpu, "_time_torch", lambda name, stack: Row(name, stack, "bfloat16", 0.2, 0))
    timed = iter(seconds.values())
    monkeypatch.setattr(against_cpu, "seconds_of", lambda step, wait, **_: step() or wait() is None or next(timed))
    assert main(["bench", "--against-cpu", "--size", "tiny"]) == 0
    said = capsys.readouterr().out
    found = {line.split()[1]: float(line.split()[3]) for line in said.splitlines() if line.startswith("tiny ")}
    assert found == {"device": 2.0, "NumPy": 300.0, "torch": 200.0}  # ms
    assert " is 100 times as fast as " in said and said.count("to post: ") == 1


@pytest.mark.oracle
def test_torch_trains_the_same_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, so that torch is imported once."""
    monkeypatch.setattr(against_cpu, "TOKENS", 16)
    monkeypatch.setattr(against_cpu, "seconds_of", lambda step, wait, **_: 1.0)
    found = measure_torch(torch_sizes(SHAPES["tiny"]))
    assert len(found["samples"]) == 5 and found["losses"][-1] < found["losses"][0]
    assert found["trainable"] == against_cpu._time_wgrad("tiny", "NumPy", ReferenceDevice()).trainable


def test_the_ratio_is_to_the_fastest_on_each_shape() -> None:
    rows = [Row("a", "device", "", 1, 0), Row("a", "NumPy", "", 2, 0), Row("a", "torch", "", 8, 0)]
    rows += [Row("b", "device", "", 1, 0), Row("b", "NumPy", "", 99, 0), Row("b", "torch", "", 32, 0)]
    assert times_cpu(rows) == pytest.approx(8)  # of 2 and 32


def test_long_steps_are_timed_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[float] = []
    clock = iter(range(0, 10_000, 10))
    monkeypatch.setattr(against_cpu.time, "perf_counter", lambda: float(next(clock)))
    assert against_cpu.seconds_of(lambda: calls.append(0.0), bool) == 10 and len(calls) == 2


@pytest.mark.parametrize("compile_seconds", [0.3, 12.0])
def test_steps_are_timed_at_the_full_clock_of_a_gpu(compile_seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """It rises while the GPU works; a compilation leaves it low, however long it takes."""
    clock, waits = SimpleNamespace(now=0.0, worked=0.0), iter([compile_seconds, 0.3])
    monkeypatch.setattr(against_cpu.time, "perf_counter", lambda: clock.now)

    class Steps:
        def step(self, *_: object) -> None:
            seconds = 0.01 if clock.worked > 0.3 else 0.06
            clock.worked += seconds
            clock.now += seconds + next(waits, 0.0)

        def read_history(self) -> None:
            pass

    built = (Steps(), SimpleNamespace(count=1))
    monkeypatch.setattr(against_cpu, "build", lambda *_, **__: built)
    device: Any = SimpleNamespace(name="wgpu", fastest_compute="float32")
    row = against_cpu._time_wgrad("tiny", "device", device)
    assert row.seconds == pytest.approx(0.01)


def test_short_steps_are_timed_in_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host prepares a step while the device is at the one before, as in a run."""
    clock = SimpleNamespace(now=0.0, device=0.0)
    monkeypatch.setattr(against_cpu.time, "perf_counter", lambda: clock.now)

    def step() -> None:
        clock.now += 0.02
        clock.device = max(clock.device, clock.now) + 0.03

    def wait() -> None:
        clock.now = max(clock.now, clock.device)

    assert against_cpu.seconds_of(step, wait) == pytest.approx(0.032, rel=0.02)  # ten, and the host's part of the first


@pytest.mark.parametrize(
    ("words", "said"),
    [(["--device", "cpu"], "no GPU to compare"), (["--op", "gemm"], "leave out --op"), (["--out", "a.svg"], "--out")],
)
def test_against_cpu_needs_a_gpu_and_nothing_else(words: list[str], said: str, tmp_path: Path, capsys: Any) -> None:
    assert main(["bench", "--against-cpu", *words]) == 2
    assert said in capsys.readouterr().err


class Asked(Exception):
    pass


@pytest.mark.parametrize("command", ["bench", "bench --explain 64x64x64", "selftest", "report"])
def test_what_tests_kernels_takes_a_software_driver(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`auto` takes NumPy before it elsewhere."""

    def asked(spec: str, needs: Any = None, *, kernels: bool = False) -> Any:
        raise Asked(spec, kernels)

    module = command.split()[0].replace("report", "report_run")
    monkeypatch.setattr(f"wgrad.train.commands.{module}.select_device", asked)
    with pytest.raises(Asked) as found:
        next(compare_runs("auto")) if command == "report" else main(command.split())
    assert found.value.args == ("auto", True)
