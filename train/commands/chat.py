"""`wgrad chat`: a conversation in the terminal, with a model, with an adapter on it, or with both side by side."""

from __future__ import annotations

import gc
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from types import FrameType

from wgrad.device.errors import DeviceLost, UnusableResult, WgradError
from wgrad.device.lost import lost_in
from wgrad.train.commands.chat_thoughts import Thoughts
from wgrad.train.data.chat import Message
from wgrad.train.inference.generation import Decoder
from wgrad.train.inference.guided import text_ids
from wgrad.train.inference.open_model import Opened, context_of, open_model
from wgrad.train.inference.text_models import build_text_models
from wgrad.train.model.model import Model
from wgrad.train.options.chat_config import ChatConfig
from wgrad.train.options.generate_config import GREEDY
from wgrad.train.options.option_text import check_text
from wgrad.train.serve.answer_parts import style_of
from wgrad.train.terminal.columns import Columns
from wgrad.train.terminal.ending import one_line
from wgrad.train.terminal.output import harmless, make_console, say

CLEAR, HELP, EXIT, THOUGHTS = "/clear", "/help", "/exit", "/thoughts"
_COMMANDS = {
    CLEAR: "start over",
    THOUGHTS: "show what the model thinks before it answers, or fold it again",
    EXIT: "end the chat, as does the end of input (Ctrl-D)",
    HELP: "list these commands",
}
_LONGEST_LINE = 1 << 20  # bytes
_SEEDS = 2**32


def run_chat(args: ChatConfig) -> int:
    """Run the conversation: each line of standard input is a turn. Return the exit status.

    Answers go to standard output, everything else to standard error.

    Raises:
        WgradError: Model or options cannot be used (before the first turn).
        UnusableResult: The model's logits are not finite.
        DeviceLost: The device was lost twice in a turn, or cannot be opened again.
    """
    opened = open_model(args)
    if opened.head_note:
        say(f"note: {opened.head_note}", "stderr")
    talks = _talks(opened)
    thoughts, losses = talks[0].thoughts, 0
    for line in _lines():
        command = line.strip()
        if command == EXIT:
            break
        if command == CLEAR:
            for talk in talks:
                talk.clear()
        elif command == THOUGHTS:
            thoughts.shown = not thoughts.shown
            say(f"thoughts are {'shown' if thoughts.shown else 'folded'}", "stderr")
        elif command == HELP:
            for name, words in _COMMANDS.items():
                say(f"{name:<10} {words}", "stderr")
            say("Ctrl-C    stop an answer", "stderr")
        elif command:
            try:
                if lost := lost_in(partial(_answer, talks, line)):
                    opened, losses = _load_again(talks, opened, lost, losses + 1), losses + 1
                    _answer(talks, line)
            except UnusableResult:
                raise
            except WgradError as error:  # the turn is taken back; another one may work
                say(f"wgrad: error: {one_line(error)} ({CLEAR} begins anew)", "stderr")
    return 0


@dataclass
class Talk:
    """A conversation with one model."""

    name: str
    model: Model
    opened: Opened[ChatConfig]
    thoughts: Thoughts
    turns: list[Message] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        system = self.opened.args.system
        self.turns = [{"role": "system", "content": system}] if system else []

    @contextmanager
    def answer(self, text: str) -> Iterator[Iterator[str]]:
        """Yield the pieces of the answer to `text`. The turn and the pieces that were read become part of the talk.

        Raises:
            WgradError: The template refuses the turn, or the context is full; the turn is dropped.
        """
        args, tokenizer = self.opened.args, self.opened.tokenizer
        turns = [*self.turns, {"role": "user", "content": text}]
        rendered = tokenizer.chat_template.render(turns, True)
        prompt, style = tokenizer.encode(rendered, add_special_tokens=False), style_of(tokenizer).after(rendered)
        room = self.model.cos.shape[0] - len(prompt)
        if room < 1:
            raise WgradError(
                f"the conversation has {len(prompt)} tokens, and --context is {self.model.cos.shape[0]}: say less, or "
                "start with more"
            )
        # Each turn has its own seed, or the same line said twice would get the same answer.
        seed = (args.seed + sum(turn["role"] == "user" for turn in self.turns)) % _SEEDS
        ids = text_ids(self.model, prompt, min(args.max_new_tokens, room), replace(args, seed=seed), tokenizer.stop_ids)
        said = dict[str, str]()
        yield self.thoughts.answer(tokenizer.decode_stream(prompt, shown=style.markers).pieces(ids), style, said)
        self.turns = [*turns, {"role": "assistant", "content": "", **said}]


