"""Tokenizers and chat templates as Hugging Face checkpoints carry them."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path

import pytest

from wgrad.autograd.errors import WgradError
from wgrad.train.chat import ChatTemplate
from wgrad.train.tokenizer import load_tokenizer

TURNS = [
    {"role": "user", "content": "Who is wise?"},
    {"role": "assistant", "content": "He that héareth."},
    {"role": "user", "content": "And who else?"},
    {"role": "assistant", "content": "None."},
]


# ---- files -------------------------------------------------------------------------------------
def test_special_tokens_as_text_or_object(make_tokenizer) -> None:
    folder = make_tokenizer(eos_token={"content": "<|im_end|>", "lstrip": False}, pad_token=None)
    tokenizer = load_tokenizer(folder)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (0, 4, None)
    assert tokenizer.vocab_size == 400
    assert tokenizer.stop_ids == {4}


def test_stop_ids_of_the_generation_config(make_tokenizer) -> None:
    folder = make_tokenizer()
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 4]}))
    assert load_tokenizer(folder).stop_ids == {1, 4}


def test_special_tokens_map_where_the_configuration_says_nothing(make_tokenizer) -> None:
    folder = make_tokenizer()
    (folder / "tokenizer_config.json").unlink()
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": "</s>"}))
    tokenizer = load_tokenizer(folder)
    assert (tokenizer.bos_id, tokenizer.eos_id) == (None, 1)


def test_missing_and_broken_files(tmp_path: Path, make_tokenizer) -> None:
    with pytest.raises(WgradError, match="has no tokenizer.json: copy"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(WgradError, match="tokenizer.model but no tokenizer.json: convert"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(WgradError, match="is not a tokenizer that can be read"):
        load_tokenizer(tmp_path)
    folder = make_tokenizer()
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(WgradError, match="cannot read .*tokenizer_config.json"):
        load_tokenizer(folder)


def test_a_tokenizer_that_does_not_fit_the_model(make_tokenizer) -> None:
    tokenizer = load_tokenizer(make_tokenizer())
    tokenizer.check_fits(400)
    tokenizer.check_fits(512)  # models are padded to round sizes
    with pytest.raises(WgradError, match="ids up to 399, but the model's vocab_size is 399"):
        tokenizer.check_fits(399)


# ---- ids ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("bos", [False, True])
def test_bos_where_the_tokenizer_puts_it(make_tokenizer, bos: bool) -> None:
    tokenizer = load_tokenizer(make_tokenizer(bos_in_json=bos))
    plain = tokenizer.encode("A wise man", add_special_tokens=False)
    assert tokenizer.encode("A wise man") == [0] * bos + plain
    assert 0 not in plain


def test_offsets_are_characters_of_the_text(make_tokenizer) -> None:
    tokenizer = load_tokenizer(make_tokenizer(bos_in_json=True))
    text = "A wisé man →"
    (encoded,) = tokenizer.encode_batch([text])
    assert encoded.offsets[0] == (0, 0)
    covered = {c for start, end in encoded.offsets for c in range(start, end)}
    assert covered == set(range(len(text)))


def test_decoding_piece_by_piece_is_decoding_at_once(make_tokenizer) -> None:
    tokenizer = load_tokenizer(make_tokenizer())
    text = "The fear of the LORD → naïve 知恵."
    ids = tokenizer.encode(text)
    step = tokenizer.decode_stream()
    assert "".join(step(i) for i in ids) == tokenizer.decode(ids) == text
    step = tokenizer.decode_stream(ids[:5])  # what stands before is not said again
    assert tokenizer.decode(ids[:5]) + "".join(step(i) for i in ids[5:]) == text
    assert tokenizer.decode([*ids, 1]) == text
    assert tokenizer.decode([*ids, 1], skip_special_tokens=False) == text + "</s>"


# ---- templates ---------------------------------------------------------------------------------
def test_where_a_template_may_stand(make_tokenizer) -> None:
    source = "{{ messages[0]['content'] }}"
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": source}]
    assert load_tokenizer(make_tokenizer("a", chat_template=named)).chat_template.render(TURNS) == "Who is wise?"
    folder = make_tokenizer("b", chat_template="no")
    (folder / "chat_template.jinja").write_text(source)
    assert load_tokenizer(folder).chat_template.render(TURNS) == "Who is wise?"
    with pytest.raises(WgradError, match="has no chat template.*instruct variant"):
        load_tokenizer(make_tokenizer("c", chat_template=None)).chat_template  # noqa: B018


def test_what_templates_use() -> None:
    source = (
        "{%- for m in messages %}\n"
        "    {%- if loop.index0 == 1 %}\n        {%- break %}\n    {%- endif %}\n"
        "    {{- bos_token + (m | tojson) }}\n"
        "{%- endfor %}\n"
        "{{- strftime_now('%Y') }}{% if tools %}tools{% endif %}"
        "{% set ns = namespace(x=1) %}{% set ns.x = 2 %}{{ ns.x }}"
    )
    text = ChatTemplate(source, {"bos_token": "<s>"}).render([{"role": "user", "content": "<é>"}] * 2)
    assert text == '<s>{"role": "user", "content": "<é>"}' + str(datetime.now().year) + "2"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "refuses these messages: roles must alternate"),
        ("{{ messages[9]['content'] + 1 }}", "refuses these messages"),
        ("{{ messages[0]['content'] + 1 }}", "fails on these messages: TypeError"),
        ("{{ messages.append(1) }}", "refuses these messages"),  # the sandbox
        ("{{ ''.__class__.__mro__ }}", "refuses these messages"),
    ],
)
def test_a_template_that_refuses(source: str, words: str) -> None:
    with pytest.raises(WgradError, match=words):
        ChatTemplate(source, {}).render(TURNS)


def test_a_template_that_does_not_compile() -> None:
    with pytest.raises(WgradError, match="does not compile"):
        ChatTemplate("{% for %}", {})


def spoken(template: ChatTemplate, learn: list[int]) -> tuple[str, list[str]]:
    text, spans = template.render_with_spans(TURNS, learn)
    assert text == template.render(TURNS)
    return text, [text[a:b] for a, b in spans]


def test_spans_by_prefixes(make_tokenizer) -> None:
    template = load_tokenizer(make_tokenizer()).chat_template
    assert spoken(template, [1, 3])[1] == ["He that héareth.<|im_end|>\n", "None.<|im_end|>\n"]
    assert spoken(template, [3])[1] == ["None.<|im_end|>\n"]


def test_spans_by_generation_blocks() -> None:
    source = (
        "{% for m in messages %}{{ m['role'] }}: {% if m['role'] == 'assistant' %}"
        "{% generation %}{{ m['content'] }}!{% endgeneration %}{% else %}{{ m['content'] }}{% endif %} {% endfor %}"
    )
    text, parts = spoken(ChatTemplate(source, {}), [1, 3])
    assert parts == ["He that héareth.!", "None.!"]
    assert text.startswith("user: Who is wise? assistant: He")
    assert spoken(ChatTemplate(source, {}), [3])[1] == ["None.!"]


def test_a_template_that_changes_earlier_turns() -> None:
    source = (
        "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% if loop.last and m['role'] == 'assistant' %}"
        "(thought){% endif %}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    template = ChatTemplate(source, {})
    assert spoken(template, [3])[1] == ["None.(thought)"]
    with pytest.raises(WgradError, match="renders turn 2 differently.*--loss-on all"):
        template.render_with_spans(TURNS, [1])


def test_chat_ids_hold_no_second_bos(make_tokenizer) -> None:
    source = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    tokenizer = load_tokenizer(make_tokenizer(bos_in_json=True, chat_template=source))
    assert tokenizer.encode_chat(TURNS).count(0) == 1
