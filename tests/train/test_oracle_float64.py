"""Models on the NumPy device in float64 against transformers in float64: logits' loss and every gradient to 12 digits.

Rounding to float32 hides a wrong digit in a gradient that it makes 30 times less or more exact by chance. Both have the
same rotary tables in float32 (transformers' own are one unit off here and there). To weights 1 can be added exactly.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from tests.families.common import UNGROUPED_LATENTS
from tests.families.table import CASES, FAMILY_ROWS
from tests.tools import oracle_package
from tests.train import model_oracle
from tests.train.conftest import distance, random_weights, tiny_config, write_checkpoint
from tests.train.model_oracle import batch, exact_norms, full_model, load_oracle, make_inputs, oracle
from tests.train.tiny_models import as_in_files
from wgrad.autograd.reference import ReferenceDevice
from wgrad.autograd.tensor import Tensor
from wgrad.train.model.load_config import load_model_config
from wgrad.train.model.load_weights import load_untrained
from wgrad.train.model.model import Model

torch = oracle_package("torch")

# transformers has numbers of these in float32: multipliers of Mamba-2, DeepSeek V2's rotation, factors of positions,
# constants of Gemma 3n, tables of angles of GPT-J. And gelu_fast has a constant of 10 digits.
ROUNDED = {case for row in FAMILY_ROWS.values() for case in row.rounded}
MORE: dict[str, tuple[str, dict[str, Any]]] = {
    f"nemotron_h {pattern}": ("NemotronHForCausalLM", {"hybrid_override_pattern": pattern})
    for pattern in ("ME-*E", "E-M*E")  # experts before and behind Mamba-2
}
MORE["nemotron_h latents"] = ("NemotronHForCausalLM", UNGROUPED_LATENTS)


def exact_model(model: Any) -> Any:
    """transformers' model in float64, but for rotary tables: cos and sin of angles in float32 are rounded once, as ours
    are."""
    cos, sin, to, whole = torch.Tensor.cos, torch.Tensor.sin, torch.Tensor.to, model.forward
    polar = torch.polar

    def rounded(length: Any, angle: Any) -> Any:
        return to(to(polar(length.double(), angle.double()), torch.complex64), torch.complex128)

    def kept(x: Any, *given: Any, **options: Any) -> Any:
        # Not where a device is given too: so frequencies are read, whose angles are of float32 in ours as well.
        single = (given, options) in (((torch.float32,), {}), ((), {"dtype": torch.float32}))
        return x if x.dtype == torch.float64 and single else to(x, *given, **options)

    def forward_all(*args: Any, **options: Any) -> Any:
        with patch.object(torch.Tensor, "to", kept):
            return whole(*args, **options)

    for module in exact_norms(model).modules():
        if hasattr(module, "scalar_embed_scale"):
            module.embed_scale = torch.tensor(module.scalar_embed_scale, dtype=torch.float64)
        if type(module).__name__.endswith("RotaryEmbedding"):
            plain = module.forward

            def forward(*args: Any, plain: Any = plain, **options: Any) -> Any:
                wide = [patch.object(torch.Tensor, f.__name__, lambda x, f=f: f(x.double())) for f in (cos, sin)]
                with wide[0], wide[1], patch("torch.polar", rounded):  # of the module, which `torch` stands for here
                    found = plain(*args, **options)
                return tuple(to(x, torch.float32).double() for x in found) if isinstance(found, tuple) else found

            module.forward = forward
    model.forward = forward_all
    return model


@pytest.mark.parametrize("case", [*CASES, *MORE])
def test_loss_and_every_gradient_equal_transformers_in_float64(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    architecture, changes = {**CASES, **MORE}[case]
    if "rope_parameters" in changes:  # transformers 5 writes this instead of rope_theta
        changes = changes | {"rope_theta": None}
    config = tiny_config(architecture, **changes)
    values = {n: (np.round(4096 * w) / 4096).astype(w.dtype) for n, w in random_weights(config, 0).items()}
    folder = write_checkpoint(tmp_path / "model", config, values, "float32", 1)
    device, parsed = ReferenceDevice(), load_model_config(folder)
    trained, untrained = full_model(folder, device)[1].tensors, load_untrained(folder, parsed, device)
    weights = {n: Tensor(np.array(t.data, np.float64), device, True) for n, t in (trained | untrained).items()}
    ids, targets = batch(parsed.vocab_size)
    monkeypatch.setattr(model_oracle, "exact_norms", exact_model)
    _, true_loss, true_grads = oracle(load_oracle(folder), torch.float64, ids, targets)
    monkeypatch.setattr(device, "cast", lambda x, dtype: x)  # the one operator that rounds float64
    model, inputs = Model(parsed, weights, device, positions=64, dtype=np.float64), make_inputs(device, ids, targets)
    inputs.tables = model.token_tables(ids.size)
    if inputs.tables is not None:
        row = np.tile(np.arange(ids.shape[1], dtype=np.int32), (len(ids), 1))
        inputs.tables.write(device, row, np.zeros_like(row))
    loss = model.loss(inputs)
    rounded = case in ROUNDED
    assert float(loss.numpy()[0]) == pytest.approx(true_loss, rel=1e-7 if rounded else 1e-13)
    loss.backward()
    for name, true in true_grads.items():
        found = weights[name].gradient
        assert found is not None, name
        if np.abs(true).max() < 1e-13:  # rounding alone: a bias of keys without rotation moves all scores alike
            assert np.abs(found).max() < 1e-13, name
            continue
        assert distance(as_in_files(name, found, config), true) <= (5e-6 if rounded else 1e-12), name
