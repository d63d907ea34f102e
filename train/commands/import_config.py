"""`wgrad import-config`: a configuration of axolotl, LLaMA-Factory or TRL as one of `wgrad finetune`."""

from __future__ import annotations

from typing import Any

import yaml

from wgrad.device.errors import WgradError
from wgrad.device.files import check_writable, write_text
from wgrad.train.files.decode import read_yaml
from wgrad.train.files.input_files import exists
from wgrad.train.options.finetune_config import RunOptions
from wgrad.train.options.foreign_config import find_tool, import_config
from wgrad.train.options.import_options import ImportOptions
from wgrad.train.options.options import short
from wgrad.train.terminal.output import Output, say


def run_import(args: ImportOptions) -> int:
    """`wgrad import-config`. -> exit status. WgradError: the file cannot be read, or is no configuration."""
    values: Any = read_yaml(args.file, "import-config")
    if not isinstance(values, dict) or not values:
        raise WgradError(f"import-config: {args.file}: expected lines like 'base_model: NAME', got {short(values)}")
    tool = args.tool or find_tool(values)
    found = import_config(values, tool)
    converted = RunOptions(**found.options).to_dict()
    text = yaml.safe_dump(
        {name: converted[name] for name in found.options},
        sort_keys=False,
        allow_unicode=True,
        default_flow_style=None,
        width=10**6,
    )
    if args.out:
        if exists(args.out, "--out"):
            raise WgradError(f"--out: {args.out} is there already: give another name, or remove it")
        check_writable(args.out, "--out")
        write_text(args.out, text)
    else:
        Output().write(text)
    for key, value, reason in found.left:
        say(f"left out: {key}: {short(value)} ({reason})", "stderr")
    for name in ("model", "data", "out"):
        if name not in found.options:
            say(f"note: {name} is still to give: in the file, or as --{name}", "stderr")
    return 0
