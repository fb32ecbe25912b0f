"""`questions` lists each set with its fields, its condition and the fields that it fills."""

from pydantic import BaseModel, Field


class Pool(BaseModel):
    """A second opinion."""

    has_pool: bool = Field(description="Whether there is a pool")


def test_each_set_is_shown_with_whom_it_asks_and_what_it_fills(call, tmp_path, monkeypatch):
    """A person reads there what a run will ask, before it does."""
    file = tmp_path / "questions.yaml"
    where = "confidence.has_pool < 0.8"
    file.write_text(f"again:\n  schema: {__name__}:Pool\n  where: {where}\n  fills: [has_pool]\n")
    monkeypatch.setenv("VLM_ASSETS_QUESTIONS", str(file))
    said = call("questions").stdout.splitlines()
    assert said[0].startswith("property_descriptions: building_type, ")
    assert said[1:] == [
        "property_again: has_pool",
        f"  asked where {where}",
        "  gives the better answer of has_pool",
    ]
