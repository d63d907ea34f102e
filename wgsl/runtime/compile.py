"""WGSL sources and named constants -> compute pipelines, each compiled once.

A shader file is plain WGSL in which types and tile sizes are names that it does not declare. The loader puts their
declarations on top: an int becomes `const NAME: u32`, a float `const NAME: f32`, a bool `const NAME: bool`, and a
string a type, `alias NAME = ...;`. `enable` lines are moved to the very top; f16 is enabled where a constant names it.

Lines of the preprocessor:

    #include "x.inc.wgsl" name=word ...        becomes that file, with each $name replaced by its word.
    #include "x.inc.wgsl" part name=word ...   becomes a part of that file; without the file's name, of this file.
    #include NAME ...   becomes the file, or FILE:part, that the constant names; such a string is not declared.
    #part name parameters ...    up to #endpart: text for `#include`, which must give exactly these parameters.
    #if NAME            keeps the lines up to #else or #endif where the constant is true (non-zero);
    #if NAME == 3       also `!=`, and `!NAME`. May be nested.
    #unroll i COUNT     repeats the lines up to #end with $i = 0, 1, ... (COUNT: a number or an int constant). Registers
                        indexed by literals stay registers, and bounds checks on literals vanish. May be nested.
    $NAME               the value of an int constant, which is then not declared.

With the constant MATRIX_SHAPE, cooperative matrices have that shape instead of 16 x 16 x 16 (cooperative_text.py).

Bindings are declared in the file as `@group(0) @binding(n) var<uniform>` or `var<storage, read|read_write>`; the layout
is read from these lines, so that a binding that a variant does not use still has its place.
"""

from __future__ import annotations

import hashlib
import os
import re
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from wgrad.device.bounded import TIMEOUT, bounded, timeout
from wgrad.device.errors import CompileTimeout, DeviceError, DeviceLost
from wgrad.wgsl.runtime import native
from wgrad.wgsl.runtime.cooperative_text import SHAPE, in_shape

Constant = int | float | bool | str
_BINDING = re.compile(
    r"@group\(0\)\s*@binding\((\d+)\)\s*var<\s*(uniform|storage\s*,\s*read_write|storage\s*,\s*read)\s*>"
)
_INCLUDE = re.compile(r'#include(?: ("[a-z0-9_.]+\.wgsl"|[A-Z_]+))?(?: ([a-z]\w*))?((?: \w+=\S*)*)$')
_WRITTEN = re.compile(r"\$([A-Z][A-Z0-9_]*)")
_TAG = " //@"  # before the origin of a line, in tagged text
_SUFFIX = ".wgsl"
_SECONDS = 600.0  # to compile one variant
_ROOM = Path(__file__).parents[1]


class Variant(NamedTuple):
    """Source of a pipeline: a file, its entry point, and the constants put on top of it, in their order."""

    shader: str
    entry: str
    constants: tuple[tuple[str, Constant], ...]

    @property
    def name(self) -> str:
        return self.shader if self.entry == "main" else f"{self.shader}:{self.entry}"

    @property
    def text(self) -> str:
        """The complete WGSL text."""
        constants = dict(self.constants)
        return assemble(read_source(self.shader + _SUFFIX, constants), constants)


@dataclass(frozen=True)
class Pipeline:
    name: str
    pipeline: Any
    layout: Any
    handle: Any
    bindings: tuple[int, ...]  # the numbers declared, without 0
    written: tuple[int, ...]  # those of them that it may write to


def _condition(text: str, constants: dict[str, Constant]) -> bool:
    words = text.split()
    if len(words) == 3 and words[1] in ("==", "!="):
        return (str(constants[words[0]]) == words[2]) == (words[1] == "==")
    name = words[0].lstrip("!")
    return bool(constants[name]) != words[0].startswith("!")


_ENDS = {"#if": "#endif", "#unroll": "#end"}


