"""Write the measured tables of README.md, docs/benchmarks.md and bench/notes from bench/results/*.jsonl.

    python bench/make_table.py [--results FOLDER] [--check]

README.md has whole steps next to peers, docs/benchmarks.md the same and the steps of each GPU, bench/notes/all-rows.md
every row. `ratio` is wgrad's speed over the peer's in the same run: below 1 the peer is faster, and those rows are
listed once more under "Where it loses". HIP kernels, which no GPU has run, have markers of their own in
bench/notes/hip.md, and their shares of peak rates go into hip/objects/shares.json. Reports of GPUs (gpu_table.py) are
in docs/reference/gpus.md. --check writes nothing and exits 1 where a page is not up to date.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

from gpu_table import gpu_table
from hip_tables import render_hip, shares
from pages import Row, splice, table

HERE = Path(__file__).parent
EVEN = 0.97  # a ratio above this is not called a loss: the spread between runs is of this size


def read_rows(folder: Path) -> list[Row]:
    """Every row of every file, with `bench`: the file's name up to the first dash (train-h100.jsonl is of train)."""
    rows = []
    # Without counts of instructions and bytes of memory, which are no figures of a GPU.
    for path in sorted(p for p in folder.glob("*.jsonl") if not p.name.startswith(("hip_", "plan_", "radv", "anv"))):
        for line in path.read_text(encoding="utf-8").splitlines():
            rows.append({**json.loads(line), "bench": path.stem.split("-")[0]})
    return rows


def number(value: float | None, digits: int = 3) -> str:
    """Format with three significant digits and thousands separated; a dash where nothing was measured."""
    if value is None:
        return "–"
    rounded = float(f"{value:.{digits}g}")
    return f"{rounded:,.0f}" if rounded >= 10 ** (digits - 1) else f"{rounded:g}"


def ratio(ours: float, peer: float | None) -> str:
    return "–" if peer is None else f"{ours / peer:.2f}"


def speed_and_memory(row: Row | None) -> str:
    """Return tokens/s and the peak in GiB of a step."""
    return f"{number(row['tokens_per_second'], 4)} in {row['peak_gib']:.3g}" if row else "–"


class Losses:
    """Rows where a peer is faster, collected while the tables are made."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def add(self, what: str, ours: float, peer: float | None, whose: str) -> None:
        if peer is not None and ours / peer < EVEN:
            self.lines.append(f"- {what}: {ours / peer:.2f} of {whose}")


def recomputed(row: Row) -> str:
    """Describe a step's checkpointing: whether, how many layers are offloaded, whether attention outputs are kept."""
    if not row["checkpointing"]:
        return "off"
    on = (
        f"{row['recomputed']} of {row['layers']}"
        if row.get("recomputed", row.get("layers")) != row.get("layers")
        else "on"
    )
    offloaded, kept = row.get("offload_checkpoints", False), ", attention kept" * row.get("attention_kept", False)
    if not offloaded:
        return on + kept
    number = "" if offloaded is True else f" {offloaded} of {row['layers']}"
    return f"{on},{number} offloaded{kept}"


def compute(row: Row) -> str:
    return row["compute"] + ", 8-bit matmuls" * row.get("int8_products", False)


def train_table(rows: list[Row], losses: Losses) -> list[str]:
    """Whole QLoRA steps, each next to the peer's."""
    same = ("work", "checkpointing", "batch", "seq_len")
    rows = [{"batch": 1, **row} for row in rows]
    peers = {tuple(r[k] for k in same): r for r in rows if r["stack"] != "wgrad"}
    lines = []
    for row in (row for row in rows if row["stack"] == "wgrad"):
        peer = peers.get(tuple(row[k] for k in same))
        if peer:
            what = f"{row['work']}, {compute(row)}"
            whose = f"{peer['stack']}'s ({peer['compute']})"
            losses.add(f"{what}, tokens/s", row["tokens_per_second"], peer["tokens_per_second"], whose)
            if row["peak_gib"] > peer.get("peak_gib", row["peak_gib"]):
                losses.lines.append(f"- {what}, peak memory: {row['peak_gib'] / peer['peak_gib']:.2f} times {whose}")
        batch, recomputing = f"{row['batch']} × {row['seq_len']}", recomputed(row)
        lines.append([
            row["work"], batch, compute(row), recomputing,
            number(row["tokens_per_second"], 4), number(row["ms_per_step"]), number(row.get("peak_gib")),
            speed_and_memory(peer), ratio(row["tokens_per_second"], peer["tokens_per_second"]) if peer else "–",
        ])  # fmt: skip
    title = "QLoRA step (NF4, double quantization, r = 16, seven projections)"
    head = ("model", "batch", "compute", "checkpointing", "tokens/s", "ms per step", "peak GiB", "PEFT", "ratio")
    return [f"**{title}**", "", *table(head, lines)]


