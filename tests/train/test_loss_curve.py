"""loss.svg where a run is short, its names long, or its losses not finite."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from typing import Any

import pytest

from wgrad.train.output.loss_curve import HEIGHT, LEFT, NOT_FINITE, RIGHT, TOP, WIDTH, loss_curve

SVG = "{http://www.w3.org/2000/svg}"


def picture(losses: list[float | None], held_out: Any = (), title: str = "m on d") -> ElementTree.Element:
    return ElementTree.fromstring(
        loss_curve([{"step": i + 1, "loss": v} for i, v in enumerate(losses)], held_out, title)
    )


def texts(root: ElementTree.Element) -> list[str]:
    return [t.text or "" for t in root.iter(f"{SVG}text")]


@pytest.mark.parametrize(
    "name", ["\x1b[2J", "\0\x01\x08\x0b\x0c\x7f\x9b", "a\nb\tc\rd", "\ud800\udc41", "\ufffe\uffff"]
)
def test_names_that_xml_cannot_have_are_shown_as_escapes(name: str) -> None:
    """A file may have any of these in its name."""
    root = picture([2.0, 1.0], title=f"<m> & {name} on 🐍.jsonl")
    shown = "".join(ascii(c)[1:-1] for c in name)
    assert f"<m> & {shown} on 🐍.jsonl" in texts(root)
    assert root.findtext(f"{SVG}title", "").startswith(f"<m> & {shown} on 🐍.jsonl: 2 steps")


def bands(root: ElementTree.Element) -> list[tuple[float, float]]:
    """Left and right end of each band in the axes."""
    boxes = [r.attrib for r in root.iter(f"{SVG}rect") if r.attrib.get("fill") == NOT_FINITE]
    return [(float(a["x"]), float(a["x"]) + float(a["width"])) for a in boxes if "clip-path" in a]


@pytest.mark.parametrize("held_out", [(), [(0, 5.0), (1, 3.0)]])
def test_one_step_is_a_dot(held_out: Any) -> None:
    root = picture([3.5], held_out)
    dots = [c.attrib for c in root.iter(f"{SVG}circle") if float(c.attrib["r"]) == 4]
    assert len(dots) == 1 and not list(root.iter(f"{SVG}polyline"))
    assert float(dots[0]["cx"]) == WIDTH - RIGHT and TOP < float(dots[0]["cy"]) < HEIGHT
    assert texts(root)[1].startswith("1 step")


@pytest.mark.parametrize("character", ["n", "W", "模", "\u0301", "/"])
@pytest.mark.parametrize("length", [1, 60, 500])
def test_a_long_title_has_its_middle_left_out(character: str, length: int) -> None:
    title = "begin " + character * length + " end"
    root = picture([3.0, 2.0], title=title)
    shown = texts(root)[0]
    assert shown.startswith("begin ") and shown.endswith(" end") and (shown == title) == ("…" not in shown)
    wide = {"W": 1.1, "模": 1.0}.get(character, 0.6) * 17  # in a bold face
    count = shown.count(character)
    assert count * wide + (len(shown) - count) * 0.6 * 17 <= WIDTH - LEFT - RIGHT
    assert (root.find(f"{SVG}title").text or "").startswith(title)  # type: ignore[union-attr]


def test_summary_and_title_stand_in_lines_of_their_own() -> None:
    root = picture([3.0] * 60, [(0, 5.125), (60, 2.25)], "n" * 300)
    title, summary = list(root.iter(f"{SVG}text"))[:2]
    assert summary.text == "60 steps, held-out loss 5.125 → 2.250"
    assert float(summary.attrib["y"]) - float(title.attrib["y"]) >= 17


@pytest.mark.parametrize(
    ("losses", "count", "words"),
    [
        ([3.0] * 40 + [None] * 20, 1, "20 losses not finite, from step 41"),
        ([3.0] * 10 + [None] + [2.0] * 30, 1, "1 loss not finite, at step 11"),
        ([None] * 5, 1, "5 losses not finite, from step 1"),
        ([3.0, None] * 20, 20, "20 losses not finite, from step 2"),
        ([None, 2.0, None, None], 2, "3 losses not finite, from step 1"),
    ],
)
def test_losses_that_are_not_finite_are_shown_and_counted(losses: list, count: int, words: str) -> None:
    root = picture(losses, [(0, 5.0)])
    assert texts(root)[1].endswith(f"; {words}") and "loss not finite" in texts(root)
    assert len(bands(root)) == count
    for line in root.iter(f"{SVG}polyline"):  # no line crosses a band
        xs = [float(p.split(",")[0]) for p in line.attrib["points"].split()]
        assert not any(min(xs) < left and right < max(xs) for left, right in bands(root))
    assert len(texts(root)) == len([t for t in texts(root) if "nan" not in t.lower().split()])


def test_a_finite_run_says_nothing_of_it() -> None:
    assert not bands(picture([3.0, 2.0])) and "finite" not in " ".join(texts(picture([3.0, 2.0])))


def test_smoothing_stops_at_a_gap() -> None:
    """Else the end of a run before it blew up would be drawn towards what came after."""
    root = picture([4.0] * 30 + [None] * 5 + [2.0] * 30)
    lines = [[float(p.split(",")[1]) for p in x.attrib["points"].split()] for x in root.iter(f"{SVG}polyline")]
    assert len(lines) == 4 and all(max(ys) - min(ys) < 0.11 for ys in lines)


def test_a_run_without_steps_is_drawn() -> None:
    assert texts(picture([]))[1] == "0 steps"
