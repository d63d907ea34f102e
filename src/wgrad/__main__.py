"""Entry point of the command `wgrad` and of `python -m wgrad`.

Importing the program takes half a second, in which Ctrl-C would print a traceback. So signal handlers are installed
first, and this module imports nothing slow.
"""

from __future__ import annotations

import gc
import os
import signal
import sys

_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGBREAK")


def end_now(number: int, frame: object = None) -> None:
    """Handle a signal by ending the process with one line, while there is nothing to save yet."""
    try:
        os.write(2, b"wgrad: interrupted\n")
    except OSError:
        pass
    os._exit(128 + number)


def _settle_errors() -> None:
    """Discard what standard error does not take, as on a full disk: Python would try again, and end with 120."""
    try:
        if sys.stderr is not None:
            sys.stderr.flush()
    except OSError:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 2)


def main() -> int:
    """Run the command line of this process and return its exit status."""
    for number in [getattr(signal, name) for name in _SIGNALS if hasattr(signal, name)]:
        if signal.getsignal(number) not in (signal.SIG_IGN, None):  # nohup ignores SIGHUP
            signal.signal(number, end_now)
    try:
        from wgrad.train.commands.cli import main as run

        status = run()
    except KeyboardInterrupt as error:  # a second one, while the first was being handled
        end_now(getattr(error, "number", signal.SIGINT))
        raise
    _settle_errors()
    # Skip the interpreter's last garbage collection: it takes up to 0.3 s, in which our handlers are gone.
    gc.freeze()
    return status


if __name__ == "__main__":
    sys.exit(main())
