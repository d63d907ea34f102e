"""wgrad: QLoRA fine-tuning on any GPU with WGSL compute shaders.

Public names, imported on first use so that `import wgrad` stays fast:

    finetune, FinetuneResult        a run, with the options of `wgrad finetune`            wgrad.train
    sweep, SweepResult, Trial       runs of all combinations of options, and the best
    Callback, StepReport, EvaluationReport, SaveReport, RateReport
                                    reports of a run while it trains; a callback can stop it
    ModelOutput, TokenBatch         the arguments of a custom loss
    LoraVariant, register_lora_variant
                                    a custom variant of LoRA
    load, LoadedModel, Generated, Scores, TokenScore
                                    a model that generates and scores text
    generate                        one text, with the options of `wgrad generate`
    tensor, zeros, ones, full, zeros_like, ones_like, arange, linspace, eye, randn, rand, randint, manual_seed,
    set_default_device, float32, float16, int32, uint32
                                    Tensors on a device                                    wgrad.autograd
    Tensor, no_grad, functional, where, maximum, minimum, cat, stack, einsum
                                    autograd and its operators
    exp, sum, chunk, ...            most methods of Tensors, as functions
    SGD, AdamW, compile, register_operator, register_shader, save_tensors, load_tensors
                                    optimizers, recorded training steps, custom operators, safetensors files
    select_device                   a device by name, or the best one available
    WgradError, DeviceError         errors that the caller can fix; errors that a device raised

docs/reference/python.md shows how they are used.
"""

from __future__ import annotations as _annotations

import os as _os

from wgrad.version import __version__ as __version__

TYPE_CHECKING = False  # type checkers treat it as True; importing `typing` would take longer than everything else here
if TYPE_CHECKING:
    from typing import Any as _Any

    from numpy import float16 as float16
    from numpy import float32 as float32
    from numpy import int32 as int32
    from numpy import uint32 as uint32

    from wgrad.autograd import functional as functional
    from wgrad.autograd.compiled_step import compile as compile
    from wgrad.autograd.creation import arange as arange
    from wgrad.autograd.creation import eye as eye
    from wgrad.autograd.creation import full as full
    from wgrad.autograd.creation import linspace as linspace
    from wgrad.autograd.creation import ones as ones
    from wgrad.autograd.creation import ones_like as ones_like
    from wgrad.autograd.creation import rand as rand
    from wgrad.autograd.creation import randint as randint
    from wgrad.autograd.creation import randn as randn
    from wgrad.autograd.creation import set_default_device as set_default_device
    from wgrad.autograd.creation import tensor as tensor
    from wgrad.autograd.creation import zeros as zeros
    from wgrad.autograd.creation import zeros_like as zeros_like
    from wgrad.autograd.custom_operator import register_operator as register_operator
    from wgrad.autograd.custom_shader import register_shader as register_shader
    from wgrad.autograd.ops.arithmetic import maximum as maximum
    from wgrad.autograd.ops.arithmetic import minimum as minimum
    from wgrad.autograd.ops.arithmetic import where as where
    from wgrad.autograd.ops.einsum import einsum as einsum
    from wgrad.autograd.ops.movement import cat as cat
    from wgrad.autograd.ops.movement import stack as stack
    from wgrad.autograd.optim import SGD as SGD
    from wgrad.autograd.optim import AdamW as AdamW
    from wgrad.autograd.random_numbers import manual_seed as manual_seed
    from wgrad.autograd.select_device import select_device as select_device
    from wgrad.autograd.tensor import Tensor as Tensor
    from wgrad.autograd.tensor import no_grad as no_grad
    from wgrad.autograd.tensor_files import load_tensors as load_tensors
    from wgrad.autograd.tensor_files import save_tensors as save_tensors
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
    from wgrad.train.library.sweep import SweepResult as SweepResult
    from wgrad.train.library.sweep import Trial as Trial
    from wgrad.train.library.sweep import sweep as sweep
    from wgrad.train.model.lora_variants import LoraVariant as LoraVariant
    from wgrad.train.model.lora_variants import register_lora_variant as register_lora_variant
    from wgrad.train.output.callbacks import Callback as Callback
    from wgrad.train.output.callbacks import EvaluationReport as EvaluationReport
    from wgrad.train.output.callbacks import RateReport as RateReport
    from wgrad.train.output.callbacks import SaveReport as SaveReport
    from wgrad.train.output.callbacks import StepReport as StepReport
    from wgrad.train.step.hooks import ModelOutput as ModelOutput
    from wgrad.train.step.hooks import TokenBatch as TokenBatch

# In a checkout without symbolic links (git on Windows writes them as text files), the packages are found at the top of
# the repository.
_root = _os.path.dirname(_os.path.dirname(_os.path.dirname(_os.path.abspath(__file__))))
if not _os.path.isdir(_os.path.join(__path__[0], "autograd")) and _os.path.isdir(_os.path.join(_root, "autograd")):
    __path__.append(_root)

