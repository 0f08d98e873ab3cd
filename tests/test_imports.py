"""A scheduler process plans without torch, flashinfer or anything heavy; the public names are all there."""

import ast
import pathlib
import subprocess
import sys

import pytest

import flashinfer_cascade

BLOCKED = ("torch", "flashinfer", "triton", "rich", "typer", "matplotlib")

SCRIPT = """
import sys
sys.path[:0] = {path!r}

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked!r}:
            raise ImportError(f"{{name}} must not be imported by a planner")

sys.meta_path.insert(0, Block())
from flashinfer_cascade import CascadeConfig, CascadePlanner
planner = CascadePlanner(
    CascadeConfig(num_qo_heads=32, num_kv_heads=8, head_dim=128, page_size=16, dtype="bfloat16")
)
plan = planner.plan([[*range(512), 600 + r] for r in range(64)], [8192 + 5] * 64)
assert plan.parts[0].executor == "segments", plan.parts[0].reason
assert "64 requests" in plan.explain()
import pickle
assert pickle.loads(pickle.dumps(plan)) == plan
try:
    plan.to_flashinfer()
except Exception as error:
    print(type(error).__name__, error)
"""


def test_planning_imports_neither_torch_nor_flashinfer():
    out = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(path=sys.path, blocked=BLOCKED)],
        check=False,
        capture_output=True,
        text=True,
    )
    assert out.returncode == 0, out.stderr
    assert out.stdout.startswith("BackendUnavailableError to_flashinfer needs torch")


PACKAGE = pathlib.Path(flashinfer_cascade.__file__).parent
INTEGRATIONS = sorted((PACKAGE / "integrations").rglob("*.py"))


def imported(path):
    """Modules that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relative to itself"
            yield node.module


@pytest.mark.parametrize("path", INTEGRATIONS, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_integrations_never_import_their_engine(path):
    allowed = sys.stdlib_module_names | {"numpy", "torch", "flashinfer_cascade"}
    assert {name for name in imported(path) if name.split(".")[0] not in allowed} == set()


def test_nothing_but_tools_imports_integrations():
    importers = {
        str(path.relative_to(PACKAGE)).split("/")[0]
        for path in PACKAGE.rglob("*.py")
        if path not in INTEGRATIONS
        for name in imported(path)
        if name.startswith("flashinfer_cascade.integrations")
    }
    assert importers <= {"bench", "cli.py", "doctor.py"}


def imports(path):
    """Modules of this package that a file imports, wherever it does so."""
    for node in ast.walk(ast.parse(path.read_text())):
        names = [node.module] if isinstance(node, ast.ImportFrom) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        yield from (
            name.removeprefix("flashinfer_cascade.") for name in names if name and "flashinfer_cascade." in name
        )


ENGINE = [
    *("allocator", "config", "requests", "scheduler", "model", "account", "engine"),
    *("compare", "prompts", "cases", "show", "serve"),
]
"""In the order of their imports."""


def test_the_engine_stands_below_all_that_it_uses():
    root = pathlib.Path(flashinfer_cascade.__file__).parent
    for path in root.rglob("*.py"):
        name = path.relative_to(root).with_suffix("").as_posix()
        used = {module.split(".")[0] for module in imports(path)}
        if name.startswith("engine/"):
            assert not used & {"cli", "doctor"}, name
        elif name != "cli":
            assert "engine" not in used, name


def test_the_engine_s_modules_import_only_those_before_them():
    folder = pathlib.Path(flashinfer_cascade.__file__).parent / "engine"
    assert {path.stem for path in folder.glob("*.py")} == {"__init__", *ENGINE}
    for number, name in enumerate(ENGINE):
        used = {module.split(".")[1] for module in imports(folder / f"{name}.py") if module.startswith("engine.")}
        assert used <= set(ENGINE[:number]), name


def test_all_names_exist_and_are_sorted():
    assert flashinfer_cascade.__all__ == sorted(flashinfer_cascade.__all__)
    for name in flashinfer_cascade.__all__:
        assert getattr(flashinfer_cascade, name).__module__.startswith("flashinfer_cascade.")


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'CascadePlaner'"):
        _ = flashinfer_cascade.CascadePlaner
