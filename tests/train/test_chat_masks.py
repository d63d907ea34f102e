"""Loss masks: small templates in the manner of real ones that write a turn in an unusual place, and random ones.

The right answer is known from how each template is put together; `test_oracle_chat.py` compares with TRL's own.
"""

from __future__ import annotations

import random

import pytest

from wgrad.train.data.chat import ChatTemplate, Conversation, MessagesRefused

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
TURNS = [
    {"role": "user", "content": "Who is wise?"},
    {"role": "assistant", "content": "He that hears."},
    {"role": "user", "content": "And who else?"},
    {"role": "assistant", "content": "None."},
]
THOUGHT = [TURNS[0], {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nHe."}, *TURNS[2:]]

# The last turn of the assistant is written behind the loop.
NEMOTRON = (
    "{% set ns = namespace(last='') %}{% if messages[-1].role == 'assistant' %}{% set ns.last = messages[-1].content %}"
    "{% set messages = messages[:-1] %}{% endif %}<S>\n\n{% for m in messages %}"
    "{% if m.role == 'user' %}{{ '<U>' + m.content + '\n' }}"
    "{% elif m.role == 'assistant' %}{{ '<A>' + m.content.split('</think>')[-1].strip() + '\n<E>\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<A><think>\n' }}"
    "{% elif ns.last %}{{ '<A><think>\n' + ns.last + '\n<E>\n' }}{% endif %}"
)
# The header begins with whitespace, and the prompt has no space behind it.
CHATQA = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'user' %}{{ '\n\nUser: ' + m.content }}{% else %}{{ '\n\nAssistant: ' + m.content }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '\n\nAssistant:' }}{% endif %}"
)
STARLING = (
    "{{ bos_token }}{% for m in messages %}{{ ' GPT4 Correct ' + m.role.title() + ': ' + m.content + '<E>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ ' GPT4 Correct Assistant:' }}{% endif %}"
)
# The next turn writes what ends this one.
APERTUS = (
    "{% set ns = namespace(open=false) %}{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'user' %}{% if ns.open %}<E>{% set ns.open = false %}{% endif %}{{ '<U>' + m.content + '</U>' }}"
    "{% elif m.role == 'assistant' %}{% if not ns.open %}<A>{% set ns.open = true %}{% endif %}{{ m.content }}"
    "{% endif %}{% endfor %}{% if ns.open %}<E>{% endif %}{% if add_generation_prompt %}<A>{% endif %}"
)

# The prompt stands behind every conversation, as in Command A's templates for tools and documents.
COMMAND = (
    "<S>{% for m in messages %}{% if m.role == 'user' %}{{ '\n<T><U>' + m.content + '<E>' }}"
    "{% else %}{{ '\n<T><A><R>' + m.content + '</R><E>' }}{% endif %}{% endfor %}<T><A>"
)

# The last turn is written differently without a prompt, as in gpt-oss's template; the prompt opens a thought, or not.
RETURN = (
    "{% for m in messages %}<{{ m.role }}>{% if loop.last and m.thinking and not add_generation_prompt %}"
    "{{ '(' + m.thinking + ')' }}{% endif %}{{ m.content }}"
    "{{ '<R>' if loop.last and m.role == 'assistant' and not add_generation_prompt else '<E>' }}PROMPT{% endfor %}"
)
IN_LOOP = RETURN.replace("PROMPT", "{{ '<assistant>OPEN' if loop.last and add_generation_prompt }}")
BEHIND = RETURN.replace("PROMPT", "") + "{{ '<assistant>OPEN' if add_generation_prompt }}"


def spoken(source: str, turns=TURNS, learn=None) -> list[str]:
    learn = [i for i, m in enumerate(turns) if m["role"] == "assistant"] if learn is None else learn
    text, spans = ChatTemplate(source, SPECIAL).render_with_spans(Conversation(turns), learn)
    return [text[a:b] for a, b in spans]


