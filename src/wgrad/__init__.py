"""wgrad: QLoRA fine-tuning on any GPU with WGSL compute shaders.

Public names, each imported when it is first asked for (so that `import wgrad` stays quick):

    finetune, FinetuneResult        a run, with the options of `wgrad finetune`            wgrad.train
    Callback, StepReport, EvaluationReport, SaveReport, RateReport
                                    what a run tells while it goes on; the answer can end it
    ModelOutput, TokenBatch         what a loss of your own gets
    load, LoadedModel, Generated, Scores, TokenScore
                                    a model that writes and scores texts
    generate                        one text, with the options of `wgrad generate`
    Tensor, no_grad, functional     the tape and its operators                             wgrad.autograd
    select_device                   a device by name, or the best there is
    WgradError, DeviceError         errors that a caller can put right; what a device refused

docs/reference/python.md shows how they are used.
"""

from __future__ import annotations as _annotations

import os as _os

from wgrad.version import __version__ as __version__

TYPE_CHECKING = False  # type checkers take it for True; importing `typing` takes longer than all else here
if TYPE_CHECKING:
    from typing import Any as _Any

    from wgrad.autograd import functional as functional
    from wgrad.autograd.select_device import select_device as select_device
    from wgrad.autograd.tensor import Tensor as Tensor
    from wgrad.autograd.tensor import no_grad as no_grad
    from wgrad.device.errors import DeviceError as DeviceError
    from wgrad.device.errors import WgradError as WgradError
    from wgrad.train.library.finetune import finetune as finetune
    from wgrad.train.library.loaded_model import Generated as Generated
    from wgrad.train.library.loaded_model import LoadedModel as LoadedModel
    from wgrad.train.library.loaded_model import Scores as Scores
    from wgrad.train.library.loaded_model import TokenScore as TokenScore
    from wgrad.train.library.loaded_model import generate as generate
    from wgrad.train.library.loaded_model import load as load
    from wgrad.train.library.results import FinetuneResult as FinetuneResult
    from wgrad.train.output.callbacks import Callback as Callback
    from wgrad.train.output.callbacks import EvaluationReport as EvaluationReport
    from wgrad.train.output.callbacks import RateReport as RateReport
    from wgrad.train.output.callbacks import SaveReport as SaveReport
    from wgrad.train.output.callbacks import StepReport as StepReport
    from wgrad.train.step.hooks import ModelOutput as ModelOutput
    from wgrad.train.step.hooks import TokenBatch as TokenBatch

# A checkout without the room links (git on Windows writes them as text files) still runs:
# the rooms are then found at the top of the repository.
_root = _os.path.dirname(_os.path.dirname(_os.path.dirname(_os.path.abspath(__file__))))
if not _os.path.isdir(_os.path.join(__path__[0], "autograd")) and _os.path.isdir(_os.path.join(_root, "autograd")):
    __path__.append(_root)

_PUBLIC = {
    "Callback": "wgrad.train.output.callbacks",
    "DeviceError": "wgrad.device.errors",
    "EvaluationReport": "wgrad.train.output.callbacks",
    "FinetuneResult": "wgrad.train.library.results",
    "Generated": "wgrad.train.library.loaded_model",
    "LoadedModel": "wgrad.train.library.loaded_model",
    "ModelOutput": "wgrad.train.step.hooks",
    "RateReport": "wgrad.train.output.callbacks",
    "SaveReport": "wgrad.train.output.callbacks",
    "Scores": "wgrad.train.library.loaded_model",
    "StepReport": "wgrad.train.output.callbacks",
    "Tensor": "wgrad.autograd.tensor",
    "TokenBatch": "wgrad.train.step.hooks",
    "TokenScore": "wgrad.train.library.loaded_model",
    "WgradError": "wgrad.device.errors",
    "finetune": "wgrad.train.library.finetune",
    "functional": "wgrad",
    "generate": "wgrad.train.library.loaded_model",
    "load": "wgrad.train.library.loaded_model",
    "no_grad": "wgrad.autograd.tensor",
    "select_device": "wgrad.autograd.select_device",
}
__all__ = [
    "Callback",
    "DeviceError",
    "EvaluationReport",
    "FinetuneResult",
    "Generated",
    "LoadedModel",
    "ModelOutput",
    "RateReport",
    "SaveReport",
    "Scores",
    "StepReport",
    "Tensor",
    "TokenBatch",
    "TokenScore",
    "WgradError",
    "finetune",
    "functional",
    "generate",
    "load",
    "no_grad",
    "select_device",
]


def __getattr__(name: str) -> _Any:
    import importlib

    if name not in _PUBLIC:
        raise AttributeError(f"module 'wgrad' has no attribute {name!r}")
    if name == "functional":
        return importlib.import_module("wgrad.functional")
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
