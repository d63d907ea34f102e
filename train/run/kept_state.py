"""The newest training state in main memory, from which a run continues when its device is lost (recovery.py)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from wgrad.device.main_memory import main_memory
from wgrad.train.output.checkpoints import CheckpointInfo, TrainingState
from wgrad.train.step.optim import AdamW, StateReadback

# A state is copied at most every _SECONDS seconds, and takes at most 1 / _PARTS of the run's time; more often once the
# device was lost.
_SECONDS, _PARTS = 10.0, 100.0
_PARTS_AFTER_LOSS = 10.0
_OF_FILES = ("step", "files")  # keys of trainer.json that describe the checkpoint, not the state
_SHARE = 16  # a state larger than 1 / _SHARE of main memory is not kept

Save = Callable[[int, dict[str, np.ndarray], Mapping[str, Any]], Path]


@dataclass
class _Copy:
    """A state that is being copied to the host."""

    step: int
    arrays: StateReadback
    info: Mapping[str, Any]


class KeptState:
    """Keeps the newest state whose step is in metrics.jsonl (`state`; None: none yet).

    Args:
        optimizer: Holds the parameters and moments.
        info: Returns the contents of trainer.json for the current state.
        clock: Returns seconds.
        lost: Whether the device of this run was lost before.
        reopens: Whether the run can continue after a loss: its device can be reopened, or another rank's was lost.
    """

    def __init__(
        self,
        optimizer: AdamW,
        info: Callable[[], Mapping[str, Any]],
        clock: Callable[[], float],
        lost: bool,
        reopens: bool,
    ) -> None:
        self.state: TrainingState | None = None
        self._optimizer, self._info, self._clock = optimizer, info, clock
        self._least, self._parts = (0.0, _PARTS_AFTER_LOSS) if lost else (_SECONDS, _PARTS)
        memory = main_memory()
        fits = memory is None or optimizer.state_bytes <= memory // _SHARE
        self.enabled = reopens and fits
        self._next = clock() + self._least
        self._copy: _Copy | None = None

    @property
    def due(self) -> bool:
        """Return whether it is time to copy another state."""
        return self.enabled and self._copy is None and self._clock() >= self._next

    def begin(self, step: int) -> None:
        """Start to copy the state after a step."""
        begun = self._clock()
        self._copy = _Copy(step, self._optimizer.state_readback(), dict(self._info()))
        self._pause(begun)

    def look(self, written: int) -> None:
        """Keep the state being copied, if it has arrived and the records up to its step are written."""
        copy = self._copy
        if copy is None or copy.step > written or not copy.arrays.ready():
            return
        begun = self._clock()
        self._copy = None
        arrays = copy.arrays.result()
        if np.isfinite(arrays["parameters"]).all():
            self.state = made_state(copy.step, arrays, copy.info)
        self._pause(begun)

    def saved(self, path: Path, step: int, arrays: dict[str, np.ndarray], info: Mapping[str, Any]) -> None:
        """Take the state of a checkpoint that was just saved, instead of copying one."""
        if self.enabled:
            self._copy = None
            self.state = made_state(step, arrays, info, path)
            self._next = self._clock() + self._least

    def in_checkpoint(self, save: Save) -> TrainingState | None:
        """Return `state`, after saving it with `save` unless a checkpoint holds it already."""
        state = self.state
        if state is None or state.path != Path():
            return state
        info = {name: value for name, value in msgspec.to_builtins(state.info).items() if name not in _OF_FILES}
        return replace(state, path=save(state.step, state.arrays, info))

    def _pause(self, begun: float) -> None:
        now = self._clock()
        self._next = now + max(self._least, self._parts * (now - begun))


def made_state(step: int, arrays: dict[str, np.ndarray], info: Mapping[str, Any], path: Path = Path()) -> TrainingState:
    """Return a state as reading its checkpoint would. path: the checkpoint's folder, if it has one."""
    whole = _plain({**info, "step": step, "files": {}})
    return TrainingState(path, step, arrays, msgspec.convert(whole, CheckpointInfo))


def _plain(value: Any) -> Any:
    """Replace NumPy scalars, which objectives and custom metrics may return, by Python numbers."""
    if isinstance(value, Mapping):
        return {name: _plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return value.item() if isinstance(value, np.generic) else value
