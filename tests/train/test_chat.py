"""Chat templates: what they are given, which part the assistant says, and what they cannot do to a run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import own_process
from tests.own_process import needs_fork
from wgrad.device.errors import WgradError
from wgrad.train.data import template_process
from wgrad.train.data.chat import ChatTemplate, Conversation, MessagesRefused
from wgrad.train.data.template_process import TemplateProcess

TURNS = [
    {"role": "user", "content": "Who is wise?"},
    {"role": "assistant", "content": "He that héareth."},
    {"role": "user", "content": "And who else?"},
    {"role": "assistant", "content": "None."},
]
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SHOW = "{% for m in messages %}{{ m | tojson }};{% endfor %}"


def spoken(source: str, turns=TURNS, learn=None, **special: str) -> list[str]:
    """Return the text in the loss of the turns numbered in `learn` (default: all of the assistant's)."""
    template = ChatTemplate(source, special)
    learn = [i for i, m in enumerate(turns) if m["role"] == "assistant"] if learn is None else learn
    text, spans = template.render_with_spans(Conversation(turns), learn)
    assert text == template.render(turns)
    return [text[a:b] for a, b in spans]


# ---- what a template is given --------------------------------------------------------------------
@pytest.mark.parametrize(
    ("message", "seen"),
    [
        ({"role": "user", "content": None}, '{"role": "user"}'),
        ({"role": "tool", "content": "x", "n": 1}, '{"role": "tool", "content": "x", "n": 1}'),
        ({"role": "a", "tool_calls": None, "content": [{"n": 1}]}, '{"role": "a", "content": [{"n": 1}]}'),
        ({"role": "a", "thinking": "t"}, '{"thinking": "t", "role": "a", "reasoning_content": "t"}'),
        ({"role": "a", "reasoning": "t"}, '{"thinking": "t", "role": "a", "reasoning": "t", "reasoning_content": "t"}'),
        (
            {"role": "a", "reasoning_content": "t", "thinking": "other"},
            '{"thinking": "other", "role": "a", "reasoning_content": "t"}',
        ),
    ],
)
def test_templates_get_messages_as_from_transformers(message: dict, seen: str) -> None:
    assert ChatTemplate(SHOW, {}).render([message]) == seen + ";"


def test_tools_documents_and_options_reach_the_template() -> None:
    template = ChatTemplate({"default": "{{ tools }} {{ documents }} {{ x }}", "tool_use": "{{ tools | tojson }}"}, {})
    conversation = Conversation(TURNS, None, [{"title": "d"}], {"x": 3})
    assert template.render(conversation) == "None [{'title': 'd'}] 3"
    assert template.render(Conversation(TURNS, [{"type": "function"}])) == '[{"type": "function"}]'


# ---- which part the assistant says ---------------------------------------------------------------
LOOPS = {
    "plain": CHATML,
    "slice": "{% if messages[0].role == 'system' %}{% set rest = messages[1:] %}{% else %}{% set rest = messages %}"
    "{% endif %}" + CHATML.replace("in messages", "in rest"),
    "numbers": CHATML.replace("for m in messages %}", "for i in range(messages|length) %}{% set m = messages[i] %}"),
    "a scan before": "{% for m in messages[::-1] %}{% if loop.last %}{% endif %}{% endfor %}" + CHATML,
    "a macro": "{% macro turn(m) %}{{ '<|im_start|>' + m.role + '\n' + m.content }}<|im_end|>\n{% endmacro %}"
    "{% for m in messages %}{{ turn(m) }}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "captured": "{% set all %}" + CHATML.split("{% if")[0] + "{% endset %}{{ all }}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "prompt in the loop": CHATML.split("{% endfor")[0]
    + "{% if loop.last and add_generation_prompt %}<|im_start|>assistant\n{% endif %}{% endfor %}",
    "skips": CHATML.replace("in messages %}", "in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}"),
}


@pytest.mark.parametrize("name", LOOPS)
def test_turns_are_told_apart_by_the_loop(name: str) -> None:
    end = "<|im_end|>\n"
    assert spoken(LOOPS[name]) == [f"He that héareth.{end}", f"None.{end}"]
    assert spoken(LOOPS[name], learn=[3]) == [f"None.{end}"]
    assert spoken(LOOPS[name], TURNS[1:]) == [f"He that héareth.{end}", f"None.{end}"]  # the assistant opens
    assert spoken(LOOPS[name], [{"role": "system", "content": "S"}, *TURNS], learn=[4]) == [f"None.{end}"]
    same = [{"role": role, "content": "x"} for role in ("user", "assistant", "user", "assistant")]
    assert spoken(LOOPS[name], same) == [f"x{end}", f"x{end}"]


def test_turns_are_marked_as_rendered_when_they_were_the_last() -> None:
    source = (
        "{% for m in messages %}[{{ m['role'] }}]{% if loop.last and m['role'] == 'assistant' %}(thought){% endif %}"
        "{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    assert spoken(source) == ["He that héareth.", "(thought)None."]


def test_what_follows_the_last_turn_counts_and_spaces_between_turns_do_not() -> None:
    source = "{% for m in messages %}{{ m.content + ' ' }}{% endfor %}{{ eos_token }}"
    assert spoken(source, eos_token="</s>") == ["He that héareth.", "None. </s>"]
    assert spoken(source, TURNS[:3], eos_token="</s>") == ["He that héareth."]


def test_what_stands_before_all_turns_does_not_count() -> None:
    before = "{% if loop.first %}{{ bos_token }}Be wise.\n{% endif %}"
    assert spoken(CHATML.replace("in messages %}", "in messages %}" + before), TURNS[1:2], bos_token="<s>") == [
        "He that héareth.<|im_end|>\n"
    ]
    bare = "{% for m in messages %}{% if loop.first %}{{ bos_token }}{% endif %}{{ m.content }}{% endfor %}"
    assert spoken(bare, TURNS[1:2], bos_token="<s>") == ["He that héareth."]


def test_generation_blocks_mark_the_spans() -> None:
    source = (
        "{% for m in messages %}{{ m['role'] }}: {% if m['role'] == 'assistant' %}"
        "{% generation %}{{ m['content'] }}!{% endgeneration %}{% else %}{{ m['content'] }}{% endif %} {% endfor %}"
    )
    assert spoken(source) == ["He that héareth.!", "None.!"]
    assert spoken(source, learn=[3]) == ["None.!"]
    tail = source + "{% generation %}{{ eos_token }}{% endgeneration %}"
    assert spoken(tail, eos_token="</s>") == ["He that héareth.!", "None.!", "</s>"]
    assert spoken(tail, TURNS[:3], eos_token="</s>") == ["He that héareth.!"]


def test_spans_by_prefixes_where_there_is_no_loop_over_the_messages() -> None:
    source = (
        "{% for text in messages | map(attribute='content') %}{{ text }};{% endfor %}"
        "{% if add_generation_prompt %}{% endif %}"
    )
    assert spoken(source) == ["He that héareth.;", "None.;"]
    backwards = "{% for text in messages | map(attribute='content') | reverse %}{{ text }};{% endfor %}"
    with pytest.raises(MessagesRefused, match="renders turn 2 differently.*--loss-on all"):
        spoken(backwards)


def test_marks_that_change_what_is_rendered_are_not_believed() -> None:
    source = "{% set all %}{% for m in messages %}{{ m.content }}{% endfor %}{% endset %}{{ all }} {{ all | length }}"
    assert ChatTemplate(source, {}).render(TURNS[:1]) == "Who is wise? 12"
    with pytest.raises(MessagesRefused, match="renders turn 2 differently"):
        spoken(source)


def test_marks_are_characters_that_the_conversation_does_not_have() -> None:
    private = chr(0xF0000) + "m1,0" + chr(0xF0001) + "\ue0f0\ue0f1" + chr(0xF0002)
    # The last turn ends in a point, so that prefixes tell nothing.
    source = CHATML.replace("{% endfor", "{% if loop.last %}.{% endif %}{% endfor")
    turns = [TURNS[0], {"role": "assistant", "content": private}, TURNS[2]]
    assert spoken(source, turns) == [private + "<|im_end|>\n"]


# ---- templates that are wrong --------------------------------------------------------------------
@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{% for %}", r"Expected an expression.* \(line 1 of"),
        ("a\nb\n{% break %}", r"'break' outside a loop \(line 3 of"),
        ("{% for m in messages %}{% endfor %}\n{% continue %}", r"'continue' outside a loop \(line 2 of"),
        ("{% for m in messages %}{% macro f() %}\n{% break %}{% endmacro %}{% endfor %}", r"'break' outside a loop"),
        ("{% for m in messages %}{% else %}{% break %}{% endfor %}", r"'break' outside a loop"),
        ("\n\n{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", r"nested too deeply \(line 3 of"),
        ("\n{{ " + "1+" * 5000 + "1 }}", r"nested too deeply \(line 2 of"),
        ("{% if 1 %}" * 500 + "{% endif %}" * 500, r"nested too deeply \(line 1 of"),
        ("\n{{ 'x' * 10 ** 11 }}{{ x | nofilter }}", r"No filter named 'nofilter'.* \(line 2 of"),
    ],
)
def test_a_template_that_does_not_compile_is_refused_in_one_line(source: str, words: str) -> None:
    with pytest.raises(WgradError, match=f"^--model: .* chat template does not compile: .*{words}") as caught:
        ChatTemplate(source, {})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ raise_exception('roles must\nalternate') }}", r"refuses these messages: roles must alternate \(line 1 of"),
        ("x\n{{ messages[9]['content'] + 1 }}", r"refuses these messages: .*\(line 2 of"),
        ("{{ messages[0]['content'] + 1 }}", "fails on these messages: TypeError"),
        ("{{ messages.append(1) }}", "refuses these messages: .*unsafe"),  # the sandbox
        ("{{ ''.__class__.__mro__ }}", "refuses these messages: .*unsafe"),
        ("{% set ns = namespace(__class__=1) %}", "refuses these messages: .*underscore"),
        ("\n{{ 1 / 0 }}", r"fails on these messages: ZeroDivisionError: division by zero \(line 2 of"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", r"fails on these messages: OverflowError: Range too big"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "fails on these messages: RecursionError"),
        ("{% include 'other' %}", "fails on these messages: TypeError"),
    ],
)
def test_the_refusal_of_a_template_is_passed_on_in_one_line(source: str, words: str) -> None:
    with pytest.raises(MessagesRefused, match=words) as caught:
        ChatTemplate(source, {}).render(TURNS)
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(sys.platform in ("win32", "darwin"), reason="the system does not limit a process's memory")
@pytest.mark.parametrize("source", ["{{ 'x' * 10 ** 11 }}", "{{ 'x'.center(10 ** 12) }}", "{{ '%999999999999d' % 3 }}"])
def test_memory_is_limited(source: str) -> None:
    with pytest.raises(MessagesRefused, match="MemoryError"):
        ChatTemplate(source, {}).render(TURNS)
    assert ChatTemplate("fine", {}).render(TURNS) == "fine"


ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{{ '' }}{% endfor %}{% endfor %}"


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> Iterator[TemplateProcess]:
    """The process of templates, with half a second for each answer."""
    process = TemplateProcess(0.5)
    monkeypatch.setattr(template_process, "_shared", process)
    yield process
    process.close()


