"""Chat templates: which tokens count for the loss, compared with TRL; and what they render, with transformers.

TRL has, for the chat templates of many models, a variant with {% generation %} blocks. Here each model's own template
is rendered, and what we find in it is compared with what TRL's variant marks.
"""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

import pytest

from tests.tools import oracle_package
from wgrad.train.data.chat import ChatTemplate, Conversation, MessagesRefused
from wgrad.train.data.data import load_data
from wgrad.train.data.tokenizer import load_tokenizer
from wgrad.train.options.finetune_config import RunOptions

transformers = oracle_package("transformers")

pytestmark = pytest.mark.oracle


def _template_folder() -> Path:
    """Return the folder of TRL's templates. TRL itself is not imported, since it needs many packages."""
    try:
        files = metadata.files("trl") or []
    except metadata.PackageNotFoundError:
        pytest.skip("the oracle is trl: pip install wgrad[oracle]", allow_module_level=True)
    return next(Path(str(f.locate())) for f in files if f.name == "qwen3_training.jinja").parent


FOLDER = _template_folder()
NAMES = sorted(path.name.removesuffix("_training.jinja") for path in FOLDER.glob("*_training.jinja"))
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
OF_PARTS = ("idefics3", "llava_next", "smolvlm")  # content is a list there

CALL = [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]
TOOL = {"type": "function", "function": {"name": "add", "description": "adds", "parameters": {"type": "object"}}}
_ROLES = {"S": "system", "U": "user", "A": "assistant", "T": "tool"}


def turns(*said: str, **more: object) -> list[dict]:
    """Convert "U:text" to a message. `more` is added to each turn of the assistant."""
    made = [{"role": _ROLES[text[0]], "content": text[2:]} for text in said]
    return [{**m, **more} if m["role"] == "assistant" else m for m in made]


CALLS = {"role": "assistant", "content": "", "tool_calls": CALL}
CONVERSATIONS = {
    "one turn": turns("U:Q1", "A:A1"),
    "two turns": turns("U:Q1", "A:A1", "U:Q2", "A:A2"),
    "three turns": turns("U:Q1", "A:A1", "U:Q2", "A:A2", "U:Q3", "A:A3"),
    "system": turns("S:Be wise.", "U:Q1", "A:A1"),
    "system, two turns": turns("S:Be wise.", "U:Q1", "A:A1", "U:Q2", "A:A2"),
    "the assistant opens": turns("A:A0", "U:Q1", "A:A1"),
    "the user ends": turns("U:Q1", "A:A1", "U:Q2"),
    "all the same": turns("U:x", "A:x", "U:x", "A:x"),
    "reasoning": turns("U:Q1", "A:A1", "U:Q2", "A:A2", reasoning_content="R"),
    "thoughts in the text": turns("U:Q1", "A:<think>\nR1\n</think>\n\nA1", "U:Q2", "A:<think>\nR2\n</think>\n\nA2"),
    "a tool": [*turns("U:Q1"), CALLS, *turns("T:R1", "A:A1")],
    "a tool, null": [*turns("U:Q1"), {**CALLS, "content": None}, *turns("T:R1", "A:A1", "U:Q2", "A:A2")],
    "blanks": turns("U: Q1 \n", "A:\n A1 \n", "U:", "A:A2  "),
    "two in a row": turns("U:Q1", "A:A1", "A:A2", "U:Q2", "A:A3"),
}
# TRL marks the header too, which a prompt for generation gives: the model is never asked for it.
WITH_HEADER = {
    "deepseek_r1_distill": "<｜Assistant｜>",
    "deepseekv3": "<｜Assistant｜>",
    "gptoss": "<|start|>assistant",
    "muse_glimmer": "<|start|>assistant",
    "qwen2_5": "\n",  # of '<|im_start|>assistant\n'; for all other models of the family it does not
}
# TRL marks what ends the answers of tools too, which the template writes before it asks.
BEFORE_ANSWERS = {"deepseek_r1_distill": "<｜tool▁outputs▁end｜>"}
# TRL's variant renders something else than the model's own template: thoughts of earlier turns, which that drops.
KEEPS_THOUGHTS = ("deepseek_r1_distill", "qwen3", "qwen3_5_nothink", "qwen3_5_think", "qwen3_6", "qwen3_8")
# ... or the role of whoever is next, as the end of a turn.
NEXT_ROLE = {"glm4moe": r"<\|(user|observation)\|>$"}
# TRL does not mark the tag that opens the answer of a tool, with which a turn that calls one ends; nor the header of
# the next turn, which a prompt does not give there.
AROUND_TOOLS = {"diffusion_gemma": ("<|turn>model\n", "<|tool_response>")}


