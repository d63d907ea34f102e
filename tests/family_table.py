"""Writes the tables of docs/reference/models.md: families, as the tests compare them, multimodal models and GGUF types.

python -m tests.family_table
"""

from __future__ import annotations

from pathlib import Path

import gguf

from tests.families.table import FAMILY_ROWS
from wgrad.device.formats.frozen_weight import gguf_formats
from wgrad.train.model.families import FAMILIES
from wgrad.train.model.gguf_mix import MIXES
from wgrad.train.model.multimodal import MULTIMODAL

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "models.md"
BEGIN, END = "<!-- {}: written by `python -m tests.family_table` -->\n", "<!-- end of {} -->\n"


def families() -> str:
    """Return a row for each family, with the number of configurations compared (logits, loss, gradients)."""
    rows = ["| family | architecture | configurations compared | GGUF |", "| --- | --- | --- | --- |"]
    for name, family in sorted(FAMILIES.items(), key=lambda item: title(item[0]).lower()):
        names = [family.gguf, *dict(family.gguf_others).values()]
        without = f"llama.cpp {family.no_gguf}" if family.no_gguf else "not in llama.cpp"
        there = ", ".join(f"`{name}`" for name in names) if family.gguf else without
        rows.append(f"| {title(name)} | `{name}` | {len(FAMILY_ROWS[name].cases)} | {there} |")
    return "\n".join(row.replace("|  |", "| |") for row in rows) + "\n"


def multimodal() -> str:
    rows = ["| text part | multimodal architectures |", "| --- | --- |"]
    found: dict[str, list[str]] = {}
    for name, whole in sorted(MULTIMODAL.items()):
        parts = list(dict.fromkeys(whole.texts.values()))
        part = title(parts[0]) if len(parts) == 1 else "any family of this page"
        found.setdefault(part, []).append(f"`{name.removesuffix('ForConditionalGeneration')}`")
    rows += [
        f"| {part} | {', '.join(names)} |" for part, names in sorted(found.items(), key=lambda item: item[0].lower())
    ]
    return "\n".join(rows) + "\n"


def formats() -> str:
    rows = ["| GGUF type | bits per weight | written by `--quantize` |", "| --- | --- | --- |"]
    sizes = {kind.name: size for kind, size in gguf.GGML_QUANT_SIZES.items()}
    mixes: dict[str, list[str]] = {}
    for mix, kind in MIXES.items():
        mixes.setdefault(kind, []).append(f"`{mix}`")
    for kind in ("F32", "F16", "BF16", *sorted(gguf_formats(), key=lambda kind: (bits(sizes[kind]), kind))):
        rows.append(f"| {kind} | {bits(sizes[kind]):g} | {', '.join(mixes.get(kind, []))} |")
    return "\n".join(row.replace("|  |", "| |") for row in rows) + "\n"


def bits(size: tuple[int, int]) -> float:
    """size: elements and bytes of a block."""
    return 8 * size[1] / size[0]


def title(name: str) -> str:
    return FAMILIES[name].title or name.removesuffix("ForCausalLM")


def page(text: str) -> str:
    """The page with its tables as they must be."""
    for name, table in {"families": families(), "multimodal": multimodal(), "formats": formats()}.items():
        begin, end = BEGIN.format(name), END.format(name)
        before, _, rest = text.partition(begin)
        text = before + begin + "\n" + table + "\n" + end + rest.partition(end)[2]
    return text


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