def _blocks(lines: list[str]) -> dict[int, tuple[int | None, int]]:
    """For each line that opens a block: the lines with its #else, if any, and its end."""
    open_blocks: list[tuple[int, str, int | None]] = []
    found: dict[int, tuple[int | None, int]] = {}
    for i, line in enumerate(lines):
        if "#" not in line:  # nearly all
            continue
        word = line.split(maxsplit=1)[0]
        if word in _ENDS:
            open_blocks.append((i, _ENDS[word], None))
        elif open_blocks and word == open_blocks[-1][1]:
            opening, _, other = open_blocks.pop()
            found[opening] = (other, i)
        elif open_blocks and word == "#else":
            open_blocks.append((*open_blocks.pop()[:2], i))
    if open_blocks:
        at, closing, _ = open_blocks[-1]
        raise ValueError(f"no {closing} for line {at + 1}: {lines[at]}")
    return found


def preprocess(lines: list[str], constants: dict[str, Constant]) -> list[str]:
    """Evaluate #if and #unroll."""
    blocks = _blocks(lines)
    openings = sorted(blocks)
    out: list[str] = []

    def part(text: list[str], first: int, at: int, end: int) -> None:
        """Append the lines from `at` to `end`. text: lines from `first` on, as expanded by the enclosing blocks."""
        while (place := bisect_left(openings, at)) < len(openings) and (opening := openings[place]) < end:
            out.extend(text[at - first : opening - first])
            other, closing = blocks[opening]
            word, rest = text[opening - first].split(maxsplit=1)
            if word == "#if":
                if _condition(rest, constants):
                    part(text, first, opening + 1, closing if other is None else other)
                elif other is not None:
                    part(text, first, other + 1, closing)
            elif closing > opening + 1:
                name, count = rest.split()
                body = "\n".join(text[opening + 1 - first : closing - first])
                nested = place + 1 < len(openings) and openings[place + 1] < closing
                for n in range(int(count) if count.isdigit() else int(constants[count])):
                    copy = body.replace(f"${name}", str(n)).split("\n")
                    if nested:
                        part(copy, opening + 1, opening + 1, closing)
                    else:
                        out.extend(copy)
            at = closing + 1
        out.extend(text[at - first : end - first])

    part(lines, 0, 0, len(lines))
    return out


def declare(name: str, value: Constant) -> str:
    if isinstance(value, bool):
        return f"const {name}: bool = {'true' if value else 'false'};"
    if isinstance(value, int):
        return f"const {name}: u32 = {value}u;"
    if isinstance(value, float):
        return f"const {name}: f32 = {value!r}f;"
    return f"alias {name} = {value};"


def assemble(source: str, constants: dict[str, Constant]) -> str:
    """Return the complete WGSL text of one variant."""
    written = set(_WRITTEN.findall(source))
    source = _WRITTEN.sub(lambda found: str(constants[found[1]]), source)
    lines = preprocess([line for line in source.splitlines() if not line.startswith("//")], constants)
    enables = [line for line in lines if line.startswith("enable ")]
    if any(isinstance(v, str) and "f16" in v for v in constants.values()):
        enables.append("enable f16;")
    body = [line for line in lines if not line.startswith("enable ")]
    left_out = {*written, SHAPE}
    head = [declare(n, value) for n, value in constants.items() if n not in left_out and _SUFFIX not in str(value)]
    text = "\n".join([*dict.fromkeys(enables), *head, *body])
    return in_shape(text, str(constants[SHAPE])) if SHAPE in constants else text


@cache
def find_shader(room: Path, file: str) -> Path:
    """Find the shader file of that name in any folder of the package; a whole path stands for itself."""
    found = [room / file] if (room / file).exists() else sorted(room.rglob(file))
    if len(found) != 1:
        raise FileNotFoundError(f"{room} has {len(found) or 'no'} files {file}")
    return found[0]


def read_source(file: str, constants: dict[str, Constant], *, tagged: bool = False) -> str:
    """Return the text of a shader file with everything it includes.

    tagged: each line ends with a comment that names its file and line.
    """
    return "".join(line + "\n" for line in _included(find_shader(_ROOM, file), "", {}, constants, tagged))


