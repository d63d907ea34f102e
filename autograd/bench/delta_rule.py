"""Bench entries of linear attention and its short convolution."""

from __future__ import annotations

from typing import Any

import numpy as np

from wgrad.autograd.bench.entry import F32, Entry, Sizes, entry, normal
from wgrad.device.contract import SCAN_CHUNK, Device, delta_segment


def entries(sizes: Sizes, t: np.dtype) -> list[Entry]:
    """Return the entries, with attention's heads: query heads as heads of values, key heads as shared keys."""
    tokens, (_, _, h, g, d) = sizes.tokens, sizes.attention[-1]
    channels, width = (2 * g + h) * d, 4

    def documents(device: Device) -> dict[str, Any]:
        return {"doc_start": device.zeros((1, tokens), np.int32), "cache_len": device.zeros((1,), np.int32)}

    def conv(device: Device) -> dict[str, Any]:
        x, weight = normal(device, (1, tokens, channels), t), normal(device, (channels, width), F32, 1)
        return {"x": x, "weight": weight, **documents(device)}

    def conv_back(device: Device) -> dict[str, Any]:
        return {"dy": normal(device, (1, tokens, channels), t, 2), **conv(device)}

    def rule(device: Device) -> dict[str, Any]:
        gates = np.random.default_rng(3).random((2, 1, tokens, h)).astype(np.float32)
        g_and_beta = {"g": device.upload(-0.1 * gates[0]), "beta": device.upload(gates[1])}
        qkv = normal(device, (1, tokens, channels), t)
        return {"qkv": qkv, **g_and_beta, **documents(device), "key_heads": g, "key_dim": d}

    def rule_back(device: Device) -> dict[str, Any]:
        given = rule(device)
        states = device.zeros((-(-tokens // delta_segment(h)), 1, h, d, d))
        heads = {name: given.pop(name) for name in ("key_heads", "key_dim")}
        return {"dy": normal(device, (1, tokens, h, d), t, 4), **given, "states": states, **heads}

    def ssd(device: Device) -> dict[str, Any]:
        """Return arguments of `ssd` whose state is half as wide as a head."""
        gates = np.random.default_rng(3).random((2, 1, tokens, h)).astype(np.float32)
        given = {
            "g": device.upload(-0.1 * gates[0]),
            "dt": device.upload(gates[1]),
            "skip": normal(device, (h,), F32, 2),
        }
        xbc = normal(device, (1, tokens, (h + g) * d), t)
        return {"xbc": xbc, **given, **documents(device), "groups": g, "state_dim": d // 2}

    def ssd_back(device: Device) -> dict[str, Any]:
        given = ssd(device)
        states = device.zeros((-(-tokens // delta_segment(h)), 1, h, d // 2, d))
        options = {name: given.pop(name) for name in ("groups", "state_dim")}
        return {"dy": normal(device, (1, tokens, h, d), t, 4), **given, "states": states, **options}

    inner, states = h * d, 16  # Mamba-1's channels are those of all heads

    def scan(device: Device) -> dict[str, Any]:
        x, dt, bc = (normal(device, (1, tokens, width), t, n) for n, width in enumerate((inner, inner, 2 * states)))
        weight = normal(device, (inner, states + 2), F32, 3)
        return {"x": x, "dt": dt, "bc": bc, "weight": weight, **documents(device)}

    def scan_back(device: Device) -> dict[str, Any]:
        before = device.zeros((-(-tokens // SCAN_CHUNK), 1, inner, states))
        return {"dy": normal(device, (1, tokens, inner), t, 4), **scan(device), "states": before}

    shapes = {
        "short_conv": (tokens, channels, width),
        "delta_rule": (tokens, h, g, d),
        "ssd": (tokens, h, g, d // 2, d),
        "selective_scan": (tokens, inner, states),
    }
    return [
        entry("short_conv", shapes["short_conv"], t, conv),
        entry("short_conv_backward", shapes["short_conv"], t, conv_back),
        entry("delta_rule", shapes["delta_rule"], t, rule),
        entry("delta_rule_backward", shapes["delta_rule"], t, rule_back),
        entry("ssd", shapes["ssd"], t, ssd),
        entry("ssd_backward", shapes["ssd"], t, ssd_back),
        entry("selective_scan", shapes["selective_scan"], t, scan),
        entry("selective_scan_backward", shapes["selective_scan"], t, scan_back),
    ]
