"""--data ID against a hub that answers over HTTP, through the hub's own client: its conversion to Parquet, several
configurations and splits, a token, and what it refuses."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from tests.tools import PARQUET, PYARROW
from tests.train.fake_hub import FakeHub
from wgrad.device.errors import WgradError
from wgrad.train.commands.cli import main
from wgrad.train.files import hub as hub_module
from wgrad.train.files import hub_answers, hub_data
from wgrad.train.files.hub import resolve_model
from wgrad.train.files.hub_data import data_set_files
from wgrad.train.files.hub_splits import files_of_conversion
from wgrad.train.model.load_config import load_model_config
from wgrad.train.model.model_files import open_files
from wgrad.train.step.find_model import find_model

huggingface_hub = pytest.importorskip("huggingface_hub")
CONVERSION = "refs/convert/parquet"


def table(*texts: str) -> bytes:
    """A Parquet file of records with "text"."""
    file = io.BytesIO()
    PARQUET.write_table(PYARROW.table({"text": list(texts)}), file)
    return file.getvalue()


def lines(*texts: str) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


SCRIPTED = {"name.py": b"raise SystemExit('run')", "README.md": b"", "raw/train.csv": b"a,b\n1,2\n"}


@cache
def converted() -> dict[str, bytes]:
    return {
        "en/train/0000.parquet": table("better late than never", "still waters run deep"),
        "en/train/0001.parquet": table("all that glitters is not gold"),
        "en/test/0000.parquet": table("the early bird"),
        "de/partial-train/0000.parquet": table("Morgenstund hat Gold im Mund"),
    }


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return serve(revisions, token=""), which starts the hub that the client asks from now on, with empty caches."""
    constants = pytest.importorskip("huggingface_hub.constants")
    hubs: list[FakeHub] = []

    def start(revisions: dict[str, dict[str, bytes]], token: str = "") -> FakeHub:
        hub = FakeHub("org/name", revisions, token)
        hubs.append(hub)
        monkeypatch.setattr(constants, "ENDPOINT", hub.address)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.address + "/{repo_id}/resolve/{revision}/{filename}"
        )
        return hub

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_TOKEN", "")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    yield start
    for hub in hubs:
        hub.close()


def test_a_script_is_read_as_the_hub_converted_it(serve: Any, make_tokenizer: Any, capsys: Any) -> None:
    hub = serve({"main": SCRIPTED, CONVERSION: converted()})
    words = ["data", "show", "org/name:en/train", "--model", str(make_tokenizer()), "--examples", "3"]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "2 examples to train on, 1 held out" in said and "that glitters is not gold" in said
    paths, (note,) = data_set_files("org/name:en/train", "--data")
    assert [Path(path).name for path in paths] == ["0000.parquet", "0001.parquet"]
    assert note.endswith("2 files of its split train, as the hub converted it to Parquet")
    asked = len(hub.asked)
    assert asked < 12 and not any("raw" in path or "name.py" in path for path in hub.asked)
    assert main(words) == 0 and len(hub.asked) == asked  # nobody is asked again
    _, (note,) = data_set_files("org/name:de/train", "--data")
    assert note.endswith("as the hub converted it to Parquet: only the beginning was converted")
    for spec, message in {
        "org/name": r"has several configurations \(de, en\): name one, as ID:NAME/train",
        "org/name:fr/train": "has no configuration 'fr'; it has de, en",
        "org/name:en/dev": "has no split 'dev' of data files; it has test, train: name one",
    }.items():
        with pytest.raises(WgradError, match=f"^--data: org/name on the Hugging Face Hub: {message}"):
            data_set_files(spec, "--data")


@pytest.mark.parametrize("kind", ["main", CONVERSION])
def test_held_out_data_is_the_split_for_it(serve: Any, kind: str) -> None:
    """With and without asking the hub, and without confusion with the split to train on."""
    files = {f"default/{split}/0000.parquet": table(split) for split in ("train", "validation", "test")}
    hub = serve({"main": {"name.py": b""}, kind: files})
    asked = []
    for _ in range(2):
        for held_out, split in ((True, "validation"), (False, "train")):
            (path,), (note,) = data_set_files("org/name", "--eval-data", held_out)
            assert Path(path).parent.name == split and f"1 file of its split {split}" in note
        asked.append(len(hub.asked))
    assert 0 < asked[0] == asked[1]
    paths, (note,) = data_set_files("org/name:test", "--eval-data", True)
    assert Path(paths[0]).parent.name == "test" and "of its split test" in note


