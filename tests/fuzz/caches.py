"""Files of the user's cache, damaged: what reads each of them must take it for absent, or name it.

Commands read most of them only with a GPU, so a case names the reader itself: `cache-file NAME`.
"""

from __future__ import annotations

import json
import lzma
import os
import sys
import zlib
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import numpy as np
import safetensors.numpy

from tests.fuzz.base import dump
from tests.fuzz.case import Case, Content, Special
from tests.fuzz.values import mutate_bytes, mutate_json
from tests.fuzz.weights import mutate_safetensors
from wgrad.device.errors import DeviceError, WgradError
from wgrad.train.terminal.ending import one_line

COMMAND = "cache-file"
_LAYER = bytes(range(256)) * 4
_WEIGHTS = {"layer.0": np.frombuffer(_LAYER, np.uint8), "crc32": np.array([zlib.crc32(_LAYER)], np.uint32)}
_WHOLE: dict[str, bytes] = {
    "adapters/state.json": dump(
        {"format": 1, "crashes": [{"name": "a", "reason": "b", "index": 0}], "files": ["a.json"]}
    ),
    "hip/gemm.co.xz": lzma.compress(b"\x7fELF" + _LAYER, lzma.FORMAT_XZ),
    "hip/self-check.json": dump({"format": 1, "device": ["a", "b"], "passed": True, "reason": ""}),
    "matrix-units/cards.json": dump({"format": 1, "cards": {"card": {"passed": True, "reason": "", "library": "x"}}}),
    "datasets/marker.json": dump({"format": 1, "commit": "0" * 40, "files": ["a.parquet"], "origin": ""}),
    "weights/layers.safetensors": safetensors.numpy.save(_WEIGHTS),
    "rates/submission.json": dump({"format": 1, "rate": 1e12}),
    "rates/step.json": dump({"matmul": 1e12, "attention": 1e11, "memory": 1e11, "projections": 1e3}),
    "verified/kernels.json": dump({"format": 1, "device": ["a", "b"], "passed": ["0" * 16], "off": ["experts"]}),
}

_OF_GGUF = ("gguf/config.json", "gguf/tokenizer.json", "gguf/tokenizer_config.json")


@cache
def _bomb() -> bytes:
    """A small object that unpacks to 64 MiB. To make it takes a second."""
    return lzma.compress(bytes(1 << 26), lzma.FORMAT_XZ)


def cache_case(rng: Random, groups: Any) -> Case:
    name = rng.choice((*sorted(_WHOLE), *_OF_GGUF))
    whole = _WHOLE[name] if name in _WHOLE else groups["model"][f"model/{name.partition('/')[2]}"]
    changed: Content
    if rng.random() < 0.1:
        changed = rng.choice(
            (Special("absent"), Special("folder"), Special("fifo"), Special("link", "/dev/zero"), _bomb(), b"")
            + (Special("sparse", 1 << 33), Special("repeat", ["[", 1 << 16, ""]), Special("link", "/proc/self/mem"))
        )
    elif name.endswith(".json") and rng.random() < 0.8:
        changed = mutate_json(rng, whole)
    elif name.endswith(".safetensors") and rng.random() < 0.8:
        changed = mutate_safetensors(rng, whole)
    else:
        changed = mutate_bytes(rng, whole)
    return Case([COMMAND, name], ["gguf-alone"] * (name in _OF_GGUF), {f".cache/wgrad/{name}": changed})


def read_cache_file(name: str) -> int:
    """Read a file of the cache as wgrad does. Return the exit status that a command would have."""
    from platformdirs import user_cache_path

    folder = user_cache_path("wgrad", appauthor=False, opinion=False)
    for path in (folder, folder / name.partition("/")[0]):
        path.chmod(0o700)
    try:
        _READERS[name](folder / name)
    except WgradError as error:
        print(f"wgrad: error: {one_line(error)}", file=sys.stderr)
        return 2
    return 0


def _adapters(path: Path) -> None:
    from wgrad.wgsl.runtime.adapter_check import Verdict, _kept

    found = _kept(path)
    assert found is None or isinstance(found, Verdict)


