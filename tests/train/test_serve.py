"""`wgrad serve`: completions, log-probabilities, access control, and errors of wrong requests."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.datastructures import Headers

import wgrad
from tests.train.chat_model import TEMPLATE, make_adapter, make_model
from tests.train.serving import BASE, Client, serving
from wgrad.device.errors import WgradError
from wgrad.train.commands.cli import main
from wgrad.train.commands.serve import _lend_template
from wgrad.train.data.tokenizer import load_tokenizer
from wgrad.train.model.adapter_files import save_adapter
from wgrad.train.model.load_config import load_model_config
from wgrad.train.model.lora import LoraConfig, init_lora, linear_modules, lora_shapes
from wgrad.train.options.serve_config import ServeConfig
from wgrad.train.serve import body, connection
from wgrad.train.serve.errors import ApiError
from wgrad.train.serve.guard import Guard
from wgrad.train.serve.logit_edits import LogitEdits

TEXTS = ["A soft answer turneth away wrath: but grievous words stir up anger.", "Go to the ant, thou sluggard;"]


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an adapter of the embedded model that changes every answer."""
    folder, lora = tmp_path_factory.mktemp("adapter") / "proverbs", LoraConfig(r=2, alpha=4.0)
    values = init_lora(lora_shapes(lora, linear_modules(load_model_config(BASE))), 0)
    values = {name: np.full_like(v, 0.02) if name.endswith(".lora_B") else v for name, v in values.items()}
    save_adapter(folder, lora, values, str(BASE))
    return folder


@pytest.fixture(scope="module")
def client(adapter: Path) -> Iterator[Client]:
    with serving(adapter=(f"mine={adapter}",), max_new_tokens=200) as found:
        yield found


