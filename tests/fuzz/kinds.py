"""The kinds of input: which file is changed, how, and which command then reads it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from random import Random
from typing import Any

from tests.fuzz.base import (
    CHAT,
    EXPORT,
    FINETUNE,
    GENERATE,
    KINDS,
    LABELS,
    MERGE,
    PREFERENCES,
    RESUME,
    ROPES,
    SPECIAL,
    dump,
    model_config,
)
from tests.fuzz.caches import cache_case
from tests.fuzz.case import Case, Content, Files, Special
from tests.fuzz.commands import command_case
from tests.fuzz.families import family_case
from tests.fuzz.folders import folder_case
from tests.fuzz.gguf_keys import gguf_keys_case
from tests.fuzz.guided import guided_case
from tests.fuzz.library import python_case
from tests.fuzz.names import names_case
from tests.fuzz.options import option_case, option_names, stream_case
from tests.fuzz.packed import experts_case, packed_case
from tests.fuzz.readers import request_case, served_case, tensors_case
from tests.fuzz.reports import report_case
from tests.fuzz.servers import serve_case, studio_case, watch_case
from tests.fuzz.surroundings import surroundings_case
from tests.fuzz.sweeps import sweep_case
from tests.fuzz.tables import columns_case, keys_case, table_case
from tests.fuzz.texts import conversation, data_lines, mutate_template, yaml_text
from tests.fuzz.tools import imatrix_case, import_case, modelfile_case
from tests.fuzz.values import LFS_POINTER, hostile, mutate_bytes, mutate_json, write_json
from tests.fuzz.vocabularies import vocabulary_case
from tests.fuzz.weights import join, mutate_gguf, mutate_quant_state, mutate_safetensors, split
from tests.fuzz.words import DATA_NAMES, ROLE_TEMPLATES, SHARD_NAMES, TOKENIZER_PARTS
from wgrad.train.options.choices import TEMPLATES
from wgrad.train.output.checkpoints import INFO_FILE, _signed

Groups = dict[str, Files]
MODELS = ["model", "mistral", "qwen2", "qwen3", "smollm3"]


def commands(rng: Random) -> list[str]:
    """A command that reads the whole of a model; `generate` three times in four, because it is quicker."""
    if rng.random() < 0.75:
        return [*GENERATE, "x", *rng.choice(([], [], ["--chat"], ["--no-quantize"]))]
    return [*FINETUNE, "--max-steps", "1", *rng.choice(([], [], ["--full"]))]


def _bytes(groups: Groups, group: str, name: str) -> bytes:
    content = groups[group][name]
    assert isinstance(content, bytes)
    return content


def config_case(rng: Random, groups: Groups) -> Case:
    name = "model/config.json"
    group = rng.choice(MODELS)
    architecture = next(a for a, kind in KINDS.items() if kind == group or (kind == "llama" and group == "model"))
    text = dump(model_config(architecture, rng.randrange(len(ROPES))))
    if rng.random() < 0.1:
        group = rng.choice(("nf4", "nf4-nested"))
        text = _bytes(groups, group, name)
    return Case(commands(rng), [group, "data"], {name: mutate_json(rng, text)})


def generation_config_case(rng: Random, groups: Groups) -> Case:
    name = "model/generation_config.json"
    return Case([*GENERATE, "x"], ["model"], {name: mutate_json(rng, _bytes(groups, "model", name))})


def weights_case(rng: Random, groups: Groups) -> Case:
    group, name = rng.choice(MODELS), "model/model.safetensors"
    return Case(commands(rng), [group, "data"], {name: mutate_safetensors(rng, _bytes(groups, group, name))})


def quantized_case(rng: Random, groups: Groups) -> Case:
    group, name = rng.choice(("nf4", "nf4-nested")), "model/model.safetensors"
    return Case(commands(rng), [group, "data"], {name: mutate_quant_state(rng, _bytes(groups, group, name))})


def gguf_case(rng: Random, groups: Groups) -> Case:
    group, name = rng.choice(("gguf", "gguf-alone")), "model/model.gguf"
    return Case(commands(rng), [group, "data"], {name: mutate_gguf(rng, _bytes(groups, group, name))})


SHARDS = [f"model-{i:05d}-of-00002.safetensors" for i in (1, 2)]


def index_case(rng: Random, groups: Groups) -> Case:
    """A model in two shards, its index changed; now and then a shard."""
    header, body = split(_bytes(groups, "model", "model/model.safetensors"))
    names = sorted(n for n in header if n != "__metadata__")
    shards = [_shard(header, body, names[i::2]) for i in range(2)]
    index: dict[str, Any] = {
        "metadata": {"total_size": len(body)},
        "weight_map": {n: SHARDS[i % 2] for i, n in enumerate(names)},
    }
    if rng.random() < 0.3:
        index["weight_map"][rng.choice(names)] = rng.choice(SHARD_NAMES)
        text = dump(index)
    elif rng.random() < 0.85:
        text = mutate_json(rng, dump(index))
    else:
        text = dump(index)
        at = rng.randrange(2)
        shards[at] = mutate_safetensors(rng, shards[at])
    files: Files = {"model/model.safetensors.index.json": text, "model/model.safetensors": Special("absent")}
    return Case(commands(rng), ["model", "data"], files | {f"model/{n}": s for n, s in zip(SHARDS, shards)})


def _shard(header: dict, body: bytes, names: list[str]) -> bytes:
    own, parts, at = {}, [], 0
    for name in names:
        begin, end = header[name]["data_offsets"]
        own[name] = header[name] | {"data_offsets": [at, at + end - begin]}
        parts.append(body[begin:end])
        at += end - begin
    return join(json.dumps(own).encode(), b"".join(parts))


def tokenizer_case(rng: Random, groups: Groups) -> Case:
    name = "model/tokenizer.json"
    text = _bytes(groups, "model", name)
    if rng.random() < 0.35:
        value = json.loads(text)
        for part in rng.sample(sorted(TOKENIZER_PARTS), rng.choice((1, 1, 2))):
            value[part] = rng.choice(TOKENIZER_PARTS[part])
        text = dump(value)
        if rng.random() < 0.5:
            text = mutate_json(rng, text)
    else:
        text = mutate_json(rng, text)
    argv = rng.choice(
        ([*GENERATE, "x a é"], [*GENERATE, "x", "--chat"], [*FINETUNE, "--max-steps", "1", "--max-length", "64"])
    )
    return Case(list(argv), ["model", "data"], {name: text})


def tokenizer_config_case(rng: Random, groups: Groups) -> Case:
    name = rng.choice(("model/tokenizer_config.json", "model/special_tokens_map.json", "model/added_tokens.json"))
    text = groups["model"].get(name, dump({t: i for i, t in enumerate(SPECIAL)}))
    assert isinstance(text, bytes)
    argv = rng.choice(
        ([*GENERATE, "x"], [*GENERATE, "x", "--chat"], [*FINETUNE, "--max-steps", "1", "--max-length", "64"])
    )
    return Case(list(argv), ["model", "data"], {name: mutate_json(rng, text)})


def template_case(rng: Random, groups: Groups) -> Case:
    """Make a case with a chat template in its own file, in tokenizer_config.json, or in chat_template.json."""
    source = mutate_template(rng, CHAT)
    kind = rng.randrange(4)
    if kind < 2:
        files: Files = {"model/chat_template.jinja": source}
    else:
        config = json.loads(_bytes(groups, "model", "model/tokenizer_config.json"))
        text = source.decode("utf-8", "replace")
        named = [{"name": "default", "template": text}, {"name": "tool_use", "template": CHAT}]
        if kind == 2:
            config["chat_template"] = rng.choice((text, named, hostile(rng)))
            files = {"model/tokenizer_config.json": write_json(rng, config)}
        else:
            del config["chat_template"]
            files = {
                "model/tokenizer_config.json": dump(config),
                "model/chat_template.json": write_json(rng, {"chat_template": text}),
            }
    if rng.random() < 0.5:
        return Case([*GENERATE, "x", "--chat"], ["model"], files)
    return Case([*FINETUNE, "--max-steps", "1", "--max-length", "64"], ["model", "chat"], files)


def roles_case(rng: Random, groups: Groups) -> Case:
    """Conversations of any roles, parts and calls, with a template that knows some."""
    source = rng.choice(ROLE_TEMPLATES)
    template: Content = mutate_template(rng, source) if rng.random() < 0.3 else source.encode()
    lines = b"".join(dump({"messages": conversation(rng)}) + b"\n" for _ in range(rng.choice((1, 2, 5))))
    chosen = rng.choice(("mine.jinja", "mine.jinja", "mine.jinja", *TEMPLATES, "no-such", "model", ""))
    data = ["data", "show", "data.jsonl", "--model", "model", *rng.choice(([], ["--loss-on", "all"]))]
    prompts = [*GENERATE[:1], "--prompts", "data.jsonl", "--max-new-tokens", "1", "--model", "model", "--device", "cpu"]
    argv = rng.choice((data, data, prompts, [*FINETUNE, "--max-steps", "1", "--max-length", "64"]))
    return Case([*argv, "--chat-template", chosen], ["model"], {"mine.jinja": template, "data.jsonl": lines})


def adapter_case(rng: Random, groups: Groups) -> Case:
    name = rng.choice(
        ("adapter/adapter_config.json", "adapter/adapter_config.json", "adapter/adapter_model.safetensors")
    )
    change = mutate_json if name.endswith("json") else mutate_safetensors
    finetune = [a for a in [*FINETUNE, "--max-steps", "1"] if a not in ("--lora-r", "2")]
    argv = rng.choice(([*GENERATE, "x"], EXPORT, MERGE, finetune))
    return Case(
        [*argv, "--adapter", "adapter"],
        ["model", "data", "adapter"],
        {name: change(rng, _bytes(groups, "adapter", name))},
    )


def yaml_case(rng: Random, groups: Groups) -> Case:
    argv = ["finetune", "--config", "run.yaml", *FINETUNE[1:], "--max-steps", "1"]
    if rng.random() < 0.5:  # values of the file are then not covered by the command line's
        argv = [
            "finetune",
            "--config",
            "run.yaml",
            *FINETUNE[1:7],
            "--max-length",
            "64",
            "--device",
            "cpu",
            "--max-steps",
            "1",
        ]
    return Case(argv, ["model", "data"], {"run.yaml": yaml_text(rng, option_names())})


def data_case(rng: Random, groups: Groups) -> Case:
    argv = [*FINETUNE, "--max-steps", "1", "--max-length", rng.choice(("16", "64", "256"))]
    argv += rng.choice(([], [], ["--loss-on", "all"], ["--no-packing"], ["--eval-fraction", "0.5"], ["--full"]))
    name = rng.choice(DATA_NAMES)
    if rng.random() < 0.15:
        return Case([*argv, "--eval-data", "eval.jsonl"], ["model", "data"], {"eval.jsonl": data_lines(rng)})
    if rng.random() < 0.2:
        return Case(["data", "show", name, "--model", "model"], ["model"], {name: data_lines(rng)})
    return Case([*argv, "--data", name], ["model", "data"], {name: data_lines(rng)})


def preference_case(rng: Random, groups: Groups) -> Case:
    """Pairs and labels; now and then those that another objective is for."""
    objective = rng.choice(("dpo", "orpo", "kto", "simpo"))
    argv = [*FINETUNE, "--objective", objective, "--max-steps", "1", "--max-length", rng.choice(("16", "64"))]
    argv += ["--batch-size", "2"] if objective == "kto" or rng.random() < 0.5 else []
    argv += rng.choice(([], [], ["--beta", "3"], ["--on-bad-line", "stop"], ["--eval-fraction", "0.5"]))
    wanted, other = (LABELS, PREFERENCES) if objective == "kto" else (PREFERENCES, LABELS)
    lines = data_lines(rng, wanted, wanted, wanted, PREFERENCES, other)
    return Case(argv, ["model"], {"data.jsonl": lines})


def resume_case(rng: Random, groups: Groups) -> Case:
    """A run that goes on: any file of its folder changed, cut or gone."""
    group = rng.choice(("unfinished", "unfinished", "unfinished", "finished"))
    names = sorted(groups[group])
    files: Files = {}
    for name in rng.sample(names, rng.choice((1, 1, 1, 2))):
        files[name] = _changed(rng, name, _bytes(groups, group, name))
    if rng.random() < 0.6:
        files |= _with_sums(groups[group], files)
    argv = [
        *RESUME,
        *rng.choice(([], ["--max-steps", "3"], ["--max-steps", "3"], ["--max-steps", "1"], ["--learning-rate", "1"])),
    ]
    return Case(argv, ["model", "data", group], files)


def signed(content: bytes) -> bytes:
    """A checkpoint's record with the digest that it should have, where it is an object."""
    try:
        value = json.loads(content)
        return dump(_signed(value)) if isinstance(value, dict) else content
    except (ValueError, RecursionError):
        return content


