"""The recipes of docs/contributing, applied to a copy of the tree: operator, family, weight format, option, device.

Each is a toy, in the files that its page names; one program then uses all of them. The recipe of an objective is tried
in tests/train/test_new_objective.py.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.families.table import FAMILY_ROWS, of_families
from tests.sweeps import Families
from wgrad.train.model.families import FAMILIES

ROOT = Path(__file__).parents[2]
ROOMS = ("device", "wgsl", "hip", "autograd", "train")

# page -> file -> its text, or (before, after) of one edit or several.
RECIPES: dict[str, dict[str, str | tuple[str, ...]]] = {
    "operator": {
        "autograd/ops/cube.py": '''
"""x^3."""

from __future__ import annotations

import numpy as np

from wgrad.autograd.args import Args
from wgrad.autograd.function import Tensor, with_backward
from wgrad.autograd.operators import operator
from wgrad.autograd.precision import compute_dtype, finish, up
from wgrad.device.contract import Array


@with_backward("cube_backward")
def cube(args: Args, x: Tensor) -> None:
    """x^3, any shape."""
    args.any_shape("x", x)


@cube.reference
def _(x: np.ndarray) -> np.ndarray:
    compute = compute_dtype(x)
    return finish(up(x, compute) ** 3, x.dtype, compute)


@operator
def cube_backward(args: Args, dy: Array, x: Array) -> None:
    """-> dx = 3 x^2 dy."""
    args.any_shape("dy", dy).same_shape("dy", dy, "x", x)


@cube_backward.reference
def _(dy: np.ndarray, x: np.ndarray) -> np.ndarray:
    compute = compute_dtype(dy, x)
    return finish(3 * up(dy, compute) * up(x, compute) ** 2, x.dtype, compute)
''',
        "autograd/functional.py": (
            "from wgrad.autograd.ops.dora",
            "from wgrad.autograd.ops.cube import cube\nfrom wgrad.autograd.ops.dora",
        ),
        "autograd/selftest/cube.py": '''
"""Self-test cases of x^3."""

from __future__ import annotations

import numpy as np

from wgrad.autograd.selftest.case import Case, Inputs, Outputs, dtype_name, forward_and_backward, normal
from wgrad.device.contract import Device


def cases(t: np.dtype) -> list[Case]:
    def build(rng: np.random.Generator) -> Inputs:
        return {"x": normal(rng, (7, 123), t), "dy": normal(rng, (7, 123), t)}

    def forward(device: Device, x: Inputs) -> Outputs:
        return {"y": device.cube(x["x"])}

    def backward(device: Device, x: Inputs) -> Outputs:
        return {"dx": device.cube_backward(x["dy"], x["x"])}

    return forward_and_backward("cube", "7x123", dtype_name(t), build, forward, backward)
''',
        "autograd/selftest/cases.py": (
            "FAMILIES = (",
            "from wgrad.autograd.selftest import cube\n\nFAMILIES = (\n    cube,",
        ),
        "wgsl/elementwise/cube.py": '''
"""x^3 and its gradient. Shader: cube.wgsl."""

from __future__ import annotations

from wgrad.device.memory import Array
from wgrad.wgsl.elements import GROUP, element_types
from wgrad.wgsl.operators import implements
from wgrad.wgsl.runtime.runtime import Runtime


@implements("cube")
def cube(device: Runtime, x: Array) -> Array:
    return _cube(device, x, None)


@implements("cube_backward")
def cube_backward(device: Runtime, dy: Array, x: Array) -> Array:
    return _cube(device, x, dy)


def _cube(device: Runtime, x: Array, dy: Array | None) -> Array:
    y = device.empty(x.shape, x.dtype)
    constants = {"BACKWARD": dy is not None, **element_types(1, X_T=x, DY_T=x if dy is None else dy)}
    work = 2.0 * x.nbytes
    device.launch("cube", [x, dy, y], [x.size], device.groups(x.size, GROUP), constants, work=work)
    return y
''',
        "wgsl/elementwise/cube.wgsl": """
// y = x^3; backward: y = 3 x^2 dy.
struct Params { n: u32 }
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> x: array<X_T>;
#if BACKWARD
@group(0) @binding(2) var<storage, read> dy: array<DY_T>;
#endif
@group(0) @binding(3) var<storage, read_write> y: array<X_T>;