@pytest.mark.parametrize(
    ("source", "turns", "said"),
    [
        (NEMOTRON, TURNS, ["He that hears.\n<E>\n", "None.\n<E>\n"]),
        (NEMOTRON, TURNS[:2], ["He that hears.\n<E>\n"]),
        (NEMOTRON, TURNS[:3], ["He that hears.\n<E>\n"]),
        (NEMOTRON, THOUGHT, ["He.\n<E>\n", "None.\n<E>\n"]),
        (NEMOTRON, THOUGHT[:2], ["<think>\n<think>\nHm.\n</think>\n\nHe.\n<E>\n"]),
        (CHATQA, TURNS, [" He that hears.", " None."]),
        (CHATQA, TURNS[1:], [" He that hears.", " None."]),
        (STARLING, TURNS, [" He that hears.<E>", " None.<E>"]),
        (APERTUS, TURNS, ["He that hears.<E>", "None.<E>"]),
        (APERTUS, TURNS[1:], ["He that hears.<E>", "None.<E>"]),
        (APERTUS, TURNS[:3], ["He that hears.<E>"]),
        (COMMAND, TURNS, ["<R>He that hears.</R><E>", "<R>None.</R><E>"]),
        (COMMAND, TURNS[1:], ["<R>He that hears.</R><E>", "<R>None.</R><E>"]),
        (COMMAND, TURNS[:3], ["<R>He that hears.</R><E>"]),
    ],
)
@pytest.mark.parametrize("rule", ["prefixes", "loop"])
def test_answers_in_unusual_places_are_found(rule: str, source: str, turns, said: list[str]) -> None:
    if rule == "loop":  # no text up to a turn is a prefix of the whole
        source = "{{ messages|length }}" + source
    found = spoken(source, turns)
    if rule == "loop" and source.endswith(NEMOTRON):  # a prompt's thought is learned there
        found[-1] = found[-1].removeprefix("<think>\n") if "</think>" not in found[-1] else found[-1]
    assert found == said
    assert spoken(source, turns, []) == []


def test_an_answer_that_the_loop_writes_while_at_the_question_is_told_by_prefixes() -> None:
    pairs = (
        "{% for i in range(0, messages|length, 2) %}{{ '<U>' + messages[i].content + '<A>' }}"
        "{% if i + 1 < messages|length %}{{ messages[i + 1].content + '<E>' }}{% endif %}{% endfor %}"
    )
    assert spoken(pairs) == ["He that hears.<E>", "None.<E>"]
    with pytest.raises(MessagesRefused, match="renders turn 2 differently"):
        spoken("{{ messages|length }}" + pairs)
    # The answer is no part of what opens the conversation, though the loop is at that while it writes both.
    opened = [{"role": "assistant", "content": said} for said in ("Hear.", "Be wise.")]
    assert spoken(pairs, [*opened, *TURNS]) == ["<U>Hear.<A>", "Be wise.<E>", "He that hears.<E>", "None.<E>"]
    with pytest.raises(MessagesRefused, match="differently"):  # too many turns to render the text up to each
        spoken(pairs, TURNS * 60)


def test_a_loop_that_tells_another_turn_wrongly_is_not_believed_in_a_long_conversation() -> None:
    """The next turn writes what ends this one, with a number that is not that of the short conversations tried."""
    numbered = APERTUS.replace("{% if ns.open %}<E>{% set", "{% if ns.open %}{{ '<E%d>' % loop.index0 }}{% set")
    numbered = numbered.replace(
        "{% if ns.open %}<E>{% endif %}", "{% if ns.open %}{{ '<E%d>' % messages|length }}{% endif %}"
    )
    assert spoken(numbered) == ["He that hears.<E2>", "None.<E4>"]
    with pytest.raises(MessagesRefused, match="differently"):
        spoken(numbered, TURNS * 60)


def test_a_turn_of_many_is_told_as_the_others_are() -> None:
    """Only some turns of a long conversation get renderings of their own."""
    many = TURNS * 60
    assert spoken(APERTUS, many) == ["He that hears.<E>", "None.<E>"] * 60


