"""The triage after a reboot: what is on disk says where each partition stands."""

import pytest

from vlm_assets.assets.partition_state import State
from vlm_assets.services.status import read_status
from vlm_catalog.catalog import Catalog

KEY = "000000000-000000007"
OTHER = "000000008-000000015"


def states(desk):
    status = read_status(desk.settings, Catalog.open(desk.settings.home))
    return {(one.asset, one.key): one.state for one in status.partitions}, status


@pytest.mark.usefixtures("scripted_engine")
@pytest.mark.published("property_descriptions")
def test_status_tells_done_from_damaged_and_not_started(desk):
    """A published partition is done, a cut one damaged, and a damaged file never breaks the triage."""
    found, status = states(desk)
    assert found[("property_descriptions", KEY)] is State.DONE
    assert found[("property_descriptions", OTHER)] is State.NOT_STARTED
    assert found[("property_embeddings", KEY)] is State.NOT_STARTED
    assert status.ok + sum(status.failed_by_kind.values()) == 8
    sound = desk.file.read_bytes()
    desk.file.write_bytes(b"x" * len(sound))
    assert states(desk)[0][("property_descriptions", KEY)] is State.DAMAGED  # Though its size fits.
    desk.file.write_bytes(sound[:100])
    found, status = states(desk)
    assert found[("property_descriptions", KEY)] is State.DAMAGED
    assert status.ok == 0
