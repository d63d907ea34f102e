"""Standard input as data: copied into the user's cache, so that a run can be resumed, and that every rank of this host
has it."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path
from typing import Annotated, BinaryIO

import msgspec

from wgrad.device.cache import cache_folder, is_kept, make_private
from wgrad.device.errors import WgradError
from wgrad.device.files import TEMPORARY, write_json, writing
from wgrad.train.data.data_files import open_standard_input
from wgrad.train.files.decode import read_json
from wgrad.train.files.input_files import exists, reading
from wgrad.train.options.data_sources import STDIN, sources_of
from wgrad.train.options.finetune_config import FinetuneConfig

STDIN_FILE = "stdin.json"  # in --out: which copy the run was begun with
FORMAT = 1
_COPY = "WGRAD_STDIN_COPY"  # its name, to the ranks that --ranks starts
_BLOCK = 1 << 20  # bytes


class _Begun(msgspec.Struct):
    format: Annotated[int, msgspec.Meta(ge=FORMAT, le=FORMAT)]
    copy: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]


def copies() -> Path:
    """Where the copies are."""
    return cache_folder("stdin")


def copied_files() -> list[Path]:
    """Those that are whole."""
    return sorted(path for path in copies().glob("*") if path.is_file() and path.suffix != TEMPORARY)


def reads_standard_input(config: FinetuneConfig) -> str:
    """The option whose value is "-"; "" where there is none."""
    if STDIN in (source.path for source in sources_of(config.data)):
        return "--data"
    return "--eval-data" if config.eval_data == STDIN else ""


def copy_for_ranks(config: FinetuneConfig) -> None:
    """Have what this process is to start find the copy of its standard input: mpirun hands that to one rank, and Open
    MPI 5 never tells it of the end."""
    option = reads_standard_input(config)
    if option and not _begun_with(config)[1]:
        os.environ[_COPY] = _copy(option).name


def standard_input(config: FinetuneConfig, option: str, alone: bool = True) -> tuple[Path, str]:
    """-> the copy of what is there now, or, where the run goes on, of what was there when it was begun; and a line for
    people. alone: whether this process was started by itself. WgradError: neither can be had."""
    begun, is_there = _begun_with(config)
    if begun is not None and is_there:
        return begun, f"standard input: what the run was begun with, of which {begun} is a copy"
    if name := os.environ.get(_COPY):
        copy = copies() / name
    elif not alone:
        raise WgradError(
            f"{option}: standard input reaches no run of several processes that mpirun or srun started: let --ranks N "
            "start them, or give a file"
        )
    else:
        try:
            copy = _copy(option)
        except WgradError as error:
            if begun is None:
                raise
            raise WgradError(
                f"{option}: the copy of standard input that the run was begun with, {begun}, is gone: give the same "
                "again with '< FILE' or a pipe, or begin anew in another --out"
            ) from error
    if begun is not None and copy.name != begun.name:
        copy.unlink(missing_ok=True)
        raise WgradError(
            f"{option}: standard input is not what the run in {config.out} was begun with: give the same again, or "
            "begin anew in another --out"
        )
    if not config.lr_sweep:  # which keeps nothing but its table
        write_json(Path(config.out, STDIN_FILE), {"format": FORMAT, "copy": copy.name})
    return copy, f"standard input: copied to {copy}, for --resume; wgrad cache clear removes it"


def _begun_with(config: FinetuneConfig) -> tuple[Path | None, bool]:
    """The copy that a run which goes on was begun with, and whether it is still there."""
    path = Path(config.out, STDIN_FILE)
    if not config.resume or not exists(path, "--out"):
        return None, False
    begun = copies() / read_json(path, _Begun, "--out", "begin anew in another --out").copy
    return begun, is_kept(begun)


def _copy(option: str) -> Path:
    """A file that only this user may read, named after its contents."""
    source, folder, digest = open_standard_input(option), copies(), hashlib.blake2b(digest_size=16)
    with writing(folder, "$XDG_CACHE_HOME"):
        make_private(folder)
        number, name = tempfile.mkstemp(dir=folder, suffix=TEMPORARY)
    made = Path(name)
    try:
        with os.fdopen(number, "wb") as file:
            while block := _read(source, option):
                digest.update(block)
                with writing(folder, "$XDG_CACHE_HOME"):
                    file.write(block)
            with writing(folder, "$XDG_CACHE_HOME"):
                file.flush()
                os.fsync(number)
        if not made.stat().st_size:
            raise WgradError(f"{option}: standard input is empty: give a file with at least one example")
        copy = folder / digest.hexdigest()
        os.replace(made, copy)
    finally:
        made.unlink(missing_ok=True)
    return copy


def _read(source: BinaryIO, option: str) -> bytes:
    with reading("standard input", option):
        return source.read(_BLOCK)
