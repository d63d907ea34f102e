"""Chat templates as Ollama's TEMPLATE: what is derived, what is refused, and the interpreter that compares the two."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from wgrad.device.errors import WgradError
from wgrad.train.data import ollama_template as module
from wgrad.train.data.chat import ChatTemplate
from wgrad.train.data.go_template import GoTemplateError, literal, render
from wgrad.train.data.named_templates import _TEMPLATES
from wgrad.train.data.ollama_template import conversations, derive, modelfile, ollama_template, render_go
from wgrad.train.data.tokenizer import Tokenizer, load_tokenizer

MORE = {
    "default system": (
        "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are Q.<|im_end|>\n{% endif %}"
        + _TEMPLATES["chatml"]
    ),
    "system with the last question": (
        "{% if messages[0].role == 'system' %}{% set s = messages[0].content %}{% set messages = messages[1:] %}"
        "{% else %}{% set s = '' %}{% endif %}{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] "
        "{% if loop.last and s %}{{ s + '\n\n' }}{% endif %}{{ m.content }}[/INST]"
        "{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
    ),
    "thoughts are cut from earlier answers": (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content.split('</think>')[-1] + '<|im_end|>\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
    ),
    "empty thoughts in the last answer": (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' and loop.last %}"
        "{{ '<think>\n\n</think>\n\n' }}{% endif %}{{ m.content + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "quotes and braces": (
        "{% for m in messages %}{{ '\"\"\"{{' + m.role + '}}\t' + m.content + '\"' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'a\"' }}{% endif %}"
    ),
}
# Rendered and read by the packages `template` and `parser` of Ollama (commit fb3076099), built with Go 1.27.
OLLAMA: Any = json.loads(Path(__file__).with_name("ollama_renderings.json").read_text(encoding="utf-8"))
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}" + _TEMPLATES["chatml"]


@pytest.fixture
def of(make_tokenizer: Callable[..., Path]) -> Callable[..., Tokenizer]:
    def make(template: str | None, **kind: Any) -> Tokenizer:
        return load_tokenizer(make_tokenizer(chat_template=template, **kind))

    return make


@pytest.mark.parametrize("name", [*_TEMPLATES, *MORE])
@pytest.mark.parametrize("adds_bos", [False, True])
def test_ten_conversations_are_rendered_alike(name: str, adds_bos: bool, of: Any) -> None:
    """Ollama puts bos in front where the tokenizer does: then TEMPLATE leaves it out."""
    tokenizer = of((_TEMPLATES | MORE)[name], bos_in_json=adds_bos)
    found = ollama_template(tokenizer)
    added = adds_bos and "bos_token" not in tokenizer.template_text
    assert [note for note in found.notes if "TEMPLATE does not" not in note] == (
        ["Ollama begins each prompt with <s>, and the chat template does not"] if added else []
    )
    for messages in conversations(True):
        wanted = tokenizer.chat_template.render(messages, True)
        assert render_go(found.text, messages) == (wanted.removeprefix("<s>") if adds_bos else wanted)
    begun = [*conversations()[0], {"role": "assistant", "content": "Jane"}]
    wanted, _, _ = tokenizer.chat_template.render(begun, False).rpartition("Jane")
    assert render_go(found.text, begun) == (wanted.removeprefix("<s>") if adds_bos else wanted) + "Jane"
    assert '"""' not in found.text and not found.text.endswith('"')


@pytest.mark.oracle
@pytest.mark.parametrize("name", ["llama3_2", "qwen2_5", "qwen3", "gemma3", "phi3_5", "gptoss", "deepseekv3", "cohere"])
def test_templates_of_real_models_are_derived(name: str) -> None:
    """As TRL has them; its folder is found without importing it."""
    found = importlib.util.find_spec("trl")
    if found is None or found.origin is None:
        pytest.skip("trl is not installed")
    text = (Path(found.origin).parent / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")
    template = ChatTemplate(text, {"bos_token": "<s>", "eos_token": "</s>"}, strict=True)
    assert ".System" in derive(template.render).text


def test_conversations_differ() -> None:
    assert len({str(messages) for messages in conversations(True)}) == 10
    assert sum(messages[0]["role"] == "system" for messages in conversations(True)) == 5
    assert not any(m["role"] == "system" for messages in conversations() for m in messages)


def test_a_template_without_a_system_message_leaves_it_out(of: Any) -> None:
    found = ollama_template(of(NO_SYSTEM))
    assert found.notes == ["the chat template takes no system message, so TEMPLATE leaves it out"]
    assert ".System" not in found.text


def test_without_a_chat_template_the_prompt_stands_alone(of: Any) -> None:
    assert ollama_template(of(None)).text == "{{ .Prompt }}"


def test_a_date_is_reported(of: Any) -> None:
    found = ollama_template(of("{{ strftime_now('%Y') }}" + _TEMPLATES["chatml"]))
    assert "keeps the date of this export" in found.notes[0]


TURNS = "{% for m in messages %}<{{ m.role }}>[CONTENT]{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"


@pytest.mark.parametrize(
    ("content", "changed"),
    [
        ("{{ m.content }}", ""),
        ("{{ m.content|trim }}", "blanks around a message"),
        ("{{ m.content.split('</think>')[-1] }}", "thoughts in earlier answers"),
        ("{{ m.content or 'nothing' }}", "an empty message"),
        ("{{ m.content or raise_exception('empty') }}", ""),
        ("{{ m.content.split('</think>')[-1]|trim }}", "blanks around a message, thoughts in earlier answers"),
    ],
)
def test_contents_that_a_chat_template_changes_are_said(content: str, changed: str, of: Any) -> None:
    """Go's templates in Ollama have no function that does so."""
    found = ollama_template(of(TURNS.replace("[CONTENT]", content)))
    assert found.notes == ([f"the chat template changes {changed}; TEMPLATE does not"] if changed else [])


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{% for m in messages %}{{ loop.index }}: {{ m.content }}\n{% endfor %}", "in another way by its place"),
        ("{% for m in messages %}{{ m.content|upper }}\n{% endfor %}", "leaves out a turn, changes it"),
        ("{{ messages[-1].content }}", "leaves out turn 1"),
        # Only the ten conversations tell: there are no such letters in the markers.
        ("{% for m in messages %}{{ m.content|replace('b', 'c') }}\n{% endfor %}", "of a conversation of system, user"),
        (
            "{% for m in messages %}{{ m.content }}{{ '!' if messages|length == 1 }}\n{% endfor %}",
            "of a conversation of user it writes '!",
        ),
    ],
)
def test_what_cannot_be_derived_is_said(template: str, why: str, of: Any) -> None:
    with pytest.raises(WgradError, match="has no equal in Ollama's TEMPLATE: .*--template FILE, or use") as error:
        ollama_template(of(template))
    assert why in str(error.value)