def _with_sums(whole: Files, changed: Files) -> Files:
    """Return the records of checkpoints whose files are changed, with the sums that these have now."""
    records: Files = {}
    for name, content in changed.items():
        folder, _, file = name.rpartition("/")
        path = f"{folder}/{INFO_FILE}"
        if path not in whole or file == INFO_FILE or not isinstance(content, bytes):
            continue
        known = records.get(path, changed.get(path, whole[path]))
        try:
            record: Any = json.loads(known) if isinstance(known, bytes) else None
            record["files"][file] = hashlib.sha256(content).hexdigest()
            records[path] = dump(_signed(record))
        except (ValueError, TypeError, KeyError, RecursionError):
            continue  # the record is damaged, too
    return records


def pair_case(rng: Random, groups: Groups) -> Case:
    """Two files of a model or an adapter changed at once."""
    kinds = (config_case, generation_config_case, weights_case, tokenizer_case, tokenizer_config_case, template_case)
    while True:
        one, other = (kind(rng, groups) for kind in rng.sample((*kinds, adapter_case, index_case), 2))
        if one.base[0] == other.base[0] and one.argv[0] == other.argv[0]:
            return Case(one.argv, [*dict.fromkeys(one.base + other.base)], one.files | other.files)


def _changed(rng: Random, name: str, content: bytes) -> Content:
    chance = rng.random()
    if chance < 0.08:
        return Special(rng.choice(("absent", "folder", "fifo")))
    if name.endswith(".json") and content and chance < 0.8:
        changed = mutate_json(rng, content)
        return signed(changed) if name.endswith(INFO_FILE) and chance < 0.6 else changed
    if name.endswith(".jsonl") and content and chance < 0.8:
        lines = content.splitlines()
        at = rng.randrange(len(lines))
        return b"\n".join([*lines[:at], mutate_json(rng, lines[at]), *lines[at + 1 :]]) + b"\n"
    if name.endswith(".safetensors") and chance < 0.8:
        return mutate_safetensors(rng, content)
    if name.endswith(".yaml") and chance < 0.8:
        return yaml_text(rng, [n for n in option_names() if n != "device"]) + b"\ndevice: cpu\n"
    return mutate_bytes(rng, content)


