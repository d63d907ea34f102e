"""The options of a command line, made from a dataclass."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NoReturn

from wgrad.device.errors import WgradError
from wgrad.train.options.former_names import FORMER
from wgrad.train.options.option_names import did_you_mean, option_hint
from wgrad.train.options.options import Options, field_type, flag, show


class Parser(argparse.ArgumentParser):
    """An argparse parser with short help and one-line errors.

    Attributes:
        groups: Subcommands in the help, by title.
        usual: Options that --help shows, if not all; --help-all then shows all.
        required: Fields without which the command cannot work.
        takes_options: Whether `add_options` adds any; False if another command is parsed.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(*args, **kwargs)
        self._positionals.title = "arguments"
        self.groups: dict[str, list[str]] = {}
        self.usual: tuple[str, ...] = ()
        self.required: set[str] = set()
        self.takes_options = True

    def error(self, message: str) -> NoReturn:
        raise WgradError(f"{message}: see {self.prog} --help")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if isinstance(action, argparse._SubParsersAction) and value not in action.choices:
            self.error(f"unknown command {value!r}{did_you_mean(str(value), action.choices)}")
        super()._check_value(action, value)

    def _print_message(self, message: str, file: Any = None) -> None:
        """Write help or version. argparse's own method hides write errors."""
        if message and file is not None:
            file.write(message)

    def show_usual(self, *names: str) -> None:
        """Let --help show these options only, and add --help-all."""
        self.usual = names
        self.add_argument("--help-all", action=_HelpAll, help="show all options and exit")

    def format_usage(self) -> str:
        """Return one line, with positional arguments and required options."""
        words = [
            f"[{word}]" if action.nargs == "?" else f"{word} [{word} ...]" if action.nargs == "+" else word
            for action in self._actions
            if not action.option_strings
            for word in [action.metavar or f"{{{','.join(action.choices or [action.dest])}}}"]
        ]
        named = [f"{a.option_strings[0]} {a.metavar}" for a in self._actions if a.dest in self.required]
        options = ["[options]"] if any(a.option_strings for a in self._actions) else []
        return " ".join(["usage:", self.prog, *map(str, words), *named, *options]) + "\n"

    def format_help(self) -> str:
        return self.format_all(self.usual)

    def format_all(self, only: tuple[str, ...] = ()) -> str:
        """Return the help of all options in groups, or of those whose fields are in `only`."""
        formatter = self._get_formatter()
        formatter.add_text(self.description)
        if only:
            shown = [a for a in self._actions if a.dest in (*only, "help")]
            sections = {"arguments": [a for a in shown if not a.option_strings]}
            sections["usual options"] = [a for a in shown if a.option_strings]
            more = f"{self.prog} --help-all shows all {self._count()} options."
        else:
            sections = {str(group.title): group._group_actions for group in self._action_groups}
            more = ""
        for title, actions in sections.items():
            if actions and isinstance(actions[0], argparse._SubParsersAction):
                self._add_commands(formatter, actions[0])
                continue
            formatter.start_section(title)
            formatter.add_arguments(actions)
            formatter.end_section()
        for text in (more, self.epilog):
            formatter.add_text(text)
        return f"{self.format_usage()}\n{formatter.format_help()}"

    def _count(self) -> int:
        shown = {a.dest for a in self._actions if a.option_strings and a.help != argparse.SUPPRESS}
        return len(shown - {"help", "help_all"})

    def hide(self, names: Collection[str]) -> None:
        """Leave options out of the help: those that the command refuses, in words of its own."""
        for action in self._actions:
            if action.dest in names:
                action.help = argparse.SUPPRESS

    def _add_commands(self, formatter: argparse.HelpFormatter, commands: Any) -> None:
        named = {action.dest: action for action in commands._choices_actions}
        for title, names in self.groups.items():
            formatter.start_section(title)
            formatter.add_arguments([named[name] for name in names])
            formatter.end_section()

    def refuse_unknown(self, unknown: list[str], words: Sequence[str]) -> None:
        """Raise WgradError for arguments that no option takes, suggesting what was meant. words: the command line."""
        if not unknown:
            return
        if not unknown[0].startswith("-"):
            self.error(f"unknown argument {unknown[0]}{self._second_value(unknown[0], words)}")
        word = unknown[0].split("=")[0]
        fields = [action.dest for action in self._actions]
        switches = {a.dest for a in self._actions if any(text.startswith("--no-") for text in a.option_strings)}
        self.error(f"unknown argument {word}{option_hint(word, fields, '--', switches)}")

    def _second_value(self, word: str, words: Sequence[str]) -> str:
        """Return how to write a word that follows the one value of an option; "" if it does not."""
        options = self._option_string_actions
        places = (n for n in range(1, len(words)) if words[n] == word and words[n - 1] not in options)
        before = words[: next(places, 0)]  # right after an option, it is that one's value
        name = next((text for text in reversed(before) if text.startswith("--")), "").partition("=")[0]
        action = options.get(name)
        if action is None or action.nargs is not None:
            return ""
        if isinstance(action, argparse._AppendAction):
            return f" (write {name} before each value: {name} {action.metavar} {name} {action.metavar})"
        return f" ({name} takes one value: put a value with blanks in quotes)"


