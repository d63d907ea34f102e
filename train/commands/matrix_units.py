"""`wgrad matrix-units status | enable | disable`: the command's output (autograd/matrix_units.py does the work)."""

from __future__ import annotations

from wgrad.autograd import matrix_units
from wgrad.train.terminal.output import say

_WHAT = (
    "wgpu's library lists tensor cores and refuses them as experimental (github.com/gfx-rs/wgpu-native/issues/516). "
    "This writes a private copy of the installed library, with that one gate lifted, to {copy}; checks every kind of "
    "matmul on the GPU in a process of its own; and uses the copy from then on. The installed file stays as it is; "
    "`wgrad matrix-units disable` removes everything."
)


def print_status() -> int:
    """Print which GPUs may use their tensor cores. Return 0."""
    found = matrix_units.status()
    unknown = "" if found.known else f" (its gate is not found: SHA-256 {found.sha256})"
    say(f"library: {found.library or 'none'}{unknown}")
    say(f"copy:    {found.copy if found.copied else 'none'}" + (", in use" if found.loaded else ""))
    if found.switched_off:
        say("WGRAD_MATRIX_UNITS=off: not used, whatever the lines below say")
    if not found.cards:
        say("no adapter here lists tensor cores that there are kernels for (Vulkan)")
    for card in found.cards:
        words = {
            None: "checked before its first use" if card.given else "not tried: wgrad matrix-units enable",
            True: "passed the check: --compute auto is float16 on them",
        }
        say(f"wgpu:{card.index}  {card.name}: " + words.get(card.passed, f"kept off: {card.reason}"))
    return 0


def enable() -> int:
    """Check the GPUs. Return 0 if one may use its tensor cores from now on, 1 if none passed."""
    found = matrix_units.status()
    if not found.cards:
        say("no adapter here lists tensor cores that there are kernels for (Vulkan): nothing to enable")
        return 1
    if not any(card.given for card in found.cards):
        say(_WHAT.format(copy=found.copy))
        matrix_units.write_copy()
    passed = False
    for card in found.cards:
        say(f"checking wgpu:{card.index} ({card.name}) ...")
        verdict = matrix_units.check(card)
        passed = passed or verdict.passed
        say(
            "passed: --compute auto is float16 on them from now on" if verdict.passed else f"kept off: {verdict.reason}"
        )
    return 0 if passed else 1


def disable() -> int:
    """Remove the copy and all verdicts. Return 0."""
    say("removed" if matrix_units.disable() else "there was nothing to remove")
    return 0


COMMANDS = {"status": print_status, "enable": enable, "disable": disable}
