"""Training data: every kind of file, what is learned of it, and every way in which it can be wrong."""

from __future__ import annotations

import datetime
from pathlib import Path

import numpy as np
import pytest

from tests.train.test_tokenizer import with_a_token_beyond
from wgrad.device.errors import WgradError
from wgrad.train.data.data import Dataset, load_data
from wgrad.train.data.packing import Document
from wgrad.train.data.tokenizer import Tokenizer, load_tokenizer
from wgrad.train.options.finetune_config import RunOptions

EOS = 1


def load(path: str, tokenizer: Tokenizer, **options) -> Dataset:
    return load_data(RunOptions(data=(path,), **({"eval_fraction": 0, "max_length": 200} | options)), tokenizer)


def learned(document: Document, tokenizer: Tokenizer) -> str:
    """The text of the tokens that count (bos, the first, never does)."""
    return tokenizer.decode(document.ids[1:][document.loss_mask[1:]], skip_special_tokens=False)


def test_columns_that_no_record_has_are_told(make_tokenizer, write_lines) -> None:
    tokenizer = load_tokenizer(make_tokenizer())
    path = write_lines({"prompt": "A wise", "completion": " man"}, {"prompt": "A", "completion": " man"})
    (told,) = load(path, tokenizer, columns=("prompt=questoin",)).remarks
    assert told.endswith("no record has 'questoin' of --columns; its own 'prompt' is read")
    some = write_lines({"prompt": "A wise", "completion": " man"}, {"asked": "A", "completion": " man"})
    assert load(some, tokenizer, columns=("prompt=asked",)).remarks == ()


def test_a_token_that_the_model_lacks_makes_the_line_invalid(make_tokenizer, write_lines, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(with_a_token_beyond(make_tokenizer()))
    tokenizer.limit(400)
    path = write_lines({"text": "A wise man"}, {"text": "A wise <image>"}, {"text": "A wise man"})
    data = load(path, tokenizer)
    assert [document.source[-2:] for document in data.train] == [":1", ":3"] and data.bad_lines == 1
    assert "data.jsonl:2: the text has the token '<image>' (id 400), but" in data.remarks[-1]
    with pytest.raises(WgradError, match=r"data.jsonl:2: the text has the token '<image>'"):
        load(path, tokenizer, on_bad_line="stop")
    (tmp_path / "book.txt").write_text("A wise <image> man")
    with pytest.raises(WgradError, match=r"--data: .*book.txt: the text has the token '<image>'"):
        load(str(tmp_path / "book.txt"), tokenizer)


# ---- what is learned ----------------------------------------------------------------------------
def test_text_is_trained_on_whole(tokenizer: Tokenizer, write_lines) -> None:
    (document,) = load(write_lines({"text": "A wisé man\n will hear"}), tokenizer).train
    assert tokenizer.decode(document.ids, skip_special_tokens=False) == "<s>A wisé man\n will hear</s>"
    assert learned(document, tokenizer) == "A wisé man\n will hear</s>"
    assert document.ids.dtype == np.int32 and document.source.endswith("data.jsonl:1")


@pytest.mark.parametrize(
    ("loss_on", "expected"), [("completion", " will héar</s>"), ("all", "A wise man will héar</s>")]
)
def test_loss_on_chooses_between_prompt_and_completion(
    tokenizer: Tokenizer, write_lines, loss_on: str, expected: str
) -> None:
    path = write_lines({"prompt": "A wise man", "completion": " will héar"})
    (document,) = load(path, tokenizer, loss_on=loss_on).train
    assert learned(document, tokenizer) == expected


def test_a_token_across_the_border_belongs_to_the_completion(tokenizer: Tokenizer, write_lines) -> None:
    assert len(tokenizer.encode(" the", add_special_tokens=False)) == 1
    (document,) = load(write_lines({"prompt": "Hear t", "completion": "he wise."}), tokenizer).train
    assert learned(document, tokenizer) == " the wise.</s>"


def test_an_empty_prompt_is_text(tokenizer: Tokenizer, write_lines) -> None:
    (document,) = load(write_lines({"prompt": "", "completion": "Hear."}), tokenizer).train
    assert learned(document, tokenizer) == "Hear.</s>"


TURNS = [
    {"role": "system", "content": "Be wise."},
    {"role": "user", "content": "Who is?"},
    {"role": "assistant", "content": "He that héareth."},
    {"role": "user", "content": "Who else?"},
    {"role": "assistant", "content": "None."},
]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ({"messages": TURNS}, "He that héareth.<|im_end|>\nNone.<|im_end|>\n"),
        ({"messages": TURNS[:3]}, "He that héareth.<|im_end|>\n"),
        ({"prompt": TURNS[:4], "completion": TURNS[4:]}, "None.<|im_end|>\n"),
    ],
)
def test_answers_of_a_conversation_are_trained_on(tokenizer: Tokenizer, write_lines, line: dict, expected: str) -> None:
    (document,) = load(write_lines(line), tokenizer).train
    assert learned(document, tokenizer) == expected
    turns = line.get("messages") or line["prompt"] + line["completion"]
    assert document.ids.tolist() == tokenizer.encode_chat(turns, add_generation_prompt=False)


