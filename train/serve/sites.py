"""Check of request headers, for a server on this machine with any web library.

A server on localhost is reached by every page that the user's browser shows. A page of another site sends its own
Origin, or says in Sec-Fetch-Site that it is of another; one whose name was made to lead here (DNS rebinding) sends that
name as Host. All three are refused, and there are no CORS headers, so that no page could read an answer.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Sequence

_HOST = re.compile(r"(?:\[(?P<address>[0-9a-fA-F:.]+)\]|(?P<name>[\w.-]+))(?::\d+)?", re.ASCII)


def is_loopback(host: str) -> bool:
    """Return whether an address is reached from this machine alone. host: an address, or a name."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def refusal(host: str, origins: Sequence[str], fetch_site: str, is_ours: Callable[[str], bool]) -> tuple[str, str]:
    """The header for which a request is not to be answered, and what is wrong with it; ("", "") where nothing is.

    host, origins, fetch_site: the headers Host ("": none), Origin (each) and Sec-Fetch-Site ("none" where absent).
    is_ours: whether a name, in small letters and without port, is one of this server.
    """
    if not is_ours(name_of(host)):
        return "Host", f"must be an address of this server; got {host[:100]!r}"
    if any(_site(origin) != host.lower() for origin in origins):
        return "Origin", "pages of other sites may not ask this server"
    if fetch_site not in ("none", "same-origin"):
        return "Sec-Fetch-Site", "pages of other sites may not ask this server"
    return "", ""


def name_of(host: str) -> str:
    """The name in a Host header, without its port; "" where it is none."""
    found = _HOST.fullmatch(host)
    return (found["address"] or found["name"]).lower() if found else ""


def _site(origin: str) -> str:
    """HOST or HOST:PORT of an Origin header, as a Host header has it; "" of any that is no page's of the web."""
    scheme, _, host = origin.partition("://")
    return host.lower() if scheme in ("http", "https") else ""
