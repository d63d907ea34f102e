"""Custom operators with a compute shader of their own: WGSL, NumPy reference, and gradient."""

from __future__ import annotations

import hashlib
import inspect
import math
import re
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from wgrad.autograd.custom_check import check_gradients, check_results, check_types
from wgrad.autograd.function import Function
from wgrad.autograd.gradcheck import gradcheck
from wgrad.autograd.modes import no_grad
from wgrad.autograd.operators import OPERATORS
from wgrad.autograd.reference import recorded
from wgrad.autograd.selftest.case import BUILTIN_ULPS, Case
from wgrad.autograd.tensor import Tensor
from wgrad.device.cache import cache_folder, make_private
from wgrad.device.contract import Array, Device
from wgrad.device.errors import OperatorMissing, WgradError
from wgrad.device.expression import FUNCTIONS
from wgrad.device.files import replacing

_BINDING = re.compile(
    r"@group\((?P<group>\d+)\)\s*@binding\((?P<number>\d+)\)\s*"
    r"var<(?P<space>uniform|storage)(?:\s*,\s*(?P<access>\w+))?>\s*\w+\s*:\s*(?P<type>\w+(?:<[^>;]*>+)?)"
)
_STRUCT = re.compile(r"struct\s+(\w+)\s*\{([^}]*)\}")
_GROUP = re.compile(r"@workgroup_size\(([\d,\s]+)\)")
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_UNTOUCHED, _BEYOND = np.float32(-1.2345e30), 4096  # what check writes behind an output, and how often
_DTYPES = {"f32": np.float32, "i32": np.int32, "u32": np.uint32}

_NAMES: set[str] = set()


class _Layout(NamedTuple):
    """Bindings and size of a shader."""

    dtypes: tuple[Any, ...]  # of the inputs
    fields: tuple[str, ...]  # types of the uniform struct's fields
    invocations: int  # of a workgroup


