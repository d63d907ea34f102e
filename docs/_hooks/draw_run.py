"""Draw docs/assets/run.svg, README's picture of a run: `python docs/_hooks/draw_run.py`, with wgrad installed."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).parents[2]
OPTIONS = (
    "--epochs 3 --max-length 128 --batch-size 8 --gradient-accumulation-steps 1 "
    "--learning-rate 2e-3 --eval-fraction 0.1 --logging-steps 5"
)
SHOWN = "wgrad finetune --model examples/base_model --data examples/data/proverbs.jsonl --out out/proverbs"
WIDTH = 118
STEPS = 5  # lines of steps, of which a slow machine prints more


def main() -> None:
    """Run the README's example and export what it prints, long lines cut."""
    with tempfile.TemporaryDirectory() as folder:
        command = SHOWN.replace("out/proverbs", f"{folder}/out/proverbs").split()
        done = subprocess.run([*command, *OPTIONS.split()], cwd=ROOT, capture_output=True, text=True, check=True)
        lines = done.stdout.replace(f"{folder}/", "").splitlines()
    steps = [line for line in lines if line.startswith("step ")]
    kept = {steps[n * (len(steps) - 1) // (STEPS - 1)] for n in range(STEPS)}
    console = Console(record=True, width=WIDTH, file=open("/dev/null", "w"), force_terminal=True)
    console.print(Text(f"$ {SHOWN} ...", style="bold"))
    for line in lines:
        if line in set(steps) - kept or re.match(r"compiling |held-out loss +\d+/", line):  # progress of a slow machine
            continue
        line = line if len(line) <= WIDTH else line[: WIDTH - 1] + "…"
        style = "green" if line.startswith(("held-out", "done")) else ""
        console.print(Text(line, style=style), no_wrap=True)
    svg = console.export_svg(title="wgrad finetune", clear=False, unique_id="run")
    svg = re.sub(r"\s*@font-face \{.*?\}", "", svg, flags=re.DOTALL)  # fonts of another host
    (ROOT / "docs" / "assets" / "run.svg").write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    main()
