"""Every fault at every moment: `python tests/train/fault_campaign.py [FOLDER]`.

Kills, full disks and read-only disks at each call of a run that changes files, and a resumed run after each, compared
with the run that nothing happened to. A few minutes; the moments that CI tries are some of these.
"""

from __future__ import annotations

import errno
import importlib.util
import json
import sys
import tempfile
from pathlib import Path
from typing import Any


def load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def main() -> int:
    shared, faults = load("conftest"), load("test_faults")
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
    sizes = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "num_hidden_layers": 1}
    config = shared.tiny_config(hidden_size=16, intermediate_size=24, **sizes)
    model = shared.write_checkpoint(folder / "model", config, shared.random_weights(config))
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in shared.SENTENCES * 4))
    runs = faults.Runs(folder, model, data)
    kinds = {
        "killed": (faults.kill, (faults.KILLED,)),
        "disk full": (faults.disk(errno.ENOSPC), (2, 0)),
        "read-only": (faults.disk(errno.EROFS), (2, 0)),
        "input/output error": (faults.disk(errno.EIO), (2, 0)),
    }
    for name, (fault, statuses) in kinds.items():
        for at in range(1, runs.calls + 1):
            runs.after(at, fault, statuses)
        print(f"{name}: {runs.calls} moments, each resumed to the same bits", flush=True)
    pages, said = 0, "the disk is full"
    while "the disk is full" in said:
        pages += 1
        said = faults.on_a_small_disk(runs, pages)
    print(f"small disks: 1 to {pages} pages, each resumed to the same bits once larger", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
