"""The check of a HIP device before `--device auto` first takes it: some cases of the self-test, in another process.

An untested GPU may hang or end the process, which does no harm to another one. The verdict is kept in the user's cache
by GPU, architecture, driver version, digest of the kernels and version of wgrad, so that the check runs once. A check
that hangs or stops the machine is kept as a failure. A failure that may be temporary (no free memory, a process that
dies) is not kept.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import wgrad
from wgrad.autograd.bind import bind
from wgrad.autograd.selftest.case import Case
from wgrad.autograd.selftest.cases import cases
from wgrad.autograd.selftest.matrix_kernels import kernel_cases
from wgrad.autograd.selftest.run import compile_and_check
from wgrad.device.cache import cache_folder, keep, read_kept
from wgrad.device.child import Child, Silent
from wgrad.device.errors import DeviceError, DeviceLost

# In addition to kernel_cases (GEMMs and attention): kernels bound by memory, plain kernels and the head.
CASES = (
    "adamw/all decayed/130",
    "attention/packed/2x133x4x2x64/float16",
    "attention/odd width/1x41x4x2x40/float32",
    "attention_backward/odd width/1x41x4x2x40/float32",
    "attention_backward/grouped/2x70x6x2x64/float16",
    "clip/clipped",
    "combine/weighted/37x3x67/float16",
    "combine_backward/weighted/37x3x67/float16",
    "delta_rule/packed/2x133x1x2x10x6/float16",
    "delta_rule/steps on a state/2x3x2x4x6x70/float32",
    "delta_rule_backward/packed/2x133x1x2x10x6/float16",
    "dropout/7x123/float16",
    "embedding/float32 table/71x37,123/float32",
    "embedding_backward/71x37,123/float16",
    "fused functions/3x37x53/float32",
    "fused over 0,2/3x37x53/float32",
    "gemm_nt/epilogue/70x131x72/float16",
    "gemm_nt/row/1x123x67/float32",
    "gemm_nt/row/1x256x128/float32",
    "gemm_tn/accumulate/37x41x67/float16",
    "grad_norm/finite/1003",
    "group_by_expert/131x5x3",
    "grouped_linear/float32 rows/70x5x2x72x68/float32",
    "grouped_linear_backward/float32 rows/70x5x2x72x68/float32",
    "grouped_linear/float32 few rows/3x7x2x37x35/float32",
    "grouped_linear_backward/float32 few rows/3x7x2x37x35/float32",
    "grouped_weight_grad/float32 tiles/33x4x2x36x40/float32",
    "grouped_linear/nf4 double eights/61x5x2x72x64/float16",
    "grouped_linear/mxfp4 plain/9x3x2x24x32/float16",
    "grouped_linear_backward/nf4 double eights/61x5x2x72x64/float16",
    "grouped_weight_grad/float32 narrow/50x3x2x5x67/float16",
    "layer_norm/plain/5x64/float32>float32",
    "layer_norm/plain/33x576/float32>float32",
    "layer_norm/plain/1x2052/float32>float32",
    "layer_norm_backward/plain/5x64/float32>float32",
    "layer_norm_backward/plain/33x576/float32>float32",
    "layer_norm_backward/plain/1x2052/float32>float32",
    "linear_cross_entropy/bfloat16 weight/70x1003x64/float16*bfloat16",
    "linear_cross_entropy/bfloat16 weight/70x1003x64/float32*bfloat16",
    "log_odds/7x123/float32",
    "nf4_quantize/double block 64/35x67/float32",
    "nf4_dequantize/double/35x67/float32",
    "rms_norm/plain/5x64/float32>float32",
    "rms_norm/plain/3x1003/float32>float32",
    "rms_norm/plain/1x2052/float32>float32",
    "rms_norm_backward/plain/133x40/float32>float32",
    "rms_norm_backward/plain/3x1003/float32>float32",
    "rms_norm_backward/plain/1x2052/float32>float32",
    "rms_norm_backward/mixed/41x123/float32>float16",
    "round_weight/q4_k/27x768/float32",
    "rope/forward/1x1x6/float32",
    "rope_append/decode/1x1x2x128/float32",
    "rope_split/21x4+2x40/float16",
    "rope_split_backward/21x4+2x40/float16",
    "kv_append/float16",
    "paged_append/rotated/3x1x2x64/float32",
    "paged_attention/rows/3x4x2x64/float16",
    "route/all/41x130x8/float32",
    "route_backward/all/41x130x8/float32",
    "sample/greedy/123/0.5",
    "selective_scan/packed/2x133x21x5/float16",
    "selective_scan/steps on a state/2x3x18x6/float32",
    "selective_scan_backward/packed/2x133x21x5/float16",
    "short_conv/packed/2x133x133x12/float16",
    "short_conv_backward/packed/2x133x133x12/float16",
    "advance/2",
    "silu/7x123/float16",
    "softcap/7x123/float16",
    "softmax/41x7/float32",
    "softmax_backward/41x7/float32",
    "ssd/packed/2x133x1x2x10x6/float16",
    "ssd/steps on a state/2x3x2x4x6x70/float32",
    "ssd_backward/packed/2x133x1x2x10x6/float16",
    "storage/view and copy/float16",
)
FORMAT = 1  # version of the file with a verdict
_LARGEST = 1 << 16  # most bytes of that file
SECONDS = 600  # hiprtc may first have to compile every kernel
_CODE = "import sys; sys.path[:] = {path!r}; from wgrad.autograd.{module} import main; sys.exit(main(*{arguments!r}))"


@dataclass(frozen=True)
class Verdict:
    """Result of a check.

    passed: whether `auto` may take the device. reason: the first failure, in a line; "" if there is none. lanes: lanes
    of a subgroup in kernels on tensor cores; 0: unknown.
    """

    passed: bool
    reason: str
    lanes: int = 0


def chosen_cases() -> list[Case]:
    """Return cases that launch every kernel of training steps. Raises KeyError if the self-test lacks one of CASES."""
    found = {case.name: case for case in cases()}
    return [*(found[name] for name in CASES), *kernel_cases()]


def verdict(device: Any) -> Verdict:
    """Return whether a HIP device is right, from the cache if it was checked before with these kernels.

    device: a HipDevice, or an object with its `identity`, the texts by which verdicts are kept, and its `index`.
    """
    kept = _place(device.identity)
    try:
        known = json.loads(read_kept(kept, _LARGEST))
        # A check that was begun since the machine started may still run in another process, or was stopped.
        if known["format"] == FORMAT and not (known.get("begun") and known["begun"] == _start_of_machine()):
            return Verdict(bool(known["passed"]), f"{known['reason']}{_again(kept) * (not known['passed'])}")
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        pass  # missing, damaged or of another format: check now
    if begun := _start_of_machine():
        _note(kept, device, Verdict(False, "the machine stopped while it ran"), begun=begun)
    found, lasting = check_in_a_process("selftest.probe", str(device.index))
    if lasting:
        _note(kept, device, found)
    elif begun:
        with suppress(OSError):
            kept.unlink()
    return found


def _again(kept: Path) -> str:
    return f" (kept in {kept}: delete it to check again)"


def _note(kept: Path, device: Any, found: Verdict, **more: str) -> None:
    text = json.dumps({"format": FORMAT, "device": device.identity, **asdict(found), **more}) + "\n"
    with suppress(OSError):  # checked again next time
        keep(kept, text.encode())


def _start_of_machine() -> str:
    """Return a text that changes with each start of the machine; "": the system has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _place(identity: tuple[str, ...]) -> Path:
    digest = hashlib.sha256(
        "\0".join((*identity, wgrad.__version__, *(c.name for c in chosen_cases()))).encode()
    ).hexdigest()
    return cache_folder("hip") / f"self-check-{digest[:16]}.json"


