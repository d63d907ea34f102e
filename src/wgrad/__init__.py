"""wgrad: QLoRA fine-tuning on any GPU with WGSL compute shaders.

Public names, each imported when it is first asked for (so that `wgrad --version` stays quick):

    Tensor, no_grad, functional     the tape and its operators             wgrad.autograd
    select_device                   a device by name, or the best there is
    FinetuneConfig, run_finetune    what `wgrad finetune` runs             wgrad.train
    WgradError                      every error that a caller can put right
"""

import os as _os
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

if _TYPE_CHECKING:
    from wgrad.autograd import functional as functional
    from wgrad.autograd.select_device import select_device as select_device
    from wgrad.autograd.tensor import Tensor as Tensor
    from wgrad.autograd.tensor import no_grad as no_grad
    from wgrad.device.errors import WgradError as WgradError
    from wgrad.train.options.finetune_config import FinetuneConfig as FinetuneConfig
    from wgrad.train.run.finetune import run_finetune as run_finetune

__version__ = "0.1.0"

# A checkout without the room links (git on Windows writes them as text files) still runs:
# the rooms are then found at the top of the repository.
_root = _os.path.dirname(_os.path.dirname(_os.path.dirname(_os.path.abspath(__file__))))
if not _os.path.isdir(_os.path.join(__path__[0], "autograd")) and _os.path.isdir(_os.path.join(_root, "autograd")):
    __path__.append(_root)

_PUBLIC = {
    "FinetuneConfig": "wgrad.train.options.finetune_config",
    "Tensor": "wgrad.autograd.tensor",
    "WgradError": "wgrad.device.errors",
    "functional": "wgrad.autograd",
    "no_grad": "wgrad.autograd.tensor",
    "run_finetune": "wgrad.train.run.finetune",
    "select_device": "wgrad.autograd.select_device",
}
__all__ = ["FinetuneConfig", "Tensor", "WgradError", "functional", "no_grad", "run_finetune", "select_device"]


def __getattr__(name: str) -> _Any:
    import importlib

    if name not in _PUBLIC:
        raise AttributeError(f"module 'wgrad' has no attribute {name!r}")
    if name == "functional":
        return importlib.import_module("wgrad.autograd.functional")
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