# ---- scores --------------------------------------------------------------------------------------
def lm_eval_score(client: Client, model: str, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    """Score with the request and sums of lm-eval's `local-completions` (models/openai_completions.py, 0.4.13)."""
    value = {"model": model, "prompt": [context + continuation], "temperature": 0, "max_tokens": 1, "logprobs": 1}
    (choice,) = client.post("completions", {**value, "seed": 1234, "echo": True}).json["choices"]
    part, told = slice(len(context), -1), choice["logprobs"]
    log_probs = told["token_logprobs"][part]
    greedy = all(p == max(top.values()) for p, top in zip(log_probs, told["top_logprobs"][part]))
    assert len(log_probs) == len(continuation)
    return sum(log_probs), greedy


def test_scores_are_those_of_eval_to_the_last_digit(
    client: Client, adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer, path = load_tokenizer(BASE), tmp_path / "one.jsonl"
    for text in TEXTS:
        path.write_text(json.dumps({"text": text}) + "\n")
        words = ["--adapter", str(adapter), "--data", str(path), "--batch-size", "1", "--device", "cpu", "--json"]
        capsys.readouterr()
        assert main(["eval", *words]) == 0
        found = json.loads(capsys.readouterr().out)
        ids = [*tokenizer.encode(text), tokenizer.eos_id or 0]
        assert found["tokens"] == len(ids) - 1
        for model, name in (("base_model", "base"), ("mine", "adapter")):
            total, _ = lm_eval_score(client, model, ids[:1], ids[1:])
            # eval adds up in float64, too, and keeps the sum as a float32.
            assert float(np.float32(-total)) / found["tokens"] == found[name]["nats"]
        assert found["base"]["nats"] != found["adapter"]["nats"]


def test_greedy_is_what_is_generated(client: Client) -> None:
    ids = load_tokenizer(BASE).encode(TEXTS[1])
    answer = client.complete(ids, max_tokens=5, temperature=0, logprobs=3)["choices"][0]
    told = answer["logprobs"]
    assert answer["text"] == "".join(told["tokens"]) and told["text_offset"][0] == 0
    assert all(p == max(top.values()) and len(top) == 3 for p, top in zip(told["token_logprobs"], told["top_logprobs"]))
    new = load_tokenizer(BASE).encode(answer["text"], add_special_tokens=False)
    total, greedy = lm_eval_score(client, "base_model", ids, new)
    assert greedy and total == pytest.approx(sum(told["token_logprobs"]), rel=1e-6)
    assert not lm_eval_score(client, "base_model", ids, [*new[:-1], 7])[1]


def test_echo_opens_the_text_and_its_log_probabilities(client: Client) -> None:
    whole = client.complete("Hear, my son", max_tokens=3, temperature=0, echo=True, logprobs=0)["choices"][0]
    alone = client.complete("Hear, my son", max_tokens=3, temperature=0, logprobs=0)["choices"][0]
    assert whole["text"] == "Hear, my son" + alone["text"] == "".join(whole["logprobs"]["tokens"])
    told = whole["logprobs"]
    assert told["token_logprobs"][0] is None and told["top_logprobs"][0] is None
    assert told["token_logprobs"][-3:] == alone["logprobs"]["token_logprobs"]
    at = [told["text_offset"][i] for i in range(len(told["tokens"]))]
    assert all(whole["text"][i:].startswith(token) for i, token in zip(at, told["tokens"]))
    assert client.complete("Hear", max_tokens=0, echo=True)["choices"][0]["text"] == "Hear"


# ---- answers -------------------------------------------------------------------------------------
def test_answers_are_those_of_generate(client: Client, adapter: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for model, words in (("base_model", []), ("mine", ["--adapter", str(adapter)])):
        options = ["--device", "cpu", "--temperature", "0.9", "--top-p", "0.8", "--seed", "11", "--max-new-tokens", "9"]
        assert main(["generate", "--model", str(BASE), "--prompt", TEXTS[0], *options, *words]) == 0
        text = capsys.readouterr().out
        asked = {"temperature": 0.9, "top_p": 0.8, "seed": 11, "max_tokens": 9, "echo": True}
        answer = client.post("completions", {"model": model, "prompt": TEXTS[0], **asked}).json
        assert answer["choices"][0]["text"] + "\n" == text
        assert answer["usage"]["completion_tokens"] == 9 and answer["choices"][0]["finish_reason"] == "length"


def test_models_are_listed_and_described(client: Client) -> None:
    listed = client.ask("GET", "/v1/models").json
    assert listed["object"] == "list" and [model["id"] for model in listed["data"]] == ["base_model", "mine"]
    assert client.ask("GET", "/v1/models/mine").json["object"] == "model"
    assert client.ask("GET", "/v1/models/other").error["code"] == "model_not_found"


def test_stop_ends_the_text_before_it(client: Client) -> None:
    whole = client.complete(TEXTS[0], max_tokens=12, temperature=0)["choices"][0]["text"]
    cut = whole[3:12]  # begins within a token, and has others
    for options in ({}, {"logprobs": 0}):
        answer = client.complete(TEXTS[0], max_tokens=12, temperature=0, stop=["nowhere", cut], **options)["choices"][0]
        assert answer["text"] == whole[: whole.index(cut)] and answer["finish_reason"] == "stop"
    offsets = answer["logprobs"]["text_offset"]
    assert offsets and all(at < len(answer["text"]) for at in offsets)


def test_several_answers_to_one_prompt(client: Client) -> None:
    options: dict[str, Any] = {"temperature": 1.0, "seed": 5, "max_tokens": 6}
    several = client.complete([TEXTS[0], TEXTS[1]], n=2, **options)
    assert [choice["index"] for choice in several["choices"]] == [0, 1, 2, 3]
    one = client.complete(TEXTS[0], **options)
    again = client.complete(TEXTS[0], **{**options, "seed": 6})
    texts = [choice["text"] for choice in several["choices"]]
    assert texts[:2] == [one["choices"][0]["text"], again["choices"][0]["text"]] and texts[0] != texts[1]
    prompts = one["usage"]["prompt_tokens"] + client.complete(TEXTS[1], max_tokens=1)["usage"]["prompt_tokens"]
    assert several["usage"]["prompt_tokens"] == prompts, "a prompt counts once"
    ids = list(range(40, 170))
    told = [client.complete(ids, max_tokens=1)["usage"]["prompt_tokens_details"] for _ in range(2)]
    assert told == [{"cached_tokens": 0}, {"cached_tokens": 128}], "the second has the first one's pages"
    likeliest = client.complete(TEXTS[0], max_tokens=6, temperature=0)["choices"]
    assert client.complete(TEXTS[0], max_tokens=6, top_p=0, top_k=-1)["choices"] == likeliest
    refused = client.post("completions", {"model": "base_model", "prompt": ["x"] * 200, "n": 2})
    assert refused.status == 400 and "at most 256 answers; got 400" in refused.error["message"]


def test_tokens_are_penalized_and_favored(client: Client) -> None:
    def ids(**options: Any) -> list[int]:
        asked = {"temperature": 0, "max_tokens": 8, "logprobs": 0, **options}
        tokens = client.complete(TEXTS[0], **asked)["choices"][0]["logprobs"]["tokens"]
        return [load_tokenizer(BASE).encode(token, add_special_tokens=False)[0] for token in tokens]

    plain = ids()
    assert set(ids(logit_bias={str(plain[0]): 100})) == {plain[0]}
    assert plain[0] not in ids(logit_bias={str(plain[0]): -100})
    repeated = ids(logit_bias={str(plain[0]): 12, str(plain[1]): 11}, presence_penalty=2)
    assert {*plain[:2]} <= set(repeated), "the second is likelier once the first is there"
    assert ids(temperature=1, min_p=1) == plain
    with wgrad.load(BASE, device="cpu") as model:
        fresh = model.generate(TEXTS[0], temperature=0, top_p=1, max_new_tokens=8, repetition_penalty=1.5).tokens
    assert ids(repetition_penalty=1.5) == list(fresh) != plain
    refused = client.post("completions", {**ASK, "repetition_penalty": 0})
    assert refused.status == 400 and refused.error["param"] == "repetition_penalty"
    wrong = client.post("completions", {**ASK, "logit_bias": {"1024": 1}})
    assert wrong.status == 400 and wrong.error["param"] == "logit_bias"


def test_edits_of_logits_count_what_was_drawn() -> None:
    logits = np.array([1.0, 2.0, 3.0, 4.0], np.float32)
    LogitEdits(presence=0.5, frequency=0.25, bias={0: 7.0, 3: -100.0}).add_to(logits, [1, 2, 1])
    np.testing.assert_array_equal(logits, np.array([8.0, 1.0, 2.25, -96.0], np.float32))
    assert logits.dtype == np.float32 and not LogitEdits()
    constant = LogitEdits(bias={2: 3.0})
    assert constant.as_bias(4, [1]) is constant.as_bias(4, [1, 2]) and constant.as_bias(4, [])[2] == 3.0
    assert LogitEdits(presence=1.0).as_bias(4, [3]).tolist() == [0, 0, 0, -1]


def test_health_is_ok_and_metrics_count(client: Client) -> None:
    assert client.ask("GET", "/health").json == {"status": "ok"}

    def value(name: str) -> float:
        lines = client.ask("GET", "/metrics").body.decode().splitlines()
        return sum(float(line.split()[1]) for line in lines if line.startswith((f"wgrad_{name} ", f"wgrad_{name}{{")))

    names = ("generated_tokens_total", "prompt_tokens_total", "first_token_seconds_count", "requests_total")
    before = [value(name) for name in names]
    client.complete([5, 6, 7], max_tokens=4, temperature=0, logit_bias={"9": 100})
    assert [value(name) - old for name, old in zip(names, before)][:3] == [4, 3, 1]
    assert value("requests_total") > before[3] and value("cache_tokens_capacity") > 0 == value("batch_size")


def test_a_request_is_a_line_of_the_log(client: Client, capfd: pytest.CaptureFixture[str]) -> None:
    client.complete([5, 6, 7], max_tokens=4, temperature=0, logit_bias={"9": 100})
    client.ask("GET", "/no%0Awhere")
    said, end = "", time.monotonic() + 30
    while " GET /no" not in said and time.monotonic() < end:  # a line comes behind its response
        said += capfd.readouterr().err
    lines = said.splitlines()
    (answered,) = (line for line in lines if " POST " in line)
    (missing,) = (line for line in lines if " GET /no" in line)
    assert "127.0.0.1 POST /v1/completions 200 " in answered and answered.endswith(" s base_model 3 + 4 tokens")
    assert "127.0.0.1 GET /no where 404 " in missing


# ---- who may ask ---------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Host": "localhost"}, 200),
        ({"Host": "[::1]:8000"}, 200),
        ({"Host": "evil.example"}, 403),
        ({"Host": "127.0.0.1.evil.example:8000"}, 403),
        ({"Host": "evil.example@127.0.0.1"}, 403),
        ({"Host": "0.0.0.0"}, 403),
        ({"Host": "192.168.0.7"}, 403),
        ({"Host": ""}, 403),
        ({"Host": "localhost", "Origin": "http://localhost"}, 200),
        ({"Host": "localhost", "Origin": "https://evil.example"}, 403),
        ({"Host": "localhost", "Origin": "http://localhost:3000"}, 403),
        ({"Host": "localhost", "Origin": "null"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-site"}, 403),
    ],
)
def test_requests_of_other_hosts_and_pages_are_forbidden(client: Client, headers: dict[str, str], status: int) -> None:
    reply = client.ask("GET", "/v1/models", headers=headers)
    assert reply.status == status and not any(name.startswith("access-control") for name in reply.headers)
    if status == 403:
        assert reply.error["type"] == "permission_error"


@pytest.mark.parametrize("name", ["box.local", "Box.local:8000", "[::1]:80", "10.0.0.3"])
def test_a_further_name_is_one_with_a_port_too(name: str) -> None:
    names = ServeConfig(model="m", allow_host=(name,)).allow_host
    guard = Guard(None, "127.0.0.1", names, None)  # type: ignore[arg-type]
    bare = name.rpartition(":")[0] if name.count(":") == 1 or "]:" in name else name
    for host in (bare, f"{bare}:8000"):
        guard.check(Headers({"host": host}))
    with pytest.raises(ApiError, match="name it with --allow-host"):
        guard.check(Headers({"host": "other.local"}))


@pytest.mark.parametrize("name", ["http://other", "*", "a b", ""])
def test_what_is_no_name_is_refused(name: str) -> None:
    with pytest.raises(WgradError, match="--allow-host: must be names of hosts"):
        ServeConfig(model="m", allow_host=(name,))


def test_a_key_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WGRAD_API_KEY", "a-key-of-22-characters")
    with serving(batch_size=1, allow_host=("box.local",)) as client:
        for given in (
            None,
            "Bearer",
            "Bearer a-key-of-22-character",
            "Bearer a-key-of-22-characterss",
            "Basic x",
            "\xff",
        ):
            headers = {} if given is None else {"Authorization": given}
            for path in ("/v1/models", "/nowhere"):
                reply = client.ask("GET", path, headers=headers)
                assert (reply.status, reply.error["code"]) == (401, "invalid_api_key")
                assert "a-key" not in reply.body.decode() and reply.headers["www-authenticate"] == "Bearer"
        right = {"Authorization": "Bearer a-key-of-22-characters"}
        assert client.ask("GET", "/v1/models", headers=right).status == 200
        assert client.ask("GET", "/v1/models", headers={"Host": "box.local:80", **right}).status == 200
        assert client.ask("GET", "/v1/models", headers={"Host": "evil.example", **right}).status == 403


def test_a_public_address_is_asked_by_number_or_allowed_name() -> None:
    """There a page comes by a name, and never by a number."""
    guard = Guard(nobody, "0.0.0.0", ["Box.local"], "key")
    for host in ("192.168.0.7:8000", "[fe80::1]:8000", "127.0.0.1", "localhost", "box.LOCAL:8000", "0.0.0.0"):
        guard.check(Headers({"host": host, "authorization": "bearer key"}))
    for host in (
        "evil.example",
        "192.168.0.7.evil.example",
        "localhost.evil.example",
        "[::1",
        "a b",
        "box.local:x",
        "",
    ):
        with pytest.raises(ApiError, match="^Host: must be an address of this server"):
            guard.check(Headers({"host": host, "authorization": "bearer key"}))


def test_allowed_origins_may_ask_with_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    page = {"Origin": "https://My.app", "Sec-Fetch-Site": "cross-site"}
    monkeypatch.setenv("WGRAD_API_KEY", "key")
    with serving(batch_size=1, allow_origin=("https://my.app",), start=False) as client:
        asks = client.ask("OPTIONS", "/v1/models", headers={**page, "Access-Control-Request-Method": "POST"})
        assert asks.status == 204 and "Authorization" in asks.headers["access-control-allow-headers"]
        for key, status in (("key", 200), ("other", 401)):
            reply = client.ask("GET", "/v1/models", headers={**page, "Authorization": f"Bearer {key}"})
            assert (reply.status, reply.headers["access-control-allow-origin"]) == (status, "https://My.app")
        other = {**page, "Origin": "https://my.app.evil", "Authorization": "Bearer key"}
        refused = client.ask("GET", "/v1/models", headers=other)
        assert refused.status == 403 and "access-control-allow-origin" not in refused.headers
        assert client.ask("GET", "/v1/models", headers={**page, "Host": "evil.example"}).status == 403
        assert client.ask("GET", "/health").status == 200 and client.ask("GET", "/metrics").status == 401
    monkeypatch.delenv("WGRAD_API_KEY")
    with pytest.raises(WgradError, match=r"--allow-origin: \* lets every web page use this server"):
        ServeConfig(model="m", allow_origin=("*",)).require()
    with pytest.raises(WgradError, match="--allow-origin: must be"):
        ServeConfig(model="m", allow_origin=("https://my.app/page",))


async def nobody(*args: Any) -> None:
    raise AssertionError


# ---- what is wrong -------------------------------------------------------------------------------
ASK = {"model": "base_model", "prompt": "x"}
CHAT = {"model": "base_model", "messages": [{"role": "user", "content": "x"}]}


@pytest.mark.parametrize(
    ("value", "status", "param", "message"),
    [
        (b"", 400, None, "not valid JSON"),
        (b"{", 400, None, "not valid JSON"),
        (b"\xff{}", 400, None, "must be UTF-8"),
        (b"[" * 100_000, 400, None, "nested"),
        (b'{"model": NaN}', 400, "model", "model must be a finite number; got NaN"),
        (b"[]", 400, None, "must be a JSON object; got an empty list"),
        (b"7", 400, None, "must be a JSON object"),
        ({}, 400, "model", "model is missing"),
        ({"model": "base_model"}, 400, "prompt", "prompt is missing"),
        ({**ASK, "model": 3}, 400, "model", "model must be text; got 3"),
        ({**ASK, "model": "../../etc"}, 404, "model", "'../../etc' is not served: choose one of 'base_model', 'mine'"),
        ({**ASK, "prompt": 3}, 400, "prompt", "prompt must be"),
        ({**ASK, "prompt": []}, 400, "prompt", "got an empty list"),
        ({**ASK, "prompt": ["a", 3]}, 400, "prompt", "prompt must be text, token ids"),
        ({**ASK, "prompt": [True]}, 400, "prompt", "prompt must be"),
        ({**ASK, "prompt": [[]]}, 400, "prompt", "prompt must be"),
        ({**ASK, "prompt": ""}, 400, "prompt", "has no token"),
        ({**ASK, "prompt": [1024]}, 400, "prompt", "token ids must be between 0 and 1023; got 1024"),
        ({**ASK, "prompt": [-1]}, 400, "prompt", "token ids must be"),
        ({**ASK, "prompt": "\ud800"}, 400, None, "half of a surrogate pair"),
        ({**ASK, "prompt": ["x"] * 257}, 400, "prompt", "got a list of 257"),
        (
            {**ASK, "prompt": [5] * 500},
            400,
            "prompt",
            "500 tokens of the prompt and 16 new ones must be at most the 512",
        ),
        ({**ASK, "max_tokens": 201}, 400, "max_tokens", "must be at most 200 here; got 201"),
        ({**ASK, "max_tokens": -1}, 400, "max_tokens", "of at least 0; got -1"),
        ({**ASK, "max_tokens": 0}, 400, "max_tokens", "goes with echo"),
        ({**ASK, "max_tokens": "5"}, 400, "max_tokens", "must be a whole number; got '5'"),
        ({**ASK, "temperature": 3}, 400, "temperature", "of at most 2; got 3"),
        ({**ASK, "top_p": -1}, 400, "top_p", "top_p must be"),
        ({**ASK, "logprobs": 21}, 400, "logprobs", "of at most 20"),
        ({**ASK, "stop": ""}, 400, "stop", "stop must be"),
        ({**ASK, "stop": ["a"] * 17}, 400, "stop", "stop must be"),
        ({**ASK, "stop": [3]}, 400, "stop", "stop[0] must be text; got 3"),
        ({**ASK, "stream": "yes"}, 400, "stream", "must be true or false"),
        ({**ASK, "n": 0}, 400, "n", "of at least 1; got 0"),
        ({**ASK, "best_of": 2}, 400, "best_of", "best_of is not supported"),
        ({**ASK, "min_tokens": 2}, 400, "min_tokens", "min_tokens is not supported"),
        ({**ASK, "ignore_eos": True}, 400, "ignore_eos", "ignore_eos is not supported"),
        ({**CHAT, "continue_final_message": True}, 400, "continue_final_message", "is not supported"),
        ({**ASK, "temprature": 1}, 400, "temprature", "did you mean temperature?"),
        (CHAT, 400, "messages", "no chat template"),
    ],
)
def test_a_wrong_request_is_one_line(client: Client, value: Any, status: int, param: str | None, message: str) -> None:
    path = "chat/completions" if isinstance(value, dict) and "messages" in value else "completions"
    reply = client.post(path, value)
    error = reply.error
    assert (reply.status, error["param"]) == (status, param) and message in error["message"]
    assert error["type"] == ("not_found_error" if status == 404 else "invalid_request_error")


def test_a_base_without_a_template_uses_that_of_its_adapters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """If they have the same; else a request is told which have one."""
    base = make_model(tmp_path / "plain")
    templates = {"mine": TEMPLATE, "alike": TEMPLATE, "other": TEMPLATE + "!", "none": None}
    of = {name: str(make_adapter(tmp_path / name, base, template=text)) for name, text in templates.items()}
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    with serving(model=str(base), adapter=(of["none"], of["mine"], of["alike"])) as client:
        assert "note: plain: it has no chat template, so that of mine is used" in capsys.readouterr().err
        found = [client.post("chat/completions", {"model": name, **asked}).json for name in ("plain", "mine")]
        assert found[0]["usage"] == found[1]["usage"]
        error = client.post("chat/completions", {"model": "none", **asked}).error
        advice = "model 'none' has no chat template, which messages need: ask 'plain', 'mine', 'alike', or use"
        assert advice in error["message"]
    with serving(model=str(base), adapter=(of["mine"], of["other"])) as client:
        error = client.post("chat/completions", {"model": "plain", **asked}).error
        assert "model 'plain' has no chat template, which messages need: ask 'mine', 'other', or" in error["message"]


def test_a_base_keeps_its_own_template(make_tokenizer: Any) -> None:
    none, own, same, other = (
        load_tokenizer(make_tokenizer(name, chat_template=text))
        for name, text in (("none", None), ("own", TEMPLATE), ("same", TEMPLATE), ("other", TEMPLATE + "!"))
    )
    before = own.templates
    for lenders in ({"a": same}, {"a": other}, {"a": other, "b": none}):
        assert _lend_template({"base": own, **lenders}, "base") == "" and own.templates is before
    assert _lend_template({"base": none}, "base") == "" and not none.has_chat_template


def test_a_note_about_several_adapters_is_said_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = make_model(tmp_path / "plain")
    adapters = tuple(str(make_adapter(tmp_path / name, base)) for name in ("a ö", "b"))
    other = base.rename(tmp_path / "moved")
    with serving(model=str(other), adapter=adapters, chat_template="chatml"):
        notes = [line for line in capsys.readouterr().err.splitlines() if line.startswith("note: a ö")]
    assert len(notes) == 2
    assert notes[0].startswith(f"note: a ö, b: the adapter names {base} as its base model, not {other}: the result")
    assert notes[1].startswith("note: a ö, b: --chat-template chatml ends the assistant's turn")


def test_wrong_paths_types_and_sizes_are_refused(client: Client) -> None:
    assert client.ask("GET", "/v1/nowhere").error["type"] == "not_found_error"
    assert (client.ask("GET", "/v1/completions").status, client.ask("DELETE", "/v1/models").status) == (405, 405)
    assert client.ask("GET", "/v1/a%1bb").error["message"].startswith("GET '/v1/a\\x1bb': ")
    assert client.ask("OPTIONS", "/v1/completions").error["message"].startswith("OPTIONS /v1/completions: ")
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):  # all that a form of a page can send
        reply = client.post("completions", ASK, headers={"Content-Type": kind})
        assert reply.status == 415 and "must be application/json" in reply.error["message"]
    large = client.post("completions", b" " * ((4 << 20) + 1))
    assert large.status == 413 and "at most 4,194,304 bytes" in large.error["message"]
    assert client.complete("x", max_tokens=1, user="me", n=1, stop=None, min_tokens=0)["choices"]  # and it goes on


def test_a_body_that_does_not_come_in_time_is_status_408(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "BODY_SECONDS", 0.05)
    connection = client.connect()
    connection.putrequest("POST", "/v1/completions")
    connection.putheader("Content-Type", "application/json")
    connection.putheader("Content-Length", "9")
    connection.endheaders(b"{")
    answer = connection.getresponse()
    assert answer.status == 408 and "must come within 0.05 s" in json.loads(answer.read())["error"]["message"]
    connection.close()


def begin(client: Client, *lines: str) -> socket.socket:
    """Open a connection and send these lines of a request."""
    opened = socket.create_connection(("127.0.0.1", client.port), timeout=60)
    opened.sendall("\r\n".join(lines).encode())
    return opened


POST = ("POST /v1/completions HTTP/1.1", "Host: localhost", "Content-Type: application/json")


def test_a_connection_on_which_no_request_comes_whole_is_closed(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It sends nothing, a part of the head, or a part of a body for which the application no longer waits."""
    monkeypatch.setattr(connection, "REQUEST_SECONDS", 0.2)
    monkeypatch.setattr(body, "BODY_SECONDS", 0.05)
    for lines, answer in (((), b""), (POST[:1], b""), ((*POST, "Content-Length: 9", "", "{"), b"HTTP/1.1 408 ")):
        with begin(client, *lines) as opened:
            found = b""
            while part := opened.recv(4096):
                found += part
        assert found.startswith(answer) and bool(found) == bool(answer)
    assert client.complete("x", max_tokens=1)["choices"]


def test_a_request_too_large_is_refused_by_what_it_says_of_itself(client: Client) -> None:
    with begin(client, *POST, "Content-Length: 99999999999", "", "{") as opened:
        assert opened.recv(4096).startswith(b"HTTP/1.1 413 ")


def test_a_client_that_goes_within_its_request_is_no_fault(client: Client, capfd: pytest.CaptureFixture[str]) -> None:
    begin(client, *POST, "Content-Length: 9", "", "{").close()
    assert client.complete("x", max_tokens=1)["choices"]
    assert "internal error" not in capfd.readouterr().err


# ---- the command ---------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "--model is required: give it, or an --adapter that names it"),
        (["--model", "m", "--host", "0.0.0.0"], "--host: 0.0.0.0 is reached from other machines: set WGRAD_API_KEY"),
        (["--model", "m", "--host", "::"], "--host: :: is reached from other machines"),
        (["--model", "m", "--host", "no.such.host.invalid"], "'no.such.host.invalid' is no address of this machine"),
        (["--model", "m", "--port", "70000"], "--port: must be between 0 and 65535; got 70000"),
        (["--model", "m", "--api-key", ""], "--api-key: must be printable ASCII characters without spaces; got none"),
        (
            ["--model", "m", "--api-key", "ü"],
            "--api-key: must be printable ASCII characters without spaces; got others",
        ),
        (["--model", "m", "--max-model-len", "9"], "unknown argument --max-model-len (did you mean --context?)"),
        (["--model", "m", "--batch-size", "257"], "--batch-size: must be between 1 and 256; got 257"),
        (["--model", "m", "--adapter", "a=x", "a=y"], "--adapter: 'a' is given twice: name them apart"),
        (["--model", "m", "--adapter", "=x"], "--adapter: expected DIR or NAME=DIR, got '=x'"),
        (["--model", "m", "--port", "0", "--device", "cpu"], "--model: no such folder: m"),
        (
            ["--model", str(BASE), "--port", "0", "--device", "cpu", "--context", "513"],
            "--context: must be at most the 512",
        ),
    ],
)
def test_wrong_options_are_refused(
    words: list[str], message: str, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WGRAD_API_KEY", raising=False)
    assert main(["serve", *words]) == 2
    said = capsys.readouterr()
    assert message in said.err.splitlines()[-1] and said.out == ""


def test_what_is_not_installed_is_named() -> None:
    code = "import sys; sys.modules['uvicorn'] = None; from wgrad.train.commands.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "serve", "--model", "m"]
    done = subprocess.run(command, capture_output=True, text=True)
    message = "wgrad: error: wgrad serve: uvicorn is not installed: pip install 'wgrad[serve]'\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", message)


def test_a_port_in_use(client: Client, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--model", "m", "--port", str(client.port)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"--port: cannot listen on 127.0.0.1, port {client.port}: address already in use: end what listens" in line
