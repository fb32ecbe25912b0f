"""Dagster's state: seeded, bound to one catalogue, run by one Dagster at a time."""

from pathlib import Path

import dagster as dg
import pytest
import yaml

from vlm_assets.operate.dagster_server.home import (
    AlreadyRunningError,
    OtherCatalogError,
    UnusablePathError,
    claim_for_catalog,
    note_address,
    only_dagster,
    prepare_dagster_home,
    running_address,
)


def test_prepared_home_has_settings_and_the_pool_limit(tmp_path: Path) -> None:
    """The limit of the pool stands before the first launch; telemetry and the first-visit dialog are off."""
    home = tmp_path / "dagster"
    prepare_dagster_home(home, catalog_id="one", slots=3)
    settings = yaml.safe_load((home / "dagster.yaml").read_text())
    assert settings["telemetry"] == {"enabled": False}
    assert settings["nux"] == {"enabled": False}
    with dg.DagsterInstance.from_config(str(home)) as instance:
        assert instance.event_log_storage.get_concurrency_info("gpu").slot_count == 3
        assert instance.run_monitoring_enabled
        assert not instance.telemetry_enabled


def test_settings_that_a_person_changed_stay(tmp_path: Path) -> None:
    """A second start seeds nothing over what is there."""
    prepare_dagster_home(tmp_path, catalog_id="one", slots=1)
    with (tmp_path / "dagster.yaml").open("a") as settings:
        settings.write("# mine\n")
    prepare_dagster_home(tmp_path, catalog_id="one", slots=1)
    assert "# mine" in (tmp_path / "dagster.yaml").read_text()


def test_another_catalogue_is_refused(tmp_path: Path) -> None:
    """Green partitions of one catalogue are never shown for another; the message names both."""
    claim_for_catalog(tmp_path, "one")
    claim_for_catalog(tmp_path, "one")
    with pytest.raises(OtherCatalogError, match=r"one.*two"):
        claim_for_catalog(tmp_path, "two")


def test_second_dagster_is_refused_by_address(tmp_path: Path) -> None:
    """Two daemons on one state would launch runs twice; the second is told where the first is."""
    with only_dagster(tmp_path, wait_seconds=0.0) as lock:
        note_address(lock, "http://127.0.0.1:3000")
        assert running_address(tmp_path) == "http://127.0.0.1:3000"
        with (
            pytest.raises(AlreadyRunningError, match=r"http://127\.0\.0\.1:3000"),
            only_dagster(tmp_path, wait_seconds=60.0),
        ):
            pass
    assert running_address(tmp_path) is None
    with only_dagster(tmp_path, wait_seconds=0.0):
        pass


def test_a_home_that_was_seeded_from_an_earlier_template_gets_the_present_one(tmp_path: Path) -> None:
    """What nobody changed follows the project: the queue of an older home runs heaviest first too."""
    earlier = Path(__file__).with_name("dagster_home_earlier.yaml")
    (tmp_path / "dagster.yaml").write_bytes(earlier.read_bytes())
    prepare_dagster_home(tmp_path, catalog_id="one", slots=1)
    settings = yaml.safe_load((tmp_path / "dagster.yaml").read_text())
    assert settings["run_coordinator"]["class"] == "HeaviestFirstRunCoordinator"


@pytest.mark.parametrize("name", ["a?b", "50%20off"])
def test_a_path_that_sqlite_would_read_otherwise_is_refused(name: str, tmp_path: Path) -> None:
    """Two homes whose paths differ after a '?' would share one history: nothing is written."""
    with pytest.raises(UnusablePathError, match="moved as it is"):
        prepare_dagster_home(tmp_path / name / "dagster", catalog_id="one", slots=1)
    assert not list(tmp_path.iterdir())
    with pytest.raises(UnusablePathError):
        claim_for_catalog(tmp_path / name, "one")
