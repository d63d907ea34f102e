"""Outputs of a run: terminal and OUT for the first rank, and logs in OUT/ranks for the others.

If the first rank is lost, the next one takes over the folder's lock, the metrics and the terminal.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from rich.console import Console

from wgrad.device.files import make_folder, own_file, writing
from wgrad.device.shown import counted
from wgrad.train.options.finetune_config import CONFIG_FILE, FinetuneConfig
from wgrad.train.output.callbacks import Callback, StepReport
from wgrad.train.output.metrics import RecordsFile
from wgrad.train.output.out_folder import OutFolder
from wgrad.train.output.reports import Reports
from wgrad.train.ranks.world import Member, World
from wgrad.train.terminal.output import make_console, say
from wgrad.train.terminal.progress import Display

LOGS = "ranks"


class RunOutputs:
    """Context manager for the outputs of a run.

    Attributes:
        folder: Output folder, which the first rank locks with `open`.
        display: Terminal output of the first rank; log of the others.
        records: Files and reports that the next rank takes over if the first is lost.
    """

    def __init__(self, out: str, world: World, silent: bool = False) -> None:
        self.world, self.folder, self._silent = world, OutFolder(out), silent
        self.records: list[RecordsFile | Reports] = []
        self._held = ExitStack()
        self._display: Display | None = None

    def open(self) -> None:
        """Lock the folder. WgradError: another run holds it, or it is not writable."""
        self._held.enter_context(self.folder)

    def say(self, text: str) -> None:
        """Print a line for people before there is a display."""
        if not self._silent:
            say(text)

    @property
    def display(self) -> Display:
        if self._display is None:
            # mpirun gives each rank a terminal, whatever its own output is.
            console = make_console(terminal=None if self.world.alone else False, silent=self._silent)
            self._display = Display(console if self.world.is_main_process else self._log())
        return self._display

    def _log(self) -> Console:
        """Open OUT/ranks/rank-N.log, to which each start appends."""
        path = make_folder(Path(self.folder.path) / LOGS) / f"rank-{self.world.me.number}.log"
        with writing(path):
            file = self._held.enter_context(open(path, "a", encoding="utf-8", buffering=1, opener=own_file))
        return Console(file=file, highlight=False)

    def after_loss(self, lost: list[Member], promoted: bool) -> None:
        """Report lost ranks. promoted: whether this rank now is the first one and takes over its outputs."""
        if promoted:
            self.open()
            for file in self.records:
                file.take_over()
            self.display.console = make_console(terminal=False, silent=self._silent)
        names, left = ", ".join(map(str, lost)), self.world.size
        self.display.say(f"lost {names}: going on with {counted(left, 'rank')} from the last step that all did")

    def __enter__(self) -> RunOutputs:
        self.world.on_loss = self.after_loss
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._held.close()


class KeptOut(Callback):
    """Restores files of OUT that somebody removes during a run, as far as they are in memory, and reports that.

    It checks after each step, and on request. say: prints a line; lines wait until due files are saved.
    """

    def __init__(self, outputs: RunOutputs, config: FinetuneConfig, say: Callable[[str], None]) -> None:
        self._outputs, self._config, self._say = outputs, config, say
        self._news: list[str] = []

    def on_step(self, report: StepReport) -> None:
        self.tell()
        self.check()

    def check(self) -> bool:
        """Restore missing files and return whether there were any. WgradError: the folder cannot be restored."""
        if not self._outputs.world.is_main_process:
            return False
        out = Path(self._config.out)
        folder = self._outputs.folder.keep()
        lost = [f.path.name for f in self._outputs.records if isinstance(f, RecordsFile) and f.keep()]
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
        """Print the lines that were held back."""
        while self._news:
            self._say(self._news.pop(0))
