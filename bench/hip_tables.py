"""The tables of the compiled HIP kernels in bench/notes/hip.md, from bench/results/hip_*.jsonl, for make_table.py.

They are counts and a model of the machine code, not a GPU's figures. Rows or keys that nobody has measured yet leave
a dash, or their table out.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from pages import Row, table

ARCHITECTURES = ("gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201")
LATENCIES = ("300", "600", "1200")
WAVES = ("1", "2", "4")
# The published attention forward for MI300X of this design, counted and modeled by the same tool.
PEER: Row = {
    "kernel": "peer: MoonMath, forward for MI300X (RTNE, width 128, no mask)",
    "vgpr": 256,
    "lds": 65536,
    "busy": {"300": 0.759, "600": 0.622, "1200": 0.417},
}
PEER_TFLOPS = {131_072: 605, 8_192: 535}  # by tokens, that its authors measured on an MI300X: 16 heads, no mask
COMPARED = "attention_forward_bf16_rtne_128"  # the same mode, width and mask


def read(folder: Path, name: str) -> list[Row]:
    path = folder / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def percent(shares: dict[str, float] | None, keys: tuple[str, ...] = LATENCIES) -> str:
    """Format shares in percent with slashes between them; a dash stands for a missing one."""
    return " / ".join(f"{100 * shares[key]:.1f}" if key in shares else "–" for key in keys) if shares else "–"


def amount(nbytes: int) -> str:
    return f"{nbytes / 1024:.3g} KiB" if nbytes >= 1024 else f"{nbytes} B" if nbytes else "0"


def attention_busy(rows: list[Row]) -> list[str]:
    """Return tables of how busy the tensor cores are: CDNA forward, with a peer's for gfx942, backward, and RDNA."""
    lines: list[str] = []
    for arch in ARCHITECTURES:
        own = [r for r in rows if r["arch"] == arch]
        if arch.startswith("gfx9"):
            lines += cdna_busy([r for r in own if "busy" in r], arch)
        else:
            lines += [*rdna_forward(own, arch), *rdna_backward(own, arch)]
    return lines


def cdna_busy(rows: list[Row], arch: str) -> list[str]:
    forward = [r for r in rows if r["kernel"].startswith("attention_forward")]
    peers = [PEER] if arch == "gfx942" else []
    lines: list[str] = []
    if forward or peers:
        keys = ("busy", "busy_loop", "busy_causal", "busy_causal_loop")
        cells = []
        for r in [*forward, *peers]:
            name = r["kernel"] if r is PEER else f"`{r['kernel']}`"
            cells.append([name, str(r["vgpr"]), amount(r["lds"]), *(percent(r.get(key)) for key in keys)])
        title = "% of time that the tensor cores are busy at 300 / 600 / 1,200 clocks"
        head = ("kernel", "VGPR", "LDS", "no mask", "its loop", "causal", "its unmasked loop")
        lines += [f"**Attention forward, {arch}: {title}**", "", *table(head, cells), ""]
    if peers:
        lines += against_the_peer(forward)
        own: dict[str, float] = next((r["busy"] for r in forward if r["kernel"] == COMPARED), {})
        lost = [f"{int(key):,} clocks" for key in LATENCIES if key in own and own[key] < PEER["busy"][key]]
        lines += [f"It loses to the peer at {', '.join(lost)}.", ""] if lost else []
    backward = [r for r in rows if r["kernel"].startswith("attention_backward")]
    if backward:
        cells = [
            [f"`{r['kernel']}`", str(r["vgpr"]), amount(r["lds"]), percent(r["busy"]), percent(r.get("busy_loop"))]
            for r in backward
        ]
        columns = ("kernel", "VGPR", "LDS", "causal, length 1,024", "its unmasked loop")
        lines += [f"**Attention backward, {arch}: the same**", "", *table(columns, cells), ""]
    return lines


def rdna_forward(rows: list[Row], arch: str) -> list[str]:
    keys = "busy_by_waves", "busy_causal_by_waves"
    cells = [
        [f"`{r['kernel']}`", str(r["vgpr"]), amount(r["lds"])]
        + [percent(r[key][waves]) for waves in ("2", "4") for key in keys]
        for r in rows
        if "busy_by_waves" in r
    ]
    if not cells:
        return []
    head = ("kernel", "VGPR", "LDS", "two waves a SIMD: no mask", "causal", "four waves: no mask", "causal")
    return [f"**Attention forward, {arch}: the same, 2,304 keys**", "", *table(head, cells), ""]


