"""A machine that must not work with the others is no node of their cluster."""

from __future__ import annotations

import pytest

from vlm_assets.assets.fingerprint import description_parts
from vlm_assets.assets.stored_settings import MachineDiffersError, refuse_other_settings
from vlm_assets.config.resource_settings import build_vision_language_model
from vlm_catalog.stored_catalog import pull_catalog
from vlm_cluster import node
from vlm_durable.mirror import bucket as bucket_module
from vlm_durable.mirror.bucket import UnfitStoreError, client

pytestmark = pytest.mark.usefixtures("scripted_engine")


def test_a_machine_with_other_settings_is_no_node(machines, bucket, monkeypatch):
    """The sentence names what differs, before Ray is started."""
    first, second = machines
    pull_catalog(first.settings.home, bucket)
    parts = description_parts(first.settings, build_vision_language_model(first.settings))
    refuse_other_settings(bucket, "property_descriptions", parts, first.settings.home)
    other = second.changed(prompt="Describe it briefly.")
    monkeypatch.setattr(node, "chosen_settings", lambda home: other.settings)
    with pytest.raises(MachineDiffersError, match="in prompt"):
        node.node_command("127.0.0.1", head=True)


def test_a_store_that_does_not_honour_conditions_has_no_nodes(machines, bucket, monkeypatch):
    """No machine starts work over it."""
    first, _ = machines
    pull_catalog(first.settings.home, bucket)
    monkeypatch.setattr(bucket_module, "_PROVED", set())

    def drop(request, **_):
        del request.headers["If-None-Match"]

    client().meta.events.register("before-sign.s3.PutObject", drop)
    monkeypatch.setattr(node, "chosen_settings", lambda home: first.settings)
    with pytest.raises(UnfitStoreError, match="name must be free"):
        node.node_command("127.0.0.1", head=True)
