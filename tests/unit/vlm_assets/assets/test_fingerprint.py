"""The fingerprint says whether two results mean the same."""

from vlm_assets.assets.fingerprint import Fingerprint, digest_of


def test_the_order_of_the_parts_does_not_matter():
    """The digest depends on the parts, not on how they were put together."""
    assert Fingerprint({"a": "1", "b": "2"}).digest == Fingerprint({"b": "2", "a": "1"}).digest


def test_any_changed_part_is_another_fingerprint():
    """Another model, prompt or slice is never mistaken for the one before."""
    base = Fingerprint({"model": "m", "prompt": "p"})
    assert base.digest != Fingerprint({"model": "m", "prompt": "q"}).digest
    assert base.digest != Fingerprint({"model": "m", "prompt": "p", "schema": ""}).digest


def test_a_recomputation_has_an_identity_of_its_own():
    """A crash resumes it and a finished one is not repeated, because the root run names it."""
    base = Fingerprint({"model": "m"})
    assert base.generation() == base.digest
    assert base.generation("0123456789") == f"{base.digest}-01234567"


def test_a_digest_of_settings_does_not_depend_on_their_order():
    """The same settings give the same part, in any process."""
    assert digest_of({"a": 1, "b": 2}) == digest_of({"b": 2, "a": 1})
