"""Options as data for a web page: the fields of a form, and the equivalent command line and YAML."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import yaml

from wgrad.device.errors import WgradError
from wgrad.train.options.choices import AUTO
from wgrad.train.options.options import Options, field_type, flag, show


def describe_fields(kind: type[Options], group: str = "") -> list[dict[str, Any]]:
    """Return what a form needs to know about each option, in the order of declaration.

    Args:
        kind: Dataclass of options.
        group: Group of options that name none.

    Returns:
        For each option its `name`, `flag`, `help`, `group`, `type` (bool, int, float, str, list, or lines: a list with
        one value per line), `choices`, `default` as text, `required`, `path`, `metavar`, and `open`: a bool that may
        also be left open.
    """
    return [_describe(kind, field, group) for field in dataclasses.fields(kind)]


def _describe(kind: type[Options], field: dataclasses.Field[Any], group: str) -> dict[str, Any]:
    meta, plain = field.metadata, field_type(kind, field.name)
    name = "lines" if meta["repeat"] else "list" if plain is tuple else plain.__name__
    if plain is bool and meta["metavar"]:  # a switch that also takes a number
        name = "str"
    return {
        "name": field.name,
        "flag": flag(field.name),
        "help": meta["help"],
        "group": meta["group"] or group,
        "type": name,
        "choices": [str(choice) for choice in meta["choices"]],
        "default": _text(field.default),
        "required": meta["required"],
        "path": meta["path"],
        "metavar": meta["metavar"],
        "open": name == "bool" and field.default is None,
    }


def _text(value: Any) -> str:
    """Return a default as a user would type it; "": none."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    return ", ".join(map(str, value)) if isinstance(value, tuple) else show(value)


def given_values(kind: type[Options], given: Any) -> dict[str, Any]:
    """Return the names and values that a form sends, without empty ones.

    Raises:
        WgradError: It sent no object, an unknown name, or a value that is neither text, a list of texts nor a boolean.
    """
    if not isinstance(given, Mapping):
        raise WgradError("options: expected an object with names and values: send one")
    names = {field.name for field in dataclasses.fields(kind)}
    values = {}
    for name, value in given.items():
        if name not in names:
            raise WgradError(f"options: there is no option {str(name)[:80]!r}: leave it out")
        if isinstance(value, list) and all(isinstance(part, str) for part in value):
            value = [part.strip() for part in value if part.strip()]
        elif isinstance(value, str):
            value = value.strip()
        elif not isinstance(value, bool):
            raise WgradError(f"{flag(name)}: expected text, a list of texts, true or false: correct it")
        if value not in ("", []):
            values[name] = value
    return values


def command_words(kind: type[Options], values: Mapping[str, Any]) -> list[str]:
    """Return the words of a command line with these options, in the order of declaration."""
    words: list[str] = []
    for field in dataclasses.fields(kind):
        value = values.get(field.name)
        if value is None:
            continue
        of_bool = field_type(kind, field.name) is bool
        if of_bool and str(value).lower() in ("true", "false"):
            words.append(flag(field.name if str(value).lower() == "true" else f"no_{field.name}"))
            continue
        parts = value if isinstance(value, list) and field.metadata["repeat"] else [value]
        for part in parts:
            text = ",".join(map(str, part)) if isinstance(part, list | tuple) else str(part)
            if field_type(kind, field.name) is tuple and not field.metadata["repeat"]:
                text = ",".join(text.replace(",", " ").split())
            words += [f"{flag(field.name)}={text}"] if text.startswith("-") else [flag(field.name), text]
    return words


def yaml_text(values: Mapping[str, Any], resolved: Options) -> str:
    """Return options as YAML for `--config`.

    Args:
        values: Options of a form.
        resolved: The same options as a run, with their own types.
    """
    converted = resolved.to_dict()
    chosen = {name: AUTO if value == AUTO else converted[name] for name, value in values.items()}
    return yaml.safe_dump(chosen, sort_keys=False, allow_unicode=True, default_flow_style=False, width=10**6)
