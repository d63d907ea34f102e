"""`wgrad generate --prompts`: JSON lines in and out, in order, each out as soon as its batch is done."""

from __future__ import annotations

import errno
import io
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.train.conftest import CHATML
from wgrad.device.errors import WgradError
from wgrad.train.commands import generate_prompts
from wgrad.train.commands.cli import main
from wgrad.train.data.prompts import read_prompts
from wgrad.train.data.tokenizer import load_tokenizer
from wgrad.train.model.adapter_files import save_adapter
from wgrad.train.model.load_config import load_model_config
from wgrad.train.model.lora import LoraConfig, init_lora, linear_modules, lora_shapes

PROMPTS = ["the quick", "all that", "a", "the early bird catches", "é"]


def generate(*words: object) -> int:
    return main(["generate", "--device", "cpu", "--max-new-tokens", "6", *map(str, words)])


def objects(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.parametrize("sampling", [["--temperature", 0], ["--temperature", 1, "--seed", 7]], ids=["greedy", "drawn"])
def test_each_line_has_what_its_prompt_alone_gives(
    sampling: list[Any], make_checkpoint: Any, write_lines: Any, tmp_path: Path, capsys: Any
) -> None:
    model, out = make_checkpoint(), tmp_path / "out.jsonl"
    data = write_lines(
        *({"prompt": text, "id": i} for i, text in enumerate(PROMPTS[:3])), "", *({"prompt": p} for p in PROMPTS[3:])
    )
    assert generate("--model", model, "--prompts", data, "--batch-size", 2, *sampling) == 0
    text = capsys.readouterr().out
    found = objects(text)
    assert [value["prompt"] for value in found] == PROMPTS and [value.get("id") for value in found] == [
        0,
        1,
        2,
        None,
        None,
    ]
    assert "é" in text
    if sampling[1] == 0:
        for value in found:
            assert generate("--model", model, "--prompt", value["prompt"], *sampling) == 0
            assert capsys.readouterr().out == value["prompt"] + value["generated"] + "\n"
    # Nor does the size of a batch change a line; and a file gets the same.
    assert generate("--model", model, "--prompts", data, "--batch-size", 5, "--out", out, *sampling) == 0
    assert capsys.readouterr().out == "" and out.read_text(encoding="utf-8") == text


def test_the_model_is_the_one_that_the_adapter_names(
    make_checkpoint: Any, write_lines: Any, tmp_path: Path, capsys: Any
) -> None:
    model, adapter = make_checkpoint(), tmp_path / "adapter"
    lora = LoraConfig(r=2, alpha=4.0)
    save_adapter(adapter, lora, init_lora(lora_shapes(lora, linear_modules(load_model_config(model))), 0), str(model))
    data = write_lines({"prompt": "the quick"})
    texts = []
    for words in (["--adapter", adapter], ["--adapter", adapter, "--model", model]):
        for asked in (["--prompts", data], ["--prompt", "the quick"]):
            assert generate(*words, *asked, "--temperature", 0) == 0
            texts.append(capsys.readouterr().out)
    assert texts[0] == texts[2] and texts[1] == texts[3]


def test_messages_are_rendered_as_for_an_answer(make_tokenizer: Any, write_lines: Any) -> None:
    tokenizer = load_tokenizer(make_tokenizer(bos_in_json=True))
    turns = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    data = write_lines({"messages": turns}, {"prompt": turns}, {"prompt": "hi"})
    prompts, notes = read_prompts(data, tokenizer)
    texts = [tokenizer.decode(prompt.ids, skip_special_tokens=False) for prompt in prompts]
    chat = "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert texts == [chat, chat, "<s>hi"] and notes == () and "<|im_start|>" in CHATML
    prompts, _ = read_prompts(data, tokenizer, chat=True)
    assert tokenizer.decode(prompts[2].ids, skip_special_tokens=False) == chat.partition("<|im_end|>\n")[2]
    data = write_lines({"messages": turns[1:], "system": "be brief", "id": 3}, {"prompt": "hi", "system": "be brief"})
    prompts, _ = read_prompts(data, tokenizer, chat=True)
    assert [tokenizer.decode(prompt.ids, skip_special_tokens=False) for prompt in prompts] == [chat, chat]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not valid JSON"),
        ("[]", "expected a JSON object, got an empty list"),
        ({"text": "x"}, "needs 'prompt' or 'messages'; it has 'text'"),
        ({"prompt": 3}, "'prompt' must be text; got a number"),
        ({"prompt": ""}, "'prompt' is empty"),
        (
            {"prompt": "x", "system": "be brief"},
            "'system' belongs to the question, and has no place in a record of this",
        ),
        ({"prompt": "x", "input": "y"}, "'input' belongs to the question"),
        ({"messages": [{"role": "user", "content": "x"}], "context": "y"}, "'context' belongs to the question"),
        ({"prompt": "x", "generated": "y"}, "has 'generated', the key that the answer gets: rename it"),
        ({"prompt": "\ud800"}, "half of a surrogate pair"),
        ({"prompt": "a b c " * 999}, "positions that the model was made for: shorten"),
    ],
)
def test_a_wrong_line_is_named_and_nothing_is_written(
    line: Any, message: str, make_checkpoint: Any, write_lines: Any, tmp_path: Path, capsys: Any
) -> None:
    data, out = write_lines({"prompt": "x"}, "", line), tmp_path / "out.jsonl"
    assert generate("--model", make_checkpoint(), "--prompts", data, "--out", out) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(f"wgrad: error: {data}:3: ") and message in error and not out.exists()


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("p.txt", "the quick", "p.txt is plain text: give JSON lines (.jsonl) with 'prompt'"),
        ("p.csv", "prompt\nthe quick\n", "p.csv is CSV: give JSON lines"),
        ("p.jsonl", "\n\n", "p.jsonl is empty: give a file with at least one prompt"),
        ("p.jsonl", "", "p.jsonl is empty: give a file with at least one example"),
    ],
)
def test_a_file_without_prompts_is_refused(
    name: str, text: str, message: str, make_tokenizer: Any, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(WgradError, match="^--prompts: ") as caught:
        read_prompts(str(tmp_path / name), load_tokenizer(make_tokenizer()))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--prompt", "x", "--prompts", "p"], "--prompts: --prompt is given already"),
        (["--prompt", "x", "--out", "o"], "--out: goes with --prompts"),
        (["--prompts", "p", "--batch-size", "0"], "--batch-size: must be at least 1; got 0"),
        (["--prompts", "p", "--out", "."], "--out: . is there already"),
        (["--prompts", "p", "--out", "no/where"], "--out: no is no folder"),
    ],
)
def test_wrong_options_are_refused(words: list[str], message: str, capsys: Any) -> None:
    assert generate("--model", "m", *words) == 2
    assert message in capsys.readouterr().err
    assert main(["generate", "--prompt", "x"]) == 2
    assert "--model is required: give it, or an --adapter that names it" in capsys.readouterr().err


