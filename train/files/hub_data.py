"""A data set of the Hugging Face Hub, as ID, ID:SPLIT or ID:CONFIGURATION/SPLIT: its data files, fetched into the hub's
cache. If it has none, or makes them by a script, the Parquet files that the hub converted it to. A complete fetch is
noted, and later used without asking the hub."""

from __future__ import annotations

import errno
import glob
import hashlib
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import msgspec

from wgrad.device.cache import cache_folder, is_kept, keep
from wgrad.device.errors import WgradError
from wgrad.device.shown import counted
from wgrad.train.files.decode import read_json
from wgrad.train.files.hub_answers import ANSWER_SECONDS, answers_in_time
from wgrad.train.files.hub_splits import files_of_conversion, files_of_split, missing_shards
from wgrad.train.files.input_files import exists, one_line

_SPEC = re.compile(r"([\w-][\w.-]*/[\w-][\w.-]*)(?::(?:([\w.-]+)/)?([\w.-]+))?")
_FORMAT = 1
_CONVERSION = "refs/convert/parquet"
_LOGIN = "set HF_TOKEN, or run 'hf auth login'"
_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS)


class _Fetched(msgspec.Struct):
    """A complete fetch of a split. commit: revision of the files; origin: end of a note about where they come from."""

    format: Annotated[int, msgspec.Meta(ge=_FORMAT, le=_FORMAT)]
    commit: str
    files: Annotated[list[str], msgspec.Meta(min_length=1)]
    origin: str = ""
    split: str = "train"


def is_data_set(path: str, option: str) -> bool:
    """Return whether a value names a data set, not an existing file or one that its ending suggests."""
    found = _SPEC.fullmatch(path)
    ending = os.path.splitext(path)[1].lower()
    looks_like_a_file = bool(re.fullmatch(r"\.[a-z][a-z0-9]*", ending)) and ":" not in path
    return found is not None and not looks_like_a_file and not exists(path, option)


def data_set_files(spec: str, option: str, held_out: bool = False) -> tuple[list[str], tuple[str, ...]]:
    """Return the paths of a data set's files, in order, and notes for the user. Raises WgradError.

    held_out: without a split, prefer one for validation or tests (`usual_split`).
    """
    found = _SPEC.fullmatch(spec)
    assert found is not None
    hub_id, config, split = found[1], found[2] or "", found[3] or ""
    try:
        import huggingface_hub
    except ImportError as error:
        raise WgradError(
            f"{option}: no such file: {spec}; to fetch it from the Hugging Face Hub: pip install 'wgrad[hub]'"
        ) from error
    where = f"{option}: {hub_id} on the Hugging Face Hub"
    marker = _marker(f"{spec} held out" if held_out and not split else spec)
    fetched = _noted(marker)
    if fetched and (paths := _paths(fetched, hub_id, huggingface_hub)):
        return paths, _note(spec, paths, split or fetched.split, fetched.origin)
    named, cached = _cached(hub_id, config, split, where, huggingface_hub, held_out)
    if cached and not missing_shards(cached):
        return cached, _note(spec, cached, named)
    try:
        with answers_in_time():
            fetched = _choose(hub_id, config, split, where, huggingface_hub, held_out)
            paths = _fetch(fetched, marker, hub_id, huggingface_hub)
    except WgradError:
        raise
    except Exception as error:  # the hub's client passes on any error of its network library
        reason = _refusal(error, hub_id, huggingface_hub)
        if reason:
            raise WgradError(f"{where}: {reason}") from error
        if cached:
            note = f"note: {hub_id}: the hub cannot be reached: the files in its cache are taken for all"
            return cached, (*_note(spec, cached, named), note)
        raise WgradError(
            f"{option}: no such file: {spec}; and the Hugging Face Hub cannot be reached "
            f"({one_line(str(error))[:120] or type(error).__name__}), nor is it in its cache: check the network, or "
            "give a file"
        ) from error
    return paths, _note(spec, paths, fetched.split, fetched.origin)


def _note(spec: str, paths: list[str], split: str, origin: str = "") -> tuple[str, ...]:
    files = counted(len(paths), "file")
    return (f"note: {spec} is a data set of the Hugging Face Hub: {files} of its split {split}{origin}",)


def _marker(spec: str) -> Path:
    return cache_folder("datasets") / f"{hashlib.blake2b(spec.encode(), digest_size=12).hexdigest()}.json"


