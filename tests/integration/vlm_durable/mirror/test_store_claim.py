"""A store that is worked over without Postgres serves one machine at a time."""

import socket

import pytest

from vlm_durable.files import home_claim
from vlm_durable.files.home_claim import this_machine
from vlm_durable.files.sealed_json import unseal
from vlm_durable.mirror.bucket import S3Folder
from vlm_durable.mirror.store_claim import NAME, OtherMachineError, claim_store, forget_machine


@pytest.fixture
def be(monkeypatch):
    """Has this machine be another one."""
    return lambda name: monkeypatch.setattr(socket, "gethostname", lambda: name)


def held(bucket) -> str:
    return unseal(bucket.get(NAME, most=1 << 20))["host"]


def test_a_second_machine_is_refused_until_the_first_is_gone_for_good(bucket, be, tmp_path):
    """It is told who has the store and since when, what several machines need, and the one command."""
    be("first")
    claim_store(bucket, tmp_path)
    at = bucket.head(NAME)
    claim_store(bucket, tmp_path / "moved")
    assert bucket.head(NAME) == at, "the same machine needs no claim anew"
    be("second")
    said = r"by first .* since 20\d\d.*VLM_ASSETS_STATE_URL \(Postgres\).*devices --forget-node first`"
    with pytest.raises(OtherMachineError, match=said):
        claim_store(bucket, tmp_path)
    assert bucket.head(NAME) == at
    assert not forget_machine(bucket, "another", tmp_path)
    assert forget_machine(bucket, "first", tmp_path)
    claim_store(bucket, tmp_path)
    be("first")
    with pytest.raises(OtherMachineError, match="by second "):
        claim_store(bucket, tmp_path)


def test_a_machine_installed_anew_under_its_name_is_told_the_command(bucket, tmp_path, monkeypatch):
    """Clones have one name too: the machine id tells them apart, and a person says which it is."""
    claim_store(bucket, tmp_path)
    monkeypatch.setattr(home_claim, "_MACHINE_ID", tmp_path / "none")
    name = this_machine()["host"]
    with pytest.raises(OtherMachineError, match=f"installed anew.*--forget-node {name}`"):
        claim_store(bucket, tmp_path)
    assert forget_machine(bucket, name, tmp_path)
    claim_store(bucket, tmp_path)


def test_a_claim_that_cannot_be_read_is_nobodys_to_take_but_a_persons(bucket, tmp_path):
    """Unreadable never counts as free; the sentence still names a command that works."""
    bucket.put(NAME, b"rot", over=None)
    with pytest.raises(OtherMachineError, match="--forget-node unknown`"):
        claim_store(bucket, tmp_path)
    assert forget_machine(bucket, "unknown", tmp_path)
    claim_store(bucket, tmp_path)


def test_of_two_machines_that_start_at_once_one_has_the_store(bucket, be, tmp_path, monkeypatch):
    """The name must be free when the claim arrives, not only when it was looked for."""
    whole = S3Folder.put
    others = ["second"]

    def put(folder, name, content, *, over):
        if name == NAME and others:
            be(others.pop())
            claim_store(folder, tmp_path)
            be("first")
        return whole(folder, name, content, over=over)

    monkeypatch.setattr(S3Folder, "put", put)
    be("first")
    with pytest.raises(OtherMachineError, match="by second "):
        claim_store(bucket, tmp_path)
    assert held(bucket) == "second"
