"""The options of `wgrad watch`: each one's name, type, default, help and rule."""

from __future__ import annotations

from dataclasses import dataclass

from wgrad.train.options.options import PORT, Options, option


@dataclass(frozen=True)
class WatchConfig(Options):
    """Where the page is. WgradError where a value breaks its rule."""

    port: int = option(8001, "of the page, on 127.0.0.1; 0: any that is free", rule=PORT, metavar="N")
