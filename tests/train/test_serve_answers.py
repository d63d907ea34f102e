"""`wgrad serve`: conversations, streams, and OpenAI's own client."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models

from tests.train.serving import Client, Reply, make_talker, serving
from wgrad.train.data.text_stream import _OCTET_OF, octets_of
from wgrad.train.data.tokenizer import Tokenizer as Ours
from wgrad.train.data.tokenizer import load_tokenizer
from wgrad.train.inference.scoring import LogProbs
from wgrad.train.options.generate_config import GREEDY
from wgrad.train.serve.answers import ChatForm, Choice, CompletionForm
from wgrad.train.serve.jobs import Answer, Job, Piece, TokenInfo
from wgrad.train.serve.preparation import Preparation
from wgrad.train.serve.prompts import prompt_tokens
from wgrad.train.serve.requests import CompletionRequest
from wgrad.train.serve.stop_text import StopText

TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "{{ m['role'] + ': ' + m['content'] + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)
TURNS = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "Hear, my son"}]
RENDERED = "system: be brief\nuser: Hear, my son\nassistant:"


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """A tiny model with a chat template."""
    folder = make_talker(tmp_path_factory.mktemp("models") / "talker", max_position_embeddings=512)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    with serving(model=str(folder), max_new_tokens=24) as found:
        yield found


def chat(client: Client, messages: Any = TURNS, **options: Any) -> Reply:
    return client.post("chat/completions", {"model": "talker", "messages": messages, **options})


def test_a_conversation_is_what_its_template_makes_of_it(client: Client) -> None:
    for options in ({"temperature": 0}, {"seed": 4, "top_p": 0.9}):
        answer = chat(client, max_tokens=9, **options).json
        text = client.complete(RENDERED, max_tokens=9, **options)
        assert answer["choices"][0]["message"] == {"role": "assistant", "content": text["choices"][0]["text"]}
        assert answer["usage"] == text["usage"] and answer["object"] == "chat.completion"
    parts = [{"type": "text", "text": "Hear, "}, {"type": "text", "text": "my son"}]
    same = chat(client, [TURNS[0], {"role": "user", "content": parts}], max_completion_tokens=9, seed=4, top_p=0.9).json
    assert same["choices"] == answer["choices"]
    whole = chat(client, temperature=0).json  # as long as may be, where nothing is said
    assert whole["usage"]["completion_tokens"] == 24 or whole["choices"][0]["finish_reason"] == "stop"


def test_log_probabilities_of_a_conversation_are_those_of_a_completion(client: Client) -> None:
    choice = chat(client, max_tokens=4, temperature=0, logprobs=True, top_logprobs=2).json["choices"][0]
    told = client.complete(RENDERED, max_tokens=4, temperature=0, logprobs=2)["choices"][0]["logprobs"]
    content = choice["logprobs"]["content"]
    assert [token["token"] for token in content] == told["tokens"]
    assert [token["logprob"] for token in content] == told["token_logprobs"]
    assert all(token["top_logprobs"][0]["logprob"] == token["logprob"] for token in content)
    octets = b"".join(bytes(token["bytes"]) for token in content)
    assert octets.decode("utf-8", "replace") == choice["message"]["content"]
    assert chat(client, max_tokens=1).json["choices"][0]["logprobs"] is None
    reply = chat(client, max_tokens=1, top_logprobs=2)
    assert reply.status == 400 and "top_logprobs goes with logprobs" in reply.error["message"]


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "messages must be a list of length >= 1"),
        ("hi", "messages must be a list"),
        ([3], "messages[0] must be an object; got 3"),
        ([{"content": "x"}], "messages[0].role must be text; got null"),
        ([{"role": "user", "content": 3}], "messages[0].content must be text; got a number"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "only parts of type 'text' can be read"),
        ([{"role": "tool", "content": "x"}], "the chat template refuses these messages: no tools here"),
        ([{"role": "user"}], "the chat template refuses these messages: 'dict object' has no attribute 'content'"),
        ([{"role": "user", "content": "x " * 900}], "must be at most the 512 positions"),
    ],
)
def test_wrong_messages_are_refused(client: Client, messages: Any, message: str) -> None:
    reply = chat(client, messages)
    assert (reply.status, reply.error["param"]) == (400, "messages") and message in reply.error["message"]


# ---- streams -------------------------------------------------------------------------------------
def test_a_stream_is_the_answer_in_pieces(client: Client) -> None:
    asked = {"model": "talker", "prompt": ["Hear, my son", "Go to"], "max_tokens": 12, "seed": 8, "logprobs": 1}
    whole = client.post("completions", asked).json
    *chunks, last = client.post(
        "completions", {**asked, "stream": True, "stream_options": {"include_usage": True}}
    ).events
    assert last["choices"] == [] and last["usage"] == whole["usage"] and len(chunks) > 10
    for choice in whole["choices"]:
        own = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert "".join(c["text"] for c in own) == choice["text"]
        assert [c["finish_reason"] for c in own] == [*[None] * (len(own) - 1), choice["finish_reason"]]
        for key, values in choice["logprobs"].items():
            assert [value for c in own for value in c["logprobs"][key]] == values
    assert {chunk["id"] for chunk in [*chunks, last]} == {last["id"]} != {whole["id"]}


def test_a_streamed_conversation_is_the_whole_one(client: Client) -> None:
    whole = chat(client, max_tokens=12, temperature=0).json["choices"][0]["message"]["content"]
    first, *others = (chunk["choices"][0] for chunk in chat(client, max_tokens=12, temperature=0, stream=True).events)
    assert first["delta"] == {"role": "assistant", "content": ""}
    assert "".join(c["delta"].get("content", "") for c in others) == whole and others[-1]["finish_reason"] == "length"
    echo = {"model": "talker", "prompt": "Hear", "echo": True, "max_tokens": 1, "stream": True, "logprobs": 0}
    texts = [chunk["choices"][0]["text"] for chunk in client.post("completions", echo).events]
    assert texts[0] == "Hear" and len("".join(texts)) > 4


def test_what_may_be_a_stop_is_held_back(client: Client) -> None:
    whole = chat(client, max_tokens=12, temperature=0).json["choices"][0]["message"]["content"]
    stop = whole[4:9]
    chunks = chat(client, max_tokens=12, temperature=0, stream=True, stop=stop).events
    texts = [chunk["choices"][0]["delta"].get("content", "") for chunk in chunks]
    assert "".join(texts) == whole[: whole.index(stop)] and chunks[-1]["choices"][0]["finish_reason"] == "stop"
    asked = {"model": "talker", "prompt": RENDERED, "max_tokens": 12, "temperature": 0, "stream": True, "logprobs": 0}
    text = tokens = ""
    for chunk in client.post("completions", {**asked, "stop": whole[3:12] + "?"}).events:  # nearly
        choice = chunk["choices"][0]
        text, tokens = text + choice["text"], tokens + "".join(choice["logprobs"]["tokens"])
        assert text.startswith(tokens)
    assert text == tokens == whole


def test_of_tokens_with_one_text_the_likeliest_is_told() -> None:
    """Parts of characters are all told as the same text; what is told must not be less likely than the best."""
    choice = Choice(0, 1)
    choice.add(
        Piece("é", [TokenInfo(7, "é", -3.0, [(4, -1.0), (5, -2.0)]), TokenInfo(5, "?", -2.0, [(4, -1.0)])], 2, "stop")
    )
    (told,) = CompletionForm("m", True, lambda token: "?").answer([choice])["choices"]
    assert told["logprobs"]["top_logprobs"] == [{"?": -1.0, "é": -3.0}, {"?": -1.0}]


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_stops_across_pieces(size: int) -> None:
    text = "one two three four"
    for stops, wanted in (
        (["three"], "one two "),
        (["two t", "e t"], "on"),
        (["fourth"], text),
        ([], text),
        (["x", "r"], "one two th"),
    ):
        stop = StopText(stops)
        given = [stop.add(text[at : at + size]) for at in range(0, len(text), size)]
        assert "".join(given) + stop.rest() == wanted and stop.found == (wanted != text)


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_special_tokens_can_be_stops_and_are_none_of_the_answer(size: int) -> None:
    """Their text is none of the answer's, but a stop may be one, or reach into one."""
    for stops, wanted in ((["<end>"], "one."), ([".<en"], "one"), (["d>two"], "one."), (["<e>"], "one.two")):
        stop, given = StopText(stops), ""
        for text, special in (("one.", "<end>"), ("two", "")):
            parts = [text[at : at + size] for at in range(0, len(text), size)]
            given += "".join(stop.add(part, special * (n == len(parts))) for n, part in enumerate(parts, start=1))
        assert given + stop.rest() == wanted and stop.found == (wanted != "one.two")


