"""wgrad: QLoRA fine-tuning on any GPU with WGSL compute shaders."""

import os as _os

__version__ = "0.1.0"

# A checkout without the room links (git on Windows writes them as text files) still runs:
# the rooms are then found at the top of the repository.
_root = _os.path.dirname(_os.path.dirname(_os.path.dirname(_os.path.abspath(__file__))))
if not _os.path.isdir(_os.path.join(__path__[0], "autograd")) and _os.path.isdir(_os.path.join(_root, "autograd")):
    __path__.append(_root)
