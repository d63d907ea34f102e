"""`wgrad warm`: compile the shaders of a run in advance, for drivers that cache them."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from wgrad.autograd.select_device import select_device
from wgrad.device.errors import WgradError
from wgrad.train.model.load_config import load_model_config
from wgrad.train.model.model_files import open_files
from wgrad.train.options.finetune_config import RunOptions
from wgrad.train.options.option_text import size
from wgrad.train.plan.lengths import PROMPT_TOKENS, within_positions
from wgrad.train.plan.plan import training_needs
from wgrad.train.plan.settle import plan_as_run
from wgrad.train.step.compute import choose_compute, round_products
from wgrad.train.step.find_model import find_model
from wgrad.train.step.memory import hold_to_limit
from wgrad.train.terminal.progress import Display, duration


def run_warm(config: RunOptions) -> int:
    """Compile the shaders of a run with these options, and print where the driver caches them.

    Nothing is trained, and no weights are read or downloaded.

    Returns:
        The exit status.

    Raises:
        WgradError: Model or device is missing.
    """
    if not config.model:
        raise WgradError("--model is required: give the model of the run")
    display = Display()
    device = select_device(config.device, training_needs(config))
    display.say(f"device: {device.description} ({device.reason})")
    hold_to_limit(device, config.limit)
    compute = choose_compute(config.compute, device)
    for line in [*compute.lines, *round_products(config, device)]:
        display.say(line)
    config = replace(config, compute=compute.dtype)
    folders = device.kernel_caches()
    with TemporaryDirectory(prefix="wgrad-warm-") as scratch:
        folder = find_model(config.model, scratch=Path(scratch))
        _, model_config, _ = open_files(folder, load_model_config(folder))
        before, begun = _contents(folders), time.monotonic()
        with display.phase("compiling", unit="shaders") as phase:
            config, _ = within_positions(config, model_config)
            plan = plan_as_run(config, model_config, folder, device, PROMPT_TOKENS)
            count = device.prepare(plan.dry, phase.update) if plan is not None else 0
    if not count:
        display.say("nothing to do: this device has nothing to compile")
        return 0
    display.say(f"shaders: {count} compiled in {duration(time.monotonic() - begun)}")
    display.say(_kept(folders, before, _contents(folders)))
    return 0


def _contents(folders: list[Path]) -> dict[Path, dict[str, int]]:
    """Return the bytes of each file in the folders that exist."""
    found: dict[Path, dict[str, int]] = {}
    for folder in folders:
        files = {}
        for path in folder.rglob("*"):
            try:
                if path.is_file():
                    files[str(path)] = path.stat().st_size
            except OSError:  # another process has just removed it
                continue
        if files:
            found[folder] = files
    return found


def _kept(folders: list[Path], before: dict[Path, dict[str, int]], after: dict[Path, dict[str, int]]) -> str:
    """Describe the change of the driver's cache, as its folders show it."""
    for folder, files in after.items():
        old = before.get(folder, {})
        if files != old:
            added = sum(files.values()) - sum(old.values())
            return (
                f"cache: the driver keeps them in {folder} ({size(max(added, 0))} more): the next run begins with them"
            )
    if after:
        where = " or ".join(str(folder) for folder in after)
        return f"cache: nothing was added to {where}: it has them already, or this driver does not use it"
    looked = ", ".join(str(folder) for folder in folders) or "none is known for this system"
    return f"cache: no folder of a driver's cache was found ({looked}): the next run may have to compile them again"
