"""`wgrad sweep`: the options that vary, their values, and the combinations to try."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from wgrad.device.errors import WgradError
from wgrad.device.shown import short
from wgrad.train.options.finetune_config import RunOptions
from wgrad.train.options.former_names import current_name
from wgrad.train.options.option_names import option_hint
from wgrad.train.options.options import field_type

OF_NO_SWEEP = ("ranks", "lr_sweep", "resume")  # options of finetune that a sweep refuses
_FIXED = ("out", *OF_NO_SWEEP)  # options that do not vary
_RANGE = re.compile(r"(?P<low>[^.]\S*?)\.\.(?P<high>\S+)")
MOST = 1000  # trials


@dataclass(frozen=True)
class Vary:
    """An option and its values, or (without values) a range to draw them from."""

    name: str
    values: tuple[Any, ...] = ()
    low: float = 0.0
    high: float = 0.0

    def draw(self, random: np.random.Generator) -> Any:
        """Draw a value; from a range log-uniformly, or uniformly if it holds whole numbers or includes 0."""
        if self.values:
            return self.values[int(random.integers(len(self.values)))]
        if field_type(RunOptions, self.name) is int:
            return int(random.integers(int(self.low), int(self.high) + 1))
        if self.low > 0:
            return float(f"{math.exp(random.uniform(math.log(self.low), math.log(self.high))):.3g}")
        return float(f"{random.uniform(self.low, self.high):.3g}")


def vary_of(name: str, given: Any) -> Vary:
    """Convert an option and its values as Python gives them: a list, or text as for `read_vary`. Raises WgradError."""
    if not isinstance(name, str):
        raise WgradError(f"--vary: an option is named by text; got {short(name)}: for example 'lora_r'")
    if isinstance(given, str):
        return read_vary(f"{name}={given}")
    if not isinstance(given, (list, tuple, set, range)) or not given:
        raise WgradError(f"--vary: {name}: must be a list of values, or text such as '1e-5..1e-3'; got {short(given)}")
    name = _name_of(name)
    return Vary(name, tuple(dict.fromkeys(_value(name, value) for value in given)))


def read_vary(text: str) -> Vary:
    """Parse NAME=A,B or NAME=LOW..HIGH; options that are lists have ; between values. WgradError: malformed."""
    name, sign, rest = text.partition("=")
    if not sign or not rest.strip(" ,;"):
        raise WgradError(f"--vary: expected NAME=VALUE,VALUE, got {text[:80]!r}: for example learning_rate=1e-4,3e-4")
    name = _name_of(name)
    kind = field_type(RunOptions, name)
    if kind in (int, float) and (found := _RANGE.fullmatch(rest.strip())):
        low, high = (float(_value(name, found[side])) for side in ("low", "high"))
        if not low < high:
            raise WgradError(f"--vary: {name}: a range goes from the lower to the higher value; got {rest[:80]}")
        return Vary(name, (), low, high)
    separator = ";" if kind is tuple or ";" in rest else ","
    values = tuple(dict.fromkeys(_value(name, part.strip()) for part in rest.split(separator) if part.strip()))
    return Vary(name, values)


def _name_of(given: str) -> str:
    """Return the field that a name means. WgradError: it is no option that can vary."""
    names = [f.name for f in fields(RunOptions)]
    name = current_name(given.strip().lstrip("-").replace("-", "_"), names)
    if name not in names or name in _FIXED:
        hint = "" if name in _FIXED else option_hint(name, names, "")
        raise WgradError(f"--vary: {name[:80]!r} is no option that can vary{hint}: see wgrad finetune --help-all")
    return name


def _value(name: str, text: Any) -> Any:
    """Convert a text or Python object to a value of the option. WgradError: it breaks the option's rule."""
    try:
        return getattr(RunOptions(**dict[str, Any]({name: text})), name)
    except WgradError as error:
        option = f"--{name.replace('_', '-')}: "
        of_another = not str(error).startswith(option) or ": give " in str(error)  # one that is missing, or in conflict
        if of_another:
            return text
        raise WgradError(f"--vary: {name}: {str(error).removeprefix(option)}") from None


def trials_of(varied: Sequence[Vary], count: int | None, seed: int) -> list[dict[str, Any]]:
    """Return all combinations, or `count` different ones drawn at random (fewer if there are no more).

    Raises:
        WgradError: An option is given twice, a range needs a count, or there are too many combinations.
    """
    names = [one.name for one in varied]
    if len(set(names)) < len(names):
        raise WgradError(f"--vary: {next(n for n in names if names.count(n) > 1)} is given twice: give it once")
    ranges = [one.name for one in varied if not one.values]
    if count is None:
        if ranges:
            raise WgradError(f"--vary: {ranges[0]} is a range, from which values are drawn: give --trials N")
        size = math.prod(len(one.values) for one in varied)
        if size > MOST:
            raise WgradError(f"--vary: {size} combinations are more than {MOST}: give --trials N, to draw some")
        return [dict(zip(names, values)) for values in itertools.product(*(one.values for one in varied))]
    random, found = np.random.default_rng(seed), list[dict[str, Any]]()
    for _ in range(20 * count):
        trial = {one.name: one.draw(random) for one in varied}
        if trial not in found:
            found.append(trial)
        if len(found) == count:
            break
    return found
