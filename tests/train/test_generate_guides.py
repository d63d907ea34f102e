"""`wgrad generate --json-schema` and `--regex`: text that keeps to a grammar."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import wgrad
from tests.train.conftest import CHATML
from tests.train.serving import BASE
from wgrad.autograd.ops.decoding import sample_settings
from wgrad.device.contract import Device
from wgrad.device.errors import UnusableResult, WgradError
from wgrad.train.commands.cli import main
from wgrad.train.data.thoughts import end_of_thought
from wgrad.train.data.tokenizer import load_tokenizer
from wgrad.train.inference.generation import generate_batch
from wgrad.train.inference.guide import _FORMATS, MASKED, Grammars, _known_formats, json_grammar
from wgrad.train.inference.guided import Anything, guided_batch
from wgrad.train.model.load_config import load_model_config
from wgrad.train.options.generate_config import GREEDY, Sampling
from wgrad.train.step.build import build_frozen


def generate(*words: object) -> int:
    return main(["generate", "--model", str(BASE), "--device", "cpu", "--prompt", "A", *map(str, words)])


def test_text_keeps_to_the_grammar(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "schema.json"
    path.write_text('{"enum": ["fool", 12]}', encoding="utf-8")
    assert generate("--json-schema", path) == 0
    assert json.loads(capsys.readouterr().out.removeprefix("A")) in ("fool", 12)
    assert generate("--regex", "[0-9]{3}-[a-z]{2}") == 0
    assert re.fullmatch(r"A[0-9]{3}-[a-z]{2}\n", capsys.readouterr().out)


@pytest.mark.parametrize("temperature", [1e18, 1e300])
def test_forbidden_tokens_weigh_nothing_at_any_temperature(device: Device, temperature: float) -> None:
    logits = np.random.default_rng(1).normal(0, 9, (64, 301)).astype(np.float32)
    logits[:, 3:] += MASKED
    uniform = np.linspace(0, 1, 64, endpoint=False, dtype=np.float32)
    settings = np.stack([sample_settings(temperature, top_p=p) for p in (0.9, 1.0)] * 32)
    ids = device.download(device.sample(*map(device.upload, (logits, uniform, settings))))
    assert set(ids.tolist()) == {0, 1, 2}


def test_each_of_many_prompts_keeps_to_it(write_lines: Any, capsys: Any) -> None:
    """Whatever the size of a batch, to the same text."""
    data = write_lines(*({"prompt": text} for text in ("A wise", "The way of a fool", "My son")))
    words = ["generate", "--model", str(BASE), "--device", "cpu", "--prompts", str(data), "--regex", "[a-c]{2,5}d"]
    assert main([*words, "--batch-size", "2"]) == 0
    found = capsys.readouterr().out
    assert len(found.splitlines()) == 3
    assert all(re.fullmatch("[a-c]{2,5}d", json.loads(line)["generated"]) for line in found.splitlines())
    assert main([*words, "--batch-size", "3"]) == 0 and capsys.readouterr().out == found


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]", "--json-schema: PATH: a schema is an object, got list: give one"),
        ('{"a"', "--json-schema: PATH: not JSON: Expecting ':' delimiter: line 1 column 5"),
        ('{"type": "nonsense"}', "--json-schema: PATH: llguidance refuses it: "),
        (None, "--json-schema: no such file: PATH"),
    ],
)
def test_a_schema_that_cannot_be_is_refused(text: str | None, message: str, tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "schema.json"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    assert generate("--json-schema", path) == 2
    assert message.replace("PATH", str(path)) in capsys.readouterr().err


def test_guides_that_cannot_be_used_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    assert generate("--regex", "[0-9") == 2
    assert "--regex: llguidance refuses it: invalid regex" in capsys.readouterr().err
    assert generate("--regex", "a", "--json-schema", tmp_path / "x") == 2
    assert "--regex: --json-schema is given already: leave one of the two out" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "llguidance", None)
    assert generate("--regex", "a") == 2
    assert "--regex: llguidance is not installed: pip install 'wgrad[guided]'" in capsys.readouterr().err


def test_a_format_that_llguidance_does_not_know_is_an_annotation(make_tokenizer: Any) -> None:
    """Not in values and names, which may look like one. Those that it knows still constrain."""
    secret = {"type": "string", "format": "password"}
    found = {"properties": {"format": secret, "default": secret, "b": {"format": "date"}}}
    kept = {"const": {"format": "iri"}, "enum": [{"format": "x"}], "anyOf": [{"format": "binary", "type": "string"}]}
    assert _known_formats({**found, **kept}) == {
        "properties": {"format": {"type": "string"}, "default": {"type": "string"}, "b": {"format": "date"}},
        "const": {"format": "iri"}, "enum": [{"format": "x"}], "anyOf": [{"type": "string"}],
    }  # fmt: skip
    llguidance = pytest.importorskip("llguidance")
    grammars = Grammars(load_tokenizer(make_tokenizer()), 300)
    for name in sorted({*_FORMATS, "password"}):
        grammars.guides(json_grammar({"type": "string", "format": name}), [""])
    matcher = llguidance.LLMatcher(
        grammars._tokens, 'start: %json {"type": "string", "format": "password"}', log_level=0
    )
    assert "Unknown format" in matcher.get_error()


def test_a_grammar_of_the_empty_text_alone_is_taken(make_tokenizer: Any) -> None:
    pytest.importorskip("llguidance")
    grammars = Grammars(load_tokenizer(make_tokenizer()), 300)
    assert len(grammars.guides('start: ""', [""])) == 1
    with pytest.raises(WgradError, match="no text fits it"):
        grammars.guides(r"start: /[^\s\S]/", [""])


def test_a_thought_that_the_prompt_has_begun_is_not_bound(make_tokenizer: Any) -> None:
    tokenizer = load_tokenizer(make_tokenizer(chat_template=CHATML + "{# <think> </think> #}"))
    assert end_of_thought(tokenizer, tokenizer.encode("a b <think>\n")) == "</think>"
    assert end_of_thought(tokenizer, tokenizer.encode("a b")) == ""


def test_where_nothing_is_forbidden_text_is_as_without(make_checkpoint: Any, cpu: Device) -> None:
    """Also past the length at which angles change; a grammar that cannot go on ends the text."""
    longrope = {"rope_type": "longrope", "short_factor": [1.1] * 6, "long_factor": [4.5, 7.0, 9.0, 3.0, 2.0, 1.5]}
    changes = {"rope_scaling": longrope, "original_max_position_embeddings": 16, "max_position_embeddings": 64}
    folder = make_checkpoint("Phi3ForCausalLM", **changes)
    model = build_frozen(load_model_config(folder), folder, cpu, positions=64)
    for sampling in (GREEDY, Sampling(temperature=1.0, seed=3)):
        given = [[5, 9, 2], [7] * 12], 9, sampling, (4,)
        free = [Anything(model.config.vocab_size)] * 2
        assert guided_batch(model, *given, free) == generate_batch(model, *given)

    class Ends(Anything):
        error = "no way"

        def add(self, token: int) -> bool:
            return True

    with pytest.raises(UnusableResult, match="the grammar cannot go on: no way"):
        guided_batch(model, [[5]], 9, GREEDY, (), [Ends(model.config.vocab_size)])


def test_the_library_keeps_to_it_as_the_command_does(tmp_path: Path) -> None:
    """A schema may be a mapping, JSON text or a file; an answer that its grammar ends has not been cut."""
    schema = {"enum": ["fool", 12]}
    path = tmp_path / "schema.json"
    path.write_text(json.dumps(schema), encoding="utf-8")
    short: dict[str, Any] = {"max_new_tokens": 8}
    with wgrad.load(BASE, device="cpu", context=24) as model:
        made = [model.generate("A", json_schema=given, **short) for given in (schema, json.dumps(schema), path)]
        assert json.loads(made[0].text) in ("fool", 12) and made == [made[0]] * 3 and made[0].finish == "stop"
        dates = model.generate_many(["A", "The way", "B"], regex="[0-9]{2}-[a-z]", max_new_tokens=4, batch_size=2)
        assert all(re.fullmatch("[0-9]{2}-[a-z]", one.text) and one.finish == "stop" for one in dates)
        assert dates[0] == model.generate("A", regex="[0-9]{2}-[a-z]", max_new_tokens=4)
        assert "".join(model.stream("A", regex="[0-9]{2}-[a-z]", max_new_tokens=4)) == dates[0].text
        assert model.generate("A", regex="[a-z]{9}", max_new_tokens=3).finish == "length"
        for given, message in (
            ({"regex": "a", "json_schema": schema}, "--regex: --json-schema is given already"),
            ({"json_schema": {"type": "nonsense"}}, "--json-schema: .*nonsense.*: llguidance refuses it"),
            ({"json_schema": {"enum": {1}}}, "--json-schema: cannot be written as JSON"),
            ({"json_schema": [1]}, r"--json-schema: expected text, got \[1\]"),
        ):
            with pytest.raises(wgrad.WgradError, match=message):
                model.generate("A", **given, **short)  # type: ignore[arg-type]
    with pytest.raises(wgrad.WgradError, match="--regex: llguidance refuses it"):
        wgrad.generate(model=BASE, device="cpu", prompt="A", regex="[0-9")
    found = wgrad.generate(model=BASE, device="cpu", prompt="A", json_schema=schema, **short)
    assert found == made[0]
