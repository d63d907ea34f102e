"""Go on pre-training: every token of plain text is learned, by an adapter of a high rank.

    python examples/continued_pretraining.py examples/base_model examples/data/proverbs.txt

A text file, or a folder of them, is one stream of tokens that is cut into rows. The run stops by itself once the loss
on what is held out gets no better.
"""

import sys
from pathlib import Path
from typing import Any

import wgrad


class Progress(wgrad.Callback):
    def on_step(self, report: wgrad.StepReport) -> None:
        if report.step % 10 == 0:
            print(f"step {report.step}/{report.total_steps}  loss {report.loss:.3f}")

    def on_evaluation(self, report: wgrad.EvaluationReport) -> None:
        if report.loss is not None:
            print(f"held out, after step {report.step}: {report.loss:.3f} (perplexity {report.perplexity:.1f})")


def main(model: str, data: str, out: str = "out/pretrained", **options: Any) -> wgrad.FinetuneResult:
    defaults: dict[str, Any] = {
        "lora_r": 64,
        "max_length": 256,
        "batch_size": 4,
        "gradient_accumulation_steps": 1,
        "epochs": 4,
        "learning_rate": 1e-3,
    }
    defaults |= {"eval_fraction": 0.1, "eval_steps": 20, "early_stopping_patience": 2}
    result = wgrad.finetune(model=model, data=data, out=out, callbacks=[Progress()], **defaults | options)
    text = Path(data).read_text(encoding="utf-8")[:400]
    for adapter in (None, result.out):
        with wgrad.load(model, adapter, device=options.get("device", "auto"), context=256) as loaded:
            print(f"{'with' if adapter else 'without'} the adapter: perplexity {loaded.score(text).perplexity:.1f}")
    return result


if __name__ == "__main__":
    main(*sys.argv[1:3])
