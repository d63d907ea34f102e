"""The grammar of `wgrad generate --json-schema` and `--regex`."""

from __future__ import annotations

from collections.abc import Sequence

from wgrad.device.errors import WgradError
from wgrad.train.data.json_text import decode_json_text
from wgrad.train.data.tokenizer import Tokenizer
from wgrad.train.files.input_files import read_input
from wgrad.train.inference.guide import Grammars, Guide, json_grammar, regex_grammar
from wgrad.train.inference.open_model import Opened
from wgrad.train.options.generate_config import GenerateConfig
from wgrad.train.serve.answer_parts import style_of

_LARGEST = 4 << 20  # bytes of a schema
_LAST = 16  # tokens of a prompt, in which it may begin a thought


def guides_of(opened: Opened[GenerateConfig], prompts: Sequence[Sequence[int]]) -> list[Guide]:
    """Return a guide for each prompt, [] where text is free. A thought that a prompt has begun is not bound.

    WgradError: the grammar is wrong, or llguidance is missing."""
    args, tokenizer = opened.args, opened.tokenizer
    if args.json_schema is None and args.regex is None:
        return []
    option = "--regex" if args.json_schema is None else f"--json-schema: {args.json_schema}"
    grammars = Grammars(tokenizer, opened.config.vocab_size)
    try:
        grammar = (
            regex_grammar(args.regex or "") if args.json_schema is None else json_grammar(_schema(args.json_schema))
        )
        return [grammars.guides(grammar, 1, _end_of_thought(tokenizer, prompt))[0] for prompt in prompts]
    except WgradError as error:
        raise WgradError(str(error) if str(error).startswith("--") else f"{option}: {error}") from error


def _schema(path: str) -> dict[str, object]:
    try:
        schema = decode_json_text(read_input(path, "--json-schema", _LARGEST))
    except (ValueError, RecursionError) as error:
        raise WgradError(f"not JSON: {str(error) or 'nested too deep'}: correct it") from error
    if not isinstance(schema, dict):
        raise WgradError(f'a schema is an object, got {type(schema).__name__}: give one such as {{"type": "object"}}')
    return schema


def _end_of_thought(tokenizer: Tokenizer, prompt: Sequence[int]) -> str:
    stream = tokenizer.decode_stream(skip_special_tokens=False)
    style = style_of(tokenizer).after("".join(map(stream.add, prompt[-_LAST:])) + stream.rest())
    return style.thought[1] if style.begun and style.thought is not None else ""
