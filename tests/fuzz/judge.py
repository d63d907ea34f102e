"""The fuzzer's oracle: rules that every case must obey, whatever its files and options."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import safetensors.numpy

from tests.fuzz.case import OUT, Case
from tests.fuzz.execute import TRACEBACK_STATUS, Outcome

MEMORY_BASE = 256 << 20  # bytes, whatever the input: imports, compiled templates, arrays of a batch
MEMORY_FACTOR = 4  # bytes for a byte of a larger input
ALLOWED = (0, 2)
UNUSABLE = 1  # a run that ended, but whose result is not usable (not finite)
LONGEST_ERROR = 1500  # characters
RESULTS = ("adapter_model.safetensors", "model.safetensors", "results.json")
_NOISE = re.compile(r"Traceback \(most recent|Warning: |Exception ignored|panicked at|Fatal Python error")


def judge(case: Case, outcome: Outcome, folder: Path) -> str | None:
    """Return a description of the fault in one line, equal for equal faults; None: there is none."""
    left = f"left changed: {outcome.left}" if outcome.left else None
    rules = (_ending, _messages, _memory)
    return next(filter(None, (rule(case, outcome) for rule in rules)), None) or _folder(case, outcome, folder) or left


def _ending(case: Case, outcome: Outcome) -> str | None:
    if outcome.timed_out:
        return f"hang: no end after {outcome.cpu_seconds:.0f} s of computing"
    if outcome.status < 0:
        return f"crash: signal {-outcome.status}: {_last_line(outcome.stderr)}"
    if outcome.status == TRACEBACK_STATUS or "Traceback (most recent" in outcome.stderr:
        return f"traceback: {_place(outcome.stderr)}"
    if outcome.status in ALLOWED:
        return None
    if outcome.status == UNUSABLE and (case.stdout or _loses_errors(case) or _says_unusable(outcome)):
        return None
    return f"status {outcome.status}: {_last_line(outcome.stderr)}"


def _says_unusable(outcome: Outcome) -> bool:
    errors = [line for line in outcome.stderr.splitlines() if line.startswith("wgrad: error: ")]
    return bool(re.search(r"not finite|skipped|no trial has a held-out loss", outcome.stderr)) and len(errors) == 1


def _loses_errors(case: Case) -> bool:
    """Return whether an error's line cannot be written."""
    return 2 in case.around.get("closed", ()) or case.around.get("written", LONGEST_ERROR) < LONGEST_ERROR


def _messages(case: Case, outcome: Outcome) -> str | None:
    if _loses_errors(case):
        return None
    if case.around.get("environment"):  # which may tell that stderr is a terminal, where bars are drawn
        outcome = replace(outcome, stderr=_undrawn(outcome.stderr))
    noise = _NOISE.search(outcome.stderr)
    if noise:
        line = next(line for line in outcome.stderr.splitlines() if noise.group(0) in line)
        return f"noise on stderr: {_shorten(line)}"
    errors = [line for line in outcome.stderr.splitlines() if line.startswith("wgrad: error: ")]
    if outcome.status == 2 or (outcome.status == UNUSABLE and not case.stdout):
        if len(errors) != 1 or outcome.stderr.splitlines()[-1] != errors[0]:
            return f"{len(errors)} error lines: {_last_line(outcome.stderr)}"
        said = ("device: ", "compute: ", "note: ", "warning: ", "importance matrix: ")
        rest = [line for line in outcome.stderr.splitlines()[:-1] if not line.startswith(said)]
        if rest:
            return f"more than one line: {_shorten(rest[0])}"
        if len(errors[0]) > LONGEST_ERROR:
            return f"an error of {len(errors[0])} characters: {_shorten(errors[0])}"
        if "\x00" in errors[0] or "\x1b" in errors[0]:
            return f"control characters in the error: {_shorten(errors[0])}"
    elif outcome.status == 0 and errors and case.argv[:1] != ["chat"]:  # which goes on with the next line
        return f"status 0 with an error: {_shorten(errors[0])}"
    return None


def _undrawn(text: str) -> str:
    """Return the lines of a terminal that are no bars, which have colors, without codes that move and erase."""
    lines = re.split(r"\n|\r|\x1b\[[0-9]*[AK]", text)
    plain = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line) for line in lines if not re.search(r"\x1b\[[0-9;]*m", line)]
    return "".join(f"{line}\n" for line in plain if line)


def _memory(case: Case, outcome: Outcome) -> str | None:
    allowed = max(MEMORY_BASE, MEMORY_FACTOR * case.input_bytes())
    if outcome.grown > allowed:
        return f"memory: {outcome.grown >> 20} MiB for an input of {case.input_bytes()} bytes"
    if "out of main memory" in outcome.stderr and not case.kind.startswith("option"):
        return f"memory: {_last_line(outcome.stderr)}"
    return None


def _folder(case: Case, outcome: Outcome, folder: Path) -> str | None:
    """Nothing half-written: what is in the output folder is whole, and a result is there only where the run says so."""
    partial = [p.name for p in folder.rglob("*.partial")]
    if partial and not {"modes", "files"} & set(case.around):  # which may forbid to remove it
        return f"left half-written: {re.sub(r'[0-9]+', 'N', partial[0])}"
    out = folder / OUT
    if not out.is_dir() or case.argv[:1] != ["finetune"]:
        return None
    for name in RESULTS:
        path = out / name
        new = path.is_file() and f"{OUT}/{name}" not in case.files and "finished" not in case.base
        if new and outcome.status != 0 and not case.around:  # a file may be refused after the result
            return f"status {outcome.status}, and yet there is {name}"
        if new and name.endswith(".json"):
            try:
                json.loads(path.read_bytes())
            except ValueError as error:
                return f"{name} is not JSON: {error}"
        elif new:
            values = safetensors.numpy.load_file(path)
            if not all(np.isfinite(v).all() for v in values.values()):
                return f"a result that is not finite was written: {name}"
    return None


def _place(stderr: str) -> str:
    """'TypeError at model_config.py:94 in parse_model_config': the innermost frame of this project."""
    frames = re.findall(r'File "([^"]+)", line (\d+), in (\S+)', stderr)
    own = re.compile(r"/(?:train|autograd|wgsl|hip|device)/(?:\w+/)*\w+\.py$")
    ours = [f for f in frames if own.search(f[0]) and "-packages/" not in f[0]] or frames[-1:]
    kind = re.split(r"[:\s]", _last_line(stderr, 400))[0]
    if not ours:
        return kind
    path, line, function = ours[-1]
    return f"{kind} at {Path(path).name}:{line} in {function}: {_last_line(stderr)}"


def _last_line(text: str, limit: int = 160) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return _shorten(lines[-1], limit) if lines else ""


def _shorten(text: str, limit: int = 160) -> str:
    return text if len(text) <= limit else text[:limit] + "..."


def signature(finding: str) -> str:
    """Return a finding's text without numbers and quoted parts, which is the same for all findings of one fault."""
    if finding.startswith("traceback"):
        return re.sub(r"( in [^:]*):.*", r"\1", finding)
    return re.sub(r"'[^']*'|\"[^\"]*\"|\d+", "#", finding)[:90]