def test_loss_on_all_counts_every_token_of_a_conversation(tokenizer: Tokenizer, write_lines) -> None:
    (document,) = load(write_lines({"messages": TURNS}), tokenizer, loss_on="all").train
    assert document.loss_mask.all()


def test_kinds_may_be_mixed_and_the_end_may_be_blank(tokenizer: Tokenizer, write_lines) -> None:
    path = write_lines({"text": "Hear\u2028me."}, {"prompt": "a", "completion": "b"}, {"messages": TURNS}, "", " ", "")
    data = load(path, tokenizer)
    assert [d.source[-2:] for d in data.train] == [":1", ":2", ":3"]


def test_kinds_put_together_have_null_in_the_columns_of_others(tokenizer: Tokenizer, write_lines) -> None:
    """As JSON lines of a data set of `datasets` that was made of several."""
    records: list[dict] = [{"text": "Hear."}, {"prompt": "a", "completion": "b"}, {"messages": TURNS[:3]}]
    records.append({"instruction": "Add.", "output": "1"})
    columns = dict.fromkeys(key for record in records for key in record)
    apart = [learned(d, tokenizer) for d in load(write_lines(*records), tokenizer).train]
    together = load(write_lines(*({**columns, **record} for record in records), name="b.jsonl"), tokenizer)
    assert together.bad_lines == 0 and [learned(d, tokenizer) for d in together.train] == apart


def test_a_message_with_what_json_lacks_is_a_bad_line(tokenizer: Tokenizer) -> None:
    """Python and Parquet have values that JSON has not."""
    turns = [TURNS[1] | {"at": datetime.date(2026, 1, 2)}, TURNS[2]]
    with pytest.raises(WgradError, match=":1: the messages hold what JSON .*date is not JSON serializable"):
        config = RunOptions(model="m", data=("<data>",), out="o", on_bad_line="stop", eval_fraction=0.0)
        load_data(config, tokenizer, None, {"<data>": [{"messages": turns}]})


def test_records_are_missed_where_nobody_gives_them(tokenizer: Tokenizer) -> None:
    with pytest.raises(WgradError, match=r"--data: this run had records of a Python caller: give them .*, data=\.\.\."):
        load("<data>", tokenizer)


def test_eos_is_not_doubled(tokenizer: Tokenizer, write_lines) -> None:
    (document,) = load(write_lines({"text": "Hear.</s>"}), tokenizer).train
    assert document.ids.tolist().count(EOS) == 1 and document.loss_mask[-1]


# ---- plain text --------------------------------------------------------------------------------
@pytest.mark.parametrize("bos", [True, False])
@pytest.mark.parametrize("seq_len", [2, 41, 5000])
def test_a_stream_is_learned_token_by_token_once(make_tokenizer, tmp_path: Path, bos: bool, seq_len: int) -> None:
    tokenizer = load_tokenizer(make_tokenizer(bos_in_json=bos))
    text = "A wise man will hear,\n\nand will increase learning; " * 9
    (tmp_path / "a.txt").write_bytes(text.replace("\n", "\r\n").encode())
    data = load(str(tmp_path / "a.txt"), tokenizer, max_length=seq_len)
    assert data.truncated == 0 and all(2 <= len(d) <= seq_len for d in data.train)
    stream = tokenizer.encode(text)
    assert np.concatenate([d.ids[1:] for d in data.train]).tolist() == stream[1:]
    firsts = [int(d.ids[0]) for d in data.train]
    assert firsts == ([0] * len(firsts) if bos else stream[: len(stream) - 1 : seq_len - 1])
    assert sum(d.num_targets for d in data.train) == len(stream) - 1


