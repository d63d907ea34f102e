"""The command `wgrad`, with its subcommands (`GROUPS`).

Exit status: 0 done; 1 a selftest failed, doctor found something, an operator became slower (bench --compare), or a
run's result is unusable; 2 a user's mistake or a limit of the machine (one line on stderr, no traceback); 128 + the
number of the signal that ended it: 130 Ctrl-C, 143 SIGTERM, 129 SIGHUP.
"""

from __future__ import annotations

import argparse
import errno
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import wgrad
from wgrad.device.errors import CannotWrite, NeedsNewProcess, WgradError
from wgrad.train.commands import actions
from wgrad.train.commands.cli_options import Parser, add_options, with_current_options
from wgrad.train.options.bench_config import BenchConfig
from wgrad.train.options.chat_config import ChatConfig
from wgrad.train.options.choice_options import ChoiceOptions
from wgrad.train.options.eval_options import EVAL_OPTIONS
from wgrad.train.options.export_config import EXPORT_TOOLS, ExportConfig, ModelExportConfig
from wgrad.train.options.finetune_config import DEVICE_HELP, USUAL, FinetuneConfig, RunOptions
from wgrad.train.options.foreign_config import TOOLS
from wgrad.train.options.generate_config import GenerateConfig
from wgrad.train.options.import_options import ImportOptions
from wgrad.train.options.merge_config import MergeConfig
from wgrad.train.options.push_config import PushConfig
from wgrad.train.options.report_config import ReportConfig
from wgrad.train.options.serve_config import ServeConfig
from wgrad.train.options.studio_config import StudioConfig
from wgrad.train.options.sweep_options import OF_NO_SWEEP
from wgrad.train.options.watch_config import WatchConfig
from wgrad.train.ranks.world import RankFailure
from wgrad.train.terminal.end_requests import EndRequests
from wgrad.train.terminal.ending import SWEEP_INTERRUPTED, ending_of, one_line
from wgrad.train.terminal.output import Output, OutputLost, command_output, say, say_ending


def _completion(args: argparse.Namespace) -> int:
    try:
        import shtab
    except ImportError:
        raise WgradError("completion: shtab is not installed: pip install shtab") from None
    Output().write(shtab.complete(build_parser(), args.shell) + "\n")
    return 0


GROUPS = {
    "train": ("finetune", "studio", "sweep", "plan", "data", "watch"),
    "use": ("generate", "chat", "serve", "eval", "merge", "export", "push"),
    "inspect": ("devices", "doctor", "report-gpu", "selftest", "bench"),
    "set up": ("import-config", "matrix-units", "warm", "cache", "completion"),
}


_OF_MODEL = ("model", "adapter")
_OF_DATA = ("model", "columns", "chat_template", "objective", "max_length", "packing", "loss_on", "eval_fraction")


def build_parser(only: str | None = None) -> Parser:
    """Return the parser of all commands. A parsed namespace has `run`, the function of its command.

    Args:
        only: The command that will be parsed. The others get no options, which saves most of the time.
    """
    parser = Parser(prog="wgrad", description="Fine-tune Llama-family language models on any GPU, without PyTorch.")
    parser.add_argument("--version", action="version", version=f"wgrad {wgrad.__version__}")
    parser.epilog = "wgrad COMMAND --help describes a command."
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)
    parser.groups = {title: list(names) for title, names in GROUPS.items()}

    def add(name: str, run: Callable[[argparse.Namespace], int], text: str) -> Parser:
        command = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        command.set_defaults(run=run)
        command.takes_options = only in (None, name)
        return command

    for add_group in (_add_training, _add_using, _add_inspecting, _add_setting_up):
        add_group(add)
    return parser


_Add = Callable[[str, Callable[[argparse.Namespace], int], str], Parser]


