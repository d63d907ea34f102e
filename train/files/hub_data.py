"""A data set of the Hugging Face hub, as ID, ID:SPLIT or ID:CONFIGURATION/SPLIT: its files of data, fetched into the
hub's own cache. What was fetched whole is noted, and then taken from there without a question to the hub."""

from __future__ import annotations

import glob
import hashlib
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import msgspec

from wgrad.device.cache import cache_folder, keep
from wgrad.device.errors import WgradError
from wgrad.train.files.decode import read_json
from wgrad.train.files.hub_splits import files_of_split, missing_shards
from wgrad.train.files.input_files import exists, one_line

_SPEC = re.compile(r"([\w-][\w.-]*/[\w-][\w.-]*)(?::(?:([\w.-]+)/)?([\w.-]+))?")
_FORMAT = 1


class _Fetched(msgspec.Struct):
    format: Annotated[int, msgspec.Meta(ge=_FORMAT, le=_FORMAT)]
    commit: str
    files: Annotated[list[str], msgspec.Meta(min_length=1)]


def is_data_set(path: str, option: str) -> bool:
    """Whether a value is that of a data set, rather than a file's that is there or by its name was meant."""
    found = _SPEC.fullmatch(path)
    ending = os.path.splitext(path)[1].lower()
    looks_like_a_file = bool(re.fullmatch(r"\.[a-z][a-z0-9]*", ending)) and ":" not in path
    return found is not None and not looks_like_a_file and not exists(path, option)


def data_set_files(spec: str, option: str) -> tuple[list[str], tuple[str, ...]]:
    """-> the paths of its files, in order, and what a user should know. WgradError."""
    found = _SPEC.fullmatch(spec)
    assert found is not None
    hub_id, config, split = found[1], found[2] or "", found[3] or "train"
    try:
        import huggingface_hub
    except ImportError as error:
        raise WgradError(
            f"{option}: no such file: {spec}; to fetch it from the Hugging Face hub: pip install 'wgrad[hub]'"
        ) from error
    where = f"{option}: {hub_id} on the Hugging Face hub"
    if paths := _noted(spec, hub_id, huggingface_hub):
        return paths, _note(spec, paths, split)
    cached = _cached(hub_id, config, split, where, huggingface_hub)
    if cached and not missing_shards(cached):
        return cached, _note(spec, cached, split)
    try:
        paths = _fetch(spec, hub_id, config, split, where, huggingface_hub)
    except WgradError:
        raise
    except Exception as error:  # the hub's client lets through whatever its network library raises
        reason = _refusal(error, hub_id, huggingface_hub)
        if reason:
            raise WgradError(f"{where}: {reason}") from error
        if cached:
            note = f"note: {hub_id}: the hub cannot be reached: what its cache holds of it is taken for all"
            return cached, (*_note(spec, cached, split), note)
        raise WgradError(
            f"{option}: no such file: {spec}; and the Hugging Face hub cannot be reached "
            f"({one_line(str(error))[:120] or type(error).__name__}), nor is it in its cache: check the network, or "
            "give a file"
        ) from error
    return paths, _note(spec, paths, split)


def _note(spec: str, paths: list[str], split: str) -> tuple[str, ...]:
    return (f"note: {spec} is a data set of the Hugging Face hub: {len(paths)} file(s) of its split {split}",)


def _marker(spec: str) -> Path:
    return cache_folder("datasets") / f"{hashlib.blake2b(spec.encode(), digest_size=12).hexdigest()}.json"


def _noted(spec: str, hub_id: str, hub: Any) -> list[str]:
    """The files of an earlier fetch, where all are still there."""
    if not exists(_marker(spec), "$XDG_CACHE_HOME"):
        return []
    try:
        fetched = read_json(_marker(spec), _Fetched, "$XDG_CACHE_HOME")
    except WgradError:  # made again
        return []
    of = {"repo_type": "dataset", "revision": fetched.commit}
    paths = [hub.try_to_load_from_cache(hub_id, name, **of) for name in fetched.files]
    return paths if all(isinstance(path, str) for path in paths) else []


def _cached(hub_id: str, config: str, split: str, where: str, hub: Any) -> list[str]:
    """What the hub's cache has of the split, whoever left it there."""
    with suppress(Exception):  # nothing, or not all that was asked for then
        folder = Path(hub.snapshot_download(hub_id, repo_type="dataset", local_files_only=True))
        names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
        about = folder / "README.md"
        readme = about.read_text(encoding="utf-8", errors="replace") if about.is_file() else ""
        return [str(folder / name) for name in files_of_split(names, readme, config, split, where)]
    return []


def _fetch(spec: str, hub_id: str, config: str, split: str, where: str, hub: Any) -> list[str]:
    info = hub.HfApi().dataset_info(hub_id)
    names, of = [file.rfilename for file in info.siblings or ()], {"repo_type": "dataset", "revision": info.sha}
    readme = ""
    if "README.md" in names:
        readme = Path(hub.hf_hub_download(hub_id, "README.md", **of)).read_text(encoding="utf-8", errors="replace")
    files = files_of_split(names, readme, config, split, where)
    folder = Path(hub.snapshot_download(hub_id, **of, allow_patterns=[glob.escape(name) for name in files]))
    value = {"format": _FORMAT, "commit": info.sha, "files": files}
    with suppress(OSError):  # then the hub is asked again
        keep(_marker(spec), msgspec.json.encode(value))
    return [str(folder / name) for name in files]


def _refusal(error: Exception, hub_id: str, hub: Any) -> str:
    """What the hub itself said against it; "" where it was not reached."""
    if isinstance(error, hub.errors.GatedRepoError):
        page = f"huggingface.co/datasets/{hub_id}"
        return f"its owner asks you to accept terms first: do so on {page}, then run 'hf auth login'"
    if isinstance(error, hub.errors.RepositoryNotFoundError):
        return "there is no such data set or file, or it is private ('hf auth login' lets you in): check the name"
    return ""