def _included(path: Path, part: str, given: dict[str, str], constants: dict[str, Constant], tagged: bool) -> list[str]:
    """Return the lines of a file or a part of it, with includes expanded and $names replaced."""
    found = _part(path, part, tuple(given))
    out, at = list[str](), 0

    def take(end: int) -> None:
        for number, line in enumerate(found.lines[at:end], found.start + at) if tagged else ():
            out.append(f"{line}{_TAG}{path.name}:{number}" if line and line[0] not in "#/" else line)
        out.extend(() if tagged else found.lines[at:end])

    for i, include in found.includes:
        take(i)
        at = i + 1
        words = dict(word.split("=", 1) for word in include[3].split())
        name, inner_part = (include[1] or "").strip('"'), include[2] or ""
        if include[1] and '"' not in include[1]:
            name, _, inner_part = str(constants[name]).partition(":")
        inner = find_shader(_ROOM, name) if name else path
        out += _included(inner, inner_part, words, constants, tagged)
    take(len(found.lines))
    if given and out:
        text = "\n".join(out)
        for name, word in given.items():
            text = text.replace(f"${name}", word)
        out = text.split("\n")
    return out


class _Part(NamedTuple):
    """Lines of a part of a file, or of what is in no part. start: number of the first line. includes: by index."""

    start: int
    parameters: tuple[str, ...]
    lines: list[str]
    includes: list[tuple[int, re.Match[str]]]


def _part(path: Path, part: str, given: tuple[str, ...]) -> _Part:
    """Return a part of a file; without a name, the lines that are in no part.

    Raises:
        ValueError: the file has no such part, or the part takes other parameters.
    """
    state = path.stat()
    found = _parts(path, state.st_mtime_ns, state.st_size).get(part)
    if found is None:
        raise ValueError(f"{path.name} has no part {part}")
    if part and sorted(found.parameters) != sorted(given):
        raise ValueError(f"{path.name}: part {part} takes {list(found.parameters)}, not {list(given)}")
    return found


@cache
def _parts(path: Path, _mtime: int, _size: int) -> dict[str, _Part]:
    """Parse the parts of a file, once per version of it: hundreds of variants include it."""
    lines = path.read_text(encoding="utf-8").splitlines()
    heads = [i for i, line in enumerate(lines) if line.startswith("#part ")]

    def made(first: int, end: int, parameters: list[str]) -> _Part:
        of_part = lines[first:end]
        found = ((i, _INCLUDE.match(line)) for i, line in enumerate(of_part) if line.startswith("#"))
        return _Part(first + 1, tuple(parameters), of_part, [(i, match) for i, match in found if match])

    parts = {"": made(0, heads[0] if heads else len(lines), [])}
    for i in reversed(heads):  # the first of two parts with one name counts
        _, name, *parameters = lines[i].split()
        parts[name] = made(i + 1, lines.index("#endpart", i), parameters)
    return parts


def binding_kinds(text: str) -> dict[int, str]:
    """Return the kind of each binding that a complete WGSL text declares, by its number, in rising order."""
    return dict(sorted((int(n), kind.replace(" ", "")) for n, kind in _BINDING.findall(text)))


def source_digest(variant: Variant) -> str:
    """Digest of the files that a variant is made of."""
    left = [variant.shader + _SUFFIX]
    left += [str(value).partition(":")[0] for _, value in variant.constants if _SUFFIX in str(value)]
    digests: dict[Path, bytes] = {}
    while left:
        path = find_shader(_ROOM, left.pop())
        if path not in digests:
            digests[path], included = _digest_of(path)
            left += included
    return hashlib.sha256(b"".join(sorted(digests.values()))).hexdigest()[:16]


@cache
def _digest_of(path: Path) -> tuple[bytes, list[str]]:
    """Digest of a file, and the files that it includes by name."""
    text = path.read_bytes()
    return hashlib.sha256(text).digest(), re.findall(r'^#include "([^"]+)"', text.decode(), re.MULTILINE)