@pytest.mark.parametrize("source", [ENDLESS, "{{ 7 ** (7 ** 9) }}"])
def test_an_endless_template_is_ended_and_the_next_one_works(soon: TemplateProcess, source: str) -> None:
    with pytest.raises(WgradError, match=r"^--model: .* chat template does not end within 0.5 s"):
        ChatTemplate(source, {}).render(TURNS)
    assert soon._process is None
    assert ChatTemplate("fine", {}).render(TURNS) == "fine"


def test_one_process_renders_all(soon: TemplateProcess) -> None:
    template = ChatTemplate(CHATML, {})
    template.render(TURNS)
    first = soon._process
    for _ in range(50):
        template.render_with_spans(Conversation(TURNS), {1, 3})
    assert soon._process is first and first is not None
    soon.close()
    assert first.poll() is not None
    assert template.render(TURNS[:1]) == "<|im_start|>user\nWho is wise?<|im_end|>\n"


def test_a_process_that_dies_is_an_error(soon: TemplateProcess) -> None:
    template = ChatTemplate(CHATML, {})
    assert soon._process is not None
    soon._process.kill()
    soon._process.wait()
    with pytest.raises(WgradError, match="^--model: .* ends the process that runs it"):
        template.render(TURNS)
    assert template.render(TURNS[:1])


