"""Tokenizers, chat templates and labels against transformers on the same files."""

from __future__ import annotations

import numpy as np
import pytest

from tests.tools import oracle_package
from tests.train.tokenizer_oracle import once
from wgrad.train.data.data import load_data
from wgrad.train.data.packing import IGNORE_INDEX, make_batch
from wgrad.train.data.tokenizer import load_tokenizer
from wgrad.train.options.finetune_config import RunOptions

transformers = oracle_package("transformers")

pytestmark = pytest.mark.oracle

TEXTS = [
    "A wise man will hear",
    " leading and trailing ",
    "naïve 知恵 → 🜁",
    "line\n\nline\ttab",
    "<s>written out</s>",
    "x",
]
TURNS = [
    {"role": "system", "content": "Be wise."},
    {"role": "user", "content": "  Who is wise?\n"},
    {"role": "assistant", "content": "He that héareth. <b>"},
    {"role": "user", "content": "Who else?"},
    {"role": "assistant", "content": "None.\n"},
]
# In the manner of the families that are supported, with the constructs that their own templates use.
TEMPLATES = {
    "chatml": (
        "{%- for message in messages %}\n"
        "    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}\n"
        "{%- endfor %}\n"
        "{%- if add_generation_prompt %}\n    {{- '<|im_start|>assistant\\n' }}\n{%- endif %}\n"
    ),
    "headers": (
        "{{- bos_token }}{%- set offset = 0 %}\n"
        "{%- if messages[0]['role'] == 'system' %}{%- set system = messages[0]['content']|trim %}"
        "{%- set messages = messages[1:] %}{%- else %}{%- set system = '' %}{%- endif %}\n"
        "{%- if tools is not none %}{{- tools | tojson(indent=4) }}{%- endif %}\n"
        "[system]\n{{ system }}\n"
        "{%- for m in messages %}\n{{- '[' + m['role'] + ']\\n\\n' + m['content'] | trim + eos_token }}{%- endfor %}\n"
        "{%- if add_generation_prompt %}{{- '[assistant]\\n\\n' }}{%- endif %}"
    ),
    "inst": (
        "{% set ns = namespace(system='') %}{{ bos_token }}"
        "{% for m in messages %}"
        "{% if m.role == 'system' %}{% set ns.system = m.content + '\n\n' %}{% continue %}{% endif %}"
        "{% if m.role == 'user' %}{{ '[INST] ' + ns.system + m.content + ' [/INST]' }}{% set ns.system = '' %}"
        "{% elif m.role == 'assistant' %}{% generation %}{{ ' ' + m.content + eos_token }}{% endgeneration %}"
        "{% else %}{{ raise_exception('unknown role ' + m.role) }}{% endif %}{% endfor %}"
    ),
}


def both(make_tokenizer, **options):
    folder = make_tokenizer(**options)
    return load_tokenizer(folder), transformers.AutoTokenizer.from_pretrained(str(folder))


@pytest.mark.parametrize(
    "options", [{}, {"bos_in_json": True}, {"add_bos_token": True}, {"bos_in_json": True, "add_bos_token": False}]
)
@pytest.mark.parametrize("text", TEXTS)
def test_ids_and_texts_are_those_of_transformers(make_tokenizer, options: dict, text: str) -> None:
    ours, theirs = both(make_tokenizer, **options)
    for special in (True, False):
        expected = theirs(text, add_special_tokens=special)["input_ids"]
        assert ours.encode(text, special) == (once(expected, ours) if special else expected)
    assert (ours.bos_id, ours.eos_id, ours.pad_id) == (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id)
    assert ours.vocab_size == len(theirs)
    ids = ours.encode(text)
    for skip in (True, False):
        expected = theirs.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
        assert ours.decode(ids, skip_special_tokens=skip) == expected


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("turns", [TURNS, TURNS[1:], TURNS[:2]], ids=len)
@pytest.mark.parametrize("prompt", [False, True])
def test_conversations_render_as_in_transformers(make_tokenizer, name: str, turns: list[dict], prompt: bool) -> None:
    ours, theirs = both(make_tokenizer, bos_in_json=True, chat_template=TEMPLATES[name])
    text = theirs.apply_chat_template(turns, tokenize=False, add_generation_prompt=prompt)
    assert ours.chat_template.render(turns, add_generation_prompt=prompt) == text
    ids = theirs.apply_chat_template(turns, add_generation_prompt=prompt, return_dict=True)["input_ids"]
    assert ours.encode_chat(turns, prompt) == ids


def test_generation_blocks_give_the_mask_of_transformers(make_tokenizer, write_lines) -> None:
    ours, theirs = both(make_tokenizer, chat_template=TEMPLATES["inst"])
    expected = theirs.apply_chat_template(TURNS, return_dict=True, return_assistant_tokens_mask=True)
    config = RunOptions(data=write_lines({"messages": TURNS}), eval_fraction=0)
    (document,) = load_data(config, ours).train
    assert document.ids.tolist() == expected["input_ids"]
    assert document.loss_mask.astype(int).tolist() == expected["assistant_masks"]
    assert 0 < document.num_targets < len(document)


@pytest.mark.parametrize("name", ["chatml", "headers"])
def test_prefixes_give_the_mask_of_generation_blocks(make_tokenizer, write_lines, name: str) -> None:
    """Rendering prefixes finds the same tokens as generation blocks in the same template."""
    blocks = {
        "chatml": (
            "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' }}"
            "{%- if message.role == 'assistant' %}"
            "{%- generation %}{{- message.content + '<|im_end|>' + '\\n' }}{%- endgeneration %}"
            "{%- else %}{{- message.content + '<|im_end|>' + '\\n' }}{%- endif %}{%- endfor %}"
        ),
        "headers": (
            "{{- bos_token }}[system]\n{{ messages[0].content }}\n"
            "{%- for m in messages[1:] %}{{- '[' + m['role'] + ']\\n\\n' }}"
            "{%- if m.role == 'assistant' %}{%- generation %}{{- m['content'] | trim + eos_token }}{%- endgeneration %}"
            "{%- else %}{{- m['content'] | trim + eos_token }}{%- endif %}{%- endfor %}"
        ),
    }
    ours = load_tokenizer(make_tokenizer("ours", chat_template=TEMPLATES[name]))
    theirs = transformers.AutoTokenizer.from_pretrained(str(make_tokenizer("theirs", chat_template=blocks[name])))
    expected = theirs.apply_chat_template(TURNS, return_dict=True, return_assistant_tokens_mask=True)
    config = RunOptions(data=write_lines({"messages": TURNS}), eval_fraction=0)
    (document,) = load_data(config, ours).train
    assert document.ids.tolist() == expected["input_ids"]
    assert document.loss_mask.astype(int).tolist() == expected["assistant_masks"]


def test_labels_are_those_that_transformers_shifts(make_tokenizer, write_lines) -> None:
    """transformers takes labels that are not shifted and shifts them inside the loss: ours are shifted already."""
    tokenizer = load_tokenizer(make_tokenizer(bos_in_json=True))
    config = RunOptions(data=write_lines({"prompt": "A wise", "completion": " man"}), eval_fraction=0, max_length=41)
    (document,) = load_data(config, tokenizer).train
    batch = make_batch([[document]], 1, 41, pad_id=2)
    labels = np.full(41, IGNORE_INDEX)
    labels[: len(document)] = np.where(document.loss_mask, document.ids, IGNORE_INDEX)
    assert batch.targets[0].tolist() == [*labels[1:].tolist(), IGNORE_INDEX]
