"""Dry runs take the memory of one layer for others of its kind, with the same results as if each were run."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from tests.train.conftest import tiny_config
from wgrad.autograd.reference import ReferenceDevice
from wgrad.autograd.select_device import gpu_elsewhere
from wgrad.autograd.tensor import Tensor
from wgrad.device.errors import OutOfMemory
from wgrad.device.memory import Pool
from wgrad.device.repeats import Repeats, _Trace
from wgrad.train.model.layer_kinds import layer_kind
from wgrad.train.model.load_config import load_model_config, parse_model_config
from wgrad.train.model.lora import LoraModule
from wgrad.train.model.projections import NOTHING
from wgrad.train.options.finetune_config import RunOptions
from wgrad.train.plan.plan import run_dry

WIDE: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 192, "num_key_value_heads": 2, "head_dim": 32}
SHAPE: dict[str, Any] = {"max_length": 64, "batch_size": 2, "lora_r": 4, "compute": "float16", "stream_weights": "off"}
RECOMPUTED: dict[str, Any] = {"gradient_checkpointing": True, "offload_activations": True, "keep_attention": True}
CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "kept": ("LlamaForCausalLM", 7, {"keep_dequantized": 17, "max_length": 1024}),
    "some recomputed": ("LlamaForCausalLM", 9, {**RECOMPUTED, "gradient_checkpointing": 6, "keep_projections": 2}),
    "gate and up": ("LlamaForCausalLM", 8, {**RECOMPUTED, "keep_gate_up": 3, "mlp_chunk": "1KiB"}),
    "streamed": ("LlamaForCausalLM", 8, {**RECOMPUTED, "stream_weights": "on", "resident_layers": 3}),
    "linear attention, experts": ("Qwen3NextForCausalLM", 8, RECOMPUTED),
    "pairs": ("LlamaForCausalLM", 6, {**RECOMPUTED, "objective": "dpo", "lora_dropout": 0.1}),
}


@pytest.mark.parametrize("case", CASES)
def test_layers_of_a_kind_take_the_same_memory(
    case: str, make_checkpoint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    architecture, layers, more = CASES[case]
    folder = make_checkpoint(architecture, **WIDE, num_hidden_layers=layers)
    device: Any = gpu_elsewhere("")
    device.stacks_weights = device.matrix_units = device.subgroups = True
    model, config = load_model_config(folder), RunOptions(**(SHAPE | {"gradient_checkpointing": False} | more))
    repeated, taken, repeat, allocate = list[int](), list[int](), _Trace.repeat, Pool.allocate

    def noted(self: Any, *arguments: Any) -> Any:
        repeated.append(1)
        return repeat(self, *arguments)

    def noted_allocate(self: Any, nbytes: int) -> Any:
        lease = allocate(self, nbytes)
        taken.append(lease.block.serial)
        return lease

    def found(limit: int | None) -> Any:
        taken.clear()
        try:
            plan = run_dry(config, model, folder, device, 3, limit)
        except OutOfMemory as error:
            return str(error)
        memory = plan.dry.memory(), plan.dry.host_memory()
        return memory, taken[:], replace(plan, dry=None), list(plan.dry.variants)

    monkeypatch.setattr(_Trace, "repeat", noted)
    monkeypatch.setattr(Pool, "allocate", noted_allocate)
    ample = found(None)
    limit = ample[0][0].peak_reserved_bytes * 50 // 64
    results = [ample, found(limit)]
    assert repeated
    monkeypatch.setattr(Repeats, "is_used", False)
    monkeypatch.setattr(Repeats, "__call__", lambda self, kind, work, inputs=None: work())
    assert [found(None), found(limit)] == results


def test_layers_with_other_adapters_are_of_another_kind() -> None:
    """Adapters that --adapter continues may have a rank of their own in a layer, or none. A reference pass has none."""
    cpu = ReferenceDevice()

    def module(rank: int) -> LoraModule:
        return LoraModule(Tensor(cpu.zeros((rank, 8)), cpu), Tensor(cpu.zeros((8, rank)), cpu), 1.0, 0)

    modules = {f"model.layers.{index}.self_attn.q_proj": module(rank) for index, rank in enumerate((4, 4, 2))}
    fixed = {"config": parse_model_config(tiny_config(num_hidden_layers=4)), "weights": {}, "dequantized": {}}
    model = SimpleNamespace(**fixed, adapter=None, kinds=(None, {}), recomputed=0, kept=NOTHING)
    assert len({layer_kind(model, index) for index in range(4)}) == 1
    model.adapter = SimpleNamespace(modules=modules)
    kinds = [layer_kind(model, index) for index in range(4)]
    assert kinds[0] == kinds[1] and len({*kinds}) == 3


def test_only_what_is_alike_is_repeated() -> None:
    dry = gpu_elsewhere("").dry_run()
    dry.repeats = True
    ran, there = list[str](), [dry.empty((8,)) for _ in range(20)]

    def runs(what: str, work: Any, inputs: Any = None, times: int = 4) -> tuple[str, list[Any]]:
        """Return the letter of each time that work ran, a dot for each other, and the results of the last."""
        repeats, arrays = Repeats(dry), list[Any]()

        def once() -> tuple[list[Any], Any]:
            ran.append(what)
            return work(), None

        for _ in range(times):
            ran.append(".")
            arrays, _ = repeats(what, once, inputs and inputs())
        said = "".join(ran).replace(".a", "a").replace(".b", "b")
        ran.clear()
        return said, arrays

    def new(size: int = 100) -> list[Any]:
        dry.empty((size,))
        return [dry.view(dry.empty((2, size)), (size,), size), None]

    def leaving() -> list[Any]:
        left.append(dry.empty((8,)))
        return [None]

    sizes, left = iter((100, 200, 100, 100, 300)), list[Any]()
    said, (array, none) = runs("a", new)
    assert (said, array.shape, array.offset, none) == ("aa..", (100,), 400, None)
    assert runs("a", lambda: new(next(sizes)), times=5)[0] == "aaaa."
    offsets = iter((0, 8, 0, 8))
    assert runs("a", lambda: [dry.view(dry.empty((16,)), (8,), next(offsets))])[0] == "aaaa"  # results of other places
    assert runs("a", leaving)[0] == "aaaa"  # an array is left behind
    assert runs("a", lambda: [there.pop() and None])[0] == "aaaa"  # one from before is freed
    assert runs("a", lambda: [there[0]])[0] == "aaaa"  # or is a result
    assert runs("a", lambda: [dry.empty_host((8,)) and None])[0] == "aaaa"  # or lies in main memory
    before, inputs = dry.memory().in_use_bytes, list[Any]()

    def freeing() -> list[Any]:
        del inputs[:]
        return [None]

    def given() -> list[Any]:
        inputs.append([dry.empty((100,))])
        return inputs

    assert runs("b", freeing, inputs=given)[0] == "bb.." and dry.memory().in_use_bytes == before
