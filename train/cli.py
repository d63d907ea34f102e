"""The command `wgrad`: finetune, generate, devices, selftest.

Exit status: 0 done; 1 a selftest failed, or what a run came to is of no use; 2 a user's mistake or the machine's limit
(one line on stderr, no traceback); 128 + the number of the signal that ended it: 130 Ctrl-C, 143 SIGTERM, 129 SIGHUP.
"""

from __future__ import annotations

import argparse
import errno
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import wgrad
from wgrad.autograd.errors import DEVICE_ERRORS, UnusableResult, WgradError
from wgrad.train.cli_options import Parser, add_finetune_options, resolve_config
from wgrad.train.input_files import expand_path
from wgrad.train.option_text import check_text, read_stdin
from wgrad.train.output import Output, OutputLost, command_output, say, settle

LONGEST_MESSAGE = 1000  # characters; what it quotes may be any file's
EXPECTED: tuple[type[BaseException], ...] = (WgradError, *DEVICE_ERRORS)  # errors that are not ours to fix
DEVICE_HELP = "auto, hip, wgpu, wgpu:<number or part of the adapter's name>, cpu (default: auto)"


def _finetune(args: argparse.Namespace) -> int:
    given = {k: v for k, v in vars(args).items() if k not in ("command", "run")}
    config = resolve_config(given)
    args.out = config.out  # for the message when interrupted
    say(config.summary())
    from wgrad.train.finetune import run_finetune

    try:
        return run_finetune(config)
    finally:
        settle()  # what a run says is not what it is for


def _generate(args: argparse.Namespace) -> int:
    args.model = expand_path(args.model, "--model")
    args.adapter = args.adapter and expand_path(args.adapter, "--adapter")
    args.prompt = read_stdin("--prompt") if args.prompt == "-" else check_text(args.prompt, "--prompt")
    if not args.prompt:
        raise WgradError("--prompt: is empty: give some text to go on from")
    for name, holds, rule in (
        ("max_new_tokens", args.max_new_tokens >= 1, "must be at least 1"),
        ("temperature", args.temperature >= 0, "must not be negative (0: greedy)"),
        ("top_k", args.top_k >= 0, "must not be negative (0: off)"),
        ("top_p", 0 < args.top_p <= 1, "must be above 0 and at most 1 (1: off)"),
        ("seed", 0 <= args.seed < 2**32, "must be between 0 and 4294967295"),
    ):
        if not holds:
            raise WgradError(f"--{name.replace('_', '-')}: {rule}; got {getattr(args, name)}")
    from wgrad.train.generate import run_generate

    return run_generate(args)


def _devices(args: argparse.Namespace) -> int:
    from wgrad.train.devices import print_devices

    return print_devices()


def _selftest(args: argparse.Namespace) -> int:
    from wgrad.train.selftest import print_selftest

    report = expand_path(args.report, "--report") if args.report else None
    return print_selftest(args.device, only=args.only, as_json=args.json, report=report)


