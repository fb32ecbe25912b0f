"""Imports point one way, so that engines run without Dagster and a module is found where it belongs."""

import ast
import graphlib
import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
EXTENSIONS = ("vlm_cluster", "vlm_training", "vlm_results")
# A package imports those below it, and no other.
CORE = ("vlm_assets", "sensors", "resources", "vlm_catalog", "vlm_engine", "vlm_durable")
MODULES = sorted(
    path for package in ("examples", *EXTENSIONS, *CORE) for path in (CHECKOUT / package).rglob("*.py")
)
# The commands that a checkout has and an installed package lacks.
OF_A_CHECKOUT = "vlm_assets/commands/intake.py"
DEFINITIONS = "vlm_assets.definitions"
NOT_IN = {
    "vlm_durable": {"dagster", "torch", "transformers", "pydantic", "typer"},
    "vlm_durable/journal": {"numpy", "duckdb", "sqlalchemy"},
    "vlm_engine": {"dagster", "typer"},
    "vlm_catalog": {"dagster", "torch", "transformers", "pydantic", "typer"},
    "vlm_assets/services": {"typer", "rich"},
}
"""What other people's packages a folder does without. A user of these folders need not have them."""

# Dagster's classes: all other modules of resources/ are plain Python that Dagster hands on.
OF_DAGSTER = {"resources/parquet_io.py", "resources/dagster_names.py", "resources/interrupts.py"}


@cache
def parsed(path: Path) -> ast.Module:
    """What a file says."""
    return ast.parse(path.read_text())


@cache
def imported(path: Path, *, in_functions: bool = True) -> frozenset[str]:
    """Every module that a file imports."""
    names: set[str] = set()
    tree = parsed(path)
    for node in ast.walk(tree) if in_functions else tree.body:
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return frozenset(names)


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(CHECKOUT).with_suffix("").parts).removesuffix(".__init__")


def files_that_import() -> dict[str, set[str]]:
    """Each module of ours with those that it imports, also inside its functions and for its types."""
    paths = {module_of(path): path for path in MODULES}
    return {name: imported_modules(path) & paths.keys() - {name} for name, path in paths.items()}


@cache
def imported_modules(path: Path) -> frozenset[str]:
    """As ``imported``, with the modules that are taken out of a package by name."""
    names = set(imported(path))
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.ImportFrom) and node.module:
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return frozenset(names)


def tops(path: Path) -> set[str]:
    return {name.partition(".")[0] for name in imported(path)}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(CHECKOUT)))
def test_imports_point_down(path):
    """examples import all; extensions import the core, and not each other; the core imports what is below."""
    name = str(path.relative_to(CHECKOUT))
    package = name.partition("/")[0]
    ours = tops(path) & {"examples", *EXTENSIONS, *CORE} - {package}
    if package in EXTENSIONS:
        assert ours <= set(CORE)
    elif package in CORE:
        of_checkout = {"examples"} if name == OF_A_CHECKOUT else set()
        assert ours - of_checkout - set(EXTENSIONS) <= set(CORE[CORE.index(package) :])
    at_start = {name.partition(".")[0] for name in imported(path, in_functions=False)}
    assert package == "examples" or "examples" not in at_start, "an installed package has no examples"
    for folder, banned in NOT_IN.items():
        if name.startswith(f"{folder}/"):
            assert not tops(path) & banned, folder
    if package == "resources" and name not in OF_DAGSTER:
        assert "dagster" not in tops(path), "Dagster hands on what is plain Python"
    if name.startswith("vlm_durable/journal/"):
        below = {module for module in imported(path) if module.startswith("vlm_durable.")}
        words = ("vlm_durable.commands", "vlm_durable.wording")
        lowest = ("vlm_durable.journal", "vlm_durable.files", *words)
        assert all(module.startswith(lowest) for module in below)


def test_the_core_names_no_more_of_the_extensions_than_it_does():
    """What the core still imports of them is on a list, which only gets shorter."""
    named = {
        module: {name for name in imports if name.startswith(EXTENSIONS) and name not in EXTENSIONS}
        for module, imports in files_that_import().items()
        if module.startswith(CORE)
    }
    assert {module: imports for module, imports in named.items() if imports} == {}


