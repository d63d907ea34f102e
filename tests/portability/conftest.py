"""What the tests of other compilers share: the bundle, and the browser."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.portability.browser import Browser
from tests.tools import CHROMIUM, find_chromium
from wgrad.autograd.selftest.bundle import Bundle, make_bundle
from wgrad.autograd.selftest.cases import cases
from wgrad.autograd.selftest.int8 import int8_cases
from wgrad.autograd.selftest.transposed import transposed_cases
from wgrad.train.commands.bundle_cases import training_cases


@pytest.fixture(scope="session")
def bundle() -> Bundle:
    """Every variant of the self-test, of a training step and of decoding, each in one case at least."""
    return make_bundle([*cases(), *int8_cases(True), *transposed_cases(True), *training_cases()], smallest=True)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    CHROMIUM.require()
    found = Browser(str(find_chromium()), tmp_path_factory.mktemp("chromium"))
    yield found
    found.close()
