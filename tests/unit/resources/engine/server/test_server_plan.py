"""The command of a model server: what is filled in, what is left out, what makes two servers the same."""

from __future__ import annotations

from dataclasses import replace

import pytest

from resources.engine.server.server_plan import VLLM_COMMAND, ServerCommandError, ServerPlan

PLAN = ServerPlan(VLLM_COMMAND, "owner/a model", "abc123", "abc123")


def test_the_default_command_is_vllms() -> None:
    """The documented default starts vLLM on loopback, at the port chosen, with the revision pinned."""
    assert PLAN.arguments(port=8123)[:9] == [
        "vllm", "serve", "owner/a model", "--revision", "abc123", "--host", "127.0.0.1", "--port", "8123",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        ("s {model} --revision {revision} --port {port}", ["s", "owner/a model", "--port", "1"]),
        ("s --revision={revision} --port={port}", ["s", "--port=1"]),
        ("s {revision} '{\"image\": 12}' {port}", ["s", '{"image": 12}', "1"]),
    ],
)
def test_what_has_no_revision_goes_without_its_option(command: str, arguments: list[str]) -> None:
    """A local folder has no revision: option and value are left out; JSON in an option is no placeholder."""
    assert replace(PLAN, command=command, revision=None).arguments(port=1) == arguments


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("s {port} {modle}", r"knows no \{modle\}; its placeholders are \{model\}, \{revision\}"),
        ("s --port 8000", r"must take its port from \{port\}"),
        ("", r"must take its port from \{port\}"),
        ("s 'open {port}", "No closing quotation"),
        ("s --port {port} --served-model-name house", "without --served-model-name: .* by {model}"),
        ("s --port {port} --api-key=secret", "without --api-key: each start gets a random key"),
    ],
)
def test_a_wrong_template_is_named(command: str, said: str) -> None:
    """A template that cannot be used ends before anything starts, with what to write instead."""
    with pytest.raises(ServerCommandError, match=said):
        replace(PLAN, command=command).arguments(port=1)


@pytest.mark.parametrize(
    "change",
    [
        {"model": "owner/another"},
        {"revision": "def456"},
        {"exact": "other weights"},
        {"command": f"{VLLM_COMMAND} --dtype float32"},
        {"key_variable": "OTHER_KEY"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_another_model_or_argument_makes_another_server(change: dict[str, str]) -> None:
    """What changes the answers changes the digest by which a living server is adopted."""
    assert replace(PLAN, **change).digest != PLAN.digest  # type: ignore[arg-type]


def test_patience_does_not_make_another_server() -> None:
    """Waiting longer is no reason to load a model anew."""
    assert replace(PLAN, idle_seconds=1.0, start_seconds=1.0, grace_seconds=1.0).digest == PLAN.digest