def check_in_a_process(module: str, *arguments: str, environment: dict[str, str] | None = None) -> tuple[Verdict, bool]:
    """Run `main(*arguments)` of a module of autograd in a new process. Return the verdict, and whether to keep it."""
    child = Child(
        _CODE.format(path=sys.path, module=module, arguments=arguments), {**os.environ, **(environment or {})}
    )
    try:
        while (line := child.line(SECONDS)) is not None:
            if found := _verdict_in(line):  # do not wait for the end, at which a driver may hang
                return found
        status = child.status(SECONDS)
    except Silent:
        return Verdict(False, f"no result within {SECONDS} s"), True  # kept, since it would hang again and take as long
    finally:
        child.end()
    last = child.errors[-1:] or ["it said nothing"]
    how = f"crashed (signal {-status})" if status < 0 else f"ended with status {status}"
    return Verdict(False, f"the check {how}: {last[0][:200]}"), False


def _verdict_in(line: str) -> tuple[Verdict, bool] | None:
    """Parse a line of `report`: the verdict, and whether to keep it; None: the line is another, such as a driver's."""
    try:
        said = json.loads(line)
        return Verdict(bool(said["passed"]), str(said["reason"]), int(said.get("lanes", 0))), bool(said["keep"])
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def report(make_device: Callable[[], Any], selected: list[Case]) -> int:
    """Run cases in this process and print {"passed", "reason", "keep", "lanes"} as JSON."""
    try:
        device = make_device()
        results = compile_and_check(device, selected)
    except DeviceError as error:  # a check that loses the GPU would lose it again
        said = {"passed": False, "reason": str(error).splitlines()[0][:300], "keep": isinstance(error, DeviceLost)}
        print(json.dumps(said))
        return 0
    wrong = [r for r in results if not r.ok]
    reason = ""
    if wrong:
        first = wrong[0]
        what = first.message or f"{first.output} is off by {first.error:.2g}, allowed {first.limit:.2g}"
        reason = f"{len(wrong)} of {len(results)} cases failed, first {first.name}: {what[:200]}"
    lasting = not any("OutOfMemory" in r.message for r in wrong)
    said = {"passed": not wrong, "reason": reason, "keep": lasting, "lanes": getattr(device, "lanes", 0)}
    print(json.dumps(said))
    return 0


def main(gpu: str) -> int:
    """Check a HIP device in this process."""
    from wgrad.hip.device import HipDevice

    return report(lambda: bind(HipDevice)(gpu), chosen_cases())
