"""The door for extensions: what one hands over to the core, and which are installed.

An extension is a package whose distribution has an entry point in the group ``vlm_assets.extensions``, which
names a subclass of ``Extension``. The core imports none of them by name, and does its work without any.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

if TYPE_CHECKING:
    import dagster as dg

from vlm_assets.config.settings import EXTENSIONS, PREFIX, Settings, SettingsError, loaded_extensions
from vlm_durable.files.layout import Home
from vlm_durable.state.workers import Worker
from vlm_durable.versions.findings import Finding
from vlm_engine.devices.find import find_devices

Level = Literal["ok", "warning", "error"]
"""How bad a finding of ``doctor`` is. An error stops a long run sooner or later."""

Findings = Iterator[tuple[Level, str]]
"""What a check of ``doctor`` finds: how bad each is, and a sentence that says what to do."""


@dataclass(frozen=True)
class StatusTable:
    """What ``status`` shows of an extension. facts: the same for programs, a mapping or dataclass a row."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    facts: tuple[Any, ...]


@dataclass(frozen=True)
class StoredLeftover:
    """What is in the store of a journal that nobody goes on with. objects: without its head.

    key: of the partition. generation: of the journal.
    """

    asset: str
    key: str
    generation: str
    objects: int
    bytes: int


@dataclass(frozen=True)
class KnownDevice:
    """A device that a launcher knows. node: the machine it is in, where there are several.

    is_here: a run can reach it. temperature: degrees Celsius, where known. trouble: what speaks against it.
    """

    id: str
    node: str | None = None
    is_here: bool = True
    temperature: int | None = None
    trouble: str = ""


@dataclass(frozen=True)
class Launcher:
    """Who launches the runs, and where they work. By default Dagster does, on this machine alone.

    node: this machine's name among those that work. has_sensors: sensors of the extension watch workers and
    devices, and let the pool's limit follow them; else the core's do. idle_seconds: after so long without a
    partition a model server ends; longer than the pause between two runs, and short enough that a GPU is not
    held for nobody. added_seconds: what a launch takes longer than Dagster's own.
    """

    node: str = ""
    has_sensors: bool = False
    idle_seconds: float = 300.0
    added_seconds: float = 0.0

    def dagster_settings(self, settings: Settings) -> str | None:
        """The text of dagster.yaml that names this launcher; None for Dagster's own."""
        return None

    def devices(self, settings: Settings) -> tuple[Sequence[KnownDevice], tuple[str, ...]]:
        """The devices, and sentences about machines that take no runs. The first of two with one id counts.

        Raises DeviceError, ControlStateError.
        """
        return [KnownDevice(device.id) for device in find_devices(settings.devices, os.environ)], ()

    def listed_devices(self, settings: Settings) -> Sequence[Mapping[str, Any]] | None:
        """What `devices` shows, one mapping a device; None for those that this machine holds and leases."""
        return None


@dataclass(frozen=True)
class DoctorCheck:
    """One of the checks of ``doctor``.

    examine: gives the findings; what it raises is a finding too. is_quick: it takes a fraction of a second,
    and runs at each start.
    """

    name: str
    examine: Callable[[Settings], Findings]
    is_quick: bool = False


