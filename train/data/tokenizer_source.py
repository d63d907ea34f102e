"""The source of a model's tokenizer: its own folder, or that of an adapter that was saved with one.

PEFT, TRL and others save the tokenizer with the adapter, and transformers and vLLM read it there.
"""

from __future__ import annotations

import filecmp
import os
from dataclasses import dataclass
from pathlib import Path

from wgrad.device.errors import WgradError
from wgrad.device.files import make_folder, write_bytes, write_json
from wgrad.train.data.tokenizer import (
    GENERATION_FILE,
    TEMPLATE,
    Tokenizer,
    ends_of,
    generation_options,
    load_tokenizer,
)
from wgrad.train.data.tokenizer_files import (
    MORE_TEMPLATES,
    TEMPLATE_FILE,
    more_templates,
    read_options,
    read_templates,
)
from wgrad.train.files.input_files import exists, open_input, reading

_TOKENIZER = "tokenizer.json"
_TOKENIZER_FILES = (
    _TOKENIZER,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",  # llama.cpp's converter reads it for some families
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tekken.json",
)
_CHECKPOINTS = "checkpoints"  # folder of a run's checkpoints, each with an adapter


@dataclass(frozen=True)
class TokenizerSource:
    """The folders of a tokenizer. base: of the model. adapter: one with a tokenizer or chat templates of its own."""

    base: Path
    adapter: Path | None = None

    @property
    def folder(self) -> Path:
        """The folder of tokenizer.json."""
        return (
            self.adapter if self.adapter is not None and exists(self.adapter / _TOKENIZER, "--adapter") else self.base
        )

    def load(self) -> tuple[Tokenizer, str]:
        """Load the tokenizer, and describe how the adapter's differs from the model's ("": not at all).

        Raises:
            WgradError: a file is missing or broken.
        """
        if self.adapter is None:
            return load_tokenizer(self.base), ""
        try:
            templates, tokenizer = _templates(self.adapter), load_tokenizer(self.folder)
        except WgradError as error:
            if str(self.adapter) not in str(error):
                raise
            raise WgradError(str(error).replace("--model:", "--adapter:", 1)) from error
        base_templates = _templates(self.base)
        tokenizer.use_templates(templates or base_templates)
        tokenizer.ends |= ends_of(self.base)
        different = [] if tokenizer.templates == base_templates else [TEMPLATE]
        if self.folder != self.base and not _same_files(self.folder, self.base):
            if not exists(self.base / _TOKENIZER, "--model"):
                return tokenizer, f"tokenizer taken from {self.adapter}: the base model has none"
            different += tokenizer.differences(load_tokenizer(self.base))
        if not different:
            return tokenizer, ""
        return (
            tokenizer,
            f"{' and '.join(different)} taken from {self.adapter}, not from the base model",
        )

    def copy(self, out: str | os.PathLike[str]) -> None:
        """Copy the files of tokenizer, templates and generation."""
        out = make_folder(out)
        for name in _TOKENIZER_FILES:
            _copy(self.folder / name, out / name)
        templates = self.adapter if self.adapter is not None and _templates(self.adapter) else self.base
        for path in (templates / TEMPLATE_FILE, templates / "chat_template.json"):
            _copy(path, out / path.name)
        for path in more_templates(templates):
            _copy(path, make_folder(out / MORE_TEMPLATES) / path.name)
        for folder in filter(None, (self.base, self.adapter)):  # the adapter's replaces the model's
            _copy(folder / GENERATION_FILE, out / GENERATION_FILE)


def find_source(base: str | os.PathLike[str], adapter: str | os.PathLike[str] | None) -> TokenizerSource:
    """Find the source of the tokenizer. adapter: its folder; for a checkpoint, the run's folder is searched too."""
    base = Path(base)
    if adapter is None:
        return TokenizerSource(base)
    folder = Path(adapter)
    run = folder.absolute().parent.parent if folder.absolute().parent.name == _CHECKPOINTS else None
    for place in filter(None, (folder, run)):
        if exists(place / _TOKENIZER, "--adapter") or _templates(place):
            return TokenizerSource(base, place)
    return TokenizerSource(base)


def open_tokenizer(
    base: str | os.PathLike[str], adapter: str | os.PathLike[str] | None, rows: int
) -> tuple[Tokenizer, str]:
    """Load the tokenizer for a model of `rows` token ids with an adapter; with a note as in `TokenizerSource.load`."""
    source = find_source(base, adapter)
    tokenizer, note = source.load()
    tokenizer.limit(rows)
    return tokenizer, note


def save_tokenizer(tokenizer: Tokenizer, source: TokenizerSource, out: str | os.PathLike[str]) -> None:
    """Write the tokenizer's files into `out`, with its current templates, and its ends of a text in
    generation_config.json."""
    out = make_folder(out)
    source.copy(out)
    if tokenizer.templates != _templates(out):
        _write_templates(tokenizer.templates, out)
    _write_generation(tokenizer, source, out)


def tokenizer_files(folder: Path) -> list[Path]:
    """Return the files of tokenizer, chat templates and generation in a folder."""
    names = (*_TOKENIZER_FILES, TEMPLATE_FILE, "chat_template.json", GENERATION_FILE)
    return [path for name in names if os.path.isfile(path := folder / name)]


def save_template(tokenizer: Tokenizer, out: str | os.PathLike[str]) -> None:
    """Write the chat template alone."""
    write_bytes(make_folder(out) / TEMPLATE_FILE, tokenizer.template_text.encode())


def _templates(folder: Path) -> dict[str, str]:
    return read_templates(folder, read_options(folder, "tokenizer_config.json"))


def _same_files(folder: Path, other: Path) -> bool:
    """Return whether the tokenizer files of two folders are the same, byte for byte."""
    for name in _TOKENIZER_FILES:
        a, b = folder / name, other / name
        if os.path.isfile(a) != os.path.isfile(b):
            return False
        if os.path.isfile(a):
            with open_input(a, "--adapter"), open_input(b, "--model"):  # else an error would not tell which
                if not filecmp.cmp(a, b, shallow=False):
                    return False
    return True


def _write_templates(templates: dict[str, str], out: Path) -> None:
    for path in more_templates(out):
        if path.stem not in templates:
            path.unlink()
    for name, text in templates.items():
        path = out / TEMPLATE_FILE if name == "default" else make_folder(out / MORE_TEMPLATES) / f"{name}.jinja"
        write_bytes(path, text.encode())


def _write_generation(tokenizer: Tokenizer, source: TokenizerSource, out: Path) -> None:
    path = out / GENERATION_FILE
    raw = generation_options(out if os.path.exists(path) else source.base)
    given = raw.get("eos_token_id")
    ends = list(given) if isinstance(given, list) else [] if given is None else [given]
    new = [id_ for id_ in (tokenizer.eos_id, tokenizer.turn_end_id) if id_ is not None and id_ not in ends]
    if new:
        both = [*ends, *new]
        write_json(path, {**raw, "eos_token_id": both if len(both) > 1 else both[0]})


def _copy(source: Path, target: Path) -> None:
    if os.path.isfile(source):
        with open_input(source, "--model") as file, reading(source, "--model"):
            data = file.read()
        write_bytes(target, data)