def _add_training(add: _Add) -> None:
    finetune = add(
        "finetune", actions.finetune, "train LoRA adapters (QLoRA) on your data, or with --full the whole model"
    )
    _add_config(finetune)
    sweep = add("sweep", actions.sweep, "run finetune for each combination of options, and compare; takes its options")
    sweep.epilog = "Interrupted? The same command goes on. Each run is a folder in --out."
    vary = "an option and its values; several times for several options: learning_rate=1e-4,3e-4 or =1e-5..1e-3"
    sweep.add_argument("--vary", action="append", metavar="NAME=V,V", help=vary)
    trials = "draw this many combinations at random (by --seed) instead of trying all"
    sweep.add_argument("--trials", metavar="N", help=trials)
    _add_config(sweep)
    sweep.hide(OF_NO_SWEEP)
    sweep.required = {"vary", "model", "data", "out"}
    plan = add("plan", actions.plan, "show the memory that a run takes, and what fits; takes the options of finetune")
    _add_config(plan, ("model", "lora_r", "batch_size", "max_length", "device", "vram"))
    plan.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    data = add("data", actions.data_show, "show what a run learns from its data; takes the options of finetune")
    data.add_argument("action", choices=("show",), metavar="show", help="what to do")
    data.add_argument("file", nargs="+", metavar="FILE", help="the data; with weights FILE=3, as --data of finetune")
    data.add_argument("--examples", default="3", metavar="N", help="number of examples to show (default: 3)")
    data.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    _add_config(data, _OF_DATA)
    data.hide(("data",))
    watch = add("watch", actions.watch, "show runs in the browser: curves, samples, results")
    watch.epilog = "The page is at the printed address; Ctrl-C ends it. Nothing in the folders is changed."
    watch.add_argument("folder", nargs="+", metavar="RUN", help="the --out of a run, also one that has yet to begin")
    add_options(watch, WatchConfig)
    studio = add("studio", actions.studio, "fine-tune in the browser: model, data, options, curves, chat, export")
    studio.epilog = "The page is at the printed address. Ctrl-C ends it; runs go on, and the next studio finds them."
    folder = "folder of the runs; each is a folder in it (default: out)"
    studio.add_argument("folder", nargs="?", default="out", metavar="RUNS", help=folder)
    add_options(studio, StudioConfig)


def _add_using(add: _Add) -> None:
    generate = add("generate", actions.generate, "continue a prompt with a model, with or without an adapter")
    add_options(generate, GenerateConfig, first=("model", "adapter", "prompt"))
    generate.required = {"model", "prompt"}
    chat = add("chat", actions.chat, "talk to a model in the terminal, with or without an adapter, or with both")
    chat.epilog = "Ctrl-C stops an answer; /help lists commands; /exit or the end of input (Ctrl-D) ends the chat."
    add_options(chat, ChatConfig, first=_OF_MODEL)
    chat.required = {"model"}
    serve = add("serve", actions.serve, "serve a model and its adapters over HTTP, with the APIs of OpenAI and Ollama")
    add_options(serve, ServeConfig, first=_OF_MODEL)
    serve.required = {"model"}
    evaluate = add(
        "eval", actions.evaluate, "measure perplexity or multiple choice of a model, with and without an adapter"
    )
    add_options(evaluate, RunOptions, EVAL_OPTIONS)
    add_options(evaluate, ChoiceOptions)
    evaluate.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    merge = add("merge", actions.merge, "write a whole model with an adapter merged into its weights")
    add_options(merge, MergeConfig)
    export = add(
        "export", actions.export, "write the merged model for Ollama, LM Studio or llama.cpp, or an adapter in GGUF"
    )
    tools = "ollama, lmstudio or llama.cpp: the merged model as that tool takes it"
    export.add_argument("tool", nargs="?", choices=EXPORT_TOOLS, metavar="TOOL", help=tools)
    add_options(export, ModelExportConfig)
    add_options(export, ExportConfig, dict.fromkeys(("gguf_lora", "type", "modelfile"), ""))
    export.required = {"adapter"}
    push = add("push", actions.push, "upload an adapter or a model to the Hugging Face Hub, with a model card")
    push.epilog = "Interrupted? The same command goes on: files that are there are not sent again."
    push.add_argument("repo", metavar="OWNER/NAME", help="your name or organization there, and the model's name")
    add_options(push, PushConfig, dict.fromkeys(("adapter", "folder", "base", "public"), ""))


def _add_inspecting(add: _Add) -> None:
    add("devices", actions.devices, "list the devices of this machine, and the one that is used")
    add("doctor", actions.doctor, "find out why this machine's GPU is not used, and what to do")
    report = add(
        "report-gpu", actions.report_gpu, "measure this GPU, compare it with NumPy, and write one file to send in"
    )
    report.epilog = "Takes about two minutes. The file is kept up to date, so that a crash leaves what was measured."
    add_options(report, ReportConfig)
    selftest = add("selftest", actions.selftest, "check every operator of a device against a float64 reference")
    selftest.add_argument("--device", default="auto", metavar="DEVICE", help=f"{DEVICE_HELP} (default: auto)")
    selftest.add_argument("--only", default="", metavar="TEXT", help="only cases whose name contains this")
    selftest.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    selftest.add_argument("--report", metavar="FILE", help=argparse.SUPPRESS)  # now report-gpu
    page = "write one HTML file that runs these cases in a browser, on its GPU; nothing runs here"
    selftest.add_argument("--page", metavar="FILE", help=page)
    add_options(
        add("bench", actions.bench, "time every operator and compare it with the device's peak rates"), BenchConfig
    )


