"""Guides for prompts from the options json_schema and regex."""

from __future__ import annotations

from collections.abc import Sequence

from wgrad.device.errors import WgradError
from wgrad.device.shown import short
from wgrad.train.data.json_text import decode_json_text
from wgrad.train.data.thoughts import end_of_thought
from wgrad.train.data.tokenizer import Tokenizer
from wgrad.train.files.input_files import read_input
from wgrad.train.inference.guide import Grammars, json_grammar, regex_grammar
from wgrad.train.inference.guided import Free, Guides
from wgrad.train.options.generate_config import TextOptions
from wgrad.train.options.options import is_json

_LARGEST = 4 << 20  # bytes of a schema


def guides_of(
    options: TextOptions, grammars: Grammars, tokenizer: Tokenizer, prompts: Sequence[Sequence[int]]
) -> list[Guides]:
    """Return a guide for each prompt, or [] if the host need not watch the text.

    A thought that a prompt opens is not constrained.

    Raises:
        WgradError: the grammar is wrong, or llguidance is missing.
    """
    if not options.is_guided:
        return [Free() for _ in prompts] if options.is_watched else []
    schema, option = options.json_schema, "--regex"
    if schema is not None:
        option = f"--json-schema: {short(schema) if is_json(schema) else schema}"
    try:
        grammar = regex_grammar(options.regex or "") if schema is None else json_grammar(_schema(schema))
        return list[Guides](grammars.guides(grammar, [end_of_thought(tokenizer, prompt) for prompt in prompts]))
    except WgradError as error:
        raise WgradError(str(error) if str(error).startswith("--") else f"{option}: {error}") from error


def _schema(given: str) -> dict[str, object]:
    """Return a JSON schema. given: its JSON, or the path of a file with it."""
    data = given.encode() if is_json(given) else read_input(given, "--json-schema", _LARGEST)
    try:
        schema = decode_json_text(data)
    except (ValueError, RecursionError) as error:
        raise WgradError(f"not JSON: {str(error) or 'nested too deep'}: correct it") from error
    if not isinstance(schema, dict):
        raise WgradError(f'a schema is an object, got {type(schema).__name__}: give one such as {{"type": "object"}}')
    return schema
