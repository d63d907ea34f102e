"""Clipping, loss scale and AdamW: several steps compared with the reference, one of them skipped, and in a replay."""

from __future__ import annotations

import numpy as np
import pytest

from wgrad.autograd.ops.optimizer import HYPER_LR, STATE_APPLIED, STATE_SIZE, STATE_SKIPPED
from wgrad.autograd.reference import ReferenceDevice
from wgrad.wgsl.device import WgpuDevice

BETAS = {"beta1": 0.9, "beta2": 0.95}
STEPS = 6


class Training:
    """One optimizer on one device: the buffers by name, and a step."""

    def __init__(self, device, n: int, decay: int) -> None:
        rng = np.random.default_rng(n)
        self.device, self.decay = device, decay
        self.host = {
            "p": rng.standard_normal(n),
            "g": rng.standard_normal(n),
            "exp_avg": np.zeros(n),
            "exp_avg_sq": np.zeros(n),
            "hyper": np.array([1e-2, 1.5, 3, 0]),
            "state": np.zeros(STATE_SIZE),
            "loss_scale": np.array([1024.0]),
        }
        self.arrays = {k: device.upload(v.astype(np.float32)) for k, v in self.host.items()}

    def gradients(self, step: int) -> np.ndarray:
        g = np.random.default_rng(step).standard_normal(self.host["g"].size).astype(np.float32) * 1024
        if step == 2:
            g[3], g[-1] = np.nan, np.inf
        return g

    def update(self) -> None:
        a = self.arrays
        self.device.clip(self.device.grad_norm(a["g"]), a["hyper"], a["state"], a["loss_scale"], **BETAS)
        names = ("p", "g", "exp_avg", "exp_avg_sq", "hyper", "state")
        self.device.adamw(*(a[n] for n in names), **BETAS, eps=1e-8, weight_decay=0.1, decay_elements=self.decay)


@pytest.mark.parametrize(("n", "decay"), [(41, 20), (1024, 1024), (5003, 0), (50_000, 33_001), (70_001, 33_001)])
@pytest.mark.parametrize("narrowed", [False, True], ids=["one binding", "windows"])
def test_steps_follow_the_reference(n, decay, narrowed, wgpu_device, narrow) -> None:
    device = narrow if narrowed else wgpu_device
    mine, wanted = Training(device, n, decay), Training(ReferenceDevice(), n, decay)
    for step in range(STEPS):
        device.write(mine.arrays["g"], mine.gradients(step))
        wanted.arrays["g"][...] = wanted.gradients(step)
        mine.update()
        wanted.update()
        for name, array in wanted.arrays.items():
            # Float32 on both sides: a few roundings a step, of numbers of order one (2^-23 = 1.2e-7).
            np.testing.assert_allclose(device.download(mine.arrays[name]), array, rtol=3e-6, atol=1e-6, err_msg=name)
    state = device.download(mine.arrays["state"])
    assert state[STATE_APPLIED] == STEPS - 1 and state[STATE_SKIPPED] == 1


def test_a_skipped_step_changes_nothing(wgpu_device: WgpuDevice) -> None:
    training = Training(wgpu_device, 1003, 500)
    names = ("p", "exp_avg", "exp_avg_sq")
    before = {n: wgpu_device.download(training.arrays[n]) for n in names}
    wgpu_device.write(training.arrays["g"], training.gradients(2))
    training.update()
    for name in names:
        np.testing.assert_array_equal(wgpu_device.download(training.arrays[name]), before[name])


def test_a_replayed_step_reads_the_new_learning_rate(wgpu_device: WgpuDevice) -> None:
    plain, replayed = Training(wgpu_device, 1003, 500), Training(wgpu_device, 1003, 500)
    with wgpu_device.capture() as replay:
        replayed.update()
    plain.update()
    for step in range(3, 6):
        hyper = plain.host["hyper"].astype(np.float32)
        hyper[HYPER_LR] = 10.0**-step
        for training in (plain, replayed):
            wgpu_device.write(training.arrays["g"], training.gradients(step))
            wgpu_device.write(training.arrays["hyper"], hyper)
        plain.update()
        replay.run()
        for name in plain.arrays:
            a, b = (wgpu_device.download(t.arrays[name]) for t in (plain, replayed))
            np.testing.assert_array_equal(a, b, err_msg=name)
