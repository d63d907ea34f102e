"""Hostile inputs for `wgrad`, made and judged: python -m tests.fuzz --seconds 60 --seed 1

Each input is a command line with files; it must end with status 0 or 2 (1 where the result is not usable), one line on
stderr for an error, no traceback, bounded memory and time, and nothing half-written. What does not is printed by kind
and, with --keep, written to a folder as a case that --replay runs again.
"""

from __future__ import annotations

import os

for _name, _value in {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "RAYON_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}.items():
    os.environ[_name] = _value  # before NumPy and tokenizers are imported: a child is forked from one thread

import sys  # noqa: E402

from tests.fuzz.campaign import main  # noqa: E402

sys.exit(main())
