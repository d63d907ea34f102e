"""--data ID: the files of a split of a Hub data set, of a faked hub and its cache; none asked once they are there."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from wgrad.device.errors import WgradError
from wgrad.train.commands.cli import main
from wgrad.train.files.hub_data import data_set_files, is_data_set
from wgrad.train.files.hub_splits import files_of_split, missing_shards, usual_split

hub = pytest.importorskip("huggingface_hub")
COMMIT = "c" * 40
LINES = {name: [{"text": f"{name} better late than never {i}"} for i in range(9)] for name in ("train", "test")}
FILES = {
    "data/train-00000-of-00002.jsonl": LINES["train"][:5],
    "data/train-00001-of-00002.jsonl": LINES["train"][5:],
    "data/test-00000-of-00001.jsonl": LINES["test"],
    "one.jsonl": LINES["train"],
    "script.py": "raise SystemExit('run')",
    "dataset_infos.json": "{}",
}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub's cache, empty; every socket is refused."""

    def refuse(*args: Any, **options: Any) -> Any:
        raise ConnectionRefusedError("no network here")

    for name in ("connect", "connect_ex", "sendto"):
        monkeypatch.setattr(socket.socket, name, refuse)
    for name in ("getaddrinfo", "gethostbyname", "create_connection"):
        monkeypatch.setattr(socket, name, refuse)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub" / "datasets--org--name"


def fill(cache: Path, *names: str) -> Path:
    """Files of the data set as the hub's client keeps them."""
    (cache / "refs").mkdir(parents=True, exist_ok=True)
    (cache / "refs" / "main").write_text(COMMIT)
    for name in names:
        path = cache / "snapshots" / COMMIT / name
        path.parent.mkdir(parents=True, exist_ok=True)
        content = FILES[name]
        path.write_text(content if isinstance(content, str) else "".join(json.dumps(x) + "\n" for x in content))
    return cache / "snapshots" / COMMIT


def reach(monkeypatch: pytest.MonkeyPatch, cache: Path, *names: str) -> list[list[str]]:
    """Set the files of a fake hub, and return a list to which each fetch adds its files."""
    fetched: list[list[str]] = []
    info = SimpleNamespace(sha=COMMIT, siblings=[SimpleNamespace(rfilename=name) for name in names])
    download = hub.snapshot_download

    def fetch(repo_id: str, **options: Any) -> str:
        if options.get("local_files_only"):
            return download(repo_id, **options)
        assert repo_id == "org/name" and options["repo_type"] == "dataset" and options["revision"] == COMMIT
        fetched.append(list(hub.utils.filter_repo_objects(names, allow_patterns=options["allow_patterns"])))
        return str(fill(cache, *fetched[-1]))

    monkeypatch.setattr(hub, "snapshot_download", fetch)
    monkeypatch.setattr(hub.HfApi, "dataset_info", lambda self, repo_id, timeout: info)
    return fetched


def test_a_run_from_the_hub_and_then_without_it(
    cache: Path, make_checkpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    model = make_checkpoint(hidden_size=16, intermediate_size=24, num_hidden_layers=1)
    words = ["finetune", "--model", str(model), "--device", "cpu", "--max-steps", "1", "--no-sample"]
    words += ["--max-length", "16"]
    words += ["--data", "org/name", "--eval-data", "org/name:test"]
    with monkeypatch.context() as patch:
        fetched = reach(patch, cache, *FILES)
        assert main([*words, "--out", str(tmp_path / "a")]) == 0
    assert fetched == [[f"data/train-0000{i}-of-00002.jsonl" for i in (0, 1)], ["data/test-00000-of-00001.jsonl"]]
    said = capsys.readouterr().out
    assert "data: 9 examples to train on, 9 held out" in said
    assert "note: org/name is a data set of the Hugging Face Hub: 2 files of its split train" in said
    assert main([*words, "--out", str(tmp_path / "b")]) == 0  # from the cache
    weights = [(tmp_path / out / "adapter_model.safetensors").read_bytes() for out in ("a", "b")]
    assert weights[0] == weights[1]


def test_what_a_fetch_noted_is_taken_and_a_file_that_is_gone_is_fetched_anew(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        fetched = reach(patch, cache, "one.jsonl", "script.py")
        (path,), _ = data_set_files("org/name", "--data")
        assert data_set_files("org/name", "--data")[0] == [path] and fetched == [["one.jsonl"]]
    assert Path(path).name == "one.jsonl" and data_set_files("org/name", "--data")[0] == [path]
    Path(path).unlink()
    with pytest.raises(WgradError, match=r"--data: no such file: org/name; and the Hugging Face Hub cannot be reached"):
        data_set_files("org/name", "--data")
    reach(monkeypatch, cache, "one.jsonl")
    assert data_set_files("org/name", "--data")[0] == [path]


def test_shards_that_another_tool_cached_are_taken(cache: Path) -> None:
    """All shards: taken. One is missing, or nobody knows: taken only where the hub cannot be asked, and said."""
    shards = [name for name in FILES if "train-" in name]
    folder = fill(cache, *shards)
    paths, notes = data_set_files("org/name:train", "--data")
    assert paths == [str(folder / name) for name in shards] and len(notes) == 1
    Path(paths[1]).unlink()
    few, notes = data_set_files("org/name:train", "--data")
    assert few == paths[:1]
    assert notes[1] == "note: org/name: the hub cannot be reached: the files in its cache are taken for all"


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("GatedRepoError", "accept terms first: do so on huggingface.co/datasets/org/name"),
        ("RepositoryNotFoundError", "there is no such data set or file, or it is private"),
    ],
)
def test_errors_of_the_hub_are_explained(kind: str, message: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Any, repo_id: str, timeout: float) -> Any:
        raise getattr(hub.errors, kind).__new__(getattr(hub.errors, kind))

    monkeypatch.setattr(hub.HfApi, "dataset_info", refuse)
    with pytest.raises(WgradError, match=f"^--data: org/name on the Hugging Face Hub: .*{message}"):
        data_set_files("org/name", "--data")


