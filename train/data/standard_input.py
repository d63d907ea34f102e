"""Standard input as data: copied into the user's cache, for resuming and for all ranks of this host."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path
from typing import Annotated, BinaryIO

import msgspec

from wgrad.device.cache import cache_folder, is_kept, kept_paths, make_private
from wgrad.device.errors import WgradError
from wgrad.device.files import TEMPORARY, write_json, writing
from wgrad.train.data.data_files import open_standard_input
from wgrad.train.files.decode import read_json
from wgrad.train.files.input_files import exists, reading
from wgrad.train.options.data_sources import STDIN, sources_of
from wgrad.train.options.finetune_config import FinetuneConfig

STDIN_FILE = "stdin.json"  # in --out: names the copy that the run began with
FORMAT = 1
_COPY = "WGRAD_STDIN_COPY"  # environment variable with the copy's name, for the ranks that --ranks starts
_BLOCK = 1 << 20  # bytes


class _Begun(msgspec.Struct):
    format: Annotated[int, msgspec.Meta(ge=FORMAT, le=FORMAT)]
    copy: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]


def copies() -> Path:
    """Return the folder of the copies."""
    return cache_folder("stdin")


def copied_files() -> list[Path]:
    """Return the complete copies."""
    return [path for path in kept_paths(copies()) if os.path.isfile(path) and path.suffix != TEMPORARY]


def reads_standard_input(config: FinetuneConfig) -> str:
    """Return the option whose value is "-"; "" if none is."""
    if STDIN in (source.path for source in sources_of(config.data)):
        return "--data"
    return "--eval-data" if STDIN in config.eval_data else ""


def copy_for_ranks(config: FinetuneConfig) -> None:
    """Copy standard input for the ranks that this process will start: mpirun passes it to one rank only, and with Open
    MPI 5 that rank never sees its end."""
    option = reads_standard_input(config)
    if option and not _begun_with(config)[1]:
        os.environ[_COPY] = _copy(option).name


def standard_input(config: FinetuneConfig, option: str, alone: bool = True) -> tuple[Path, str]:
    """Return the copy of standard input (for a resumed run, of what it began with), and a line for the user.

    alone: whether this process was not started by mpirun or srun.

    Raises:
        WgradError: there is no standard input to copy, or it differs from what the run began with.
    """
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
    if not config.lr_sweep:  # a sweep keeps only its table
        write_json(Path(config.out, STDIN_FILE), {"format": FORMAT, "copy": copy.name})
    return copy, f"standard input: copied to {copy}, for --resume; wgrad cache clear removes it"


def _begun_with(config: FinetuneConfig) -> tuple[Path | None, bool]:
    """Return the copy that a resumed run began with (None for a new run), and whether it still exists."""
    path = Path(config.out, STDIN_FILE)
    if not config.resume or not exists(path, "--out"):
        return None, False
    begun = copies() / read_json(path, _Begun, "--out", "begin anew in another --out").copy
    return begun, is_kept(begun)


def _copy(option: str) -> Path:
    """Copy standard input to a file that only this user may read, named by a hash of its contents."""
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
