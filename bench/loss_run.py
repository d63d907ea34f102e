"""Check that a faster way to compute learns what float32 learns, by held-out losses of the embedded model.

    python bench/loss_run.py [--device auto] [--compute float16] [--int8-matmul] [--steps 1000] [--keep FOLDER]

Two runs of `wgrad finetune` that differ in --compute, or with --int8-matmul in that alone. Prints the losses and
exits with 1 where they end further than 1 % apart. On a GPU it takes a minute or two; a software driver needs hours
for 1,000 steps.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
WITHIN = 0.01
OPTIONS = {
    "--model": ROOT / "examples" / "base_model", "--data": ROOT / "examples" / "data" / "proverbs.jsonl",
    "--max-length": 128, "--batch-size": 8, "--gradient-accumulation-steps": 1,
    "--learning-rate": 2e-4, "--eval-fraction": 0.1, "--eval-tokens": 0,
    "--epochs": 1000, "--save-steps": 0,
}  # fmt: skip


def run(out: Path, compute: list[str], device: str, steps: int) -> dict[str, float]:
    """results.json of a run. SystemExit where it failed."""
    words = [str(part) for pair in OPTIONS.items() for part in pair]
    words += ["--out", str(out), *compute, "--device", device, "--max-steps", str(steps), "--no-sample"]
    if subprocess.run([sys.executable, "-m", "wgrad", "finetune", *words]).returncode:
        raise SystemExit(f"{' '.join(compute)}: the run failed")
    return json.loads((out / "results.json").read_text(encoding="utf-8"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--compute", default="float16", choices=("float16", "bfloat16"))
    parser.add_argument("--int8-matmul", action="store_true", help="in float32, instead of --compute")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--keep", type=Path, help="folder for the two runs (default: none is kept)")
    args = parser.parse_args()
    exact = ["--compute", "float32"]
    name = "int8 products" if args.int8_matmul else args.compute
    ways = {"float32": exact, name: [*exact, "--int8-matmul"] if args.int8_matmul else ["--compute", name]}
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.keep or Path(scratch)
        found = {way: run(folder / way, words, args.device, args.steps) for way, words in ways.items()}
    wide, narrow = (result["held_out_loss_after"] for result in found.values())
    apart = narrow / wide - 1
    for way, result in found.items():
        text = f"held-out loss {result['held_out_loss_before']:.4f} -> {result['held_out_loss_after']:.4f}"
        print(f"{way}: {text}, {result['skipped_steps']} of {args.steps} steps skipped")
    print(f"{name} ends {apart:+.2%} from float32; allowed {WITHIN:.0%}")
    return 0 if abs(apart) <= WITHIN else 1


if __name__ == "__main__":
    sys.exit(main())
