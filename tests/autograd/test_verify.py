"""The check of operators before a run: what it runs and keeps, and what it does about wrong ones."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from wgrad.autograd.reference import ReferenceDevice
from wgrad.autograd.select_device import select_device
from wgrad.autograd.selftest import activation
from wgrad.autograd.selftest import verify as module
from wgrad.autograd.selftest.case import F32, Case, upload_inputs
from wgrad.autograd.selftest.gemm import gemm_case
from wgrad.autograd.selftest.verify import Outcome, WrongOperator, choose_cases, turn_off_what_failed, verify
from wgrad.device.contract import Device
from wgrad.device.errors import DeviceError, DeviceLost, WgradError
from wgrad.train.inference.compile_ahead import Placing, compile_ahead
from wgrad.train.model.model_config import ModelConfig
from wgrad.train.options.finetune_config import FinetuneConfig, RunOptions
from wgrad.train.ranks.world import World
from wgrad.train.run import whole_run
from wgrad.train.run.build_session import check_session
from wgrad.train.run.finetune import run_finetune
from wgrad.train.step import checked
from wgrad.train.terminal.progress import Display
from wgrad.wgsl.runtime import compile, matrix_units

TENSOR, SUBGROUP = "tensor cores", "subgroup operations"
Wrong = Callable[[str, int, set[str]], bool]  # operator, how many calls of it came before, kinds of kernels in use


class Card(ReferenceDevice):
    """A GPU in NumPy, of whose operators some are wrong. Its kernels are named by operator and kinds in use."""

    def __init__(self, wrong: Wrong | None = None, identity: tuple[str, ...] = ("card", "driver 1")) -> None:
        super().__init__()
        self.kinds, self.wrong, self.calls, self._identity = {SUBGROUP, TENSOR}, wrong, list[str](), identity
        self.error: Exception | None = None
        self.software = False

    @property
    def identity(self) -> tuple[str, ...]:
        return self._identity

    @property
    def simpler(self) -> tuple[str, ...]:
        return tuple(sorted(self.kinds))

    @contextmanager
    def trying_without(self, kinds: Collection[str]) -> Iterator[None]:
        before = set(self.kinds)
        self.kinds -= set(kinds)
        yield
        self.kinds = before

    def turn_off(self, kind: str, reason: str) -> bool:
        self.kinds.discard(kind)
        return kind == SUBGROUP  # the other is remembered elsewhere

    def dry_run(self) -> Any:
        return SimpleNamespace(card=self, launched=[], memory=lambda: SimpleNamespace(peak_bytes=1))

    def call(self, op: str) -> np.ndarray:
        if self.error is not None:
            raise self.error
        self.calls.append(op)
        bad = self.wrong is not None and self.wrong(op, self.calls.count(op) - 1, self.kinds)
        return np.full(3, 2.0 if bad else 1.0, np.float32)


def case(op: str, *launched: str) -> Case:
    def call(device: Any, x: Any) -> dict[str, Any]:
        if hasattr(device, "launched"):
            device.launched += [(name, "main", tuple(sorted(device.card.kinds))) for name in launched or (op,)]
            return {}
        return {"y": device.call(op) if isinstance(device, Card) else np.ones(3, np.float32)}

    return Case(f"{op}/3/float32", op, "forward", "float32", "3", lambda rng: {}, call)


@pytest.fixture(autouse=True)
def _a_few_cases(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("WGRAD_VERIFY")
    monkeypatch.setattr(module, "selftest_cases", lambda device: [case("rope"), case("silu"), case("clip")])


def dry_of(card: Card, *ops: str) -> Any:
    dry = card.dry_run()
    for op in ops:
        case(op).call(dry, {})
    return dry


def check(card: Card, *ops: str) -> Outcome:
    return verify(card, dry_of(card, *ops))


def test_what_a_run_launches_is_checked_three_times_and_once() -> None:
    card = Card()
    assert check(card, "rope", "silu").operators == 2
    assert card.calls == ["rope", "silu"] * 3
    assert check(card, "silu", "rope") == Outcome()  # and nothing runs
    assert check(card, "rope", "clip").operators == 1 and card.calls[6:] == ["clip"] * 3


@pytest.mark.parametrize("changed", ["a GPU", "a driver", "a version"])
def test_another_one_is_checked_again(changed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check(Card(), "rope")
    if changed == "a version":
        monkeypatch.setattr(module.wgrad, "__version__", "x")
    other = {"a GPU": ("other", "driver 1"), "a driver": ("card", "driver 2")}.get(changed, ("card", "driver 1"))
    assert check(Card(identity=other), "rope").operators == 1


@pytest.mark.parametrize("damage", ["{", "[]", '{"format": 1, "passed": 3}'])
def test_a_damaged_note_is_made_again(tmp_path: Path, damage: str) -> None:
    check(Card(), "rope")
    (note,) = tmp_path.glob("wgrad/verified/*.json")
    note.write_text(damage)
    assert check(Card(), "rope").operators == 1 and check(Card(), "rope").operators == 0


def test_it_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WGRAD_VERIFY", "off")
    assert check(Card(lambda *_: True), "rope") == Outcome()
    assert verify(ReferenceDevice(), None) == Outcome()


def test_one_wrong_run_of_three_is_enough() -> None:
    card = Card(lambda op, before, kinds: op == "silu" and before % 3 == 2)
    with pytest.raises(WrongOperator, match=r"silu is wrong \(silu/3/float32: y is off by 1, .* in run 3 of 3\)"):
        check(card, "rope", "silu")


@pytest.mark.parametrize("kind", [SUBGROUP, TENSOR])
def test_the_kind_of_kernels_that_is_wrong_stays_off(kind: str) -> None:
    card = Card(lambda op, before, kinds: op == "rope" and kind in kinds)
    found = check(card, "rope", "silu")
    assert found.off == (kind,) and found.wrong.startswith("rope is wrong (rope/3/float32: y is off by 1")
    assert card.kinds == {SUBGROUP, TENSOR} - {kind}
    assert ("delete it to check again" in found.again) == (kind == SUBGROUP) != ("matrix-units" in found.again)
    assert check(card, "rope", "silu").operators == 2  # the simpler ones, which the work now launches
    again = Card()
    turn_off_what_failed(again)
    assert again.kinds == ({TENSOR} if kind == SUBGROUP else {SUBGROUP, TENSOR})


def test_all_kinds_go_where_one_is_not_enough() -> None:
    card = Card(lambda op, before, kinds: bool(kinds))
    assert set(check(card, "rope").off) == {SUBGROUP, TENSOR} and not card.kinds


def test_a_run_ends_where_no_kernel_is_right(tmp_path: Path) -> None:
    card = Card(lambda op, before, kinds: op != "clip")
    with pytest.raises(WrongOperator) as raised:
        check(card, "rope", "silu", "clip")
    said = str(raised.value)
    assert (
        "rope is wrong (rope/3/float32: y is off by 1, allowed 4.8e-07 in run 1 of 3)" in said
        and "and 1 more case:" in said
    )
    assert "Report it with wgrad report-gpu" in said
    assert card.kinds == {SUBGROUP, TENSOR} and not list(tmp_path.glob("wgrad/verified/*"))  # the next run checks again


def test_a_device_error_is_a_wrong_operator_and_a_lost_device_is_not() -> None:
    card = Card()
    card.error = DeviceError("shader rope.wgsl does not compile")
    with pytest.raises(WrongOperator, match="rope is wrong .* shader rope.wgsl does not compile in run 1"):
        check(card, "rope")
    card.error = DeviceLost("the device was lost")
    with pytest.raises(DeviceLost, match=r"rope \(rope/3/float32\): the device was lost"):
        check(card, "rope")


def test_a_kernel_without_a_case_gets_the_nearest_but_not_on_software(monkeypatch: pytest.MonkeyPatch) -> None:
    """There a kernel that the run does not need takes seconds to compile."""
    monkeypatch.setattr(module, "selftest_cases", lambda device: [case("rope", "rope", "fill"), case("silu")])
    card = Card()
    needed = [("rope", "main", ("other",)), ("silu", "main", tuple(sorted(card.kinds)))]
    assert [c.op for c in choose_cases(card, needed, needed)] == ["silu", "rope"]
    card.software = True
    assert [c.op for c in choose_cases(card, needed, needed)] == ["silu"]


def test_the_nearest_kernel_decodes_the_same_format() -> None:
    """Even if one of another format has its tile and epilogue."""
    sizes, format, other = (("M", 64), ("N", 64), ("K", 32)), ("B_FORMAT", "mxfp4"), ("B_FORMAT", "nf4")
    kernel = ("gemm", "main", (format, *sizes))
    alike = [module._alike(kernel, {("gemm", "main", constants)}) for constants in ((other, *sizes), (format,))]
    assert 0 < alike[0] < alike[1]


def test_a_kernel_is_verified_once(wgpu_device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "selftest_cases", lambda device: activation.cases(F32))
    dry = wgpu_device.dry_run()
    x = dry.empty((33, 128))
    dry.silu(x)
    assert {c.op for c in choose_cases(wgpu_device, dry.launched, dry.launched)} == {"silu"}
    assert verify(wgpu_device, dry).operators == 1 and verify(wgpu_device, dry).operators == 0


def test_a_wgpu_device_does_without(wgpu_device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("matrix_units", "stacks_weights", "subgroups", "tensor_cores_off"):
        monkeypatch.setattr(wgpu_device, name, name != "tensor_cores_off")
    assert wgpu_device.simpler == (SUBGROUP, TENSOR)
    with wgpu_device.trying_without([TENSOR]):
        assert wgpu_device.simpler == (SUBGROUP,) == wgpu_device.dry_run().simpler
    assert wgpu_device.turn_off(SUBGROUP, "why") and not wgpu_device.subgroups
    assert not wgpu_device.turn_off(TENSOR, "why") and not wgpu_device.stacks_weights
    card = matrix_units.identity(wgpu_device.facts["name"], wgpu_device.facts["driver"])
    assert matrix_units.verdict(card) == (False, "why") and wgpu_device.simpler == ()


def test_a_device_that_is_opened_again_does_without(wgpu_device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wgpu_device, "subgroups", True)
    monkeypatch.setattr(
        module, "_check", lambda device, chosen, *_: {c.name: "off" for c in chosen} if device.subgroups else {}
    )
    monkeypatch.setattr(module, "selftest_cases", lambda device: activation.cases(F32))
    dry = wgpu_device.dry_run()
    dry.silu(dry.empty((33, 128)))
    assert verify(wgpu_device, dry).off == (SUBGROUP,)
    assert not select_device("wgpu").subgroups  # type: ignore[attr-defined]


def test_with_wrong_subgroup_operations_another_kernel_is_chosen(
    wgpu_device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real kernels, with a fault in what the driver compiles: the check finds another kernel that is right."""
    if not wgpu_device.subgroups:
        pytest.skip("this driver has no subgroup operations")
    device: Any = select_device("wgpu")
    device.software = False  # whose kernels have none
    read = compile.read_source

    def broken(file: str, constants: dict[str, Any], **options: Any) -> str:
        return read(file, constants, **options).replace("+= subgroupShuffleXor(", "+= 1.5 * subgroupShuffleXor(")

    monkeypatch.setattr(compile, "read_source", broken)
    row = gemm_case("row", 1, 256, 128, F32, trans_b=True)
    monkeypatch.setattr(module, "selftest_cases", lambda device: [row])

    def plan() -> Any:
        dry = device.dry_run()
        row.call(dry, upload_inputs(dry, row.inputs()))
        return dry

    found = verify(device, plan())
    assert found.off == (SUBGROUP,) and found.wrong.startswith("gemm is wrong (gemm_nt/row/1x256x128/float32: y is off")
    assert verify(device, plan()).operators == 1 and verify(device, plan()).operators == 0


