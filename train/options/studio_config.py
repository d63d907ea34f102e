"""The options of `wgrad studio`: each one's name, type, default, help and rule."""

from __future__ import annotations

from dataclasses import dataclass

from wgrad.train.options.network_options import NetworkOptions
from wgrad.train.options.options import PORT, option


@dataclass(frozen=True)
class StudioConfig(NetworkOptions):
    """Where the page is. WgradError where a value breaks its rule."""

    port: int = option(8002, "of the page; 0: any that is free", rule=PORT, metavar="N", group="network")
