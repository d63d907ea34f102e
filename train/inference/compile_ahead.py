"""Before weights are read for inference: its shaders compiled and its operators checked, and whether weights are
streamed, by a dry run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from wgrad.device.contract import Device
from wgrad.device.errors import OutOfMemory
from wgrad.train.step.checked import check_operators
from wgrad.train.step.memory import limit_bytes
from wgrad.train.terminal.progress import Display


def compile_ahead(
    device: Device,
    stream_weights: str,
    memory_limit: str | None,
    run: Callable[[Any, str], object],
    display: Display,
) -> str:
    """-> --stream-weights, "auto" settled: "on" where it does not fit otherwise. OutOfMemory: nor within the limit.

    run: does on a dry device, with --stream-weights on or off, what launches every kernel that will be needed.
    """
    auto, limit = stream_weights == "auto", limit_bytes(memory_limit)
    stream = "off" if auto else stream_weights
    room = limit or (device.facts.get("memory_bytes") if auto else None)

    def run_dry(stream: str, room: int | None) -> Any:
        dry = device.dry_run()
        if dry is not None:
            dry.limit_memory(room)
            run(dry, stream)
        return dry

    while True:
        with display.phase("compiling", unit="shaders") as phase:
            try:
                dry = run_dry(stream, room)
            except OutOfMemory:
                if auto and not device.shared_memory:
                    stream = "on"
                dry = run_dry(stream, limit)
            if dry is not None:
                device.prepare(dry, phase.update)
        if not check_operators(device, dry, display):
            return stream