def render_in_a_fork() -> int:
    template = ChatTemplate(CHATML, {})
    whole = template.render(TURNS[:1])
    child = os.fork()
    if child == 0:
        try:
            os._exit(0 if template.render(TURNS[:1]) == whole else 1)
        finally:
            os._exit(2)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return status or (0 if template.render(TURNS[:1]) == whole else 3)


@needs_fork
def test_a_forked_process_has_its_own(tmp_path: Path) -> None:
    assert own_process.run(render_in_a_fork, tmp_path / "log") == (0, "")


@pytest.mark.skipif(os.name != "posix", reason="signals of Posix")
def test_ctrl_c_ends_both(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from wgrad.train.data.chat import ChatTemplate\n"
        "from wgrad.train.data import template_process\n"
        "template_process._shared = process = template_process.TemplateProcess(60)\n"
        f"template = ChatTemplate({ENDLESS!r}, {{}})\n"
        "print(process._process.pid, flush=True)\n"
        "template.render([{'role': 'user'}])\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    with subprocess.Popen([sys.executable, script], stdout=-1, stderr=-1, env=environment, text=True) as run:
        assert run.stdout is not None
        worker = int(run.stdout.readline())
        run.send_signal(signal.SIGINT)
        _, stderr = run.communicate(timeout=300)
    assert stderr.endswith("KeyboardInterrupt\n")
    with pytest.raises(ProcessLookupError):
        os.kill(worker, 0)


def test_a_script_without_a_main_guard_runs_once(tmp_path: Path) -> None:
    """The process is not made by running the script again; nothing of it is left when the script ends."""
    script = tmp_path / "script.py"
    script.write_text(
        "print('begun')\n"
        "from wgrad.train.data.chat import ChatTemplate\n"
        "from wgrad.train.data import template_process\n"
        "print(ChatTemplate('{{ messages[0].role }}', {}).render([{'role': 'user'}]))\n"
        "print(template_process.shared_process()._process.pid)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    run = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment, timeout=300)
    begun, text, pid = run.stdout.split()
    assert (begun, text, run.stderr) == ("begun", "user", "")
    if os.name == "posix":
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)
