"""What draws and what judges random calls share no code with the package, nor with each other: their imports say so."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FUZZING = ROOT / "tests" / "fuzzing"


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
            raise AssertionError(f"{file} has {node.id}, by which it could import what no reader of imports sees")
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


@pytest.mark.parametrize(("folder", "reads"), [("judging", "exact_linear"), ("drawing", "draw_linear")])
def test_neither_who_draws_nor_who_judges_knows_the_package_or_the_other(folder: str, reads: str) -> None:
    reached = _reached([*(FUZZING / folder).glob("*.py"), FUZZING / "question.py"], ROOT)
    assert f"tests.fuzzing.{folder}.{reads}" in reached  # it does follow them
    others = {name.partition(".")[0] for name in reached} - {"tests"}
    assert others <= sys.stdlib_module_names | {"numpy"}
    ours = tuple(f"tests.fuzzing.{name}" for name in (folder, "question"))
    assert all(name.startswith(ours) for name in reached if name.startswith("tests.fuzzing."))


@pytest.mark.parametrize("line", ["import tilewise.expr", "def f():\n    from tilewise import expr", "import far"])
def test_an_import_of_the_package_is_found_wherever_it_is(line: str, tmp_path: Path) -> None:
    (tmp_path / "far.py").write_text("if True:\n    import tilewise.expr as ex\n")
    (tmp_path / "judge.py").write_text(line)
    assert "tilewise.expr" in _reached([tmp_path / "judge.py"], tmp_path)


def test_an_import_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "judge.py").write_text("__import__('tilewise')")
    with pytest.raises(AssertionError, match="__import__"):
        _reached([tmp_path / "judge.py"], tmp_path)
