"""Logits, loss and gradients of transformers in float64, with exact norms, and of our models."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from tests.families.table import FAMILY_ROWS
from tests.tools import oracle_package
from tests.train.conftest import distance
from tests.train.exact_delta_net import exact_delta_net
from tests.train.tiny_models import as_in_files
from wgrad.device.contract import Device
from wgrad.train.files.safetensors_files import read_entries
from wgrad.train.model.families import FAMILIES
from wgrad.train.model.load_config import load_model_config
from wgrad.train.model.load_weights import load_trainable, load_untrained
from wgrad.train.model.model import Model
from wgrad.train.model.model_inputs import Inputs
from wgrad.train.model.weights import weight_specs
from wgrad.train.step.optim import FlatParameters, ParameterSpec

torch = oracle_package("torch")
transformers = oracle_package("transformers")
ROWS, TOKENS = 2, 23
CORRECTION = ("e_score_correction_bias", "expert_bias")
NORMS_OF_ONE = tuple(row.norms_of_one for row in FAMILY_ROWS.values() if row.norms_of_one)
LAYER_NORMS = tuple(row.layer_norms for row in FAMILY_ROWS.values() if row.layer_norms)
EAGER = {FAMILIES[name].model_type for name, row in FAMILY_ROWS.items() if row.eager}


def batch(vocab: int, tokens: int = TOKENS, seed: int = 3) -> tuple[np.ndarray, np.ndarray]:
    """Return ids and targets, int32 [ROWS, tokens]. Some targets are ignored."""
    generator = np.random.default_rng(seed)
    ids = generator.integers(0, vocab, (ROWS, tokens)).astype(np.int32)
    targets = np.full_like(ids, -100)
    targets[:, :-1] = ids[:, 1:]
    targets[generator.random(ids.shape) < 0.2] = -100
    return ids, targets


def exact_norms(model: Any) -> Any:
    """Let the model's RMSNorms compute in the dtype of their input."""

    def forward(self: Any, x: Any) -> Any:
        name = type(self).__name__
        eps = getattr(self, "variance_epsilon", None) or getattr(self, "eps", 1e-5)  # OLMo's is in its code
        centered = x if name.endswith("RMSNorm") else x - x.mean(-1, keepdim=True)
        weight = None if "Weightless" in name else getattr(self, "weight", None)
        scale = 1 if weight is None else weight + name.startswith(NORMS_OF_ONE)
        return scale * (centered * torch.rsqrt(centered.pow(2).mean(-1, keepdim=True) + eps))

    def gated(self: Any, x: Any, gate: Any) -> Any:
        """Normalize each group by itself, after or before the gate, as Mamba-2 does."""
        first, gate = getattr(self, "norm_before_gate", False), torch.nn.functional.silu(gate)
        x = x if first else x * gate
        groups = getattr(self, "n_groups", 0) or x.shape[-1] // self.group_size
        parts = x.reshape(*x.shape[:-1], groups, -1)
        parts = parts * torch.rsqrt(parts.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * parts.reshape(x.shape) * (gate if first else 1)

    for module in model.modules():
        if hasattr(module, "group_size") or hasattr(module, "norm_before_gate"):
            module.forward = gated.__get__(module)
        if type(module).__name__.endswith(("RMSNorm", *LAYER_NORMS)):
            module.forward = forward.__get__(module)
    return model


@contextmanager
def exact() -> Iterator[None]:
    """Keep float64 within the block, where eager attention, rotary embeddings and routers ask for float32."""
    softmax, single, typed = torch.nn.functional.softmax, torch.Tensor.float, torch.Tensor.type

    def kept(x: Any, *dtype: Any) -> Any:
        return x if (x.dtype, dtype) == (torch.float64, (torch.float32,)) else typed(x, *dtype)

    with (
        patch.object(torch.nn.functional, "softmax", lambda x, dim=-1, dtype=None: softmax(x, dim=dim)),
        patch.object(torch.Tensor, "float", lambda x: x if x.dtype == torch.float64 else single(x)),
        patch.object(torch.Tensor, "type", kept),
    ):
        yield


def load_oracle(folder: Path) -> Any:
    """Load transformers' model in float32. It takes as long as a forward and a backward."""
    config = transformers.AutoConfig.from_pretrained(folder)
    config._attn_implementation = "eager" if config.model_type in EAGER else "sdpa"
    config._experts_implementation = "eager"  # the only one in float64
    model = transformers.AutoModelForCausalLM.from_config(config).to(torch.float32).eval()
    state = {n: torch.tensor(np.array(e.array())) for n, e in read_entries(folder / "model.safetensors", "").items()}
    missing = model.load_state_dict({n: t.to(torch.float32) for n, t in state.items()}, strict=False)
    left = {name for name in missing.missing_keys if not name.endswith(("act_fn.beta", "act_fn.eps"))}  # constants
    assert not missing.unexpected_keys and left <= {"lm_head.weight"}
    model.tie_weights()
    return model


def oracle(model: Any, dtype: Any, ids: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, float, dict[str, Any]]:
    """Return transformers' logits, summed loss and gradients by name. The model stays in this dtype: float64 is last,
    as its norms stay exact."""
    if next(model.parameters()).dtype != dtype:
        assert dtype == torch.float64
        model = exact_norms(model.to(dtype))
    model.zero_grad()
    with exact(), exact_delta_net(model):
        logits = model(torch.tensor(ids.astype(np.int64)), use_cache=False).logits
    flat = logits.reshape(-1, logits.shape[-1])
    loss = torch.nn.functional.cross_entropy(
        flat, torch.tensor(targets.reshape(-1).astype(np.int64)), reduction="sum", ignore_index=-100
    )
    loss.backward()
    grads = {own_name(n): p.grad.double().numpy() for n, p in model.named_parameters() if not n.endswith(CORRECTION)}
    heads = [name for name in grads if ".norms." in name]
    for norm in dict.fromkeys(name.partition(".norms.")[0] for name in heads):  # StableLM's, a norm for each head
        of_norm = [grads.pop(name) for name in heads if name.startswith(f"{norm}.")]
        grads[f"{norm}.weight"] = np.stack(of_norm)
    return flat.detach().double().numpy(), float(loss.detach()), grads


def own_name(name: str) -> str:
    """Return our name of a weight of transformers' model."""
    pairs = {pair for row in FAMILY_ROWS.values() for pair in row.names}
    for ours, theirs in sorted(pairs, key=lambda pair: -len(pair[1])):
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    return name


def full_model(folder: Path, device: Device, positions: int = 64) -> tuple[Model, FlatParameters]:
    config = load_model_config(folder)
    specs = [ParameterSpec(s.name, s.shape, len(s.shape) > 1) for s in weight_specs(config) if s.trained]
    parameters = FlatParameters(specs, device)
    load_trainable(folder, config, {n: t.data for n, t in parameters.tensors.items()}, device)
    weights = parameters.tensors | load_untrained(folder, config, device)
    return Model(config, weights, device, positions=positions), parameters


def make_inputs(device: Device, ids: np.ndarray, targets: np.ndarray, doc_start: np.ndarray | None = None) -> Inputs:
    doc_start = np.zeros_like(ids) if doc_start is None else doc_start
    positions = np.arange(ids.shape[1], dtype=np.int32)[None] - doc_start
    return Inputs(
        ids=device.upload(ids.reshape(-1)),
        positions=device.upload(np.ascontiguousarray(positions.reshape(-1), np.int32)),
        doc_start=device.upload(doc_start),
        cache_len=device.upload(np.zeros(1, np.int32)),
        targets=device.upload(targets.reshape(-1)),
    )


def check_against_the_oracle(folder: Path, device: Device, tokens: int = TOKENS) -> None:
    ids, targets = batch(load_model_config(folder).vocab_size, tokens)
    loaded = load_oracle(folder)
    plain_logits, plain_loss, plain_grads = oracle(loaded, torch.float32, ids, targets)
    true_logits, true_loss, true_grads = oracle(loaded, torch.float64, ids, targets)

    model, parameters = full_model(folder, device, max(tokens, 64))
    inputs = make_inputs(device, ids, targets)
    inputs.tables = model.token_tables(ids.size)
    if inputs.tables is not None:
        row = np.tile(np.arange(tokens, dtype=np.int32), (ROWS, 1))
        inputs.tables.write(device, row, np.zeros_like(row))
    logits = device.download(model.logits(model.hidden(inputs).data))
    assert distance(logits, true_logits) <= 2 * distance(plain_logits, true_logits)
    loss = model.loss(inputs)
    floor = 2.0**-23 * true_loss  # the loss is one float32: both may lie on either side of the true value
    assert abs(float(loss.numpy()[0]) - true_loss) <= 2 * abs(plain_loss - true_loss) + floor
    loss.backward()
    corrections = {name: t for name, t in parameters.tensors.items() if name.endswith(CORRECTION)}
    assert set(parameters.tensors) - set(corrections) == set(true_grads)
    assert not any(device.download(tensor.gradient).any() for tensor in corrections.values())  # they stay
    for name, tensor in parameters.tensors.items():
        if name in corrections:
            continue
        found = as_in_files(name, device.download(tensor.gradient), json.loads((folder / "config.json").read_text()))
        error = distance(found, true_grads[name])
        limit = 3 * distance(plain_grads[name], true_grads[name])
        # Sums over everything, such as one for each of 6 heads: the oracle's may be right by chance. (The error of its
        # gradient of Nemotron-H's first D is half that of all others in its layer, where ours is twice those.)
        if tensor.size <= (32 if ".altup." in name else 6):
            limit = max(2 * limit, 4e-6)
        assert error <= limit, f"{name}: {error:.1e} > {limit:.1e}"
