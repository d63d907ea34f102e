"""The sources keep to what Linux, macOS and Windows have alike: encodings are named, files are replaced in the one way
that works everywhere, and what only some systems have is asked for before it is used."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("device", "wgsl", "hip", "autograd", "train")
SOURCES = [*ROOT.glob("src/wgrad/*.py"), *(p for room in ROOMS for p in sorted((ROOT / room).rglob("*.py")))]

# Not on every system, or not meaning the same there. os.rename: on Windows not onto a file that exists.
_OS = {
    "fork", "rename", "link", "symlink", "kill", "killpg", "setsid", "getuid", "geteuid", "mkfifo", "uname", "statvfs",
    "sysconf", "sched_getaffinity", "wait", "waitpid", "fchmod", "chown", "set_blocking", "register_at_fork",
    "O_NONBLOCK", "O_CLOEXEC", "O_BINARY", "O_DIRECTORY", "O_NOFOLLOW",
}  # fmt: skip
_MODULES = {"fcntl", "resource", "pwd", "grp", "termios", "tty", "pty", "syslog", "msvcrt", "winreg"}
_SIGNALS = {"SIGINT", "SIGTERM", "SIGABRT", "SIGFPE", "SIGILL", "SIGSEGV", "signal", "getsignal", "set_wakeup_fd"}
# Where it is asked for first, or only one system comes there.
ALLOWED = {
    ("device/cache.py", "os.geteuid"),  # after hasattr
    ("train/serve/children.py", "os.kill"),  # with the signal that Windows has
    ("device/cores.py", "os.sched_getaffinity"),  # after hasattr
    ("wgsl/runtime/adapters.py", "import resource"),  # after sys.platform
    ("train/files/memory_bound.py", "import resource"),  # where sys.platform is linux
    ("train/ranks/keeper.py", "os.kill"),  # not started on Windows
    ("train/ranks/keeper.py", "signal.SIGKILL"),
    ("train/ranks/keeper.py", "os.sysconf"),  # where the system has CLOCK_BOOTTIME: Linux
    ("train/ranks/mpi_world.py", "os.kill"),  # with Open MPI, which Windows lacks
    ("train/ranks/mpi_world.py", "signal.SIGKILL"),
    ("device/main_memory.py", "os.sysconf"),  # after os.name
    ("train/data/template_worker.py", "import resource"),  # in a try
    ("train/step/find_model.py", "os.symlink"),  # in a try: Windows asks for a right
    ("train/step/find_model.py", "os.link"),  # in a try
}


def _keyword(call: ast.Call, name: str) -> ast.expr | None:
    return next((k.value for k in call.keywords if k.arg == name), None)


def _is_binary(call: ast.Call, position: int) -> bool:
    mode = _keyword(call, "mode") or (call.args[position] if len(call.args) > position else None)
    return mode is not None and not (isinstance(mode, ast.Constant) and "b" not in str(mode.value))


def _problems(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            yield from ((node.lineno, f"import {name}") for name in names if name.split(".")[0] in _MODULES)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            name = f"{node.value.id}.{node.attr}"
            if node.value.id == "os" and node.attr in _OS:
                yield node.lineno, name
            if node.value.id == "signal" and node.attr.isupper() and node.attr not in _SIGNALS | {"SIG_IGN", "SIG_DFL"}:
                yield node.lineno, name
        elif isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            plain = isinstance(node.func, ast.Name)
            text = _keyword(node, "text")
            if _keyword(node, "encoding") is not None or any(k.arg is None for k in node.keywords):
                continue
            if called == "open" and plain and not _is_binary(node, 1):
                yield node.lineno, "open of text without encoding"
            if called == "read_text" and not node.args or called == "write_text" and not plain and len(node.args) < 2:
                yield node.lineno, f"{called} without encoding"
            if called in ("run", "Popen", "check_output") and isinstance(text, ast.Constant) and text.value:
                yield node.lineno, "text of a process without encoding"


def test_no_source_uses_one_system_only() -> None:
    found = []
    for path in SOURCES:
        name = path.relative_to(ROOT).as_posix()
        problems = _problems(ast.parse(path.read_text(encoding="utf-8")))
        found += [f"{name}:{line}: {what}" for line, what in problems if (name, what) not in ALLOWED]
    assert len(SOURCES) > 150
    assert found == []


@pytest.mark.parametrize(
    "code",
    [
        "open('a')", "open('a', 'w')", "open('a', mode='r')", "Path('a').read_text()", "path.write_text(text)",
        "subprocess.run(['a'], text=True)", "os.rename(a, b)", "os.open(a, os.O_NONBLOCK)", "import fcntl",
        "from resource import getrlimit", "signal.SIGHUP",
    ],
)  # fmt: skip
def test_the_test_finds(code: str) -> None:
    assert list(_problems(ast.parse(code)))


@pytest.mark.parametrize(
    "code",
    [
        "open('a', 'rb')", "open(a, mode='wb')", "open(a, encoding='utf-8')", "p.read_text(encoding='utf-8')",
        "open(a, mode, **text)", "os.replace(a, b)", "getattr(os, 'O_NONBLOCK', 0)", "signal.SIGINT",
        "write_text(path, text)",
    ],
)  # fmt: skip
def test_the_test_passes_over(code: str) -> None:
    assert not list(_problems(ast.parse(code)))
