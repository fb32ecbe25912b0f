"""What this extension hands over to the core: the command of a node."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from vlm_assets.config.extensions import Extension


class ClusterExtension(Extension):
    """Several machines, by Ray."""

    package = "vlm_cluster"
    commands: ClassVar[Mapping[str, tuple[str, str]]] = {
        "node": (
            "vlm_cluster.node",
            "Be a node of a cluster: Ray's part here, and this machine's heartbeat.",
        ),
    }
