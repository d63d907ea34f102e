"""`wgrad selftest --page FILE`: the self-test as one HTML file, for any browser with WebGPU."""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Iterable
from pathlib import Path

from wgrad.autograd.selftest.bundle import CARDS, Bundle, make_bundle, runner_source, with_coarse_inputs
from wgrad.autograd.selftest.case import Case
from wgrad.autograd.selftest.cases import cases
from wgrad.autograd.selftest.int8 import int8_cases
from wgrad.autograd.selftest.transposed import transposed_cases
from wgrad.device.errors import WgradError
from wgrad.device.files import check_writable, write_text
from wgrad.train.commands.bundle_cases import training_cases

_TEMPLATE = Path(__file__).with_name("selftest_page.html")


def page_bundle(only: str = "") -> Bundle:
    """Return every shader variant that a GPU may get, each in the case with the smallest inputs."""
    found: Iterable[Case] = [
        *map(with_coarse_inputs, [*cases(), *int8_cases(True), *transposed_cases(True)]),
        *training_cases(),
    ]
    return make_bundle([case for case in found if only in case.name], profiles=CARDS, smallest=True)


def _packed(data: bytes) -> str:
    return base64.b64encode(gzip.compress(data, 9, mtime=0)).decode()


def make_page(bundle: Bundle) -> str:
    """Return the page, with shaders, inputs and expected outputs embedded as base64 of gzip."""
    text = _TEMPLATE.read_text(encoding="utf-8")
    parts = {
        "/* DOCUMENT */": _packed(json.dumps(bundle.document, separators=(",", ":")).encode()),
        "/* BLOCK */": _packed(bundle.block),
        "/* RUNNER */": runner_source(),
    }
    for mark, part in parts.items():
        before, after = text.split(mark)
        text = before + part + after
    return text


def write_page(file: str, *, only: str = "") -> int:
    """Write the page and return 0. No device is needed.

    Raises:
        WgradError: The file cannot be written, or no case has such a name.
    """
    check_writable(file, "--page")
    bundle = page_bundle(only)
    if not bundle.document["cases"]:
        raise WgradError(f"--only: no case has {only!r} in its name: leave the option out to take them all")
    text = make_page(bundle)
    write_text(file, text, "--page")
    count, variants = len(bundle.document["cases"]), len(bundle.document["shaders"])
    size = f"{len(text) / 1e6:.2f} MB"
    print(f"{file}: {count} cases with {variants} shader variants, {size}: open it in a browser with WebGPU")
    return 0