# ---- truncation and split ----------------------------------------------------------------------
def test_truncation_is_counted(tokenizer: Tokenizer, write_lines) -> None:
    lengths = [len(tokenizer.encode(t)) + 1 for t in ("Hear. " * 3, "Hear. " * 30, "Hear. " * 40)]
    path = write_lines(*({"text": "Hear. " * n} for n in (3, 30, 40)))
    data = load(path, tokenizer, max_length=23)
    assert [len(d) for d in data.train] == [min(n, 23) for n in lengths]
    assert data.truncated == 2 and data.cut_tokens == sum(max(0, n - 23) for n in lengths)
    assert data.tokens == sum(map(len, data.train))
    assert f"2 truncated to --max-length (lost {data.cut_tokens} tokens)" in data.summary()


def held_out(data: Dataset) -> list[str]:
    return [d.source for d in data.held_out]


def test_the_split_depends_on_the_seed_alone(tokenizer: Tokenizer, write_lines) -> None:
    path = write_lines(*({"text": f"Hear number {i}."} for i in range(41)))
    first = load(path, tokenizer, eval_fraction=0.2)
    assert len(first.held_out) == 8 and len(first.train) == 33
    assert not set(held_out(first)) & {d.source for d in first.train}
    assert held_out(first) == held_out(load(path, tokenizer, eval_fraction=0.2, max_length=9, batch_size=2))
    assert held_out(first) != held_out(load(path, tokenizer, eval_fraction=0.2, seed=1))


def test_at_least_one_is_held_out(tokenizer: Tokenizer, write_lines) -> None:
    path = write_lines({"text": "Hear."}, {"text": "See."})
    assert len(load(path, tokenizer, eval_fraction=0.01).held_out) == 1
    with pytest.raises(
        WgradError, match="has 2 examples, and --eval-fraction 0.9 holds out 2, so none is left to train on"
    ):
        load(path, tokenizer, eval_fraction=0.9)
    path = write_lines({"text": "Hear."}, {"text": "See."}, {"nothing": 1})
    with pytest.raises(WgradError, match=r"has 2 examples \(1 invalid line skipped: wgrad data show tells"):
        load(path, tokenizer, eval_fraction=0.9)


def test_eval_data_is_held_out_and_nothing_of_the_training_data(tokenizer: Tokenizer, write_lines) -> None:
    train = write_lines({"text": "Hear."}, {"text": "See."})
    other = write_lines({"text": "Speak."}, name="other.jsonl")
    data = load(train, tokenizer, eval_data=other, eval_fraction=0.5)
    assert (len(data.train), held_out(data)) == (2, [f"{other}:1"])
    with pytest.raises(WgradError, match="--eval-data: no such file: absent.txt"):
        load(train, tokenizer, eval_data="absent.txt")
    more = write_lines(3, {"text": "Hear."}, {"text": "See."}, name="more.jsonl")
    data = load(train, tokenizer, eval_data=(other, more))
    assert (len(data.train), held_out(data)) == (2, [f"{other}:1", f"{more}:2", f"{more}:3"])
    assert (data.bad_lines, data.examples) == (1, 5)
    with pytest.raises(WgradError, match=r"--eval-data: '\S+jsonl' is given twice"):
        load(train, tokenizer, eval_data=(other, more, other))


