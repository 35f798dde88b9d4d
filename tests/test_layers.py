from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

#: What each layer may import of ours.
LAYERS = {
    "spec": {"spec"},
    "models": {"spec", "models"},
    "conformance": {"spec", "models", "conformance"},
    "generated_tests": {"conformance", "spec"},
}
OURS = {*LAYERS, "tests", "scripts"}

#: Packages that a user who only replays scenarios and runs generated tests does not need.
PROOF_PACKAGES = ("z3", "cvc5", "jinja2")
#: Packages that the driver's side needs in the vllm tier at most, or not at all.
DRIVER_SIDE = (
    *("scenario", "bindings", "driver", "replay", "conform", "workload", "engine"),
    *("layout", "picture", "svg", "pytest_plugin"),
)


def sources(layer: str) -> list[Path]:
    return sorted((ROOT / layer).rglob("*.py"))


def imported(source: Path) -> Iterator[tuple[int, str]]:
    """Line and absolute name of each import, wherever it stands in the file."""
    for node in ast.walk(ast.parse(source.read_bytes(), filename=str(source))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = source.relative_to(ROOT).parent.parts if node.level else ()
            above = package[: len(package) - node.level + 1]
            yield node.lineno, ".".join([*above, *filter(None, [node.module])])


@pytest.mark.parametrize("layer", LAYERS)
def test_layers_import_in_one_direction(layer: str) -> None:
    """No layer imports one that builds on it: spec, then models, then conformance."""
    backwards = [
        f"{source.relative_to(ROOT)}:{line} imports {name}"
        for source in sources(layer)
        for line, name in imported(source)
        if name.partition(".")[0] in OURS - LAYERS[layer]
    ]

    assert sources(layer)
    assert backwards == []


def test_spec_imports_the_standard_library_only() -> None:
    """The reviewed part knows no solver and no term library."""
    foreign = [
        f"{source.relative_to(ROOT)}:{line} imports {name}"
        for source in sources("spec")
        for line, name in imported(source)
        if name.partition(".")[0] not in {*sys.stdlib_module_names, "spec"}
    ]

    assert foreign == []


BLOCK = """
import importlib, importlib.abc, importlib.util, sys

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {absent}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
for name in {modules}:
    importlib.import_module(f"conformance.{{name}}")
"""


def run_without(absent: tuple[str, ...], script: str) -> None:
    """Run a script in a process that lacks packages, from the project's root."""
    preamble = BLOCK.format(absent=set(absent), modules=DRIVER_SIDE)
    done = subprocess.run(
        [sys.executable, "-c", preamble + script], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_the_driver_side_imports_without_solver_templates_torch_or_terminal_packages() -> None:
    """Scenarios, driver, replay and conformance runs need none of them, not even transitively."""
    run_without((*PROOF_PACKAGES, "torch", "numpy", "click", "rich"), "")


def test_generated_tests_load_without_solver_and_templates() -> None:
    """The conftest of the generated tests, and each of them, loads where nothing can be proved."""
    run_without(
        PROOF_PACKAGES,
        "import pathlib\n"
        "for file in sorted(pathlib.Path('generated_tests').rglob('*.py')):\n"
        "    spec = importlib.util.spec_from_file_location(file.stem, file)\n"
        "    spec.loader.exec_module(importlib.util.module_from_spec(spec))\n",
    )


def test_importing_the_driver_side_imports_nothing_heavy() -> None:
    """Reading a scenario must not cost the start of a solver or of torch."""
    run_without(
        (),
        f"heavy = {{*{PROOF_PACKAGES!r}, 'torch', 'numpy', 'vllm', 'click', 'rich'}}\n"
        "heavy &= set(sys.modules)\n"
        "assert not heavy, heavy\n",
    )
