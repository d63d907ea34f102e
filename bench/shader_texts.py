"""Write the assembled text of every shader variant that the self-test and three training steps launch, to compare two
versions of the shaders: `python bench/shader_texts.py FILE.json`, then `--compare OTHER.json`.

No device is needed. All device profiles are taken, with and without tensor cores. Comments are left out.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

from wgrad.autograd.bind import bind
from wgrad.autograd.selftest.case import upload_inputs
from wgrad.autograd.selftest.cases import cases
from wgrad.autograd.selftest.matrix import matrix_cases
from wgrad.device.errors import WgradError
from wgrad.train.commands.bundle_cases import training_cases
from wgrad.wgsl.webgpu_trace import PROFILES, TraceDevice


def texts() -> list[str]:
    """The distinct texts, sorted. An unsupported combination of case and device has none."""
    found: set[str] = set()
    listed = [*cases(), *training_cases()]
    for tensor_cores in (False, True):
        for profile in PROFILES:
            if tensor_cores and profile.software:
                continue
            like = None
            for case in [*listed, *(matrix_cases() if tensor_cores else ())]:
                device = bind(TraceDevice)(profile, like)
                device.matrix_units = device.stacks_weights = tensor_cores
                like = like or device
                try:
                    case.call(device, upload_inputs(device, case.inputs()))
                except WgradError:
                    continue
                device.flush()
                found.update(f"// {shader.entry}\n{_bare(shader.code)}" for shader in device.trace.shaders)
    return sorted(found)


def _bare(code: str) -> str:
    lines = (re.sub(r"\s*//.*", "", line).rstrip() for line in code.splitlines())
    return "\n".join(line for line in lines if line.strip())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--compare", type=Path, help="what an earlier version wrote: exit with 1 where they differ")
    args = parser.parse_args()
    now = texts()
    args.file.write_text(json.dumps(now), encoding="utf-8")
    print(f"{len(now)} variants")
    if args.compare:
        before = json.loads(args.compare.read_text(encoding="utf-8"))
        lost, new = set(before) - set(now), set(now) - set(before)
        print(f"{len(lost)} of before are gone, {len(new)} are new")
        raise SystemExit(bool(lost or new))


if __name__ == "__main__":
    main()
