"""`python -m wgrad.train`: the same as the command `wgrad`."""

import sys

from wgrad.__main__ import main

sys.exit(main())