def _talks(opened: Opened[ChatConfig]) -> list[Talk]:
    """Load the models, each with a conversation. WgradError: the model has no chat template."""
    _ = opened.tokenizer.chat_template  # compiled before weights are read
    thoughts = Thoughts(notes=_is_terminal())
    return [Talk(name, model, opened, thoughts) for name, model in _load(opened).items()]


def _load(opened: Opened[ChatConfig]) -> dict[str, Model]:
    """Load the models of the conversations by name."""
    args, positions = opened.args, context_of(opened)
    names: dict[str, str | None] = {"with the adapter": args.adapter} if args.adapter else {"": None}
    if args.compare:
        names = {"without the adapter": None, **names}

    def longest(model: Model) -> None:  # three tokens at the end of the longest conversation
        decoder = Decoder(model, [[0] * max(positions - 3, 1)], min(3, positions - 1), replace(GREEDY, temperature=1.0))
        list(decoder.tokens())
        if args.repetition_penalty != 1:
            prompt = [0] * max(positions - 3, 1)
            list(text_ids(model, prompt, min(3, positions - 1), replace(args, temperature=1.0), ()))

    return build_text_models(opened, names, positions, longest)


def _load_again(talks: Sequence[Talk], opened: Opened[ChatConfig], lost: DeviceLost, losses: int) -> Opened[ChatConfig]:
    """Open the lost device again, and load the models of the conversations. Raises DeviceLost if that is impossible.

    Args:
        losses: How often the device was lost so far.
    """
    if not opened.device.reopens:
        raise lost
    say(f"wgrad: {one_line(lost)}: it is opened again, and the answer begins anew", "stderr")
    for talk in talks:
        del talk.model
    gc.collect()
    opened = replace(opened, device=opened.device.reopen(losses))
    models = _load(opened)
    for talk in talks:
        talk.model, talk.opened = models[talk.name], opened
    return opened


# ---- the terminal --------------------------------------------------------------------------------
def _is_terminal() -> bool:
    return sys.stdin is not None and sys.stdin.isatty() and sys.stdout.isatty()


def _lines() -> Iterator[str]:
    """Yield the user's lines, from the terminal, a pipe or a file. Ctrl-C at the prompt discards the typed text."""
    terminal = _is_terminal()
    if terminal:
        say(f"{HELP} lists commands", "stderr")
        try:
            import readline  # noqa: F401  gives input() line editing and a history
        except ImportError:  # on Windows the terminal has both
            pass
    while True:
        try:
            yield input("> ") if terminal else _line_of_pipe()
        except EOFError:
            sys.stdout.write("\n" if terminal else "")
            return
        except KeyboardInterrupt as asked:
            if not terminal or getattr(asked, "number", signal.SIGINT) != signal.SIGINT:
                raise
            sys.stdout.write("\n")


def _line_of_pipe() -> str:
    """Read a line of standard input. EOFError: it has ended."""
    line = sys.stdin.buffer.readline(_LONGEST_LINE) if sys.stdin is not None else b""
    if not line:
        raise EOFError
    return line.decode("utf-8", "surrogateescape").rstrip("\r\n")


def _answer(talks: Sequence[Talk], text: str) -> None:
    check_text(text, "this line")
    with ExitStack() as stack:
        answers = [stack.enter_context(talk.answer(text)) for talk in talks]
        stop = stack.enter_context(_stoppable())
        if len(talks) == 1:
            _write_one(answers[0], stop)
        else:
            _write_beside(answers, [talk.name for talk in talks], stop)


@contextmanager
def _stoppable() -> Iterator[threading.Event]:
    """Let Ctrl-C set the event within the block; a second one raises KeyboardInterrupt."""
    asked = threading.Event()

    def handle(number: int, frame: FrameType | None) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()

    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before in (signal.SIG_IGN, None):
        yield asked
        return
    signal.signal(signal.SIGINT, handle)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, before)


def _write_one(answer: Iterator[str], stop: threading.Event) -> None:
    try:
        for text in answer:
            sys.stdout.write(harmless(text))
            sys.stdout.flush()
            if stop.is_set():
                return
    finally:
        sys.stdout.write("\n")
        sys.stdout.flush()


def _write_beside(answers: Sequence[Iterator[str]], names: Sequence[str], stop: threading.Event) -> None:
    """Write the answers in columns, one piece of each in turn."""
    columns = Columns(names, make_console("stdout").width, sys.stdout.write, sys.stdout.isatty())
    going = list(range(len(answers)))
    try:
        while going and not stop.is_set():
            for number in list(going):
                text = next(answers[number], None)
                if text is None:
                    going.remove(number)
                    columns.end(number)
                else:
                    columns.add(number, harmless(text))
            sys.stdout.flush()
    finally:
        for number in going:
            columns.end(number)
        sys.stdout.flush()