@pytest.fixture
def outcomes(monkeypatch: pytest.MonkeyPatch) -> list[Outcome]:
    """Set the outcomes of `verify`, one after another."""
    waiting = [Outcome(off=(TENSOR,), wrong="rope is wrong", again="how"), Outcome(7, 1.25)]
    monkeypatch.setattr(checked, "verify", lambda *_: waiting.pop(0))
    return waiting


@pytest.mark.parametrize(("chooses", "compute"), [(True, "float32"), (False, "float16")])
def test_a_run_is_planned_again_without_them(
    outcomes: list[Outcome], capsys: pytest.CaptureFixture[str], chooses: bool, compute: str
) -> None:
    session: Any = SimpleNamespace(display=Display(), device=ReferenceDevice(), chooses_compute=chooses)
    session.config, session.say = RunOptions(compute="float16"), session.display.say
    plan: Any = SimpleNamespace(dry=None)
    assert check_session(session, plan, World()) and session.config.compute == compute
    assert not check_session(session, plan, World()) and not outcomes
    said = capsys.readouterr().out
    assert (
        "note: rope is wrong: tensor cores stay off on this GPU (how)" in said
        and "verified 7 operators in 1.2 s" in said
    )


def test_inference_is_planned_again_without_them(outcomes: list[Outcome]) -> None:
    dry: Any = SimpleNamespace(limit_memory=lambda limit: None)
    device: Any = SimpleNamespace(facts={}, dry_run=lambda: dry, prepare=lambda dry, progress: 0, shared_memory=True)
    runs, model = list[str](), Mock(spec=ModelConfig)
    placing = compile_ahead(device, "off", None, model, lambda dry, placing: runs.append(placing.stream), Display())
    assert placing == Placing("off")
    assert runs == ["off", "off"] and not outcomes


def test_a_run_is_checked_before_its_weights_are_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And planned as long as something changes."""
    order, answers = list[str](), [True, False]

    def check(*_: Any) -> bool:
        order.append("check")
        return answers.pop(0)

    def build(*_: Any) -> Any:
        order.append("build")
        raise WgradError("enough")

    monkeypatch.setattr(whole_run, "check_session", check)
    monkeypatch.setattr(whole_run, "build_session", build)
    data, out = ("examples/data/proverbs.jsonl",), str(tmp_path / "out")
    with pytest.raises(WgradError, match="enough"):
        run_finetune(FinetuneConfig(model="examples/base_model", data=data, out=out, device="cpu", max_steps=1))
    assert order == ["check", "check", "build"]


def test_it_satisfies_the_contract() -> None:
    assert isinstance(Card(), Device)