def environment_case(rng: Random, groups: Groups) -> Case:
    """A file of any kind that is no file, is huge, is empty, is a Git-LFS pointer, or is not there."""
    argv = rng.choice(
        (
            [*GENERATE, "x", "--chat"],
            [*GENERATE, "x", "--adapter", "adapter"],
            [*FINETUNE, "--max-steps", "1"],
            [*FINETUNE, "--max-steps", "1", "--config", "run.yaml", "--eval-data", "eval.jsonl"],
            [*RESUME, "--max-steps", "3"],
        )
    )
    base = ["model", "data", "adapter"] + (["unfinished"] if "--resume" in argv else [])
    names = sorted({n for group in base for n in groups[group]}) + [
        "run.yaml",
        "eval.jsonl",
        "model/chat_template.jinja",
    ]
    files: Files = {"run.yaml": b"rank: 2\n", "eval.jsonl": _bytes(groups, "data", "data.jsonl")}
    name = rng.choice(names)
    # The sum over a checkpoint's file rightly takes as long as the file is large.
    huge = 1 << (28 if name.startswith("out/checkpoints/") else 33)
    files[name] = rng.choice(
        (
            *(Special("absent"), Special("folder"), Special("fifo"), LFS_POINTER, b"", b"\x00", b"\xff\xfe"),
            *(Special("link", name.rpartition("/")[2]), Special("link", "nope"), Special("link", "/dev/zero")),
            *(Special("link", "/dev/null"), Special("link", "."), Special("link", "/proc/self/mem")),
            *(Special("sparse", 1 << 20), Special("sparse", 1 << 26), Special("sparse", huge)),
            *(
                Special("repeat", ["[", 1 << 20, ""]),
                Special("repeat", ['{"a":', 1 << 18, ""]),
                Special("repeat", ["x", 1 << 21, ""]),
            ),
        )
    )
    return Case(list(argv), base, files)


