"""The table of this room's operators."""

from wgrad.device.implementations import Implementations

implements = Implementations()