def _object(path: Path) -> None:
    from wgrad.device.cache import read_kept
    from wgrad.hip.runtime.objects import MOST_BYTES, decompress

    with suppress(OSError, DeviceError):
        assert len(decompress(read_kept(path, MOST_BYTES), str(path))) <= MOST_BYTES


def _self_check(path: Path) -> None:
    from wgrad.autograd.selftest import probe

    lasting = probe.Verdict(True, ""), False
    probe._place, usual = (lambda identity: path), probe._place  # type: ignore[assignment]
    check = probe.check_in_a_process
    probe.check_in_a_process = lambda module, *rest, **more: lasting  # type: ignore[assignment]
    try:
        found = probe.verdict(type("Device", (), {"identity": ("a", "b"), "index": 0})())
    finally:
        probe._place, probe.check_in_a_process = usual, check
    assert isinstance(found.reason, str)


def _cards(path: Path) -> None:
    from wgrad.wgsl.runtime import matrix_units

    assert matrix_units.folder() == path.parent
    for card in ("card", "other"):
        assert matrix_units.may_ask(card) in (True, False)


def _data_set(path: Path) -> None:
    from wgrad.train.files import hub_data

    found = hub_data._noted(path)
    assert found is None or json.dumps(found.files)


def _layers(path: Path) -> None:
    from wgrad.autograd.select_device import select_device
    from wgrad.train.model.host_layers import HostLayer
    from wgrad.train.model.load_streamed import _read

    remarks: list[str] = []
    device = select_device("cpu")
    layer = HostLayer(device.empty_host((len(_LAYER),), np.uint8), {})
    if not _read(path, [layer], device, remarks):
        assert all(len(remark) < 1500 and "\n" not in remark for remark in remarks)


def _of_gguf(path: Path) -> None:
    """Put the file into the folder of a GGUF base model, in place of what wgrad has written there."""
    from wgrad.train.data.tokenizer_source import open_tokenizer
    from wgrad.train.model.load_config import load_model_config
    from wgrad.train.step.find_model import find_model

    folder = find_model("model/model.gguf")
    (folder / path.name).unlink()
    if os.path.lexists(path):
        path.rename(folder / path.name)
    assert find_model("model/model.gguf") == folder
    config = load_model_config(folder)
    open_tokenizer(folder, None, config.vocab_size)[0].encode("a b")


def _submission_rate(path: Path) -> None:
    from wgrad.wgsl.runtime.submission_size import SubmissionSize

    size = SubmissionSize("DiscreteGPU", path)
    assert 0 <= size.rate <= 1e16 and 0 < size.work < 1e15 and 0 < size.dispatch_work < 1e16


def _step_rates(path: Path) -> None:
    from wgrad.train.plan import rates

    facts = {"description": "a GPU", "fastest_compute": "float16", "facts": {"type": "DiscreteGPU"}}
    device: Any = type("Gpu", (), {**facts, "dry_run": lambda self: True})()

    def measured(device: Any, dtype: Any) -> Any:
        raise DeviceError("no GPU here")

    with patch.object(rates, "_file", lambda what: path), patch.object(rates, "_measured", measured):
        found = rates.rates_of(device, "float16")
    assert found is None or all(0 < rate <= 1e17 for rate in vars(found).values())


def _verified(path: Path) -> None:
    from wgrad.autograd.selftest import verify

    with patch.object(verify, "_file", lambda identity: path):
        verify.turn_off_what_failed(type("Device", (), {"identity": ("a", "b"), "simpler": {}})())
        found = verify._kept(("a", "b"))
        assert all(isinstance(one, str) for one in found.passed | found.off)
        found.save()


_READERS: dict[str, Callable[[Path], None]] = {
    "adapters/state.json": _adapters,
    "hip/gemm.co.xz": _object,
    "hip/self-check.json": _self_check,
    "matrix-units/cards.json": _cards,
    "datasets/marker.json": _data_set,
    "weights/layers.safetensors": _layers,
    **dict.fromkeys(_OF_GGUF, _of_gguf),
    "rates/submission.json": _submission_rate,
    "rates/step.json": _step_rates,
    "verified/kernels.json": _verified,
}
