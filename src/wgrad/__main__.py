"""`python -m wgrad`: the same as the command `wgrad`."""

import sys

from wgrad.train.cli import main

sys.exit(main())
