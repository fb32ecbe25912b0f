"""A measurement of a model, as `vlm-assets measure` keeps it."""

from vlm_assets.services.measurement import Measurement
from vlm_assets.services.small_runs import MeasuredRun

MEASURED = Measurement(
    name="m",
    at=0.0,
    model="example",
    engine="transformers",
    device="GPU-1 (a card)",
    max_pixels=1,
    batch_size=32,
    batch_images=256,
    load_seconds=5.0,
    cpu_seconds=3.0,
    batches=((10, 100, 14.0), (10, 100, 10.0), (10, 100, 10.0), (10, 100, 10.0)),
    row_bytes=1000.0,
    commit_seconds=0.02,
    start_seconds=4.0,
    run=MeasuredRun(
        properties=20,
        images=200.0,
        devices=1,
        seconds=32.0,
        alone_seconds=32.0,
        between_seconds=1.5,
    ),
)
"""0.1 s an image; a run takes 12 s beside its images."""
