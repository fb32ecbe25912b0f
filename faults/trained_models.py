"""A trained model, killed while it is published, or with older, damaged and missing files put in its place.

Its folder is small and its training is the text of its version: publishing it again stands for the last
checkpoint, which makes the same bytes. The newest model must count, a sentence must name an older one that
stands there, and the next start must end as if nothing had happened. Fault table rows 24 and 28.
"""

from __future__ import annotations

import random
import shutil
from collections import Counter
from functools import partial
from pathlib import Path

from faults.file_operations import strike_at
from faults.ledger import PromiseBrokenError
from faults.lives import act_in_child
from faults.partition_life import Say
from vlm_durable.files.files import make_directory, sha256_of
from vlm_durable.files.layout import Home
from vlm_training.published_model import ASSET, PublishedModel

_VERSIONS = 3
_OPERATIONS = 60
"""A few more than a publication takes."""
_WITNESSES = ("record", "record copy", "mark", "mark copy")
_FATES = ("left", "left", "gone", "damaged", "older")


def struck(chance: random.Random, place: Path, number: int) -> Counter[str]:
    """Kill the publication of the newest version, or strike its files; then start again."""
    home = place / f"model-{number}"
    for version in range(1, _VERSIONS):
        _publish(home, version)
        shutil.copytree(home, place / f"model-{number}-{version}")
    if number % 3 == 0:
        at = chance.randint(1, _OPERATIONS)
        before = strike_at(at, torn=chance.random() < 0.5)
        life = act_in_child(home, partial(_publish_in_child, home), before)
        description, is_struck = f"killed before operation {at}", life.killed
        if life.error is not None:
            raise PromiseBrokenError(f"{description}: {life.error} {life.message}")
        _check_readers(home, description, newest=False)
        _publish(home, _VERSIONS)
    else:
        _publish(home, _VERSIONS)
        description = _strike(chance, home, place / f"model-{number}-{chance.randint(1, _VERSIONS - 1)}")
        is_struck = True
        _check_readers(home, description, newest=True)
        _start(home)
    model = _model(home)
    record = model.record
    numbers = [copy.record and copy.record["sequence"] for copy in model.copies()]
    marked = model.mark.read().mark
    numbers += [marked and marked.sequence, record and record["sequence"]]
    ends = (_text(model.folder), _text(model.kept), numbers, model.trouble())
    if ends != (str(_VERSIONS), str(_VERSIONS - 1), [_VERSIONS] * 4, None):
        raise PromiseBrokenError(f"{description}; started again, it ended as {ends} (home: {home})")
    _publish(home, _VERSIONS + 1)
    if (after := _model(home).record) is None or after["sequence"] != _VERSIONS + 1:
        raise PromiseBrokenError(f"{description}; the next version got the number of {after} (home: {home})")
    for folder in place.glob(f"model-{number}*"):
        shutil.rmtree(folder)
    return Counter(strikes=int(is_struck), cases=1)


def _strike(chance: random.Random, home: Path, older: Path) -> str:
    """Give each file a fate. One record or mark of the newest version is left: else nobody could know."""
    places = dict(zip(_WITNESSES, (*_model(home).record_paths, *_model(home).mark.copies), strict=True))
    fates = {name: chance.choice(_FATES) for name in (*_WITNESSES, "folder")}
    fates[chance.choice(_WITNESSES)] = "left"
    for name, path in places.items():
        if fates[name] == "older":
            shutil.copyfile(older / path.relative_to(home), path)
        elif fates[name] == "damaged":
            data = bytearray(path.read_bytes())
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
            path.write_bytes(data)
        elif fates[name] == "gone":
            path.unlink()
    folder = _model(home).folder
    if fates["folder"] == "damaged":
        (folder / "model").write_text("?")
    elif fates["folder"] != "left":
        shutil.rmtree(folder)
        if fates["folder"] == "older":
            shutil.copytree(older / folder.relative_to(home), folder)
    return ", ".join(f"{name} {fate}" for name, fate in fates.items() if fate != "left") + f" ({older.name})"


def _check_readers(home: Path, description: str, *, newest: bool) -> None:
    """Raise PromiseBrokenError where a reader would take half a model, or unwarned an older one, for true."""
    model = _model(home)
    if newest and _text(model.folder) != str(_VERSIONS) and model.trouble() is None:
        raise PromiseBrokenError(f"{description}: another model than the newest describes (home: {home})")
    if not newest and _text(model.folder) not in (str(_VERSIONS - 1), str(_VERSIONS)):
        raise PromiseBrokenError(f"{description}: readers see neither model (home: {home})")


def _start(home: Path) -> None:
    """What a start does: leave a complete model alone, or make it again from its last checkpoint."""
    model = _model(home)
    record = model.record
    if record is None or record["fingerprint"] != str(_VERSIONS) or not model.settle(record):
        _publish(home, _VERSIONS)


def _publish_in_child(home: Path, say: Say) -> None:
    _publish(home, _VERSIONS)
    say(finished=True)


def _publish(home: Path, version: int) -> None:
    model = _model(home)
    make_directory(model.folder)
    model.empty_export()
    make_directory(model.export / "more")
    for name in ("model", "more/tokens"):
        (model.export / name).write_text(str(version))
    files = {name: sha256_of(model.export / name) for name in ("model", "more/tokens")}
    model.publish({"sequence": 1, "fingerprint": str(version), "step": version, "files": files})


def _text(folder: Path) -> str | None:
    """The version of a folder; None where it is none, or not whole."""
    texts = {path.read_text() for path in folder.rglob("*") if path.is_file()}
    return texts.pop() if len(texts) == 1 and len(list(folder.rglob("*"))) == 3 else None


def _model(home: Path) -> PublishedModel:
    return PublishedModel(Home(home).asset(ASSET), "tiny")