class ShaderOperator:
    """A custom operator with its own shader. Call it with Tensors or arrays of one device, with its bindings' dtypes.

    Attributes:
        name: Its name.
        parameters: Names of its arguments.
    """

    def __init__(
        self,
        name: str,
        wgsl: str,
        reference: Callable[..., Any],
        backward: Callable[..., Any] | None,
        rules: tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any] | None],
        example: Callable[[np.random.Generator], Sequence[np.ndarray]],
    ) -> None:
        self.name = self.__name__ = name
        self.parameters = tuple(inspect.signature(reference).parameters)
        self._wgsl, self._reference, self._backward, self._example = wgsl, reference, backward, example
        self._output, self._params, self._workgroups = rules
        self._layout = _layout(name, wgsl, len(self.parameters))
        self._function: Function[Any, Tensor] = Function(self._forward, self._described())
        self._function.backward(self._gradients)

    def _described(self) -> Callable[..., Any]:
        """Return a function with the operator's name and parameters, for errors and help()."""

        def described(*operands: Any) -> None: ...

        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        names = ("ctx", *self.parameters)
        described.__signature__ = inspect.Signature([inspect.Parameter(n, kind) for n in names])  # type: ignore[attr-defined]
        described.__name__, described.__doc__ = self.name, self._reference.__doc__
        return described

    def __call__(self, *operands: Any) -> Tensor:
        if len(operands) != len(self.parameters):
            raise WgradError(f"{self.name} takes {', '.join(self.parameters)}, got {len(operands)} arguments")
        found: Tensor = self._function(*operands)
        return found

    @cached_property
    def _file(self) -> str:
        """Path of the shader's file without suffix, which errors and the cache of shaders need."""
        folder, text = cache_folder("shaders"), self._wgsl.encode()
        path = Path(folder, f"{self.name}-{hashlib.sha256(text).hexdigest()[:16]}.wgsl")
        make_private(folder)
        if not path.exists() or path.read_bytes() != text:
            with replacing(path) as file:
                file.write(text)
        return str(path.with_suffix(""))

    # ---- forward and backward --------------------------------------------------------------------
    def _forward(self, ctx: Any, *arrays: Array) -> Array:
        if self._backward is None and any(ctx.needs_grad):
            raise WgradError(f"{self.name} has no gradient: detach its arguments, or register it with backward")
        ctx.save(*arrays)
        return self._run(ctx.device, *arrays)

    def _run(self, device: Any, *arrays: Array) -> Array:
        for parameter, array, dtype in zip(self.parameters, arrays, self._layout.dtypes):
            wide = device.name == "cpu" and dtype == np.float32 and array.dtype == np.float64
            if array.dtype != dtype and not wide:
                wanted = np.dtype(dtype).name
                raise WgradError(f"{self.name}: {parameter} must be {wanted}, as its binding; got {array.dtype}")
        shapes = [tuple(array.shape) for array in arrays]
        shape = tuple(self._output(*shapes))
        if device.name == "cpu":
            found: Array = recorded(partial(self._referenced, shape))(device, *arrays)
            return found
        if device.name != "wgpu":
            raise OperatorMissing(device.name, self.name)
        out: Array = device.empty(shape)
        self._launch(device, arrays, shapes, math.prod(shape), out)
        return out

    def _launch(self, device: Any, arrays: Sequence[Array], shapes: Sequence[Any], size: int, out: Array) -> None:
        """Run the shader. size: elements of the output."""
        params = list(self._params(*shapes))
        _check_params(self.name, params, self._layout.fields)
        groups = device.groups(size, self._layout.invocations)
        if self._workgroups is not None:
            groups = (*self._workgroups(*shapes), 1, 1, 1)[:3]
        work = 4.0 * (size + sum(math.prod(s) for s in shapes))
        device.launch(self._file, [*arrays, out], params, groups, work=work)

    def _referenced(self, shape: tuple[int, ...], *arrays: np.ndarray) -> np.ndarray:
        found: np.ndarray = self._reference(*arrays)
        if tuple(found.shape) != shape:
            raise WgradError(f"{self.name}: output says {list(shape)}, and the reference makes {list(found.shape)}")
        return found

    def _gradients(self, ctx: Any, dy: Array) -> list[Array | None]:
        assert self._backward is not None
        device = ctx.device
        with no_grad():
            found = self._backward(*(Tensor(array, device) for array in (dy, *ctx.saved)))
        found = found if isinstance(found, tuple) else (found,)
        if len(found) != len(self.parameters):
            raise WgradError(f"{self.name}: backward must return {len(self.parameters)} gradients, got {len(found)}")
        gradients = list[Any]()
        for parameter, grad, array in zip(self.parameters, found, ctx.saved):
            if grad is not None and tuple(grad.shape) != tuple(array.shape):
                shapes = f"{list(array.shape)}, got {list(grad.shape)}"
                raise WgradError(f"{self.name}: the gradient of {parameter} must have its shape {shapes}")
            gradients.append(None if grad is None else grad.data)
        return gradients

    # ---- check -----------------------------------------------------------------------------------
    def check(self, device: Device) -> float:
        """Compare the WGSL with the reference in float64, and the gradient with central differences, on a device.

        `cpu` runs the reference, so the WGSL is not checked there.

        Returns:
            The largest relative difference between a gradient and central differences; 0 without a backward.

        Raises:
            WgradError: One of them is wrong.
        """
        case = Case(
            f"shader {self.name}",
            self.name,
            "forward",
            "float32",
            "x".join(map(str, self._example(np.random.default_rng(0))[0].shape)),
            lambda rng: dict(zip(self.parameters, _narrow(self._example(rng), self._layout.dtypes))),
            lambda where, given: {"y": self._run(where, *given.values())},
            2 * BUILTIN_ULPS,
        )
        check_results(self.name, [case], device)
        if device.name == "wgpu" and "arrayLength" not in self._wgsl:  # with it, the size of the memory is a bound
            self._check_bounds(device)
        return 0.0 if self._backward is None else check_gradients(self.name, self._gradient_error, device)

    def _check_bounds(self, device: Any) -> None:
        """Raise WgradError if the shader writes behind its output, which changes other memory on some devices."""
        arrays = _narrow(self._example(np.random.default_rng(0)), self._layout.dtypes)
        shapes = [x.shape for x in arrays]
        size = math.prod(self._output(*shapes))
        out = device.upload(np.full(size + _BEYOND, _UNTOUCHED, np.float32))
        self._launch(device, [device.upload(x) for x in arrays], shapes, size, out)
        written = np.flatnonzero(device.download(out)[size:] != _UNTOUCHED)
        if written.size:
            raise WgradError(
                f"{self.name}: it writes element {size + written[0]} of an output of {size}; return early where an "
                "invocation is beyond the output"
            )

    def _gradient_error(self, device: Any, dtype: Any) -> float:
        rng = np.random.default_rng(0)
        given, dtypes = self._example(rng), self._layout.dtypes
        floats = [np.asarray(x, np.float64) for x, kind in zip(given, dtypes) if kind == np.float32]

        def op(*tensors: Tensor) -> Tensor:
            rest = iter(tensors)
            upload = tensors[0].device.upload
            return self(*(next(rest) if k == np.float32 else upload(x.astype(k)) for x, k in zip(given, dtypes)))

        return gradcheck(op, *floats, rng=rng, device=device, dtype=dtype)


