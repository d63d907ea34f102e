"""The executor's command line.

    make hip-tables                                  remake the rows of objects that have changed
    python -m tests.hip.executor tables --list       which rows are of older objects
    python -m tests.hip.executor tables --source rope --arch gfx942 --table hip_executed
    python -m tests.hip.executor tables --all        every row: about an hour
    python -m tests.hip.executor report gemm --arch gfx942 --kernel nt_big
    python -m tests.hip.executor grid                how work-groups of attention fill a GPU, by their order (a model)

After a change to a kernel: `make objects`, then `make hip-tables`, and commit both. It needs clang-19, lld-19, llvm-19
and tinygrad (tinygrad_emulator.py says which commit and how to get it).
"""

from __future__ import annotations

import argparse
import sys

from tests.hip.executor.code_object import ExecutorError
from tests.hip.executor.device import shipped
from tests.hip.executor.table import TABLES, digests
from wgrad.device.errors import DeviceError
from wgrad.hip.runtime.architectures import SHIPPED


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m tests.hip.executor", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = made.add_subparsers(dest="command", required=True)
    tables = commands.add_parser("tables", help="remake rows of bench/results/hip_*.jsonl")
    tables.add_argument("--all", action="store_true", help="also rows of the objects that ship")
    tables.add_argument("--list", action="store_true", help="print which objects' rows would be made, and make none")
    tables.add_argument("--table", action="append", choices=sorted(TABLES), help="default: every table")
    tables.add_argument("--arch", action="append", choices=SHIPPED, default=[], help="default: every architecture")
    tables.add_argument("--source", default="", help="part of a source's name")
    report = commands.add_parser("report", help="print what a compiled kernel is made of")
    report.add_argument("source", help="name of a file of kernels, without .hip")
    report.add_argument("--arch", choices=SHIPPED, default="gfx942")
    report.add_argument("--kernel", default="", help="part of a kernel's name")
    order = commands.add_parser("grid", help="model how work-groups of a causal attention fill a card")
    order.add_argument("--write", action="store_true", help="also write bench/results/hip_grid.jsonl")
    return made


def tables(options: argparse.Namespace) -> None:
    from tests.hip.executor.remake import remake, wanted

    for name in options.table or TABLES:
        choice = {"everything": options.all, "architectures": options.arch, "source": options.source}
        objects = wanted(TABLES[name], **choice)
        if options.list:
            print(f"{name}: {', '.join(map(str, objects)) or 'every row is of what ships'}")
        else:
            remake(name, objects, lambda line: print(line, flush=True))


def report(options: argparse.Namespace) -> None:
    from tests.hip.executor.report import lines

    if (options.arch, options.source) not in digests():
        there = ", ".join(sorted(o.source for o in digests() if o.architecture == options.arch))
        raise ExecutorError(f"no code object of '{options.source}' for {options.arch}; there are {there}")
    code = shipped(options.source, options.arch)
    for kernel in code.kernels:
        if options.kernel in kernel:
            print(*lines(code, kernel), sep="\n")


def grid(options: argparse.Namespace) -> None:
    from tests.hip.executor.grid import rows, write

    for row in rows():
        print(f"{row['shape']}, {row['work_groups']:,} work-groups")
        for order, busy in row["busy"].items():
            print(f"  {order}: {busy:.1%} of the card busy, K and V read {row['read'][order]:.1f} times")
    if options.write:
        write()


def main() -> int:
    options = parser().parse_args()
    try:
        {"tables": tables, "report": report, "grid": grid}[options.command](options)
    except (ExecutorError, DeviceError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