def test_no_text_of_the_core_names_a_module_of_an_extension():
    """A name in a string is an import that no checker sees: what an extension has goes through the door."""
    words = re.compile(rf"\b({'|'.join(EXTENSIONS)})\b")
    named = {str(path.relative_to(CHECKOUT)): words.findall(text) for path, text in texts_of_the_core()}
    assert len(named) > 150
    assert {path: found for path, found in named.items() if found} == {}


def texts_of_the_core():
    """The files of the core that a program reads: of modules the strings, without those that document."""
    for package in CORE:
        for path in sorted((CHECKOUT / package).rglob("*")):
            if path.suffix == ".py":
                tree = parsed(path)
                documenting = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
                strings = (node for node in ast.walk(tree) if isinstance(node, ast.Constant))
                yield path, "\n".join(str(node.value) for node in strings if id(node) not in documenting)
            elif path.suffix in (".yaml", ".js", ".html"):
                yield path, path.read_text()


UNIT_TESTS = [
    path for package in CORE for path in sorted((CHECKOUT / "tests" / "unit" / package).rglob("test_*.py"))
]


def test_the_cores_unit_tests_need_no_extension():
    """They run where none is installed (`make test-core`)."""
    assert len(UNIT_TESTS) > 100
    importing = {str(path.relative_to(CHECKOUT)): tops(path) & set(EXTENSIONS) for path in UNIT_TESTS}
    assert {path: names for path, names in importing.items() if names} == {}


def test_no_test_module_imports_another():
    """What several of them share lies in tests/support; a folder's own helper is imported there alone."""
    crossing = set()
    for path in (CHECKOUT / "tests").rglob("*.py"):
        own = ".".join(path.parent.relative_to(CHECKOUT).parts)
        for name in imported(path):
            helper = name.rpartition(".")[0] == own and not name.rpartition(".")[2].startswith("test_")
            if name.startswith("tests.") and not name.startswith("tests.support.") and not helper:
                crossing.add((str(path.relative_to(CHECKOUT)), name))
    assert crossing == set()


def test_no_file_imports_one_that_imports_it():
    """An import inside a function hides a circle, and does not undo it: one file cannot be read first."""
    arrows = files_that_import()
    assert len(arrows) > 100
    graphlib.TopologicalSorter(arrows).prepare()  # A CycleError names the files.


def test_no_folder_imports_one_that_imports_it():
    """Folders form layers: a reader who starts at the bottom never has to look up again."""
    of_files = files_that_import()
    packages = {module_of(path) for path in MODULES if path.name == "__init__.py"}
    folders = {name: name if name in packages else name.rpartition(".")[0] for name in of_files}
    arrows: dict[str, set[str]] = {folder: set() for folder in folders.values()}
    for name, imports in of_files.items():
        arrows[folders[name]] |= {folders[one] for one in imports} - {folders[name]}
    assert len(arrows) > 15
    graphlib.TopologicalSorter(arrows).prepare()  # A CycleError names the folders.


def test_a_name_of_a_module_or_a_class_occurs_once():
    """A reader who searches for a name finds one place."""
    ours = [path for path in MODULES if "examples" not in path.parts and path.stem != "__init__"]
    classes = [node for path in ours for node in parsed(path).body if isinstance(node, ast.ClassDef)]
    counts = Counter([path.name for path in ours] + [one.name for one in classes])
    assert not {name for name, count in counts.items() if count > 1}


def test_each_s3_client_is_imported_by_one_module():
    """What an error of a store means is decided in one place, whichever client met it."""
    of_boto3, of_obstore = (
        {module_of(path) for path in MODULES if tops(path) & clients}
        for clients in ({"boto3", "botocore"}, {"obstore"})
    )
    assert of_boto3 == {"vlm_durable.mirror.bucket"}
    assert of_obstore == {"vlm_durable.mirror.quick_bucket"}


