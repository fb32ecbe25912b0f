"""Listings of properties whose images do not exist."""

import json
from pathlib import Path


def list_properties(folder: Path, count: int, name: str = "listing.jsonl") -> Path:
    """Write a listing of ``count`` properties of two images that do not exist."""
    folder.mkdir(exist_ok=True)
    source = folder / name
    lines = [{"property_id": f"id {i}", "images": [f"{i}a.jpg", f"{i}b.jpg"]} for i in range(count)]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return source
