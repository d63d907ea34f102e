"""Self-test cases of the optimizer step."""

from __future__ import annotations

import numpy as np

from wgrad.autograd.ops.optimizer import HYPER_SIZE, STATE_BIAS1, STATE_BIAS2, STATE_SIZE
from wgrad.autograd.selftest.case import F32, Case, Inputs, Outputs, normal
from wgrad.device.contract import Array, Device

BETAS = {"beta1": 0.9, "beta2": 0.999}


def _hyper(lr: float, max_norm: float, interval: float) -> np.ndarray:
    hyper = np.zeros(HYPER_SIZE, np.float32)
    hyper[:3] = lr, max_norm, interval
    return hyper


def _state(applied: int, good: int) -> np.ndarray:
    state = np.zeros(STATE_SIZE, np.float32)
    state[:2] = applied, good
    state[STATE_BIAS1], state[STATE_BIAS2] = 1 - BETAS["beta1"] ** applied, 1 - BETAS["beta2"] ** applied
    return state


def _clip(variant: str, norm: tuple[float, float], hyper: np.ndarray, state: np.ndarray, loss_scale: float) -> Case:
    def build(rng: np.random.Generator) -> Inputs:
        scale = np.array([loss_scale], np.float32)
        return {"norm": np.array(norm, np.float32), "hyper": hyper, "state": state.copy(), "loss_scale": scale}

    def call(device: Device, x: Inputs) -> Outputs:
        device.clip(x["norm"], x["hyper"], x["state"], x["loss_scale"], **BETAS)
        return {"loss_scale": x["loss_scale"], "state": x["state"]}

    return Case(f"clip/{variant}", "clip", "forward", "float32", "8", build, call, finish="elements")


def _adamw(variant: str, n: int, apply: float, decay: int) -> Case:
    def build(rng: np.random.Generator) -> Inputs:
        state = _state(3, 3)
        state[2:4] = apply, 0.37
        return {
            "p": normal(rng, (n,)),
            "g": normal(rng, (n,)),
            "exp_avg": normal(rng, (n,), scale=0.1),
            "exp_avg_sq": np.abs(normal(rng, (n,), scale=0.1)),
            "hyper": _hyper(0.01, 1.0, 0.0),
            "state": state,
        }

    def call(device: Device, x: Inputs) -> Outputs:
        names = ("p", "g", "exp_avg", "exp_avg_sq", "hyper", "state")
        before = device.empty((n,), x["p"].dtype)
        device.copy(x["p"], before)
        device.adamw(*(x[n] for n in names), **BETAS, eps=1e-8, weight_decay=0.1, decay_elements=decay)
        outputs: dict[str, Array] = {name: x[name] for name in ("p", "exp_avg", "exp_avg_sq")}
        return {**outputs, "before": before}

    return Case(f"adamw/{variant}/{n}", "adamw", "forward", "float32", str(n), build, call, finish="step")


def _grad_norm(variant: str, n: int, bad: tuple[float, ...]) -> Case:
    def build(rng: np.random.Generator) -> Inputs:
        g = normal(rng, (n,))
        g[3 : 3 + len(bad)] = bad
        return {"g": g}

    def call(device: Device, x: Inputs) -> Outputs:
        return {"norm": device.grad_norm(x["g"])}

    return Case(f"grad_norm/{variant}/{n}", "grad_norm", "forward", "float32", str(n), build, call, finish="elements")


def cases(dtype: np.dtype) -> list[Case]:
    if dtype != F32:
        return []
    return [
        _grad_norm("finite", 1003, ()),
        _grad_norm("finite", 70001, ()),
        _grad_norm("not finite", 1003, (np.inf, np.nan, -np.inf)),
        _clip("no clipping", (5.0, 0.0), _hyper(0.01, 0.0, 0.0), _state(0, 0), 1.0),
        _clip("clipped", (123.0, 0.0), _hyper(0.01, 1.0, 0.0), _state(6, 6), 1.0),
        _clip("below max_norm", (0.3, 0.0), _hyper(0.01, 1.0, 0.0), _state(1, 1), 1.0),
        _clip("loss scale", (4.1e8, 0.0), _hyper(0.01, 1.0, 100.0), _state(6, 6), 1024.0),
        _clip("scale grows", (4.1e8, 0.0), _hyper(0.01, 1.0, 7.0), _state(41, 6), 1024.0),
        _clip("scale at its top", (4.1e8, 0.0), _hyper(0.01, 1.0, 7.0), _state(41, 6), 65536.0),
        _clip("skipped", (4.1e8, 2.0), _hyper(0.01, 1.0, 7.0), _state(6, 5), 1024.0),
        _clip("skipped, fixed scale", (4.1, 1.0), _hyper(0.01, 1.0, 0.0), _state(6, 5), 8.0),
        _clip("skipped at scale 1", (4.1, 1.0), _hyper(0.01, 1.0, 7.0), _state(6, 5), 1.0),
        _adamw("applied", 1003, 1.0, 700),
        _adamw("all decayed", 130, 1.0, 130),
        _adamw("none decayed", 130, 1.0, 0),
        _adamw("skipped", 1003, 0.0, 700),
    ]
