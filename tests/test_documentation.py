"""Everything the documents show runs: README code, docstring examples, links; and public names say what they take."""

import doctest
import importlib
import inspect
import pkgutil
import re
from pathlib import Path

import pytest

import inkling_pallas

ROOT = Path(__file__).parent.parent
MODULES = ["inkling_pallas", *(m.name for m in pkgutil.walk_packages(inkling_pallas.__path__, "inkling_pallas."))]
PAGES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("*.md"))
WITHOUT_CODE = ("docs/ladders.md",)  # measurements alone
FUNCTIONS = [name for name in inkling_pallas.__all__ if inspect.isfunction(getattr(inkling_pallas, name))]


def run_python_blocks(text: str, name: str) -> None:
    """Runs the python blocks of a Markdown text in one namespace, from top to bottom as a reader would."""
    blocks = list(re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    assert blocks, f"{name} must have a ```python block"
    namespace = {"__name__": name}
    for block in blocks:
        # Leading newlines give a traceback the line numbers of the document.
        lines_above = text.count("\n", 0, block.start(1))
        exec(compile("\n" * lines_above + block[1], name, "exec"), namespace)


def broken_links(text: str, folder: Path = ROOT) -> list[str]:
    """Returns the relative link targets of a Markdown text in a folder that name no file of the project."""
    targets = re.findall(r"\]\(([^)#\s]+)", text)
    return [target for target in targets if "://" not in target and not (folder / target).exists()]


@pytest.mark.slow
@pytest.mark.parametrize("document", ["README.md", *(page for page in PAGES if page not in WITHOUT_CODE)])
def test_the_code_of_a_document_runs(document):
    run_python_blocks((ROOT / document).read_text(encoding="utf-8"), document)


@pytest.mark.host
@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", *PAGES])
def test_links_lead_to_files(document):
    path = ROOT / document
    assert broken_links(path.read_text(encoding="utf-8"), path.parent) == []


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name):
    module = importlib.import_module(name)
    assert doctest.testmod(module, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE).failed == 0


@pytest.mark.host
@pytest.mark.parametrize("name", FUNCTIONS)
def test_public_functions_are_typed_and_show_an_example(name):
    function = getattr(inkling_pallas, name)
    signature = inspect.signature(function)
    annotations = [parameter.annotation for parameter in signature.parameters.values()] + [signature.return_annotation]
    assert inspect.Signature.empty not in annotations
    assert doctest.DocTestFinder(recurse=False).find(function)[0].examples, f"{name} must show an example"


@pytest.mark.host
def test_a_document_without_code_or_with_failing_code_is_caught():
    with pytest.raises(AssertionError, match=re.escape("A.md must have a ```python block")):
        run_python_blocks("```bash\nmake demo\n```\n", "A.md")
    with pytest.raises(ZeroDivisionError):
        run_python_blocks("```python\nx = 0\n```\ntext\n```python\n1 / x\n```\n", "A.md")


@pytest.mark.host
def test_a_broken_link_is_caught():
    assert broken_links("[a](LICENSE#top) [b](no/such.md) [c](https://example.com)") == ["no/such.md"]
