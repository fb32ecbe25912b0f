"""Comparing: the page that is sent to somebody."""

from vlm_assets.operate.html_page import Card, page


def test_nothing_that_was_said_is_markup_on_a_page() -> None:
    """Ids and answers come from anywhere; the page is opened by somebody else."""
    bad = "<script>alert(1)</script>"
    written = page(bad, [Card(bad, bad, [None], {bad: bad, "list": [bad]})], tables=[(bad, [bad], [[bad]])])
    assert "<script" not in written
    assert written.count("&lt;script&gt;") >= 8
