"""metrics.jsonl and the picture of the loss."""

from __future__ import annotations

import errno
import json
import math
import os
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest

from wgrad.device.errors import WgradError
from wgrad.train.output.callbacks import step_report
from wgrad.train.output.loss_curve import MAX_POINTS, loss_curve, nice_ticks, save_loss_curve, smooth
from wgrad.train.output.metrics import FORMAT, METRICS_FILE, SAMPLES_FILE, MetricsFile, SamplesFile, read_metrics


def record(step: int, **more) -> dict:
    return {"step": step, "loss": 5.0 / step, "lr": 1e-4, "grad_norm": 1.5, "tokens": 41 * step} | more


# ---- metrics.jsonl -----------------------------------------------------------------------------
def test_each_step_is_a_line_on_the_disk_at_once(tmp_path: Path) -> None:
    with MetricsFile(tmp_path) as metrics:
        for step in (1, 2, 3):
            metrics.write(record(step))
            assert len((tmp_path / METRICS_FILE).read_text().splitlines()) == step
    lines = [json.loads(x) for x in (tmp_path / METRICS_FILE).read_text().splitlines()]
    assert lines == [{"format": FORMAT} | record(1), record(2), record(3)]
    assert metrics.records == read_metrics(tmp_path / METRICS_FILE)


def test_what_is_not_finite_is_null(tmp_path: Path) -> None:
    with MetricsFile(tmp_path) as metrics:
        metrics.write(record(1, loss=math.nan, grad_norm=np.float32("inf"), tokens=np.int64(7)))
    text = (tmp_path / METRICS_FILE).read_text()
    assert "NaN" not in text and "Infinity" not in text
    assert json.loads(text) == {"format": FORMAT} | record(1, loss=None, grad_norm=None, tokens=7)


def test_resume_drops_later_steps_and_a_half_written_line(tmp_path: Path) -> None:
    with MetricsFile(tmp_path) as metrics:
        for step in range(1, 8):
            metrics.write(record(step))
    with open(tmp_path / METRICS_FILE, "a") as file:
        file.write('{"step": 8, "lo')
    with MetricsFile(tmp_path, steps_done=5) as metrics:
        metrics.write(record(6, loss=0.25))
    assert [(r["step"], r["loss"]) for r in read_metrics(tmp_path / METRICS_FILE)][-2:] == [(5, 1.0), (6, 0.25)]
    assert len(metrics.records) == 6


@pytest.mark.parametrize(
    "line",
    ['{"step": 3, "loss": "x"}', '{"step": 3, "loss": [1]}', '{"step": 3, "loss": NaN}', '{"step": 3, "loss": 1e301}']
    + ['{"step": 3, "loss": true}', '{"step": true, "loss": 1}', '{"step": "3"}', '{"step": 0, "loss": 1}', "[]", "{}"]
    + ['{"step": 3, "held_out_loss": "x"}', '{"step": 3, "lr": {}}', "?", f'{{"step": 3, "x": "{"y" * (1 << 16)}"}}'],
)
def test_a_line_that_is_no_record_is_left_out(line: str, tmp_path: Path) -> None:
    """The records around it stay, and the picture is drawn."""
    lines = [json.dumps(record(1)), line, json.dumps(record(2)), json.dumps({"step": 2, "held_out_loss": 2.5})]
    (tmp_path / METRICS_FILE).write_text("\n".join(lines) + "\n")
    with MetricsFile(tmp_path, steps_done=9) as metrics:
        assert metrics.invalid == 1 and metrics.of_steps() == [record(1), record(2)]
        held_out = metrics.held_out()
    assert held_out == {2: 2.5}
    ElementTree.fromstring(loss_curve(metrics.of_steps(), [(2, 2.5)]))
    assert read_metrics(tmp_path / METRICS_FILE) == metrics.records  # the file holds them alone
    assert [step_report(r, 9).loss for r in metrics.of_steps()] == [5.0, 2.5]


@pytest.mark.parametrize("line", ['{"step": 1, "prompt": [], "text": "x"}', '{"step": 1, "prompt": "x", "text": 3}'])
def test_a_line_that_is_no_sample_is_left_out(line: str, tmp_path: Path) -> None:
    kept = {"step": 0, "prompt": "x", "text": None}
    (tmp_path / SAMPLES_FILE).write_text(f"{json.dumps(kept)}\n{line}\n")
    with SamplesFile(tmp_path, 3) as samples:
        assert samples.records == [kept] and samples.invalid == 1


@pytest.mark.parametrize("losses", [(1e300, -1e300), (5e-324, 0.0), (1e-310, 3e-310), (1e300, 1e300)], ids=str)
def test_extreme_losses_are_drawn(losses: tuple[float, float]) -> None:
    picture = loss_curve([record(i + 1, loss=loss) for i, loss in enumerate(losses)])
    elements = list(ElementTree.fromstring(picture).iter())
    places = [element.get(key, "") for element in elements for key in ("d", "points", "x", "y")]
    assert any(places) and not any(word in place for place in places for word in ("nan", "inf"))