def register_shader(
    name: str,
    *,
    wgsl: str,
    reference: Callable[..., Any],
    example: Callable[[np.random.Generator], Sequence[np.ndarray]],
    backward: Callable[..., Any] | None = None,
    output: Callable[..., Sequence[int]] = lambda *shapes: shapes[0],
    params: Callable[..., Sequence[int | float]] | None = None,
    workgroups: Callable[..., Sequence[int]] | None = None,
) -> ShaderOperator:
    """Register an operator with a whole compute shader.

    The shader's entry point is `main`. In group 0, binding 0 is a uniform struct, bindings 1, 2, ... are the inputs,
    and the last one is the output: storage arrays of f32, i32 or u32, of which the output is f32 and read_write.

    Args:
        name: Unique name of the operator.
        wgsl: The shader.
        reference: The same function in NumPy, for arrays in float32 or float64. Its parameters name the arguments.
        example: Function of a random generator that returns an array for each argument, for `check`. Use sizes that
            are multiples of no block size.
        backward: Function of the output's gradient and the arguments, all Tensors. It returns a tuple with a gradient
            for each argument (None: it has none), and may call other custom operators. None: no gradient.
        output: Function of the arguments' shapes that returns the output's. Default: the first shape.
        params: Function of the shapes that returns the numbers of the uniform struct. Default: the output's size.
        workgroups: Function of the shapes that returns up to three counts. Default: one invocation for each element of
            the output, in workgroups that are folded into two dimensions.

    Returns:
        The operator, a function of Tensors. Its method `check(device)` checks WGSL and gradient.

    Raises:
        WgradError: The name is taken, the bindings are wrong, or the reference does not run.
    """
    functions = {"reference": reference, "example": example, "output": output}
    functions |= {"backward": backward or output, "params": params or output, "workgroups": workgroups or output}
    check_types("register_shader", name, {"wgsl": wgsl}, functions)
    if name in _NAMES or name in OPERATORS or name in FUNCTIONS:
        raise WgradError(f"register_shader: an operator is called {name} already; take another name")
    if not name.isidentifier():
        raise WgradError(f"register_shader: name must be a word; got {name[:100]!r}")

    def size(*shapes: tuple[int, ...]) -> Sequence[int]:
        return (math.prod(output(*shapes)),)

    made = ShaderOperator(name, wgsl, reference, backward, (output, params or size, workgroups), example)
    _try(made)
    _NAMES.add(name)
    return made


def unregister_shader(name: str) -> None:
    """Remove an operator of `register_shader`."""
    if name not in _NAMES:
        raise WgradError(f"unregister_shader: {name} is no operator that was registered")
    _NAMES.discard(name)


