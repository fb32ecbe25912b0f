"""Prune and repair killed at their file operations: the last whole copy is there, and going on works."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pytest

from resources.journal.high_water_mark import read_mark
from resources.journal.journal import Journal
from resources.publishing.published import PublishedPartitions
from resources.storage.layout import Home, PartitionPaths
from vlm_assets.catalog.catalog import Catalog
from vlm_assets.catalog.ingest import ingest
from vlm_assets.config.settings import load_settings
from vlm_assets.operate.audit import audit
from vlm_assets.operate.prune import plan_prune, remove
from vlm_assets.operate.repair import plan_repairs, put_right

CHECKOUT = Path(__file__).parents[3]
SCRIPT = Path(__file__).with_name("killed_care.py")
KEY = "000000000-000000001"
IDS = ["a", "b"]
ASSET = "property_descriptions"
SCHEMA = pa.schema(
    [
        ("property_id", pa.string()),
        ("ordinal", pa.int64()),
        ("status", pa.string()),
        ("fingerprint", pa.string()),
    ]
)
LONG_AGO = time.time() - 86400


@pytest.fixture
def base(memory_path: Path) -> Path:
    """One partition, published three times."""
    listing = memory_path / "listing.jsonl"
    listing.write_text("".join(json.dumps({"property_id": i, "images": [f"{i}.jpg"]}) + "\n" for i in IDS))
    home = memory_path / "base"
    ingest(listing, home, range_size=2)
    published = PublishedPartitions(Home(home).asset(ASSET))
    for fingerprint in ("one", "two", "three"):
        rows = pa.table([IDS, [0, 1], ["ok", "ok"], [fingerprint] * 2], schema=SCHEMA)
        staged = published.stage(KEY, rows.to_batches(), SCHEMA, expected_ids=IDS, fingerprint=fingerprint)
        published.publish(staged)
    return home


def paths_of(home: Path) -> PartitionPaths:
    return Home(home).asset(ASSET).partition(KEY)


def mark_of(home: Path) -> Path:
    return paths_of(home).high_water_mark("old")


def open_journal(home: Path) -> Journal:
    return Journal.open(
        paths_of(home).journal("old"),
        key=KEY,
        generation="old",
        fingerprints={},
        schema=SCHEMA,
        expected_ids=IDS,
        high_water_mark=mark_of(home),
        quarantine=paths_of(home).quarantine,
    )


def run(action: str, homes: dict[int, Path]) -> list[str]:
    done = subprocess.run(
        [sys.executable, SCRIPT, action, *(str(one) for pair in homes.items() for one in pair)],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "PYTHONPATH": str(CHECKOUT)},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split("\n")[:-1]


def killed_at_each(action: str, base: Path, stride: int) -> list[Path]:
    """Copies of the base, killed at file operations that the action makes; the last one is finished."""
    shutil.copytree(base, counted := base.parent / "counted")
    count = int(run(action, {0: counted})[0])
    assert count >= 10, "fewer file operations than the action has: nearly nothing would be killed"
    homes = {at: base.parent / f"at{at}" for at in (*range(1, count + 1, stride), count + 1)}
    for home in homes.values():
        shutil.copytree(base, home)
    assert run(action, homes) == ["killed"] * (len(homes) - 1) + ["finished"]
    return list(homes.values())


def test_prune_killed_at_every_operation(base: Path, stride: int) -> None:
    """Published file and second copy stay whole, no journal is half believed, and going on ends it."""
    with open_journal(base) as journal:
        journal.submit(pa.table([["a"], [0], ["ok"], ["zero"]], schema=SCHEMA))
    for path in paths_of(base).journals.rglob("*"):
        os.utime(path, (LONG_AGO, LONG_AGO))
    aside = paths_of(base).quarantine / f"{KEY}.parquet.abc"
    aside.parent.mkdir(parents=True)
    aside.write_bytes(b"damaged")
    retired = []
    for home in killed_at_each("prune", base, stride):
        settings, catalog = load_settings(home=home), Catalog.open(home)
        found = audit(settings, catalog, deep=True)
        assert found.ok, (home, found.wrong)
        mark = read_mark(mark_of(home), key=KEY, generation="old").mark
        assert mark is not None and mark.rows == 1
        retired.append(mark.retired)
        if not mark.retired:
            shutil.copytree(home, again := home.with_name(f"{home.name}-resumed"))
            with open_journal(again) as journal:
                assert journal.done_ids == {"a"}
        for _ in range(2):
            # Settling an interrupted change of the record keeps its older copy aside, which goes next.
            list(remove(settings, plan_prune(settings, catalog).removals))
        assert plan_prune(settings, catalog).removals == []
        assert not paths_of(home).journal("old").exists()
        assert not list(paths_of(home).quarantine.iterdir())
        assert read_mark(mark_of(home), key=KEY, generation="old").mark.retired
        found = audit(settings, catalog, deep=True)
        assert found.ok and not found.warnings, found.problems
    assert set(retired) == {False, True}, "kills came before and after the journal was given up"


def test_repair_killed_at_every_operation(base: Path, stride: int) -> None:
    """Damaged bytes and foreign files are kept aside, never lost, and a second repair ends it."""
    published = base / ASSET / f"{KEY}.parquet"
    sound = published.read_bytes()
    published.write_bytes(sound[:-30])
    (base / ASSET / "mine.parquet").write_bytes(b"mine")
    met = set()
    for home in killed_at_each("repair", base, stride):
        settings, catalog = load_settings(home=home), Catalog.open(home)
        seen = (home / ASSET / f"{KEY}.parquet").read_bytes()
        assert seen in (sound, sound[:-30])
        met.add(seen)
        for repair in plan_repairs(settings, audit(settings, catalog, deep=True)):
            put_right(settings, repair)
        assert (home / ASSET / f"{KEY}.parquet").read_bytes() == sound
        aside = Home(home).asset(ASSET).quarantine.rglob("*")
        kept = {path.read_bytes() for path in aside if path.is_file()}
        assert kept == {sound[:-30], b"mine"}
        assert audit(settings, catalog, deep=True).ok
    assert met == {sound, sound[:-30]}, "kills came before and after the file was put right"