# ---- the interpreter -----------------------------------------------------------------------------
VALUES = {"System": "s", "Messages": [{"Role": "a", "Content": "1"}, {"Role": "b", "Content": "2"}], "Empty": ""}


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("x{{ .System }}y", "xsy"),
        ('{{ "a}}\\n\\"" }}', 'a}}\n"'),
        ("{{ if .Empty }}a{{ else if .System }}b{{ else }}c{{ end }}d", "bd"),
        ("{{ if and .System .Empty }}a{{ else }}b{{ end }}", "b"),
        ("{{ if or .Empty .System }}a{{ end }}", "a"),
        ('{{ if not (eq .System "s") }}a{{ else if ne .System "t" }}b{{ end }}', "b"),
        ("{{ range $i, $m := .Messages }}{{ if eq $i 1 }}-{{ end }}{{ $m.Role }}{{ .Content }}{{ end }}", "a1-b2"),
        (
            "{{ range $i, $_ := .Messages }}{{ $last := eq (len (slice $.Messages $i)) 1 }}"
            "{{ if $last }}{{ $.System }}{{ end }}{{ end }}",
            "s",
        ),
        ("{{ range $i, $_ := .Empty }}{{ .Nothing }}{{ end }}x", "x"),
    ],
)
def test_templates_are_rendered_as_go_does(template: str, text: str) -> None:
    assert render(template, VALUES) == text


@pytest.mark.parametrize(
    "template",
    ["{{ if .System }}", "{{ end }}", "{{ .None }}", "{{- .System }}", "{{ range .Messages }}{{ end }}", "{{ len 3 }}",
     "{{ (len .Messages }}", "{{ .Messages }}", "{{ printf 3 }}", "{{ .System .System }}"],
)  # fmt: skip
def test_the_interpreter_refuses_what_it_does_not_know(template: str) -> None:
    with pytest.raises(GoTemplateError):
        render(template, VALUES)


@pytest.mark.parametrize(
    "text", ["plain\n text ", 'ends "', '"""', "{{ x }}", "a\tb\r\n", "ü\x00", "\xa0\\U\u200b\U0001f689\U000e0001", ""]
)
def test_a_literal_is_itself(text: str) -> None:
    assert render(literal(text), {}) == text
    assert '"""' not in literal(text) and not literal(text).endswith('"')
    assert literal(text).replace("\n", "").isprintable(), "Ollama's parser leaves out all else"


@pytest.mark.parametrize("case", OLLAMA["renderings"])
def test_the_interpreter_does_as_ollama(case: dict[str, Any]) -> None:
    assert render_go(case["template"], case["messages"]) == case["text"]


@pytest.mark.parametrize("case", OLLAMA["odd"]["renderings"])
def test_odd_characters_are_rendered_as_by_ollama(case: dict[str, Any]) -> None:
    """In the templates of twelve families, over many turns; each text is also that of the chat template."""
    assert render_go(case["template"], OLLAMA["odd"]["messages"]) == case["text"]


def test_a_modelfile_is_what_ollama_has_read() -> None:
    found = OLLAMA["parameters"]
    template = OLLAMA["renderings"][-1]["template"]
    numbers = [("temperature", str(found["temperature"])), ("num_ctx", str(found["num_ctx"]))]
    assert modelfile("model.gguf", template, found["stop"], numbers) == OLLAMA["modelfile"]


def test_the_comparison_is_what_refuses(of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_write", lambda render: ("{{ .System }}", True))
    with pytest.raises(WgradError, match="of a conversation of user it writes"):
        ollama_template(of(_TEMPLATES["chatml"]))


def test_a_stop_text_may_hold_a_quote() -> None:
    lines = modelfile("m.gguf", "{{ .Prompt }}", ["<|end|>", 'a"b'], []).splitlines()
    assert lines[2:] == ['PARAMETER stop "<|end|>"', 'PARAMETER stop """a"b"""']
