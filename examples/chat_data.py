"""Fine-tune an instruct model on conversations, and talk to the result.

    python examples/chat_data.py HuggingFaceTB/SmolLM2-135M-Instruct

Only what the assistant says is learned. The model's own chat template puts the turns together, so it has to have one.
"""

import sys
from collections.abc import Iterator
from typing import Any

import wgrad

FACTS = {
    "Who wrote Emma?": "Jane Austen, in 1815.",
    "Who wrote Middlemarch?": "George Eliot, in 1871.",
    "Who wrote Jane Eyre?": "Charlotte Brontë, in 1847.",
    "Who wrote Dracula?": "Bram Stoker, in 1897.",
}


def conversations(times: int = 10) -> Iterator[dict[str, Any]]:
    """Any iterable of records will do: a list, a generator such as this one, a data set of the package datasets."""
    for _ in range(times):
        for question, answer in FACTS.items():
            turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            yield {"messages": turns}


def main(model: str, out: str = "out/chat", **options: Any) -> str:
    result = wgrad.finetune(
        model=model, data=conversations(), out=out, **{"epochs": 3, "learning_rate": 1e-3} | options
    )
    print(f"held-out loss: {result.held_out_loss_before:.3f} before, {result.held_out_loss_after:.3f} after")
    with wgrad.load(model, result.out, device=options.get("device", "auto"), context=256) as loaded:
        answer = loaded.generate([{"role": "user", "content": "Who wrote Emma?"}], temperature=0, max_new_tokens=24)
    print(answer.text)
    return answer.text


if __name__ == "__main__":
    main(*sys.argv[1:3])
