"""`wgrad report-gpu`: a report of this GPU in one file, to send to the project.

Each part runs in a process of its own (report_parts.py), and the file is written after each part and while it runs. So
a driver that crashes or hangs ends a part, not the report. A self-test that crashes continues after the case at fault.
"""

from __future__ import annotations

import json
import os
import platform
import re
import secrets
import sys
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

import msgspec

import wgrad
from wgrad.autograd.bench.entries import operator_names
from wgrad.autograd.diagnosis import findings, notes
from wgrad.autograd.machine import this_machine
from wgrad.autograd.select_device import check_spec, list_devices
from wgrad.device.child import Child, Silent
from wgrad.device.errors import WgradError
from wgrad.device.files import check_writable, write_text
from wgrad.device.main_memory import main_memory
from wgrad.train.commands.bench_report import FORMAT, check_operators
from wgrad.train.commands.code_version import code_version
from wgrad.train.commands.selftest import package_versions
from wgrad.train.files.decode import decode_json
from wgrad.train.options.report_config import DEVICE, FINE_TUNE, PARTS, RATES, SELF_TEST, ReportConfig
from wgrad.train.terminal.output import make_console
from wgrad.train.terminal.progress import Display

# Seconds without a line after which a part counts as hung. One shader may take a driver a minute; the fine-tune says
# nothing while it compiles and trains, and ends its own waits earlier.
SILENCE, SILENCE_OF_A_RUN = 180.0, 1200.0
DEATHS = 3  # crashes of the self-test after which it is given up
_SAVE_SECONDS = 1.0  # between two writes while a part runs
_FORM = "issues/new?template=gpu-report.yml"
_CODE = "import sys; sys.path[:] = {path!r}; from wgrad.train.commands.report_parts import main; main(*{arguments!r})"
_LAUNCH = "launch: "  # prefix of the lines of a device that traces its launches
_TRACING = {"WGRAD_HIP_SYNC": "trace"}
_SETTINGS = (
    "WGRAD_", "WGPU_", "VK_", "MESA_", "RADV_", "ACO_", "AMD_", "ANV_", "INTEL_", "NVK_", "LP_", "GALLIVM_", "TU_",
    "MVK_", "HIP_", "HSA_", "ROCR_", "ROCM_", "GPU_", "CUDA_VISIBLE_DEVICES", "__GLX_", "DRI_PRIME", "RUST_BACKTRACE",
)  # fmt: skip
_LONGEST_SETTING = 300  # characters
_MOST_LAUNCHES = 20  # launches kept of a case whose result is wrong


class _Said(msgspec.Struct):
    """A line of a part's process."""

    set: dict[str, Any] = {}
    add: tuple[str, Any] | None = None


@dataclass
class _Report:
    """The report file. contents: its contents at the next save."""

    path: str
    contents: dict[str, Any] = field(default_factory=dict)
    _saved: float = 0.0

    def save(self, now: bool = True) -> None:
        if now or time.monotonic() - self._saved > _SAVE_SECONDS:
            write_text(self.path, _text(self.contents))
            self._saved = time.monotonic()


def _text(contents: Mapping[str, Any]) -> str:
    """Return JSON with one line for each row of a table, and for each list of numbers."""
    rows, mark = dict[str, str](), secrets.token_hex(8)  # a driver's text may hold anything, but not this

    def row(value: Any) -> str:
        name = f"{mark}{len(rows)}"
        rows[f'"{name}"'] = json.dumps(value, allow_nan=False, ensure_ascii=False)
        return name

    def marked(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: marked(part) for name, part in value.items()}
        if isinstance(value, list) and any(isinstance(part, dict | list) for part in value):
            return [row(part) for part in value]
        return row(value) if isinstance(value, list) else value

    text = json.dumps(marked(contents), indent=1, allow_nan=False, ensure_ascii=False)
    return re.sub(rf'"{mark}\d+"', lambda found: rows[found[0]], text) + "\n"


