"""Element-wise operators: copy, add, mul, scale, cast, bias, mask. Shaders: elementwise*.wgsl."""

from __future__ import annotations

from typing import Any

from wgrad.device.memory import Array
from wgrad.wgsl.elements import Elements, compute_type, same_block, same_place, vector_width, wgsl_type
from wgrad.wgsl.formats import KINDS
from wgrad.wgsl.runtime.compile import Constant

_PER_GROUP = 1024  # elements of a workgroup: 256 invocations, 4 each


class ElementwiseOps(Elements):
    def copy(self, src: Array, out: Array) -> None:
        """out = src; same size and dtype, any dtype."""
        if same_place(src, out):
            return
        if same_block(src, out):  # cannot be bound for reading and writing at once
            middle = self.empty(src.shape, src.dtype)
            self.copy(src, middle)
            src = middle
        for _, (a, b) in self.flat_parts([src, out]):
            words, tail = -(-a.nbytes // 4), a.nbytes % 4
            vec = vector_width(words) if tail == 0 else 1
            params = [words // vec, (1 << 8 * tail) - 1]
            constants: dict[str, Constant] = {"W_T": "vec4<u32>" if vec == 4 else "u32"}
            self.launch(
                "elementwise_copy",
                [a, b],
                params,
                self.groups(words // vec, _PER_GROUP),
                constants,
                work=2.0 * a.nbytes,
            )

    def _elementwise(
        self, entry: str, a: Array | None, b: Array | None, y: Array, alpha: float = 0.0, *, whole_b: bool = False
    ) -> Array:
        """One entry point of elementwise.wgsl; `whole_b`: b is not of y's size and is bound whole."""
        given = [x for x in (a, None if whole_b else b, y) if x is not None]
        vec = vector_width(y.size)
        for _, parts in self.flat_parts(given):
            pieces = iter(parts)
            part_a = next(pieces) if a is not None else None
            part_b = b if whole_b or b is None else next(pieces)
            out = next(pieces)
            b_type = wgsl_type(b.dtype, 1 if whole_b else vec) if b is not None else compute_type(vec)
            constants: dict[str, Constant] = {
                "C_T": compute_type(vec),
                "A_T": wgsl_type(y.dtype if a is None else a.dtype, vec),
                "B_T": b_type,
                "Y_T": wgsl_type(y.dtype, vec),
            }
            n = out.size // vec
            work = float(sum(part.nbytes for part in parts))
            params = [n, 1, float(alpha)]
            groups = self.groups(n, _PER_GROUP)
            self.launch("elementwise", [part_a, part_b, out], params, groups, constants, entry=entry, work=work)
        return y

    def add(self, a: Array, b: Array, *, out: Array | None = None) -> Array:
        """a + b, same shape; out may be a or b."""
        if out is None:
            return self._elementwise("add", a, b, self.empty(a.shape, a.dtype))
        for mine, other in ((a, b), (b, a)):
            if same_place(mine, out) and not same_block(other, out):
                return self._elementwise("add_to", None, other, out)
        if same_block(a, out) or same_block(b, out):
            self.copy(self._elementwise("add", a, b, self.empty(out.shape, out.dtype)), out)
            return out
        return self._elementwise("add", a, b, out)

    def mul(self, a: Array, b: Array) -> Array:
        return self._elementwise("mul", a, b, self.empty(a.shape, a.dtype))

    def scale(self, x: Array, alpha: float) -> Array:
        return self._elementwise("scale", x, None, self.empty(x.shape, x.dtype), alpha)

    def scale_by(self, x: Array, factor: Array) -> Array:
        """x * factor[0], factor float32 [1] on the device."""
        return self._elementwise("scale_by", x, factor, self.empty(x.shape, x.dtype), whole_b=True)

    def mask(self, x: Array, keep: Array, value: float) -> Array:
        """x where keep (uint32, same shape) is non-zero, else value."""
        return self._elementwise("mask", x, keep, self.empty(x.shape, x.dtype), value)

    def cast(self, x: Array, dtype: Any) -> Array:
        """float32, float16 or bfloat16 -> float32 or float16 (a copy where the dtype stays)."""
        y = self.empty(x.shape, dtype)
        if x.dtype.name == "bfloat16":
            return self._widen(x, y)
        return self._elementwise("convert", x, None, y)

    def _widen(self, x: Array, y: Array) -> Array:
        vec = vector_width(x.size)
        constants: dict[str, Constant] = {
            "VEC4": vec == 4,
            "KIND": KINDS[x.dtype.name],
            "Y_T": wgsl_type(y.dtype, vec),
        }
        for _, (a, b) in self.flat_parts([x, y]):
            n = a.size // vec
            self.launch(
                "elementwise_widen", [a, b], [n], self.groups(n, _PER_GROUP), constants, work=float(a.nbytes + b.nbytes)
            )
        return y

    def bias(self, x: Array, b: Array) -> Array:
        """x [R, C] + b [C]."""
        y = self.empty(x.shape, x.dtype)
        vec = vector_width(b.size)
        constants: dict[str, Constant] = {
            "C_T": compute_type(vec),
            "A_T": wgsl_type(x.dtype, vec),
            "B_T": wgsl_type(b.dtype, vec),
            "Y_T": wgsl_type(y.dtype, vec),
        }
        rows = (x.size // b.size, b.size)
        for _, count, (part, out) in self.row_parts([self.view(x, rows), self.view(y, rows)]):
            n = count * b.size // vec
            params = [n, b.size // vec, 0.0]
            groups = self.groups(n, _PER_GROUP)
            self.launch("elementwise", [part, b, out], params, groups, constants, entry="bias", work=2.0 * y.nbytes)
        return y
