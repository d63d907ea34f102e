"""Every call into hip-python fits the signatures of 6.4, 7.2 and 10, in the table that hip_python.py makes."""

from __future__ import annotations

import json
from importlib import metadata, util
from pathlib import Path

import pytest

from tests.hip.hip_python import TABLE, calls, read, signatures

VERSIONS = ["6.4", "7.2", "10.0"]
SIGNATURES = json.loads(TABLE.read_text(encoding="utf-8"))
FILLED_IN = (
    "hipGetDeviceProperties"  # a structure that the older versions are given and 10 returns: binding.py does both
)


def test_the_table_has_what_is_called() -> None:
    assert set(SIGNATURES) == set(calls()), "make it again: tests/hip/hip_python.py says how"
    assert all(list(versions) == VERSIONS for versions in SIGNATURES.values())


@pytest.mark.parametrize("version", VERSIONS)
def test_calls_have_as_many_arguments(version: str) -> None:
    wanted = {name: {len(found[version][0])} for name, found in SIGNATURES.items()}
    wanted[FILLED_IN] = {len(found[0]) for found in SIGNATURES[FILLED_IN].values()}
    assert calls() == wanted


def test_calls_give_as_many_values_in_every_version() -> None:
    assert {name for name, found in SIGNATURES.items() if len({v[1] for v in found.values()}) > 1} == {FILLED_IN}


def test_the_installed_version_is_as_the_table_says() -> None:
    found = util.find_spec("rocm.bindings") if util.find_spec("rocm") else None
    if found is None or not found.submodule_search_locations:
        pytest.skip("hip-python 10 is not installed")
    version = ".".join(metadata.version("hip-python").split(".")[:2])
    column = {name: versions[version] for name, versions in SIGNATURES.items()}
    assert signatures(read(Path(found.submodule_search_locations[0])), set(SIGNATURES)) == column
