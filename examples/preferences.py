"""Teach a model what to prefer (DPO): of two answers to a prompt, one is chosen and one rejected.

    python examples/preferences.py examples/base_model

The reference is the same model with the adapter off: no second model is loaded.
"""

import sys
from typing import Any

import wgrad

PROMPTS = ["A wise son", "A soft answer", "The fear of the LORD", "Go to the ant, thou sluggard;", "Pride goeth before"]
PAIRS = [
    {"prompt": prompt, "chosen": f" is better than {thing}.", "rejected": f" is worse than {thing}, they say."}
    for prompt in PROMPTS
    for thing in ("gold", "rubies", "much strife", "a great treasure")
]


def main(model: str, out: str = "out/preferences", **options: Any) -> tuple[float, float]:
    defaults: dict[str, Any] = {
        "beta": 0.1,
        "learning_rate": 5e-4,
        "epochs": 2,
        "gradient_accumulation_steps": 2,
        "max_length": 64,
    }
    result = wgrad.finetune(model=model, data=PAIRS, out=out, objective="dpo", **defaults | options)
    margins = []
    for adapter in (None, result.out):
        with wgrad.load(model, adapter, device=options.get("device", "auto"), context=128) as loaded:
            chosen, rejected = (
                loaded.score({"prompt": PAIRS[0]["prompt"], "completion": PAIRS[0][which]}).log_prob
                for which in ("chosen", "rejected")
            )
        margins.append(chosen - rejected)
    print(f"chosen over rejected, in nats: {margins[0]:.2f} before, {margins[1]:.2f} after")
    return margins[0], margins[1]


if __name__ == "__main__":
    main(*sys.argv[1:2])
