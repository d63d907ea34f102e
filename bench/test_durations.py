"""Processor time of the tests, by file and by cause: `python bench/test_durations.py FOLDER` prints the tables.

FOLDER is filled by a run of the tests with this plugin:

    WGRAD_DURATIONS=FOLDER PYTHONPATH=bench make test PYTEST_FLAGS="-p test_durations"

The processes of pytest write one line per test: its own processor time, that of the programs it waited for, by the
name of the program, and the wall time. Shader compilation is the difference between a run with an empty Mesa cache
(MESA_SHADER_CACHE_DIR) and one with a full one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

try:
    import pytest
except ImportError:  # the tables need no pytest
    pytest = None  # type: ignore[assignment]


class Recorder:
    """Writes the lines of one process of pytest."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.file = (folder / f"{os.getpid()}.jsonl").open("w", buffering=1)
        self.programs: dict[str, float] = defaultdict(float)
        self.started: Counter[str] = Counter()
        self.names: dict[int, str] = {}
        self.watch_programs()

    def write(self, **values: Any) -> None:
        self.file.write(json.dumps(values) + "\n")

    def watch_programs(self) -> None:
        """Read the processor time of each program where `subprocess` waits for it."""
        start, recorder = subprocess.Popen.__init__, self

        def named(process: Any, args: Any, *rest: Any, **options: Any) -> None:
            start(process, args, *rest, **options)
            first = args if isinstance(args, (str, bytes, os.PathLike)) else list(args)[0]
            recorder.names[process.pid] = name = Path(os.fsdecode(first).split(" ")[0]).name
            recorder.started[name] += 1

        def waitpid(pid: int, flags: int) -> tuple[int, int]:
            done, status, usage = os.wait4(pid, flags)
            if done:
                recorder.programs[recorder.names.pop(done, "fork")] += usage.ru_utime + usage.ru_stime
            return done, status

        subprocess.Popen.__init__ = named  # type: ignore[assignment,method-assign]
        os.waitpid = waitpid

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: Any) -> Iterator[None]:
        self.programs.clear()
        self.started.clear()
        before, began = os.times(), time.monotonic()
        result = yield
        after = os.times()
        self.write(
            test=item.nodeid,
            own=after.user + after.system - before.user - before.system,
            children=after.children_user + after.children_system - before.children_user - before.children_system,
            programs=dict(self.programs),
            started=dict(self.started),
            wall=time.monotonic() - began,
        )
        return result

    @pytest.hookimpl(wrapper=True, optionalhook=True)
    def pytest_before_forks(self) -> Iterator[None]:
        before = time.process_time()
        yield
        self.write(cause="imports before forks", own=time.process_time() - before)

    def pytest_collection_finish(self, session: Any) -> None:
        self.write(cause="imports and collection", own=time.process_time())

    def pytest_sessionfinish(self) -> None:
        times = os.times()
        self.write(total=times.user + times.system, total_children=times.children_user + times.children_system)


def pytest_configure(config: Any) -> None:
    if folder := os.environ.get("WGRAD_DURATIONS"):
        config.pluginmanager.register(Recorder(Path(folder)))


def tables(folder: Path, files: int = 40) -> str:
    """The two tables of a run, in Markdown."""
    lines = [json.loads(line) for file in folder.glob("*.jsonl") for line in file.read_text().splitlines()]
    by_file: dict[str, Counter[str]] = defaultdict(Counter)
    causes: defaultdict[str, float] = defaultdict(float)
    started: Counter[str] = Counter()
    for line in lines:
        if "cause" in line:
            causes[line["cause"]] += line["own"]
        elif "test" in line:
            row = by_file[line["test"].partition("::")[0]]
            row.update(tests=1, own=line["own"], children=line["children"], wall=line["wall"])
            causes["tests, in the processes of pytest"] += line["own"]
            for name, seconds in line["programs"].items():
                causes[f"programs: {name}"] += seconds
            causes["programs that are not attributed"] += line["children"] - sum(line["programs"].values())
            started.update(line["started"])
    text = ["| cause | CPU seconds | programs started |", "| --- | ---: | ---: |"]
    text += [
        f"| {cause} | {seconds:.0f} | {started.get(cause.removeprefix('programs: '), '')} |"
        for cause, seconds in sorted(causes.items(), key=lambda pair: -pair[1])
        if seconds >= 1
    ]
    total = sum(row["own"] + row["children"] for row in by_file.values())
    text += ["", "| file | tests | own | programs | sum |", "| --- | ---: | ---: | ---: | ---: |"]
    ranked = sorted(by_file.items(), key=lambda pair: -pair[1]["own"] - pair[1]["children"])
    for name, row in ranked[:files]:
        numbers = (row["own"], row["children"], row["own"] + row["children"])
        text.append(f"| {name} | {row['tests']:.0f} | " + " | ".join(f"{number:.1f}" for number in numbers) + " |")
    text.append(f"| all {len(by_file)} | {sum(row['tests'] for row in by_file.values()):.0f} | | | {total:.0f} |")
    return "\n".join(text)


if __name__ == "__main__":
    print(tables(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 40))
