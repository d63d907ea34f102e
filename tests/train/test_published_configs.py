"""config.json of published models are read, and mean the same once transformers has saved them.

Written by hand after the files on the Hub, without ids of tokens, dtypes and versions.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.tools import oracle_package
from wgrad.train.model.load_config import parse_model_config

transformers = oracle_package("transformers")

pytestmark = pytest.mark.oracle

LINES = Path(__file__).with_name("published_configs.jsonl").read_text(encoding="utf-8").splitlines()
PUBLISHED: dict[str, dict[str, Any]] = {line.pop("name"): line for line in map(json.loads, LINES)}
# transformers wants a Boolean where Llama 4's file has a number.
NOT_IN_TRANSFORMERS = {"llama4-scout"}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_configuration_is_the_same_once_transformers_saved_it(name: str, tmp_path: Path) -> None:
    ours = parse_model_config(PUBLISHED[name])
    if name in NOT_IN_TRANSFORMERS:
        return
    kind = transformers.CONFIG_MAPPING[PUBLISHED[name]["model_type"]]
    kind.from_dict(json.loads(json.dumps(PUBLISHED[name]))).save_pretrained(tmp_path)
    assert parse_model_config(json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))) == ours
