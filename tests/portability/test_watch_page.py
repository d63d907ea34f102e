"""The page of wgrad watch in headless Chromium: curves that grow, and texts of a run that stay texts."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.portability.browser import Browser
from wgrad.train.commands.watch import open_watch
from wgrad.train.output.metrics import MetricsFile, SamplesFile
from wgrad.train.serve.watch_server import WatchServer

EVIL = "<script>document.title='run'</script><img src=x onerror=document.title=1>\"onload=\"document.title=2"
KEY = "<img src=x onerror=document.title=3>"  # of an option; a longer one is cut
SECONDS = 60


def append(out: Path, begin: int, *steps: int) -> None:
    with MetricsFile(out, begin) as metrics:
        for step in steps:
            metrics.write({"step": step, "loss": 8.0 / step, "lr": 0.5, "rewards/<b>margins": 0.1 * step})
            if step == 4:
                metrics.write_held_out(4, 1.5, {})


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """A run whose name, options, samples, results and profile are markup (but for a '/', which no name has)."""
    folder = tmp_path / EVIL.replace("/", "")
    folder.mkdir()
    append(folder, 0, 1, 2, 4)
    with SamplesFile(folder, None) as samples:
        samples.write({"step": 0, "prompt": f"prompt {EVIL}", "text": f"text {EVIL}"})
    (folder / "config.yaml").write_text(json.dumps({"model": f"option {EVIL}", KEY: 1}))
    (folder / "results.json").write_text(json.dumps({"steps": 4, "sample_after": f"result {EVIL}"}))
    (folder / "profile.txt").write_text(f"kernel {EVIL}")
    return folder


@pytest.fixture
def page(browser: Browser, out: Path) -> Iterator[Browser]:
    with WatchServer(0, open_watch([str(out), str(out.parent / "later")])) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        browser.ask("Page.navigate", url=server.address)
        yield browser
        browser.ask("Page.navigate", url="about:blank")
        server.shutdown()
        thread.join()


def wait(page: Browser, expression: str, value: Any) -> None:
    for _ in range(20 * SECONDS):
        if (found := page.evaluate(expression)) == value:
            return
        time.sleep(0.05)
    raise AssertionError(f"{expression} is {found!r}, not {value!r}")


# What a screen reader says of the chart of losses: name, last value, step and number of values of each run.
LOSS = "document.querySelector('figure[data-key=loss] [role=img]')?.getAttribute('aria-label') ?? ''"
POINTS = f"({LOSS}).match(/at step \\d+, \\d+ values/g)?.join('; ') ?? ''"


def test_curves_grow_and_texts_are_never_markup(page: Browser, out: Path, tmp_path: Path) -> None:
    wait(page, POINTS, "at step 4, 3 values")
    assert page.evaluate("document.title") == "wgrad watch"
    assert page.evaluate("document.querySelectorAll('img, iframe, b, [onload], [onerror]').length") == 0
    assert page.evaluate("document.scripts.length") == 2
    text = page.evaluate("document.body.innerText")
    for part in (str(out), KEY, *(f"{what} {EVIL}" for what in ("prompt", "text", "option", "result", "kernel"))):
        assert part in text, part
    assert "rewards/<b>margins" in text and "not there yet" in text and "done" in text
    assert page.evaluate("document.querySelectorAll('figure canvas').length") == 4

    append(out, 4, 5)  # written anew up to step 4
    wait(page, POINTS, "at step 5, 4 values")
    held_out = "document.querySelectorAll('figure[data-key=held_out_loss]').length"
    assert page.evaluate(held_out) == 1
    append(out, 1, 2)  # resumed from step 1
    wait(page, POINTS, "at step 2, 2 values")
    assert page.evaluate(held_out) == 0
    (tmp_path / "later").mkdir()
    append(tmp_path / "later", 0, 1)
    wait(page, POINTS, "at step 2, 2 values; at step 1, 1 values")
    page.evaluate("document.querySelector('#runs input').click()")
    wait(page, POINTS, "at step 1, 1 values")


def test_a_narrow_screen_shows_all_of_a_chart(page: Browser) -> None:
    wait(page, POINTS, "at step 4, 3 values")
    page.ask("Emulation.setDeviceMetricsOverride", width=360, height=800, deviceScaleFactor=1, mobile=True)
    wait(page, "document.documentElement.scrollWidth", 360)
    page.ask("Emulation.clearDeviceMetricsOverride")


def test_a_run_measured_at_its_end_alone_has_its_held_out_loss(page: Browser, out: Path) -> None:
    cell = "document.querySelector('#runs').rows[0].cells[4].innerText"
    (out / "metrics.jsonl").unlink()
    append(out, 0, 1, 2, 3)
    for told, shown in ((2.5, "2.500"), ("<b>", "–"), (None, "–")):
        (out / "results.json").write_text(json.dumps({"steps": 3, "held_out_loss_after": told}))
        wait(page, cell, shown)


def test_gaps_and_what_goes_back(page: Browser) -> None:
    """The functions of charts.js, which the studio draws with too."""
    page.evaluate("import('/pages/charts.js').then((found) => { window.drawing = found; })")
    wait(page, "typeof window.drawing", "object")
    assert page.evaluate("drawing.smoothed([3, 3, null, 3], 0.9).map((v) => v && Number(v.toFixed(9)))") == [
        3,
        3,
        None,
        3,
    ]
    series = "(() => { const made = new drawing.Series(); for (const n of [1, 2, 3, 2]) made.add('a', n, 10 * n);"
    series += "return made.keys.get('a'); })()"
    assert page.evaluate(series) == {"steps": [1, 2], "values": [10, 20]}
    assert page.evaluate("[null, 3, 0.001234, 4321.5, 2e7].map(drawing.written)") == [
        "–",
        "3",
        "1.23e-3",
        "4322",
        "2.00e+7",
    ]


def test_noise_is_smoothed_and_the_cursor_tells_the_nearest_values(page: Browser) -> None:
    page.evaluate("import('/pages/charts.js').then((found) => { window.drawing = found; })")
    wait(page, "typeof window.drawing", "object")
    page.evaluate("""(() => {
      const runs = [[1, 2, 9], [4, 6]].map((steps, number) => {
        const series = new drawing.Series();
        for (const key of ["loss", "lr", "reward"]) for (const step of steps) series.add(key, step, step / 2);
        return { name: `run${number}`, number, series };
      });
      window.charts = new drawing.Charts(document.querySelector("main").appendChild(document.createElement("div")));
      charts.draw(runs, { log: false, smoothing: 0.5 });
    })()""")
    lines = "['loss', 'lr', 'reward'].map((key) => charts.charts.get(key).uplot.series.length - 1)"
    wait(page, lines, [4, 2, 4])  # of two runs, what was measured and what is smoothed
    page.evaluate(
        "(() => { const { uplot } = charts.charts.get('reward');"
        "uplot.setCursor({ left: uplot.valToPos(6, 'x'), top: 9 }); })()"
    )
    told = "charts.charts.get('reward').values.innerText.replace(/\\s+/g, ' ')"
    wait(page, told, "step 6 run0 4.500 (step 9) run1 3")
    assert page.evaluate("drawing.nearest({ steps: [1, 2], values: [null, null] }, 1)") == -1


def test_a_server_that_has_gone_is_told(browser: Browser, out: Path) -> None:
    with WatchServer(0, open_watch([str(out)])) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        browser.ask("Page.navigate", url=server.address)
        wait(browser, POINTS, "at step 4, 3 values")
        server.shutdown()
        thread.join()
    wait(browser, "document.getElementById('status').classList.contains('bad')", True)
    assert browser.evaluate(POINTS) == "at step 4, 3 values"