def rdna_backward(rows: list[Row], arch: str) -> list[str]:
    cells = []
    for r in rows:
        if r["kernel"].startswith("attention_backward") and "busy_causal_by_waves" in r:
            shares = r["busy_causal_by_waves"]
            most = max(shares, key=int)
            size = [f"`{r['kernel']}`", str(r["vgpr"]), amount(r["lds"])]
            cells.append([*size, percent(shares["2"]), f"{most}: {percent(shares[most])}"])
    if not cells:
        return []
    head = ("kernel", "VGPR", "LDS", "two waves a SIMD", "as many as fit")
    return [f"**Attention backward, {arch}: the same, causal, length 2,304**", "", *table(head, cells), ""]


def against_the_peer(forward: list[Row]) -> list[str]:
    """The one point at which the model can be held to hardware. No speed is derived from it: the model's shares would
    give more than anybody has published."""
    own: dict[str, float] = next((r["busy"] for r in forward if r["kernel"] == COMPARED), {})
    if not own:
        return []
    ratios = " / ".join(f"{own[key] / PEER['busy'][key]:.2f}" for key in LATENCIES if key in own)
    measured = " and ".join(f"{rate} TFLOP/s at {tokens:,} tokens" for tokens, rate in PEER_TFLOPS.items())
    return [
        f"In this model `{COMPARED}` keeps the tensor cores busy {ratios} times as much as the peer at 300 / 600 /"
        f" 1,200 clocks. The peer's authors measured {measured} on an MI300X. The first is its best shape, and the only"
        " point at which the model is calibrated. So no TFLOP/s of our kernels are given here.",
        "",
    ]


def filled(rows: list[Row]) -> list[str]:
    """How the orders of a forward's work-groups fill a GPU, and what its dies read."""
    if not rows:
        return []
    names = list(rows[0]["busy"])
    cells = [
        [r["shape"].replace("x", " × "), f"{r['work_groups']:,}", percent(r["busy"], tuple(names))]
        + [" / ".join(f"{r['read'][name]:.1f}" for name in names)]
        for r in rows
    ]
    which = " / ".join(names)
    title = f"Causal attention forward, 304 compute units on 8 dies, by the order of its work-groups: {which}"
    head = ("B × T × H × G × D", "work-groups", "% of the compute units' time", "times that K and V are read into L2")
    note = "`placed` is what the kernels do: long blocks first, heads that share K and V on one die."
    return [f"**{title}**", "", *table(head, cells), "", note, ""]


def registers(rows: list[Row], title: str) -> list[str]:
    """VGPR and LDS of each kernel, by architecture."""
    found: dict[str, dict[str, Row]] = defaultdict(dict)
    for r in rows:
        found[r["kernel"]][r["arch"]] = r
    if not found:
        return []
    cells = [
        [f"`{name}`"] + [f"{of[a]['vgpr']}, {amount(of[a]['lds'])}" if a in of else "–" for a in ARCHITECTURES]
        for name, of in sorted(found.items())
    ]
    return [f"**{title}: VGPR, LDS**", "", *table(("kernel", *ARCHITECTURES), cells), ""]


def families(rows: list[Row]) -> dict[tuple[str, str], list[Row]]:
    """Kernels that differ in their layouts only (nn, nt, tn, tt), by architecture and name."""
    found: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for r in rows:
        found[r["arch"], re.sub(r"_(nn|nt|tn|tt)(?=_|$)", "_*", r["kernel"])].append(r)
    return found


def least(shares: Iterable[dict[str, float]]) -> dict[str, float]:
    """Rows for each number of waves."""
    found = list(shares)
    return {n: min(s[n] for s in found) for n in WAVES if all(n in s for s in found)}


def products(rows: list[Row]) -> list[str]:
    """The 16-bit GEMMs: large and small tiles, and those of pieces; then the float32 ones of RDNA."""
    wide, narrow = [], []
    for (arch, name), of in sorted(families(rows).items(), key=lambda item: ARCHITECTURES.index(item[0][0])):
        if all("busy_600" in r for r in of) and (name.endswith(("_big", "_small")) or "_split_" in name):
            keys = "busy_600", "busy_600_l1", "busy_600_l2"
            size = f"{max(r['vgpr'] for r in of)}, {amount(max(r['lds'] for r in of))}"
            read = f"{max(r['lines_64'] for r in of):.0f}" if all("lines_64" in r for r in of) else "–"
            busy = (percent(least(r.get(key, {}) for r in of), WAVES) for key in keys)
            wide.append([arch, f"`{name}`", size, *busy, read])
        elif arch.startswith("gfx1") and re.match("gemm_(f32|mix|nf4_f32|nf4_nested_f32)_", name):
            paired, others = min(r["dual_issued"] for r in of), max(r["vector_others"] for r in of)
            shares = (percent(least(r.get(key, {}) for r in of), WAVES) for key in ("peak_600", "peak_600_l1"))
            size = str(max(r["vgpr"] for r in of))
            narrow.append([arch, f"`{name}`", size, f"{100 * paired:.1f} %", str(others), *shares])
    lines = []
    if wide:
        title = "16-bit products: % of time that the tensor cores are busy at 600 clocks, with 1 / 2 / 4 waves a SIMD"
        title += " (–: do not fit, or not counted); lines of 128 bytes that L1 reads for 64 of K, the most"
        columns = ("architecture", "kernels", "VGPR, LDS", "least of its layouts", "with L1's bandwidth counted")
        lines += [f"**{title}**", "", *table((*columns, "with L2's too", "lines"), wide), ""]
    if narrow:
        title = "float32 products of RDNA, the worst layout: of the multiply-adds of a turn of the loop, those in pairs"
        title += "; other vector instructions; % of the peak at 600 clocks with 1 / 2 / 4 waves a SIMD (gfx1100)"
        head = ("architecture", "kernels", "VGPR", "in pairs", "others", "% of the peak", "with L1's bandwidth counted")
        lines += [f"**{title}**", "", *table(head, narrow), ""]
    return lines


