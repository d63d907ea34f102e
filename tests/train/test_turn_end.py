"""An adapter's own tokenizer and chat template, and the token that ends a turn: read, used, saved, exported."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import wgrad
from tests.train.chat_model import END, OTHER, TEMPLATE, make_adapter, make_model
from tests.train.serving import serving
from wgrad.device.errors import WgradError
from wgrad.train.commands.cli import main
from wgrad.train.data.tokenizer import load_tokenizer
from wgrad.train.data.tokenizer_source import find_source, open_tokenizer, save_tokenizer


# ---- the end of a turn ---------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("template", "end"),
    [
        (TEMPLATE, END),
        ("{% for m in messages %}{{ m['content'] }}{{ eos_token }}{% endfor %}", "<|end|>"),
        ("{% for m in messages %}{{ m['content'] }} \n <turn/><|end|>{% endfor %}", END),
        ("{% for m in messages %}{% if not loop.first %}<turn/>{% endif %}{{ m['content'] }}{% endfor %}", END),
        ("{% for m in messages %}{{ m['content'] }}{% endfor %}<turn/>", END),
        ("{% for m in messages %}### {{ m['role'] }}: {{ m['content'] }}\n{% endfor %}", None),
        ("{% for m in messages %}{{ m['content'] }} end of it <turn/>{% endfor %}", None),
        ("<turn/>{{ messages[0]['content'] }}<turn/>", None),  # which answers the template leaves out
        ("{{ raise_exception('never') }}", None),
        ("{{ broken", None),
        (None, None),
    ],
)
def test_the_token_behind_the_assistants_text_ends_a_turn(
    tmp_path: Path, template: str | None, end: str | None
) -> None:
    folder = make_model(tmp_path / "model")
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    tokenizer = load_tokenizer(folder)
    found = tokenizer.turn_end_id
    assert (None if found is None else tokenizer.token_text(found)) == end
    assert tokenizer.stop_ids == {0} | (set() if found is None else {found})


def test_generation_stops_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the library, the command, a chat, and over HTTP; without a template it goes on to the length."""
    folder = make_model(tmp_path / "model")
    with wgrad.load(str(folder), device="cpu", context=64) as model:
        assert model.generate("the fox", max_new_tokens=5, temperature=0).finish == "length"
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    with wgrad.load(str(folder), device="cpu", context=64) as model:
        for prompt in ("the fox", [{"role": "user", "content": "the fox"}]):
            assert model.generate(prompt, max_new_tokens=5, temperature=0).finish == "stop"
        assert [one.finish for one in model.generate_many(["a", "b"], max_new_tokens=5, temperature=0)] == ["stop"] * 2
    with serving(model=str(folder), context=64) as client:
        reply = client.post("chat/completions", {"model": "model", "messages": [{"role": "user", "content": "fox"}]})
        assert reply.json["choices"][0]["finish_reason"] == "stop"
        assert client.complete("the fox", max_tokens=5)["choices"][0]["finish_reason"] == "stop"
    words = ["--model", str(folder), "--prompt", "the fox", "--device", "cpu", "--max-new-tokens", "5"]
    assert main(["generate", *words]) == 0
    assert capsys.readouterr().out == "the fox\n"


def test_the_end_of_a_turn_is_saved(tmp_path: Path) -> None:
    """Next to what is there already, in generation_config.json as transformers reads it."""
    folder = make_model(tmp_path / "model")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    for given, wanted in (
        (None, [0, 299]),
        ({"eos_token_id": 0, "top_k": 3}, [0, 299]),
        ({"eos_token_id": [5, 299]}, [5, 299, 0]),
    ):
        if given is not None:
            (folder / "generation_config.json").write_text(json.dumps(given))
        out = tmp_path / f"out-{wanted}-{given is None}"
        save_tokenizer(load_tokenizer(folder), find_source(folder, None), out)
        saved = json.loads((out / "generation_config.json").read_text())
        assert saved["eos_token_id"] == wanted and saved.get("top_k") == (given or {}).get("top_k")