def build_parser() -> Parser:
    """The parser of all commands; each namespace carries `run`, the function of its command."""
    parser = Parser(prog="wgrad", description="Fine-tune LLaMA-type language models on any GPU, without PyTorch.")
    parser.add_argument("--version", action="version", version=f"wgrad {wgrad.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)

    def add(name: str, run: Callable[[argparse.Namespace], int], text: str) -> Parser:
        command = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        command.set_defaults(run=run)
        return command

    add_finetune_options(
        add("finetune", _finetune, "train adapters (QLoRA), or with --full the whole model, on your data")
    )
    _add_generate_options(add("generate", _generate, "continue a text with a model, and an adapter if you have one"))
    add("devices", _devices, "list what this machine can compute on, and which of it is used")
    selftest = add("selftest", _selftest, "check every operator of a device against the float64 reference")
    selftest.add_argument("--device", default="auto", metavar="DEVICE", help=DEVICE_HELP)
    selftest.add_argument("--only", default="", metavar="TEXT", help="only cases whose name contains this")
    selftest.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    report = "write that object to a file as well: card, driver, versions, and the error of every case"
    selftest.add_argument("--report", metavar="FILE", help=report)
    return parser


COMPUTE_HELP = "type of activations (default: float32; bfloat16: on HIP)"


def _add_generate_options(parser: Parser) -> None:
    add = parser.add_argument
    checkpoint = "checkpoint: a folder, or a hub id such as org/name"
    add("--model", required=True, metavar="DIR_OR_HUB_ID", help=checkpoint)
    add("--adapter", metavar="DIR", help="PEFT adapter to put on it")
    add("--prompt", required=True, metavar="TEXT", help="text to go on from; - reads it from standard input")
    add("--chat", action="store_true", help="the prompt is a user's message: apply the model's chat template")
    add("--max-new-tokens", type=int, default=128, metavar="N", help="stop after this many tokens (default: 128)")
    add("--temperature", type=float, default=0.8, metavar="T", help="0 takes the likeliest token (default: 0.8)")
    add("--top-k", type=int, default=0, metavar="K", help="choose among the K likeliest; 0: off (default: 0)")
    add("--top-p", type=float, default=0.95, metavar="P", help="choose among the likeliest of total P (default: 0.95)")
    add("--seed", type=int, default=0, metavar="N", help="the same seed gives the same text (default: 0)")
    add("--device", default="auto", metavar="DEVICE", help=DEVICE_HELP)
    add("--compute", choices=("float32", "float16", "bfloat16"), default="float32", help=COMPUTE_HELP)
    quantize = "hold the weights in NF4, as in fine-tuning (default: yes)"
    add("--quantize", action=argparse.BooleanOptionalAction, default=True, help=quantize)


def _one_line(error: BaseException) -> str:
    """The message on one line, without control characters (of a name or a value that it quotes), of bounded length."""
    text = " ".join(str(error).split()) or type(error).__name__
    text = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
    if len(text) <= LONGEST_MESSAGE:
        return text
    return f"{text[: LONGEST_MESSAGE // 2]} ... {text[-LONGEST_MESSAGE // 3 :]}"


def _after_interrupt(args: argparse.Namespace | None, error: KeyboardInterrupt) -> str:
    """What is saved: what the command itself said, else the newest checkpoint."""
    out = getattr(args, "out", None) if getattr(args, "command", None) == "finetune" else None
    if str(error) or not out:
        return _one_line(error) if str(error) else "interrupted"
    steps = sorted(Path(out).glob("checkpoints/step-*[0-9]"), key=lambda p: int(p.name.rpartition("-")[2]))
    if not steps:
        return "interrupted: no checkpoint was saved yet (--save-every sets how often)"
    return f"interrupted: {steps[-1]} is saved; go on with the same command and --resume"


def _fail(message: str, status: int) -> int:
    Output().flush()
    say(f"wgrad: {message}", "stderr")
    return status


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; -> exit status."""
    status = 0
    try:
        with command_output():
            status = _main(argv)
        return status
    except OutputLost as error:
        if status:
            return status
        if error.errno in (errno.EPIPE, errno.EINVAL):  # the reader has gone, as in `wgrad selftest | head -n 1`
            return 1
        return _fail(f"error: cannot write to standard output: {error.strerror}", 2)


def _main(argv: Sequence[str] | None) -> int:
    args: argparse.Namespace | None = None
    try:
        parser = build_parser()
        args, unknown = parser.parse_known_args(argv)
        if unknown:
            commands = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction)).choices
            commands.get(args.command or "", parser).refuse_unknown(unknown)
        if args.command is None:
            parser.print_help()
            return 0
        return args.run(args)
    except SystemExit as error:  # --help and --version
        return error.code if isinstance(error.code, int) else 0
    except UnusableResult as error:
        return _fail(f"error: {_one_line(error)}", 1)
    except EXPECTED as error:
        return _fail(f"error: {_one_line(error)}", 2)
    except MemoryError:
        return _fail("error: out of main memory: use a smaller --seq-len or --batch-size, or a smaller model", 2)
    except KeyboardInterrupt as error:
        return _fail(_after_interrupt(args, error), 128 + getattr(error, "number", signal.SIGINT))


if __name__ == "__main__":
    sys.exit(main())
