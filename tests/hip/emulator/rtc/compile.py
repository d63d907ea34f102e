"""The compiler behind the emulated libhiprtc.so: `python compile.py FOLDER NAME` compiles FOLDER/NAME.

First for the GPU that FOLDER/options names, by hiprtc's rules: no header but those in FOLDER, and HIP's own device
functions and types are in the global namespace already (clang's HIP headers, and a `half`). Then for the CPU, into
FOLDER/image, which the emulated GPU runs. What goes wrong is in FOLDER/log.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

BUILDER = Path(__file__).resolve().parents[1] / "build.py"
# GPUs that the emulator runs with the kernels of another one, which clang 19 knows.
HOST = {"gfx950": 942}
CLANG = "clang-19"


def check_by_the_rules(folder: Path, name: str, options: list[str], clang: str = CLANG) -> str:
    """Return clang's errors about the program; empty without any."""
    found = subprocess.run([clang, "-print-resource-dir"], capture_output=True, text=True, check=True).stdout.strip()
    prelude = folder / "prelude.h"
    prelude.write_text(f'#include "{found}/include/__clang_hip_runtime_wrapper.h"\nstruct half {{ short bits; }};\n')
    command = [
        clang, "-x", "hip", "--cuda-device-only", "-nogpulib", "-nogpuinc", "-nostdlibinc", "-D__HIPCC_RTC__",
        "-include", str(prelude), *options, "-fsyntax-only", name,
    ]  # fmt: skip
    return subprocess.run(command, cwd=folder, capture_output=True, text=True).stderr


def main() -> int:
    folder, name = Path(sys.argv[1]), sys.argv[2]
    options = (folder / "options").read_text().split()
    wrong = check_by_the_rules(folder, name, [o.replace("gfx950", "gfx942") for o in options])
    if "error:" in wrong:
        (folder / "log").write_text(wrong)
        return 1
    spec = importlib.util.spec_from_file_location("emulator_build", BUILDER)
    assert spec is not None and spec.loader is not None
    builder = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(builder)
    builder.HOST.update(HOST)
    (architecture,) = (o.partition("=")[2] for o in options if o.startswith("--offload-arch="))
    made = builder.build_kernels(folder / name, architecture, folder / "built")
    made.replace(folder / "image")
    return 0


if __name__ == "__main__":
    sys.exit(main())
