"""Finding a model: a folder, or a repository of the Hugging Face Hub, which is fetched into the hub's cache."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from wgrad.device.errors import WgradError
from wgrad.train.files.hub_answers import ANSWER_SECONDS, answers_in_time
from wgrad.train.files.input_files import exists, expand_path

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_WANTED = ["*.json", "*.safetensors", "*.jinja", "*.model"]
# Folders have other formats (onnx/, original/); consolidated.safetensors repeats the weights.
_UNWANTED = ["*/*", "consolidated*.safetensors"]


def resolve_model(spec: str, option: str = "--model", weights: bool = True) -> Path:
    """Return a local folder for `DIR_OR_HUB_ID`. option: named in errors. weights: False fetches only config.json.

    A model that the hub's cache holds whole is used without asking the hub for a newer one.

    Raises:
        WgradError: it is neither a folder nor 'org/name', or the hub cannot be reached or refuses.
    """
    path = Path(expand_path(spec, option))
    if exists(path, option):
        if path.is_dir():
            return path
        raise WgradError(f"{option}: {spec} is a file: give the folder that holds config.json and the weights")
    if not _HUB_ID.fullmatch(spec) or spec.startswith((".", "/")) or ".." in spec:
        raise WgradError(f"{option}: no such folder: {spec} (a model of the hub is named org/name)")
    return _fetch(spec, option, _WANTED if weights else ["config.json"])


def is_hub_id(spec: str, option: str = "--model") -> bool:
    """Return whether `spec` names a model of the hub, not a folder or file. Raises WgradError for a bad name."""
    return not exists(Path(expand_path(spec, option)), option) and _HUB_ID.fullmatch(spec) is not None


def cached_model(hub_id: str, option: str = "--model") -> Path | None:
    """Return the folder of a model that the hub's cache holds whole, without network access; else None."""
    found = _cached(hub_id, option, _WANTED)
    return found if found is not None and _is_whole(found, _WANTED) else None


def fetch_parts(hub_id: str, option: str, wanted: list[str]) -> Path:
    """Fetch those of these files that the model has, and return their folder. Raises WgradError."""
    with hub_errors(hub_id, option) as huggingface_hub:
        _wait_for_answer(huggingface_hub, hub_id)
        return Path(huggingface_hub.snapshot_download(hub_id, allow_patterns=wanted, ignore_patterns=_UNWANTED))


def _wait_for_answer(hub: Any, hub_id: str) -> None:
    """Ask the hub about a model first, because `snapshot_download` of clients before 1.0 asks without a limit of time.

    Raises TimeoutError if it does not answer; any other trouble is left to `snapshot_download`, which has a cache.
    """
    try:
        hub.HfApi().model_info(hub_id, timeout=ANSWER_SECONDS)
    except Exception as error:  # of the network library of the hub's client, which depends on its version
        if any("Timeout" in kind.__name__ for kind in type(error).__mro__):
            raise TimeoutError(f"no answer in {ANSWER_SECONDS:.0f} s") from error


def _fetch(hub_id: str, option: str, wanted: list[str]) -> Path:
    cached = _cached(hub_id, option, wanted)
    if cached is not None and _is_whole(cached, wanted):  # no network access
        return cached
    return fetch_parts(hub_id, option, wanted)


def _cached(hub_id: str, option: str, wanted: list[str]) -> Path | None:
    patterns = {"allow_patterns": wanted, "ignore_patterns": _UNWANTED}
    with hub_errors(hub_id, option) as huggingface_hub:
        from huggingface_hub.errors import LocalEntryNotFoundError

        try:
            return Path(huggingface_hub.snapshot_download(hub_id, local_files_only=True, **patterns))
        except LocalEntryNotFoundError:
            return None


@contextmanager
def hub_errors(hub_id: str, option: str) -> Iterator[Any]:
    """Give the hub's client, and turn its errors within the block, or its absence, into WgradError."""
    try:
        import huggingface_hub
        from huggingface_hub import errors
    except ImportError as error:
        raise WgradError(
            f"{option}: no such folder: {hub_id}; to fetch it from the Hugging Face Hub: pip install huggingface_hub"
        ) from error
    name = f"{option}: no such folder: {hub_id}; from the Hugging Face Hub:"
    try:
        with answers_in_time():
            yield huggingface_hub
    except errors.GatedRepoError as error:
        raise WgradError(
            f"{name} its owner asks you to accept a license first: do so on huggingface.co/{hub_id}, then "
            "set HF_TOKEN, or run 'hf auth login'"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise WgradError(
            f"{name} there is no such model, or it is private: set HF_TOKEN, or run 'hf auth login'"
        ) from error
    except errors.LocalEntryNotFoundError as error:
        raise WgradError(
            f"{name} it cannot be reached and the model is not in its cache: check the network, or give a local folder"
        ) from error
    except Exception as error:  # the hub's client passes on any error of its network library
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        cache = os.environ.get("HF_HOME", "~/.cache/huggingface")
        raise WgradError(
            f"{name} fetching failed ({reason}): check the network and the room in {cache}, or give a local folder"
        ) from error


def _is_whole(folder: Path, wanted: list[str]) -> bool:
    """Return whether a folder has all of a model; another tool, or an interrupted fetch, may have left a part."""
    if not (folder / "config.json").exists() or wanted == ["config.json"]:
        return (folder / "config.json").exists()
    if not any((folder / name).exists() for name in ("tokenizer.json", "tokenizer.model")):
        return False
    try:
        index = json.loads((folder / "model.safetensors.index.json").read_text(encoding="utf-8"))
        return all((folder / name).exists() for name in set(index["weight_map"].values()))
    except FileNotFoundError:
        return (folder / "model.safetensors").exists()
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return False
