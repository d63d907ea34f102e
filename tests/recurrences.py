"""Linear recurrences token by token, as their definitions have them, with all gradients: what is true in float64, and
how exact float32 can be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from wgrad.autograd.reference import ReferenceDevice
from wgrad.autograd.selftest import selective_scan

Named = dict[str, np.ndarray]
CASES = [("strong", 1), ("strong", 5), ("mixed", 5), ("none", 1)]  # of decays and documents


@dataclass(frozen=True)
class Recurrence:
    """One of `ssd` and `delta_rule`, of a sequence. groups share B and C (keys and queries), `wide` numbers each;
    heads have `width` numbers of x (values)."""

    op: str
    groups: int = 2
    wide: int = 10
    heads: int = 6
    width: int = 14
    tokens: int = 70
    dtype: Any = np.float32  # of channels

    @property
    def options(self) -> dict[str, int]:
        names = ("groups", "state_dim") if self.op == "ssd" else ("key_heads", "key_dim")
        return dict(zip(names, (self.groups, self.wide)))

    def inputs(self, decays: str, documents: int, seed: int = 0) -> Named:
        """Make inputs, by the operator's names.

        Strong decays are Mamba-2's: some tokens leave exp(-12) of the state, others all but a thousandth of it. mixed:
        heads of both kinds.
        """
        rng, shape = np.random.default_rng(seed), (1, self.tokens, self.heads)
        steps = np.log1p(np.exp(2 * rng.standard_normal(shape))).astype(np.float32)
        rates = np.exp(0.5 * rng.standard_normal(self.heads))
        some = np.arange(self.heads) % 2
        g = -steps * {"strong": rates, "mixed": rates * (some + 1e-3), "none": 0 * rates}[decays]
        starts = np.zeros((1, self.tokens), np.int32)
        for at in rng.choice(np.arange(1, self.tokens), documents - 1, replace=False):
            starts[0, at:] = np.maximum(starts[0, at:], at)
        channels = rng.standard_normal((1, self.tokens, 2 * self.groups * self.wide + self.heads * self.width))
        beta, skip = (rng.random(size).astype(np.float32) for size in (shape, self.heads))
        names = ("xbc", "g", "dt") if self.op == "ssd" else ("qkv", "g", "beta")
        values = (channels.astype(self.dtype), g.astype(np.float32), steps if self.op == "ssd" else beta)
        more = {"skip": skip} if self.op == "ssd" else {}
        return {**dict(zip(names, values)), **more, "doc_start": starts, "cache_len": np.zeros(1, np.int32)}

    def gradient(self) -> np.ndarray:
        """Make the gradient of the output."""
        rng = np.random.default_rng(1)
        return rng.standard_normal((1, self.tokens, self.heads, self.width)).astype(self.dtype)

    def on_device(self, device: Any, given: Named, dy: np.ndarray) -> Named:
        """Compute on a device: y, and the gradients by the inputs' names."""
        arrays = {name: device.upload(value) for name, value in given.items()}
        y, states = getattr(device, self.op)(**arrays, **self.options)
        back = getattr(device, f"{self.op}_backward")(device.upload(dy), **arrays, states=states, **self.options)
        names = [name for name in given if name not in ("doc_start", "cache_len")]
        return {"y": device.download(y), **{name: device.download(array) for name, array in zip(names, back)}}

    def token_by_token(self, given: Named, dy: np.ndarray, dtype: Any) -> Named:
        """Compute by the definition, token by token, in a dtype."""
        values = {name: array.astype(dtype) for name, array in given.items() if array.dtype.kind == "f"}
        begins, skip = given["doc_start"][0] == np.arange(self.tokens), values.pop("skip", None)
        of_sequence = [array[0] for array in (*values.values(), dy.astype(dtype))]
        if skip is None:
            found = self._delta_rule(begins, *of_sequence)
        else:
            found = self._ssd(begins, skip, *of_sequence)
        return {name: value if name == "skip" else value[None] for name, value in found.items()}

    def check(self, device: Any, decays: str, documents: int) -> None:
        """A device is as exact as token by token in float32: four times its error, or four units of float32 where that
        is less."""
        given, dy = self.inputs(decays, documents), self.gradient()
        exact, plain = (self.token_by_token(given, dy, dtype) for dtype in (np.float64, np.float32))
        limits, found = (errors(of, exact, given["g"]) for of in (plain, self.on_device(device, given, dy)))
        floor = 4 * float(np.finfo(np.float32).eps)
        assert {name: error for name, error in found.items() if not error <= max(4 * limits[name], floor)} == {}

    def _split(self, channels: np.ndarray, parts: tuple[bool, bool, bool]) -> list[np.ndarray]:
        """The three parts of each token's channels, by head. parts: whether heads share it."""
        sizes = [self.groups * self.wide if shared else self.heads * self.width for shared in parts]
        split = np.split(channels, np.cumsum(sizes)[:2], axis=1)
        by_head = [x.reshape(self.tokens, self.groups if shared else self.heads, -1) for x, shared in zip(split, parts)]
        return [np.repeat(x, self.heads // x.shape[1], axis=1) for x in by_head]

    def _of_group(self, by_head: np.ndarray) -> np.ndarray:
        """Sum the gradients of what heads share."""
        return np.asarray(by_head.reshape(self.tokens, self.groups, -1, self.wide).sum(axis=2).reshape(self.tokens, -1))

    def _states(
        self, g: np.ndarray, begins: np.ndarray, add: Callable[[int, np.ndarray], np.ndarray]
    ) -> tuple[np.ndarray, np.ndarray]:
        """The state after each token [T, H, wide, width], and before it, decayed."""
        decayed = np.zeros((*g.shape, self.wide, self.width), g.dtype)
        after = np.zeros_like(decayed)
        for t in range(len(g)):
            if t and not begins[t]:
                decayed[t] = np.exp(g[t])[:, None, None] * after[t - 1]
            after[t] = decayed[t] + add(t, decayed[t])
        return after, decayed

    def _ssd(
        self, begins: np.ndarray, skip: np.ndarray, xbc: np.ndarray, g: np.ndarray, dt: np.ndarray, dy: np.ndarray
    ) -> Named:
        x, b, c = self._split(xbc, (False, True, True))
        added = dt[..., None] * x
        after, decayed = self._states(g, begins, lambda t, _: b[t][:, :, None] * added[t][:, None])
        dx, db, dc, dg, ddt = (np.zeros_like(array) for array in (x, b, c, g, dt))
        to_state = np.zeros_like(after[0])
        for t in reversed(range(len(g))):
            to_state = to_state + c[t][:, :, None] * dy[t][:, None]
            dc[t], db[t] = (np.einsum("hkv,hv->hk", *pair) for pair in ((after[t], dy[t]), (to_state, added[t])))
            to_added = np.einsum("hkv,hk->hv", to_state, b[t])
            dx[t], ddt[t] = dt[t][:, None] * to_added + skip[:, None] * dy[t], np.sum(to_added * x[t], axis=-1)
            dg[t] = np.sum(to_state * decayed[t], axis=(1, 2))
            to_state = np.exp(g[t])[:, None, None] * to_state * (not begins[t])
        y = np.einsum("thkv,thk->thv", after, c) + skip[:, None] * x
        dxbc = np.concatenate([dx.reshape(self.tokens, -1), self._of_group(db), self._of_group(dc)], axis=1)
        return {"y": y, "xbc": dxbc, "g": dg, "dt": ddt, "skip": np.sum(dy * x, axis=(0, 2))}

    def _delta_rule(
        self, begins: np.ndarray, qkv: np.ndarray, g: np.ndarray, beta: np.ndarray, dy: np.ndarray
    ) -> Named:
        q, k, v = self._split(qkv, (True, True, False))
        of_q, of_k = (1 / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + g.dtype.type(1e-6)) for x in (q, k))
        scale = g.dtype.type(self.wide**-0.5)
        q, k, wanted = q * of_q, k * of_k, np.zeros_like(v)

        def correct(t: int, state: np.ndarray) -> np.ndarray:
            wanted[t] = v[t] - np.einsum("hkv,hk->hv", state, k[t])
            return np.asarray(k[t][:, :, None] * (beta[t][:, None] * wanted[t])[:, None])

        after, decayed = self._states(g, begins, correct)
        dq, dk, dv, dg, dbeta = (np.zeros_like(array) for array in (q, k, v, g, beta))
        to_state = np.zeros_like(after[0])
        for t in reversed(range(len(g))):
            to_state = to_state + scale * q[t][:, :, None] * dy[t][:, None]
            to_new = np.einsum("hkv,hk->hv", to_state, k[t])
            dv[t], dbeta[t] = beta[t][:, None] * to_new, np.sum(to_new * wanted[t], axis=-1)
            dq[t] = scale * np.einsum("hkv,hv->hk", after[t], dy[t])
            dk[t] = np.einsum("hkv,hv->hk", to_state, beta[t][:, None] * wanted[t])
            dk[t] -= np.einsum("hkv,hv->hk", decayed[t], dv[t])
            to_state = to_state - k[t][:, :, None] * dv[t][:, None]
            dg[t] = np.sum(to_state * decayed[t], axis=(1, 2))
            to_state = np.exp(g[t])[:, None, None] * to_state * (not begins[t])
        y = np.einsum("thkv,thk->thv", after, scale * q)
        raw = [by * (dx - x * np.sum(x * dx, axis=-1, keepdims=True)) for x, dx, by in ((q, dq, of_q), (k, dk, of_k))]
        dqkv = np.concatenate([*map(self._of_group, raw), dv.reshape(self.tokens, -1)], axis=1)
        return {"y": y, "qkv": dqkv, "g": dg, "beta": dbeta}


def errors(found: Named, exact: Named, g: np.ndarray) -> dict[str, float]:
    """Return the relative error of each gradient, and of the gradient of each head's rate, by which g is multiplied.

    The latter is the sum of g's gradient times g, to which strong decays contribute most.
    """
    both = [{name: array.astype(np.float64) for name, array in of.items()} for of in (found, exact)]
    mine, true = (dict(of, rate=np.sum(of["g"] * g, axis=(0, 1))) for of in both)
    return {n: float(np.linalg.norm(mine[n] - true[n])) / max(float(np.linalg.norm(true[n])), 1e-30) for n in true}


def check_scan(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare Mamba-1's forward, and the backward from the states that it kept, with the reference's in float64.

    Of one chunk of tokens with time steps of 1e-6, and of two; channels fill no block, and dy has a dtype of its own.
    New arrays hold NaN.
    """
    empty = device.empty

    def full(*arguments: Any) -> Any:
        array = empty(*arguments)
        if array.dtype == np.float32:
            device.fill(array, np.nan)
        return array

    monkeypatch.setattr(device, "empty", full)
    for tokens in (5, 70):
        case = selective_scan.scan_case("own states", (1, tokens, 37, 12), np.dtype(np.float32), True, documents=2)
        given = {name: array for name, array in case.inputs().items() if name not in ("dy", "states")}
        if tokens == 5:
            given["weight"][:, -2:] = 0, -13  # without skip, all results are as exact as the time steps
        given_dy = case.inputs()["dy"].astype(np.float16)
        found: list[list[np.ndarray]] = []
        for own, dtype in ((device, np.float32), (ReferenceDevice(), np.float64)):
            arrays = {n: own.upload(a.astype(dtype) if a.dtype.kind == "f" else a) for n, a in given.items()}
            y, states = own.selective_scan(**arrays)
            arrays |= {"dy": own.upload(given_dy), "states": states}
            *of_tokens, dweight = own.selective_scan_backward(**arrays)
            found.append([own.download(array) for array in (y, states, dweight, *of_tokens)])
            *others, without = own.selective_scan_backward(**arrays, need_dweight=False)
            assert without is None
            for mine, same in zip(others, found[-1][3:], strict=True):
                np.testing.assert_array_equal(own.download(mine), same)
        for mine, exact in zip(*found, strict=True):
            np.testing.assert_allclose(mine, exact, rtol=1e-4, atol=1e-5 * float(np.abs(exact).max()))