def conversation(name: str, key: str) -> list[dict]:
    messages = CONVERSATIONS[key]
    if name in OF_PARTS:
        messages = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in messages]
    return messages


def theirs(source: str, messages: list[dict], **options) -> tuple[str, list[str]] | None:
    """transformers' text and what its {% generation %} blocks enclose; None where the template refuses."""
    kept = [{k: v for k, v in m.items() if v is not None} for m in messages]  # as apply_chat_template does before
    try:
        (text,), (spans,) = transformers.utils.chat_template_utils.render_jinja_template(
            conversations=[kept], chat_template=source, return_assistant_tokens_mask=True, **SPECIAL, **options
        )
    except Exception:  # of a template's own code
        return None
    return text, joined(text, spans)


def joined(text: str, spans) -> list[str]:
    """The pieces of the text, neighbors as one."""
    whole: list[list[int]] = []
    for start, end in spans:
        if whole and whole[-1][1] == start:
            whole[-1][1] = end
        elif end > start:
            whole.append([start, end])
    return [text[a:b] for a, b in whole]


def ours(source: str, messages: list[dict]) -> tuple[str, list[str]] | None:
    learn = {i for i, m in enumerate(messages) if m["role"] == "assistant"}
    try:
        text, spans = ChatTemplate(source, SPECIAL).render_with_spans(Conversation(messages), learn)
    except MessagesRefused:
        return None
    return text, joined(text, spans)


def like_ours(name: str, marked: list[str], said: list[str]) -> list[str]:
    """Return what TRL marks, without the differences listed above. said: what we mark."""
    header = WITH_HEADER.get(name, "")
    if "".join(marked).replace(header, "") == "".join(said).replace(header, "") and len(header) > 1:
        return said  # two turns in a row are one piece where the header between them is marked
    before = BEFORE_ANSWERS.get(name, "")
    marked = [re.sub(NEXT_ROLE.get(name, "^"), "", p.removeprefix(header).removeprefix(before)) for p in marked]
    if name in KEEPS_THOUGHTS and len(marked) == len(said):
        answers = [re.sub(r"^\n*<think>.*?</think>", "", piece, flags=re.DOTALL) for piece in marked]
        marked = [own if own.lstrip() == text.lstrip() else piece for own, text, piece in zip(said, answers, marked)]
    return marked