def worst_error(rows: list[Row]) -> str:
    """Errors of results: a row may have errors of several (`o` and `lse` of the attention forward)."""
    found = [e for r in rows for e in r.get("error", {}).values()]
    errors = [max(e.values()) if isinstance(e, dict) else e for e in found]
    return f"{max(errors):.2g}" if errors else "–"


def executed(operators: list[Row], gemm: list[Row], attention: list[Row]) -> list[str]:
    """Table of kernels that ran instruction by instruction, and how far they were off."""
    cells = []
    for arch in ARCHITECTURES:
        ours, dense, flash = ([r for r in rows if r["arch"] == arch] for rows in (operators, gemm, attention))
        ran = [r for r in ours if "worst" in r]
        bits = "the same bits" if all(r["same_bits"] for r in ran) else "other bits"
        worst = max((r["worst"] for r in ran), default=0.0)
        cells.append([arch, f"{len(ran)} of {len(ours)}, {worst:.2g}, {bits}" if ours else "–"])
        cells[-1] += [f"{sum('error' in r for r in of)} of {len(of)}, {worst_error(of)}" for of in (dense, flash)]
    title = "Executed instruction by instruction, at sizes that divide nothing, waves forward and reversed"
    head = ("architecture", "operators: kernels, worst error in limits, by order", "products: kernels, worst error")
    note = "An error is relative to the largest result."
    lines = [f"**{title}**", "", *table((*head, "attention: kernels, worst error"), cells), ""]
    return [*lines, note, ""]


def shares(folder: Path) -> str:
    """Return hip/objects/shares.json: by architecture and kernel, the share of the peak rate that the model gives.

    It is the most at 600 clocks of memory latency, with as many waves as fit. The peak of CDNA4 is that of instructions
    of twice the depth, of which `deep` is the share in a loop; the others take as long for half the work.
    """
    found: dict[str, dict[str, float]] = defaultdict(dict)
    for row in [*read(folder, "hip_isa"), *read(folder, "hip_attention")]:
        by_waves = row.get("busy_600_l2") or row.get("busy_600_l1") or row.get("busy_600")
        if by_waves is None and (of_waves := row.get("busy_causal_by_waves")):
            by_waves = {waves: by_latency["600"] for waves, by_latency in of_waves.items()}
        if by_waves is None and (by_latency := row.get("busy_causal") or row.get("busy")):
            by_waves = {"1": by_latency["600"]}
        if by_waves is None and row.get("dual_issued"):  # the peak in float32 is of two operations an instruction
            by_waves = {"1": 1 / (2 - row["dual_issued"])}
        if by_waves:
            of_peak = (1 + row.get("deep", 1)) / 2
            found[row["arch"]][row["kernel"]] = round(of_peak * by_waves[max(by_waves, key=int)], 3)
    lines = [f' "{arch}": {json.dumps(dict(sorted(of.items())))}' for arch, of in sorted(found.items())]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def render_hip(folder: Path) -> str:
    """The text between the markers."""
    gemm, attention = read(folder, "hip_isa"), read(folder, "hip_attention")
    memory, operators = read(folder, "hip_isa_memory"), read(folder, "hip_executed")
    everything = [*gemm, *attention, *memory]
    spilling = sorted({f"`{r['kernel']}` ({r['arch']})" for r in everything if r["spills"] or r["scratch"]})
    lines = [
        f"{len(everything)} compiled kernels (each architecture's counted apart); of these spill registers or use"
        f" scratch memory: {', '.join(spilling) or 'none'}.",
        "",
        *attention_busy(attention),
        *filled(read(folder, "hip_grid")),
        *products(gemm),
        *executed(operators, gemm, attention),
        *registers(attention, "Attention"),
        *registers(memory, "Memory-bound kernels"),
    ]
    return "\n".join(lines)
