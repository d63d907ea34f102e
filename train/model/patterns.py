"""Regular expressions of other people: tried in a process of their own first.

Python's `re` can take longer than the universe has been there for a pattern such as `(\\w+)+x`, holds the interpreter
meanwhile and knows no limit. A process can be ended.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence

from wgrad.device.errors import WgradError
from wgrad.train.files.decode import show

SECONDS = 5.0  # from when the process is there
NO_PATTERN = (re.error, OverflowError, RecursionError)  # what `re` raises for text that is no regular expression
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
    """WgradError where matching takes too long. forms: (how `PATTERN` is put into an expression, the pattern), as they
    will be matched with each of `names`; source: the file that they come from, for the error."""
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