@pytest.mark.parametrize("to_file", [True, False])
def test_ctrl_c_keeps_what_was_done(
    to_file: bool, make_checkpoint: Any, write_lines: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    answer, calls = generate_prompts.generate_batch, []

    def interrupted(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return answer(*args)

    monkeypatch.setattr(generate_prompts, "generate_batch", interrupted)
    data, out = write_lines(*({"prompt": text} for text in PROMPTS)), tmp_path / "out.jsonl"
    words = ["--out", out] if to_file else []
    assert generate("--model", make_checkpoint(), "--prompts", data, "--batch-size", 2, *words) == 130
    said = capsys.readouterr()
    assert [x["prompt"] for x in objects(out.read_text("utf-8") if to_file else said.out)] == PROMPTS[:4]
    assert said.err.endswith("wgrad: interrupted: 4 of 5 prompts are answered\n")


def test_ctrl_c_before_the_first_answer_leaves_no_file(
    make_checkpoint: Any, write_lines: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def interrupted(*args: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(generate_prompts, "generate_batch", interrupted)
    data, out = write_lines({"prompt": "x"}), tmp_path / "out.jsonl"
    assert generate("--model", make_checkpoint(), "--prompts", data, "--out", out) == 130
    assert capsys.readouterr().err.endswith("wgrad: interrupted: 0 of 1 prompts are answered\n") and not out.exists()


@pytest.mark.parametrize(("room", "lines"), [(0, 0), (9, 0), (100, 1)])
def test_a_full_disk_leaves_whole_lines(
    room: int, lines: int, make_checkpoint: Any, write_lines: Any, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    class Full(io.FileIO):
        """A file on a disk with this much room."""

        def write(self, data: Any) -> int:
            if not (left := room - self.tell()):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().write(bytes(data)[:left])

    monkeypatch.setattr(generate_prompts, "open", lambda path, mode, buffering: Full(path, mode), raising=False)
    monkeypatch.setattr(generate_prompts, "generate_batch", lambda model, ids, *rest: [[5]] * len(ids))
    data, out = write_lines(*[{"prompt": "x", "more": "y" * 30}] * 2), tmp_path / "out.jsonl"
    assert generate("--model", make_checkpoint(), "--prompts", data, "--out", out) == 2
    said = capsys.readouterr().err
    assert f"cannot write {out}: the disk is full: free some space or choose another folder with --out" in said
    assert (len(objects(out.read_text("utf-8"))) if out.exists() else 0) == lines


class Closing(io.StringIO):
    """A pipe whose reader goes after some lines; what it took is `taken`. A line counts once it is flushed."""

    def __init__(self, lines: int) -> None:
        super().__init__()
        self.lines, self.taken = lines, ""

    def flush(self) -> None:
        if self.getvalue().count("\n") > self.lines:
            raise BrokenPipeError(32, "Broken pipe")
        self.taken = self.getvalue()


def test_a_closed_pipe_has_every_line_before(
    make_checkpoint: Any, write_lines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, pipe = write_lines(*({"prompt": text} for text in PROMPTS)), Closing(3)
    monkeypatch.setattr(sys, "stdout", pipe)
    assert generate("--model", make_checkpoint(), "--prompts", data, "--batch-size", 1) == 1
    assert [value["prompt"] for value in objects(pipe.taken)] == PROMPTS[:3]


def test_an_encoding_without_the_character_still_gives_json(
    make_checkpoint: Any, write_lines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii", write_through=True))
    assert generate("--model", make_checkpoint(), "--prompts", write_lines({"prompt": "é→"})) == 0
    assert json.loads(raw.getvalue())["prompt"] == "é→"


def test_prompts_are_read_from_standard_input(
    make_checkpoint: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    lines = io.BufferedReader(io.BytesIO(b'{"prompt": "the quick"}\n'))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(lines, encoding="ascii"))
    assert generate("--model", make_checkpoint(), "--prompts", "-") == 0
    assert objects(capsys.readouterr().out)[0]["prompt"] == "the quick"
