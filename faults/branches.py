"""Which branches of recovery a campaign reached, and how often.

The functions of five modules that put right what a crash or damage left are given other bytecode: each arm
of an ``if``, a loop or an ``except`` first counts that it was reached. It is made from the product's own
source, whose files stay as they are. The counts lie in memory that all children share: no kill takes one.
"""

from __future__ import annotations

import ast
import inspect
import mmap
from collections import Counter
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

import vlm_durable.journal.recovery as recovery
import vlm_durable.versions.partition_files as partition_files
import vlm_durable.versions.version_mark as version_mark
import vlm_durable.versions.versioned_object as versioned_object

NOT_BY_FAULTS = frozenset(
    {
        # A file of a newer program.
        "catalog_copies._mark_reading: except FormatVersionError",
        "catalog_copies.catalog_id_of: except CatalogFormatError",
        "partition_files.PartitionVersions.from_bytes: except FormatVersionError",
        # A caller's mistake: a key that is no name, a version accepted where none was put back.
        "versioned_object.VersionedObject.__init__: if (problem := unfit_key(paths.key))",
        "partition_files.PartitionFiles.accept: if older is None or"
        " (newest is not None and self.whole_file(newest) is not None)",
        # Rights that were taken away: root, which mounts file systems here, has all.
        "versioned_object.VersionedObject.whole_records:"
        " if isinstance(copy.damage, OSError) and copy.damage.errno != errno.EIO",
        "partition_files.PartitionFiles.holds: if error.errno != errno.EIO",
        # A store: tests with a real one have them.
        "catalog_copies._is_explained: if files.mark is not None and"
        " (isinstance(copy, str) or _problem(copy, files.mark))",
        "catalog_copies.last_store: if doubt is not None",
        "catalog_copies.note_store: if mark is not None",
        "catalog_copies.publish_catalog: if isinstance((damage := _header_of(path, wholly=True)), str)",
        "catalog_copies.publish_catalog: except CatalogUnreadableError",
        "catalog_copies.publish_catalog: if not _comes_after_files(home, header)",
        "partition_files.PartitionFiles._newest: if place is None and fetch is not None and"
        " ((content := fetch(newest)) is not None)",
        "version_mark.VersionMarkFile.last_store: if reading.is_unreadable",
        "version_mark.VersionMarkFile.note_store: if mark is not None and mark.store != store",
        # Bytes that a wrong program handed in.
        "catalog_copies._header_to_publish: except UNREADABLE",
    }
)
"""Branches that no fault of the campaign leads to."""

_COUNT = "_count_branch"
_MOST = 4096


class Branches:
    """The branches of some modules, counted from now on, in this process and in those that it forks."""

    def __init__(self, modules: tuple[ModuleType, ...]) -> None:
        self._names: list[str] = []
        self._counts = memoryview(mmap.mmap(-1, 8 * _MOST)).cast("Q")
        for module in modules:
            self._instrument(module)

    def reached(self) -> Counter[str]:
        """How often each branch was reached; 0 for those that never were."""
        return Counter({name: self._counts[number] for number, name in enumerate(self._names)})

    def _instrument(self, module: ModuleType) -> None:
        source = inspect.getsource(module)
        tree = ast.parse(source)
        for name, definition in _functions(tree):
            _Arms(f"{module.__name__.rpartition('.')[2]}.{name}", self._names).visit(definition)
        ast.fix_missing_locations(tree)
        codes = dict(_codes(compile(tree, module.__file__ or "", "exec")))
        vars(module)[_COUNT] = self._count
        for function in _live_functions(module):
            function.__code__ = codes[function.__code__.co_qualname]

    def _count(self, number: int) -> None:
        self._counts[number] += 1


class _Arms(ast.NodeVisitor):
    """Has each arm of one function begin with a call that counts it."""

    def __init__(self, function: str, names: list[str]) -> None:
        self._function = function
        self._names = names

    def visit_If(self, node: ast.If) -> None:
        """An ``if`` and its ``else``; an ``elif`` is an ``if`` of its own."""
        test = ast.unparse(node.test)
        inside, otherwise = list(node.body), list(node.orelse)
        self._count(node.body, f"if {test}")
        for child in inside:
            self.visit(child)
        if otherwise and not (len(otherwise) == 1 and isinstance(otherwise[0], ast.If)):
            self._count(node.orelse, f"else of: if {test}")
        for child in otherwise:
            self.visit(child)

    def visit_For(self, node: ast.For) -> None:
        """The body of a loop."""
        self._loop(node, f"for {ast.unparse(node.target)} in {ast.unparse(node.iter)}")

    def visit_While(self, node: ast.While) -> None:
        """The body of a loop."""
        self._loop(node, f"while {ast.unparse(node.test)}")

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        """What is done about an error."""
        self._loop(node, f"except {ast.unparse(node.type) if node.type else ''}")

    def _loop(self, node: Any, name: str) -> None:
        self.generic_visit(node)
        self._count(node.body, name)

    def _count(self, body: list[ast.stmt], name: str) -> None:
        whole = f"{self._function}: {name}"
        number = sum(earlier.partition(" #")[0] == whole for earlier in self._names)
        self._names.append(f"{whole} #{number + 1}" if number else whole)
        call = ast.Call(ast.Name(_COUNT, ast.Load()), [ast.Constant(len(self._names) - 1)], [])
        body.insert(0, ast.copy_location(ast.Expr(call), body[0]))


def _functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    """The functions of a module and of its classes; one inside another belongs to that one."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            yield f"{prefix}{node.name}", node
        elif isinstance(node, ast.ClassDef):
            yield from _functions(node, f"{prefix}{node.name}.")


def _codes(code: CodeType) -> Iterator[tuple[str, CodeType]]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant.co_qualname, constant
            if "<locals>" not in constant.co_qualname:
                yield from _codes(constant)


def _live_functions(module: ModuleType) -> Iterator[FunctionType]:
    """The module's own functions and methods, below their decorators. Those of dataclasses have no source."""
    holders: list[Any] = [module, *(member for member in vars(module).values() if isinstance(member, type))]
    for holder in holders:
        if holder is not module and holder.__module__ != module.__name__:
            continue
        for value in vars(holder).values():
            function = inspect.unwrap(getattr(value, "fget", None) or getattr(value, "__func__", value))
            if isinstance(function, FunctionType) and function.__code__.co_filename == module.__file__:
                yield function


_branches: Branches | None = None


def counted() -> Branches:
    """The branches of recovery; counted from the first call on."""
    global _branches
    if _branches is None:
        from vlm_catalog import catalog_copies

        _branches = Branches((recovery, partition_files, version_mark, versioned_object, catalog_copies))
    return _branches