def _try(made: ShaderOperator) -> None:
    """Run the reference on the example. WgradError: it fails, or shapes and dtypes are wrong."""
    where = f"register_shader: {made.name}"
    given = made._example(np.random.default_rng(0))
    if len(given) != len(made.parameters) or not all(isinstance(x, np.ndarray) and x.size for x in given):
        raise WgradError(
            f"{where}: example must return {len(made.parameters)} arrays, for {', '.join(made.parameters)}"
        )
    shapes = [x.shape for x in given]
    try:
        shape, params = tuple(made._output(*shapes)), list(made._params(*shapes))
    except Exception as error:
        raise WgradError(f"{where}: output or params fails for the shapes {shapes}: {error}") from error
    _check_params(where, params, made._layout.fields)
    if made._workgroups is not None:
        groups = list(made._workgroups(*shapes))
        if not 1 <= len(groups) <= 3 or not all(isinstance(n, int | np.integer) and n > 0 for n in groups):
            raise WgradError(f"{where}: workgroups must return one to three positive whole numbers, got {groups}")
    for dtype in (np.float32, np.float64):
        arrays = [x.astype(dtype if kind == np.float32 else kind) for x, kind in zip(given, made._layout.dtypes)]
        try:
            y = made._reference(*arrays)
        except Exception as error:
            raise WgradError(f"{where}: the reference fails: {error}") from error
        if getattr(y, "shape", None) != shape or y.dtype != dtype:
            found = f"{getattr(y, 'dtype', type(y).__name__)} {list(getattr(y, 'shape', ()))}"
            raise WgradError(f"{where}: the reference must return {np.dtype(dtype)} {list(shape)}, got {found}")


def _layout(name: str, wgsl: str, inputs: int) -> _Layout:
    """Parse and check the bindings of a shader. WgradError: they are wrong."""
    text = _COMMENT.sub("", wgsl)

    def wrong(rule: str) -> WgradError:
        return WgradError(f"register_shader: {name}: {rule}")

    found = {int(one["number"]): one for one in _BINDING.finditer(text) if one["group"] == "0"}
    groups = _GROUP.findall(text)
    if len(groups) != 1 or not re.search(r"\bfn\s+main\s*\(", text):
        raise wrong("the shader must have one entry point, main, with @workgroup_size in numbers")
    if sorted(found) != list(range(inputs + 2)):
        wanted = f"0 (uniform), 1 to {inputs} (inputs) and {inputs + 1} (output)"
        raise wrong(f"the bindings of group 0 must be {wanted}; got {sorted(found)}")
    structs = dict(_STRUCT.findall(text))
    if found[0]["space"] != "uniform" or found[0]["type"] not in structs:
        raise wrong("binding 0 must be a uniform struct")
    fields = tuple(part.partition(":")[2].strip() for part in structs[found[0]["type"]].split(",") if part.strip())
    if not set(fields) <= set(_DTYPES):
        raise wrong(f"fields of the uniform must be u32, i32 or f32; got {', '.join(fields)}")
    dtypes = list[Any]()
    for number in range(1, inputs + 2):
        one, last = found[number], number == inputs + 1
        element = re.fullmatch(r"array<\s*(\w+)\s*>", one["type"])
        if one["space"] != "storage" or element is None or element[1] not in _DTYPES:
            raise wrong(f"binding {number} must be a storage array of f32, i32 or u32; got {one['type']}")
        if (one["access"] == "read_write") != last or (last and element[1] != "f32"):
            rule = "be the output, read_write and of f32" if last else "be an input, which is only read"
            raise wrong(f"binding {number} must {rule}; got {one['access'] or 'read'} of {element[1]}")
        dtypes.append(_DTYPES[element[1]])
    return _Layout(tuple(dtypes[:-1]), fields, math.prod(int(n) for n in groups[0].split(",") if n.strip()))


def _check_params(where: str, params: Sequence[Any], fields: Sequence[str]) -> None:
    given = [np.asarray(p) for p in params]
    kinds = [
        "f32" if p.dtype.kind == "f" else str(p.dtype) if p.dtype.kind not in "iu" else "i32" if p < 0 else "u32"
        for p in given
    ]
    fit = [kind == field or (kind == "u32" and field == "i32") for kind, field in zip(kinds, fields)]
    if len(kinds) != len(fields) or not all(fit):
        got = ", ".join(kinds) or "none"
        raise WgradError(f"{where}: params must be the uniform's fields ({', '.join(fields)}); got {got}")


def _narrow(arrays: Sequence[np.ndarray], dtypes: Sequence[Any]) -> list[np.ndarray]:
    return [np.asarray(x).astype(kind) for x, kind in zip(arrays, dtypes)]
