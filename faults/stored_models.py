"""A trained model and its checkpoints in a real S3 store, by two machines over one store.

A training is three checkpoints, whose bytes follow from version and step; the model is its version's text.
A machine does what a start does: take over the model or the newest checkpoint, go on, publish, push. It is
killed, lost with its disk, or overtaken; an object is damaged or removed. Fault table rows 22 and 23.
"""

from __future__ import annotations

import hashlib
import random
import shutil
from collections import Counter
from functools import partial
from pathlib import Path

from faults.file_operations import strike_at
from faults.ledger import PromiseBrokenError
from faults.lives import Life, StoppedLife, act_in_child, stop_here
from faults.partition_life import Say
from faults.s3_server import BUCKET, S3Server
from faults.stored import over_store
from vlm_durable.files.files import make_directory, sha256_of, write_new
from vlm_durable.files.layout import Home
from vlm_durable.mirror.bucket import S3Folder
from vlm_training import training_store
from vlm_training.checkpoints import Checkpoints, step_in
from vlm_training.published_model import ASSET, PublishedModel
from vlm_training.training_store import StoredCheckpoints, StoredModel

_STEPS, _VERSIONS = 3, 2
_REQUESTS, _OPERATIONS = 45, 110
_RECORD = f".versions/{ASSET}/tiny.json"


def struck(chance: random.Random, server: S3Server, number: int) -> Counter[str]:
    """A first version is in the store; the second one is struck; both machines end with the second."""
    place = server.folder.parent / f"models-{number}"
    store = S3Folder.parse(f"s3://{BUCKET}/{place.name}")
    # The newest step that is in the store, and whether the newest version is.
    copied, strikes = 0, 0

    def act(machine: str, version: int = _VERSIONS, at: int = 0, **how: object) -> Life:
        work = partial(live, place / machine, store, version)
        before = how.pop("before", None)
        return act_in_child(place / machine, over_store(server, work, at, **how), before)  # type: ignore[arg-type]

    def hear(life: Life, *refused: str) -> Life:
        nonlocal copied
        if life.error is not None and life.error not in refused:
            raise PromiseBrokenError(f"{life.error}: {life.message} (home: {place})")
        for report in life.reports:
            if report.get("begins", copied) < copied:
                raise PromiseBrokenError(f"step {copied} was copied, and {report} (home: {place})")
            copied = max(copied, report.get("copied", 0))
        return life

    first = act(chance.choice("ab"), 1)
    if not first.finished:
        raise PromiseBrokenError(f"{first.error}: {first.message} (home: {place})")
    machine = chance.choice("ab")
    kind = number % 4
    if kind == 0:
        for _ in range(2):
            machine = chance.choice("ab")
            at, arrives = chance.randint(1, _REQUESTS), chance.random() < 0.5
            strikes += hear(act(machine, at=at, arrives=arrives)).killed
    elif kind == 1:
        before = strike_at(chance.randint(1, _OPERATIONS), torn=chance.random() < 0.5)
        strikes += hear(act(machine, before=before)).killed
        shutil.rmtree(place / machine)
    elif kind == 2:
        work = partial(live, place / "a", store, _VERSIONS)
        late = over_store(server, work, chance.randint(1, _REQUESTS), stop_here)
        with StoppedLife(place / "a", 0, late) as writer:
            strikes += writer.is_stopped
            if writer.is_stopped:
                hear(act("b"))
            writer.wake()  # Overtaken or not, what stands afterwards is compared below.
    else:
        hear(act(machine, at=chance.choice((0, chance.randint(1, _REQUESTS)))))
        copied = (
            0  # What is damaged or gone in the store comes from the machine that has it, or is made again.
        )
        strikes += _strike_object(chance, server, store)
        for worker in (chance.choice("ab"), machine):
            life = hear(act(worker), "TrainingError")
            if life.error is not None:
                # What the sentence says: remove the damaged record.
                server.client().delete_object(Bucket=BUCKET, Key=store.prefix + _RECORD)
    for worker in "ab":
        hear(act(worker))
        report = act_in_child(place / worker, over_store(server, partial(_compare, place / worker, store)))
        if report.error is not None or any("problem" in said for said in report.reports):
            raise PromiseBrokenError(f"{report.error} {report.message} {report.reports} (home: {place})")
    shutil.rmtree(place)
    return Counter(strikes=strikes, cases=1)


