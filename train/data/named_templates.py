"""--chat-template: a template from a file, one of the model's own by name, or a well-known one.

The well-known ones follow the documentation of each family's format.
"""

from __future__ import annotations

from pathlib import Path

from wgrad.device.errors import WgradError
from wgrad.train.data.tokenizer import Tokenizer
from wgrad.train.data.tokenizer_files import read_template
from wgrad.train.files.input_files import exists
from wgrad.train.options.choices import TEMPLATES

OPTION = "--chat-template"
ENDLESS = (
    "ends the assistant's turn with no special token of this tokenizer, so an answer may go on without end: "
    "--chat-template zephyr ends it with the tokenizer's eos_token"
)

_LOOP, _END = "{% for m in messages %}", "{% endfor %}"
_ASK = "{{% if add_generation_prompt %}}{{{{ '{}' }}}}{{% endif %}}"
_SYSTEM_APART = (
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content|trim %}{% set messages = messages[1:] %}"
    "{% else %}{% set system = '' %}{% endif %}"
)
_FOLDED = "{% if system and loop.first %}{{ system + '\\n\\n' }}{% endif %}"  # before the first question

_TEMPLATES = {
    "chatml": _LOOP
    + "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
    + _END
    + _ASK.format("<|im_start|>assistant\\n"),
    "llama2": _SYSTEM_APART
    + _LOOP
    + "{% if m.role == 'user' %}{{ bos_token ~ '[INST] ' }}"
    + "{% if system and loop.first %}{{ '<<SYS>>\\n' + system + '\\n<</SYS>>\\n\\n' }}{% endif %}"
    + "{{ m.content|trim + ' [/INST]' }}"
    + "{% elif m.role == 'assistant' %}{{ ' ' + m.content|trim + ' ' ~ eos_token }}{% endif %}"
    + _END,
    "llama3": "{{ bos_token }}"
    + _LOOP
    + "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content|trim + '<|eot_id|>' }}"
    + _END
    + _ASK.format("<|start_header_id|>assistant<|end_header_id|>\\n\\n"),
    "mistral": _SYSTEM_APART
    + "{{ bos_token }}"
    + _LOOP
    + "{% if m.role == 'user' %}{{ '[INST] ' }}"
    + _FOLDED
    + "{{ m.content + '[/INST]' }}"
    + "{% elif m.role == 'assistant' %}{{ ' ' + m.content|trim ~ eos_token }}{% endif %}"
    + _END,
    "gemma": _SYSTEM_APART
    + "{{ bos_token }}"
    + _LOOP
    + "{% if m.role == 'user' %}{{ '<start_of_turn>user\\n' }}"
    + _FOLDED
    + "{{ m.content|trim + '<end_of_turn>\\n' }}"
    + "{% elif m.role == 'assistant' %}{{ '<start_of_turn>model\\n' + m.content|trim + '<end_of_turn>\\n' }}{% endif %}"
    + _END
    + _ASK.format("<start_of_turn>model\\n"),
    "phi3": _LOOP + "{{ '<|' + m.role + '|>\\n' + m.content + '<|end|>\\n' }}" + _END + _ASK.format("<|assistant|>\\n"),
    "zephyr": _LOOP
    + "{{ '<|' + m.role + '|>\\n' + m.content ~ eos_token + '\\n' }}"
    + _END
    + _ASK.format("<|assistant|>\\n"),
    "vicuna": _SYSTEM_APART
    + "{{ bos_token }}{% if system %}{{ system + ' ' }}{% endif %}"
    + _LOOP
    + "{% if m.role == 'user' %}{{ 'USER: ' + m.content|trim + ' ' }}"
    + "{% elif m.role == 'assistant' %}{{ 'ASSISTANT: ' + m.content|trim ~ eos_token }}{% endif %}"
    + _END
    + _ASK.format("ASSISTANT:"),
    "alpaca": _SYSTEM_APART
    + "{{ bos_token }}{{ (system or 'Below is an instruction that describes a task. "
    + "Write a response that appropriately completes the request.') + '\\n\\n' }}"
    + _LOOP
    + "{% if m.role == 'user' %}{{ '### Instruction:\\n' + m.content|trim + '\\n\\n' }}"
    + "{% elif m.role == 'assistant' %}{{ '### Response:\\n' + m.content|trim ~ eos_token + '\\n\\n' }}{% endif %}"
    + _END
    + _ASK.format("### Response:\\n"),
    # Keeps the thoughts, which the model's own template removes.
    "deepseek-r1": _SYSTEM_APART
    + "{{ bos_token }}{{ system }}"
    + _LOOP
    + "{% if m.role == 'user' %}{{ '<｜User｜>' + m.content }}"
    + "{% elif m.role == 'assistant' %}{{ '<｜Assistant｜>' + m.content ~ eos_token }}{% endif %}"
    + _END
    + _ASK.format("<｜Assistant｜><think>\\n"),
}
assert tuple(_TEMPLATES) == TEMPLATES


def use_chat_template(tokenizer: Tokenizer, value: str | None, kept: Path | None = None) -> str:
    """Let the tokenizer use the template that --chat-template names, for conversations with tools too.

    Args:
        value: a file or a name; None: change nothing.
        kept: the copy of the file that a run made; used instead if it exists.

    Returns:
        A note for the user, or "".

    Raises:
        WgradError: neither a file nor a name, or it does not compile.
    """
    if value is None:
        return ""
    tokenizer.use_templates({"default": _find(tokenizer, value, kept)})
    try:
        _ = tokenizer.chat_template
    except WgradError as error:
        reason = str(error).partition("the tokenizer's chat template")[2] or f": {error}"
        raise WgradError(f"{OPTION}: {value}{reason}") from error
    if tokenizer.turn_end_id is None:
        return f"{OPTION} {value} {ENDLESS}"
    return ""


def _find(tokenizer: Tokenizer, value: str, kept: Path | None) -> str:
    """Return the text of the template."""
    for path in filter(None, (kept, Path(value))):
        if exists(path, OPTION) and not path.is_dir():
            return read_template(path, OPTION)
    text = tokenizer.templates.get(value) or _TEMPLATES.get(value)
    if text is None:
        names = ", ".join(dict.fromkeys((*tokenizer.templates, *TEMPLATES)))
        raise WgradError(f"{OPTION}: {value!r} is no file and no known template: give a file, or one of {names}")
    return text
