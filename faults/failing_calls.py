"""Calls of the system that fail: in the recovery after a kill, and for want of memory on the way of a commit.

Each case is the life of one partition (partition_life.py). It must stop with an error that has the system's
words in it, or go on; and then a life that nothing happens to must come to the same end. Fault table rows 6,
7, 8 and 27.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import random
import shutil
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

from faults.file_operations import Before, FileOperations, Operation, fail_at
from faults.kills import OPERATIONS, RECOVERY_OPERATIONS
from faults.ledger import Ledger, PromiseBrokenError
from faults.lives import Life, act_in_child, live_to_the_end, live_until_operation
from faults.partition_life import Say, asset, live

_NAMED = frozenset(
    {
        "CannotRestoreError",
        "DirectoryNotWritableError",
        "DiskFullError",
        "DurableWriteError",
        "FileDamagedError",
        "JournalStorageError",
        "OSError",
    }
)
_UNREAD = _NAMED | {"JournalLossError", "RecordDamagedError", "SegmentUnreadableError"}
_NO_MEMORY = _NAMED | {"MemoryError"}
CODES = (errno.EIO, errno.ENOSPC)

READS, ALL_READS, STAGED_READS = 40, 200, 20
"""A few more than a recovery opens, a whole life, and a life of what it has just written."""


def in_recovery(chance: random.Random, place: Path, number: int) -> Counter[str]:
    """A kill, and then EIO or ENOSPC at each operation of the recovery in turn."""
    home = place / f"in-recovery-{number}"
    ledger = Ledger(home, refused=_NAMED)
    ledger.hear(live_until_operation(home, chance.randint(1, OPERATIONS), torn=number % 2 == 1))
    code = CODES[number // RECOVERY_OPERATIONS % len(CODES)]
    return _met(ledger, fail_at(1 + number % RECOVERY_OPERATIONS, code), os.strerror(code))


def reading_in_recovery(chance: random.Random, place: Path, number: int) -> Counter[str]:
    """A kill, then once EIO or a wrong bit at an opening of a file to be read: it reads again afterwards.

    EIO goes through the openings of a recovery in turn; the wrong bit comes anywhere in the life.
    """
    home = place / f"reading-{number}"
    ledger = Ledger(home, refused=_UNREAD, unread=True)
    ledger.hear(live_until_operation(home, chance.randint(1, OPERATIONS), torn=number % 2 == 1))

    reads, wrong = number % 2 == 0, random.Random(chance.random())
    root, count = chance.choice(((home, ALL_READS), (asset(home).staging, STAGED_READS)))
    at = 1 + number // 2 % READS if reads else chance.randint(1, count)

    def act(say: Say) -> None:
        fail_to_read(home if reads else root, at, say, wrong=None if reads else wrong)
        live(home, say)

    life = act_in_child(home, act)
    for report in life.reports:
        report.pop("verified", None)  # What was read wrong does not verify; the next life verifies again.
    met = _met_already(ledger, life, "")
    # Most lives go on: another copy is read instead.
    return met | Counter({"failed calls": sum("unread" in report for report in life.reports)})


def out_of_memory(chance: random.Random, place: Path, number: int) -> Counter[str]:
    """No memory at each operation of a life in turn: for the program (MemoryError) or the system (ENOMEM)."""
    ledger = Ledger(place / f"out-of-memory-{number}", refused=_NO_MEMORY)
    at = 1 + number % OPERATIONS
    if number // OPERATIONS % 2 == 0:
        return _met(ledger, _no_memory_at(at), "")
    return _met(ledger, fail_at(at, errno.ENOMEM), os.strerror(errno.ENOMEM))


def _met(ledger: Ledger, before: Before, words: str) -> Counter[str]:
    """Have a life meet a failing call, then one that nothing happens to."""
    return _met_already(ledger, act_in_child(ledger.home, partial(live, ledger.home), before), words)


def _met_already(ledger: Ledger, life: Life, words: str) -> Counter[str]:
    if life.error is not None and words not in life.message:
        raise PromiseBrokenError(f"{words!r} came up as {life.error}: {life.message} (home: {ledger.home})")
    ledger.hear(life)
    ledger.refused = frozenset()
    ledger.close(live_to_the_end(ledger.home))
    shutil.rmtree(ledger.home)
    return Counter({"failed calls": int(life.error is not None), "cases": 1})


def _no_memory_at(at: int) -> Before:
    """Raise MemoryError in place of the ``at``-th operation. A close that fails has closed all the same."""

    def before(operation: Operation, operations: FileOperations) -> None:
        if operations.count == at:
            if operation.name == "close":
                operations.real["close"](operation.descriptor)
            raise MemoryError

    return before


def fail_to_read(root: Path, at: int, say: Say, *, wrong: random.Random | None = None) -> None:
    """Raise EIO in place of the ``at``-th opening of a file below ``root`` to be read, in this process.

    wrong: have it read with one wrong bit instead.
    """
    opened, real = 0, io.open

    def failing(file: Any, mode: str = "r", *rest: Any, **named: Any) -> Any:
        nonlocal opened
        if mode.startswith("r") and "+" not in mode and str(file).startswith(f"{root}{os.sep}"):
            opened += 1
            if opened == at:
                say(unread=str(file))
                if wrong is not None and (data := real(file, "rb").read()):
                    return _with_a_wrong_bit(data, wrong, mode)
                raise OSError(errno.EIO, os.strerror(errno.EIO), str(file))
        return real(file, mode, *rest, **named)

    io.open = builtins.open = failing


def _with_a_wrong_bit(data: bytes, chance: random.Random, mode: str) -> Any:
    changed = bytearray(data)
    changed[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    return io.BytesIO(changed) if "b" in mode else io.StringIO(changed.decode(errors="replace"))
