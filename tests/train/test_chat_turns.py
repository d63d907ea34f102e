"""Conversations and templates that do not fit: unknown roles, parts of contents, and what a template removes."""

from __future__ import annotations

import json

import pytest

from wgrad.device.errors import WgradError
from wgrad.train.commands.data_show import summary
from wgrad.train.data.chat import ChatTemplate, Conversation, MessagesRefused
from wgrad.train.data.data import load_data
from wgrad.train.data.left_out import left_out
from wgrad.train.data.tokenizer import load_tokenizer
from wgrad.train.options.finetune_config import RunOptions

# Writes the roles that it knows, and of an answer what follows its thought; calls of tools by name.
QWEN = (
    "{% for m in messages %}{% if m.role in ('system', 'user') %}{{ '<' + m.role + '>' + m.content + '</>' }}"
    "{% elif m.role == 'assistant' %}{{ '<assistant>' + (m.content or '').split('</think>')[-1].strip() }}"
    "{% for c in m.tool_calls or [] %}{{ '(' + c.function.name + ')' }}{% endfor %}</>"
    "{% elif m.role == 'tool' %}{{ '<user>(' + m.content + ')</>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
# A system message is part of the first question.
FOLDS = (
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content + '\n\n' %}"
    "{% set messages = messages[1:] %}"
    "{% else %}{% set system = '' %}{% endif %}{% for m in messages %}"
    "{% if m.role == 'user' %}{{ '[INST]' + (system if loop.first else '') + m.content + '[/INST]' }}"
    "{% elif m.role == 'assistant' %}{{ m.content + '</s>' }}{% endif %}{% endfor %}"
)
REFUSES = QWEN.replace(
    "{% elif m.role == 'tool' %}", "{% elif m.role != 'tool' %}{{ raise_exception('Bad role') }}{% else %}"
)
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PARTS = (
    "{% for m in messages %}{{ '<' + m.role + '>' }}{% for part in m.content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}</>{% endfor %}"
)
EITHER = PARTS.replace("{% for part", "{% if m.content is string %}{{ m.content }}{% else %}{% for part").replace(
    "{% endif %}{% endfor %}</>", "{% endif %}{% endfor %}{% endif %}</>"
)
FIRST = "{% for m in messages %}{{ '<' + m.role + '>' + m.content[0].text + '</>' }}{% endfor %}"  # as LLaVA's
ASK, ANSWER = {"role": "user", "content": "Who?"}, {"role": "assistant", "content": "He."}
CALL = [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]


def strict(source: str) -> ChatTemplate:
    return ChatTemplate(source, {"bos_token": "<s>"}, strict=True)


def turn(role: str, content: object, **more: object) -> dict:
    return {"role": role, "content": content, **more}


# ---- roles ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("role", ["asistant", "function", "Assistant", "model", "a\nb"])
@pytest.mark.parametrize("content", ["Yes.", "You are one who would be wise, so be it.", "", "user"])
def test_a_role_that_the_template_leaves_out_is_refused_with_those_it_knows(role: str, content: str) -> None:
    for messages in ([ASK, turn(role, content)], [turn(role, content), ASK], [ASK, ANSWER, turn(role, content), ASK]):
        number = messages.index(turn(role, content)) + 1
        with pytest.raises(MessagesRefused) as caught:
            strict(QWEN).render(messages)
        assert str(caught.value) == (
            f"turn {number} (role {ascii(role)}) leaves nothing in what the chat template renders, which knows the "
            "roles system, user, assistant, tool: rename the role, or remove the turn"
        )


def test_a_role_that_the_template_refuses_is_named_with_those_it_knows() -> None:
    with pytest.raises(MessagesRefused, match="refuses .*Bad role.*; it knows the roles .*user.*, not 'asistant'$"):
        strict(REFUSES).render([ASK, turn("asistant", "Yes.")])
    with pytest.raises(MessagesRefused, match="Bad role.*line 1 of the template.$"):  # by content, not by role
        strict("{{ raise_exception('Bad role') if messages[0].content == 'no' else messages }}").render(
            [turn("user", "no")]
        )


