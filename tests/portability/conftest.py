"""What the tests of other compilers share: the bundle, and the way to say that a tool is missing."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import NoReturn

import pytest

from tests.portability.browser import Browser, find_chromium
from wgrad.autograd.selftest.bundle import Bundle, make_bundle
from wgrad.autograd.selftest.cases import cases
from wgrad.autograd.selftest.int8 import int8_cases
from wgrad.autograd.selftest.transposed import transposed_cases
from wgrad.train.commands.bundle_cases import training_cases

GiveUp = Callable[[str], NoReturn]


@pytest.fixture(scope="session")
def give_up() -> GiveUp:
    """give_up(reason): skip, or fail where WGRAD_REQUIRE_DAWN=1."""

    def end(reason: str) -> NoReturn:
        if os.environ.get("WGRAD_REQUIRE_DAWN") == "1":
            pytest.fail(f"WGRAD_REQUIRE_DAWN=1, but {reason}")
        pytest.skip(reason)

    return end


@pytest.fixture(scope="session")
def bundle() -> Bundle:
    """Every variant of the self-test, of a training step and of decoding, each in one case at least."""
    return make_bundle([*cases(), *int8_cases(True), *transposed_cases(True), *training_cases()], smallest=True)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory, give_up: GiveUp) -> Iterator[Browser]:
    chromium = find_chromium()
    if chromium is None:
        give_up("chromium is not installed")
    found = Browser(chromium, tmp_path_factory.mktemp("chromium"))
    yield found
    found.close()
