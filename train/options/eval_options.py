"""The options of `wgrad eval`: those of a run that determine its held-out loss; `choice_options.py` has the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from wgrad.device.errors import WgradError
from wgrad.train.options.choice_options import SHOTS_SEED, ChoiceOptions
from wgrad.train.options.choices import TEMPLATE_HELP
from wgrad.train.options.data_sources import sources_of
from wgrad.train.options.finetune_config import DEVICE_HELP, STREAM_HELP, RunOptions
from wgrad.train.options.options import flag
from wgrad.train.options.unused_options import unused_options

# Fields, with their help if they mean something else here than in a run.
EVAL_OPTIONS = {
    "model": "model: a folder, a GGUF file, or a Hub id such as org/name; needed unless --adapter names it",
    "adapter": "PEFT adapter to compare with the model",
    "data": "file to measure on, in any format that finetune takes as its --data",
    "chat_template": TEMPLATE_HELP,
    **dict.fromkeys(("columns", "on_bad_line"), ""),
    **dict.fromkeys(("quantize", "double_quant", "block_size", "max_length", "packing"), ""),
    "batch_size": "sequences that are measured at once (default: 1)",
    "loss_on": "",
    "eval_tokens": "measure on about this many tokens, as a run does; 0: on all (default: 0)",
    "seed": "seed of the draw of --eval-tokens (default: 0) or of --shots (default: 1234, as lm-eval)",
    "device": f"{DEVICE_HELP} (default: auto)",
    "stream_weights": f"{STREAM_HELP} (default: auto)",
    **dict.fromkeys(("compute", "memory_limit"), ""),
}

_OF_DATA = ("data", "columns", "on_bad_line", "loss_on", "eval_tokens")  # options without effect under --choices


def eval_options(given: Mapping[str, Any], choices: ChoiceOptions) -> RunOptions:
    """Return the options as those of a run that holds out nothing of --data.

    Raises:
        WgradError: An option is missing or would have no effect.
    """
    seed = SHOTS_SEED if choices.choices else 0
    config = RunOptions(**{"eval_tokens": 0, "seed": seed, **given, "eval_fraction": 0.0, "sample": False})
    if not config.model and not config.adapter:
        raise WgradError("--model is required: give it, or an --adapter that names it")
    if not config.data and not choices.choices:
        raise WgradError("--data is required: give it, or --choices FILE")
    for name in _OF_DATA if choices.choices else ():
        if name in given:
            raise WgradError(f"{flag(name)}: would be ignored: --choices scores every question as it is: leave it out")
    if choices.choices and "seed" in given and not (choices.shots and choices.shots_order == "random"):
        drawn = "with --shots-order first" if choices.shots else "without --shots"
        raise WgradError(f"--seed: would be ignored: nothing is drawn {drawn}: leave it out")
    if any(source.weight is not None for source in sources_of(config.data)):
        raise WgradError("--data: a weight has no effect here, where each example is measured once: leave it out")
    for name, reason in unused_options(config.to_dict()).items():
        if name in given:
            raise WgradError(f"{flag(name)}: would be ignored: {reason}: leave it out")
    return config
