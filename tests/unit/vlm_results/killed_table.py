"""Brings a table up to date once, and kills itself before one file operation; run by fork_server.py."""

from __future__ import annotations

from pathlib import Path

from faults.file_operations import FileOperations, strike_at
from vlm_assets.config.settings import load_settings
from vlm_catalog.catalog import Catalog
from vlm_results.described_table import TablePlace, bring_up_to_date


def work(order: dict, report) -> None:
    """Bring the table of the order's home up to date."""
    settings = load_settings(model="example", embedding_model="example", home=Path(order["home"]))
    FileOperations(settings.described_table, strike_at(order["at"], torn=True)).install()
    bring_up_to_date(settings, Catalog.open(settings.home), TablePlace.from_settings(settings))
