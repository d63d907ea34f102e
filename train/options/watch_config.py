"""The options of `wgrad watch`: each one's name, type, default, help and rule."""

from __future__ import annotations

from dataclasses import dataclass

from wgrad.train.options.options import PORT, Options, option


@dataclass(frozen=True)
class WatchConfig(Options):
    """Options of `wgrad watch`. Raises WgradError if a value breaks its rule."""

    port: int = option(8001, "port on 127.0.0.1 to listen on; 0: any free one", rule=PORT, metavar="N")