@compute @workgroup_size(256)
fn main(@builtin(global_invocation_id) at: vec3<u32>) {
  if (at.x >= p.n) { return; }
  let given = C_T(x[at.x]);
#if BACKWARD
  y[at.x] = X_T(3.0 * given * given * C_T(dy[at.x]));
#else
  y[at.x] = X_T(given * given * given);
#endif
}
""",
        "hip/elements.py": (
            "implements = Implementations(lacks={",
            'implements = Implementations(lacks={"cube", "cube_backward", ',
        ),
    },
    "model-family": {
        "train/model/families.py": (
            '    "MistralForCausalLM": Family(',
            '    "ToyForCausalLM": Family("toy", LlamaFile, lambda keys: {"embedding_scale": 3.0}, ""),\n'
            '    "MistralForCausalLM": Family(',
        ),
        "tests/families/dense.py": (
            '    "MistralForCausalLM": Row(',
            '    "ToyForCausalLM": Row(cases={"toy": {"rope_scaling": YARN}}, in_test_all=ALIKE),\n'
            '    "MistralForCausalLM": Row(',
        ),
    },
    "weight-format": {
        "device/formats/toy.py": '''
"""Q8_0 by another name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from wgrad.device.formats.q8_0 import Q8Array


@dataclass(frozen=True)
class ToyArray(Q8Array):
    format: ClassVar[str] = "toy"
    gguf_type: ClassVar[str] = ""
''',
        "wgsl/formats/toy.inc.wgsl": (ROOT / "wgsl/formats/q8_0.inc.wgsl").read_text(encoding="utf-8"),
    },
    "option": {
        "train/options/finetune_config.py": (
            "    max_grad_norm: float = of_training(",
            '    toy_factor: float = of_training(1.0, "a toy", rule=ABOVE_0, metavar="F", fixed=True)\n'
            "    max_grad_norm: float = of_training(",
        ),
    },
    "device": {
        "toy/device.py": '''
"""wgpu's device with one family of operators missing."""

from __future__ import annotations

from wgrad.device.implementations import Implementations
from wgrad.wgsl.device import WgpuDevice

implements = Implementations(lacks={"dropout", "dropout_backward"} & WgpuDevice.implementations.keys())
implements.update({k: v for k, v in WgpuDevice.implementations.items() if k not in implements.lacks})


class ToyDevice(WgpuDevice):
    implementations = implements
