"""The adapter that a run's options ask for."""

from __future__ import annotations

from wgrad.device.errors import WgradError
from wgrad.train.model.lora import ALL_LINEAR, LoraConfig, ends_with, expert_modules, linear_modules, own_name
from wgrad.train.model.lora_variants import variant_of
from wgrad.train.model.model_config import ModelConfig
from wgrad.train.options.choices import LORA
from wgrad.train.options.finetune_config import RunOptions
from wgrad.train.options.input_options import PROJECTIONS


def lora_config(config: RunOptions, model: ModelConfig) -> LoraConfig:
    """Return the adapter that the options ask for; by default one of every projection of this model."""
    if config.lora_variant:
        variant_of(config.lora_variant, "--lora-variant")
    named = [name.partition("=") for name in config.target_modules]
    # PEFT takes the first pattern that matches, so longer, more specific names come first.
    ranks = {name: int(rank) for name, _, rank in sorted(named, key=lambda n: -len(n[0])) if rank}
    targets: tuple[str, ...] | str = tuple(dict.fromkeys(name for name, _, _ in named))
    is_default = False  # default names never mean experts
    unadapted = model.linear.unadapted if model.linear is not None else ()
    if targets == (ALL_LINEAR,) and not unadapted:
        targets = ALL_LINEAR
    elif is_default := targets in (PROJECTIONS, (ALL_LINEAR,)):
        # PEFT would apply names of MLP projections to the experts, and to an attention gate of such a name.
        own = targets == PROJECTIONS and model.experts is not None
        taken = (".mlp.", *filter(None, [model.attention_gate_proj])) if own else ()
        paths = [path for path in linear_modules(model) if not any(part in path for part in taken)]
        targets = tuple(dict.fromkeys(own_name(path) for path in paths if not path.endswith(unadapted)))
    parameters: tuple[str, ...] = ()
    if isinstance(targets, tuple) and not is_default:
        of_experts = [t for t in targets if any(ends_with(path, t) for path in expert_modules(model))]
        parameters, targets = tuple(of_experts), tuple(t for t in targets if t not in of_experts)
    if parameters:
        _check_experts(config, parameters[0])
    chosen = ((model.embedding.rpartition(".")[2], config.train_embeddings), ("lm_head", config.train_head))
    whole = tuple(name for name, trained in chosen if trained)
    return LoraConfig(
        config.lora_r,
        config.lora_alpha,
        config.lora_dropout,
        config.use_rslora,
        targets,
        ranks,
        {},
        whole,
        config.use_dora,
        parameters,
        config.lora_variant,
    )


def _check_experts(config: RunOptions, target: str) -> None:
    """Raise WgradError for options that adapters of experts do not have, as in PEFT."""
    asked: dict[str, object] = {"--lora-dropout": config.lora_dropout, "--use-dora": config.use_dora}
    asked |= {"--lora-variant": config.lora_variant}
    asked |= {"--init-lora-weights": config.init_lora_weights != LORA}
    for option, value in asked.items():
        if value:
            raise WgradError(
                f"{option}: cannot be combined with {target}, which is a module of experts: leave one of the two out"
            )
