"""Notebooks run from top to bottom, are committed with what they gave, and call the package instead of computing."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.full
NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))
nbformat = pytest.importorskip("nbformat", reason="needs the extra `notebooks`")
# In a process of its own: the client's libraries warn, and warnings are errors here.
EXECUTE = """
import sys
import nbformat
from nbclient import NotebookClient
book = nbformat.read(sys.argv[1], as_version=4)
NotebookClient(book, timeout=120, kernel_name="python3", resources={"metadata": {"path": sys.argv[2]}}).execute()
"""
_LOGIC = (ast.FunctionDef, ast.ClassDef, ast.For, ast.While, ast.If, ast.Lambda)


def complaints(book) -> list[str]:
    """Returns what is wrong with a notebook as it is stored."""
    found, expected = [], 1
    for cell in book.cells:
        if cell.cell_type != "code":
            continue
        if cell.execution_count != expected:
            found.append(f"cell {expected} was not executed in order: {cell.execution_count}")
        expected += 1
        found += [f"a cell failed: {out.ename}" for out in cell.outputs if out.output_type == "error"]
        found += [f"a warning is stored: {out.text[:80]!r}" for out in cell.outputs if out.get("name") == "stderr"]
        tree = ast.parse(cell.source)
        found += [f"logic in a cell: {type(node).__name__}" for node in ast.walk(tree) if isinstance(node, _LOGIC)]
        if isinstance(tree.body[-1], ast.Expr) and not cell.outputs:
            found.append(f"no output is stored: {cell.source!r}")
    return found


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path):
    pytest.importorskip("nbclient", reason="needs the extra `notebooks`")
    ran = subprocess.run([sys.executable, "-c", EXECUTE, str(path), str(path.parent)], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-3000:]


def test_there_are_three_notebooks_each_stored_with_its_outputs():
    assert [path.stem for path in NOTEBOOKS] == ["1_operator", "2_inside_the_kernel", "3_measurements"]
    for path in NOTEBOOKS:
        assert complaints(nbformat.read(path, as_version=4)) == []


def test_a_bad_notebook_is_caught():
    output = nbformat.v4.new_output("error", ename="ValueError", evalue="", traceback=[])
    warning = nbformat.v4.new_output("stream", name="stderr", text="a path of some machine")
    cells = [
        nbformat.v4.new_code_cell("1 + 1", execution_count=2),
        nbformat.v4.new_code_cell("for i in x:\n    pass", execution_count=2, outputs=[output, warning]),
    ]
    assert complaints(nbformat.v4.new_notebook(cells=cells)) == [
        "cell 1 was not executed in order: 2",
        "no output is stored: '1 + 1'",
        "a cell failed: ValueError",
        "a warning is stored: 'a path of some machine'",
        "logic in a cell: For",
    ]