def peers_table(rows: list[Row]) -> str:
    """Whole steps next to a peer's, a line for each shape: tokens/s and peak GiB of the default, below a memory limit,
    and of the peer with and without checkpointing; ratio: of the default to the faster of these."""
    lines = []
    for work, batch in dict.fromkeys((r["work"], r["batch"]) for r in rows):
        here = [r for r in rows if (r["work"], r["batch"]) == (work, batch)]
        own = [r for r in here if r["stack"] == "wgrad"]
        peer = [r for r in here if r["stack"] != "wgrad"]
        found = [next((r for r in own if bool(r["memory_limit"]) == limited), None) for limited in (False, True)]
        found += [next((r for r in peer if r["checkpointing"] == way), None) for way in (True, False)]
        cells = [speed_and_memory(row) for row in found]
        best = max(r["tokens_per_second"] for r in peer)
        lines.append([work, str(batch), *cells, ratio(found[0]["tokens_per_second"], best) if found[0] else "–"])
    head = ("model", "batch", "wgrad", "in less memory", "Unsloth, checkpointing", "without", "ratio")
    return "\n".join(table(head, lines))


def experts_table(rows: list[Row]) -> str:
    """Whole steps of mixtures of experts next to PEFT's: tokens/s and peak GiB by batch, and wgrad's over PEFT's."""
    found = {(r["work"], r["stack"] == "wgrad", r["batch"]): r for r in rows}
    batches, lines = sorted({batch for *_, batch in found}), []
    for work in dict.fromkeys(work for work, own, _ in found if own):
        name, adapted, _ = work.partition(", experts adapted")
        cells = [name, "attention and experts" if adapted else "attention"]
        for batch in batches:
            own, peer = (found.get((work, own, batch)) for own in (True, False))
            cells += [speed_and_memory(own), speed_and_memory(peer)]
            cells.append(ratio(own["tokens_per_second"], peer["tokens_per_second"] if peer else None) if own else "–")
        lines.append(cells)
    head = ["model", "LoRA on"]
    for batch in batches:
        head += [f"batch {batch}: wgrad", "PEFT", "ratio"]
    return "\n".join(table(head, lines))


def gemm_table(rows: list[Row], losses: Losses) -> list[str]:
    """Return the table of dense and NF4 GEMMs, with the tile that a run takes, next to torch's float32 GEMM."""
    torch = {(r["op"], r["m"], r["n"], r["k"]): r["tflops"] for r in rows if "torch" in str(r.get("tile"))}
    own = {
        (r["op"], r["m"], r["n"], r["k"]): r
        for r in rows
        if "torch" not in str(r.get("tile")) and r.get("chosen", True)
    }
    lines = []
    for (op, m, n, k), row in own.items():
        peer = torch.get((op, m, n, k))
        losses.add(f"{op} {m} × {n} × {k}", row["tflops"], peer, "torch's float32 product")
        lines.append([op, f"{m} × {n} × {k}", number(row["tflops"]), number(peer), ratio(row["tflops"], peer)])
    head = ("product", "M × N × K", "TFLOP/s", "torch float32", "ratio")
    return ["**Matrix products, float32**", "", *table(head, lines)]