def _add_setting_up(add: _Add) -> None:
    importer = add("import-config", actions.import_config, "write the options of an axolotl, LLaMA-Factory or TRL file")
    importer.epilog = "What has no counterpart is listed on standard error, with the reason."
    importer.add_argument("file", metavar="FILE", help="the other tool's YAML or JSON file")
    importer.add_argument("--from", dest="tool", default=None, metavar="TOOL", help=f"whose: {', '.join(TOOLS)}")
    add_options(importer, ImportOptions, {"objective": "", "out": ""})
    units = add("matrix-units", actions.matrix_units, "let float16 use the GPU's tensor cores, or show whether it does")
    units.add_argument("action", choices=("status", "enable", "disable"), help="what to do")
    warm = add("warm", actions.warm, "precompile the shaders of a run; takes the options of finetune")
    _add_config(warm, ("model", "lora_r", "batch_size", "max_length", "compute", "device", "vram"))
    cache = add("cache", actions.cache, "list what is cached on disk (quantized weights, ...), or remove it")
    cache.add_argument("action", choices=("list", "clear"), help="what to do")
    completion = add("completion", _completion, "print a script that completes commands and options in your shell")
    completion.epilog = 'For bash: eval "$(wgrad completion bash)" in ~/.bashrc.'
    completion.add_argument("shell", choices=("bash", "zsh", "tcsh"), help="the shell")


def _add_config(parser: Parser, usual: Sequence[str] = USUAL) -> None:
    """Add the options of a run. usual: those that --help shows; --help-all shows all."""
    parser.add_argument("--config", metavar="FILE", default=argparse.SUPPRESS, help="YAML file with options by name")
    add_options(parser, FinetuneConfig)
    parser.show_usual(*usual, "json", "action", "file", "examples", "vary", "trials")
    if not parser.prog.endswith("finetune"):  # the other commands need only parts of a run
        parser.required = {"model"}


def _after_interrupt(args: argparse.Namespace | None, error: KeyboardInterrupt) -> str:
    """Return the message after Ctrl-C: the command's own, else the newest checkpoint."""
    out = getattr(args, "out", None) if getattr(args, "command", None) == "finetune" else None
    if str(error) or not out:
        return one_line(error) if str(error) else "interrupted"
    if getattr(args, "lr_sweep", None):
        return SWEEP_INTERRUPTED
    saved = _saved_by(args)
    if saved is None:
        return "interrupted: no checkpoint was saved yet (--save-steps sets how often)"
    return f"interrupted: {saved} is saved; go on with the same command and --resume"


def _saved_by(args: argparse.Namespace | None) -> Path | None:
    """Return the newest checkpoint of the run, if the command is one that `--resume` continues."""
    out = getattr(args, "out", None)
    if not out or getattr(args, "command", None) != "finetune" or getattr(args, "lr_sweep", None):
        return None
    from wgrad.train.output.checkpoints import Checkpoints

    try:
        return Checkpoints(out).saved()
    except (OSError, WgradError):  # the error that is being reported matters more
        return None


def _fail(message: str, status: int) -> int:
    say_ending(message, status)
    return status


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line (default: that of this process) and return its exit status."""
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
        return _fail(f"cannot write to standard output: {error.strerror}", 2)


def _main(argv: Sequence[str] | None) -> int:
    args: argparse.Namespace | None = None
    try:
        words = list(sys.argv[1:] if argv is None else argv)
        parser = build_parser(next((word for word in words if not word.startswith("-")), ""))
        args, unknown = parser.parse_known_args(words)
        if unknown:
            commands = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction)).choices
            commands.get(args.command or "", parser).refuse_unknown(unknown, words)
        if args.command is None:
            parser.print_help()
            return 0
        args.words, former = with_current_options(words)
        for old, new in former.items():
            say(f"note: {old} is now {new}; the next release takes only that", "stderr")
        with EndRequests():
            result: int = args.run(args)
            return result
    except SystemExit as error:  # --help and --version
        return error.code if isinstance(error.code, int) else 0
    except RankFailure as error:
        return _fail(str(error), error.status) if error.said else error.status
    except BaseException as error:
        ending = ending_of(error)
        if ending is None:
            raise
        if isinstance(error, KeyboardInterrupt):
            return _fail(_after_interrupt(args, error), ending[1])
        if argv is None and args is not None and isinstance(error, NeedsNewProcess):
            _start_again(args, error, ending[0])
        if isinstance(error, CannotWrite) and (saved := _saved_by(args)):
            return _fail(f"{ending[0]}; {saved} is saved, and --resume goes on from it", ending[1])
        return _fail(ending[0], ending[1])


def _start_again(args: argparse.Namespace, error: NeedsNewProcess, message: str) -> None:
    """Replace this process by one that resumes the run. Does nothing where the system cannot."""
    from wgrad.train.run.recovery import start_again, words_to_resume

    Output().flush()
    say(f"wgrad: note: {message}: starting again", "stderr")
    option = "--resume" if args.command == "finetune" else ""  # a sweep resumes by itself
    start_again(words_to_resume(args.words, error.step, option))


if __name__ == "__main__":
    sys.exit(main())
