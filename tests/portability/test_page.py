"""The page of `wgrad selftest --page` in headless Chromium, on its software adapter. Skipped as test_dawn.py is."""

from __future__ import annotations

import base64
import gzip
import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from tests.portability.browser import Browser
from wgrad.autograd.selftest.bundle import Bundle
from wgrad.train.commands.cli import main
from wgrad.train.commands.selftest_page import make_page, page_bundle

ONLY = "softmax"  # small shaders: SwiftShader is slow to compile the others
SECONDS = 300


def run(browser: Browser, page: Path) -> dict[str, Any]:
    """Open the page, wait for its end and return the report. `summary` is the text at its top."""
    browser.ask("Page.navigate", url=page.as_uri())
    for _ in range(10 * SECONDS):
        summary = browser.evaluate("document.getElementById('summary')?.className && document.title")
        if summary:
            report = browser.evaluate("document.getElementById('report').value")
            return {**(json.loads(report) if report else {}), "summary": summary}
        time.sleep(0.1)
    raise AssertionError(f"the page did not end: {browser.evaluate('document.title')}")


def test_the_page_runs_and_passes(browser: Browser, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    assert main(["selftest", "--page", str(page), "--only", ONLY]) == 0
    assert re.search(r"page\.html: \d+ cases with \d+ shader variants, [\d.]+ MB", capsys.readouterr().out)
    report = run(browser, page)
    rows = browser.evaluate("[...document.querySelectorAll('#rows tr')].map(r => r.innerText)")
    total = len(report["results"])
    assert total == len(rows) == len(page_bundle(ONLY).document["cases"])
    # This adapter has no shader-f16: those cases are counted, and named in the table.
    assert report["passed"] + report["skipped"] == total and report["failed"] == 0 and report["skipped"] > 0
    assert report["summary"] == (
        f"wgrad self-test: {report['passed']} passed, {report['skipped']} not run: errors are within the limits"
    )
    for result, row in zip(report["results"], rows):
        assert result["name"] in row and ("not run: no shader-f16" if result["skipped"] else "ok") in row
        assert result["skipped"] or 0 <= result["error"] <= result["limit"]
    assert "swiftshader" in report["adapter"].lower()
    browser.screenshot(tmp_path / "page.png")


def _broken(bundle: Bundle, old: str, new: str) -> Bundle:
    shaders = [{**s, "code": s["code"].replace(old, new)} for s in bundle.document["shaders"]]
    assert shaders != bundle.document["shaders"]
    return Bundle({**bundle.document, "shaders": shaders}, bundle.block)


def test_a_wrong_kernel_and_one_that_does_not_compile_are_told(browser: Browser, tmp_path: Path) -> None:
    bundle = page_bundle(ONLY)
    for old, new, word in (
        ("exp(f32(x[base + c]) - top) / sum", "exp(f32(x[base + c]) - top) / (sum * 1.001)", ""),
        ("var sum = 0.0;", "var sum = <img src=x onerror=document.title=1>;", "does not compile"),
    ):
        page = tmp_path / "broken.html"
        page.write_text(make_page(_broken(bundle, old, new)))
        report = run(browser, page)
        assert report["failed"] > 0 and "FAILED" in report["summary"]
        text = browser.evaluate("document.getElementById('rows').innerText")
        assert "FAILED" in text and word in text
        assert browser.evaluate("document.querySelectorAll('#rows img').length") == 0  # texts are never markup


def test_the_page_loads_nothing_and_holds_the_bundle() -> None:
    bundle = page_bundle(ONLY)
    text = make_page(bundle)
    assert "http:" not in text and "https:" not in text and text.count("</script>") == 3
    document, block = re.findall(r'<script type="text/plain" id="\w+">([^<]*)</script>', text)
    assert json.loads(gzip.decompress(base64.b64decode(document))) == json.loads(json.dumps(bundle.document))
    assert gzip.decompress(base64.b64decode(block)) == bundle.block
    assert make_page(page_bundle(ONLY)) == text


def test_options_that_a_page_cannot_take_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    for options, message in (
        (["--only", "no such"], "--only: no case has 'no such' in its name"),
        (["--json"], "--json: tells of a run here, and --page only writes a file"),
        (["--device", "cpu"], "--device: nothing runs here, --page only writes a file"),
        (["--report", "r.json"], "--report: tells of a run here"),
    ):
        assert main(["selftest", "--page", str(page), *options]) == 2
        assert message in capsys.readouterr().err
    assert main(["selftest", "--page", str(tmp_path / "none" / "page.html"), "--only", ONLY]) == 2
    assert "--page" in capsys.readouterr().err
    assert not page.exists()
