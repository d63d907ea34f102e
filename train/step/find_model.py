"""Find the folder of a base model, also of one that is a single GGUF file.

Such a file comes without config.json and tokenizer. Both are made once from its metadata, in a folder of the user's
cache that has a link to the file.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from wgrad.device.cache import cache_folder, is_kept, keep, kept_paths, make_private
from wgrad.device.errors import WgradError
from wgrad.device.files import writing
from wgrad.train.data.gguf_vocabulary import tokenizer_of_gguf
from wgrad.train.files.gguf_fields import GgufFields
from wgrad.train.files.gguf_files import header_digest, read_gguf_entries
from wgrad.train.files.gguf_splits import one_of_each, part_name
from wgrad.train.files.hub import resolve_model
from wgrad.train.files.hub_headers import model_without_weights
from wgrad.train.files.input_files import exists, expand_path, one_line
from wgrad.train.model.adapter_config import base_of_adapter
from wgrad.train.model.gguf_config import config_of_gguf
from wgrad.train.model.gguf_experts import gguf_specs
from wgrad.train.model.load_config import parse_model_config
from wgrad.train.model.model_files import GGUF, is_left_over, one_gguf_file
from wgrad.train.model.weights import HEAD, weight_specs

CONFIG = "config.json"
FORMAT = 2  # of the folders in the cache


def find_model(spec: str, option: str = "--model", weights: bool = True, scratch: Path | None = None) -> Path:
    """Return the local folder of a model.

    Args:
        spec: Folder, GGUF file, or hub id such as org/name.
        option: Name for error messages.
        weights: Whether to download the weights of a hub model.
        scratch: Folder to lay out a hub model in without its weights (`model_without_weights`).

    Raises:
        WgradError: There is no such model, or its GGUF file holds one that is not supported.
    """
    path = Path(expand_path(spec, option))
    if path.suffix == GGUF and exists(path, option) and not path.is_dir():
        return _unpacked(path, option)
    folder = model_without_weights(spec, scratch, option) if scratch else resolve_model(spec, option, weights)
    files = [] if exists(folder / CONFIG, option) else one_of_each(folder.glob(f"*{GGUF}"))
    if len(files) > 1 and not any(folder.glob("*.safetensors*")):
        raise one_gguf_file(folder, files, option)
    return _unpacked(files[0], option) if len(files) == 1 else folder


def find_base(model: str | None, adapter: str, weights: bool = True) -> Path:
    """Return the folder of `model`, or without one of the base model that an adapter names. Raises WgradError."""
    if model:
        return find_model(model, weights=weights)
    named = base_of_adapter(adapter)
    try:
        return find_model(named, weights=weights)
    except WgradError as error:
        reason = str(error).removeprefix("--model: ")
        raise WgradError(f"--adapter: its base model, {named!r}, is not to be had ({reason}): give --model") from error


def base_name(model: str | None, adapter: str) -> str:
    """Return the name of `find_base`'s model for messages, because the folder may be in a cache."""
    return one_line(model or base_of_adapter(adapter))


def other_base(model: str | None, adapter: str | None) -> str:
    """Return a note on an adapter that names another base model than `model`, or "".

    A model into which the adapter has been merged already is another one, too.
    """
    if not model or not adapter:
        return ""
    try:
        named = base_of_adapter(adapter)
    except WgradError:  # it names none
        return ""
    both = os.path.exists(named) and os.path.exists(model)
    if os.path.samefile(named, model) if both else _last_name(named) == _last_name(model):
        return ""
    return (
        f"the adapter names {one_line(named)} as its base model, not {one_line(model)}: the result is right only if "
        "both have the same weights"
    )


def _last_name(model: str) -> str:
    """Return the last part of a model's path or Hub id, to compare: also of a folder in the Hub's cache."""
    path = Path(model)
    cached = [part.rpartition("--")[2] for part in path.parts if part.startswith("models--")]
    return (cached[0] if cached else path.name).lower()


def _unpacked(path: Path, option: str) -> Path:
    """Return a folder with config.json, the tokenizer's files, and a link to each part of the GGUF file."""
    parts, digest = header_digest(path.absolute(), option)
    path = parts[0]
    links = [part_name("model", i + 1, len(parts)) if len(parts) > 1 else f"model{GGUF}" for i in range(len(parts))]
    known = f"{FORMAT}\0{path}\0{digest}"
    folder = described() / hashlib.blake2b(os.fsencode(known), digest_size=12).hexdigest()
    if is_kept(folder / CONFIG) and all(os.path.exists(folder / link) for link in links):
        return folder
    contents = _describe(path, option)
    with writing(folder, "$XDG_CACHE_HOME"):
        make_private(folder)
        for part, link in zip(parts, links):
            _link(part, folder / link, option)
        for name in sorted(contents, key=lambda name: name == CONFIG):  # config.json last: it marks completeness
            keep(folder / name, json.dumps(contents[name], ensure_ascii=False).encode())
    return folder


def described() -> Path:
    """Return the folder of the cache that holds a folder for each GGUF file."""
    return cache_folder("gguf")


def described_files() -> list[Path]:
    """Return the folders in `described`."""
    return [path for path in kept_paths(described()) if os.path.isdir(path)]


def _describe(path: Path, option: str) -> dict[str, dict[str, object]]:
    """Return the contents of each file to write, by name."""
    tensors, fields = read_gguf_entries(path, option), GgufFields(path, option)
    raw = config_of_gguf(fields, tensors)
    config = parse_model_config(raw, f"{option}: {path}")
    specs = (*gguf_specs(config), *weight_specs(config))
    expected = {HEAD}.union(*({spec.name, f"{spec.name}.weight"} for spec in specs))
    unknown = [
        name
        for name in tensors
        if name.startswith("model.") and name not in expected and not is_left_over(name, config)
    ]
    if unknown:
        raise WgradError(
            f"{option}: {path} has a tensor {one_line(unknown[0])}, for which {config.architecture} has no place: use "
            "the model in safetensors"
        )
    return {CONFIG: raw, **tokenizer_of_gguf(fields)}


def _link(path: Path, link: Path, option: str) -> None:
    """Make a symbolic link to `path`, or a hard link if the system refuses that."""
    made = link.with_name(f"{link.name}.{os.getpid()}")  # renamed below, because another process may open it
    made.unlink(missing_ok=True)
    try:
        os.symlink(path, made)
    except OSError:
        try:
            os.link(path, made)
        except OSError as error:
            raise WgradError(
                f"{option}: no link to {path} can be made in {link.parent} ({error.strerror}): put the model's "
                "config.json and tokenizer.json next to the file, and give their folder"
            ) from error
    os.replace(made, link)
    made.unlink(missing_ok=True)  # renaming one hard link to another of the same file does nothing