def test_files_that_cannot_be_read_are_read_as_converted(serve: Any) -> None:
    """And files that can be are, where there is a conversion too."""
    hub = serve({"main": {"train.txt.zst": b"?"}, CONVERSION: {"default/train/0000.parquet": table("x")}})
    paths, _ = data_set_files("org/name", "--data")
    assert [Path(path).name for path in paths] == ["0000.parquet"]
    hub.revisions["main"] = {"train.jsonl": lines("x"), "test.jsonl": lines("y"), "load.py": b""}
    paths, notes = data_set_files("org/name:test", "--data")
    assert [Path(path).name for path in paths] == ["test.jsonl"] and "converted" not in notes[0]


def test_without_a_conversion_it_is_said_what_the_files_are(serve: Any) -> None:
    hub = serve({"main": {"name.py": b""}})
    with pytest.raises(WgradError, match=r"no Parquet, JSON or CSV files \(its script name.py is not run\)"):
        data_set_files("org/name", "--data")
    hub.revisions["main"]["train.csv"] = b"text\nx\n"
    assert Path(data_set_files("org/name", "--data")[0][0]).name == "train.csv"


def test_a_private_one_takes_a_token(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = serve({"main": {"train.jsonl": lines("x")}}, token="hf_right")
    for token in ("", "hf_wrong"):
        monkeypatch.setenv("HF_TOKEN", token)
        with pytest.raises(WgradError, match="or it is private: check the name; to be let in, set HF_TOKEN") as caught:
            data_set_files("org/name", "--data")
        assert "\n" not in str(caught.value) and "hf_" not in str(caught.value)
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    assert data_set_files("org/name", "--data")[0] and hub.asked


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        ((403, "GatedRepo", "gated"), "its owner asks you to accept terms first: do so on huggingface.co/datasets/org"),
        ((404, "RepoNotFound", ""), "there is no such data set or file, or it is private: check the name"),
        ((401, "", "Invalid credentials in Authorization header"), "the hub does not accept the token: make another"),
        ((403, "", "no"), "the hub does not let this token read it: give the token that right"),
        ((418, "", "no"), r"and the Hugging Face Hub cannot be reached \(.*418.*\), nor is it in its cache"),
    ],
)
def test_what_the_hub_refuses_is_one_line(failure: Any, message: str, serve: Any) -> None:
    serve({"main": {"train.jsonl": lines("x")}}).failure = failure
    with pytest.raises(WgradError, match=f"^--data: .*{message}") as caught:
        data_set_files("org/name", "--data")
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


@pytest.mark.parametrize("silent", ["", "/(revision|tree)/", "/resolve/"])
def test_a_hub_that_stops_answering_is_an_error_in_time(
    silent: str, serve: Any, make_checkpoint: Any, monkeypatch: Any
) -> None:
    """The client has no limit of its own for most requests: the run would wait for ever."""
    monkeypatch.setattr(hub_answers, "ANSWER_SECONDS", 0.3)
    for module in (hub_module, hub_data):
        monkeypatch.setattr(module, "ANSWER_SECONDS", 0.3)
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 0.3)
    files = {path.name: path.read_bytes() for path in make_checkpoint().iterdir()}
    found = serve({"main": {"train.jsonl": lines("x"), **files}})
    found.silence, found.silent = Event(), silent
    for ask, option in ((data_set_files, "--data"), (resolve_model, "--model")):
        begun = time.monotonic()
        with pytest.raises(WgradError, match=f"^{option}: .*(no answer in 0.3 s|cannot be reached)"):
            ask("org/name", option)
        assert time.monotonic() - begun < 4


def test_a_request_keeps_a_limit_of_its_own(serve: Any) -> None:
    found = serve({"main": {}})
    found.silence, begun = Event(), time.monotonic()
    with pytest.raises(TimeoutError), hub_answers.answers_in_time(4.5):
        huggingface_hub.get_session().get(f"{found.address}/api/datasets/org/name", timeout=0.2)
    assert time.monotonic() - begun < 3


def test_a_request_that_was_answered_may_be_sent_again_later(serve: Any) -> None:
    address = serve({"main": {"train.jsonl": lines("x")}}).address
    session = huggingface_hub.get_session()
    hooks = getattr(session, "event_hooks", None)
    with hub_answers.answers_in_time(0.2):
        for _ in range(2):
            assert session.get(f"{address}/api/datasets/org/name").status_code == 200
            time.sleep(0.25)
    assert getattr(session, "event_hooks", None) == hooks


