"""Shared by the tests of other compilers: the bundle, and the browser."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator

import pytest
from filelock import FileLock

from tests.portability.browser import Browser
from tests.tools import CHROMIUM, find_chromium
from wgrad.autograd.selftest.bundle import Bundle, make_bundle
from wgrad.autograd.selftest.case import Case
from wgrad.autograd.selftest.cases import cases
from wgrad.autograd.selftest.int8 import int8_cases
from wgrad.autograd.selftest.transposed import transposed_cases
from wgrad.train.commands.bundle_cases import training_cases


def bundled_cases() -> list[Case]:
    return [*cases(), *int8_cases(True), *transposed_cases(True), *training_cases()]


@pytest.fixture(scope="session")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """Every variant of the self-test, of a training step and of decoding, each in one case at least. It takes 10
    seconds: of the processes that share the tests one makes it."""
    folder = tmp_path_factory.getbasetemp()
    path = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "bundle.pickle"
    with FileLock(f"{path}.lock"):
        if path.exists():
            found: Bundle = pickle.loads(path.read_bytes())
            return found
        made = make_bundle(bundled_cases(), smallest=True)
        path.write_bytes(pickle.dumps(made))
        return made


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    CHROMIUM.require()
    found = Browser(str(find_chromium()), tmp_path_factory.mktemp("chromium"))
    yield found
    found.close()