def live(home: Path, store: S3Folder, version: int, say: Say) -> None:
    """What a start does (``description_model.py``), for the training of one version."""
    training_store.PART_BYTES = 300  # type: ignore[misc]
    model, fingerprint = _model(home), str(version)
    in_store = StoredModel(store, model)
    copies = StoredCheckpoints(store.below(f".journal/{ASSET}/tiny/{fingerprint}/checkpoints"))
    checkpoints = Checkpoints(model.paths.journals / fingerprint / "checkpoints", model.quarantine)
    checkpoints.sweep()
    make_directory(model.folder)
    stored, _ = in_store.record()
    local = model.record
    sequence = 1 + max(record["sequence"] if record else 0 for record in (local, stored))
    is_there = stored is not None and stored["fingerprint"] == fingerprint and not stored.get("pending")
    is_here = is_there and local is not None and stored is not None and local["files"] == stored["files"]
    if is_there and stored is not None and not (is_here and _is_complete(model, fingerprint)):
        model.empty_export()
        if in_store.pull(stored):
            model.publish(stored)
    if not _is_complete(model, fingerprint):
        newest = checkpoints.newest(damaged=None)
        copies.pull(checkpoints, after=-1 if newest is None else step_in(newest.name))
        newest = checkpoints.newest(damaged=None)
        begins = 0 if newest is None else step_in(newest.name)
        if version == _VERSIONS:
            say(begins=begins)
        for step in range(max(begins, 1), _STEPS + 1):
            path = _write(checkpoints, version, step)
            copies.put(path)
            if version == _VERSIONS:
                say(copied=step)
        model.empty_export()
        make_directory(model.export / "more")
        for name in ("model", "more/tokens"):
            (model.export / name).write_text(fingerprint)
        files = {name: sha256_of(model.export / name) for name in ("model", "more/tokens")}
        model.publish({"sequence": sequence, "fingerprint": fingerprint, "step": _STEPS, "files": files})
    in_store.push()
    say(finished=True)


def _is_complete(model: PublishedModel, fingerprint: str) -> bool:
    record = model.record
    return record is not None and record["fingerprint"] == fingerprint and model.settle(record)


def _write(checkpoints: Checkpoints, version: int, step: int) -> Path:
    content = f"version {version} step {step} ".encode() * 40
    path = checkpoints.folder / f"checkpoint-{step:09d}-{hashlib.sha256(content).hexdigest()}.safetensors"
    if not path.exists():
        write_new(path, content)
    return path


def _strike_object(chance: random.Random, server: S3Server, store: S3Folder) -> int:
    objects = server.client()
    listed = objects.list_objects_v2(Bucket=BUCKET, Prefix=store.prefix).get("Contents", ())
    keys = [entry["Key"] for entry in listed if "probe" not in entry["Key"]]
    key = chance.choice([*keys, store.prefix + _RECORD])
    if chance.random() < 0.5:
        objects.delete_object(Bucket=BUCKET, Key=key)
    else:
        objects.put_object(Bucket=BUCKET, Key=key, Body=chance.choice((b"", b"damage")))
    return 1


def _compare(home: Path, store: S3Folder, say: Say) -> None:
    """Say where a home or the store has another model than the newest, or more or less than its files."""
    model = _model(home)
    stored, _ = StoredModel(store, model).record()
    if model.trouble() is not None or (record := model.record) is None:
        say(problem=f"{model.trouble()}")
        return
    texts = [(model.folder / name).read_text() for name in record["files"]]
    texts += [store.get(f"{ASSET}/tiny/{name}", most=99).decode() for name in record["files"]]
    if {*texts} != {str(_VERSIONS)}:
        say(problem=f"the files are those of {texts}")
    if stored is None or stored.get("pending") or stored["files"] != record["files"]:
        say(problem=f"the store has {stored}, and this machine {record}")
    if len(names := list(store.names(f"{ASSET}/tiny/"))) != len(texts) // 2:
        say(problem=f"left over: {names}")


def _model(home: Path) -> PublishedModel:
    return PublishedModel(Home(home).asset(ASSET), "tiny")