@pytest.mark.parametrize("source", [QWEN, FOLDS, CHATML, PARTS, EITHER])
@pytest.mark.parametrize(
    "messages",
    [
        [ASK, ANSWER],
        [turn("system", "S"), ASK, ANSWER],
        [turn("system", ""), ASK, ANSWER, ASK, ANSWER],
        [turn("system", "Who?"), ASK, turn("assistant", "Who?"), ASK, turn("assistant", " x ")],
        [turn("user", ""), ANSWER],
    ],
)
def test_turns_that_are_rendered_are_accepted(source: str, messages: list[dict]) -> None:
    """Short, empty and repeated ones too, and a system message that is part of a question."""
    text = strict(source).render(messages)
    if source is not PARTS:
        assert text == ChatTemplate(source, {}).render(messages)


def test_a_template_that_knows_no_role_writes_any() -> None:
    assert "<|im_start|>asistant\nYes." in strict(CHATML).render([ASK, turn("asistant", "Yes.")])
    assert "<|im_start|>developer\nS" in strict(CHATML).render([turn("developer", "S"), ASK])


@pytest.mark.parametrize("source", [QWEN, FOLDS, REFUSES])
def test_developer_is_system_where_the_template_knows_that_alone(source: str) -> None:
    messages = [turn("developer", "Be wise."), ASK, ANSWER]
    assert strict(source).render(messages) == strict(source).render([turn("system", "Be wise."), *messages[1:]])
    both = source.replace("('system', 'user')", "('system', 'developer', 'user')")
    if both != source:
        assert strict(both).render(messages) == "<developer>Be wise.</><user>Who?</><assistant>He.</>"
    without = source.replace("('system', 'user')", "('user',)").replace("== 'system'", "== 'nobody'")
    with pytest.raises(MessagesRefused, match="'developer'"):
        strict(without).render(messages)


def test_a_known_role_where_the_template_writes_none() -> None:
    with pytest.raises(MessagesRefused, match=r"leaves out turn 2 \(role 'system'\) where it stands: move it"):
        strict(FOLDS).render([ASK, turn("system", "S"), ASK])


def test_tool_calls_are_rendered_or_refused() -> None:
    calls = [ASK, turn("assistant", None, tool_calls=CALL), turn("tool", "3"), ANSWER]
    assert strict(QWEN).render(calls) == "<user>Who?</><assistant>(add)</><user>(3)</><assistant>He.</>"
    without = QWEN.replace("'(' + c.function.name + ')'", "''")
    with pytest.raises(MessagesRefused, match=r"writes no calls of tools, and turn 2 \(role 'assistant'\) has nothing"):
        strict(without).render(calls)
    calls[1]["content"] = "I add."  # something is left: `lost` has the rest
    lost: list[str] = []
    strict(without).render_with_spans(Conversation(calls), {1, 3}, lost)
    assert lost == [json.dumps(CALL)]


def test_many_turns_are_checked_in_one_rendering() -> None:
    many = [ASK, ANSWER] * 200
    assert strict(QWEN).render(many) == ChatTemplate(QWEN, {}).render(many)
    with pytest.raises(MessagesRefused, match="turn 401"):
        strict(QWEN).render([*many, turn("asistant", "x")])


# ---- arguments of calls --------------------------------------------------------------------------
def calls_by(inner: str) -> str:
    return (
        "{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
        "{% set f = c.function %}[{{ f.name }} " + inner + "]{% endfor %}{% endfor %}"
    )


