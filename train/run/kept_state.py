"""The newest training state in main memory, from which a run goes on when its device is lost (recovery.py)."""

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

# A state is copied at most so often, and takes at most one part in so many of the run's time; once the device was lost,
# more often.
_SECONDS, _PARTS = 10.0, 100.0
_PARTS_AFTER_LOSS = 10.0
_OF_FILES = ("step", "files")  # of trainer.json, what is not said of the state
_SHARE = 16  # a state that is larger than this part of main memory is not kept


Save = Callable[[int, dict[str, np.ndarray], Mapping[str, Any]], Path]


@dataclass
class _Copy:
    """A state on its way to the host."""

    step: int
    arrays: StateReadback
    info: Mapping[str, Any]


class KeptState:
    """state: the newest, None where there is none yet. It is from behind a step whose record is written.

    info: makes what trainer.json says of a state. lost: the device of this run was lost before. reopens: it can be
    opened again, or may be that of another rank.
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
        """Return whether it is time for another one."""
        return self.enabled and self._copy is None and self._clock() >= self._next

    def begin(self, step: int) -> None:
        """Start to copy the state behind a step."""
        begun = self._clock()
        self._copy = _Copy(step, self._optimizer.state_readback(), dict(self._info()))
        self._pause(begun)

    def look(self, written: int) -> None:
        """Keep the state that was begun, if it has arrived and the records up to its step are written."""
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
        """A checkpoint holds the same: there is nothing to copy."""
        if self.enabled:
            self._copy = None
            self.state = made_state(step, arrays, info, path)
            self._next = self._clock() + self._least

    def in_checkpoint(
        self, save: Callable[[int, dict[str, np.ndarray], Mapping[str, Any]], Path]
    ) -> TrainingState | None:
        """Return `state`, which is then in a checkpoint, too. save: makes one."""
        state = self.state
        if state is None or state.path != Path():
            return state
        info = {name: value for name, value in msgspec.to_builtins(state.info).items() if name not in _OF_FILES}
        return replace(state, path=save(state.step, state.arrays, info))

    def _pause(self, begun: float) -> None:
        now = self._clock()
        self._next = now + max(self._least, self._parts * (now - begun))


def made_state(step: int, arrays: dict[str, np.ndarray], info: Mapping[str, Any], path: Path = Path()) -> TrainingState:
    """Return a state as if it were read. path: of the checkpoint that holds it, if any."""
    whole = _plain({**info, "step": step, "files": {}})
    return TrainingState(path, step, arrays, msgspec.convert(whole, CheckpointInfo))


def _plain(value: Any) -> Any:
    """The same with Python's numbers for NumPy's, which an objective or a metric of the user's may have given."""
    if isinstance(value, Mapping):
        return {name: _plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return value.item() if isinstance(value, np.generic) else value
