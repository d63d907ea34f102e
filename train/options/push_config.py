"""The options of `wgrad push`: each one's name, type, default, help and rule."""

from __future__ import annotations

import re
from dataclasses import dataclass

from wgrad.train.options.options import Options, option

_HUB_ID = re.compile(r"[A-Za-z0-9][\w-]*/[A-Za-z0-9](?:[\w.-]*\w)?")
A_HUB_ID = (
    "must be OWNER/NAME, of letters, digits, '-', '_' and '.'",
    lambda v: bool(_HUB_ID.fullmatch(v)) and ".." not in v and "--" not in v and not v.endswith(".git"),
)


@dataclass(frozen=True)
class PushConfig(Options):
    """Options of `wgrad push`. Raises WgradError if a value breaks its rule."""

    repo: str = option("", "where to: your name or organization, and the model's name", rule=A_HUB_ID)
    adapter: str = option("", "run to upload: finetune's --out", metavar="DIR", path=True, required=True)
    folder: str | None = option(
        None,
        "upload this folder instead of the adapter: the output of wgrad merge or export",
        metavar="DIR",
        path=True,
    )
    base: str | None = option(
        None, "the base model's id on the Hub, if the run had it in a folder", rule=A_HUB_ID, metavar="HUB_ID"
    )
    public: bool = option(False, "make the repository public instead of private")