TO_JSON, GIVEN = calls_by("{{ f.arguments | tojson }}"), calls_by("{{ '`' + f.arguments + '`' }}")
EITHER_WAY = calls_by("{{ f.arguments if f.arguments is string else f.arguments | tojson }}")
ITEMS = calls_by("{% for k, v in f.arguments.items() %}{{ k }}={{ v }};{% endfor %}")
IDS = calls_by("").replace("[{{ f.name }} ]", "[{{ c.id }}]")
OBJECT = {"a": 1, "b": "é"}


@pytest.mark.parametrize(
    ("source", "written"),
    [
        (TO_JSON, '[add {"a": 1, "b": "é"}]'),
        (GIVEN, '[add `{"a": 1, "b": "é"}`]'),
        (EITHER_WAY, '[add {"a": 1, "b": "é"}]'),
        (ITEMS, "[add a=1;b=é;]"),
    ],
)
def test_arguments_of_calls_as_the_template_takes_them(source: str, written: str) -> None:
    """OpenAI's files and clients have JSON text, transformers an object."""
    for arguments in (OBJECT, json.dumps(OBJECT, ensure_ascii=False)):
        function = {"name": "add", "arguments": arguments}
        said = turn("assistant", "", tool_calls=[{"type": "function", "id": "abcdefghi", "function": function}])
        assert strict(source).render([ASK, said, turn("tool", "3"), ANSWER]).count(written) == 1
        assert function["arguments"] == arguments, "the record stays as it is"


@pytest.mark.parametrize(
    ("source", "arguments", "written"),
    [
        (EITHER_WAY, '{"b":2,  "a":1.0}', '[add {"b":2,  "a":1.0}]'),  # as transformers writes it
        (TO_JSON, " ", "[add {}]"),
        (TO_JSON, "1 and 1", '[add "1 and 1"]'),
        (TO_JSON, "[1]", '[add "[1]"]'),
    ],
)
def test_arguments_of_calls_stay_as_they_are_written(source: str, arguments: str, written: str) -> None:
    call = {"function": {"name": "add", "arguments": arguments}}
    assert written in strict(source).render([ASK, turn("assistant", "", tool_calls=[call]), ANSWER])


def test_a_call_counts_as_rendered_if_its_id_is_written() -> None:
    """As Kimi K2's."""
    call = {"id": "functions.add:0", "function": {"name": "add", "arguments": {}}}
    lost: list[str] = []
    text, spans = strict(IDS).render_with_spans(
        Conversation([ASK, turn("assistant", "", tool_calls=[call])]), {1}, lost
    )
    assert text.endswith("[functions.add:0]") and spans and not lost


# ---- contents in parts ---------------------------------------------------------------------------
@pytest.mark.parametrize("source", [QWEN, FOLDS, CHATML, PARTS, EITHER, FIRST])
@pytest.mark.parametrize("role", ["user", "assistant", "system"])
def test_parts_are_the_text_of_which_they_are(source: str, role: str) -> None:
    def messages(content: object) -> list[dict]:
        said = [turn("system", "S"), ASK, ANSWER]
        return [turn(m["role"], content) if m["role"] == role else m for m in said]

    expected = strict(source).render(messages("One. Two."))
    assert "One. Two." in expected
    for parts in (
        [{"type": "text", "text": "One. Two."}],
        [{"type": "text", "text": "One. "}, {"type": "text", "text": "Two."}],
        ["One. ", {"type": "input_text", "text": "Two."}],
        [{"text": "One. Two."}],
    ):
        assert strict(source).render(messages(parts)) == expected


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ({"type": "image_url", "image_url": {"url": "x"}}, "is of type 'image_url'"),
        ({"type": "image"}, "is of type 'image'"),
        ({"n": 1}, "has no 'type'"),
        ({"type": "text"}, "is of type 'text' but has no 'text'"),
        (3, "is neither text nor an object"),
    ],
)
@pytest.mark.parametrize("source", [CHATML, EITHER])
def test_parts_that_are_no_text_are_refused(source: str, part: object, words: str) -> None:
    with pytest.raises(MessagesRefused, match=f"^a part of message 1 {words}: only text can be read"):
        strict(source).render([turn("user", [{"type": "text", "text": "Look: "}, part]), ANSWER])


