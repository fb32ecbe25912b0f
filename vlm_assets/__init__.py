"""Descriptions and embeddings of properties, as partitioned Dagster assets."""

import os

# pyarrow reads it when it is first imported. Its own choice, mimalloc, keeps what it freed: 50 MiB of a
# run's memory for 6 MiB of rows, and the more of them the longer the run.
os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")
