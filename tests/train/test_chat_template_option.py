"""--chat-template: a file, the model's own by name, or a well-known one; where it is kept and used again."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import wgrad
from tests.train.serving import BASE, serving
from wgrad.device.errors import WgradError
from wgrad.train.commands.cli import main
from wgrad.train.data.chat import ChatTemplate, Conversation
from wgrad.train.data.data import load_data
from wgrad.train.data.named_templates import _TEMPLATES, use_chat_template
from wgrad.train.data.template_process import shared_process
from wgrad.train.data.tokenizer import load_tokenizer
from wgrad.train.data.tokenizer_source import open_tokenizer
from wgrad.train.options.choices import TEMPLATES
from wgrad.train.options.finetune_config import RunOptions

TURNS = [
    {"role": "user", "content": "Who is wise?"},
    {"role": "assistant", "content": "He that hears."},
    {"role": "user", "content": "And who else?"},
    {"role": "assistant", "content": "None."},
]
SYSTEM = {"role": "system", "content": "Be brief."}
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
# What each says of a question, its answer and the question after it, with a system message and the prompt.
WRITTEN = {
    "chatml": "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\nA<|im_end|>\n"
    "<|im_start|>user\nR<|im_end|>\n<|im_start|>assistant\n",
    "llama2": "<s>[INST] <<SYS>>\nS\n<</SYS>>\n\nQ [/INST] A </s><s>[INST] R [/INST]",
    "llama3": "<s><|start_header_id|>system<|end_header_id|>\n\nS<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n"
    "Q<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nA<|eot_id|><|start_header_id|>user<|end_header_id|>"
    "\n\nR<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    "mistral": "<s>[INST] S\n\nQ[/INST] A</s>[INST] R[/INST]",
    "gemma": "<s><start_of_turn>user\nS\n\nQ<end_of_turn>\n<start_of_turn>model\nA<end_of_turn>\n<start_of_turn>user\nR"
    "<end_of_turn>\n<start_of_turn>model\n",
    "phi3": "<|system|>\nS<|end|>\n<|user|>\nQ<|end|>\n<|assistant|>\nA<|end|>\n<|user|>\nR<|end|>\n<|assistant|>\n",
    "zephyr": "<|system|>\nS</s>\n<|user|>\nQ</s>\n<|assistant|>\nA</s>\n<|user|>\nR</s>\n<|assistant|>\n",
    "vicuna": "<s>S USER: Q ASSISTANT: A</s>USER: R ASSISTANT:",
    "alpaca": "<s>S\n\n### Instruction:\nQ\n\n### Response:\nA</s>\n\n### Instruction:\nR\n\n### Response:\n",
    "deepseek-r1": "<s>S<｜User｜>Q<｜Assistant｜>A</s><｜User｜>R<｜Assistant｜><think>\n",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_well_known_templates_write_their_format(name: str) -> None:
    template = ChatTemplate(_TEMPLATES[name], SPECIAL, strict=True)
    said = [{"role": r, "content": c} for r, c in (("system", "S"), ("user", "Q"), ("assistant", "A"), ("user", "R"))]
    assert template.render(said, True) == WRITTEN[name]
    learned = [said[1], {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nA"}, said[3], said[2]]
    lost: list[str] = []
    text, spans = template.render_with_spans(Conversation(learned), {1, 3}, lost)
    first, second = (text[a:b] for a, b in spans)
    assert first.strip().startswith("<think>\nHm.") and second.strip().startswith("A") and not lost
    end = second.strip().removeprefix("A").strip()
    assert end and first.strip().endswith(end)  # both turns end, so that a model learns to
    ChatTemplate(_TEMPLATES[name], {}, strict=True).render(said)  # a tokenizer without bos and eos


def test_a_template_is_a_file_or_a_name_and_all_else_is_refused(make_tokenizer: Any, tmp_path: Path) -> None:
    folder, file = make_tokenizer(), tmp_path / "mine.jinja"
    named = folder / "additional_chat_templates"
    named.mkdir()
    (named / "rag.jinja").write_text("rag {{ messages[0].content }}")
    (named / "tool_use.jinja").write_text("tools {{ messages[0].content }}")
    file.write_text("mine {{ messages[0].content }}</s>")
    for value, begin in ((str(file), "mine"), ("rag", "rag"), ("zephyr", "<|user|>")):
        tokenizer = load_tokenizer(folder)
        note = use_chat_template(tokenizer, value)
        assert tokenizer.chat_template.render(TURNS[:1]).startswith(begin)
        assert tokenizer.chat_template.render(Conversation(TURNS[:1], tools=[])).startswith(begin)
        assert ("no special token" in note) == (value == "rag" or value == str(file))
    assert use_chat_template(load_tokenizer(folder), None) == ""
    with pytest.raises(WgradError, match="^--chat-template: 'chatlm' is no file .* one of .*rag.*chatml"):
        use_chat_template(load_tokenizer(folder), "chatlm")
    file.write_text("{% for %}")
    with pytest.raises(WgradError, match=r"^--chat-template: .*mine.jinja does not compile: .*\(line 1"):
        use_chat_template(load_tokenizer(folder), str(file))
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(WgradError, match="^--chat-template: .*must be UTF-8"):
        use_chat_template(load_tokenizer(folder), str(file))


OPTIONS: dict[str, Any] = {
    "device": "cpu", "max_length": 96, "batch_size": 1, "gradient_accumulation_steps": 1, "max_steps": 1,
    "lora_r": 2, "sample": False,
    "eval_fraction": 0, "save_steps": 1,
}  # fmt: skip
RECORDS = [{"messages": TURNS}] * 3


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a base model without a template, and a run in OUT with a template from a file that is deleted since."""
    folder = tmp_path_factory.mktemp("tuned")
    shutil.copytree(BASE, folder / "base")
    file = folder / "mine.jinja"
    file.write_text("{% for m in messages %}{{ '[' + m.role + ']' + m.content ~ eos_token }}{% endfor %}"
                    "{% if add_generation_prompt %}[assistant]{% endif %}")  # fmt: skip
    there = list[bool]()

    def look(report: Any) -> None:
        there.append((folder / "out" / "chat_template.jinja").exists())

    given: dict[str, Any] = {"out": folder / "out", "chat_template": file, "callbacks": [look]}
    wgrad.finetune(model=folder / "base", data=RECORDS, **given, **OPTIONS)
    assert there == [True]  # before the first step ends, for its checkpoint
    (folder / "kept").write_text(file.read_text())
    file.unlink()
    return folder