_PUBLIC = {
    "AdamW": "wgrad.autograd.optim",
    "Callback": "wgrad.train.output.callbacks",
    "DeviceError": "wgrad.device.errors",
    "EvaluationReport": "wgrad.train.output.callbacks",
    "FinetuneResult": "wgrad.train.library.results",
    "Generated": "wgrad.train.library.loaded_model",
    "LoadedModel": "wgrad.train.library.loaded_model",
    "LoraVariant": "wgrad.train.model.lora_variants",
    "ModelOutput": "wgrad.train.step.hooks",
    "RateReport": "wgrad.train.output.callbacks",
    "SGD": "wgrad.autograd.optim",
    "SaveReport": "wgrad.train.output.callbacks",
    "Scores": "wgrad.train.library.loaded_model",
    "StepReport": "wgrad.train.output.callbacks",
    "SweepResult": "wgrad.train.library.sweep",
    "Tensor": "wgrad.autograd.tensor",
    "TokenBatch": "wgrad.train.step.hooks",
    "TokenScore": "wgrad.train.library.loaded_model",
    "Trial": "wgrad.train.library.sweep",
    "WgradError": "wgrad.device.errors",
    "arange": "wgrad.autograd.creation",
    "cat": "wgrad.autograd.ops.movement",
    "compile": "wgrad.autograd.compiled_step",
    "einsum": "wgrad.autograd.ops.einsum",
    "eye": "wgrad.autograd.creation",
    "finetune": "wgrad.train.library.finetune",
    "float16": "numpy",
    "float32": "numpy",
    "full": "wgrad.autograd.creation",
    "functional": "wgrad",
    "generate": "wgrad.train.library.loaded_model",
    "int32": "numpy",
    "linspace": "wgrad.autograd.creation",
    "load": "wgrad.train.library.loaded_model",
    "load_tensors": "wgrad.autograd.tensor_files",
    "manual_seed": "wgrad.autograd.random_numbers",
    "maximum": "wgrad.autograd.ops.arithmetic",
    "minimum": "wgrad.autograd.ops.arithmetic",
    "no_grad": "wgrad.autograd.tensor",
    "ones": "wgrad.autograd.creation",
    "ones_like": "wgrad.autograd.creation",
    "rand": "wgrad.autograd.creation",
    "randint": "wgrad.autograd.creation",
    "randn": "wgrad.autograd.creation",
    "register_lora_variant": "wgrad.train.model.lora_variants",
    "register_operator": "wgrad.autograd.custom_operator",
    "register_shader": "wgrad.autograd.custom_shader",
    "save_tensors": "wgrad.autograd.tensor_files",
    "select_device": "wgrad.autograd.select_device",
    "set_default_device": "wgrad.autograd.creation",
    "stack": "wgrad.autograd.ops.movement",
    "sweep": "wgrad.train.library.sweep",
    "tensor": "wgrad.autograd.creation",
    "uint32": "numpy",
    "where": "wgrad.autograd.ops.arithmetic",
    "zeros": "wgrad.autograd.creation",
    "zeros_like": "wgrad.autograd.creation",
}
__all__ = [
    "AdamW",
    "Callback",
    "DeviceError",
    "EvaluationReport",
    "FinetuneResult",
    "Generated",
    "LoadedModel",
    "LoraVariant",
    "ModelOutput",
    "RateReport",
    "SGD",
    "SaveReport",
    "Scores",
    "StepReport",
    "SweepResult",
    "Tensor",
    "TokenBatch",
    "TokenScore",
    "Trial",
    "WgradError",
    "arange",
    "cat",
    "compile",
    "einsum",
    "eye",
    "finetune",
    "float16",
    "float32",
    "full",
    "functional",
    "generate",
    "int32",
    "linspace",
    "load",
    "load_tensors",
    "manual_seed",
    "no_grad",
    "ones",
    "ones_like",
    "rand",
    "randint",
    "randn",
    "register_lora_variant",
    "register_operator",
    "register_shader",
    "save_tensors",
    "select_device",
    "set_default_device",
    "stack",
    "sweep",
    "tensor",
    "uint32",
    "where",
    "zeros",
    "zeros_like",
]


def __getattr__(name: str) -> _Any:
    import importlib

    if name not in _PUBLIC:
        problem = f"module 'wgrad' has no attribute {name!r}"
        if name.startswith("_"):
            raise AttributeError(problem)
        from wgrad.autograd import functional, method_functions, torch_names

        if name in method_functions.NAMES:
            return globals().setdefault(name, method_functions.method_function(name))
        raise AttributeError(
            problem + torch_names.instead_in_wgrad(name, __all__, functional.__all__, functional.Tensor)
        )
    if name == "functional":
        return importlib.import_module("wgrad.functional")
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
