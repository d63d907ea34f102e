"""The page of `wgrad studio` in headless Chromium: whole runs, by its fields and buttons alone."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.portability.browser import Browser
from tests.train.serving import serving
from tests.train.studio_server import SHORT, Client, studio_in
from wgrad.train.serve import children

EVIL = "<img src=x onerror=document.title=1><script>document.title=2</script>"
RECORD = {"prompt": f"Hear, {EVIL}", "completion": " my son."}
SECONDS = 120
# A device that is lost in the third of four steps, and again each time that it is opened anew.
LOSSY = """
import sys; sys.path[:] = {path!r}
from tests.train.lossy_device import Front
from wgrad.train.run import session
from wgrad.train.commands.cli import main
front = Front([900, *[100] * 9])
if "--resume" not in sys.argv:
    session.select_device = lambda *_: front.device()
sys.exit(main(sys.argv[1:]))
"""


# Roles of what a person operates.
USED = {"button", "textbox", "searchbox", "combobox", "checkbox", "link", "slider", "spinbutton"}
LONGER = {"max_steps": "4", "save_steps": "1"}


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    """Return a client of the studio in an empty folder, with data next to it."""
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        monkeypatch.setenv(name, "1")
    (tmp_path / "data.jsonl").write_text((json.dumps(RECORD) + "\n") * 8)
    (tmp_path / "broken.jsonl").write_text(f'{{"prompt": "{EVIL}"\n')
    with studio_in(tmp_path / EVIL.replace("/", "")) as found:
        yield found


@pytest.fixture
def page(browser: Browser, client: Client) -> Iterator[Browser]:
    browser.ask("Page.navigate", url=client.url)
    wait(browser, "document.body.dataset.answers >= 1")
    yield browser
    browser.ask("Page.navigate", url="about:blank")


def wait(page: Browser, expression: str) -> Any:
    """The expression's value once it is true; of an element, true."""
    for _ in range(10 * SECONDS):
        if found := page.evaluate(f"(found => found instanceof Element || found)({expression})"):
            return found
        time.sleep(0.1)
    raise AssertionError(f"{expression} does not become true: {page.evaluate('document.body.innerText')}")


def write(page: Browser, **values: Any) -> None:
    """Fill fields in as a person does, who types or ticks."""
    for name, value in values.items():
        page.evaluate(
            f"(() => {{ const field = document.getElementById('option-{name}'), value = {json.dumps(value)};"
            "if (field.type === 'checkbox') field.checked = value; else field.value = value;"
            "for (const kind of ['input', 'change']) field.dispatchEvent(new Event(kind, {bubbles: true})); })()"
        )


def press(page: Browser, text: str) -> None:
    found = f"[...document.querySelectorAll('button')].find((b) => b.textContent === '{text}' && b.checkVisibility()"
    wait(page, f"(() => {{ const b = {found} && !b.disabled); b?.click(); return !!b; }})()")


def text_of(page: Browser, id_: str) -> str:
    return str(page.evaluate(f"document.getElementById('{id_}').innerText"))


def nothing_is_markup(page: Browser) -> bool:
    title = page.evaluate("document.title")
    return "wgrad studio" in title and page.evaluate("document.querySelectorAll('img, [onerror]').length") == 0