''',
        "autograd/select_device.py": (
            '"cpu": False}',
            '"cpu": False, "toy": False}',
            '        "cpu": lambda',
            '        "toy": lambda: bind(importlib.import_module("wgrad.toy.device").ToyDevice)(),\n'
            '        "cpu": lambda',
        ),
    },
}

PROGRAM = """
import json, sys
import numpy as np
from wgrad.autograd import functional as F
from wgrad.autograd.bind import bind
from wgrad.autograd.gradcheck import gradcheck
from wgrad.autograd.selftest.run import run_selftest
from wgrad.autograd.select_device import select_device
from wgrad.hip.device import HipDevice
from wgrad.train.commands.cli import main
from tests.wgsl.rolled import quick_to_compile

quick_to_compile()
device = select_device("toy")
results = [result for name in ("cube", "toy_", "dropout/") for result in run_selftest(device, only=name)]
found = {
    "cases": [[r.name, r.ok, r.lacks] for r in results],
    "hip_lacks": sorted(bind(HipDevice).lacks),
    "gradient": gradcheck(F.cube, np.linspace(-1, 1, 11), rng=np.random.default_rng(0), device=select_device("cpu"),
        dtype=np.float64),
    "status": main(["finetune", *sys.argv[2:]]),
    "refused": main(["finetune", *sys.argv[2:], "--toy-factor", "-1"]),
}
open(sys.argv[1], "w").write(json.dumps(found))
"""


def apply(recipe: dict[str, str | tuple[str, ...]], tree: Path) -> None:
    for name, change in recipe.items():
        path = tree / name
        if isinstance(change, str):
            assert not path.exists()
            path.parent.mkdir(exist_ok=True)
            path.write_text(change.lstrip("\n"), encoding="utf-8")
        else:
            text = path.read_text(encoding="utf-8")
            for before, after in zip(change[::2], change[1::2], strict=True):
                assert before in text, (name, before)
                text = text.replace(before, after, 1)
            path.write_text(text, encoding="utf-8")


@pytest.mark.parametrize("page", RECIPES)
def test_a_page_names_every_file_that_its_recipe_changes(page: str) -> None:
    """By its path, or by that of a file of the same kind in the same folder."""
    text = (ROOT / "docs" / "contributing" / f"{page}.md").read_text(encoding="utf-8")
    named = {name for name in re.findall(r"`([\w./<>-]+)`", text) if "/" in name}
    for file in RECIPES[page]:
        folder, suffix = file.split("/")[0], "".join(Path(file).suffixes)
        kin = (n for n in named if n.split("/")[0] in (folder, "<name>") and n.endswith(suffix))
        assert file in named or any(kin), file


def test_recipes_work(tmp_path: Path, make_checkpoint: Any, text_data: Path, wgpu_device: Any) -> None:
    tree, out = tmp_path / "tree", tmp_path / "out"
    for room in ROOMS:
        shutil.copytree(ROOT / room, tree / room, ignore=shutil.ignore_patterns("objects"))
    (tree / "src" / "wgrad").mkdir(parents=True)
    for file in (ROOT / "src" / "wgrad").glob("*.py"):
        shutil.copy(file, tree / "src" / "wgrad")
    for recipe in RECIPES.values():
        apply({name: change for name, change in recipe.items() if not name.startswith("tests/")}, tree)
    model = Path(make_checkpoint(num_hidden_layers=1))
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"architectures": ["ToyForCausalLM"], "model_type": "toy"}))
    words = ["--model", model, "--data", text_data, "--out", out, "--device", "toy", "--max-steps", "1"]
    words += ["--max-length", "32", "--gradient-accumulation-steps", "1", "--no-sample", "--toy-factor", "3"]
    result = tmp_path / "found.json"
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(result), *map(str, words)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tree / "src"), str(ROOT)])},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    found = json.loads(result.read_text())
    names = [name for name, _, _ in found["cases"]]
    assert {name.split("/")[0] for name in names} >= {"cube", "cube_backward", "toy_dequantize", "dropout"}
    assert all(ok for _, ok, _ in found["cases"])
    assert {lacks for name, _, lacks in found["cases"] if name.startswith("dropout/")} == {"dropout"}
    assert {"cube", "cube_backward"} <= set(found["hip_lacks"]) and found["gradient"] < 1e-6
    assert found["status"] == 0, run.stderr
    assert "ToyForCausalLM" in run.stdout and "toy_factor: 3.0" in (out / "config.yaml").read_text()
    assert found["refused"] == 2 and "--toy-factor: must be above 0" in run.stderr


@pytest.mark.oracle
def test_a_family_by_its_recipe_computes_what_transformers_does(
    make_checkpoint: Any, cpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its entry and its row of tests, as the recipe writes them, are all that the tests and the page need."""
    from tests.family_table import PAGE, page
    from tests.train.model_oracle import check_against_the_oracle, transformers

    class ToyConfig(transformers.GraniteConfig):  # type: ignore[name-defined, misc]
        model_type = "toy"
        embedding_multiplier: float = 3.0
        attention_multiplier: float = 12**-0.5

    class ToyForCausalLM(transformers.GraniteForCausalLM):  # type: ignore[name-defined, misc]
        config_class = ToyConfig

    transformers.AutoConfig.register("toy", ToyConfig, exist_ok=True)
    transformers.AutoModelForCausalLM.register(ToyConfig, ToyForCausalLM, exist_ok=True)
    changed = RECIPES["model-family"]
    assert len({*changed, PAGE.relative_to(ROOT).as_posix()}) <= 3
    for file, table in (("train/model/families.py", "FAMILIES"), ("tests/families/dense.py", "ROWS")):
        text = (ROOT / file).read_text(encoding="utf-8")
        module = ModuleType(file)
        monkeypatch.setitem(sys.modules, file, module)
        before, after = tuple(changed[file])
        exec(text.replace(before, after, 1), module.__dict__)
        entry = getattr(module, table)["ToyForCausalLM"]
        monkeypatch.setitem(FAMILIES if table == "FAMILIES" else FAMILY_ROWS, "ToyForCausalLM", entry)
    (case,) = of_families(lambda row: row.cases.values(), ["ToyForCausalLM"])
    architecture, changes = case.values
    check_against_the_oracle(make_checkpoint(architecture, **changes), cpu)
    assert "| Toy | `ToyForCausalLM` | 1 | not in llama.cpp |" in page(PAGE.read_text(encoding="utf-8"))
    leave = Families("peft")
    assert leave.chosen(["test[cpu-ToyForCausalLM-True]"]) == set()
