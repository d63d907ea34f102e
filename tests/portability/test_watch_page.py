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
SECONDS = 120


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


POINTS = "document.querySelectorAll('figure[data-key=loss] circle.c0').length"


def test_curves_grow_and_texts_are_never_markup(page: Browser, out: Path, tmp_path: Path) -> None:
    wait(page, POINTS, 3)
    assert page.evaluate("document.title") == "wgrad watch"
    assert page.evaluate("document.querySelectorAll('img, iframe, b, [onload], [onerror]').length") == 0
    assert page.evaluate("document.scripts.length") == 1
    text = page.evaluate("document.body.innerText")
    for part in (str(out), KEY, *(f"{what} {EVIL}" for what in ("prompt", "text", "option", "result", "kernel"))):
        assert part in text, part
    assert "rewards/<b>margins" in text and "not there yet" in text and "done" in text

    append(out, 4, 5)  # written anew up to step 4
    wait(page, POINTS, 4)
    measured = "document.querySelectorAll('figure[data-key=held_out_loss] circle').length"
    assert page.evaluate(measured) == 1
    append(out, 1, 2)  # resumed from step 1
    wait(page, POINTS, 2)
    assert page.evaluate(measured) == 0
    (tmp_path / "later").mkdir()
    append(tmp_path / "later", 0, 1)
    wait(page, "document.querySelectorAll('figure[data-key=loss] circle.c1').length", 1)

    # Logarithmic: what is not above 0 is left out; the values at the pointer are those of the nearest step.
    append(out, 0, 1, 2, 3, 4)
    wait(page, POINTS, 4)
    before = page.evaluate("document.querySelector('figure[data-key=loss] path.c0:not(.raw)').getAttribute('d')")
    page.evaluate("document.getElementById('log').click()")
    page.evaluate("place('smoothing').value = 0; place('smoothing').dispatchEvent(new Event('input'))")
    after = page.evaluate("document.querySelector('figure[data-key=loss] path.c0').getAttribute('d')")
    heights = [float(point.split()[1]) for point in after[1:].split("L")]
    falls = [low - high for high, low in zip(heights, heights[1:])]
    assert before != after and falls[0] == pytest.approx(falls[1] + falls[2], abs=0.3)  # 8, 4, 8/3, 2
    page.evaluate(
        "(() => { const svg = document.querySelector('figure[data-key=loss] svg'), box = svg.getBoundingClientRect();"
        "svg.dispatchEvent(new PointerEvent('pointermove', {clientX: box.right - 1, clientY: box.top + 9})); })()"
    )
    values = page.evaluate("document.querySelector('figure[data-key=loss] .values').innerText")
    assert values.startswith("step 4") and f"{out}: 2" in values and "8 at 1" in values


def test_a_narrow_screen_shows_all_of_a_chart(page: Browser) -> None:
    wait(page, POINTS, 3)
    page.ask("Emulation.setDeviceMetricsOverride", width=360, height=800, deviceScaleFactor=1, mobile=True)
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    page.ask("Emulation.clearDeviceMetricsOverride")


def test_a_run_measured_at_its_end_alone_has_its_held_out_loss(page: Browser, out: Path) -> None:
    cell = "document.querySelector('#runs').rows[0].cells[4].innerText"
    (out / "metrics.jsonl").unlink()
    append(out, 0, 1, 2, 3)
    for told, shown in ((2.5, "2.500"), ("<b>", "–"), (None, "–")):
        (out / "results.json").write_text(json.dumps({"steps": 3, "held_out_loss_after": told}))
        wait(page, cell, shown)


def test_gaps_spikes_and_what_goes_back(page: Browser) -> None:
    """The page's own functions."""
    wait(page, "document.body.dataset.answers >= 1", True)
    assert page.evaluate("[...thinned([1,2,3],[1,null,2],(v) => v !== null)]") == [0, None, 2]
    many = "[...Array(10000)].map((_, i) => i === 7777 ? 99 : 1)"
    assert page.evaluate(f"[...thinned({many}, {many}, () => true)].includes(7777)")
    assert page.evaluate(f"[...thinned({many}, {many}, () => true)].length") <= 800
    assert page.evaluate("smoothed([3, 3, null, 3], 0.9).map((v) => v && Number(v.toFixed(9)))") == [3, 3, None, 3]
    assert page.evaluate("niceTicks(0, 1, 5).map((t) => tickText('', t))") == ["0", "0.2", "0.4", "0.6", "0.8", "1"]
    ticks = "[0, 0.25, 1.5].map((t) => tickText('memory_bytes', t * 2 ** 30))"
    assert page.evaluate(ticks) == ["0 MiB", "256 MiB", "1.5 GiB"]
    assert page.evaluate("logTicks(0.5, 3000)") == [1, 10, 100, 1000]
    assert page.evaluate(
        "(() => { const run = newRun(0); for (const s of [1, 2, 3, 2]) addValue(run, 'a', s, 10 * s + run.series.size);"
        "return run.series.get('a'); })()"
    ) == {"steps": [1, 2], "values": [10, 21]}
    assert page.evaluate("[0, 1.4, 1.6, 9].map((s) => nearest([1, 2, 5], s))") == [0, 0, 1, 2]


def test_a_server_that_has_gone_is_told(browser: Browser, out: Path) -> None:
    with WatchServer(0, open_watch([str(out)])) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        browser.ask("Page.navigate", url=server.address)
        wait(browser, POINTS, 3)
        server.shutdown()
        thread.join()
    wait(browser, "document.getElementById('status').className", "bad")
    assert browser.evaluate(POINTS) == 3
