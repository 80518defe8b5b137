"""The judge of random calls: it knows nothing of the package, and its answers are right."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parent.parent
JUDGES = ("exact.py", "question.py")


def _imported(file: Path) -> set[str]:
    """Every module that a file names in an import, wherever in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative imports are not followed here"
            found.add(str(node.module))
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Name) and node.id in ("__import__", "importlib", "exec", "eval"):
            raise AssertionError(f"{file} imports by {node.id}, which a reader of imports cannot follow")
    return found


def _reached(files: list[Path], root: Path) -> set[str]:
    """What these files import, and what that imports, packages' __init__ among it."""
    seen: set[str] = set()
    left = [name for file in files for name in _imported(file)]
    while left:
        name = left.pop()
        if name in seen:
            continue
        seen.add(name)
        path = root.joinpath(*name.split("."))
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.exists():
                left += _imported(file)
        if "." in name:
            left.append(name.rpartition(".")[0])
    return seen


def test_the_judge_imports_nothing_of_the_package() -> None:
    reached = _reached([ROOT / "tests" / "fuzzing" / name for name in JUDGES], ROOT)
    assert "tests.fuzzing.walk" in reached  # it does follow them
    others = {name.partition(".")[0] for name in reached} - {"__future__"}
    assert others == {
        "ast",
        "collections",
        "dataclasses",
        "functools",
        "itertools",
        "math",
        "numpy",
        "re",
        "tests",
        "typing",
    }


def test_an_import_of_the_package_is_found_wherever_it_is(tmp_path: Path) -> None:
    judge = tmp_path / "judge.py"
    (tmp_path / "far.py").write_text("def f():\n    from tilewise import expr\n")
    judge.write_text("import far\n")
    assert "tilewise.expr" in _reached([judge], tmp_path)