def test_a_run_keeps_its_template(tuned: Path) -> None:
    kept = (tuned / "kept").read_text()
    assert (tuned / "out" / "chat_template.jinja").read_text() == kept
    (checkpoint,) = (tuned / "out" / "checkpoints").glob("step-*")
    for adapter in (tuned / "out", checkpoint):
        tokenizer, note = open_tokenizer(tuned / "base", adapter, 10**6)
        assert tokenizer.template_text == kept and "chat template taken from" in note
    config = (tuned / "out" / "config.yaml").read_text()
    assert f"chat_template: {tuned / 'mine.jinja'}" in config


def test_a_resumed_run_uses_its_copy(tuned: Path) -> None:
    out = tuned / "resumed"
    shutil.copytree(tuned / "out", out)
    for name in ("results.json",):
        (out / name).unlink(missing_ok=True)
    config = (out / "config.yaml").read_text().replace(str(tuned / "out"), str(out))
    (out / "config.yaml").write_text(config)
    done = wgrad.finetune(out=out, data=RECORDS, model=tuned / "base", resume=True, **OPTIONS | {"max_steps": 2})
    assert done.steps == 2
    with pytest.raises(WgradError, match="chat_template|chat-template"):
        wgrad.finetune(out=out, data=RECORDS, model=tuned / "base", resume=True, chat_template="chatml", **OPTIONS)


