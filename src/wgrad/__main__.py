"""The command `wgrad`, also as `python -m wgrad`: ends with one line on Ctrl-C from its first moment on.

Importing the program takes half a second, in which a KeyboardInterrupt would be a traceback. So the handlers come
first, and this module imports nothing that takes time.
"""

from __future__ import annotations

import gc
import os
import signal
import sys

_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGBREAK")


def end_now(number: int, frame: object = None) -> None:
    """End the process with one line: a signal's handler for times at which nothing can be lost."""
    try:
        os.write(2, b"wgrad: interrupted\n")
    except OSError:
        pass
    os._exit(128 + number)


def main() -> int:
    """Run the command line of this process -> exit status."""
    for number in [getattr(signal, name) for name in _SIGNALS if hasattr(signal, name)]:
        if signal.getsignal(number) not in (signal.SIG_IGN, None):  # as nohup would have it
            signal.signal(number, end_now)
    try:
        from wgrad.train.commands.cli import main as run

        status = run()
    except KeyboardInterrupt as error:  # one more, while the first was answered
        end_now(getattr(error, "number", signal.SIGINT))
        raise
    # The interpreter would collect garbage among all objects as it ends. That takes up to 0.3 s, without our handlers.
    gc.freeze()
    return status


if __name__ == "__main__":
    sys.exit(main())
