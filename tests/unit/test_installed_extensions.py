"""The extensions of this repository are found as any other would be."""

from vlm_assets.config.extensions import installed


def test_the_extensions_of_this_repository_are_installed() -> None:
    """Each is found by its entry point, and every command of theirs is one that there is."""
    installed.cache_clear()
    assert [extension.package for extension in installed()] == ["vlm_cluster", "vlm_results", "vlm_training"]
    commands = {name for extension in installed() for name in extension.commands}
    assert commands == {"devices node", "explore", "export", "review", "search"}
