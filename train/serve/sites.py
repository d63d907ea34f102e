"""Checking request headers against attacks by web pages, with any web library.

Every page in the user's browser can reach a server on localhost. A page of another site sends its own Origin, or
Sec-Fetch-Site says that it is from another; a page whose name resolves to this machine (DNS rebinding) sends that name
as Host. All three are refused, and there are no CORS headers, so that no page could read an answer.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Sequence

_HOST = re.compile(r"(?:\[(?P<address>[0-9a-fA-F:.]+)\]|(?P<name>[\w.-]+))(?::\d+)?", re.ASCII)


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach an address. host: an address, or a name."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def refusal(host: str, origins: Sequence[str], fetch_site: str, is_ours: Callable[[str], bool]) -> tuple[str, str]:
    """Return the header for which to refuse a request, and what is wrong with it; ("", "") if the request is fine.

    host, origins, fetch_site: the headers Host ("": none), Origin (each) and Sec-Fetch-Site ("none" if absent).
    is_ours: whether a name, in lower case and without port, is one of this server.
    """
    if not is_ours(name_of(host)):
        return "Host", f"must be an address of this server; got {host[:100]!r}"
    if any(_site(origin) != host.lower() for origin in origins):
        return "Origin", "pages of other sites may not ask this server"
    if fetch_site not in ("none", "same-origin"):
        return "Sec-Fetch-Site", "pages of other sites may not ask this server"
    return "", ""


def name_of(host: str) -> str:
    """Return the name in a Host header, without its port; "" for a malformed one."""
    found = _HOST.fullmatch(host)
    return (found["address"] or found["name"]).lower() if found else ""


def _site(origin: str) -> str:
    """Return HOST or HOST:PORT of an Origin header, as in a Host header; "" if it is not that of a web page."""
    scheme, _, host = origin.partition("://")
    return host.lower() if scheme in ("http", "https") else ""