class _HelpAll(argparse.Action):
    """--help-all: the help of all options."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str | None = None) -> None:
        super().__init__(option_strings, dest, nargs=0, default=argparse.SUPPRESS, help=help)

    def __call__(self, parser: Any, *_: Any) -> None:
        parser._print_message(parser.format_all(), sys.stdout)
        parser.exit()


def add_options(
    parser: argparse.ArgumentParser,
    options: type[Options],
    only: Mapping[str, str] | None = None,
    first: Sequence[str] = (),
) -> None:
    """Add an option for each field of `options`.

    Options that are not given are absent from the namespace. Values stay texts, which the dataclass converts and
    checks.

    Args:
        parser: Parser of a command.
        options: Dataclass of options.
        only: Fields that the command takes, with their help; "": the field's own help. None: all fields.
        first: Fields that the help lists before the others, in this order.
    """
    if isinstance(parser, Parser) and not parser.takes_options:
        return
    groups: dict[str, Any] = {"": parser}
    places = {name: place for place, name in enumerate(first)}
    for field in sorted(dataclasses.fields(options), key=lambda field: places.get(field.name, len(places))):
        meta = field.metadata
        if only is not None and field.name not in only:
            continue
        group = groups.get(meta["group"])
        if group is None:
            group = groups[meta["group"]] = parser.add_argument_group(meta["group"])
        kind = field_type(options, field.name)
        if meta["required"] and isinstance(parser, Parser):
            parser.required.add(field.name)
        keywords: dict[str, Any] = {
            "dest": field.name,
            "default": argparse.SUPPRESS,
            "help": (only or {}).get(field.name) or _help(field),
        }
        if kind is bool and meta["metavar"]:  # a switch that also takes a number
            keywords |= {"nargs": "?", "const": True, "metavar": meta["metavar"]}
        elif kind is bool:
            keywords["action"] = argparse.BooleanOptionalAction
        else:
            choices = "{" + ",".join(map(str, meta["choices"])) + "}" if meta["choices"] else ""
            keywords["metavar"] = choices if kind is str and choices else meta["metavar"]
            if meta["repeat"]:
                keywords["action"] = "append"
            elif kind is tuple:
                keywords |= {"nargs": "+", "action": "extend"}  # given twice, they add up
        hidden = {"help": argparse.SUPPRESS}
        former_names = [name for name, now in FORMER.items() if now == field.name]
        group.add_argument(flag(field.name), **keywords)
        for former in former_names:
            group.add_argument(flag(former), **keywords | hidden)
        if keywords.get("const"):
            off: dict[str, Any] = {"dest": field.name, "default": argparse.SUPPRESS, "action": "store_false"}
            group.add_argument(flag(f"no_{field.name}"), help="turn it off, also if --config turns it on", **off)
            for former in former_names:
                group.add_argument(flag(f"no_{former}"), **off | hidden)


def with_current_options(words: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return a command line with current option names, and the former names that it had, with the current ones."""
    now = {flag(f"{no}{old}"): flag(f"{no}{new}") for old, new in FORMER.items() for no in ("", "no_")}
    names = [word.partition("=")[0] for word in words]
    found = {name: now[name] for name in names if name in now}
    return [found.get(name, name) + word[len(name) :] for name, word in zip(names, words)], found


def _help(field: dataclasses.Field[Any]) -> str:
    text, default = str(field.metadata["help"]).replace("%", "%%"), field.default
    if default in (None, "", ()):
        return text
    return f"{text} (default: {show(default)})"