@pytest.mark.parametrize("name", NAMES)
def test_the_same_part_counts_as_with_trl(name: str) -> None:
    own = (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")
    variant = (FOLDER / f"{name}_training.jinja").read_text(encoding="utf-8")
    compared = 0
    for key in CONVERSATIONS:
        messages = conversation(name, key)
        found, rendered, wanted = ours(own, messages), theirs(own, messages), theirs(variant, messages)
        assert (found and found[0]) == (rendered and rendered[0]), key  # the text is transformers', or both refuse
        if found is None or wanted is None:
            continue
        header, tag = AROUND_TOOLS.get(name, ("", ""))
        said = [piece.removeprefix(header).removesuffix(tag) for piece in found[1]]
        assert said == like_ours(name, wanted[1], said), key
        compared += 1
    assert compared >= 5, "hardly a conversation that both take"


def test_a_tag_in_an_answer_of_gpt_oss_is_no_thought_that_the_next_prompt_opens() -> None:
    """It writes the last answer with its thought and another end, but not where a prompt follows."""
    own, variant = ((FOLDER / f"gptoss{end}.jinja").read_text(encoding="utf-8") for end in ("", "_training"))
    messages = turns("U:Q1", "A:<think>\nR\n</think>\n\nA1", "A:A2", thinking="R")
    found, wanted = ours(own, messages), theirs(variant, messages)
    assert found is not None and wanted is not None
    assert found[1] == [p for p in wanted[1][0].split(WITH_HEADER["gptoss"], 2) if p]


# Of which TRL's variant renders just what the model's own template does.
SAME_TEXT = ("llama3", "qwen3_instruct_2507", "gemma", "phi3", "cohere", "lfm2")


@pytest.mark.parametrize("name", SAME_TEXT)
def test_the_same_tokens_count_as_with_trl(name: str, make_tokenizer, write_lines) -> None:
    own, variant = ((FOLDER / f"{name}{end}.jinja").read_text(encoding="utf-8") for end in ("", "_training"))
    folder = make_tokenizer(chat_template=own)
    tokenizer, oracle = load_tokenizer(folder), transformers.AutoTokenizer.from_pretrained(str(folder))
    taken = [m for m in CONVERSATIONS.values() if theirs(own, m) is not None and theirs(variant, m) is not None]
    # A turn that only calls tools is refused where the template would write nothing of it.
    taken = [m for m in taken if "tool_calls" in own or not any("tool_calls" in turn for turn in m)]
    assert len(taken) >= 5
    config = RunOptions(data=write_lines(*({"messages": m} for m in taken)), eval_fraction=0, max_length=4000)
    for messages, document in zip(taken, load_data(config, tokenizer).train, strict=True):
        wanted = oracle.apply_chat_template(
            messages, chat_template=variant, return_dict=True, return_assistant_tokens_mask=True
        )
        assert document.ids.tolist() == wanted["input_ids"]
        assert document.loss_mask.astype(int).tolist() == wanted["assistant_masks"]


def test_what_was_refused_is_taken() -> None:
    """Conversations of several turns of Qwen3, with a system message of Mistral, that the assistant opens."""
    mistral = (
        "{%- if messages[0]['role'] == 'system' %}{%- set system = messages[0]['content'] %}"
        "{%- set loop_messages = messages[1:] %}{%- else %}{%- set loop_messages = messages %}{%- endif %}"
        "{{- bos_token }}"
        "{%- for message in loop_messages %}{%- if message['role'] == 'user' %}"
        "{%- if loop.last and system is defined %}{{- '[INST] ' + system + '\n\n' + message['content'] + '[/INST]' }}"
        "{%- else %}{{- '[INST] ' + message['content'] + '[/INST]' }}{%- endif %}"
        "{%- else %}{{- ' ' + message['content'] + eos_token }}{%- endif %}{%- endfor %}"
    )

    def said(source: str, key: str) -> list[str]:
        found = ours(source, CONVERSATIONS[key])
        assert found is not None
        return found[1]

    assert said(mistral, "system, two turns") == [" A1</s>", " A2</s>"]
    qwen = (FOLDER / "qwen3.jinja").read_text(encoding="utf-8")
    empty = "<think>\n\n</think>\n\n"
    assert said(qwen, "two turns") == ["A1<|im_end|>\n", f"{empty}A2<|im_end|>\n"]
    assert said(qwen, "the assistant opens") == ["A0<|im_end|>\n", f"{empty}A1<|im_end|>\n"]


@pytest.mark.parametrize("name", ["qwen3", "llama3_1", "qwen2_5", "lfm2_v2", "cohere2"])
def test_tools_and_documents_render_as_in_transformers(name: str) -> None:
    source = (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")
    messages, documents = CONVERSATIONS["a tool, null"], [{"title": "T", "text": "D"}]
    expected = theirs(source, messages, tools=[TOOL], documents=documents, enable_thinking=False)
    conversation = Conversation(messages, [TOOL], documents, {"enable_thinking": False})
    try:
        text = ChatTemplate(source, SPECIAL).render(conversation)
    except MessagesRefused:
        text = None
    assert text == (expected and expected[0])
