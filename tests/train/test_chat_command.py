"""`wgrad chat`: turns in the terminal, an adapter compared with its base, Ctrl-C, and the columns."""

from __future__ import annotations

import io
import shutil
import signal
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.cells import cell_len

from tests.train.lossy_device import Front
from tests.train.serving import BASE
from wgrad.device.errors import DeviceLost
from wgrad.train.commands import chat as chat_command
from wgrad.train.commands.chat_thoughts import Thoughts
from wgrad.train.commands.cli import main
from wgrad.train.data.tokenizer import load_tokenizer
from wgrad.train.inference import open_model
from wgrad.train.model.adapter_files import save_adapter
from wgrad.train.model.load_config import load_model_config
from wgrad.train.model.lora import LoraConfig, init_lora, linear_modules, lora_shapes
from wgrad.train.serve.answer_parts import Style
from wgrad.train.terminal.columns import Columns, wrap

TEMPLATE = (
    "{% for m in messages %}{% if 'forbidden' in m['content'] %}{{ raise_exception('not that') }}{% endif %}"
    "{{ m['role'] + ': ' + m['content'] + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)


THINKING = Style(("<think>", "</think>"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "talker"
    shutil.copytree(BASE, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def adapter(model: Path) -> Path:
    folder, lora = model.parent / "adapter", LoraConfig(r=2, alpha=4.0)
    values = init_lora(lora_shapes(lora, linear_modules(load_model_config(model))), 0)
    values = {name: np.full_like(v, 0.02) if name.endswith(".lora_B") else v for name, v in values.items()}
    save_adapter(folder, lora, values, str(model))
    return folder


@pytest.fixture
def talk(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Return talk(lines, *words), which gives status, stdout, and the lines of stderr after the model was opened."""

    def run(lines: bytes, *words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines), encoding="ascii"))
        options = ["--device", "cpu", "--max-new-tokens", "7", "--temperature", "0"]
        status = main(["chat", *options, *map(str, words)])
        said = capsys.readouterr()
        assert "\x1b" not in said.out and "\r" not in said.out
        return status, said.out, "".join(said.err.splitlines(keepends=True)[2:])

    return run


def generated(capsys: pytest.CaptureFixture[str], prompt: str, *words: object) -> str:
    """Return the continuation of `wgrad generate`."""
    options = ["--device", "cpu", "--max-new-tokens", "7", "--temperature", "0"]
    assert main(["generate", "--prompt", prompt, *options, *map(str, words)]) == 0
    return capsys.readouterr().out.removeprefix(prompt).removesuffix("\n")


def test_turns_follow_each_other(talk: Any, model: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    generate, asked, tokenizer = chat_command.text_ids, list[tuple[str, int]](), load_tokenizer(model)

    def noted(of: Any, prompt: Any, count: int, sampling: Any, stops: Any) -> Any:
        asked.append((tokenizer.decode(prompt), sampling.seed))
        return generate(of, prompt, count, sampling, stops)

    monkeypatch.setattr(chat_command, "text_ids", noted)
    status, out, err = talk("Hear, my son\r\n\nAnd then? é\n/clear\nHear, my son\n".encode(), "--model", model)
    one = generated(capsys, "user: Hear, my son\nassistant:", "--model", model)
    second = f"user: Hear, my son\nassistant: {one}\nuser: And then? é\nassistant:"
    two = generated(capsys, second, "--model", model)
    assert (status, out, err) == (0, f"{one}\n{two}\n{one}\n", "") and one.strip() and two.strip()
    first = "user: Hear, my son\nassistant:"
    assert asked == [(first, 0), (second, 1), (first, 0)]
    talk(b"Hear, my son\n", "--model", model, "--system", "be brief", "--seed", 2**32 - 1)
    assert asked[3:] == [(f"system: be brief\n{first}", 2**32 - 1)]


def test_compare_shows_the_base_next_to_the_adapter(talk: Any, model: Path, adapter: Path, capsys: Any) -> None:
    prompt = "user: Hear, my son\nassistant:"
    base, own = (generated(capsys, prompt, "--model", model, *words) for words in ([], ["--adapter", adapter]))
    assert base != own
    assert talk(b"Hear, my son\n", "--adapter", adapter)[1] == own + "\n"
    _, out, _ = talk(b"Hear, my son\n", "--adapter", adapter, "--compare")
    head, *rows = [line.split(" | ") for line in (row + " " for row in out.splitlines()) if " | " in line]
    assert [name.strip() for name in head] == ["without the adapter", "with the adapter"]
    for column, text in enumerate((base, own)):
        assert "".join("".join(row[column].split()) for row in rows) == "".join(text.split())
    # The second turn of each goes on from its own answer.
    _, out, _ = talk(b"Hear, my son\nAnd?\n", "--adapter", adapter, "--compare")
    later = generated(capsys, f"{prompt}{own}\nuser: And?\nassistant:", "--adapter", adapter)
    assert "".join(later.split()) in "".join("".join(row.partition(" | ")[2].split()) for row in out.splitlines())


@pytest.mark.parametrize(
    ("lost", "reopens", "shares"),
    [((1, 3), True, [1, 2]), ((2, 3), True, [1]), ((2,), False, [])],
    ids=["in each turn", "twice in a turn", "for good"],
)
def test_a_turn_is_answered_again_after_a_loss(
    talk: Any,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    lost: tuple[int, ...],
    reopens: bool,
    shares: list[int],
) -> None:
    """On the device that was opened again, and with the turns before. A second loss within a turn ends the chat."""
    front, generate, load, calls = Front(reopens=reopens), chat_command.text_ids, chat_command._load, Counter[str]()
    models, devices = list[weakref.ref[Any]](), list[weakref.ref[Any]]()

    def losing(of: Any, prompt: Any, *rest: Any) -> Iterator[int]:
        calls["all"] += 1
        if calls["all"] in lost:
            yield from islice(generate(of, prompt, *rest), 2)
            of.device.lost = True
            raise DeviceLost("the device was lost while reading")
        yield from generate(of, prompt, *rest)

    def loading(opened: Any) -> Any:
        assert not any(old() for old in models)
        found = load(opened)
        models.extend(map(weakref.ref, found.values()))
        devices.append(weakref.ref(opened.device))
        assert sum(device() is not None for device in devices) <= 2  # this one, and the one before
        return found

    first = talk(b"Hear, my son\n", "--model", model)[1]
    second = talk(b"Hear, my son\nAnd then?\n", "--model", model)[1].removeprefix(first)
    monkeypatch.setattr(open_model, "select_device", lambda *_, **__: front.device())
    monkeypatch.setattr(chat_command, "text_ids", losing)
    monkeypatch.setattr(chat_command, "_load", loading)
    status, out, err = talk(b"Hear, my son\nAnd then?\n", "--model", model)
    assert front.shares == shares
    again = "wgrad: the device was lost while reading: it is opened again, and the answer begins anew\n"
    assert err.count(again) == len(shares)
    assert lost[0] == 1 or out.startswith(first)
    if len(shares) == 2:
        assert status == 0 and first in out and out.endswith(second) and len(out) > len(first + second)
    else:
        assert status == 2 and err.splitlines()[-1] == "wgrad: error: the device was lost while reading"


def test_after_a_loss_each_conversation_has_its_own_model_again(
    talk: Any, model: Path, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    front, generate, calls = Front(), chat_command.text_ids, list[Any]()

    def losing(*given: Any) -> Iterator[int]:
        calls.append(given)
        if len(calls) == 2:
            given[0].device.lost = True
            raise DeviceLost("the device was lost while reading")
        yield from generate(*given)

    words = ["--adapter", adapter, "--compare"]
    whole = talk(b"Hear, my son\n", *words)[1]
    monkeypatch.setattr(open_model, "select_device", lambda *_, **__: front.device())
    monkeypatch.setattr(chat_command, "text_ids", losing)
    status, out, _ = talk(b"Hear, my son\n", *words)
    assert status == 0 and out.endswith(whole) and front.shares == [1]


def test_what_cannot_be_answered_is_said_and_the_talk_goes_on(talk: Any, model: Path, adapter: Path) -> None:
    lines = b"the forbidden\n" + b"x " * 600 + b"\n\xff\nHear, my son\n"
    for words in (["--model", model], ["--adapter", adapter, "--compare"]):
        status, out, err = talk(lines, *words)
        refused, long, bytes_ = err.splitlines()
        assert "the chat template refuses these messages: not that" in refused and "(/clear begins anew)" in refused
        assert "tokens, and --context is 512: say less" in long and "got byte 0xff at character 0" in bytes_
        assert status == 0 and out == talk(b"Hear, my son\n", *words)[1]


@pytest.mark.parametrize("words", [[], ["--compare"]])
def test_ctrl_c_stops_an_answer_and_not_the_talk(
    words: list[str], talk: Any, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = talk(b"Hear, my son\n", "--adapter", adapter, *words)[1]
    generate, calls = chat_command.text_ids, []

    def interrupted(*args: Any) -> Any:
        calls.append(args)
        number = len(calls)
        for count, token in enumerate(generate(*args)):
            if count == 2 and number == 1:
                signal.raise_signal(signal.SIGINT)
            yield token

    monkeypatch.setattr(chat_command, "text_ids", interrupted)
    before = signal.getsignal(signal.SIGINT)
    status, out, _ = talk(b"Hear, my son\n/clear\nHear, my son\n", "--adapter", adapter, *words)
    assert status == 0 and signal.getsignal(signal.SIGINT) is before
    stopped, again = out[: -len(whole)], out[-len(whole) :]
    assert again == whole and 0 < len("".join(stopped.split())) < len("".join(whole.split()))
    calls.clear()

    def twice(*args: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        yield 7

    monkeypatch.setattr(chat_command, "text_ids", twice)
    assert talk(b"Hear, my son\n", "--adapter", adapter)[0] == 130  # the second ends the program


def test_commands_clear_the_talk_list_themselves_and_end_it(talk: Any, model: Path) -> None:
    status, out, err = talk(b"/help\nHear, my son\n /exit \nHear, my son\n", "--model", model)
    assert status == 0 and out == talk(b"Hear, my son\n", "--model", model)[1], "nothing is read behind /exit"
    assert [line.split()[0] for line in err.splitlines()] == ["/clear", "/thoughts", "/exit", "/help", "Ctrl-C"]


@pytest.mark.parametrize("begun", [False, True])
def test_thoughts_are_folded(talk: Any, model: Path, begun: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are part of no later prompt, unless the template writes them."""
    folder = model.parent / f"thinker-{begun}"
    shutil.copytree(model, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE + ("<think>" if begun else "{# <think> #}") + "{# </think> #}")
    tokenizer, prompts = load_tokenizer(folder), list[str]()
    answer = tokenizer.encode(("" if begun else "<think>") + "\nhm\n</think>\n\nSo it is", add_special_tokens=False)

    def said(of: Any, prompt: Any, *rest: Any) -> Any:
        prompts.append(tokenizer.decode(prompt))
        return iter(answer)

    monkeypatch.setattr(chat_command, "text_ids", said)
    status, out, err = talk(b"a\n/thoughts\nb\n/thoughts\nc\n", "--model", folder)
    assert out == "So it is\nhm\n\n\nSo it is\nSo it is\n"
    assert err.splitlines() == ["thoughts are shown", "thoughts are folded"]
    opening = "<think>" if begun else ""
    assert prompts[1] == f"user: a\nassistant: So it is\nuser: b\nassistant:{opening}"
    written = "".join(Thoughts(notes=True).answer(iter(["<think>", "hm", "</think>", "So"]), THINKING, {}))
    assert written == "(thinking ... 0 s; /thoughts shows it)\nSo"


def test_no_text_of_a_model_moves_the_cursor(talk: Any, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = load_tokenizer(model).encode("\x1b[2J\r\x07a\tb\n", add_special_tokens=False)
    monkeypatch.setattr(chat_command, "text_ids", lambda *args: iter(bad))
    assert talk(b"x\n", "--model", model)[1] == "\\x1b[2J\\r\\x07a\tb\n\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "--model is required: give it, or an --adapter that names it"),
        (["--model", "m", "--compare"], "--compare: goes with --adapter"),
        (["--model", str(BASE), "--device", "cpu"], "has no chat template"),
        (["--model", str(BASE), "--device", "cpu", "--context", "1"], "--context: must be at least 2; got 1"),
    ],
)
def test_wrong_options_are_refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", *words]) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


# ---- columns -------------------------------------------------------------------------------------
TEXTS = ["one two three  four fivesixseveneightnine\n\n  ten", "日本語の長い文章 a b\nshort"]


@pytest.mark.parametrize("width", [3, 8, 11])
@pytest.mark.parametrize("text", TEXTS)
def test_wrapped_lines_stay_as_they_are(text: str, width: int) -> None:
    whole = wrap(text, width)
    assert all(cell_len(line) <= width for line in whole)
    assert "".join("".join(whole).split()) == "".join(text.split())
    for end in range(len(text)):
        part = wrap(text[:end], width)
        assert [x.rstrip() for x in part[:-1]] == [x.rstrip() for x in whole[: len(part) - 1]]


@pytest.mark.parametrize("live", [False, True])
def test_rows_are_written_once(live: bool) -> None:
    written: list[str] = []
    columns = Columns(["a", "b"], 27, written.append, live)
    for at in range(0, 60, 2):
        for number, text in enumerate(TEXTS):
            columns.add(number, text[at : at + 2])
        if at == 30:
            columns.end(1)
    columns.end(0)
    shown: list[str] = []
    for line in "".join(written).split("\n"):  # as a terminal shows it
        rows = [part for part in line.split("\r") if part]
        assert len({cell_len(row) for row in rows}) <= 1 or not live
        shown += rows[-1:]
    assert shown[0].split(" | ")[0].strip() == "a" and all(cell_len(row) < 27 for row in shown)
    for number, text in enumerate(TEXTS):
        wanted = [line.strip() for line in wrap(text, 11)]
        assert [row.ljust(24).split(" | ")[number].strip() for row in shown[1:]][: len(wanted)] == wanted