def _origin(variant: Variant, text: str, message: str) -> str:
    """(file:line) of the first line of the assembled text that a compiler's message names, or nothing."""
    constants = dict(variant.constants)
    tagged = assemble(read_source(variant.shader + _SUFFIX, constants, tagged=True), constants).splitlines()
    found = re.search(r"wgsl:(\d+)", message)
    if found is None or len(tagged) != len(text.splitlines()) or int(found[1]) > len(tagged):
        return ""
    _, tag, origin = tagged[int(found[1]) - 1].rpartition(_TAG)
    return f" ({origin})" if tag else ""


def _words(variant: Variant) -> str:
    """Describe the variant, for an error message."""
    values = ", ".join(f"{name}={value}" for name, value in variant.constants)
    return f"shader {variant.shader}.wgsl ({variant.entry}; {values})"


def _dump(variant: Variant, text: str) -> None:
    """Write the assembled text into the folder $WGRAD_DUMP_SHADERS, if it is set."""
    folder = os.environ.get("WGRAD_DUMP_SHADERS")
    if folder:
        digest = hashlib.sha256(text.encode()).hexdigest()[:12]
        path = Path(folder, f"{Path(variant.shader).name}-{variant.entry}-{digest}.wgsl")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n", encoding="utf-8")


class Compiler:
    """Pipelines of one device, by (file, entry point, constants).

    before: called before `get` compiles.
    refused: makes one of our errors of wgpu's, as `Queue.refused`, which knows the device as lost from then on.
    """

    def __init__(self, device: Any, refused: Callable[[Exception | str, str], DeviceError] | None = None) -> None:
        self._device = device
        self._refused = refused or native.as_device_error
        self.before: Callable[[], None] | None = None
        self._pipelines: dict[Variant, Pipeline] = {}
        self.compiled = 0

    def get(self, shader: str, entry: str, constants: dict[str, Constant]) -> Pipeline:
        key = Variant(shader, entry, tuple(constants.items()))
        found = self._pipelines.get(key)
        if found is None:
            if self.before is not None:
                self.before()
            found = self.keep(key, self.make(key))
        return found

    def make(self, variant: Variant) -> Pipeline:
        """Compile a variant without keeping it, on any thread. Raises CompileTimeout if the driver does not return."""
        seconds = timeout(_SECONDS)

        def late() -> CompileTimeout:
            return CompileTimeout(
                f"{_words(variant)}: the driver has compiled it for {seconds:.0f} s, and hangs: update it, or "
                f"set {TIMEOUT}={2 * seconds:.0f} if it is only slow"
            )

        return bounded(lambda: self._compile(variant), seconds, late)

    def keep(self, variant: Variant, pipeline: Pipeline) -> Pipeline:
        """Keep a pipeline for `get`."""
        self.compiled += 1
        self._pipelines[variant] = pipeline
        return pipeline

    def has(self, variant: Variant) -> bool:
        """Return whether `get` would find it."""
        return variant in self._pipelines

    def _compile(self, variant: Variant) -> Pipeline:
        shader, text = variant.shader, variant.text
        _dump(variant, text)
        kinds = binding_kinds(text)
        types = {"uniform": "uniform", "storage,read": "read-only-storage", "storage,read_write": "storage"}
        entries = [
            {"binding": n, "visibility": "COMPUTE", "buffer": {"type": types[kind]}} for n, kind in kinds.items()
        ]
        try:
            module = self._device.create_shader_module(label=shader, code=text)
            layout = self._device.create_bind_group_layout(entries=entries)
            pipeline = self._device.create_compute_pipeline(
                label=shader,
                layout=self._device.create_pipeline_layout(bind_group_layouts=[layout]),
                compute={"module": module, "entry_point": variant.entry},
            )
        except Exception as error:
            refused = self._refused(error, f"compiling {_words(variant)}")
            if isinstance(refused, DeviceLost):
                raise refused from error
            where = _origin(variant, text, str(error))
            raise DeviceError(f"{_words(variant)} does not compile on this device{where}: {error}") from error
        bindings = tuple(n for n in kinds if n)
        written = tuple(n for n in bindings if types[kinds[n]] == "storage")
        return Pipeline(variant.name, pipeline, layout, native.handle(pipeline), bindings, written)
