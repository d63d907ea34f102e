"""Rows of families: one for each, and no other file of tests that must know of a new family."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.families.table import FAMILY_FILES, FAMILY_ROWS
from tests.sweeps import SWEEPS, Families
from wgrad.train.model.families import FAMILIES

TESTS = Path(__file__).parent
TYPES = {kind for family in FAMILIES.values() for kind in (family.model_type, *family.other_types)}
STEMS = {re.sub("(ForCausalLM|LMHeadModel)$", "", name) for name in FAMILIES}
NAMES = {*FAMILIES, *STEMS, *TYPES}
# What a file of tests imports that runs on all families.
ALL = {"FAMILIES", "FAMILY_ROWS", "CASES", "of_families", "IN_GGUF"}


def test_every_family_has_one_row() -> None:
    assert FAMILY_ROWS.keys() == FAMILIES.keys()
    assert sum(len(file.ROWS) for file in FAMILY_FILES) == len(FAMILY_ROWS)
    assert all(row.cases for row in FAMILY_ROWS.values())


def test_tests_of_all_families_name_none() -> None:
    """They ask the row: no table of exceptions, no branch and no long list is by name.

    Tests of one subject may choose a few families in their own parameters.
    """
    files = [
        path for path in sorted(TESTS.rglob("*.py")) if path.parent.name != "families" and path.name != "sweeps.py"
    ]
    texts = {path: path.read_text(encoding="utf-8") for path in files}
    trees = {path: ast.parse(text) for path, text in texts.items() if any(word in text for word in ALL)}
    general = {path: tree for path, tree in trees.items() if ALL & set(imported(tree))}
    assert len(general) > 10
    wrong = [f"{path.relative_to(TESTS)}:{line}" for path, tree in general.items() for line in by_name(tree)]
    assert wrong == [], "write it into the rows of tests/families"


def test_what_make_test_leaves_out_names_few_families() -> None:
    """Rows say it of the tests that run on all families."""
    texts = [str(rule) for rule in SWEEPS.values()]
    assert not [text for text in texts if sum(stem in text for stem in STEMS if len(stem) > 4) > 8]


def test_tests_that_rows_leave_out_are_known_to_the_sweeps() -> None:
    rules = [rule for rule in SWEEPS.values() if isinstance(rule, Families)]
    subjects = {"cases", *(rule.subject for rule in rules if not rule.few)}
    left = {f"{subject}{device}" for subject in subjects for device in ("", " cpu", " wgpu")}
    for name, row in FAMILY_ROWS.items():
        assert row.in_test_all <= left | {f"case {case}" for case in row.cases}, name
        chosen = (f"{rule.subject} {word}" for rule in rules if rule.few for word in (*row.cases, "nf4", "full"))
        assert row.in_test <= {*chosen}, name


def imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(
            ("tests.", "wgrad.train.model.families")
        ):
            yield from (alias.name for alias in node.names)


def by_name(tree: ast.Module) -> Iterator[int]:
    """Lines of tables that name three families or more, of lists of more than five, and of branches by a name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict) and sum(map(is_name, node.keys)) > 2:
            yield node.lineno
        if isinstance(node, ast.List | ast.Tuple | ast.Set) and sum(map(is_name, node.elts)) > 5:
            yield node.lineno
    chosen = {part.id for node in ast.walk(tree) for part in parameters(node) if isinstance(part, ast.Name)}
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            named = {part.value for part in ast.walk(node.value) if isinstance(part, ast.Constant)} & NAMES
            if len(named) > 2 and ast.unparse(target) not in chosen:
                yield node.lineno
        if isinstance(node, ast.FunctionDef) and not any(is_name(part) for part in parameters(node)):
            checks = {
                part
                for check in ast.walk(node)
                if isinstance(check, ast.Assert) and not any(isinstance(part, ast.Or) for part in ast.walk(check))
                for part in ast.walk(check)
            }
            for part in ast.walk(node):
                if isinstance(part, ast.Compare) and part not in checks and compares(part):
                    yield part.lineno
                if isinstance(part, ast.Call) and begins(part):
                    yield part.lineno


def parameters(node: ast.AST) -> Iterator[ast.AST]:
    """Parts of a function's decorators."""
    for decorator in getattr(node, "decorator_list", ()):
        yield from ast.walk(decorator)


def compares(node: ast.Compare) -> bool:
    return any(is_name(part) for side in (node.left, *node.comparators) for part in (side, *getattr(side, "elts", ())))


def begins(node: ast.Call) -> bool:
    """Return whether it asks for names that begin with the same three letters or more."""
    if not (isinstance(node.func, ast.Attribute) and node.func.attr == "startswith"):
        return False
    texts = [part.value for part in ast.walk(node) if isinstance(part, ast.Constant) and isinstance(part.value, str)]
    return any(len(text) > 2 and name.startswith(text) for text in texts for name in NAMES)


def is_name(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in NAMES


def test_a_table_and_a_branch_by_name_are_found() -> None:
    table = 'ODD = {"arcee": 1, "ArceeForCausalLM": 2, "glm4": 3}'
    branch = 'def test_x(kind):\n    y = 1 if kind in ("arcee", "glm4") else 2\n    if kind == "glm4":\n        pass'
    begun = 'def test_x(kind):\n    return kind.startswith("gemma")'
    assert {*found(table)} == {1} and found(branch) == [2, 3] and found(begun) == [2]
    few = f'@mark.parametrize("kind", ["glm4", "arcee"])\n{branch.splitlines()[0]}\n    assert kind == "glm4"'
    assert found(few) == [] == found('FEW = [("glm4", 1), ("arcee", 2), ("phi", 3)]\n' + few.replace("[", "[*FEW, "))


def test_a_long_list_in_parameters_and_a_table_in_a_function_are_found() -> None:
    many = 'MANY = ("Arcee", "Glm4", "Phi3", "Olmo2", "Olmo3", "Cwm")\n'
    assert found(f'{many}@mark.parametrize("kind", MANY)\ndef test_x(kind): ...') == [1]
    assert found('def test_x(kind):\n    return {"glm4": 1, "arcee": 2, "phi": 3}[kind]') == [2]


def found(text: str) -> list[int]:
    return sorted(by_name(ast.parse(text)))
