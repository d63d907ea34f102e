"""The options of `wgrad serve`: each one's name, type, default, help and rule."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import get_args

from wgrad.device.errors import WgradError
from wgrad.train.files.input_files import expand_path
from wgrad.train.options.choices import Pooling
from wgrad.train.options.model_options import WithContext, WithTemplate
from wgrad.train.options.network_options import KEY_VARIABLE, NetworkOptions
from wgrad.train.options.options import ABOVE_0, AT_LEAST_1, PORT, Rule, option

MOST_ROWS = 256  # largest batch
CACHE_SEQUENCES = 8  # sequences of full length for which the KV cache has room by default
_ORIGINS: Rule = (
    "must be *, or origins with a scheme and without a path, such as https://my.app",
    lambda v: all(re.fullmatch(r"\*|[a-z][a-z0-9+.-]*://[^/\s*]+", origin) for origin in v),
)
_ROWS: Rule = (f"must be between 1 and {MOST_ROWS}", lambda v: 1 <= v <= MOST_ROWS)


@dataclass(frozen=True)
class ServeConfig(NetworkOptions, WithTemplate, WithContext):
    """Options of `wgrad serve`. Raises WgradError if a value breaks its rule."""

    model: str = option(
        "",
        "model: a folder, a GGUF file, or a Hub id such as org/name; needed unless an --adapter names it",
        metavar="DIR_OR_HUB_ID",
        path=True,
    )
    adapter: tuple[str, ...] = option(
        (),
        "further PEFT adapters to serve, each under its folder's name or NAME; requests choose by 'model'",
        metavar="[NAME=]DIR",
    )
    pooling: Pooling | None = option(
        None,
        "compute embeddings from the mean of a text's tokens, or from the last one (default: as the model's 1_Pooling "
        "says, else mean)",
        choices=get_args(Pooling),
    )
    port: int = option(8000, "port to listen on; 0: any free one", rule=PORT, metavar="N", group="network")
    allow_origin: tuple[str, ...] = option(
        (),
        "web pages that may use this server, each by its origin, such as https://my.app; *: all, which needs a key",
        rule=_ORIGINS,
        metavar="ORIGIN",
        group="network",
    )
    request_log: bool = option(True, "print a line to standard error for each request", group="network")
    batch_size: int = option(32, "generate for at most B requests at once", rule=_ROWS, metavar="B", group="limits")
    cache_tokens: int | None = option(
        None,
        f"size of the KV cache in tokens, of all requests together (default: {CACHE_SEQUENCES} times --context); when "
        "it is full, the latest requests wait",
        rule=AT_LEAST_1,
        metavar="N",
        group="limits",
    )
    max_new_tokens: int | None = option(
        None,
        "most tokens of an answer (default: what --context has room for)",
        rule=AT_LEAST_1,
        metavar="N",
        group="limits",
    )
    max_seconds: float = option(300.0, "end an answer after S seconds", rule=ABOVE_0, metavar="S", group="limits")
    max_waiting: int = option(
        512, "refuse a request (status 429) while this many requests wait", rule=AT_LEAST_1, metavar="N", group="limits"
    )

    @property
    def adapters(self) -> dict[str, str]:
        """Folder of each adapter, by name. WgradError: a name is given twice or is empty."""
        folders: dict[str, str] = {}
        for given in self.adapter:
            name, equals, path = given.partition("=")
            path = expand_path(path if equals else given, "--adapter")
            name = name if equals else os.path.basename(os.path.abspath(path))
            if not name or not path or not name.isprintable():
                raise WgradError(f"--adapter: expected DIR or NAME=DIR, got {given!r}: for example mine=out/mine")
            if name in folders:
                raise WgradError(f"--adapter: {name!r} is given twice: name them apart, for example {name}-2={path}")
            folders[name] = path
        return folders

    def require(self, where: str = "") -> None:
        super().require(where)
        if not self.model and not self.adapter:
            raise WgradError("--model is required: give it, or an --adapter that names it")
        if "*" in self.allow_origin and self.key is None:
            raise WgradError(
                f"--allow-origin: * lets every web page use this server: set {KEY_VARIABLE} to a key that they must "
                "have, or name origins"
            )
