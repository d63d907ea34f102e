"""The child process that compiles and renders chat templates and tries out tokenizers: requests on stdin, answers on
stdout, one per line.

Its memory is limited here, its time by `template_process.py`, which starts and ends it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

from wgrad.train.data.template_engine import CompiledTemplate, TemplateFailure
from wgrad.train.data.template_spans import checked_turns, prefix_spans, unseen_parts

MEMORY = 1 << 30  # bytes of address space, where the system can limit that


def main(seconds: float) -> None:
    """Answer requests until stdin ends. seconds: the longest that an answer may take."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="ascii", newline="\n")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the run, which then ends this process
    limit = _set_limit(MEMORY)
    template: CompiledTemplate | None = None
    print("{}", file=answers, flush=True)  # ready
    for line in sys.stdin:
        if hasattr(signal, "alarm"):
            signal.alarm(int(2 * seconds) + 5)  # for a run that was killed and can no longer end this process
        try:
            request = json.loads(line)
            answer: dict[str, Any] = {}
            if "tokenizer" in request:
                answer = _tried(request["tokenizer"], limit)
            elif "source" in request:
                template = CompiledTemplate(request["source"])
            else:
                assert template is not None
                answer = _rendered(template, request)
        except TemplateFailure as error:
            answer = {"failure": error.kind, "message": error.message, "line": error.line}
        except MemoryError:
            answer = {"failure": "fail", "message": f"it needs more than {limit >> 20} MiB of memory", "line": 0}
        except RecursionError:
            answer = {"failure": "fail", "message": "these messages are nested too deeply", "line": 0}
        print(json.dumps(answer), file=answers, flush=True)
        if hasattr(signal, "alarm"):
            signal.alarm(0)


def _rendered(template: CompiledTemplate, request: dict[str, Any]) -> dict[str, Any]:
    """See `TemplateProcess.render`."""
    values, learn = request["values"], request["learn"]
    text = template.render(values)
    answer: dict[str, Any] = {"text": text}
    if request["check"]:
        answer["unseen"] = unseen_parts(template, values, text)
    if learn is None:
        return answer
    if template.tells_generated or not learn:
        _, answer["messages"], answer["generated"] = template.render_marked(values)
    if not learn or (answer.get("generated") and answer["messages"]):
        return answer
    turns = checked_turns(learn, len(values["messages"]))
    prefixes = prefix_spans(template, values, text, turns, request["unasked"])
    answer["prefixes"] = [[turn, *span] for turn, span in prefixes.items()]
    if len(prefixes) < len(learn) or 0 in learn:
        _, answer["messages"], answer["generated"] = template.render_marked(values)
    return answer


def _tried(path: str, limit: int) -> dict[str, Any]:
    """See `TemplateProcess.try_tokenizer`. A large tokenizer may take more memory than templates do."""
    from wgrad.train.data.tokenizer_trial import try_out

    try:
        if limit:
            _set_limit(None)
        return {"message": try_out(path)}
    except MemoryError:
        return {"message": "it needs too much memory"}
    finally:
        if limit:
            _set_limit(limit)


def _set_limit(memory: int | None) -> int:
    """Limit the memory of this process, or remove the limit (None). Returns the limit in bytes, 0 if unsupported."""
    try:
        import resource
    except ImportError:  # Windows
        return 0
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = hard if memory is None else memory if hard == resource.RLIM_INFINITY else min(memory, hard)
    try:
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    except (OSError, ValueError):  # macOS refuses some values
        return 0
    return limit
