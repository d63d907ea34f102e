"""The options of `wgrad import-config`: each one's name, type, default, help and rule."""

from __future__ import annotations

from dataclasses import dataclass

from wgrad.train.options.foreign_config import TOOLS
from wgrad.train.options.objectives import OBJECTIVES
from wgrad.train.options.options import Options, option


@dataclass(frozen=True)
class ImportOptions(Options):
    """Options of `wgrad import-config`. Raises WgradError if a value breaks its rule."""

    file: str = option("", "the other tool's YAML or JSON file", path=True)
    tool: str | None = option(None, "whose file it is (default: found by its keys)", choices=TOOLS)
    objective: str | None = option(
        None, "the training objective, where the file does not name it", choices=tuple(OBJECTIVES)
    )
    out: str | None = option(None, "file to write (default: print it)", metavar="FILE", path=True)
