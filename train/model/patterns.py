"""Check of untrusted regular expressions, which are first tried in a separate process.

For a pattern such as `(\\w+)+x`, Python's `re` can take exponential time, during which it holds the interpreter and
cannot be interrupted. A process can be killed.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence

from wgrad.device.errors import WgradError
from wgrad.train.files.decode import show

SECONDS = 5.0  # time limit, without the start of the process
NO_PATTERN = (re.error, OverflowError, RecursionError)  # errors of `re` for invalid expressions
_PLAIN = re.compile(r"[\w.-]*")
_TRY = """
import json, re, sys
print(flush=True)
for form, pattern, names in json.load(sys.stdin):
    try:
        compiled = re.compile(form.replace("PATTERN", pattern))
    except Exception:
        continue
    for name in names:
        compiled.match(name)
"""


def check_patterns(forms: Iterable[tuple[str, str]], names: Sequence[str], source: str) -> None:
    """Check that regular expressions can be matched within `SECONDS`.

    Args:
        forms: Pairs of an expression that contains `PATTERN`, and the pattern that replaces it.
        names: Texts that are matched with each expression.
        source: File of the patterns, for the error.

    Raises:
        WgradError: Matching takes too long.
    """
    work = [(form, pattern, list(names)) for form, pattern in forms if not _PLAIN.fullmatch(pattern)]
    if not work:
        return
    command = [sys.executable, "-I", "-S", "-c", _TRY]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        try:
            process.communicate(json.dumps(work).encode(), timeout=SECONDS)
        except subprocess.TimeoutExpired as error:
            process.kill()
            found = ", ".join(show(pattern) for _, pattern, _ in work)
            raise WgradError(
                f"{source}: a regular expression must be decided within {SECONDS:g} s; got {found}: write it without "
                "repetitions inside of repetitions"
            ) from error
