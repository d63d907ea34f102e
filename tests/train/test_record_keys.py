"""Keys of a record that carry a part of the question, say what is not learned, or are not read at all."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from wgrad.device.errors import WgradError
from wgrad.train.data.data import Dataset, load_data
from wgrad.train.data.json_text import MOST_VALUES, decode_json_text
from wgrad.train.data.record_documents import samples_of
from wgrad.train.data.samples import Sample
from wgrad.train.data.template_process import shared_process
from wgrad.train.data.tokenizer import Tokenizer, load_tokenizer
from wgrad.train.options.finetune_config import RunOptions

CALLS = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + (m.content or '') }}"
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }} {{ c.function.arguments | tojson }}]{% endfor %}"
    "{{ '<|im_end|>' + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
ASK = {"role": "user", "content": "Is it?"}
YES, NO = ({"role": "assistant", "content": text} for text in ("It is.", "No."))
SYSTEM = {"role": "system", "content": "Be terse."}


@pytest.fixture(scope="module")
def tokenizer(tokenizer_json: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tokenizer]:
    folder = tmp_path_factory.mktemp("tokenizer")
    (folder / "tokenizer.json").write_text(tokenizer_json)
    settings = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "chat_template": CALLS}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    yield load_tokenizer(folder)
    shared_process().close()


def samples(record: dict[str, Any], tokenizer: Tokenizer, objective: Any = "sft", **options: Any) -> list[Sample]:
    config = RunOptions(objective=objective, **options)
    return samples_of(json.dumps(record).encode(), "data.jsonl", 1, config, tokenizer)


def marked(record: dict[str, Any], tokenizer: Tokenizer, objective: str = "sft", **options: Any) -> list[str]:
    """The texts of a record, what is learned or compared of them in «»."""
    found = []
    for sample in samples(record, tokenizer, objective, **options):
        text = sample.text
        for begin, end in reversed(sample.spans):
            text = f"{text[:begin]}«{text[begin:end]}»{text[end:]}"
        found.append(text.replace("<|im_start|>", "<").replace("<|im_end|>\n", ">").replace("\n", ":"))
    return found


SAID = "<user:Is it?><assistant:«It is.>»"
TWO = "<user:Is it?><assistant:No.><user:Is it?><assistant:«It is.>»"


@pytest.mark.parametrize("flag", [{"weight": 0}, {"train": False}, {"loss": False}, {"masked": True}, {"loss": "0"}])
@pytest.mark.parametrize("form", ["messages", "conversations", "prompt"])
def test_a_turn_that_is_not_to_be_learned_is_read(flag: dict, form: str, tokenizer: Tokenizer) -> None:
    name = next(iter(flag))
    others = {} if name == "masked" else {name: 1}
    turns = [ASK, NO | flag, ASK, YES | others]
    record: dict[str, Any] = {"messages": turns}
    if form == "prompt":
        record = {"prompt": turns[:1], "completion": turns[1:]}
    if form == "conversations":
        names = {"user": "human", "assistant": "gpt"}
        told = [{"from": names[t["role"]], "value": t["content"], **t} for t in turns]
        record = {form: [{k: v for k, v in turn.items() if k not in ("role", "content")} for turn in told]}
    assert marked(record, tokenizer) == [TWO]
    (whole,) = marked(record, tokenizer, loss_on="all")
    assert whole == "«<user:Is it?><assistant:»No.>«<user:Is it?><assistant:It is.>»"


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"messages": [ASK, YES | {"weight": 0.5}]}, "'weight' of turn 2 must be 0 or 1, true or false; got 0.5"),
        ({"messages": [ASK, YES | {"train": "no"}]}, "'train' of turn 2 must be 0 or 1, true or false; got 'no'"),
        ({"messages": [ASK | {"train": True}, YES]}, "'train' of turn 1 asks for a turn of role 'user'"),
        ({"messages": [ASK, YES | {"weight": 0}]}, "every turn of the assistant says that it is not trained on"),
        ({"messages": [ASK, YES | {"train_detail": [{"begin_offset": 0}]}]}, "'train_detail' of turn 2 is not read"),
        ({"messages": [ASK, YES], "weight": 0}, "'weight' is 0, and lines have no weights: remove the line"),
        ({"text": "a b", "weight": 0.3}, "'weight' is 0.3, and lines have no weights"),
        ({"prompt": "a", "completion": " b", "train": False}, "'train' is False, and lines"),
        ({"messages": [ASK, YES], "mask": "gpt"}, "'mask' is 'gpt', and lines have no weights"),
        ({"messages": [ASK, YES], "kto_tag": False}, "'kto_tag' says whether the answer is any good"),
        ({"instruction": "a", "output": "b", "label": False}, "'label' says whether the answer is any good"),
        ({"prompt": "Add.", "completion": " 3", "input": "1"}, "'input' belongs to the question, .*--columns input="),
        ({"prompt": "Add.", "completion": " 3", "system": "Be terse."}, "'system' belongs to the question"),
        ({"text": "Hear.", "instruction": "Say it."}, "'instruction' belongs to the question"),
        ({"messages": [ASK, YES], "images": ["a.png"]}, "'images' belongs to the question"),
        ({"messages": [ASK, YES], "question": "What else?"}, "'question' belongs to the question"),
        ({"messages": [SYSTEM, ASK, YES], "system": "Rhyme."}, "'system' and the first turn are system prompts that"),
        ({"question": "a", "choices": ["b", "c"], "answer": "b"}, "'choices' belongs to the question"),
    ],
)
def test_a_key_that_would_change_what_is_learned_is_refused(record: dict, words: str, tokenizer: Tokenizer) -> None:
    with pytest.raises(WgradError, match=f"data.jsonl:1: .*{words}") as caught:
        samples(record, tokenizer)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("record", "wanted"),
    [
        ({"messages": [ASK, YES], "system": SYSTEM["content"]}, f"<system:Be terse.>{SAID}"),
        ({"messages": [SYSTEM, ASK, YES], "system": SYSTEM["content"]}, f"<system:Be terse.>{SAID}"),
        ({"messages": [ASK, YES], "prompt": "Is it?"}, SAID),
        ({"messages": [ASK, YES], "system": "", "images": [], "weight": None}, SAID),
        ({"prompt": [ASK], "completion": [YES], "system": "Be."}, f"<system:Be.>{SAID}"),
        ({"system_prompt": "Be.", "question": "Is it?", "response": "It is."}, f"<system:Be.>{SAID}"),
        ({"instruction": "Is", "context": "it?", "response": "It is."}, SAID.replace("Is it", "Is::it")),
        ({"conversations": [{"role": "human", "content": "Is it?"}, YES]}, SAID),
        ({"messages": [ASK, YES], "mask": "User", "loss": 2.31}, SAID),
    ],
)
def test_known_keys_are_put_in_their_place(record: dict, wanted: str, tokenizer: Tokenizer) -> None:
    assert marked(record, tokenizer) == [wanted]


CALL = {"name": "add", "arguments": {"a": 1, "b": [2]}}
ADDED = '<user:Is it?><assistant:«[add {"a": 1, "b": [2]}]>»<tool:3><assistant:«It is.>»'


@pytest.mark.parametrize(
    "turns",
    [
        [("human", "Is it?"), ("function_call", json.dumps(CALL)), ("observation", "3"), ("gpt", "It is.")],
        [("human", "Is it?"), ("tool_call", json.dumps([CALL])), ("tool_response", "3"), ("gpt", "It is.")],
        [
            ("human", "Is it?"),
            ("function-call", json.dumps({"name": "add", "arguments": json.dumps(CALL["arguments"])})),
            ("function_response", "3"),
            ("chatgpt", "It is."),
        ],
        [("user", "Is it?"), ("function_call", json.dumps({"function": CALL})), ("tool", "3"), ("assistant", "It is.")],
    ],
)
@pytest.mark.parametrize("kind", ["ShareGPT", "messages"])
def test_function_calls_are_rendered_as_tool_calls(turns: list, kind: str, tokenizer: Tokenizer) -> None:
    record: dict[str, Any] = {"conversations": [{"from": role, "value": text} for role, text in turns], "tools": "[]"}
    if kind == "messages":  # OpenAI's older files have the call as an object
        text = json.dumps(CALL["arguments"])
        call = {"role": "assistant", "content": None, "function_call": {"name": "add", "arguments": text}}
        record = {"messages": [ASK, call, {"role": "tool", "content": "3"}, YES], "functions": [{"name": "add"}]}
    assert marked(record, tokenizer) == [ADDED]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("add(1)", "the function call of turn 2 is text that is not valid JSON"),
        ("[]", "is an empty list: name a function"),
        ('{"arguments": {}}', "must be an object with 'name' and 'arguments'; got an object"),
        ('{"name": "add", "arguments": [1]}', "'arguments' of the function call of turn 2 must be an object"),
    ],
)
def test_wrong_function_calls_are_refused(value: str, words: str, tokenizer: Tokenizer) -> None:
    turns = [{"from": "human", "value": "a"}, {"from": "function_call", "value": value}]
    with pytest.raises(WgradError, match=words):
        samples({"conversations": turns}, tokenizer)


HEAD = "<user:Is it?><assistant:"
CHAT = [HEAD + "«It is.>»", HEAD + "«No.>»"]
WITH_SYSTEM = ["<system:Be terse.>" + text for text in CHAT]


@pytest.mark.parametrize(
    ("record", "wanted"),
    [
        ({"question": "Is it?", "chosen": "It is.", "rejected": "No."}, CHAT),
        ({"instruction": "Is it?", "input": "", "chosen": "It is.", "rejected": "No."}, CHAT),
        ({"system": "Be terse.", "question": "Is it?", "chosen": "It is.", "rejected": "No."}, WITH_SYSTEM),
        ({"system": "Be terse.", "chosen": [ASK, YES], "rejected": [ASK, NO]}, WITH_SYSTEM),
        ({"prompt": "Is it?", "chosen": [ASK, YES], "rejected": [ASK, NO]}, CHAT),
        ({"prompt": "Is it?", "chosen": [YES], "rejected": [NO]}, CHAT),
        ({"messages": [ASK], "chosen": YES, "rejected": NO}, CHAT),
        (
            {
                "conversations": [{"from": "human", "value": "Is it?"}],
                "chosen": {"from": "gpt", "value": "It is."},
                "rejected": {"from": "gpt", "value": "No."},
            },
            CHAT,
        ),
        ({"input": {"messages": [ASK], "tools": []}, "preferred_output": [YES], "non_preferred_output": [NO]}, CHAT),
        ({"question": "Q: Is it?", "chosen": "Q: Is it? So.", "rejected": "Q: Is it? No."}, None),
    ],
)
def test_pairs_are_read_by_other_names_of_the_question(record: dict, wanted: list | None, tokenizer: Tokenizer) -> None:
    found = marked(record, tokenizer, "dpo")
    assert found == (wanted or ["Q: Is it?« So.»", "Q: Is it?« No.»"])


@pytest.mark.parametrize(
    "record",
    [
        {"instruction": "Is it?", "output": "It is.", "kto_tag": True},
        {"messages": [ASK, YES], "kto_tag": "true"},
        {"conversations": [{"from": "human", "value": "Is it?"}, {"from": "gpt", "value": "It is."}], "label": 1},
        {"prompt": [ASK], "completion": [YES], "kto_tag": 1, "label": "true"},
    ],
)
def test_labels_by_other_names(record: dict, tokenizer: Tokenizer) -> None:
    assert marked(record, tokenizer, "kto") == CHAT[:1] and samples(record, tokenizer, "kto")[0].label == 1


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"prompt": "Is it?", "system": "Be terse.", "chosen": " Yes.", "rejected": " No."}, "'system' belongs to the"),
        ({"question": "Is it?", "prompt": "Say.", "chosen": " Yes.", "rejected": " No."}, "'question' belongs to the"),
        ({"prompt": "x", "chosen": [ASK, YES], "rejected": [ASK, NO]}, "'prompt' belongs to the question"),
        ({"prompt": [ASK], "chosen": [YES], "rejected": [NO | {"weight": 0}]}, "turn 2 says that it is not trained on"),
    ],
)
def test_pairs_with_a_key_that_would_change_them_are_refused(record: dict, words: str, tokenizer: Tokenizer) -> None:
    with pytest.raises(WgradError, match=words):
        samples(record, tokenizer, "dpo")


def test_keys_that_are_not_read_are_counted(tokenizer: Tokenizer, write_lines: Any) -> None:
    told = [{"from": "human", "value": "a", "id": 1}, {"from": "gpt", "value": "b"}]
    lines = [{"text": "Hear.", "id": i, **({"url": "x"} if i else {})} for i in range(3)]

    def load(*records: dict[str, Any]) -> Dataset:
        return load_data(RunOptions(data=(write_lines(*records),), eval_fraction=0), tokenizer)

    data = load(*lines, {"conversations": told, "prompt": ""})
    wanted = "has keys that are not read: 'id' (3 lines), 'url' (2 lines), 'conversations[].id' (1 line)"
    assert data.remarks[-1].endswith(wanted)
    many = [{"text": "Hear.", **{f"k{i}": 1 for i in range(40)}}]
    assert load(*many).remarks[0].endswith("'k11' (1 line) and 28 more")


@pytest.mark.parametrize("objective", ["sft", "dpo"])
def test_unread_keys_of_turns_are_reported(objective: Any, tokenizer: Tokenizer, make_tokenizer: Any) -> None:
    """The template may name further ones, such as Granite's `documents` or a `channel`."""
    yes: dict[str, Any] = YES | {"ignore": True, "channel": "final", "refusal": None, "tool_calls": [], "reasoning": ""}
    record = {"messages": [ASK, yes]} if objective == "sft" else {"prompt": [ASK], "chosen": [yes], "rejected": [NO]}
    part = "messages" if objective == "sft" else "chosen"
    (first, *_) = samples(record, tokenizer, objective)
    assert first.unread == (f"{part}[].ignore", f"{part}[].channel")
    reads = load_tokenizer(make_tokenizer(chat_template=CALLS.replace("m.content or", "m.content or m.channel or")))
    (first, *_) = samples(record, reads, objective)
    assert first.unread == (f"{part}[].ignore",)