def test_whoever_opens_the_adapter_uses_it(tuned: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with wgrad.load(tuned / "base", tuned / "out", device="cpu") as model:
        own = model.generate("Who?", chat=True, max_new_tokens=2, temperature=0.0)
    with wgrad.load(tuned / "base", tuned / "out", device="cpu", chat_template="zephyr") as model:
        other = model.generate("Who?", chat=True, max_new_tokens=2, temperature=0.0)
    tokenizer = load_tokenizer(tuned / "base")
    assert own.prompt_tokens == len(tokenizer.encode("[user]Who?<|endoftext|>[assistant]"))
    assert other.prompt_tokens == len(tokenizer.encode("<|user|>\nWho?<|endoftext|>\n<|assistant|>\n"))
    with (
        pytest.raises(WgradError, match="no chat template.*--chat-template chatml"),
        wgrad.load(tuned / "base") as model,
    ):
        model.generate("Who?", chat=True)


def test_the_server_and_the_commands_take_the_template(
    tuned: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = {"model": "base", "messages": TURNS[:1], "max_tokens": 1}
    with serving(model=str(tuned / "base"), chat_template="zephyr") as client:
        count = client.post("chat/completions", asked).json["usage"]["prompt_tokens"]
        assert count == len(
            load_tokenizer(tuned / "base").encode("<|user|>\nWho is wise?<|endoftext|>\n<|assistant|>\n")
        )
        for role in ("function", "developer", "asistant"):
            vicuna = {**asked, "messages": [{"role": role, "content": "x"}, TURNS[0]]}
            assert client.post("chat/completions", vicuna).status == 200  # this template writes any role
    with serving(model=str(tuned / "base"), chat_template="vicuna") as client:
        for role, status in (("developer", 200), ("system", 200), ("function", 400), ("asistant", 400)):
            reply = client.post("chat/completions", {**asked, "messages": [{"role": role, "content": "x"}, TURNS[0]]})
            assert reply.status == status
            if status == 400:
                assert f"turn 1 (role '{role}') leaves nothing" in reply.error["message"]
                assert "system, user, assistant" in reply.error["message"]
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(r) + "\n" for r in RECORDS))
    capsys.readouterr()
    words = ["data", "show", data, "--model", tuned / "base"]
    assert main(list(map(str, words))) == 2
    assert "--chat-template chatml" in capsys.readouterr().err
    config = tmp_path / "run.yaml"
    config.write_text("chat_template: zephyr\n")
    for more in (["--chat-template", "zephyr"], ["--config", config]):
        assert main([*map(str, words), *map(str, more)]) == 0
        assert "<|assistant|>" in capsys.readouterr().out


@pytest.mark.parametrize(("template", "told"), [("[{{ m.role }}] {{ m.content }}\n", 1), ("{{ m.content }}</s>", 0)])
def test_a_template_that_ends_turns_with_no_special_token_is_noted(
    template: str, told: int, make_tokenizer: Any, write_lines: Any
) -> None:
    tokenizer = load_tokenizer(make_tokenizer(chat_template=f"{{% for m in messages %}}{template}{{% endfor %}}"))
    config = RunOptions(data=(str(write_lines({"messages": TURNS})),), eval_fraction=0, max_length=99)
    remarks = [remark for remark in load_data(config, tokenizer).remarks if "may go on without end" in remark]
    assert len(remarks) == told
    for remark in remarks:
        assert remark.startswith("note: the model's chat template ends the assistant's turn with no special token")
    assert shared_process()._process is None  # no template is rendered after the data
    plain = replace(config, data=(str(write_lines({"text": "Hear, my son"}, name="plain.jsonl")),))
    for other in (plain, replace(config, chat_template="zephyr")):  # `use_chat_template` tells of that one
        assert "may go on without end" not in " ".join(load_data(other, tokenizer).remarks)
