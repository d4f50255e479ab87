"""The rooms import in one direction: cli -> flows -> tasks -> marlaas -> {storage, marlaas_kernels}."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OURS = {"flows", "tasks", "marlaas", "storage", "marlaas_kernels", "kernels", "tests", "bench"}
MAY_IMPORT = {
    "flows": {"flows", "tasks", "marlaas", "storage"},
    "tasks": {"tasks", "marlaas", "storage"},
    "marlaas": {"marlaas", "storage", "marlaas_kernels"},
    "storage": {"storage"},
    "kernels/marlaas_kernels": {"marlaas_kernels"},
}
PREFECT = {"flows", "tasks"}
EXCEPT = {"marlaas/cli.py": {"flows"}}


def modules():
    for room in MAY_IMPORT:
        for path in sorted((ROOT / room).rglob("*.py")):
            yield pytest.param(room, path, id=str(path.relative_to(ROOT)))


@pytest.mark.parametrize(("room", "path"), modules())
def test_a_module_imports_only_what_its_room_may(room, path):
    roots = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            roots |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            roots.add((node.module or "").split(".")[0])
    allowed = MAY_IMPORT[room] | EXCEPT.get(str(path.relative_to(ROOT)), set())
    assert roots & OURS <= allowed
    assert "prefect" not in roots or room in PREFECT


def test_kernels_is_not_a_package_of_its_own():
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_checking_a_spec_imports_nothing_heavy():
    heavy = "{'torch', 'transformers', 'mlflow', 'prefect', 'reasoning_gym'}"
    code = f"import sys, marlaas.cli, marlaas.environments; print({heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_looking_into_a_store_imports_nothing_heavy(tmp_path):
    heavy = "{'torch', 'transformers', 'mlflow', 'prefect', 'matplotlib', 's3fs'}"
    show = f"cli.status(Path({str(tmp_path)!r}), {str(tmp_path)!r})"
    code = f"import sys; from pathlib import Path; from marlaas import cli; {show}; print({heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "set()"
