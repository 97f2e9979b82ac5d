"""The shape of the code: one way through, one name per idea, nothing heavy before its time."""

import ast
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import bert4rec

SOURCE = Path(bert4rec.__file__).parent
MODULES = sorted(path for path in SOURCE.rglob("*.py") if path.name != "__init__.py")
# Each room may import itself and what stands before it.
ORDER = [
    "__init__",
    "settings",
    "durable",
    "environment",
    "interrupts",
    "progress",
    "cpu_tuning",
    "threads",
    "data",
    "models",
    "objectives",
    "losses",
    "config",
    "item_mask",
    "scoring",
    "retrieval",
    "evaluation",
    "model_directory",
    "explanation",
    "recommender",
    "serving",
    "training",
    "distributed",
    "run_checks",
    "pipeline",
    "compression",
    "lab",
    "cli",
    "__main__",
]


def imported_rooms(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("bert4rec"):
            parts = node.module.split(".")
            names |= {parts[1]} if len(parts) > 1 else {a.name for a in node.names} & set(ORDER)
        if isinstance(node, ast.Import):
            names |= {a.name.split(".")[1] for a in node.names if a.name.startswith("bert4rec.")}
    return names


def test_imports_point_one_way() -> None:
    for path in SOURCE.rglob("*.py"):
        if path == SOURCE / "__init__.py":
            continue  # the public names, loaded when they are asked for
        room = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        assert room in ORDER, f"{path} is in a room that the order does not know"
        for other in imported_rooms(path):
            assert ORDER.index(other) <= ORDER.index(room), f"{path} imports {other}"


def test_the_order_is_that_of_the_architecture_page() -> None:
    page = (SOURCE.parents[1] / "docs" / "architecture.md").read_text(encoding="utf-8")
    (listed,) = re.findall(r"Imports point down this order: (.*?)\.\n", page, flags=re.S)
    assert re.findall(r"`(\w+)`", listed) == ORDER[1:-1]


def test_every_module_is_named_in_the_architecture_page() -> None:
    page = (SOURCE.parents[1] / "docs" / "architecture.md").read_text(encoding="utf-8")
    tree = page.split("```")[3]  # the second block
    named = set(re.findall(r"\b(\w+)\.py\b", tree))
    modules = {path.stem for path in MODULES if not path.stem.startswith("__")}
    assert named == modules, f"not named: {modules - named}; gone: {named - modules}"


def test_no_two_modules_and_no_two_classes_share_a_name() -> None:
    modules = Counter(path.name for path in MODULES)
    classes = Counter(
        node.name
        for path in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
    )
    assert [name for name, n in modules.items() if n > 1] == []
    assert [name for name, n in classes.items() if n > 1] == []


def test_files_are_short_and_functions_take_few_arguments() -> None:
    for path in SOURCE.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert len(text.splitlines()) <= 400, f"{path} has more than 400 lines"
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and "cli" not in path.parts:
                named = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
                n = len([each for each in named if each.arg not in ("self", "cls")])
                assert n <= 11, f"{path}: {node.name} takes {n} arguments"


def test_recommending_needs_no_training_code() -> None:
    program = "import sys, bert4rec.recommender; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert "bert4rec.models.bert4rec" in loaded
    assert not [name for name in loaded if name.startswith("bert4rec.training")]


def test_help_recipes_and_import_do_not_load_the_heavy_libraries() -> None:
    command = (
        "import sys; sys.argv = ['bert4rec', {!r}]\nfrom bert4rec.cli import main\ntry: main()\nexcept SystemExit: pass"
    )
    for program in ("import bert4rec", command.format("--help"), command.format("recipes")):
        done = subprocess.run(
            [sys.executable, "-c", program + "\nimport sys; print('LOADED', *sys.modules)"],
            capture_output=True,
            text=True,
            check=True,
        )
        loaded = set(done.stdout.rsplit("LOADED", 1)[1].split())
        assert "bert4rec" in loaded
        assert not loaded & {"torch", "duckdb", "numpy", "pandas"}


def test_no_pickle_anywhere() -> None:
    """The lint rule forbids it; this holds even where the linter is told to look away."""
    forbidden = re.compile(r"\b(pickle|cloudpickle|dill|joblib|shelve)\b|torch\.(load|save)\b")
    for path in SOURCE.rglob("*.py"):
        assert not forbidden.search(path.read_text(encoding="utf-8")), path
    pyproject = (SOURCE.parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    for name in ("pickle", "torch.load", "torch.save"):
        assert f'"{name}".msg' in pyproject


def test_public_names_exist() -> None:
    for name in bert4rec.__all__:
        assert getattr(bert4rec, name) is not None