@pytest.mark.parametrize(
    "tail", [b'{"step": 6, "lo', b"\0" * 90, b'{"step": 6}\n{"st', b"[" * 9999, b"\xff\xfe", b"null\n"]
)
def test_a_torn_end_is_mended(tail: bytes, tmp_path: Path) -> None:
    """As a power cut leaves it: half a line, or a stretch of zeros; what comes after a resume is read again."""
    with MetricsFile(tmp_path) as metrics:
        for step in range(1, 6):
            metrics.write(record(step))
    path = tmp_path / METRICS_FILE
    good = path.read_bytes()
    path.write_bytes(good + tail)
    with MetricsFile(tmp_path, steps_done=5) as metrics:
        assert path.read_bytes() == good
        metrics.write(record(6))
    assert read_metrics(path) == [record(step) for step in range(1, 7)]


def test_a_file_is_closed_though_the_disk_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is raised, and closing again does nothing: the descriptor is not leaked."""

    def fail(number: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    metrics = MetricsFile(tmp_path)
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(WgradError, match=f"cannot write .*{METRICS_FILE}"):
        metrics.close()
    metrics.close()


def test_a_new_run_begins_with_an_empty_file(tmp_path: Path) -> None:
    (tmp_path / METRICS_FILE).write_text(json.dumps(record(1)) + "\n")
    MetricsFile(tmp_path).close()
    assert (tmp_path / METRICS_FILE).read_text() == ""


@pytest.mark.parametrize("kind", ["folder", "pipe", "zeros"])
def test_other_files_are_no_metrics(tmp_path: Path, kind: str) -> None:
    """Neither waited for nor read whole."""
    path = tmp_path / METRICS_FILE
    if kind == "zeros":
        with open(path, "wb") as file:
            file.truncate(1 << 36)
        assert read_metrics(path) == []
        return
    if kind == "folder":
        path.mkdir()
    elif hasattr(os, "mkfifo"):
        os.mkfifo(path)
    else:
        pytest.skip("no named pipes here")
    with pytest.raises(WgradError, match=f"--out: .*metrics.jsonl is a .*{kind}: give a regular file"):
        read_metrics(path)


def test_no_file_is_no_metrics(tmp_path: Path) -> None:
    assert read_metrics(tmp_path / "absent") == []


# ---- the picture -------------------------------------------------------------------------------
SVG = "{http://www.w3.org/2000/svg}"


def falling(count: int) -> list[dict]:
    return [{"step": i + 1, "loss": 2.0 + 3.0 * math.exp(-i / 40) + 0.1 * math.sin(i * 1.7)} for i in range(count)]


@pytest.mark.parametrize("count", [0, 1, 2, 29, 30, 41, 5003])
@pytest.mark.parametrize("held_out", [[], [(0, 5.1)], [(0, 5.1), (41, 2.2)], [(0, 5.0), (20, 3.0), (41, math.nan)]])
def test_the_picture_is_well_formed_and_inside_its_frame(count: int, held_out: list) -> None:
    root = ElementTree.fromstring(loss_curve(falling(count), held_out, "a <model> & data"))
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    for circle in root.iter(f"{SVG}circle"):
        assert 0 <= float(circle.attrib["cx"]) <= width and 0 <= float(circle.attrib["cy"]) <= height
    for line in root.iter(f"{SVG}polyline"):
        points = [tuple(map(float, p.split(","))) for p in line.attrib["points"].split()]
        assert len(points) <= MAX_POINTS + 2
        assert all(0 <= x <= width for x, _ in points)
    assert any("a <model> & data" == t.text for t in root.iter(f"{SVG}text"))


def test_a_step_without_a_loss_is_left_out() -> None:
    records: list[dict] = [{"step": 1, "loss": 2.0}, {"step": 2, "loss": None}, {"step": 3, "loss": 1.0}]
    root = ElementTree.fromstring(loss_curve(records))
    assert not list(root.iter(f"{SVG}polyline")) and len(list(root.iter(f"{SVG}circle"))) == 2


def test_held_out_values_are_written_beside_their_points() -> None:
    text = loss_curve(falling(41), [(0, 5.125), (41, 2.25)])
    assert ">5.125<" in text and ">2.250<" in text and "5.125 → 2.250" in text


def test_smoothing_keeps_a_constant_and_does_not_lag() -> None:
    assert smooth([3.0] * 41, 7) == pytest.approx([3.0] * 41)
    ramp = [float(i) for i in range(101)]
    assert smooth(ramp, 5)[50] == pytest.approx(50.0)


@pytest.mark.parametrize(("low", "high"), [(0, 1), (1.93, 5.71), (0, 278), (2.1301, 2.1309), (0, 123456)])
def test_ticks_are_round_and_inside(low: float, high: float) -> None:
    ticks = nice_ticks(low, high, 6)
    assert 2 <= len(ticks) <= 13
    assert all(low - 1e-9 <= t <= high + 1e-9 for t in ticks)
    step = ticks[1] - ticks[0]
    mantissa = step / 10 ** math.floor(math.log10(step) + 1e-6)
    assert min(abs(mantissa - m) for m in (1, 2, 5)) < 1e-3


def test_the_loss_curve_is_saved_as_svg(tmp_path: Path) -> None:
    save_loss_curve(tmp_path / "loss.svg", falling(5))
    assert (tmp_path / "loss.svg").read_text(encoding="utf-8").startswith("<svg ")
