"""`wgrad import-config`: a configuration of axolotl, LLaMA-Factory or TRL as one of `wgrad finetune`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from wgrad.device.errors import WgradError
from wgrad.device.files import check_writable, write_text
from wgrad.device.shown import short
from wgrad.train.files.decode import read_json, read_yaml
from wgrad.train.files.input_files import exists
from wgrad.train.options.finetune_config import RunOptions
from wgrad.train.options.foreign_config import find_tool, import_config
from wgrad.train.options.import_options import ImportOptions
from wgrad.train.terminal.output import Output, say


def run_import(args: ImportOptions) -> int:
    """Write the options and return the exit status. WgradError: the file cannot be read, or is no configuration."""
    values: Any = read_yaml(args.file, "import-config")
    if not isinstance(values, dict) or not values:
        raise WgradError(f"import-config: {args.file}: expected lines like 'base_model: NAME', got {short(values)}")
    tool = args.tool or find_tool(values)
    found = import_config(values, tool, args.objective)
    if found.no_objective:
        raise WgradError(f"import-config: {args.file}: {found.no_objective}: give --objective")
    if "data" not in found.options and (files := _files_of_names(values, Path(args.file).parent)):
        found.options["data"] = files
        found.left = [one for one in found.left if one[0] != "dataset"]
    converted = RunOptions(**found.options).to_dict()
    text = yaml.safe_dump(
        {name: converted[name] for name in found.options},
        sort_keys=False,
        allow_unicode=True,
        default_flow_style=False,
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


def _files_of_names(values: dict[str, Any], beside: Path) -> list[str]:
    """Return the files or hub ids that LLaMA-Factory's dataset_info.json gives for names; []: one is missing.

    Args:
        values: The configuration.
        beside: Folder of its file, to which dataset_dir may be relative.
    """
    given = Path(str(values.get("dataset_dir") or "data"))
    folder = next((path for path in (given, beside / given) if (path / "dataset_info.json").is_file()), None)
    names = [name.strip() for name in str(values.get("dataset") or "").split(",") if name.strip()]
    if folder is None or not names:
        return []
    known = read_json(folder / "dataset_info.json", dict[str, dict[str, Any]], "import-config")
    found = []
    for entry in (known.get(name, {}) for name in names):
        if file := entry.get("file_name"):
            found.append(str(folder / file))
        elif hub_id := entry.get("hf_hub_url"):
            found.append(str(hub_id))
    return found if len(found) == len(names) else []
