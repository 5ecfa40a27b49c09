"""No stage imports a later one, no module one that leads back to it; the planner knows no JAX; one
folder touches what is private; and no file is too long to be read at once."""

import ast
import pathlib

import networkx as nx
import pytest

PACKAGE = pathlib.Path(__file__).resolve().parent.parent / "jaxoffload"
ORDER = ["errors", "showing", "policies", "options", "graphs", "once", "garbage", "sources",
         "_jax_compat", "identity", "store", "capture", "plan", "compile", "runtime", "search",
         "report", "transform", "doctor", "command", "finetune"]  # fmt: skip
STAGES = {"capture": {"plan", "compile", "runtime"}, "plan": {"capture", "compile", "runtime"},
          "compile": {"plan", "runtime"}, "runtime": {"capture"}}  # fmt: skip
NATIVE = ["", "base", "bindings", "cuda", "launcher", "pjrt", "plan", "planner", "tiers"]
FILES = sorted(PACKAGE.rglob("*.py"))


def imports(path):
    """Modules that a file imports, for the type checker alone, too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def module_of(path):
    name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
    return name if path.parent == PACKAGE else name.removesuffix(".__init__")


def test_no_source_file_is_longer_than_400_lines():
    """Tests may be, and what only they use: the imitated plugin and driver."""
    native = [PACKAGE.parent / "custom_calls" / folder for folder in NATIVE]
    code = [*FILES, *(path for f in native for e in ("cc", "h") for path in f.glob(f"*.{e}"))]
    lengths = {str(path): len(path.read_text().splitlines()) for path in code}
    assert len(lengths) > len(FILES) + 50
    assert not {path: lines for path, lines in lengths.items() if lines > 400}


def test_no_module_leads_back_to_itself():
    modules, graph = set(map(module_of, FILES)), nx.DiGraph()
    for path in FILES:
        for name in imports(path):
            found = name if name in modules else name.rpartition(".")[0]
            if found in modules:
                graph.add_edge(module_of(path), found)
    assert graph.number_of_edges() > len(FILES)
    assert not [c for c in nx.strongly_connected_components(graph) if len(c) > 1]


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
            # What is a hundred times slower in Python, and needs nothing but numbers; and how the
            # runtime numbers its lanes.
            assert module != "jaxoffload._native" or path.name in (
                "build.py",
                "lanes.py",
                "limits.py",
                "placement.py",
                "priority.py",
                "reachability.py",
                "static.py",
            )
        if path.parent.name == "cost":
            assert parts[1:3] != ["plan", "alloc"], f"{path.name} imports {module}"
        if folder != "_jax_compat":
            assert not module.startswith(("jax._src", "jaxlib.")), f"{path.name} imports {module}"
