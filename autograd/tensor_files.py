"""Save and load Tensors in safetensors files, which PyTorch and others read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.numpy import load, save

from wgrad.autograd.creation import device_named, tensor
from wgrad.autograd.tensor import Tensor
from wgrad.device.contract import Device
from wgrad.device.errors import WgradError
from wgrad.device.files import write_bytes


def save_tensors(tensors: Mapping[str, Tensor], path: str | Path) -> None:
    """Write Tensors to a safetensors file, atomically.

    Args:
        tensors: Tensors by their names in the file.
        path: The file; an existing one is replaced.

    Raises:
        WgradError: A value is no Tensor, or the file cannot be written.
    """
    wrong = [name for name, x in tensors.items() if not isinstance(x, Tensor)]
    if wrong:
        raise WgradError(f"save_tensors: {wrong[0]} is no Tensor but a {type(tensors[wrong[0]]).__name__}")
    write_bytes(Path(path), save({name: x.numpy() for name, x in tensors.items()}, metadata={"format": "pt"}))


def load_tensors(
    path: str | Path, *, requires_grad: bool = False, device: str | Device | None = None
) -> dict[str, Tensor]:
    """Read the Tensors of a safetensors file.

    Args:
        path: The file.
        requires_grad: Whether `backward` computes gradients of the Tensors of floats.
        device: A name (auto | wgpu | hip | cpu), a device, or None for the default.

    Returns:
        The Tensors by their names in the file.

    Raises:
        WgradError: The file is missing, or is no safetensors file.
    """
    where = device_named(device)
    try:
        arrays = load(Path(path).read_bytes())
    except FileNotFoundError:
        raise WgradError(f"load_tensors: there is no file {path}") from None
    except (OSError, SafetensorError, KeyError, ValueError) as error:  # ValueError: a size that NumPy does not take
        why = ascii(str(error))[1:-1][:300]  # with names of the file, as long and as odd as they may be
        raise WgradError(f"load_tensors: {path} cannot be read as safetensors: {why}") from error
    learns = {name: requires_grad and array.dtype.kind not in "iub" for name, array in arrays.items()}
    return {name: tensor(array, requires_grad=learns[name], device=where) for name, array in arrays.items()}
