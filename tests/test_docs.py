"""Every Python example in the README and docs runs, behind those before it, and prints what stands below it."""

import contextlib
import importlib
import io
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parent.parent
EXAMPLE = re.compile(r"```python\n(.*?)```\n(?:```text\n(.*?)```)?", re.DOTALL)
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def examples():
    for path in DOCUMENTS:
        codes = []
        for number, match in enumerate(EXAMPLE.finditer(path.read_text())):
            codes.append(match[1])
            yield pytest.param(tuple(codes), match[2], id=f"{path.relative_to(ROOT)}#{number}")


@pytest.mark.parametrize(("codes", "output"), list(examples()))
def test_example(codes, output):
    names = {"__name__": "example"}
    for code in codes:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, "example", "exec"), names)
    if output is not None:
        assert printed.getvalue() == output


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_is_imported_exists_and_shapes_are_imported(path):
    pytest.importorskip("torch")
    imported = set()
    for module, names in re.findall(r"^from (flashinfer_cascade\S*) import (.+)$", path.read_text(), re.MULTILINE):
        for name in names.split(", "):
            assert hasattr(importlib.import_module(module), name), f"{module} has no {name}"
            imported.add(name)
    assert set(re.findall(r"\b([A-Z]\w+Shape)\(", path.read_text())) <= imported


def test_every_linked_file_exists():
    for path in DOCUMENTS:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text()):
            assert (path.parent / target).exists(), f"{path.name} links to {target}"