def answered(tokens: Sequence[bytes | str], prompt: Sequence[bytes | str] = ("x",), **options: Any) -> tuple[str, Any]:
    """The text and the log-probabilities of an answer: octets, or names of special tokens."""
    backend = Tokenizer(models.BPE())
    backend.decoder = decoders.ByteLevel()
    names = {octet: name for name, octet in _OCTET_OF.items()}
    made = ["".join(names[o] for o in t) if isinstance(t, bytes) else t for t in (*prompt, *tokens)]
    backend.add_tokens([AddedToken(t, normalized=False, special=t.startswith("<")) for t in dict.fromkeys(made)])
    ids = [backend.get_vocab()[t] for t in made]
    events: list[Any] = []
    defaults: dict[str, Any] = {"max_new_tokens": 99, "stops": (), "top": 0, "score": False, "seconds": 1e6}
    job = Job("m", ids[: len(prompt)], sampling=GREEDY, emit=events.append, **{**defaults, **options})
    answer = Answer(job, Ours(backend, {}, {}, ""))
    found = LogProbs(np.zeros(1, np.float32), np.zeros((1, 0), np.int64), np.zeros((1, 0), np.float32))
    for id_ in ids[len(prompt) :]:
        if not answer.ended:
            answer.add(id_, found)
    if not answer.ended:
        answer.end("stop")
    choice, form, chunks = Choice(0, 1), CompletionForm("m", True, str), []
    for event in events:
        choice.add(event)
        chunks += form.chunk(choice, event)["choices"]
    (whole,) = form.answer([choice])["choices"]
    assert "".join(chunk["text"] for chunk in chunks) == whole["text"]
    for key, value in whole["logprobs"].items():
        assert [one for chunk in chunks for one in chunk["logprobs"][key]] == value
    told = whole["logprobs"]
    assert all(whole["text"][at:].startswith(text) for at, text in zip(told["text_offset"], told["tokens"]))
    return whole["text"], told["tokens"]


