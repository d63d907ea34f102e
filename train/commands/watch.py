"""`wgrad watch`: a web page with the curves of runs, during or after them."""

from __future__ import annotations

from collections.abc import Sequence

from wgrad.device.errors import WgradError
from wgrad.device.shown import counted
from wgrad.train.files.input_files import expand_path
from wgrad.train.options.watch_config import WatchConfig
from wgrad.train.output.watched import WatchedRun
from wgrad.train.terminal.interrupts import end_at_signals

try:
    from wgrad.train.serve.watch_server import Watch, WatchServer
except ImportError as error:
    raise WgradError(f"wgrad watch: {error.name} is not installed: pip install 'wgrad[serve]'") from error

MOST_RUNS = 32


def open_watch(folders: Sequence[str]) -> Watch:
    """Return the runs to watch. WgradError: there are too many."""
    folders = list(dict.fromkeys(expand_path(folder, "RUN") for folder in folders))
    if len(folders) > MOST_RUNS:
        raise WgradError(f"RUN: a page shows at most {MOST_RUNS} runs; got {len(folders)}: leave some out")
    return Watch([WatchedRun(folder) for folder in folders])


def run_watch(config: WatchConfig, folders: Sequence[str]) -> int:
    """Serve until a signal. Only the page's address is printed. WgradError: a folder or the port cannot be used."""
    end_at_signals()
    with WatchServer(config.port, open_watch(folders)) as server:
        count = len(server.watch.runs)
        print(f"watching {counted(count, 'run')} at {server.address} (Ctrl-C ends it)", flush=True)
        server.serve_forever()
    raise WgradError("the web server ended by itself: start it again")