def _noted(marker: Path) -> _Fetched | None:
    """Return the note of an earlier fetch, or None."""
    if not is_kept(marker):
        return None
    try:
        return read_json(marker, _Fetched, "$XDG_CACHE_HOME")
    except WgradError:  # a damaged note is replaced
        return None


def _paths(fetched: _Fetched, hub_id: str, hub: Any) -> list[str]:
    """Return the paths of a fetch, or [] if a file is gone from the cache."""
    of = {"repo_type": "dataset", "revision": fetched.commit}
    paths = [hub.try_to_load_from_cache(hub_id, name, **of) for name in fetched.files]
    return paths if all(isinstance(path, str) for path in paths) else []


def _cached(hub_id: str, config: str, split: str, where: str, hub: Any, held_out: bool) -> tuple[str, list[str]]:
    """Return the split and its files in the hub's cache."""
    with suppress(Exception):  # the cache has nothing of it, or only a part
        folder = Path(hub.snapshot_download(hub_id, repo_type="dataset", local_files_only=True))
        names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
        about = folder / "README.md"
        readme = about.read_text(encoding="utf-8", errors="replace") if about.is_file() else ""
        split, names = files_of_split(names, readme, config, split, where, held_out)
        return split, [str(folder / name) for name in names]
    return split, []


def _choose(hub_id: str, config: str, split: str, where: str, hub: Any, held_out: bool) -> _Fetched:
    """Return the files to fetch: the data set's own, or the hub's conversion.

    With a script of the data set's name the conversion is preferred, since the other files may be anything.
    """
    info = hub.HfApi().dataset_info(hub_id, timeout=ANSWER_SECONDS)
    names, of = [file.rfilename for file in info.siblings or ()], {"repo_type": "dataset", "revision": info.sha}
    converted = None
    if f"{hub_id.rpartition('/')[2]}.py" in names:
        converted = _conversion(hub_id, hub)
    if converted is None:
        readme = ""
        if "README.md" in names:
            readme = Path(hub.hf_hub_download(hub_id, "README.md", **of)).read_text(encoding="utf-8", errors="replace")
        try:
            named, files = files_of_split(names, readme, config, split, where, held_out)
            return _Fetched(_FORMAT, info.sha, files, split=named)
        except WgradError:
            converted = _conversion(hub_id, hub)
            if converted is None:
                raise
    names = [file.rfilename for file in converted.siblings or ()]
    named, files, partial = files_of_conversion(names, config, split, where, held_out)
    origin = ", as the hub converted it to Parquet" + (": only the beginning was converted" if partial else "")
    return _Fetched(_FORMAT, converted.sha, files, origin, named)


def _conversion(hub_id: str, hub: Any) -> Any:
    """Return the hub's description of its conversion to Parquet, or None."""
    try:
        return hub.HfApi().dataset_info(hub_id, revision=_CONVERSION, timeout=ANSWER_SECONDS)
    except hub.errors.RevisionNotFoundError:
        return None


def _fetch(fetched: _Fetched, marker: Path, hub_id: str, hub: Any) -> list[str]:
    patterns = [glob.escape(name) for name in fetched.files]
    of = {"repo_type": "dataset", "revision": fetched.commit, "allow_patterns": patterns}
    folder = Path(hub.snapshot_download(hub_id, **of))
    with suppress(OSError):  # then the hub is asked again
        keep(marker, msgspec.json.encode(fetched))
    return [str(folder / name) for name in fetched.files]


def _refusal(error: Exception, hub_id: str, hub: Any) -> str:
    """Return the reason given by the hub or the disk; "" if the hub was not reached."""
    if isinstance(error, hub.errors.GatedRepoError):
        page = f"huggingface.co/datasets/{hub_id}"
        return f"its owner asks you to accept terms first: do so on {page}, then {_LOGIN}"
    if isinstance(error, hub.errors.RepositoryNotFoundError):
        return f"there is no such data set or file, or it is private: check the name; to be let in, {_LOGIN}"
    if isinstance(error, hub.errors.HfHubHTTPError):
        status = getattr(getattr(error, "response", None), "status_code", None)
        if status == 401:
            return f"the hub does not accept the token: make another on huggingface.co/settings/tokens, then {_LOGIN}"
        if status == 403:
            return "the hub does not let this token read it: give the token that right, or use another one"
        return ""
    if isinstance(error, OSError) and error.errno in _DISK:
        cache = os.environ.get("HF_HOME", "~/.cache/huggingface")
        return f"cannot be written into the hub's cache ({error.strerror}): make room in {cache}, or set HF_HOME"
    return ""