def run_report(config: ReportConfig) -> int:
    """Measure this GPU and write the report.

    Returns:
        0, or 1 if a part failed or a result was wrong.

    Raises:
        WgradError: There is no such device or operator, or the file cannot be written.
    """
    check_spec(config.device)
    check_operators(config.op)
    out = config.out
    check_writable(out, "--out")
    display = Display(make_console("stdout"))
    report = _Report(out)
    report.contents = {
        "format": FORMAT,
        "wgrad": wgrad.__version__,
        "code": code_version(),
        "date": time.strftime("%Y-%m-%d"),
        "asked": config.device,
        **({"only": list(config.only)} if config.only else {}),
        "system": _system(),
        "packages": package_versions(),
    }
    report.save()
    report.contents["devices"] = list_devices()
    report.save()
    report.contents["doctor"] = _doctor()
    report.save()
    ops = config.op or (operator_names() if config.only else ())
    for name in config.parts:
        part = report.contents[name] = {"state": "running"}
        report.save()
        begun = time.monotonic()
        with display.phase(name, unit="steps") as phase:
            for number, _ in enumerate(_run_part(name, config.device, config.size, part, ops)):
                phase.update(number)
                report.save(now=False)
        part["seconds"] = round(time.monotonic() - begun, 1)
        report.save()
        display.say(f"{name}: {_in_words(name, part)}")
        if name == DEVICE and part["state"] != "done":
            break
    report.contents["summary"] = summary(report.contents)
    report.save()
    then = (
        where_to_send()
        if not config.only
        else f"wgrad bench --compare {out} compares with it." * (RATES in config.only)
    )
    display.say(f"{out} is written. {then}".strip())
    return 0 if _all_right(report.contents) else 1


def _system() -> dict[str, Any]:
    return {
        "platform": platform.platform(),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "memory_bytes": main_memory(),
        "distribution": _distribution(),
        "environment": _settings(os.environ),
    }


def _distribution() -> str:
    """Return the name of the Linux distribution, which tells the driver's packages; "": another system."""
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME", "")
    except OSError:
        return ""


def _settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that change what wgrad or a driver does, without keys and the user's name."""
    home = os.path.expanduser("~")
    found = {}
    for name, value in sorted(environment.items()):
        if name.startswith(_SETTINGS) and not re.search("KEY|TOKEN|SECRET|PASSWORD", name):
            shown = value.replace(home, "~") if len(home) > 1 else value
            found[name] = shown[:_LONGEST_SETTING]
    return found


def _doctor() -> list[str]:
    try:
        machine = this_machine()
        return [*findings(machine), *notes(machine)]
    except WgradError as error:  # no device at all
        return [str(error)]


def _run_part(name: str, spec: str, size: str, part: dict[str, Any], ops: Sequence[str] = ()) -> Iterator[None]:
    """Run a part; after a crash, run it again from the case after the one at fault. ops: as `rates` takes them."""
    start, deaths, first = 0, list[dict[str, Any]](), None
    worst: dict[str, float] = {}
    while True:
        more = ["0", *ops] if name == RATES and ops else []
        ending = yield from _run_process([name, spec, size, str(start), *more], part, {})
        doing, failed = part.pop("doing", ""), part.pop("first_failed", None)
        first = failed if first is None else first
        for kernel, share in part.pop("worst_by_kernel", {}).items():
            worst[kernel] = max(share, worst.get(kernel, 0.0))
        if not ending:
            part["state"] = "done"
            break
        deaths.append({"at": doing, "ending": ending})
        part["deaths"] = deaths
        at = part.pop("number", None)
        goes_on = name == SELF_TEST and at is not None
        if len(deaths) == 1 and (goes_on or spec.startswith("hip")):
            # Repeat the case, or the part, on a device that waits for each launch and prints it.
            alone: dict[str, Any] = {}
            yield from _run_process([name, spec, size, *([str(at), "1"] if goes_on else ["0", *more])], alone, _TRACING)
            deaths[-1] |= {key: alone[key] for key in ("last_launch", "said") if key in alone}
        if at is None or not goes_on or len(deaths) == DEATHS:
            part["state"] = f"{ending}{f' at {doing}' if doing else ''}"
            break
        start = at + 1
    part.pop("number", None)
    if worst:
        part["worst_by_kernel"] = dict(sorted(worst.items()))
    if cases := part.get("cases"):
        part.update(_counts(cases))
    if first is not None:
        wrong: dict[str, Any] = {}
        yield from _run_process([name, spec, size, str(first), "1"], wrong, _TRACING)
        if launches := wrong.get("launches"):
            part["first_failed"] = {"at": wrong.get("doing", ""), "launches": launches}


