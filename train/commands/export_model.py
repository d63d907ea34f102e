"""`wgrad export TOOL`: the merged model in GGUF as Ollama, LM Studio or llama.cpp takes it."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import unicodedata
from contextlib import suppress
from pathlib import Path

from wgrad.device.errors import WgradError
from wgrad.train.commands.merge import run_merge
from wgrad.train.data.ollama_template import modelfile, ollama_template
from wgrad.train.data.tokenizer import Tokenizer, generation_options
from wgrad.train.data.tokenizer_source import open_tokenizer
from wgrad.train.files.decode import read_yaml
from wgrad.train.files.gguf_files import require_gguf
from wgrad.train.files.imatrix_file import IMATRIX_FILE
from wgrad.train.files.input_files import read_input
from wgrad.train.model.gguf_model import FILE
from wgrad.train.model.load_config import load_model_config
from wgrad.train.options.export_config import ModelExportConfig
from wgrad.train.options.finetune_config import CONFIG_FILE
from wgrad.train.options.model_options import DEFAULT_CONTEXT
from wgrad.train.step.find_model import find_base
from wgrad.train.terminal.output import say

MODELFILE = "Modelfile"
# Names in generation_config.json -> in a Modelfile, and as an option of llama-cli.
_SAMPLING = {
    "temperature": ("temperature", "--temp"),
    "top_p": ("top_p", "--top-p"),
    "top_k": ("top_k", "--top-k"),
    "min_p": ("min_p", "--min-p"),
    "repetition_penalty": ("repeat_penalty", "--repeat-penalty"),
}
_LM_STUDIO = ("~/.lmstudio/models", "~/.cache/lm-studio/models")  # its models folder now, and in older versions
_MOST_TEMPLATE = 1 << 20


def run_export_model(tool: str, args: ModelExportConfig) -> int:
    """Write the merged model for a tool and return the exit status. WgradError: an input or path cannot be used."""
    require_gguf(f"export {tool}", FILE)
    name = args.name or _plain_name(os.path.basename(os.path.realpath(args.adapter)))
    if tool == "ollama":
        return _ollama(args, name)
    if tool == "lmstudio":
        return _lm_studio(args, name)
    out = Path(args.out or Path(args.adapter, tool))
    run_merge(args.merge_config(str(out)))
    sampling = [word for option, value in _sampling(args) for word in (_SAMPLING[option][1], value)]
    say(f"run it: {shlex.join(['llama-cli', '-m', str(out / FILE), *sampling])}")
    return 0


def _plain_name(name: str) -> str:
    """Return a folder's name in the letters that Ollama takes: `my chät` is `my-chat`."""
    letters = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode()
    return re.sub(r"[^A-Za-z0-9._-]+", "-", letters).strip("-._") or "model"


def _ollama(args: ModelExportConfig, name: str) -> int:
    folder = find_base(args.model, args.adapter)
    config = load_model_config(folder)
    tokenizer, _ = open_tokenizer(folder, args.adapter, config.vocab_size)
    if args.template:
        text = read_input(args.template, "--template", _MOST_TEMPLATE).decode("utf-8", "replace").strip()
        if '"""' in text:
            raise WgradError(f'--template: {args.template} has """, which ends a TEMPLATE: write it as "\\"\\"\\""')
    else:
        found = ollama_template(tokenizer)
        text = found.text
        for note in found.notes:
            say(f"note: {note}", "stderr")
    stops = _stops(tokenizer)
    if not stops:
        say("note: no special token ends a turn, so Ollama stops only at its limit of tokens", "stderr")
    parameters = [(_SAMPLING[option][0], value) for option, value in _sampling(args)]
    parameters.append(("num_ctx", str(min(config.max_position_embeddings, _context(args.adapter)))))
    out = Path(args.out or Path(args.adapter, "ollama"))
    run_merge(args.merge_config(str(out)), {MODELFILE: modelfile(FILE, text, stops, parameters)})
    create = ["ollama", "create", name, "-f", str(out / MODELFILE)]
    program = shutil.which("ollama") if args.create else None
    if program is None:
        say(f"next: {shlex.join(create)} && {shlex.join(['ollama', 'run', name])}")
        return 0
    try:
        done = subprocess.run([program, *create[1:]], capture_output=True, encoding="utf-8", errors="replace")
        reason = " ".join(done.stderr.split())[-200:] if done.returncode else ""
    except OSError as error:
        reason = error.strerror or str(error)
    if reason:
        raise WgradError(
            f"export ollama: {out} is written, but `ollama create` failed ({reason}): start Ollama (ollama serve), "
            f"then run {shlex.join(create)}"
        )
    say(f"created {name} in Ollama; run it: {shlex.join(['ollama', 'run', name])}")
    return 0


def _lm_studio(args: ModelExportConfig, name: str) -> int:
    """Write MODELS/OWNER/NAME/NAME-TYPE.gguf, where LM Studio looks for models."""
    found = next((path for path in map(os.path.expanduser, _LM_STUDIO) if os.path.isdir(path)), None)
    models = Path(args.out or found or Path(args.adapter, "lmstudio"))
    owner, _, model = name.replace(":", "-").rpartition("/")
    folder = models / (owner or "wgrad") / model
    run_merge(args.merge_config(str(folder)))
    file = folder / (f"{model}.gguf" if args.quantize == "none" else f"{model}-{args.quantize.upper()}.gguf")
    os.replace(folder / FILE, file)
    say(f"renamed it to {file}")
    (folder / IMATRIX_FILE).unlink(missing_ok=True)  # LM Studio would list it as a model
    if args.out or found:
        say(f"LM Studio shows it as {folder.relative_to(models)}, in {models}")
    else:
        say(f"no LM Studio found: copy {models / (owner or 'wgrad')} into its models folder ({_LM_STUDIO[0]})")
    return 0


def _stops(tokenizer: Tokenizer) -> list[str]:
    """Return the special tokens that end an answer, each once."""
    return list(dict.fromkeys(filter(None, map(tokenizer.special_text, sorted(tokenizer.stop_ids)))))


def _sampling(args: ModelExportConfig) -> list[tuple[str, str]]:
    """Return the sampling options of the adapter's generation_config.json, or else of the base model's."""
    folders = (Path(args.adapter), find_base(args.model, args.adapter))
    options = next((found for folder in folders if (found := generation_options(folder))), {})
    if options.get("do_sample") is False:
        options = options | {"temperature": 0}
    values = {name: options.get(name) for name in _SAMPLING}
    return [(n, f"{v:g}") for n, v in values.items() if isinstance(v, (int, float)) and not isinstance(v, bool)]


def _context(adapter: str) -> int:
    """Return the tokens of a conversation: the run's --max-length, but at least wgrad's own default."""
    path, trained = Path(adapter, CONFIG_FILE), 0
    with suppress(WgradError):  # another tool's file of that name
        found = read_yaml(path, "--adapter") if path.is_file() else None
        length = found.get("max_length") if isinstance(found, dict) else None
        trained = length if isinstance(length, int) else 0
    return max(DEFAULT_CONTEXT, trained)
