"""The settings of a component's home, kept in the home: commands read them, and another component is refused.

A command takes secrets, and what starts code or gets a secret, from its own environment: a home may be the
copy of somebody else's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from vlm_assets.config.settings import (
    PREFIX,
    Settings,
    SettingsError,
    given_settings,
    load_settings,
    secret_names,
)
from vlm_durable.files.files import make_directory, write_new
from vlm_durable.files.layout import Home
from vlm_durable.files.sealed_json import BrokenSealError, read_sealed, sealed, write_sealed

_STARTS_CODE: Final = frozenset(
    {"description_schema", "questions", "server_command", "server_url", "trust_remote_code"}
)
"""Settings that start code, or name a server that gets the key and images."""


def _own(settings: type[Settings]) -> set[str]:
    """Settings that no home keeps."""
    return secret_names(settings) | _STARTS_CODE


def keep_settings(settings: Settings, project: Path) -> None:
    """Write the settings into the home of a component, for its commands.

    project: the folder of its Dagster project. Raises SettingsError where the home is another component's.
    """
    own = _own(type(settings)) & settings.model_fields_set
    content = {
        "prefix": settings.names.prefix,
        "project": str(project.absolute()),
        "settings": {name: _plain(settings, name) for name in sorted(settings.model_fields_set - own)},
        "own": sorted(name for name in own if getattr(settings, name)),
    }
    file = _file_of(settings.home)
    make_directory(file.parent)
    try:
        write_new(file, sealed(content))
        return
    except FileExistsError:
        kept = _read(file)
    # A project that is deployed anew into another folder has the same component.
    other_project = kept["project"] != content["project"] and Path(kept["project"]).is_dir()
    if kept["prefix"] != content["prefix"] or other_project:
        raise SettingsError(
            f"{settings.home} is the home of the component {kept['prefix']} of {kept['project']}, and"
            f" {content['prefix']} of {content['project']} names it too: each needs one of its own. Write"
            f" another `home` in the defs.yaml of {content['prefix']}; or delete {file}, if the component was"
            " renamed or its project moved."
        )
    if kept != content:
        write_sealed(file, content)


def settings_of_home(**overrides: object) -> Settings:
    """The settings of this process, or those of a component's home and from here what no home keeps.

    overrides: go before. Raises SettingsError.
    """
    given = load_settings(**overrides)
    file = _file_of(given.home)
    if not file.exists():
        return given
    kept = _read(file)
    own = _own(type(given))
    # What is set here and not by the component is meant for another home.
    here = {name: getattr(given, name) for name in sorted(own.intersection(kept["own"]))}
    missing = [f"{PREFIX}{name.upper()}" for name in here if name not in given.model_fields_set]
    if missing:
        raise SettingsError(
            f"{given.home} is the home of the component {kept['prefix']}, whose defs.yaml sets what no home"
            f" keeps (secrets, and what starts code): set {', '.join(missing)} for this command too."
        )
    of_home = {name: value for name, value in kept["settings"].items() if name not in own}
    return given_settings(**{**of_home, **here, "home": given.home, **overrides})


def refuse_component(settings: Settings) -> None:
    """Refuse the home of a component, which has a Dagster of its own. Raises SettingsError."""
    if settings.names.prefix:
        asset = settings.names.key("property_descriptions").to_user_string()
        raise SettingsError(
            f"{settings.home} is the home of the component {settings.names.prefix}, and its own Dagster works"
            f" in it. Nothing was started: materialize {asset} there."
        )


def _plain(settings: Settings, name: str) -> bool | int | float | str | None:
    value = getattr(settings, name)
    return value if isinstance(value, bool | int | float | None) else str(value)


def _file_of(home: Path) -> Path:
    return Home(home).state / "component.json"


def _read(file: Path) -> dict[str, Any]:
    try:
        return read_sealed(file)
    except BrokenSealError as error:
        raise SettingsError(
            f"{file} cannot be read ({error}), so it is not known which component has this home. Delete it,"
            " and reload the definitions of that component: they write it anew."
        ) from error
