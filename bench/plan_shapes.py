"""Compare `wgrad plan` with the memory that runs of ten shapes report, by the commands alone.

    python bench/plan_shapes.py [--device wgpu] [--model DIR] [--data FILE] [--out FILE]

Each shape is planned, and then run for three steps with an evaluation and a sample before, between and after. Status 1
where one is further off than 5 %. As it is: the embedded model, which any device runs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import RESULTS

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
LIMIT = 0.05  # of what the run reports
SHAPES = {
    "short rows": "--max-length 64 --batch-size 1",
    "many short rows": "--max-length 64 --batch-size 24",
    "odd rows": "--max-length 123 --batch-size 3",
    "long rows": "--max-length 512 --batch-size 2 --no-gradient-checkpointing",
    "long rows, recomputed": "--max-length 512 --batch-size 2 --gradient-checkpointing",
    "one very long row, recomputed": "--max-length 2048 --gradient-checkpointing",
    "float16, recomputed": "--max-length 256 --batch-size 4 --compute float16 --gradient-checkpointing",
    "rank 64, dropout": "--max-length 200 --batch-size 2 --lora-r 64 --lora-dropout 0.1",
    "everything trained": "--max-length 128 --batch-size 4 --full",
    "chosen for 40 MiB": "--max-length 256 --batch-size 4 --gradient-accumulation-steps 2 --vram 40MiB",
}


def command(*words: object) -> str:
    """Standard output of `wgrad ...`."""
    done = subprocess.run([sys.executable, "-m", "wgrad", *map(str, words)], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"wgrad {' '.join(map(str, words))}: {done.stderr.strip()}")
    return done.stdout


def measure(options: list[str], model: str, data: str, device: str) -> dict[str, Any]:
    """Planned and reported bytes of one shape."""
    given = ["--model", model, "--device", device, *options]
    plan = json.loads(command("plan", *given, "--json"))
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "out")
        steps = ["--max-steps", 3, "--eval-steps", 2, "--eval-tokens", 256]
        accumulate = [] if "--gradient-accumulation-steps" in options else ["--gradient-accumulation-steps", 2]
        command("finetune", *given, "--data", data, "--out", out, *steps, *accumulate)
        reported = json.loads((out / "results.json").read_text(encoding="utf-8"))["peak_bytes"]
    off = plan["peak_bytes"] / reported - 1
    return {"device": plan["device"], "planned": plan["peak_bytes"], "reported": reported, "off": off}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="wgpu")
    parser.add_argument("--model", default=str(EXAMPLES / "base_model"))
    parser.add_argument("--data", default=str(EXAMPLES / "data" / "proverbs.txt"))
    parser.add_argument("--out", default=str(RESULTS / "plan_shapes.jsonl"))
    args = parser.parse_args()
    rows = []
    for name, options in SHAPES.items():
        rows.append({"shape": name, "options": options, **measure(options.split(), args.model, args.data, args.device)})
        print(json.dumps(rows[-1]), flush=True)
    Path(args.out).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return int(any(abs(row["off"]) > LIMIT for row in rows))


if __name__ == "__main__":
    sys.exit(main())
