"""Publishes once, or verifies, and kills itself at one file operation; run by fork_server.py.

Half of a write's bytes reach the file before.
"""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa

from faults.file_operations import FileOperations, strike_at
from vlm_durable.files.layout import Home
from vlm_durable.versions.published import PublishedPartitions

SCHEMA = pa.schema([("property_id", pa.string()), ("text", pa.string())])


def work(order: dict, report) -> None:
    """Publish the order's text; without one, verify, and die while that recovers."""
    folder, key, text = Path(order["folder"]), order["key"], order["text"]
    FileOperations(folder, strike_at(order["at"], torn=True)).install()
    partitions = PublishedPartitions(Home(folder).asset("a"))
    if text is None:
        partitions.verify(key)
        return
    batch = pa.record_batch([["x", "y"], [text, text]], schema=SCHEMA)
    staged = partitions.stage(key, [batch], SCHEMA, expected_ids=["x", "y"], fingerprint=text)
    partitions.publish(staged)
