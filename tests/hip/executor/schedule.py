"""A model of one SIMD: how busy its tensor core is. It ranks kernels; no GPU has calibrated it.

Waves issue in order, each at most one instruction a slot and each unit at most one; a result is there after its
latency; waits count outstanding accesses. A slot is 4 clocks on CDNA and 1 on RDNA, where a matrix instruction blocks
the vector unit. The LDS, and where asked for L1, are shared by SIMDs that are taken to do the same at the same time.
With L1 goes what it reads from L2, where a caller says how much; latency is the same for hits and misses. Not
modeled: bank conflicts, what L2 misses. Rates of tensor cores and caches: AMD, CDNA2, CDNA3 and RDNA3 white papers
(FLOP and bytes a clock and compute unit); RDNA4: Radeon RX 9070 XT, 195 TFLOP/s of 64 compute units at 2.97 GHz.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.hip.executor.isa import is_matrix, is_pair, width

LDS_LATENCY, SCALAR_LATENCY = 100, 200  # clocks
_LDS_BYTES, _L1_BYTES = 128, 64  # a clock and compute unit
_L2_BYTES = 2048 / 38  # the same: of a die of MI300X, whose compute units read at once
_CDNA3 = {"f16": 2048, "bf16": 2048, "f32": 256}
_RATES = {"gfx90a": {"f16": 1024, "bf16": 1024, "f32": 256}, "gfx942": _CDNA3, "gfx950": _CDNA3}
_WMMA_CLOCKS = {"gfx11": 32, "gfx12": 16}  # of 16 x 16 x 16, 16 bits
_QUEUED = 32  # slots of work that may wait in front of the LDS, or of L1
_REGISTERS = re.compile(r"\b([vsa])\[(\d+):(\d+)\]|\b([vsa])(\d+)\b|\b(vcc|exec|scc|m0)\w*")
_NO_RESULT = re.compile(
    r"(global|buffer|flat|scratch)_store|ds_(write|store)|buffer_(wb|inv|gl)|s_(cmp|c?branch|waitcnt|barrier)"
)
_TRANSCENDENTAL = re.compile(r"v_(exp|log|rcp|rsq|sqrt|sin|cos)_")
Register = tuple[str, int]


@dataclass
class Step:
    """How an instruction goes through a SIMD; times in slots. shared: in its unit, which other SIMDs use too; queue:
    vmcnt or lgkmcnt, which it counts in."""

    unit: str = "salu"
    cost: int = 1
    latency: float = 1
    matrix: int = 0
    shared: float = 0.0
    queue: str = ""
    waits: dict[str, int] | None = None
    barrier: bool = False
    results: list[Register] = field(default_factory=list)
    operands: list[Register] = field(default_factory=list)


def _registers(text: str) -> list[Register]:
    found: list[Register] = []
    for kind, first, last, one, number, special in _REGISTERS.findall(text):
        if kind:
            found += [(kind, n) for n in range(int(first), int(last) + 1)]
        else:
            found.append((one, int(number)) if one else (special, 0))
    return found


def _matrix_slots(name: str, architecture: str) -> int:
    """Slots that the tensor cores are busy with one instruction."""
    if not architecture.startswith("gfx9"):
        return _WMMA_CLOCKS[architecture[:5]]
    found = re.search(r"(\d+)x(\d+)x(\d+)_?(f16|bf16|f32)", name)
    if found is None:
        raise ValueError(f"{name}: no rate is known; add its type to _RATES in tests/hip/executor/schedule.py")
    m, n, k = (int(found[i]) for i in (1, 2, 3))
    deep = 2 if found[4] != "f32" and m * k == 64 * 8 else 1  # CDNA4: twice the depth in the same time (LLVM's model)
    return max(2, round(2 * m * n * k / (deep * _RATES[architecture][found[4]])))


def _operands(step: Step, text: str) -> None:
    halves = [half.split(None, 1) for half in text.split("//")[0].split(" :: ")]  # v_dual_* has two
    for name, *rest in halves:
        parts = rest[0].split(",") if rest else []
        first = 0 if _NO_RESULT.match(name) else 1
        for n, part in enumerate(parts):
            (step.results if n < first else step.operands).extend(_registers(part))
        if first and parts and re.match(r"v_(pk_)?fmac", name):  # reads what it adds to
            step.operands += _registers(parts[0])
    if text.startswith("v_cmp") and not step.results:
        step.results = [("vcc", 0)]


def _gfx12_waits(text: str) -> dict[str, int]:
    """s_wait_loadcnt 0x3, s_wait_loadcnt_dscnt 0x103: a counter each, the last in the lowest byte."""
    name, number = text.split()[:2]
    counts = name.removeprefix("s_wait_").split("_")[::-1]
    of = {"loadcnt": "vmcnt", "dscnt": "lgkmcnt", "kmcnt": "kmcnt"}
    return {of[c]: int(number, 0) >> 8 * n & 63 for n, c in enumerate(counts) if c in of}


def step(text: str, architecture: str, lanes: int, memory_latency: int, l1: bool = False, fetched: float = 0.0) -> Step:
    """An instruction's way. memory_latency: clocks; l1: counted? fetched: bytes that L1 reads from L2 for a load."""
    cdna = architecture.startswith("gfx9")
    clocks, simds = (4, 4) if cdna else (1, 2)  # of a slot; that share an LDS and an L1
    name = text.split()[0]
    made = Step(latency=1 if cdna else 2)
    _operands(made, text)
    if name.startswith("s_waitcnt"):
        made.unit = "none"
        made.waits = {k: int(n) for k, n in re.findall(r"(vmcnt|lgkmcnt|expcnt|vscnt)\((\d+)\)", text)}
        if not made.waits and "vscnt" not in name:
            made.waits = {"vmcnt": 0, "lgkmcnt": 0}
    elif name.startswith("s_wait_"):
        made.unit, made.waits = "none", _gfx12_waits(text)
    elif name in ("s_barrier", "s_barrier_wait"):
        made.unit, made.barrier = "none", True
    elif is_matrix(name):
        made.unit = "matrix"
        made.cost = made.matrix = _matrix_slots(name, architecture)
        made.latency = made.cost
    elif name.startswith("v_"):
        slow = _TRANSCENDENTAL.match(name) is not None
        made.unit, made.cost = ("valu" if cdna or not slow else "trans"), 4 if slow else 1
        made.latency = (4 if slow else 1) if cdna else (10 if slow else 5)
    elif name.startswith("ds_"):
        made.unit, made.queue, made.latency = "lds", "lgkmcnt", LDS_LATENCY // clocks
        moved = lanes * width(name) // 8 * (2 if is_pair(name) else 1)
        made.shared = moved / _LDS_BYTES * simds / clocks
    elif name.startswith(("global_", "buffer_", "flat_", "scratch_")):
        made.unit, made.queue, made.latency = "vmem", "vmcnt", memory_latency // clocks
        made.cost = max(1, width(name) // 32)
        if l1:
            from_l2 = fetched / _L2_BYTES if "_load" in name else 0.0
            made.shared = max(lanes * width(name) // 8 / _L1_BYTES, from_l2) * simds / clocks
    elif name.startswith("s_load"):
        made.queue = "kmcnt" if architecture.startswith("gfx12") else "lgkmcnt"
        made.latency = SCALAR_LATENCY // clocks
    elif name.startswith(("s_nop", "s_delay", "s_clause", "s_setprio", "s_sleep")):
        made.unit, made.cost = "none", 0
    return made


class _Wave:
    """The state of a wave."""

    def __init__(self, program: list[Step], group: int) -> None:
        self.program, self.group, self.at, self.next_slot = program, group, 0, 0
        self.at_barrier = False
        self.ready: dict[Register, float] = {}
        self.queues: dict[str, list[float]] = {"vmcnt": [], "lgkmcnt": [], "kmcnt": []}

    @property
    def ended(self) -> bool:
        return self.at >= len(self.program)

    def waits_until(self, waits: dict[str, int], now: int) -> float:
        """When few enough accesses are outstanding."""
        until = 0.0
        for name, queue in self.queues.items():
            queue[:] = [t for t in queue if t > now] if name in waits else queue
            if name in waits and len(queue) > waits[name]:
                until = max(until, sorted(queue)[len(queue) - waits[name] - 1])
        return until


class Simd:
    """The units of one SIMD."""

    def __init__(self, architecture: str) -> None:
        self.cdna = architecture.startswith("gfx9")
        self.free: dict[str, float] = defaultdict(float)
        self.shared_free = {"lds": 0.0, "vmem": 0.0}
        self.busy = 0  # slots of the tensor core

    def earliest(self, wave: _Wave, s: Step) -> float:
        """When operands, results and unit are free."""
        registers = (wave.ready.get(r, 0.0) for r in (*s.operands, *s.results))
        at = max((self.free[s.unit], *registers))
        if not self.cdna and s.unit in ("valu", "matrix"):
            at = max(at, self.free["matrix" if s.unit == "valu" else "valu"])
        return max(at, self.shared_free[s.unit] - _QUEUED) if s.shared else at

    def issue(self, wave: _Wave, s: Step, now: int) -> None:
        self.free[s.unit] = now + s.cost
        self.busy += s.matrix
        done = now + s.latency
        if s.shared:
            self.shared_free[s.unit] = max(self.shared_free[s.unit], now) + s.shared
            done = max(done, self.shared_free[s.unit] + s.latency)
        if s.queue:
            wave.queues[s.queue].append(done)
        else:
            wave.ready.update(dict.fromkeys(s.results, done))

    def advance(self, wave: _Wave, now: int, used: set[str]) -> float | None:
        """Issue at most one instruction of a wave. Return the next slot at which it may go on; None: at a barrier."""
        while not wave.ended and not wave.at_barrier:
            s = wave.program[wave.at]
            if wave.next_slot > now:
                return wave.next_slot
            if s.barrier:
                wave.at_barrier = True
                return None
            if s.waits is not None:
                if (until := wave.waits_until(s.waits, now)) > now:
                    return until
            elif s.unit != "none":
                if (at := self.earliest(wave, s)) > now:
                    return at
                if s.unit not in used:
                    used.add(s.unit)
                    self.issue(wave, s, now)
                    wave.at += 1
                    wave.next_slot = now + 1
                return now + 1
            wave.at += 1
        return None


def simulate(
    architecture: str,
    lanes: int,
    programs: Sequence[Sequence[str]],
    memory_latency: int,
    *,
    l1: bool = False,
    fetched: float = 0.0,
    groups: int = 1,
) -> tuple[int, int]:
    """Runs waves on one SIMD. programs: texts of the instructions that each wave executes; memory_latency: clocks; l1:
    is its bandwidth counted? fetched: bytes that it reads from L2 for a load, on average. groups: work-groups that the
    waves are of, as many of each, one after another; a barrier is of one.

    Returns (slots, slots in which the tensor cores were busy).
    """
    steps = {t: step(t, architecture, lanes, memory_latency, l1, fetched) for program in programs for t in program}
    waves = [_Wave([steps[t] for t in p], n * groups // len(programs)) for n, p in enumerate(programs)]
    simd, now = Simd(architecture), 0
    while live := [w for w in waves if not w.ended]:
        away = {w.group for w in live if not w.at_barrier}
        for w in live:
            if w.at_barrier and w.group not in away:
                w.at_barrier, w.next_slot = False, now + 1
                w.at += 1
        used: set[str] = set()
        rotated = [waves[(n + now) % len(waves)] for n in range(len(waves))]
        wakes = [at for w in rotated if (at := simd.advance(w, now, used)) is not None]
        now = max(now + 1, int(min(wakes, default=0)))
    return now, simd.busy
