"""The kernels of one device: code objects that ship with the package, or hiprtc's; loaded once per process."""

from __future__ import annotations

import hashlib
import logging
import os
from pathlib import Path
from typing import Any

from wgrad.device.errors import DeviceError
from wgrad.hip.runtime import binding
from wgrad.hip.runtime.architectures import SHIPPED, TWINS, check_image, generic, renamed
from wgrad.hip.runtime.objects import (
    find_object,
    headers,
    objects_digest,
    objects_folder,
    read_object,
    serves,
    source_file,
    sources,
    text_digest,
)
from wgrad.hip.runtime.rtc import compile_with_hiprtc

_LOGGER = logging.getLogger("wgrad")
# ROCm's runtime loads generic targets, of code object version 6, since 6.4. Sources: ROCm/ROCR-Runtime, commit
# 0c18ff22e ("Generic ISA targets support", October 2024); ROCm/rocSOLVER#937. Under Windows it lacked gfx12-generic
# until May 2026 (ROCm/rocm-systems#6309).
GENERIC_VERSION = 6_04_00000  # of HIP, as hipRuntimeGetVersion counts
_REFUSED = (200, 209, 218)  # hipErrorInvalidImage, hipErrorNoBinaryForGpu, hipErrorInvalidKernelFile


class Modules:
    """The loaded code objects of one device and their kernels. gpu: its name in errors; index: its number in HIP."""

    def __init__(self, architecture: str, gpu: str = "a GPU", index: int = 0) -> None:
        self.architecture, self.gpu, self._index = architecture, gpu, index
        self.compiled = 0  # kernels looked up or compiled so far
        # With their bytes: the driver keeps the pointer that it was given and may read from it later.
        self._modules: dict[str, tuple[Any, bytes]] = {}
        self._functions: dict[tuple[str, str], Any] = {}
        self._places: dict[str, str] = {}
        self.refused: dict[str, str] = {}  # folders whose objects the driver does not load, and its answer

    @property
    def origin(self) -> str:
        """Return where this GPU's kernels come from: "shipped" or "hiprtc"."""
        return "shipped" if any(name not in self.refused for name in self._shipped()) else "hiprtc"

    def _shipped(self) -> list[str]:
        """Return the folders of objects that this GPU may load, best first: its own, a generic target's, its twin's."""
        names = [self.architecture]
        if self.architecture in TWINS:
            loads_generic = binding.runtime_version() >= GENERIC_VERSION
            names += [*([generic(self.architecture)] if loads_generic else []), TWINS[self.architecture]]
        return [name for name in names if (objects_folder() / name).is_dir()]

    def loaded(self) -> dict[str, str]:
        """Return, by source, where each loaded code object comes from: a file and its folder, or hiprtc.

        The folder names an architecture; another one's is a twin's, renamed.
        """
        return {source: "/".join(Path(where).parts[-2:]) for source, where in self._places.items()}

    def digest(self) -> str:
        """Return the digest of the code objects, or of the sources that hiprtc compiles."""
        if self.origin == "shipped":
            found = [objects_digest(objects_folder(), name) for name in self._shipped()]
            return found[0] if len(found) == 1 else hashlib.sha256("".join(found).encode()).hexdigest()
        return text_digest((*sources(), *headers()))

    def has(self, source: str) -> bool:
        """Return whether this architecture has a file of this name, without loading it."""
        path = source_file(source)
        return path.exists() and serves(path, self.architecture)

    def get(self, source: str, kernel: str) -> Any:
        """Return the function `kernel` of `source`.hip.

        Raises:
            DeviceError: The file, its code object or the kernel is missing, or is for another architecture.
        """
        found = self._functions.get((source, kernel))
        if found is None:
            found = binding.check(
                binding.hip().hipModuleGetFunction(self._module(source), kernel.encode()),
                f"{source}.hip has no kernel '{kernel}' for {self.architecture}",
            )
            self._functions[source, kernel] = found
            self.compiled += 1
        return found

    def _module(self, source: str) -> Any:
        if source not in self._modules:
            binding.use_device(binding.hip(), self._index)
            module, image, where = self._load(source)
            self._modules[source] = module, image
            self._places[source] = where
        return self._modules[source][0]

    def _load(self, source: str) -> tuple[Any, bytes, str]:
        """Load the best object that the driver takes, and return it with its bytes and origin."""
        image, where = self._image(source)
        check_image(image, where, self.architecture, self.gpu)
        answer = binding.hip().hipModuleLoadData(image)
        folder = Path(where).parent.name
        if int(answer[0]) in _REFUSED and folder in self._shipped() and folder != self.architecture:
            self.refused[folder] = getattr(answer[0], "name", str(int(answer[0])))
            if self.origin == "hiprtc":
                _LOGGER.warning(
                    "note: the driver loads none of the code objects that ship for %s (%s), so hiprtc compiles the"
                    " kernels, which takes minutes the first time",
                    self.gpu,
                    self._refusals(),
                )
            return self._load(source)
        remedy = "build it again with `python -m wgrad.hip.runtime.build`"
        what = f"the code object {where} cannot be loaded on {self.gpu} ({self.architecture}); {remedy}"
        return binding.check(answer, what), image, where

    def _refusals(self) -> str:
        return ", ".join(f"{folder}: {answer}" for folder, answer in self.refused.items())

    def _image(self, source: str) -> tuple[bytes, str]:
        for name in self._shipped():
            if name not in self.refused and (path := find_object(objects_folder(), name, source)):
                image = read_object(path)
                return renamed(image, self.architecture) if name == TWINS.get(self.architecture) else image, str(path)
        if self.architecture in SHIPPED and "WGRAD_HIP_OBJECTS" in os.environ:
            missing = objects_folder() / self.architecture / f"{source}.co"
            raise DeviceError(f"no code object {missing}; $WGRAD_HIP_OBJECTS names this folder")
        try:
            return compile_with_hiprtc(source, self.architecture)
        except DeviceError as error:
            if not self.refused:
                raise
            raise DeviceError(f"{error}; the driver refused the code objects that ship ({self._refusals()})") from error
