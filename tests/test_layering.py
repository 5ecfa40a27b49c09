"""No stage imports a later one; the planner knows no JAX; one file touches what is private."""

import ast
import pathlib

import pytest

PACKAGE = pathlib.Path(__file__).resolve().parent.parent / "jaxoffload"
ORDER = ["errors", "showing", "graphs", "once", "garbage", "sources", "_jax_compat", "identity",
         "capture", "plan", "compile", "policies", "options", "runtime", "verification",
         "signature", "cuts", "pipeline", "whole", "primitive", "transforms", "report", "recut",
         "tuner", "offload", "caches", "doctor", "command", "finetune"]  # fmt: skip
STAGES = {"capture": {"plan", "compile", "runtime"}, "plan": {"capture", "compile", "runtime"},
          "compile": {"plan", "runtime"}, "runtime": {"capture"}}  # fmt: skip
FILES = sorted(PACKAGE.rglob("*.py"))


def imports(path):
    """Modules that a file imports when it is loaded; those for type checking are left out."""
    tree = ast.parse(path.read_text())
    skipped = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_backwards(path):
    folder = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    for module in imports(path):
        parts = module.split(".")
        if parts[0] == "jaxoffload" and len(parts) > 1:
            assert parts[1] not in STAGES.get(folder, ()), f"{folder} imports {module}"
            if folder in ORDER and parts[1] in ORDER and parts[1] != folder:
                assert ORDER.index(parts[1]) < ORDER.index(folder), f"{folder} imports {module}"
        if folder in ("plan", "graphs"):
            assert parts[0] not in ("jax", "jaxlib"), f"{folder} imports {module}"
            assert parts[1:2] != ["_jax_compat"]
            # Searches that are a hundred times slower in Python, and need nothing but numbers.
            assert module != "jaxoffload._native" or path.name in (
                "placement.py",
                "reachability.py",
            )
        if path.name != "_jax_compat.py":
            assert not module.startswith(("jax._src", "jaxlib.")), f"{path.name} imports {module}"
