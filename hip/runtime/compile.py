"""The kernels of one device: code objects that ship with the package, or hiprtc's; loaded once per process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from wgrad.device.errors import DeviceError
from wgrad.hip.runtime import binding
from wgrad.hip.runtime.architectures import SHIPPED, TWINS, check_image, renamed
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


class Modules:
    """The loaded code objects of one device and their kernels. gpu: its name in errors; index: its number in HIP."""

    def __init__(self, architecture: str, gpu: str = "a GPU", index: int = 0) -> None:
        self.architecture, self.gpu, self._index = architecture, gpu, index
        self.compiled = 0  # kernels looked up or compiled so far
        # With their bytes: the driver keeps the pointer that it was given and may read from it later.
        self._modules: dict[str, tuple[Any, bytes]] = {}
        self._functions: dict[tuple[str, str], Any] = {}
        self._places: dict[str, str] = {}

    @property
    def origin(self) -> str:
        """Return where this GPU's kernels come from: "shipped" or "hiprtc"."""
        return "shipped" if self._shipped() else "hiprtc"

    def _shipped(self) -> str:
        """Return the architecture whose objects this one uses, empty where there are none."""
        for name in (self.architecture, TWINS.get(self.architecture, "")):
            if name and (objects_folder() / name).is_dir():
                return name
        return ""

    def loaded(self) -> dict[str, str]:
        """Return, by source, where each loaded code object comes from: a file and its folder, or hiprtc."""
        return {source: "/".join(Path(where).parts[-2:]) for source, where in self._places.items()}

    def digest(self) -> str:
        """Return the digest of the code objects, or of the sources that hiprtc compiles."""
        if self.origin == "shipped":
            return objects_digest(objects_folder(), self._shipped())
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
            image, where = self._image(source)
            check_image(image, where, self.architecture, self.gpu)
            binding.use_device(binding.hip(), self._index)
            twin = self._shipped()
            remedy = "build it again with `python -m wgrad.hip.runtime.build`"
            if twin not in ("", self.architecture):
                remedy = (
                    f"it is {twin}'s, renamed: set WGRAD_HIP_OBJECTS to an empty folder, so that ROCm's hiprtc compiles"
                    " the kernels for this GPU"
                )
            module = binding.check(
                binding.hip().hipModuleLoadData(image),
                f"the code object {where} cannot be loaded on {self.gpu} ({self.architecture}); {remedy}",
            )
            self._modules[source] = module, image
            self._places[source] = where
        return self._modules[source][0]

    def _image(self, source: str) -> tuple[bytes, str]:
        path = find_object(objects_folder(), self.architecture, source)
        if path is not None:
            return read_object(path), str(path)
        if (twin := TWINS.get(self.architecture)) and (path := find_object(objects_folder(), twin, source)):
            return renamed(read_object(path), self.architecture), str(path)
        if self.architecture in SHIPPED and "WGRAD_HIP_OBJECTS" in os.environ:
            missing = objects_folder() / self.architecture / f"{source}.co"
            raise DeviceError(f"no code object {missing}; $WGRAD_HIP_OBJECTS names this folder")
        return compile_with_hiprtc(source, self.architecture)