# As Gemma 4's: the turn that calls a tool is written with the answers of tools that follow it, of a list without the
# system prompt.
CALLS = (
    "{{ messages|length }}{% set rest = messages[1:] if messages[0].role == 'system' else messages %}"
    "{% for m in rest %}{% if m.role != 'tool' %}<{{ m.role }}>{% for c in m.tool_calls or [] %}[{{ c.function.name }}]"
    "{% endfor %}{% if m.tool_calls %}{% for k in range(loop.index0 + 1, rest|length) %}{% if rest[k].role == 'tool' %}"
    "{% set follow = rest[k] %}(R {{ follow.content }}){% endif %}{% endfor %}{% endif %}"
    "{{ m.content }}{% if m.content %}<E>{% endif %}{% endif %}{% endfor %}"
    "{{ '<assistant>' if add_generation_prompt }}"
)


@pytest.mark.parametrize("said", ["", "Let me see."])
def test_answers_of_tools_within_the_turn_that_calls_them_do_not_count(said: str) -> None:
    turns = [
        TURNS[0],
        {"role": "assistant", "content": said, "tool_calls": [{"function": {"name": "add"}}]},
        {"role": "tool", "content": "4 of them"},
        TURNS[3],
    ]
    answer = [f"{said}<E>"] if said else []
    for messages in (turns, [{"role": "system", "content": "Be wise."}, *turns]):
        assert spoken(CALLS, messages) == ["[add]", *answer, "None.<E>"]


def test_a_tag_that_a_turn_closes_where_the_prompt_opens_it_counts_as_a_whole() -> None:
    """As GLM-4.7's: an earlier turn begins with </think>, where a prompt has <think>."""
    source = (
        "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}"
        "{{ '<think></think>' if loop.last else '</think>' }}{% endif %}{{ m.content }}"
        "{% endfor %}{% if add_generation_prompt %}<assistant><think>{% endif %}"
    )
    assert spoken(source) == ["</think>He that hears.", "<think></think>None."]


@pytest.mark.parametrize("opened", ["", "<think>"])
@pytest.mark.parametrize("source", [IN_LOOP, BEHIND])
def test_a_tag_within_the_turn_before_is_no_thought_of_the_prompt(source: str, opened: str) -> None:
    """Without a prompt, the template writes the turn before in another way."""
    said = ["<think>Hm.</think>Hear.", f"{opened}Wise.</think>Be wise.", "None."]
    answers = [{"role": "assistant", "content": text, "thinking": "So"} for text in said]
    source = source.replace("OPEN", opened)
    found = spoken(source, [TURNS[0], *answers[:2], TURNS[2], answers[2]])
    assert found == [f"{said[0]}<E>", f"{said[1]}<E>", f"(So){said[2]}<R>"]
    asked = {"role": "user", "content": "What is <think>Hm.</think>?"}
    assert spoken(source, [asked, *answers[:2]]) == [f"{said[0]}<E>", f"(So){said[1]}<R>"]


def test_a_prompt_that_is_always_written_may_open_a_thought() -> None:
    source = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<E>{% endfor %}<assistant><think>"
    for said in (["Hear.", "Be wise."], ["<think>Hm.</think>Hear.", "<think>So.</think>Be wise."]):
        answers = [{"role": "assistant", "content": text} for text in said]
        assert spoken(source, [TURNS[0], *answers, TURNS[2]]) == [f"{text}<E>" for text in said]
        assert spoken(source, [TURNS[0], *answers]) == [f"{text}<E>" for text in said]


