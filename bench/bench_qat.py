"""Perplexity of an adapter on its base and merged into GGUF, trained with --qat and without.

    python bench/bench_qat.py --model examples/base_model --data examples/data/proverbs.txt --max-steps 200

Every tenth line of the data is held out. Options that are not named here go to `wgrad finetune`. A row of the table:
what the adapter was trained with, the perplexity of the adapter on the base, of the merged file, and their ratio.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import tempfile
from pathlib import Path

from wgrad.train.commands.cli import main as wgrad
from wgrad.train.model.qat import QAT_MIXES


def run(*words: str) -> str:
    """The standard output of a command. RuntimeError where it fails."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        status = wgrad(list(words))
    if status:
        raise RuntimeError(f"wgrad {' '.join(words)}: status {status}")
    return out.getvalue()


def perplexity(measured: list[str], *words: str, of: str = "base") -> float:
    found: float = json.loads(run("eval", *words, *measured, "--json"))[of]["perplexity"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True, type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--max-length", default="128")
    parser.add_argument("--eval-tokens", default="0", help="held-out tokens; 0: all")
    parser.add_argument("--qat", nargs="*", default=list(QAT_MIXES), choices=list(QAT_MIXES))
    args, more = parser.parse_known_args()
    lines = args.data.read_text(encoding="utf-8").splitlines(keepends=True)
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        train, held = here / f"train{args.data.suffix}", here / f"held{args.data.suffix}"
        train.write_text("".join(line for i, line in enumerate(lines) if i % 10), encoding="utf-8")
        held.write_text("".join(lines[::10]), encoding="utf-8")
        common = ["--max-length", args.max_length, "--device", args.device, "--eval-tokens", args.eval_tokens]
        measured = ["--data", str(held), *common]
        print(f"base model: {perplexity(measured, '--model', args.model, '--no-quantize'):.4f}", flush=True)
        print("| trained | merged as | adapter on its base | merged | ratio |\n| --- | --- | --- | --- | --- |")
        for qat in (None, *args.qat):
            out = here / (qat or "plain")
            given = ["--model", args.model, "--data", str(train), "--eval-data", str(held), "--out", str(out)]
            given += ["--no-quantize", "--no-sample", *common, *more, *(["--qat", qat] if qat else [])]
            run("finetune", *given)
            alone = perplexity(measured, "--adapter", str(out), "--no-quantize", of="adapter")
            for mix in [QAT_MIXES[q] for q in ([qat] if qat else args.qat)]:
                merged = here / f"{out.name}-{mix}"
                words = ["--adapter", str(out), "--out", str(merged), "--format", "gguf", "--quantize", mix]
                run("merge", *words, "--device", args.device, "--no-compare")
                ppl = perplexity(measured, "--model", str(merged))
                how = f"--qat {qat}" if qat else "without"
                print(f"| {how} | {mix} | {alone:.4f} | {ppl:.4f} | {ppl / alone:.4f} |", flush=True)


if __name__ == "__main__":
    main()