# ---- what a template removes ---------------------------------------------------------------------
THOUGHT = "<think>\nAdd one and one, carefully.\n</think>"


@pytest.mark.parametrize(
    ("message", "said", "lost"),
    [
        (turn("assistant", f"{THOUGHT}\n\n2."), "2.</>", [THOUGHT]),
        (turn("assistant", f"{THOUGHT}\n\n2."), f"{THOUGHT}\n\n2.</>", []),
        (
            turn("assistant", f"{THOUGHT}2. {THOUGHT.replace('one', 'two')} 3."),
            "2.  3.",
            [THOUGHT, THOUGHT.replace("one", "two")],
        ),
        (turn("assistant", f"  {THOUGHT}\n2.\n"), "<think>Add one and\none, carefully.</think>2.", []),
        (turn("assistant", "2.", reasoning_content="One more."), "2.", ["One more."]),
        (turn("assistant", "The sum, as one finds it, is 2."), "The sum is 2.", ["The sum, as one finds it, is 2."]),
        (
            turn("assistant", "A sum of them (which is long) comes to 2."),
            "A sum of them comes to 2.",
            ["(which is long)"],
        ),
        (turn("assistant", [{"type": "text", "text": THOUGHT}, {"type": "text", "text": "2."}]), "2.", [THOUGHT]),
        (turn("assistant", "", tool_calls=CALL), "(add)", []),
        (turn("assistant", "x", tool_calls=CALL), "x", [json.dumps(CALL)]),
    ],
)
def test_parts_that_the_text_lacks_are_found(message: dict, said: str, lost: list[str]) -> None:
    assert left_out([message], said) == lost


# ---- what is said of them ------------------------------------------------------------------------
def test_data_tells_of_turns_and_of_what_is_removed(make_tokenizer, write_lines) -> None:
    tokenizer = load_tokenizer(make_tokenizer(chat_template=QWEN))
    good = [turn("system", "S"), ASK, turn("assistant", f"{THOUGHT}\n\n2."), ASK, ANSWER]
    lines = [{"messages": m} for m in (good, good, [ASK, turn("asistant", "x"), ANSWER], [ASK, ANSWER])]
    config = RunOptions(data=write_lines(*lines), eval_fraction=0, max_length=400)
    data = load_data(config, tokenizer)
    assert (len(data.train), data.bad_lines) == (3, 1)
    assert data.turns == "turns: 5 assistant trained on; 5 user, 2 system read"
    (note,) = (remark for remark in data.remarks if "leaves out" in remark)
    count = 2 * len(tokenizer.encode(THOUGHT, add_special_tokens=False))
    assert f"the chat template leaves out {count} tokens of 2 lines" in note and "--chat-template" in note
    (skipped,) = (remark for remark in data.remarks if remark.startswith("skipped"))
    assert "jsonl:3: turn 2 (role 'asistant') leaves nothing" in skipped
    assert any("turns: 5 assistant trained on" in line for line in summary(data, config))
    with pytest.raises(WgradError, match="jsonl:3: turn 2"):
        load_data(RunOptions(data=config.data, eval_fraction=0, on_bad_line="stop"), tokenizer)


def test_preferences_tell_of_them_too(make_tokenizer, write_lines) -> None:
    tokenizer = load_tokenizer(make_tokenizer(chat_template=QWEN))
    pair = {"prompt": [ASK], "chosen": [turn("assistant", f"{THOUGHT} 2.")], "rejected": [ANSWER]}
    config = RunOptions(data=write_lines(pair), eval_fraction=0, max_length=400, objective="dpo")
    data = load_data(config, tokenizer)
    assert data.turns == "turns: 2 assistant trained on; 2 user read"
    assert any("of 1 line" in remark for remark in data.remarks)
