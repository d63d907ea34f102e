"""Options of all commands that serve HTTP: the address to listen on, and who may send requests."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from wgrad.device.errors import WgradError
from wgrad.train.options.options import Options, Rule, option

KEY_VARIABLE = "WGRAD_API_KEY"
_A_NAME = r"[\w.-]+(:\d+)?|\[[0-9a-fA-F:.]+\](:\d+)?|[0-9a-fA-F:.]+"
_NAMES: Rule = (
    "must be names of hosts or addresses, without http:// and without *",
    lambda v: all(re.fullmatch(_A_NAME, name, re.ASCII) for name in v),
)


@dataclass(frozen=True, kw_only=True)
class NetworkOptions(Options):
    """Options of a server's address, and of the key that clients need."""

    host: str = option(
        "127.0.0.1",
        "address to listen on; one that other machines can reach needs --api-key",
        metavar="ADDRESS",
        group="network",
    )
    api_key: str | None = option(
        None,
        f"refuse requests without this key. Better in the environment, {KEY_VARIABLE}: other users see command lines",
        metavar="KEY",
        group="network",
    )
    allow_host: tuple[str, ...] = option(
        (),
        "further names by which clients call this machine (the Host header)",
        rule=_NAMES,
        metavar="NAME",
        group="network",
    )

    @property
    def key(self) -> str | None:
        """Key of --api-key or the environment; None: neither is set. WgradError: a client could not send it."""
        source = KEY_VARIABLE if self.api_key is None else "--api-key"
        key = os.environ.get(KEY_VARIABLE) if self.api_key is None else self.api_key
        if key is not None and not (key and key.isascii() and key.isprintable() and " " not in key):
            got = "none" if not key else "others"  # not the key itself: errors are logged
            raise WgradError(f"{source}: must be printable ASCII characters without spaces; got {got}: choose another")
        return key