KINDS_OF_CASE: dict[str, tuple[int, Callable[[Random, Groups], Case]]] = {
    "config": (12, config_case),
    "generation-config": (2, generation_config_case),
    "weights": (9, weights_case),
    "quantized": (8, quantized_case),
    "packed": (6, packed_case),
    "experts": (5, experts_case),
    "family": (12, family_case),
    "gguf": (6, gguf_case),
    "gguf-keys": (7, gguf_keys_case),
    "index": (5, index_case),
    "tokenizer": (9, tokenizer_case),
    "vocabulary": (7, vocabulary_case),
    "tokenizer-config": (6, tokenizer_config_case),
    "template": (9, template_case),
    "roles": (6, roles_case),
    "adapter": (8, adapter_case),
    "yaml": (7, yaml_case),
    "data": (9, data_case),
    "preference": (5, preference_case),
    "keys": (5, keys_case),
    "columns": (5, columns_case),
    "table": (6, table_case),
    "folder": (6, folder_case),
    "cache": (4, cache_case),
    "import-config": (5, import_case),
    "imatrix": (3, imatrix_case),
    "modelfile": (4, modelfile_case),
    "request": (5, request_case),
    "served": (6, served_case),
    "guided": (8, guided_case),
    "tensors": (3, tensors_case),
    "http-serve": (5, serve_case),
    "http-studio": (5, studio_case),
    "http-watch": (4, watch_case),
    "report": (3, report_case),
    "sweep": (4, sweep_case),
    "resume": (9, resume_case),
    "pair": (6, pair_case),
    "environment": (6, environment_case),
    "names": (5, names_case),
    "surroundings": (7, surroundings_case),
    "command": (6, command_case),
    "python": (4, python_case),
    "option": (10, lambda rng, groups: option_case(rng)),
    "stream": (4, lambda rng, groups: stream_case(rng)),
}


def make_case(seed: int, number: int, groups: Groups, only: str = "") -> Case:
    """Input `number` of a seed: always the same case for the same base files."""
    rng = Random(f"{seed}/{number}")
    names = [name for name in KINDS_OF_CASE if any(part in name for part in only.split(","))]
    kind = rng.choices(names, [KINDS_OF_CASE[n][0] for n in names])[0]
    case = KINDS_OF_CASE[kind][1](rng, groups)
    case.kind = kind
    case.note = f"seed {seed}, input {number}"
    return case
