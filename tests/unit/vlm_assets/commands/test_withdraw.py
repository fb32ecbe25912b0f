"""The command that withdraws properties."""

from __future__ import annotations

from vlm_assets.services.withdrawal import pending_withdrawal, prepare_withdrawal, withdraw


def test_the_ids_of_a_file_are_withdrawn_also_after_a_withdrawal_that_was_cut_short(dataset, call, tmp_path):
    """Exit code 0 means that they are gone. Ids that the first one has are withdrawn with it, once."""
    file, settings = tmp_path / "ids.txt", dataset.settings

    def cut_short(property_id: str) -> None:
        steps = withdraw(settings, prepare_withdrawal(settings, [property_id]))
        next(steps)
        steps.close()

    for first, listed in (("p1", "p1\np3\n"), ("p5", "p5\n")):
        cut_short(first)
        file.write_text(listed)
        done = call("withdraw", "--ids", str(file), "--yes")
        assert (done.exit_code, pending_withdrawal(settings)) == (0, None), done.output
    cut_short("p7")
    assert call("withdraw").exit_code == 0
    left = [name for table in dataset.catalog.slices() for name in table[1]["property_id"].to_pylist()]
    assert [name for name in left if name.startswith("p")] == ["p0", "p2", "p4", "p6", "p8"]