# ---- what is wrong -----------------------------------------------------------------------------
GOOD = {"text": "Hear."}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"text": "x"', "not valid JSON: .* at column 13"),
        ("[" * 100_000, "not valid JSON"),
        ('["text"]', "expected a JSON object, got a list"),
        ("3", "expected a JSON object, got a number"),
        ({}, "it has none"),
        ({"txt": "x", "id": 1}, "needs 'text', .*; it has 'txt', 'id'"),
        ({"prompt": "x"}, "it has 'prompt'"),
        ({"text": 3}, "'text' must be text; got a number"),
        ({"text": ""}, "'text' is empty: fill it, or remove the line"),
        ({"prompt": "x", "completion": ""}, "'completion' is empty"),
        ({"prompt": None, "completion": "x"}, "'prompt' must be text; got null"),
        ({"prompt": [], "completion": "x"}, "'prompt' must be text; got an empty list"),
        ({"messages": []}, "'messages' must be a list of messages that is not empty; got an empty list"),
        ({"messages": "hi"}, "'messages' must be a list .* got text"),
        ({"messages": "[hi]"}, "'messages' is text that is not valid JSON"),
        ({"messages": ["hi"]}, "message 1 must be an object with 'role' and 'content'"),
        ({"messages": [{"role": "user"}]}, "'content of message 1' must be text; got nothing"),
        ({"messages": [{"role": "user", "content": 3}]}, "'content of message 1' must be text; got a number"),
        ({"messages": [TURNS[1], {"role": "assistant", "content": None}]}, "'content of message 2' is empty"),
        ({"messages": [TURNS[1], {"role": "assistant", "content": ""}]}, "'content of message 2' is empty"),
        ({"messages": TURNS[:2]}, "no turn of the assistant"),
        ({"messages": TURNS, "tools": {"name": "f"}}, "'tools' must be a list of objects; got an object"),
        ({"messages": TURNS, "tools": "[{"}, "'tools' is text that is not valid JSON"),
        ({"messages": TURNS, "documents": [3]}, "'documents' must be a list of objects; got a list"),
        ({"messages": TURNS, "chat_template_kwargs": []}, "'chat_template_kwargs' must be an object"),
        ('{"text": "\\ud800x"}', r"character 1 of the text is U\+D800, half of a surrogate pair"),
        ('{"messages": [{"role": "assistant", "content": "\\udc41"}]}', r"U\+DC41, half of a surrogate pair"),
        ('{"text": 1' + "0" * 5000 + "}", "not valid JSON"),
    ],
)
def test_a_bad_line_is_named_and_skipped_or_stops(tokenizer: Tokenizer, write_lines, line, words: str) -> None:
    path = write_lines(GOOD, line, GOOD)
    with pytest.raises(WgradError, match=words) as caught:
        load(path, tokenizer, on_bad_line="stop")
    assert str(caught.value).startswith(f"{path}:2: ") and "\n" not in str(caught.value)
    data = load(path, tokenizer)
    assert [d.source for d in data.train] == [f"{path}:1", f"{path}:3"]
    assert data.bad_lines == 1 and data.remarks == (f"skipped {caught.value}",)
    assert data.summary().endswith("; 1 bad line skipped")


@pytest.mark.parametrize("line", ["", " ", "\t\r"])
def test_a_blank_line_is_none(tokenizer: Tokenizer, write_lines, line: str) -> None:
    path = write_lines(line, GOOD, line, line, GOOD)
    data = load(path, tokenizer, on_bad_line="stop")
    assert [d.source for d in data.train] == [f"{path}:2", f"{path}:5"]
    assert data.bad_lines == 0 and data.remarks == ()


def test_the_first_bad_lines_are_listed_and_all_are_counted(tokenizer: Tokenizer, write_lines) -> None:
    path = write_lines(*[GOOD, 3] * 7, GOOD)
    data = load(path, tokenizer)
    assert len(data.train) == 8 and data.bad_lines == 7 and data.summary().endswith("; 7 bad lines skipped")
    assert [remark.split(":")[1] for remark in data.remarks[:5]] == ["2", "4", "6", "8", "10"]
    assert data.remarks[5:] == ("skipped 2 more",)


def test_where_most_lines_are_bad_the_file_is(tokenizer: Tokenizer, write_lines) -> None:
    path = write_lines(GOOD, "[", GOOD, 3, 4)
    with pytest.raises(WgradError, match=f"^{path}:2: not valid JSON.*; 3 of 5 lines are bad$"):
        load(path, tokenizer)
    assert len(load(write_lines(GOOD, "[", GOOD, 3), tokenizer).train) == 2  # no more than half
    with pytest.raises(WgradError, match=f"^{path}:1: .*; 2 of 2 lines are bad$"):
        load(write_lines("[", 3), tokenizer)


