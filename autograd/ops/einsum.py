"""Einstein summation as a chain of matmuls."""

from __future__ import annotations

import math

from wgrad.autograd.ops.matmul import matmul
from wgrad.autograd.tensor import Tensor
from wgrad.device.errors import ShapeError


def einsum(equation: str, *operands: Tensor) -> Tensor:
    """Return the sum of products that an equation such as "bqhd,bkhd->bhqk" describes, contracting from the left.

    Args:
        equation: A letter for each axis. Letters that the output lacks are summed over; without "->", the output has
            the letters that occur once, in their alphabetical order. A letter may not be twice in one operand.
        operands: Tensors on one device.

    Returns:
        A Tensor with an axis for each letter of the output, in its order.

    Raises:
        ShapeError: the equation does not fit the operands.
    """
    left, arrow, out = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    letters = "".join(terms)
    if not arrow:
        out = "".join(sorted(c for c in set(letters) if letters.count(c) == 1))
    _check(equation, terms, out, operands)
    made, names = operands[0], terms[0]
    for number, (x, term) in enumerate(zip(operands[1:], terms[1:]), 1):
        needed = set(out).union(*terms[number + 1 :])
        made, names = _pair(made, names, x, term, needed)
    made, names = _summed(made, names, set(out))
    return made.permute(*(names.index(c) for c in out)) if names != out else made


def _check(equation: str, terms: list[str], out: str, operands: tuple[Tensor, ...]) -> None:
    problem = ""
    if len(terms) != len(operands):
        problem = f"it has {len(terms)} operands, got {len(operands)}"
    elif "." in equation:
        problem = "'...' is not supported: name every axis"
    elif any(len(set(term)) < len(term) for term in [*terms, out]):
        problem = "a letter is twice in one operand"
    elif not set(out) <= set("".join(terms)):
        problem = "the output has a letter that no operand has"
    else:
        sizes: dict[str, int] = {}
        for term, x in zip(terms, operands):
            if len(term) != x.ndim:
                problem = f"{term!r} is for {len(term)} axes, got shape {list(x.shape)}"
                break
            for c, n in zip(term, x.shape):
                if sizes.setdefault(c, n) != n:
                    problem = f"{c!r} is {sizes[c]} and {n}"
    if problem:
        raise ShapeError(f"einsum: equation {equation!r} does not fit the operands: {problem}")


def _summed(x: Tensor, names: str, needed: set[str]) -> tuple[Tensor, str]:
    """Sum x over the axes that neither the output nor a later operand has."""
    gone = [axis for axis, c in enumerate(names) if c not in needed]
    return (x.sum(gone) if gone else x), "".join(c for c in names if c in needed)


def _pair(a: Tensor, left: str, b: Tensor, right: str, needed: set[str]) -> tuple[Tensor, str]:
    """Multiply two operands by one batched matmul."""
    a, left = _summed(a, left, needed | set(right))
    b, right = _summed(b, right, needed | set(left))
    batch = [c for c in left if c in right and c in needed]
    inner = [c for c in left if c in right and c not in needed]
    rows, columns = [c for c in left if c not in right], [c for c in right if c not in left]
    size = {**dict(zip(left, a.shape)), **dict(zip(right, b.shape))}

    def laid(x: Tensor, names: str, *groups: list[str]) -> Tensor:
        order = [names.index(c) for group in groups for c in group]
        shape = [*(size[c] for c in batch), *(math.prod(size[c] for c in group) for group in groups[1:])]
        return x.permute(*order).reshape(shape)

    made = matmul(laid(a, left, batch, rows, inner), laid(b, right, batch, inner, columns))
    names = [*batch, *rows, *columns]
    return made.reshape([size[c] for c in names]), "".join(names)
