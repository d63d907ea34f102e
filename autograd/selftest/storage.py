"""Self-test cases of storage: views, copies, fills and recordings."""

from __future__ import annotations

import numpy as np

from wgrad.autograd.selftest.case import Case, Inputs, Outputs, dtype_name, normal
from wgrad.device.contract import Device


def cases(t: np.dtype) -> list[Case]:
    def build(rng: np.random.Generator) -> Inputs:
        return {"x": normal(rng, (5, 64), t), "y": normal(rng, (3, 64), t)}

    def view(device: Device, x: Inputs) -> Outputs:
        tail = device.view(x["x"], (3, 64), 128)
        device.copy(x["y"], tail)
        return {"whole": x["x"], "sum": device.add(tail, tail), "reshaped": device.view(x["x"], (64, 5))}

    def fill(device: Device, x: Inputs) -> Outputs:
        device.fill(device.view(x["x"], (64,), 64), 0.375)
        odd = device.zeros((3, 7), t)
        device.fill(odd, -2.5)
        return {"x": x["x"], "odd": odd, "zeros": device.zeros((3, 41), t)}

    def replay(device: Device, x: Inputs) -> Outputs:
        total = device.zeros((3, 64), t)
        with device.capture() as recorded:
            twice = device.scale(x["y"], 2.0)
            device.add(total, device.mul(twice, x["y"]), out=total)
        device.write(x["y"], np.linspace(-2, 3, 192).astype(np.float32).astype(x["y"].dtype).reshape(3, 64))
        recorded.run()
        recorded.run()
        return {"twice": twice, "total": total}

    name = dtype_name(t)
    calls = (("view and copy", view), ("fill and zeros", fill), ("capture", replay))
    return [Case(f"storage/{variant}/{name}", "storage", "forward", name, "5x64", build, f) for variant, f in calls]