@pytest.mark.oracle
def test_merged_models_stop_in_transformers_and_llama_cpp(tmp_path: Path) -> None:
    transformers, llama_cpp = pytest.importorskip("transformers"), pytest.importorskip("xllamacpp")
    folder = make_model(tmp_path / "model")
    adapter = make_adapter(tmp_path / "adapter", folder, template=TEMPLATE)
    words = ["--model", str(folder), "--adapter", str(adapter), "--no-compare", "--device", "cpu"]
    assert main(["merge", *words, "--out", f"{tmp_path}/merged"]) == 0
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "merged")
    asked = tokenizer.apply_chat_template([{"role": "user", "content": "fox"}], add_generation_prompt=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    ids = model.generate(**tokenizer("fox", return_tensors="pt"), max_new_tokens=5, do_sample=False)[0].tolist()
    assert ids[-1] == 299 and ids.count(299) == 1 and asked
    assert main(["merge", *words, "--format", "gguf", "--out", f"{tmp_path}/gguf"]) == 0
    # Once more, onto the model in GGUF without a template.
    plain = ["--adapter", str(make_adapter(tmp_path / "plain", folder)), "--no-compare", "--device", "cpu"]
    assert main(["merge", *plain, "--format", "gguf", "--out", f"{tmp_path}/base"]) == 0
    words[1] = str(tmp_path / "base/model.gguf")
    assert main(["merge", *words, "--onto", "original", "--format", "gguf", "--out", f"{tmp_path}/again"]) == 0
    for name, finish in (("gguf", "stop"), ("again", "stop"), ("base", "length")):
        params = llama_cpp.CommonParams()
        params.model.path, params.n_ctx, params.n_parallel = f"{tmp_path}/{name}/model.gguf", 64, 1
        params.warmup, params.verbosity, params.cpuparams.n_threads = False, -1, 1
        request = {"prompt": "fox", "n_predict": 5, "temperature": 0}
        answer = llama_cpp.Server(params).handle_completions(request)
        assert answer["choices"][0]["finish_reason"] == finish, name


# ---- the files next to an adapter ----------------------------------------------------------------
@pytest.mark.oracle
@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("base", [None, OTHER])
def test_an_adapters_template_is_used_everywhere(
    own: bool, base: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """own: with the tokenizer, as transformers reads it; else the template alone."""
    folder = make_model(tmp_path / "model", always=290)
    if base is not None:
        (folder / "chat_template.jinja").write_text(base)
    adapter = make_adapter(tmp_path / "adapter", folder, own, TEMPLATE)
    turns = [{"role": "user", "content": "the fox"}]
    ids = load_tokenizer(folder).encode("user: the fox<turn/>\nassistant: ")
    if own:
        theirs = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(adapter)
        assert theirs.apply_chat_template(turns, add_generation_prompt=True)["input_ids"] == ids
    with wgrad.load(str(folder), adapter=str(adapter), device="cpu", context=64) as model:
        assert model.generate(turns, max_new_tokens=2).prompt_tokens == len(ids)
    with serving(model=str(folder), adapter=(str(adapter),), context=64) as client:
        ask = {"messages": turns, "max_tokens": 2}
        reply = client.post("chat/completions", {"model": "adapter", **ask}).json
        assert reply["usage"]["prompt_tokens"] == len(ids)
        # A base model is asked as it says itself, and as its adapter does where it says nothing.
        base_ids = load_tokenizer(folder).encode("[user] the fox<|end|>") if base else ids
        reply = client.post("chat/completions", {"model": "model", **ask}).json
        assert reply["usage"]["prompt_tokens"] == len(base_ids)
    words = ["--adapter", str(adapter), "--device", "cpu"]
    (tmp_path / "data.jsonl").write_text(json.dumps({"messages": [*turns, {"role": "assistant", "content": "yes"}]}))
    capsys.readouterr()
    assert main(["eval", *words, "--data", f"{tmp_path}/data.jsonl", "--json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["examples"] == 1
    assert f"note: chat template taken from {adapter}, not from the base model" in said.err
    assert main(["merge", *words, "--no-compare", "--out", f"{tmp_path}/merged"]) == 0
    assert f"note: chat template taken from {adapter}" in capsys.readouterr().err
    assert load_tokenizer(tmp_path / "merged").templates == {"default": TEMPLATE}
    assert main(["export", "--adapter", str(adapter), "--gguf-lora", f"{tmp_path}/adapter.gguf"]) == 0
    assert f"note: chat template taken from {adapter}, not from the base model; a GGUF" in capsys.readouterr().err


def test_the_same_tokenizer_is_no_news(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    adapter = make_adapter(tmp_path / "adapter", folder, True, TEMPLATE)
    assert open_tokenizer(folder, adapter, 300)[1] == ""
    again = json.loads((adapter / "tokenizer.json").read_text())
    (adapter / "tokenizer.json").write_text(json.dumps(again, indent=2))  # written by another version
    assert open_tokenizer(folder, adapter, 300)[1] == ""


def test_an_adapters_own_tokens_are_used(tmp_path: Path) -> None:
    """One that the model has no row for is refused where it is used."""
    folder = make_model(tmp_path / "model")
    (folder / "chat_template.jinja").write_text(OTHER)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7]}))
    adapter = make_adapter(tmp_path / "adapter", folder, True)
    raw = json.loads((adapter / "tokenizer.json").read_text())
    raw["added_tokens"].append({**raw["added_tokens"][0], "id": 300, "content": "<new>"})
    (adapter / "tokenizer.json").write_text(json.dumps(raw))
    (adapter / "tokenizer_config.json").write_text(json.dumps({"eos_token": END, "pad_token": "<new>"}))
    tokenizer, note = open_tokenizer(folder, adapter, 300)
    assert note == f"tokens and special tokens taken from {adapter}, not from the base model"
    assert (tokenizer.eos_id, tokenizer.pad_id, tokenizer.stop_ids) == (299, None, {299, 7})
    assert tokenizer.templates == {"default": OTHER}  # the only one there is
    with pytest.raises(WgradError, match=r"the token '<new>' \(id 300\), but the model has rows for 300 tokens only"):
        tokenizer.encode("the <new> fox")
    (adapter / "tokenizer.json").write_text("{")
    with pytest.raises(WgradError, match=rf"^--adapter: {adapter}/tokenizer.json is not a tokenizer that can be read"):
        open_tokenizer(folder, adapter, 300)


def test_a_model_without_a_tokenizer_has_its_adapters(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model")
    adapter = make_adapter(tmp_path / "adapter", folder, True, TEMPLATE)
    for path in folder.glob("tokenizer*"):
        path.unlink()
    tokenizer, note = open_tokenizer(folder, adapter, 300)
    assert note == f"tokenizer taken from {adapter}: the base model has none" and tokenizer.turn_end_id == 299


def test_a_checkpoint_has_what_is_next_to_the_result(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model")
    run = make_adapter(tmp_path / "run", folder, template=TEMPLATE)
    step = make_adapter(run / "checkpoints" / "step-2", folder)
    assert find_source(folder, step).adapter == run
    (step / "chat_template.jinja").write_text(OTHER)
    assert find_source(folder, step).adapter == step
    assert find_source(folder, make_adapter(run / "other" / "step-2", folder)).adapter is None


@pytest.mark.oracle
@pytest.mark.parametrize("full", [True, False])
def test_a_run_and_a_merge_copy_files_next_to_the_model(full: bool, tmp_path: Path) -> None:
    """Named templates, and whatever else transformers saves next to a model."""
    folder = make_model(tmp_path / "model", always=290)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    others = ("special_tokens_map.json", "added_tokens.json", "preprocessor_config.json", "generation_config.json")
    for name in others:
        (folder / name).write_text(json.dumps({"top_p": 0.5} if name.startswith("gen") else {}))
    (tmp_path / "data.jsonl").write_text(json.dumps({"text": "the fox"}) + "\n")
    words = ["finetune", "--model", str(folder), "--data", f"{tmp_path}/data.jsonl", "--eval-fraction", "0", "--device",
             "cpu", "--max-steps", "1", "--batch-size", "1", "--gradient-accumulation-steps", "1", "--max-length", "16",
             "--sample-prompt", "the<turn/> fox", "--out", f"{tmp_path}/out",
             *(["--full"] if full else ["--lora-r", "2"])]  # fmt: skip
    assert main(words) == 0
    out = tmp_path / "out"
    samples = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
    assert {sample["prompt"] for sample in samples} == {"the<turn/> fox"}  # special tokens are shown
    if not full:
        assert find_source(folder, out).adapter == out and open_tokenizer(folder, out, 300)[1] == ""
        out = tmp_path / "merged"
        merge = ["merge", "--adapter", f"{tmp_path}/out", "--no-compare", "--device", "cpu", "--out", str(out)]
        assert main(merge) == 0
    assert all((out / name).exists() for name in others)
    saved = json.loads((out / "generation_config.json").read_text())
    assert saved == {"top_p": 0.5, "eos_token_id": [0, 299]}
    theirs = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(out).chat_template
    assert theirs == load_tokenizer(out).templates == {"default": TEMPLATE, "tool_use": "{{ tools }}"}


@pytest.mark.parametrize("key", ["chat_template.json", "tokenizer_config.json"])
def test_templates_in_other_places_are_saved(key: str, tmp_path: Path) -> None:
    """Those of an adapter also where the base has a file of the kind that counts first."""
    folder = make_model(tmp_path / "model")
    (folder / "chat_template.jinja").write_text(OTHER)
    adapter = make_adapter(tmp_path / "adapter", folder)
    named: Any = {"default": TEMPLATE, "rag": "x"}
    if key == "tokenizer_config.json":
        named = [{"name": name, "template": text} for name, text in named.items()]
    (adapter / key).write_text(json.dumps({"chat_template": named}))
    source = find_source(folder, adapter)
    save_tokenizer(source.load()[0], source, tmp_path / "out")
    assert load_tokenizer(tmp_path / "out").templates == {"default": TEMPLATE, "rag": "x"}


def test_a_base_that_is_not_there_is_the_adapters_fault(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_model(tmp_path / "model")
    adapter = make_adapter(tmp_path / "adapter", folder)
    shutil.rmtree(folder)
    for words in (["merge", "--out", f"{tmp_path}/out"], ["export", "--gguf-lora", f"{tmp_path}/a.gguf"]):
        assert main([*words, "--adapter", str(adapter)]) == 2
        assert f"--adapter: its base model, '{folder}', is not to be had" in capsys.readouterr().err
