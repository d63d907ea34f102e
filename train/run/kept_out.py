"""OUT while a run goes on: what somebody removes of it is written again, as far as memory has it, and reported."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from wgrad.train.options.finetune_config import CONFIG_FILE, FinetuneConfig
from wgrad.train.run.callbacks import Callback, StepReport
from wgrad.train.run.metrics import RecordsFile
from wgrad.train.run.outlets import RunOutputs


class KeptOut(Callback):
    """Looks after each step, and when asked to. say: prints a line, which waits until what is due is saved."""

    def __init__(self, outlets: RunOutputs, config: FinetuneConfig, say: Callable[[str], None]) -> None:
        self._outlets, self._config, self._say = outlets, config, say
        self._news: list[str] = []

    def on_step(self, report: StepReport) -> None:
        self.tell()
        self.check()

    def check(self) -> bool:
        """-> whether anything was missing. WgradError where the folder cannot be had again."""
        if not self._outlets.world.is_main_process:
            return False
        out = Path(self._config.out)
        folder = self._outlets.folder.keep()
        lost = [f.path.name for f in self._outlets.records if isinstance(f, RecordsFile) and f.keep()]
        if not (out / CONFIG_FILE).exists():
            self._config.save(self._config.out)
            lost.append(CONFIG_FILE)
        if folder and lost:
            self._news.append(
                f"note: {out} was removed or moved during the run: it is written again, but checkpoints and other "
                "files from before are not in it"
            )
        elif lost:
            self._news.append(f"note: {out} has lost {', '.join(sorted(lost))} during the run: written again")
        return folder or bool(lost)

    def tell(self) -> None:
        """Print what was noticed."""
        while self._news:
            self._say(self._news.pop(0))
