"""Exports once, and kills itself before one file operation; run by fork_server.py."""

from __future__ import annotations

from pathlib import Path

from faults.file_operations import FileOperations, strike_at
from vlm_assets.catalog.catalog import Catalog
from vlm_assets.config.settings import load_settings
from vlm_results.export import Format, export
from vlm_results.exported_images import Images


def work(order: dict, report) -> None:
    """Export the order's home into its folder."""
    settings, folder = load_settings(model="example", home=Path(order["home"])), Path(order["folder"])
    FileOperations(folder.parent, strike_at(order["at"], torn=True)).install()
    export(settings, Catalog.open(settings.home), folder, Format.jsonl, images=Images(order["images"]))