def test_a_run_from_an_empty_folder_to_an_answer_in_two_tabs(page: Browser, client: Client, tmp_path: Path) -> None:
    out = str(client.studio.runs.folder / "first")
    write(page, **SHORT, data=str(tmp_path / "data.jsonl"), out=out)
    wait(page, "document.querySelectorAll('#data mark').length > 3")
    assert page.evaluate("document.querySelector('.example mark').textContent").startswith(RECORD["completion"])
    assert EVIL in text_of(page, "data") and nothing_is_markup(page)
    wait(page, f"document.getElementById('command').textContent.includes({json.dumps('--max-steps 2')})")
    assert page.evaluate("document.getElementById('yaml').textContent").endswith("sample: false\n")
    wait(page, "document.getElementById('time')?.textContent.startsWith('2 steps')")

    first = page.open_tab(client.url)  # sees what the other has typed
    wait(page, "document.getElementById('option-model')?.value.endsWith('base_model')")
    second = page.use(first)
    press(page, "Start the run")
    wait(page, "location.hash.startsWith('#run=')")
    page.use(second)
    page.evaluate("location.hash = 'runs'")
    wait(page, "document.querySelector('#list tr .state.done')")
    wait(page, "document.querySelector('#list td[data-name=step]').innerText === '2 of 2'")
    page.ask("Page.close")
    page.use(first)

    wait(page, "document.getElementById('run-state').textContent === 'done'")
    wait(page, "document.querySelectorAll('figure[data-key=loss] canvas').length === 1")
    assert "2 values" in page.evaluate("document.querySelector('figure[data-key=loss] [role=img]').ariaLabel")
    press(page, "Chat")
    wait(page, "document.getElementById('message')")
    page.evaluate(
        "document.getElementById('message').value = 'My son'; document.getElementById('chat-tokens').value = 3;"
        "document.querySelector('.compose').requestSubmit()"
    )
    said = "[...document.querySelectorAll('.answer .said')].filter((s) => s.textContent).length"
    wait(page, f"{said} === 2 && document.querySelector('.compose .main').textContent === 'Send'")
    assert page.evaluate("[...document.querySelectorAll('.answer h3')].map((h) => h.textContent)") == [
        "base_model", "first",
    ]  # fmt: skip
    assert nothing_is_markup(page)


def test_a_broken_file_is_said_where_it_is_named(page: Browser, tmp_path: Path) -> None:
    write(page, **SHORT, data=str(tmp_path / "broken.jsonl"))
    message = wait(page, "document.querySelector('#data .notice')?.textContent")
    assert "broken.jsonl" in message and nothing_is_markup(page)
    write(page, lora_r="0")
    wait(page, "document.getElementById('option-lora_r').ariaInvalid === 'true'")
    assert page.evaluate("document.getElementById('option-lora_r-error').textContent") == (
        "--lora-r: must be at least 1; got 0"
    )
    write(page, lora_r="2", out="")
    press(page, "Start the run")  # without --out
    wait(page, "document.activeElement.id === 'option-out'")
    assert "--out is required" in text_of(page, "wrong")


def test_a_check_that_answers_late_leaves_why_a_run_did_not_start(
    page: Browser, client: Client, tmp_path: Path
) -> None:
    page.evaluate(
        "window.held = []; window.usual = window.fetch; window.fetch = (path, options) => path === '/api/check'"
        "? new Promise((done) => held.push(() => done(usual(path, options)))) : usual(path, options)"
    )
    write(page, **SHORT, data=str(tmp_path / "data.jsonl"), out="")
    wait(page, "held.length === 1")
    press(page, "Start the run")
    wait(page, "document.getElementById('wrong').innerText.includes('--out is required')")
    page.evaluate("window.fetch = usual; held[0]()")
    wait(page, "document.querySelectorAll('#data mark').length")  # the check has answered
    assert "--out is required" in text_of(page, "wrong")
    assert page.evaluate("document.getElementById('option-out').ariaInvalid") == "true"
    write(page, out=str(client.studio.runs.folder / "first"), max_steps="0")
    wait(page, "document.getElementById('option-max_steps').ariaInvalid === 'true'")
    assert text_of(page, "wrong") == "" and page.evaluate("document.getElementById('option-out').ariaInvalid") is None
    write(page, out="", max_steps=SHORT["max_steps"])  # the refused options again
    wait(page, "document.getElementById('option-max_steps').ariaInvalid === null")


def test_a_model_that_is_missing_is_said_once(page: Browser, tmp_path: Path) -> None:
    write(page, model=str(tmp_path / "nowhere"), data=str(tmp_path / "data.jsonl"))
    wait(page, "document.querySelector('#model .notice')")
    wait(page, "document.getElementById('estimate').textContent.startsWith('No estimate')")
    wait(page, "document.getElementById('data').textContent !== 'Reading the data'")
    assert "no such folder" in text_of(page, "model") and text_of(page, "data") == ""


