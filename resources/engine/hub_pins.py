"""Which commit a hub's branch stood for when a home first used it: a push there changes no run of weeks.

What lives here: writing that down once, and reading it. What does not: asking the hub (``model_loading.py``).
Without it, somebody's commit to ``main`` would be another fingerprint: finished partitions stale, interrupted
ones begun anew.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path

from resources.engine.protocol import ModelLoadError
from resources.storage.files import make_directory, write_new
from resources.storage.sealed_json import BrokenSealError, read_sealed, seal

_COMMIT = re.compile(r"[0-9a-f]{40}")
_ABOUT = "Truth: the commit that this home's work was done with. Remove it to ask the hub again."


def pinned_commit(
    name: str, revision: str | None, records: Path, ask: Callable[[str, str | None], str]
) -> str:
    """The commit of a hub's branch or tag, as of its first use here; a commit is itself.

    records: the home's folder of such notes. ask: the hub. Raises ModelLoadError, OSError.
    """
    if revision is not None and _COMMIT.fullmatch(revision):
        return revision
    branch = revision or "main"
    note = records / f"pin-{hashlib.sha256(f'{name}@{branch}'.encode()).hexdigest()[:32]}.json"
    if not note.exists():
        content = {"about": _ABOUT, "model": name, "revision": branch, "commit": ask(name, revision)}
        make_directory(records)
        # Where another run was first, what that one noted counts for all.
        with contextlib.suppress(FileExistsError):
            write_new(note, seal(json.dumps(content, indent=2).encode()))
    try:
        return str(read_sealed(note)["commit"])
    except (BrokenSealError, KeyError) as error:
        raise ModelLoadError(
            f"model {name}: {note}, which says which commit of {branch} this home works with, cannot be read"
            f" ({error}). Any row of a published partition names it as model_revision: set"
            " VLM_ASSETS_MODEL_REVISION to that commit; or remove the file to take what the hub has now."
        ) from error
