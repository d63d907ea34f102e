"""Effect of 16-bit gradients between hosts on the loss: the embedded model, two ranks that take each other for hosts.

    python bench/bench_exchange_bits.py [--steps 128] [--seeds 0,1] [--out FILE]

Held-out loss after training at --exchange-bits 32, at 16, and at 16 where what is rounded away is dropped instead of
being added in the next step; everything else is the same. Prints docs/how-to/several-gpus.md's table.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from common import Report

from wgrad.autograd.reference import ReferenceDevice
from wgrad.train.ranks.launch import mpirun

EXAMPLES = Path(__file__).parents[1] / "examples"
RUN = "import sys; from wgrad.train.commands.cli import main; sys.exit(main(sys.argv[1:]))"
FORGET = (
    "import wgrad.train.ranks.rounded_sum as r; "
    "r.round_off = lambda values, out, error, f=r.round_off: f(values, out, 0 * error); "
)
KINDS = {"32 bits": (32, ""), "16 bits": (16, ""), "16 bits, error dropped": (16, FORGET)}


def held_out_loss(kind: str, seed: int, steps: int, out: Path) -> float:
    """After a run of two ranks, each of a host of its own name."""
    bits, before = KINDS[kind]
    options = {
        "--model": EXAMPLES / "base_model", "--data": EXAMPLES / "data" / "proverbs.jsonl", "--out": out,
        "--device": "cpu", "--seq-len": 128, "--batch-size": 4, "--accumulate": 2, "--lr": 2e-3, "--max-steps": steps,
        "--epochs": 1000, "--seed": seed, "--exchange-bits": bits, "--save-every": 0,
    }  # fmt: skip
    command = [mpirun(), "--oversubscribe", "--bind-to", "none"]
    for host in ("one", "two"):
        code = f"import socket; socket.gethostname = lambda: {host!r}; {before}{RUN}"
        command += [":"] * (host == "two") + ["-n", "1", sys.executable, "-c", code, "finetune", "--no-sample"]
        command += [str(word) for pair in options.items() for word in pair]
    environment = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", **os.environ}
    environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
    return float(json.loads((out / "results.json").read_text())["held_out_loss_after"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=128)
    parser.add_argument("--seeds", default="0,1")
    parser.add_argument("--out", default=None)
    args = parser.parse_args()
    report = Report("exchange_bits", ReferenceDevice(), args.out)
    print("|  | " + " | ".join(KINDS) + " |\n" + "| --- " * (1 + len(KINDS)) + "|")
    for seed in (int(word) for word in args.seeds.split(",")):
        losses = []
        for kind in KINDS:
            with tempfile.TemporaryDirectory() as folder:
                losses.append(held_out_loss(kind, seed, args.steps, Path(folder) / "out"))
            report.row(what="loss", kind=kind, seed=seed, steps=args.steps, held_out_loss=losses[-1])
        print(f"| seed {seed} | " + " | ".join(f"{loss:.5f}" for loss in losses) + " |")


if __name__ == "__main__":
    main()