@pytest.mark.parametrize(
    ("names", "asked", "wanted"),
    [
        (["default/train/0001.parquet", "default/train/0000.parquet"], ("", "train"), (["0", "1"], False)),
        (["default/train/0000.parquet", "b/train/0000.parquet"], ("", "train"), (["0"], False)),
        (["default/partial-train/0000.parquet"], ("default", "train"), (["0"], True)),
        (["en/train/0000.parquet", ".gitattributes"], ("", "train"), (["0"], False)),
        (["en/train/0000.parquet"], ("", "en"), "has no split 'en' .*; it has train: name one, or en/train for its"),
        ([".gitattributes", "a/b.parquet"], ("", "train"), "the Hub's own conversion to Parquet is empty"),
    ],
)
def test_files_of_a_converted_split_are_found(names: list[str], asked: tuple[str, str], wanted: Any) -> None:
    if isinstance(wanted, str):
        with pytest.raises(WgradError, match=wanted):
            files_of_conversion(names, *asked, "--data: ID")
    else:
        split, files, partial = files_of_conversion(names, *asked, "--data: ID")
        assert split == asked[1]
        assert ([str(int(name.rpartition("/")[2][:4])) for name in files], partial) == wanted
        assert all(name.startswith((asked[0] or "default", "en")) for name in files)


# ---- a model without its weights -------------------------------------------------------------------
@pytest.mark.parametrize("shards", [1, 3])
def test_a_plan_fetches_no_weights(shards: int, serve: Any, make_checkpoint: Any, tmp_path: Path) -> None:
    """Headers alone, from which the same sizes follow; what the cache holds whole is taken from there."""
    wide = {"hidden_size": 256, "intermediate_size": 704, "head_dim": 64}
    folder, scratch = make_checkpoint(shards=shards, **wide), tmp_path / "scratch"
    scratch.mkdir()
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    size = sum(len(data) for name, data in files.items() if name.endswith(".safetensors"))
    hub = serve({"main": files})
    found = find_model("org/name", scratch=scratch)
    assert found == scratch and hub.sent < 100_001 * shards + 20_000 < size / 10
    ours, theirs = (open_files(place, load_model_config(place))[0].entries for place in (found, folder))
    assert {n: (e.dtype, e.shape) for n, e in ours.items()} == {n: (e.dtype, e.shape) for n, e in theirs.items()}
    whole = find_model("org/name")
    assert find_model("org/name", scratch=scratch) == whole != scratch


@pytest.mark.parametrize("command", ["warm", "plan"])
def test_commands_that_read_sizes_fetch_no_weights(
    command: str, serve: Any, make_checkpoint: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch, wgpu_device: Any
) -> None:
    """On NumPy there is nothing to compile. What `plan` does with the folder is tested elsewhere."""
    monkeypatch.setattr("wgrad.train.commands.plan.select_device", lambda *_, **__: wgpu_device)
    monkeypatch.setattr("wgrad.train.commands.plan._plan", lambda *_: print("nothing to compile") or 0)
    folder = make_checkpoint(hidden_size=256, intermediate_size=704, head_dim=64)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    hub = serve({"main": files})
    assert main([command, "--model", "org/name", "--device", "cpu"]) == 0
    assert "nothing to compile" in capsys.readouterr().out
    assert 1000 < hub.sent < 120_001 < len(files["model.safetensors"]) / 10


def test_a_plan_fetches_quantized_weights(serve: Any, make_checkpoint: Any, tmp_path: Path) -> None:
    """Whose sizes are in their contents."""
    quantized = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    folder = make_checkpoint(quantization_config=quantized)
    serve({"main": {path.name: path.read_bytes() for path in folder.iterdir()}})
    found = find_model("org/name", scratch=tmp_path)
    assert (
        found != tmp_path and (found / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    )


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("README.md", "org/name has no config.json on the Hugging Face Hub"),
        ("config.json", "--model: no such folder: org/name; from the Hugging Face Hub: fetching failed"),
    ],
)
def test_a_plan_of_what_the_hub_does_not_have(name: str, message: str, serve: Any, tmp_path: Path) -> None:
    serve({"main": {name: b"{}"}})
    with pytest.raises(WgradError, match=message):
        find_model("org/name", scratch=tmp_path)
