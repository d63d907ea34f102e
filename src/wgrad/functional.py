"""Alias: `import wgrad.functional` gives wgrad.autograd.functional."""

import sys

import wgrad.autograd.functional
from wgrad.autograd.functional import *  # noqa: F403

sys.modules[__name__] = wgrad.autograd.functional
