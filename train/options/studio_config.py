"""The options of `wgrad studio`: each one's name, type, default, help and rule."""

from __future__ import annotations

from dataclasses import dataclass

from wgrad.train.options.network_options import NetworkOptions
from wgrad.train.options.options import PORT, option


@dataclass(frozen=True)
class StudioConfig(NetworkOptions):
    """Options of `wgrad studio`. Raises WgradError if a value breaks its rule."""

    port: int = option(8002, "port to listen on; 0: any free one", rule=PORT, metavar="N", group="network")
