"""A home on a network file system serves one machine at a time."""

import socket

import pytest

from vlm_assets.webserver.server import prepare_home
from vlm_catalog.ingest import only_ingest
from vlm_durable.files import home_claim
from vlm_durable.files.file_systems import MountEntry
from vlm_durable.files.home_claim import claim_home
from vlm_durable.files.layout import Home, UnusableHomeError


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A home on NFS."""
    mount = MountEntry("server:/x", tmp_path, "nfs4", frozenset())
    monkeypatch.setattr(home_claim, "mount_of", lambda directory: mount)
    return Home(tmp_path / "home")


def test_a_second_machine_is_refused_and_changes_nothing(home, monkeypatch):
    """It is told what several machines need, and what to do where the first one was replaced."""
    with only_ingest(home.root, "a test"):
        pass
    claim_home(home)
    first, here = home.claim.read_bytes(), socket.gethostname()
    monkeypatch.setattr(socket, "gethostname", lambda: "the-other-one")
    for begin in (
        lambda: claim_home(home),
        lambda: only_ingest(home.root, "a test").__enter__(),
        lambda: prepare_home(home.root, home.root / "dagster", slots=1, console=None),
    ):
        with pytest.raises(UnusableHomeError, match=rf"belongs to {here}.* VLM_ASSETS_STORE .* remove "):
            begin()
    assert home.claim.read_bytes() == first
    home.claim.unlink()
    claim_home(home)


def test_a_machine_of_the_same_name_is_another_one(home, monkeypatch, tmp_path):
    """Clones of a machine have one name; a claim that cannot be read is nobody's to take."""
    claim_home(home)
    monkeypatch.setattr(home_claim, "_MACHINE_ID", tmp_path / "none")
    with pytest.raises(UnusableHomeError, match="machine id unknown"):
        claim_home(home)
    home.claim.write_bytes(b"rot")
    with pytest.raises(UnusableHomeError, match="cannot be read"):
        claim_home(home)


def test_a_home_on_a_local_disk_may_be_moved_as_it_is(tmp_path):
    """It is claimed by nobody: a copy of it works on another machine."""
    claim_home(Home(tmp_path))
    assert list(tmp_path.iterdir()) == []