def test_bad_lines_of_both_files_are_counted(tokenizer: Tokenizer, write_lines) -> None:
    other = write_lines(GOOD, GOOD, 4, name="other.jsonl")
    data = load(write_lines(GOOD, GOOD, 3), tokenizer, eval_data=other)
    assert data.bad_lines == 2 and [remark.split("/")[-1][:7] for remark in data.remarks] == ["data.js", "other.j"]


def test_what_begins_beyond_the_length_is_left_out_and_counted(tokenizer: Tokenizer, write_lines) -> None:
    far = {"prompt": "x" * 400, "completion": "y"}
    near = {"prompt": "x" * 150, "completion": "y" * 100}
    data = load(write_lines(GOOD, far, near, far), tokenizer, on_bad_line="stop")
    assert [d.source[-2:] for d in data.train] == [":1", ":3"]
    assert (data.left_out, data.truncated, data.bad_lines, data.examples) == (2, 1, 0, 2)
    assert "; 2 left out (what is trained on begins beyond --max-length)" in data.summary()
    with pytest.raises(WgradError, match=r"data.jsonl:1: no token to learn is left after truncation to 200 tokens"):
        load(write_lines(far, far), tokenizer)


def test_what_the_template_refuses_is_named(make_tokenizer, write_lines) -> None:
    tokenizer = load_tokenizer(make_tokenizer(chat_template="{{ raise_exception('no system turn') }}"))
    path = write_lines({"messages": TURNS})
    with pytest.raises(WgradError, match=f"^{path}:1: the chat template refuses these messages: no system turn"):
        load(path, tokenizer)


def test_messages_need_a_chat_template(make_tokenizer, write_lines) -> None:
    tokenizer = load_tokenizer(make_tokenizer(chat_template=None))
    with pytest.raises(WgradError, match="^--model: .* has no chat template"):
        load(write_lines({"messages": TURNS}), tokenizer)


def test_a_single_token_has_nothing_to_learn(make_tokenizer, write_lines) -> None:
    tokenizer = load_tokenizer(make_tokenizer(eos_token=None))
    path = write_lines(GOOD, {"text": "a"})
    with pytest.raises(WgradError, match=f"^{path}:2: no token to learn"):
        load(path, tokenizer, on_bad_line="stop")
    assert load(path, tokenizer).bad_lines == 1


@pytest.mark.parametrize("content", [b"", b" \n\n", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("name", ["a.jsonl", "a.txt"])
def test_an_empty_file_is_refused(tokenizer: Tokenizer, tmp_path: Path, content: bytes, name: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(WgradError, match="--data: .* is empty"):
        load(str(tmp_path / name), tokenizer)


def test_files_that_cannot_be_read_are_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(WgradError, match="--data: no such file: nowhere.jsonl"):
        load("nowhere.jsonl", tokenizer)
    with pytest.raises(WgradError, match="--data: .* is a folder"):
        load(str(tmp_path), tokenizer)
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "x"}\n{"text": "\xe9t\xe9"}\n')
    with pytest.raises(WgradError, match=r"a.jsonl:2: not UTF-8 \(byte 0xe9\): convert"):
        load(str(tmp_path / "a.jsonl"), tokenizer, on_bad_line="stop")


def test_the_example_data_is_read_whole(tokenizer: Tokenizer) -> None:
    folder = Path(__file__).parents[2] / "examples" / "data"
    stream = load(str(folder / "proverbs.txt"), tokenizer, max_length=128, eval_fraction=0.05)
    pairs = load(str(folder / "proverbs.jsonl"), tokenizer, max_length=128, eval_fraction=0.05)
    assert len(stream.train) + len(stream.held_out) > 100 and stream.truncated == 0
    assert len(pairs.train) + len(pairs.held_out) == 462 and pairs.truncated <= 5
    assert learned(pairs.train[0], tokenizer).startswith(" ")
