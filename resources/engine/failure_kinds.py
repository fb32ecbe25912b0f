"""Which kinds of failed rows another try may cure: the one place that says so.

What lives here: the kinds of ``images.py`` and of ``ladder.py`` by what can be done about them. What does
not: how often a row is tried (``vlm_assets/assets/generations.py``). An answer that the model gave after the
whole ladder (``truncated``, ``repetition``, ``invalid_json``, ``schema_mismatch``) comes out the same again:
seeds derive from the property and the attempt. Another prompt or limit may help: a person's choice.
"""

from __future__ import annotations

from typing import Final

from resources.images.images import TRANSIENT_KINDS as TRANSIENT_IMAGE_KINDS

TRANSIENT_KINDS: Final[frozenset[str]] = TRANSIENT_IMAGE_KINDS | {"engine_error", "out_of_memory"}
"""Of the moment, the device or the disk: worth another try by itself. All other kinds go to a person."""
