"""Registry of the operators that this device implements."""

from wgrad.device.implementations import Implementations

implements = Implementations()