@pytest.mark.parametrize("objective", ["sft", "dpo"])
def test_variables_that_the_template_lacks_are_reported(
    objective: Any, tokenizer: Tokenizer, make_tokenizer: Any
) -> None:
    """They are reported, because the model learns to answer without them."""
    turns = {"messages": [ASK, YES]} if objective == "sft" else {"prompt": [ASK], "chosen": [YES], "rejected": [NO]}
    record = {**turns, "documents": [{"text": "a"}], "chat_template_kwargs": {"think": False, "tone": "dry"}}
    offered = {"tools": [{"type": "function", "function": {"name": "f"}}], "functions": [{"name": "f"}]}
    lacking = ("documents", "chat_template_kwargs.think", "chat_template_kwargs.tone")
    reads = load_tokenizer(make_tokenizer(chat_template=CALLS + "{{ documents }}{{ tone }}{{ tools }}"))
    for name, part in offered.items():
        assert samples({**record, name: part}, tokenizer, objective)[0].unread == (name, *lacking)
        assert samples({**record, name: part}, reads, objective)[0].unread == ("chat_template_kwargs.think",)
        assert samples({**turns, name: []}, tokenizer, objective)[0].unread == ()


def test_a_record_of_very_many_values_is_refused_before_they_are_made() -> None:
    few = b'{"a": ' + json.dumps("[{,:" * MOST_VALUES).encode() + b"}"
    assert len(decode_json_text(few)["a"]) == 4 * MOST_VALUES
    with pytest.raises(ValueError, match="more than 500,000 values in one record"):
        decode_json_text(b"[" + b"{}," * MOST_VALUES + b"{}]")
