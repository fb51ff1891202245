"""The source has nothing that runs what it reads: no pickle, eval, exec or shell."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from siammm.core.errors import InputError
from siammm.data.sources import open_source

SOURCE = Path(__file__).parents[1] / "src" / "siammm"
MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
# The name of an error that torch raises; nothing of the module is called.
ALLOWED = {("runs/weights.py", "imports pickle")}


def findings(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            yield from (f"imports {name}" for name in names if name.split(".")[0] in MODULES)
        if not isinstance(node, ast.Call):
            continue
        name, settings = ast.unparse(node.func), {word.arg: ast.unparse(word.value) for word in node.keywords}
        if name in ("eval", "exec", "compile", "__import__", "os.system", "os.popen"):
            yield f"calls {name}"
        if name.split(".")[0] in MODULES:
            yield f"calls {name}"
        if settings.get("shell", "False") != "False":
            yield f"calls {name} with a shell"
        if settings.get("allow_pickle", "False") != "False":
            yield f"calls {name} with allow_pickle"
        if name == "np.load" and "allow_pickle" not in settings:
            yield "calls np.load without allow_pickle=False"
        if name == "torch.load" and settings.get("weights_only") != "True":
            yield "calls torch.load without weights_only=True"


def test_nothing_runs_what_it_reads() -> None:
    found = {
        (file.relative_to(SOURCE).as_posix(), what)
        for file in sorted(SOURCE.rglob("*.py"))
        for what in findings(ast.parse(file.read_text("utf-8")))
    }
    assert found == ALLOWED


@pytest.mark.parametrize(
    "code", ["import pickle", "eval(x)", "f(shell=True)", "torch.load(x)", "np.load(x)", "f(x, allow_pickle=True)"]
)
def test_it_would_be_found(code: str) -> None:
    assert list(findings(ast.parse(code)))


@pytest.mark.parametrize("name", ["LSUN", "LSUNClass"])
def test_a_set_that_unpickles_its_cache_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="unpickles"):
        open_source(f"torchvision:{name}:{tmp_path}")