def test_nothing_imports_the_definitions():
    """They are the top: whatever imports them loads every asset and sensor."""
    assert not [path for path in MODULES if DEFINITIONS in imported_modules(path)]


def command_modules_of_extensions() -> set[str]:
    """The modules that the extensions here name as those of their commands."""
    modules: set[str] = set()
    for path in [path for path in MODULES if path.stem.endswith("_extension")]:
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "commands":
                assert isinstance(node.value, ast.Dict)
                modules.update(ast.literal_eval(entry)[0] for entry in node.value.values)
    return modules


def test_only_commands_import_commands():
    """What a command does is a service: a sensor, an asset or another program can have it done too."""
    commands = "vlm_assets.commands"
    own = command_modules_of_extensions()
    assert own
    users = {
        name
        for name, imports in files_that_import().items()
        if any(module.startswith(commands) for module in imports) and not name.startswith(commands)
    }
    assert users - own == set()


def test_services_write_nothing_to_a_terminal():
    """They hand over what they found, and say what takes long to whoever listens."""
    services = [path for path in MODULES if "vlm_assets/services" in str(path)]
    assert len(services) > 20
    printing = {
        module_of(path)
        for path in services
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Name) and node.id == "print"
    }
    assert printing == set()


WATCHERS = (
    "sensors",
    *(f"vlm_assets.{folder}" for folder in ("automation", "commands", "services", "webserver")),
)
DATA_PATH = (
    *(f"vlm_assets/{folder}/" for folder in ("config", "assets")),
    *(f"{package}/" for package in ("resources", "vlm_catalog", "vlm_engine", "vlm_durable")),
)


def test_the_data_path_does_not_import_the_watchers():
    """A row is made and published in the same way whether anybody watches or not."""
    on_path = [path for path in MODULES if str(path.relative_to(CHECKOUT)).startswith(DATA_PATH)]
    assert len(on_path) > 100
    watching = {name for path in on_path for name in imported(path) if name.startswith(WATCHERS)}
    # No watcher: how a run waits for Dagster's database, beside the other uses of its private parts.
    assert watching == {"sensors.dagster_internals.instance_needs"}


def test_what_dagster_does_not_promise_is_used_in_one_package_alone():
    """An upgrade of Dagster is looked through in one place."""
    private = [path for path in MODULES if any(name.startswith("dagster._") for name in imported(path))]
    assert private
    assert {path.parent.relative_to(CHECKOUT) for path in private} == {Path("sensors/dagster_internals")}


NOT_PUBLIC = {
    "event_log_storage",
    "run_storage",
    "schedule_storage",
    "report_run_failed",
    "report_run_canceled",
}
"""Attributes of a Dagster instance that are not public, though nothing in their names says so."""


def test_private_parts_of_an_instance_are_used_there_too():
    """An attribute of an instance needs no import, and changes with Dagster all the same."""
    users = set()
    for path in MODULES:
        nodes = ast.walk(parsed(path))
        if any(isinstance(node, ast.Attribute) and node.attr in NOT_PUBLIC for node in nodes):
            users.add(path.parent.relative_to(CHECKOUT))
    assert users == {Path("sensors/dagster_internals")}


def test_each_use_of_dagsters_private_parts_says_its_version_and_what_replaces_it():
    """With another version in constraints.txt, somebody has looked at each of them again."""
    (pinned,) = re.findall(r"^dagster==(.+)$", (CHECKOUT / "constraints.txt").read_text(), re.MULTILINE)
    modules = [path for path in MODULES if path.parent.name == "dagster_internals" and path.stat().st_size]
    assert modules
    for path in modules:
        said = ast.get_docstring(parsed(path)) or ""
        assert f"Checked with dagster {pinned}" in said, path.name
        assert re.search(r"\b[Ii]f\s", said.partition("Checked with dagster")[2]), path.name


@pytest.mark.parametrize("path", [path for path in MODULES if path.name == "__init__.py"], ids=str)
def test_packages_import_nothing(path):
    """Importing one module never drags its neighbours in."""
    assert imported(path) <= {"os"}, "to set what a library reads when it is imported"