def _counts(cases: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Count the cases that ran, in all processes of the self-test."""
    lacking, failed = (sum(kind in case for case in cases) for kind in ("lacks", "failed"))
    return {"passed": len(cases) - lacking - failed, "failed": failed, "lacking": lacking}


def _run_process(
    arguments: list[str], part: dict[str, Any], environment: Mapping[str, str]
) -> Generator[None, None, str]:
    """Run a part in a process and collect its lines in `part`. Return how it failed; "": it did not."""
    child = Child(_CODE.format(path=sys.path, arguments=tuple(arguments)), {**os.environ, **environment})
    silence = SILENCE_OF_A_RUN if arguments[0] == FINE_TUNE else SILENCE
    try:
        while (line := child.line(silence)) is not None:
            take(part, line)
            yield
        status = child.status(silence)
    except Silent:
        return f"hung: no answer for {silence:.0f} s"
    finally:
        child.end()
        errors = child.errors
        launches = [line for line in errors if line.startswith(_LAUNCH)]
        said = [line for line in errors if not line.startswith(_LAUNCH)]
        if launches:
            part["last_launch"] = launches[-1].removeprefix(_LAUNCH)
            part["launches"] = [line.removeprefix(_LAUNCH) for line in launches[-_MOST_LAUNCHES:]]
        if said:
            part["said"] = said[-1][:500]
    if status == 0:
        part.pop("said", None)
        return ""
    return f"crashed (signal {-status})" if status < 0 else f"ended with status {status}"


def take(part: dict[str, Any], line: str) -> None:
    """Add a line of a part's process to the report: {"set": {...}} or {"add": [name of a list, row]}."""
    try:
        said = decode_json(line.encode("utf-8", "replace"), _Said, "")
    except WgradError:
        return  # printed by a driver
    part.update(said.set)
    if said.add is not None:
        name, row = said.add
        if isinstance(rows := part.setdefault(name, []), list):
            rows.append(row)


def _in_words(name: str, part: Mapping[str, Any]) -> str:
    if part["state"] != "done":
        return f"{part['state']} {part.get('said', '')}".strip()
    if name == SELF_TEST:
        left = f", {part['left']} left out for time" if part.get("left") else ""
        deaths = part.get("deaths", ())
        ended = f", {len(deaths)} ended the process (first {deaths[0]['at']})" if deaths else ""
        return f"{part['passed']} cases passed, {part['failed']} failed{ended}{left} ({part['seconds']:.0f} s)"
    if name == FINE_TUNE:
        verdict = "as NumPy" if part["ok"] else "WRONG"
        return f"{verdict}: losses differ by {part['worst']:.1e} at most, {part['limit']:.0e} allowed"
    return str(part.get("said_in_short") or f"done ({part['seconds']:.0f} s)")


def _all_right(contents: Mapping[str, Any]) -> bool:
    parts = {name: contents[name] for name in PARTS if name in contents}
    if not parts or any(part.get("state") != "done" or part.get("deaths") for part in parts.values()):
        return False
    return not parts.get(SELF_TEST, {}).get("failed") and bool(parts.get(FINE_TUNE, {"ok": True})["ok"])


def summary(contents: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures for a row in the table of tested GPUs; None: the part did not get that far."""
    device, test, run = (contents.get(name, {}) for name in ("device", "self-test", "fine-tune"))
    roofs = {roof["name"]: roof["per_second"] for roof in contents.get("rates", {}).get("roofs", ())}
    of_cpu = {roof["name"]: roof["per_second"] for roof in contents.get("cpu", {}).get("roofs", ())}
    arithmetic = [rate for name, rate in roofs.items() if name in ("float32", "tensor cores")]
    ratio = max(arithmetic) / of_cpu["float32"] if arithmetic and of_cpu.get("float32") else None
    return {
        "name": device.get("facts", {}).get("name"),
        "backend": device.get("facts", {}).get("backend"),
        "driver": device.get("facts", {}).get("driver"),
        "compute": device.get("fastest_compute"),
        "passed": test.get("passed"),
        "failed": test.get("failed"),
        "memory_bytes_per_second": roofs.get("memory"),
        "float32_per_second": roofs.get("float32"),
        "tensor_cores_per_second": roofs.get("tensor cores"),
        "times_cpu": ratio,
        "fine_tune_ok": run.get("ok"),
        "fine_tune_worst": run.get("worst"),
        "right": _all_right(contents),
    }


def where_to_send() -> str:
    """Return a sentence that says where to send the file, by the URL in the package's metadata if it has one."""
    try:
        urls = metadata.metadata("wgrad").get_all("Project-URL") or []
    except metadata.PackageNotFoundError:  # a checkout
        urls = []
    named = {label.strip().lower(): url.strip() for label, _, url in (entry.partition(",") for entry in urls)}
    for label in ("issues", "source", "repository", "homepage"):
        if label in named:
            address = named[label].rstrip("/").removesuffix("/issues")
            return f"Attach it to a GPU report issue: {address}/{_FORM}"
    return "Attach it to a GPU report issue of the project."
