"""`wgrad studio`: fine-tune in the browser."""

from __future__ import annotations

import os
import threading

from wgrad.device.errors import WgradError
from wgrad.train.options.studio_config import StudioConfig
from wgrad.train.terminal.interrupts import end_at_signals

try:
    from starlette.types import ASGIApp

    from wgrad.train.serve.guard import Guard
    from wgrad.train.serve.http_server import HttpServer, address_text, open_address
    from wgrad.train.serve.run_list import RunList
    from wgrad.train.serve.studio import Studio, make_studio
except ImportError as error:
    raise WgradError(f"wgrad studio: {error.name} is not installed: pip install 'wgrad[serve]'") from error

_LOOK = 1.0  # seconds between checks for a signal, which Windows needs


def guarded_studio(studio: Studio, config: StudioConfig) -> ASGIApp:
    """Return the web application, behind the checks of requests. The page itself needs no key."""
    pages = [route.path for route in studio.page_routes]
    return Guard(make_studio(studio), config.host, config.allow_host, config.key, open_paths=pages)


def run_studio(config: StudioConfig, folder: str) -> int:
    """Serve until a signal. The page's address goes to standard output. WgradError: folder, address or key is wrong."""
    if os.path.exists(folder) and not os.path.isdir(folder):
        raise WgradError(f"RUNS: {folder} must be the folder of the runs; got a file: give its folder")
    listening = open_address(config.host, config.port, config.key)
    studio, ended = Studio(RunList(folder)), threading.Event()
    server = HttpServer(guarded_studio(studio, config), listening, ended.set)
    end_at_signals()
    server.start()
    try:
        print(f"wgrad studio at {address_text(listening)} (Ctrl-C ends it; runs go on)", flush=True)
        while not ended.wait(_LOOK):
            pass
    finally:
        studio.close()
        server.stop()
    raise WgradError("the web server ended by itself: start it again")
