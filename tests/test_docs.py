"""Every Python example in the README and docs runs and prints what stands below it."""

import contextlib
import io
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parent.parent
EXAMPLE = re.compile(r"```python\n(.*?)```\n(?:```text\n(.*?)```)?", re.DOTALL)
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def examples():
    for path in DOCUMENTS:
        for number, match in enumerate(EXAMPLE.finditer(path.read_text())):
            yield pytest.param(match[1], match[2], id=f"{path.relative_to(ROOT)}#{number}")


@pytest.mark.parametrize(("code", "output"), list(examples()))
def test_example(code, output):
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "example", "exec"), {"__name__": "example"})
    if output is not None:
        assert printed.getvalue() == output


def test_every_linked_file_exists():
    for path in DOCUMENTS:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text()):
            assert (path.parent / target).exists(), f"{path.name} links to {target}"