@pytest.mark.parametrize(
    ("prompt", "header"),
    [("END<A>\n", "<A>\n"), ("END<A>\n<think>\n", "<A>\n"), (" END A:", "A:"), ("END<A>", "")],
)
def test_a_prompt_within_the_loop_may_end_the_question_in_another_way(prompt: str, header: str) -> None:
    source = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ '<U>' + m.content }}"
        f"{{% if loop.last and add_generation_prompt %}}{prompt}{{% else %}}<STOP>{{% endif %}}"
        f"{{% else %}}{header}{{{{ m.content + '<E>' }}}}{{% endif %}}{{% endfor %}}"
    )
    assert spoken(source) == ["He that hears.<E>", "None.<E>"]


def test_a_part_that_another_turn_has_too_is_left_out_all_the_same() -> None:
    source = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content if loop.last else m.content.split('</think>')[-1] }}"
        "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    thought = "<think>Hm, let me see.</think>"
    turns = [{**turn, "content": thought + turn["content"]} if turn["role"] == "assistant" else turn for turn in TURNS]
    lost: list[str] = []
    ChatTemplate(source, SPECIAL).render_with_spans(Conversation(turns), {1, 3}, lost)
    assert lost == [thought]


def random_template(choose: random.Random) -> tuple[str, str, str, str]:
    """Return a random template, the header of a turn, the part of it in a prompt, and the end of a turn."""
    blank = choose.choice(["", "", "\n", " ", "\n\n"])
    name = choose.choice(["<A>", "Assistant:", "### Answer", "<|im_start|>assistant", "[A]"])
    gap = choose.choice(["", "\n", " ", "\n\n"])
    header = blank + name + gap
    prompt = choose.choice([header, header.rstrip()]) if header.strip() else header
    end = choose.choice(["<E>", "</s>", "<E>\n", "\n", ""])
    first = choose.choice(["", "{{ bos_token }}", "Be wise.\n"])
    where = choose.choice(["loop", "next turn", "last outside"])
    user = choose.choice(["<U>", blank + "User: ", "### Question\n"])
    user_end = choose.choice(["", "</U>", "\n"])
    q = repr
    each = f"{{{{ {q(user)} + m.content + {q(user_end)} }}}}"
    inner = f"{{{{ {q(header)} + m.content + {q(end)} }}}}"
    ask = f"{{% if add_generation_prompt %}}{{{{ {q(prompt)} }}}}{{% endif %}}"
    if where == "loop":
        source = f"{first}{{% for m in messages %}}{{% if m.role == 'user' %}}{each}{{% else %}}{inner}{{% endif %}}"
        source += "{% endfor %}"
    elif where == "next turn":
        source = (
            f"{first}{{% for m in messages %}}{{% if m.role == 'user' %}}{{% if not loop.first %}}{{{{ {q(end)} }}}}"
            f"{{% endif %}}{each}{{% else %}}{{{{ {q(header)} + m.content }}}}{{% endif %}}{{% endfor %}}"
            f"{{% if messages[-1].role != 'user' %}}{{{{ {q(end)} }}}}{{% endif %}}"
        )
    else:
        source = (
            f"{first}{{% set all = messages %}}{{% if messages[-1].role != 'user' %}}{{% set all = messages[:-1] %}}"
            f"{{% endif %}}{{% for m in all %}}{{% if m.role == 'user' %}}{each}{{% else %}}{inner}{{% endif %}}"
            f"{{% endfor %}}{{% if messages[-1].role != 'user' %}}{{% set m = messages[-1] %}}{inner}{{% endif %}}"
        )
    return source + ask, header, prompt, end


@pytest.mark.parametrize("seed", range(60))
def test_answers_of_random_templates_are_found(seed: int) -> None:
    choose = random.Random(seed)
    source, header, prompt, end = random_template(choose)
    said = [header.removeprefix(prompt) + turn["content"] + end for turn in TURNS[1::2]]
    assert spoken(source) == [piece.rstrip(" ") for piece in said], source
    assert spoken(source, TURNS[:2]) == [said[0].rstrip(" ")], source
    # By the loop, where no text up to a turn is a prefix of the whole.
    assert spoken("{{ messages|length }}" + source) == [piece.rstrip(" ") for piece in said], source
