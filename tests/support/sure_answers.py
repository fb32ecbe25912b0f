"""A dataset of made rows with confidences, of which some answers are wrong: four ranges, no model."""

import json
import os
import shutil
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pyarrow as pa
from pydantic import BaseModel

from tests.support.homes import DESCRIPTIONS, Dataset, publish
from tests.support.listings import write_listing
from vlm_assets.config.settings import load_settings
from vlm_catalog.ingest import ingest


class House(BaseModel):
    """The schema of these answers."""

    floors: int
    has_pool: bool


SURE = DESCRIPTIONS.append(
    pa.field("confidence", pa.struct([(name, pa.float32()) for name in ("floors", "has_pool")]))
)


@dataclass
class SureDataset(Dataset):
    """Each property has two floors and no pool. A wrong answer says three, or that there is a pool."""

    def answer(self, key, *, model="s", shift=1.0, moved=0.0, without_confidence=False, seed=1, revision=""):
        """Publish answers of a range. shift: the larger, the surer. Each is right as often as it is sure.

        moved: the same answers with a confidence that is less by so much. revision: the model's exact one.
        """
        rows = self.rows(key)
        chance = np.random.default_rng([seed, rows[0]["ordinal"]])
        sure = chance.beta(8 * shift, 0.5, (len(rows), 2)).astype(np.float32)
        right = chance.random(sure.shape) < sure
        sure = np.maximum(sure - np.float32(moved), 0.0)
        rows = [
            {
                **row,
                "status": "ok",
                "description": {"floors": 3 - int(is_right[0]), "has_pool": not is_right[1]},
                "inputs_digest": f"in-{model}",
                "model": f"model-{model}",
                "fingerprint": f"fp-{model}",
                "images_seen": 2,
                "confidence": None
                if without_confidence
                else dict(zip(("floors", "has_pool"), confidences.tolist(), strict=True)),
            }
            for row, confidences, is_right in zip(rows, sure, right, strict=True)
        ]
        parts = {"catalogue_slice": key, "maker": model} | ({"model": revision} if revision else {})
        schema = DESCRIPTIONS if without_confidence else SURE
        return publish(self.descriptions, key, rows, schema, f"fp-{model}", parts, texts="t")

    def write_truth(self, path, ids, **columns):
        """A truth file of these properties."""
        lines = [{"property_id": name, "floors": 2, "has_pool": False, **columns} for name in ids]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return path


@cache
def _made() -> TemporaryDirectory:
    """The home that each of these data sets is a copy of, until this process ends."""
    made = TemporaryDirectory(dir=os.environ.get("PYTEST_DEBUG_TEMPROOT"))
    folder = Path(made.name)
    listing = write_listing(folder / "listing.jsonl", {f"p{n}": [f"{n}.jpg"] for n in range(2000)})
    ingest(listing, folder / "home", range_size=500)
    dataset = SureDataset(load_settings(model="example", home=folder / "home"))
    for key in dataset.keys:
        dataset.answer(key)
    return made


def sure_dataset(folder: Path, **settings) -> SureDataset:
    """Four ranges of 500 properties, published. settings: more of them."""
    home = shutil.copytree(Path(_made().name) / "home", folder / "home")
    schema = "tests.support.sure_answers:House"
    return SureDataset(load_settings(model="example", home=home, description_schema=schema, **settings))