class Extension:
    """What an extension hands over. What it does not override is nothing.

    Its modules are imported when they are needed: ``--help`` asks for ``commands`` of each extension.
    """

    package: ClassVar[str]
    """Its import package: errors that it raises are sentences, and are shown without a traceback."""

    commands: ClassVar[Mapping[str, tuple[str, str]]] = {}
    """Each command's module and the first line of its help, by its name."""

    extras: ClassVar[Mapping[str, str]] = {}
    """Import packages that an extra of its distribution installs, each with what to give to pip."""

    assets: ClassVar[tuple[str, ...]] = ()
    """Assets of its own that have folders in a home: a backup takes them along. No name of theirs begins with
    ``property_``, as the core's do."""

    settings: ClassVar[type[Settings]] = Settings
    """The core's, or a subclass that adds its own: users set all of them in one way."""

    settings_title: ClassVar[str] = ""
    """Who needs its own settings, for those who read the list."""

    def definitions(self, settings: Settings) -> dg.Definitions:
        """Its assets, checks and sensors; the core has the resources. Raises SettingsError."""
        import dagster as dg

        return dg.Definitions()

    model_source: ClassVar[str | None] = None
    """What ``VLM_ASSETS_MODEL`` begins with, before a colon and a name, where its models describe."""

    def model_folder(self, settings: Settings, name: str) -> Path:
        """The folder of its describing model of this name, which need not be there yet."""
        raise NotImplementedError

    def model_trouble(self, settings: Settings, name: str) -> Finding | None:
        """Why nothing may be described with its model of this name, and what to do. Raises OSError."""
        return None

    def findings(self, settings: Settings, *, deep: bool) -> Iterable[Finding]:
        """What is wrong with the files of its ``assets``, found without a change. No finding has a key.

        deep: every byte is read; else only those of files that have changed. Raises OSError.
        """
        return ()

    def launcher(self, settings: Settings) -> Launcher | None:
        """Its launcher, where the settings have it launch the runs."""
        return None

    def assets_by_hand(self, settings: Settings) -> tuple[str, ...]:
        """Assets whose failures are told, and that nothing but a person starts again."""
        return ()

    def status(self, settings: Settings) -> StatusTable | None:
        """What ``status`` shows of it; None where there is nothing. Raises SettingsError."""
        return None

    def doctor_checks(self) -> Sequence[DoctorCheck]:
        """What ``doctor`` tries of it, beside the core's checks."""
        return ()

    def stored_leftovers(self, settings: Settings) -> Sequence[StoredLeftover]:
        """What ``prune`` may remove of its ``assets`` from the store. Raises StoreError."""
        return ()

    def remove_leftover(self, settings: Settings, leftover: StoredLeftover) -> str:
        """Remove it after another look, and say so. Raises StoreError."""
        raise NotImplementedError

    def busy_with(self, settings: Settings, ids: Collection[str], workers: Sequence[Worker]) -> set[str]:
        """Names of what these workers do that may write down properties which are being withdrawn."""
        return set()

    def forget(self, settings: Settings, ids: Collection[str], keys: Sequence[str]) -> Iterator[str]:
        """Remove all that it keeps of withdrawn properties, and say what. Safe to repeat. Raises OSError.

        keys: the partitions that they are in.
        """
        yield from ()


@dataclass(frozen=True)
class KeptInHomes:
    """What an extension of this repository keeps in a home, for a core where it is not installed.

    name: of its entry point. assets: as ``Extension.assets``. files: of its own beside them, or folders of
    such files; a withdrawal needs its code for them, and a backup does not.
    """

    name: str
    assets: tuple[str, ...] = ()
    files: tuple[str, ...] = ()

    @property
    def distribution(self) -> str:
        """What is to be installed."""
        return f"vlm-assets-{self.name}"

    def trace_in(self, home: Home, *, assets_alone: bool) -> Path | None:
        """A file of its own in this home, or the folder that holds some; None where there is none."""
        paths = [home.root / name for name in self.files if not assets_alone]
        for asset in map(home.asset, self.assets):
            paths += [asset.published, asset.versions, asset.journals]
        for path in paths:
            if path.is_file() or any(below.is_file() for below in path.rglob("*")):
                return path
        return None


KEPT_IN_HOMES: Final = (
    KeptInHomes(
        "results",
        files=("review.jsonl", ".state/explore", ".state/search", ".state/tables", "described_properties"),
    ),
    KeptInHomes("training", assets=("description_model",)),
)
"""What the extensions of this repository keep in homes; extensions of others have to stay installed."""


def left_by_missing(home: Home, *, assets_alone: bool = False) -> Iterator[tuple[str, Path]]:
    """Each distribution that is not installed, and that has something in this home; with a path of it."""
    names = {point.name for point in entry_points(group=EXTENSIONS)}
    for kept in KEPT_IN_HOMES:
        if kept.name not in names:
            path = kept.trace_in(home, assets_alone=assets_alone)
            if path is not None:
                yield kept.distribution, path


def installed() -> tuple[Extension, ...]:
    """The extensions of this environment, by name."""
    return loaded_extensions()


def describing_model(settings: Settings) -> str | None:
    """The folder or hub id of the describing model; None where none is set. Raises SettingsError."""
    if (source := model_source(settings)) is None:
        return settings.model
    extension, name = source
    return str(extension.model_folder(settings, name))


def model_source(settings: Settings) -> tuple[Extension, str] | None:
    """The extension whose model describes, and the model's name; None where it is no extension's.

    ``VLM_ASSETS_MODEL`` is ``SOURCE:NAME`` then. Raises SettingsError.
    """
    source, colon, name = (settings.model or "").partition(":")
    if not colon or Path(source).is_absolute():
        return None
    sources = {extension.model_source: extension for extension in installed()}
    if source not in sources:
        raise SettingsError(
            f"{PREFIX}MODEL={settings.model} is a model of an extension that is not installed here. Install"
            " the extension, or set a model's folder or hub id."
        )
    return sources[source], name


def launcher_of(settings: Settings) -> Launcher:
    """The launcher of the extension that the settings have launch the runs; else this machine's own."""
    launchers = (extension.launcher(settings) for extension in installed())
    return next((launcher for launcher in launchers if launcher is not None), Launcher())
