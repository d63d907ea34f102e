"""The options of `wgrad chat`: each one's name, type, default, help and rule."""

from __future__ import annotations

from dataclasses import dataclass

from wgrad.device.errors import WgradError
from wgrad.train.options.generate_config import Sampling
from wgrad.train.options.model_options import LoadOptions
from wgrad.train.options.options import AT_LEAST_1, option


@dataclass(frozen=True, kw_only=True)
class ChatConfig(Sampling, LoadOptions):
    """Options of `wgrad chat`. Raises WgradError if a value breaks its rule."""

    compare: bool = option(False, "with --adapter: show answers with and without the adapter")
    system: str = option("", "what the conversation begins with, as its system message", metavar="TEXT")
    max_new_tokens: int = option(512, "stop an answer after this many tokens", rule=AT_LEAST_1, metavar="N")

    def require(self, where: str = "") -> None:
        super().require(where)
        if self.compare and not self.adapter:
            raise WgradError("--compare: goes with --adapter: add that, or leave it out")