def test_a_lost_device_ends_the_run_and_not_the_studio(
    page: Browser, client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(children, "_CODE", LOSSY)
    out = str(tmp_path / "lost")
    client.do("start", options={**SHORT, "data": [str(tmp_path / "data.jsonl")], "out": out, **LONGER})
    page.evaluate(f"location.hash = 'run=' + encodeURIComponent({json.dumps(out)})")
    wait(page, "document.getElementById('run-state').textContent === 'failed'")
    assert "the device was lost" in text_of(page, "run-wrong")
    assert page.evaluate("document.getElementById('status').textContent") == "Ready"
    press(page, "Resume")
    wait(page, "document.getElementById('run-state').textContent === 'done'")


def test_the_chat_page_of_serve_wants_its_key(browser: Browser) -> None:
    with serving(start=False, api_key="secret") as client:
        browser.ask("Page.navigate", url=f"http://127.0.0.1:{client.port}/")
        for key in ("wrong", "secret"):
            wait(browser, "document.getElementById('key')?.value === ''")
            browser.evaluate(f"document.getElementById('key').value = '{key}'")
            press(browser, "Continue")
        wait(browser, "document.getElementById('message')")
        assert browser.evaluate("document.querySelector('.chat-models').innerText").split() == [
            "Answers", "from", "base_model",
        ]  # fmt: skip
        browser.ask("Page.navigate", url="about:blank")


def test_start_over_forgets_an_answer_that_is_still_coming(browser: Browser) -> None:
    with serving(start=False) as client:
        browser.ask("Page.navigate", url=f"http://127.0.0.1:{client.port}/")
        wait(browser, "document.getElementById('message')")
        browser.evaluate(  # answers never come
            "window.asked = []; window.fetch = (path, {body, signal}) => { asked.push(JSON.parse(body).messages);"
            "return new Promise((_, fail) => signal.addEventListener('abort', () => fail(signal.reason))); }"
        )
        for number in (1, 2):
            browser.evaluate(f"document.getElementById('message').value = 'message {number}'")
            press(browser, "Send")
            wait(browser, f"asked.length === {number}")
            press(browser, "Start over")
        assert browser.evaluate("asked.map((messages) => messages.map((m) => m.content).join())") == [
            "message 1", "message 2",
        ]  # fmt: skip
        browser.ask("Page.navigate", url="about:blank")


def test_a_run_without_a_finite_loss_is_not_recommended(page: Browser, client: Client) -> None:
    for name, loss in (("broken", "null"), ("sound", "2.5")):
        run = client.studio.runs.folder / name
        run.mkdir(parents=True)
        (run / "metrics.jsonl").write_text(f'{{"format": 1, "step": 1, "loss": {loss}}}\n')
        (run / "results.json").write_text('{"format": 1, "steps": 1}')
    page.evaluate("location.hash = 'runs'")
    for name, words in (("broken", "Done, but its last loss is not finite."), ("sound", "Done. Its result can be")):
        press(page, name)
        wait(page, f"document.getElementById('run-words').textContent.startsWith({words!r})")


def test_options_of_a_run_fill_the_form(page: Browser, client: Client) -> None:
    run = client.studio.runs.folder / "old"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text('model: "[base]"\ndata: ["[a].jsonl", b.jsonl]\nmax_steps: 3\nout: old\n')
    page.evaluate("location.hash = 'runs'")
    press(page, "old")
    press(page, "Use its options")
    found = "['model', 'data', 'max_steps'].map((name) => document.getElementById(`option-${name}`).value)"
    wait(page, "document.getElementById('option-max_steps').value === '3'")
    assert page.evaluate(found) == ["[base]", "[a].jsonl\nb.jsonl", "3"]


def test_a_check_that_failed_is_asked_again(page: Browser) -> None:
    page.evaluate(
        "window.failures = 0; window.usual = window.fetch; window.fetch = (path, options) =>"
        "path === '/api/check' && !failures++ ? Promise.reject(new TypeError('gone')) : usual(path, options)"
    )
    write(page, max_steps="7")
    wait(page, "failures === 1")
    write(page, max_steps="7")
    wait(page, "document.getElementById('command').textContent.includes('--max-steps 7')")


def test_an_estimate_names_the_device_of_the_run(page: Browser) -> None:
    plan = {
        "peak_bytes": 3 << 30,
        "limit_bytes": 0,
        "bytes": {"weights": 2 << 30, "dequantized": 1 << 30},
        "device": "a GPU that is not here",
    }
    answer = json.dumps(json.dumps({**plan, "run_device": "NumPy 2 on x"}))
    page.evaluate(
        "window.usual = window.fetch; window.fetch = (path, options) =>"
        f"path === '/api/plan' ? Promise.resolve(new Response({answer})) : usual(path, options)"
    )
    write(page, model=SHORT["model"])
    wait(page, "document.getElementById('estimate').innerText.includes('3.00 GiB')")
    assert "dequantized weights" in text_of(page, "estimate")
    assert "The run takes NumPy 2 on x, in main memory. The estimate is for a GPU." in text_of(page, "estimate")
    page.evaluate(
        f"window.plan = {answer}.replace('a GPU that is not here', 'NumPy 2 on x');"
        "window.fetch = (path, options) =>"
        "path === '/api/plan' ? Promise.resolve(new Response(plan)) : usual(path, options)"
    )
    write(page, lora_r="3")
    wait(page, "!document.getElementById('estimate').innerText.includes('The run takes')")
    assert "NumPy 2 on x" in text_of(page, "estimate")


def test_every_field_has_a_label_and_a_narrow_screen_shows_all(page: Browser, client: Client) -> None:
    """As a screen reader has them; nothing is wider than the screen in any view. Many runs scroll in their list."""
    for number in range(40):
        run = client.studio.runs.folder / f"{number}{'x' * 100}"
        run.mkdir(parents=True)
        (run / "config.yaml").write_text("max_steps: 3\n")
    page.ask("Emulation.setDeviceMetricsOverride", width=390, height=844, deviceScaleFactor=1, mobile=True)
    page.evaluate("document.getElementById('more').open = true")
    for view in ("new", "chat", "runs"):
        page.evaluate(f"location.hash = '{view}'")
        wait(page, f"document.querySelector('[aria-current]')?.hash === '#{view}'")
        if view == "runs":
            wait(page, "document.querySelectorAll('#list tbody tr').length === 40")
            assert page.evaluate("document.documentElement.scrollHeight") < 1000
            typed = "f.value = '37X'; f.dispatchEvent(new Event('input'))"
            page.evaluate(f"(() => {{ const f = document.getElementById('find-run'); {typed} }})()")
            wait(page, "document.querySelectorAll('#list tbody tr').length === 1")
            page.evaluate("document.querySelector('#list button').click()")
            wait(page, "document.getElementById('run-name').textContent.startsWith('37x')")
        assert page.evaluate("document.documentElement.scrollWidth") == 390
        nodes = page.ask("Accessibility.getFullAXTree")["nodes"]
        used = [node for node in nodes if node.get("role", {}).get("value") in USED]
        assert len(used) > 4 and [node for node in used if not node.get("name", {}).get("value")] == []
    page.ask("Emulation.clearDeviceMetricsOverride")
    described = "[...document.querySelectorAll('[aria-describedby]')].every((f) => f.getAttribute('aria-describedby')"
    assert page.evaluate(f"{described}.split(' ').every((id) => document.getElementById(id)))")


@pytest.mark.all
def test_a_run_by_keyboard_alone(page: Browser, client: Client, tmp_path: Path) -> None:
    """Every field comes in the order of the page; Enter in a field starts nothing."""

    def key(name: str, code: int, text: str = "") -> str:
        for kind in ("rawKeyDown", *["char"] * bool(text), "keyUp"):
            page.ask("Input.dispatchKeyEvent", type=kind, key=name, windowsVirtualKeyCode=code, text=text)
        return str(page.evaluate("document.activeElement.id || document.activeElement.textContent.trim()"))

    typed = {f"option-{name}": value for name, value in SHORT.items() if isinstance(value, str)}
    typed |= {"option-data": str(tmp_path / "data.jsonl"), "option-out": str(tmp_path / "out" / "keys")}
    page.ask("Page.bringToFront")
    assert key("Tab", 9) == "Skip to the content"
    assert key("Enter", 13, "\r") == "main"
    seen = []
    while (focused := key("Tab", 9)) != "start":
        seen.append(focused)
        assert len(seen) < 100, seen
        if focused in typed:
            page.evaluate("document.activeElement.select()")
            page.ask("Input.insertText", text=typed[focused])
            if focused == "option-model":
                assert key("Enter", 13, "\r") == focused
    wanted = ["option-model", "option-data", "option-lora_r", "option-max_length", "option-device", "option-out"]
    assert [name for name in seen if name in wanted] == wanted
    assert client.do("state")["runs"] == []
    key(" ", 32, " ")
    wait(page, "document.getElementById('run-state').textContent === 'done'")