def test_bytes_of_tokens_are_those_of_the_text(make_tokenizer: Any) -> None:
    """Each token of a character that several tokens make up has its own bytes; so do tokens in the place of one."""
    tokenizer = load_tokenizer(make_tokenizer())
    ids = tokenizer.encode("a\u20ac", add_special_tokens=False)[-3:]
    assert [tokenizer.partial_octets(id_) for id_ in ids] == [b"\xe2", b"\x82", b"\xac"]
    tokens = [TokenInfo(id_, text, -1.0, [(ids[0], -1.0)]) for id_, text in zip(ids, ("", "", "\u20ac"))]
    choice = Choice(0, 1)
    choice.add(Piece("\u20ac", tokens, 3, "stop"))
    form = ChatForm("m", True, tokenizer.token_text, octets=tokenizer.partial_octets)
    entries = form.answer([choice])["choices"][0]["logprobs"]["content"]
    assert bytes(sum((entry["bytes"] for entry in entries), [])).decode() == "\u20ac"
    assert all(entry["top_logprobs"][0]["bytes"] == [0xE2] for entry in entries)
    whole = tokenizer.encode("b", add_special_tokens=False)[-1]
    assert tokenizer.partial_octets(whole) is None and octets_of("<0xE2>") == b"\xe2" and octets_of("\u2581") is None


def test_a_character_that_is_not_whole_at_the_end_is_told() -> None:
    """The prompt's part of one is not."""
    assert answered([b"ab", b" \xe2", b"\x82"]) == ("ab \ufffd", ["ab", " ", "\ufffd"])
    assert answered([b"ab", b" \xe2"], max_new_tokens=2) == ("ab \ufffd", ["ab", " \ufffd"])
    assert answered([b"\xac", b"a"], ["x", b"\xe2\x82"]) == ("€a", ["€", "a"])
    assert answered([b"b", b"a"], ["x", b"\xe2\x82"]) == ("ba", ["b", "a"])
    assert answered([b"a"], ["\ufffd"]) == ("a", ["a"])


def test_a_stop_is_a_special_token_or_a_character_that_is_pending() -> None:
    assert answered([b"ab", "<end>", b"c"], stops=["<end>"]) == ("ab", ["ab"])
    assert answered([b"ab", "<end>", b"c"]) == ("abc", ["ab", "", "c"])
    assert answered([b"ab", b"c\xe2", b"d"], stops=["\ufffd"]) == ("abc", ["ab", "c"])


def test_offsets_are_places_in_the_text_that_begins_with_the_prompt(make_tokenizer: Any) -> None:
    """Tokens that the tokenizer puts before a prompt are listed, but stand nowhere in the text."""
    tokenizer = load_tokenizer(make_tokenizer(bos_in_json=True))
    preparation = Preparation({"m": tokenizer}, 400, 99, 9, 1e6, threading.Lock())
    ids = tokenizer.encode("Héar</s>")
    for prompt, begin in (("Héar</s>", 0), (ids, 3), ("<s>Héar</s>", 3)):  # which has its own
        asked = CompletionRequest(model="m", prompt=prompt, echo=True, logprobs=0, max_tokens=0)
        (job,), (text,) = preparation.completion_jobs(asked, lambda number, event: None)
        found = LogProbs(np.zeros(len(ids), np.float32), np.zeros((len(ids), 0), np.int64), np.zeros((len(ids), 0)))
        choice = Choice(0, 1, text)
        choice.add(Piece("", prompt_tokens(tokenizer, job, found, 0), finish="length"))
        (whole,) = CompletionForm("m", True, str).answer([choice])["choices"]
        told = whole["logprobs"]
        assert whole["text"] == "<s>Héar</s>"[3 - begin :] and told["tokens"][0] == "<s>"
        assert told["text_offset"][:2] == [0, begin] and told["tokens"][-1] == "</s>"
        assert all(text[at:].startswith(token) for at, token in zip(told["text_offset"][1:], told["tokens"][1:]))
