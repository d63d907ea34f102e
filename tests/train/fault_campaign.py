"""Every fault at every moment: `python -m tests.train.fault_campaign [FOLDER]`.

Kills, full disks and read-only disks at each call of a run that changes files, and a resumed run after each, compared
with the run that nothing happened to. A few minutes; the moments that CI tries are some of these.
"""

from __future__ import annotations

import errno
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.train import conftest, test_faults


def main() -> int:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
    sizes: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "num_hidden_layers": 1}
    config = conftest.tiny_config(hidden_size=16, intermediate_size=24, **sizes)
    model = conftest.write_checkpoint(folder / "model", config, conftest.random_weights(config))
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in conftest.SENTENCES * 4))
    runs = test_faults.Runs(folder, model, data)
    kinds = {
        "killed": (test_faults.kill, (test_faults.KILLED,)),
        "disk full": (test_faults.disk(errno.ENOSPC), (2, 0)),
        "read-only": (test_faults.disk(errno.EROFS), (2, 0)),
        "input/output error": (test_faults.disk(errno.EIO), (2, 0)),
    }
    for name, (fault, statuses) in kinds.items():
        for at in range(1, runs.calls + 1):
            runs.after(at, fault, statuses)
        print(f"{name}: {runs.calls} moments, each resumed to the same bits", flush=True)
    pages, said = 0, "the disk is full"
    while "the disk is full" in said:
        pages += 1
        said = test_faults.on_a_small_disk(runs, pages)
    print(f"small disks: 1 to {pages} pages, each resumed to the same bits once larger", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
