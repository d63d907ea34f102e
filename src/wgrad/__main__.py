"""`python -m wgrad`: the same as the command `wgrad`."""

import sys

from wgrad.train.commands.cli import main

sys.exit(main())
