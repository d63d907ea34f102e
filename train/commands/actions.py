"""The actions of `wgrad`'s commands: options from a namespace, then the command's own module, imported when needed."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from wgrad.device.errors import NeedsNewProcess, WgradError
from wgrad.device.shown import short
from wgrad.device.whole_numbers import whole_number
from wgrad.train.data.standard_input import copy_for_ranks
from wgrad.train.files.input_files import expand_path
from wgrad.train.options.bench_config import BenchConfig
from wgrad.train.options.chat_config import ChatConfig
from wgrad.train.options.choice_options import ChoiceOptions
from wgrad.train.options.eval_options import eval_options
from wgrad.train.options.export_config import ExportConfig, ModelExportConfig, refuse_options_of_others
from wgrad.train.options.finetune_config import FinetuneConfig
from wgrad.train.options.generate_config import GenerateConfig
from wgrad.train.options.import_options import ImportOptions
from wgrad.train.options.merge_config import MergeConfig
from wgrad.train.options.option_text import read_stdin
from wgrad.train.options.push_config import PushConfig
from wgrad.train.options.report_config import ReportConfig
from wgrad.train.options.resolve import naming_sources, resolve_config, resolve_options
from wgrad.train.options.serve_config import ServeConfig
from wgrad.train.options.studio_config import StudioConfig
from wgrad.train.options.sweep_options import MOST, read_vary
from wgrad.train.options.watch_config import WatchConfig
from wgrad.train.ranks.launch import launch, wants_launch
from wgrad.train.ranks.start import watching
from wgrad.train.step.memory import advising
from wgrad.train.terminal.output import say, settle

_NOT_OPTIONS = ("command", "run", "words")  # attributes of a namespace


def _given(args: argparse.Namespace) -> dict[str, Any]:
    return {k: v for k, v in vars(args).items() if k not in _NOT_OPTIONS}


def _with_names(given: dict[str, Any], *options: str) -> dict[str, Any]:
    """Return the values with lists of names as one text, so that "a,b" and "a b" are the same."""
    return given | {name: " ".join(given[name]) for name in options if name in given}


def finetune(args: argparse.Namespace) -> int:
    given = _given(args)
    config = resolve_config(given)
    args.out, args.lr_sweep = config.out, config.lr_sweep  # for the message when interrupted
    try:
        if wants_launch(config.ranks):
            copy_for_ranks(config)
            return _launch(config, args.words)
        with watching(), naming_sources(given):
            from wgrad.train.run.finetune import run_finetune

            return run_finetune(config)
    finally:
        settle()  # lost output does not fail a run


def _launch(config: FinetuneConfig, words: Sequence[str]) -> int:
    """Run the ranks; start them again if the GPU of one was lost and a new process can open it."""
    from wgrad.train.output.checkpoints import Checkpoints
    from wgrad.train.run.recovery import counting_losses, words_to_resume

    with counting_losses():
        while (status := launch(config.ranks or 1, words)) == NeedsNewProcess.status:
            words = words_to_resume(words, Checkpoints(config.out).last_step())
            say("note: only new processes can open that GPU again: all ranks are started again")
    return status


def generate(args: argparse.Namespace) -> int:
    given = _given(args)
    if given.get("prompt") == "-":
        given["prompt"] = read_stdin("--prompt")
    config = GenerateConfig(**given)
    config.require()
    if config.prompts:
        from wgrad.train.commands.generate_prompts import run_prompts

        with advising("use a smaller --batch-size, fewer --max-new-tokens, or a smaller model"):
            return run_prompts(config)
    from wgrad.train.commands.generate import run_generate

    with advising("use a shorter prompt, fewer --max-new-tokens, or a smaller model"):
        return run_generate(config)


def evaluate(args: argparse.Namespace) -> int:
    given = _given(args)
    as_json = given.pop("json")
    of_choices = {name: given.pop(name) for name in ChoiceOptions.hints if name in given}
    choices = ChoiceOptions(**of_choices)
    choices.check(of_choices)
    config = eval_options(given, choices)
    with advising("use a smaller --batch-size or --max-length, or a smaller model"):
        if choices.choices:
            from wgrad.train.commands.evaluate_choices import run_choices

            return run_choices(config, choices, as_json)
        from wgrad.train.commands.evaluate import run_eval

        return run_eval(config, as_json)


def chat(args: argparse.Namespace) -> int:
    config = ChatConfig(**_given(args))
    config.require()
    from wgrad.train.commands.chat import run_chat

    with advising("use a smaller --context, or a smaller model"):
        return run_chat(config)


def serve(args: argparse.Namespace) -> int:
    config = ServeConfig(**_given(args))
    config.require()
    from wgrad.train.commands.serve import run_serve

    with advising("use a smaller --batch-size or --context, or a smaller model"):
        return run_serve(config)


def watch(args: argparse.Namespace) -> int:
    given = _given(args)
    folders = given.pop("folder")
    config = WatchConfig(**given)
    from wgrad.train.commands.watch import run_watch

    return run_watch(config, folders)


def studio(args: argparse.Namespace) -> int:
    given = _given(args)
    folder = expand_path(given.pop("folder"), "RUNS")
    config = StudioConfig(**given)
    from wgrad.train.commands.studio import run_studio

    return run_studio(config, folder)


def export(args: argparse.Namespace) -> int:
    given = _given(args)
    tool = given.pop("tool")
    refuse_options_of_others(tool, given)
    if tool:
        whole = ModelExportConfig(**given)
        whole.require()
        from wgrad.train.commands.export_model import run_export_model

        return run_export_model(tool, whole)
    config = ExportConfig(**given)
    config.require()
    from wgrad.train.commands.export import run_export

    return run_export(config)


def merge(args: argparse.Namespace) -> int:
    config = MergeConfig(**_given(args))
    config.require()
    from wgrad.train.commands.merge import run_merge

    return run_merge(config)


def import_config(args: argparse.Namespace) -> int:
    config = ImportOptions(**_given(args))
    from wgrad.train.commands.import_config import run_import

    return run_import(config)


def sweep(args: argparse.Namespace) -> int:
    given = _given(args)
    varied = [read_vary(text) for text in given.pop("vary") or ()]
    if not varied:
        raise WgradError("--vary is required: give it, as learning_rate=1e-4,3e-4")
    trials = given.pop("trials")
    count = None if trials is None else whole_number(trials)
    if trials is not None and not (count and count <= MOST):
        raise WgradError(f"--trials: must be a whole number between 1 and {MOST}; got {short(trials)}")
    from wgrad.train.run.trials import run_sweep

    run_sweep(given, varied, count)
    return 0


def push(args: argparse.Namespace) -> int:
    config = PushConfig(**_given(args))
    config.require()
    from wgrad.train.commands.push import run_push

    return run_push(config)


def warm(args: argparse.Namespace) -> int:
    given = _given(args)
    config = resolve_options(given)
    from wgrad.train.commands.warm import run_warm

    with naming_sources(given):
        return run_warm(config)


def plan(args: argparse.Namespace) -> int:
    given = _given(args)
    as_json = given.pop("json")
    config = resolve_options(given)
    from wgrad.train.commands.plan import run_plan

    advice = "use a smaller --batch-size or --max-length, or --gradient-checkpointing"
    with naming_sources(given), advising(advice):
        return run_plan(config, as_json)


def data_show(args: argparse.Namespace) -> int:
    given = _given(args)
    given.pop("action")
    examples, as_json = given.pop("examples"), given.pop("json")
    count = whole_number(examples)
    if count is None:
        raise WgradError(f"--examples: expected a whole number, 0 or more, got {short(examples)}")
    if "data" in given:
        raise WgradError("--data: the file is named without it: wgrad data show FILE")
    config = resolve_options(given | {"data": given.pop("file")})
    for name in ("data", "model"):
        if not getattr(config, name):
            raise WgradError(f"--{name} is required: give it")
    from wgrad.train.commands.data_show import run_data_show

    with naming_sources(given):
        return run_data_show(config, count, as_json)


def devices(args: argparse.Namespace) -> int:
    from wgrad.train.commands.devices import print_devices

    return print_devices()


def doctor(args: argparse.Namespace) -> int:
    from wgrad.train.commands.doctor import print_doctor

    return print_doctor()


def report_gpu(args: argparse.Namespace) -> int:
    config = ReportConfig(**_with_names(_given(args), "only", "op"))
    from wgrad.train.commands.report_gpu import run_report

    return run_report(config)


def selftest(args: argparse.Namespace) -> int:
    if args.page is not None:
        for name in ("report", "json"):
            if getattr(args, name):
                raise WgradError(f"--{name}: tells of a run here, and --page only writes a file: leave one of them out")
        if args.device != "auto":
            raise WgradError("--device: nothing runs here, --page only writes a file: leave one of them out")
        from wgrad.train.commands.selftest_page import write_page

        return write_page(expand_path(args.page, "--page"), only=args.only)
    if args.report:
        for name in ("only", "json"):
            if getattr(args, name):
                raise WgradError(f"--{name}: --report is of all cases, in a file: leave one of them out")
        config = ReportConfig(device=args.device, out=expand_path(args.report, "--report"))
        from wgrad.train.commands.report_gpu import run_report

        say("note: selftest --report is now report-gpu --out; the next release takes only that", "stderr")
        return run_report(config)
    from wgrad.train.commands.selftest import print_selftest

    return print_selftest(args.device, only=args.only, as_json=args.json)


def bench(args: argparse.Namespace) -> int:
    config = BenchConfig(**_with_names(_given(args), "op"))
    from wgrad.train.commands.bench import run_bench

    return run_bench(config)


def matrix_units(args: argparse.Namespace) -> int:
    from wgrad.train.commands.matrix_units import COMMANDS

    return COMMANDS[args.action]()


def cache(args: argparse.Namespace) -> int:
    from wgrad.train.commands.cache import COMMANDS

    return COMMANDS[args.action]()