@pytest.mark.parametrize(
    ("path", "wanted"),
    [
        ("org/name", True),
        ("org/v1.5", True),
        ("org/name:test", True),
        ("org/name:en/test", True),
        ("org/a.jsonl", False),
    ]
    + [(p, False) for p in ("name", "./org", "../org", "/org/name", "a/b/c", "org/a.gz", "a b/c", "-", "org/name:")],
)
def test_an_id_has_one_slash_and_no_file(
    path: str, wanted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert is_data_set(path, "--data") is wanted
    if wanted and ":" not in path:
        (tmp_path / path).mkdir(parents=True)
        assert not is_data_set(path, "--data")


README = """---
configs:
- config_name: en
  default: true
  data_files:
  - {split: train, path: "en/part-*"}
  - {split: test, path: ["en/held.jsonl", "en/more.jsonl"]}
- config_name: de
  data_files: "de/**"
---
# A data set
"""
NAMES = ["de/x/a.parquet", "en/held.jsonl", "en/more.jsonl", "en/part-1.jsonl", "en/part-2.jsonl", "en/part-2.py"]


@pytest.mark.parametrize(
    ("splits", "chosen"),
    [
        (["train", "test", "validation"], "validation"),
        (["train_sft", "test_sft", "train", "test"], "test"),
        (["train_sft", "test_sft"], "test_sft"),
        (["dev", "test", "train"], "dev"),
        (["train", "more"], "train"),
    ],
)
def test_the_held_out_split_is_validation_or_test(splits: list[str], chosen: str) -> None:
    assert usual_split(splits, held_out=True) == chosen and usual_split(splits, held_out=False) == "train"


@pytest.mark.parametrize(
    ("names", "readme", "asked", "wanted"),
    [
        (NAMES, README, ("", "train"), ["en/part-1.jsonl", "en/part-2.jsonl"]),
        (NAMES, README, ("", "test"), ["en/held.jsonl", "en/more.jsonl"]),
        (NAMES, README, ("de", "train"), ["de/x/a.parquet"]),
        (NAMES, README, ("de", "test"), "has no split 'test' of data files; it has train: name one"),
        (NAMES, README, ("fr", "train"), "has no configuration 'fr'; it has en, de: name one of them"),
        (NAMES, README.replace("true", "false"), ("", "train"), r"has several configurations \(en, de\): name one"),
        (NAMES, "", ("", "train"), [name for name in NAMES if not name.endswith(".py")]),
        (NAMES, "---\nconfigs: [{data_files: {test: de/x/*}}]\n---\n", ("", "test"), ["de/x/a.parquet"]),
        (["a.csv"], "---\nconfigs: !!int ''\n---\n", ("", "train"), ["a.csv"]),
        (["a.csv"], f"---\nconfigs: [{{data_files: b.csv}}]\n#{'x' * (1 << 20)}\n---\n", ("", "train"), ["a.csv"]),
        (NAMES, "---\n{[\n---", ("en", "train"), "its README.md names no configurations: leave en/ out"),
        (["a_val.csv", "a_train.csv", "retrain.txt"], "", ("", "validation"), ["a_val.csv"]),
        (["a_val.csv", "b-dev.csv"], "", ("", "train"), "has no split 'train' of data files; it has validation"),
        (["load.py", "dataset_infos.json"], "", ("", "train"), r"no Parquet.*\(its script load.py is not run\)"),
    ],
)
def test_files_of_a_split_are_found(names: list[str], readme: str, asked: tuple[str, str], wanted: Any) -> None:
    if isinstance(wanted, str):
        with pytest.raises(WgradError, match=wanted):
            files_of_split(names, readme, *asked, "--data: ID")
    else:
        assert files_of_split(names, readme, *asked, "--data: ID") == (asked[1], wanted)


def test_missing_shards_are_noticed() -> None:
    parts = [f"a-0000{i}-of-00003.parquet" for i in range(3)]
    assert not missing_shards(parts) and missing_shards(parts[:2]) and missing_shards(["a.parquet"])
    assert missing_shards([*parts, "b-00001-of-00002.parquet"])
    assert missing_shards(["b-00000-of-999999999.parquet"])  # at once, and without a set of so many numbers