def attention_table(rows: list[Row], losses: Losses) -> list[str]:
    """Forward, and forward with backward. The last row of a kind counts, as a sweep ends with its choice."""
    last: dict[tuple[str, str, str], Row] = {(r["op"], r["shape"], r["dtype"]): r for r in rows}
    lines = []
    for shape, dtype in dict.fromkeys((r["shape"], r["dtype"]) for r in rows if r["op"] == "attention backward"):
        forward, backward = last.get(("attention forward", shape, dtype)), last["attention backward", shape, dtype]
        if forward is None:
            continue
        both = forward["us"] + backward["us"]
        for name, ours in (("forward", forward["us"]), ("forward and backward", both)):
            kind = "torch sdpa " + ("forward" if name == "forward" else "both")
            half, same = (last.get((kind, shape, d), {}).get("us") for d in ("bfloat16", dtype))
            peer = half if dtype == "float16" else same
            losses.add(f"attention {name}, {shape}, {dtype}", 1 / ours, 1 / peer if peer else None, "torch's SDPA")
            cells = [name, shape.replace("x", " × "), dtype, number(ours), number(peer), number(half)]
            lines.append([*cells, ratio(1 / ours, 1 / peer if peer else None)])
    head = ("attention, causal", "B × T × H × G × D", "dtype", "µs", "SDPA µs", "SDPA bfloat16 µs", "ratio")
    return ["**Attention**", "", *table(head, lines)] if lines else []


def memory_table(rows: list[Row], losses: Losses) -> list[str]:
    lines = []
    for row in rows:
        peer = row.get("torch_gb_per_s")
        losses.add(f"{row['op']}, {row['dtype']}", row["gb_per_s"], peer, "torch's (eager; bitsandbytes for NF4)")
        rate = number(row["gb_per_s"], 4)
        share = f"{100 * row['share']:.0f} %"
        lines.append([row["op"], row["dtype"], rate, share, number(peer, 4), ratio(row["gb_per_s"], peer)])
    head = ("operator", "dtype", "GB/s", "of the copy", "torch GB/s", "ratio")
    return ["**Memory-bound operators**", "", *table(head, lines)]


TABLES: dict[str, Callable[[list[Row], Losses], list[str]]] = {
    "train": train_table,
    "gemm": gemm_table,
    "attention": attention_table,
    "memory_ops": memory_table,
}


def render(rows: list[Row], short: bool = False) -> str:
    """The sections of all GPUs. short: only whole steps, without a list of losses (each row has its ratio)."""
    rows = [r for r in rows if r["bench"] == "train"] if short else [r for r in rows if r["bench"] != "peers"]
    if not rows:
        return "No figures are committed yet: `bench/results` is empty.\n"
    lines: list[str] = []
    for device in dict.fromkeys(r["device"] for r in rows):
        here = [r for r in rows if r["device"] == device]
        said = {key: sorted({str(r[key]) for r in here if key in r}) for key in ("wgpu", "python", "torch", "date")}
        losses = Losses()
        tables: list[str] = []
        for bench, make in TABLES.items():
            part = [r for r in here if r["bench"] == bench]
            made = make(part, losses) if part else []
            tables += [*made, ""] if made else []
        if tables:  # sections that only other pages show have none
            versions = ", ".join(f"{k} {' and '.join(v)}" for k, v in said.items() if v)
            lines += [f"### {device}", "", f"{versions}.", "", *tables]
        if losses.lines and not short:
            lines += ["**Where it loses** (speed as a share of the peer's, in the same run)", "", *losses.lines, ""]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    rows, stale = read_rows(args.results), 0
    peers = peers_table([row for row in rows if row["bench"] == "peers"])
    experts = experts_table([row for row in rows if row["bench"] == "experts_train"])
    pages = {
        "README.md": {"peers": peers},
        "docs/benchmarks.md": {"peers": peers, "experts": experts, "measured": render(rows, short=True)},
        "bench/notes/all-rows.md": {"measured": render(rows)},
        "bench/notes/hip.md": {"hip": render_hip(args.results)},
        "docs/reference/gpus.md": {"gpus": gpu_table(sorted(args.results.glob("gpu-*.json")))},
    }
    files = {"hip/objects/shares.json": shares(args.results)}
    for page, sections in pages.items():
        path = HERE.parent / page
        new = path.read_text(encoding="utf-8")
        for name, text in sections.items():
            new = splice(new, text, name)
        files[page] = new
    for page, new in files.items():
        path = HERE.parent / page
        old = path.read_text(encoding="utf-8") if path.exists() else ""
        if args.check and new != old:
            print(f"{page} is not up to date: run python bench/make_table.py", file=sys.stderr)
            stale = 1
        elif new != old:
            path.write_text(new, encoding="utf-8")
    return stale


if __name__ == "__main__":
    sys.exit(main())
