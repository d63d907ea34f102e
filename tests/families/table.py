"""The rows of all families, by architecture."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from tests.families import delta_net, dense, experts, gemma, granite, layer_norms, mamba, mamba1, scored
from tests.families.row import Row, Values

FAMILY_FILES = (dense, layer_norms, gemma, granite, experts, scored, delta_net, mamba, mamba1)
FAMILY_ROWS: dict[str, Row] = {name: row for file in FAMILY_FILES for name, row in file.ROWS.items()}
# Configurations that are compared with transformers, by name: the architecture, and changes of its tiny model.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    case: (name, dict(changes)) for name, row in FAMILY_ROWS.items() for case, changes in row.cases.items()
}


def of_families(changes: Callable[[Row], Iterable[Values]], among: Iterable[str] = FAMILY_ROWS) -> list[Any]:
    """Return the parameters (architecture, changes) of a test, with the number of the changes in the family's row."""
    return [
        pytest.param(name, dict(values), id=f"{name}-{number}")
        for name in among
        for number, values in enumerate(changes(FAMILY_ROWS[name]))
    ]
