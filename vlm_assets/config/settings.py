"""Every setting of the project, typed and validated: names, defaults, meanings, and errors for wrong ones.

Read from the environment (``VLM_ASSETS_HOME`` for ``home``) and from a ``.env`` file, by pydantic-settings:
that of the working folder where it sets any of them, else the checkout's. Resources are handed values, never
this object.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, Self, get_args
from urllib.parse import urlsplit

from dotenv import dotenv_values
from pydantic import (
    AfterValidator,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    PrivateAttr,
    SecretStr,
    ValidationError,
    ValidationInfo,
    create_model,
    field_validator,
)
from pydantic_settings import BaseSettings, NoDecode, PydanticBaseSettingsSource, SettingsConfigDict

from resources.dagster_names import UNPREFIXED, DagsterNames
from vlm_assets.config.questions_file import SET_PREFIX, AskedSet, QuestionsFile
from vlm_catalog.ranges import DESCRIPTIONS, EMBEDDINGS
from vlm_durable.commands import command, name_home
from vlm_durable.files.layout import AssetFolders, Home, UnusableHomeError
from vlm_durable.mirror.bucket import S3Folder, place_of
from vlm_durable.mirror.mirror import NO_MIRROR, Mirror

if TYPE_CHECKING:
    from vlm_assets.config.where import Where

CHECKOUT = Path(__file__).resolve().parents[2]
"""The folder of this project. Of an installed package: the folder that holds all packages."""
IS_CHECKOUT = (CHECKOUT / "pyproject.toml").is_file()
ROOT = CHECKOUT if IS_CHECKOUT else Path.cwd()
"""The folder of the default home: the checkout; for an installed package the current folder."""
PREFIX = "VLM_ASSETS_"
EXTENSIONS: Final = "vlm_assets.extensions"
"""Entry points of this group are extensions; ``extensions.py`` says what one is."""


def _env_file() -> Path:
    named = os.environ.get(f"{PREFIX}ENV_FILE")
    if named:
        return Path(named).absolute()
    in_working_folder = Path.cwd() / ".env"
    try:
        sets_any = any(name.upper().startswith(PREFIX) for name in dotenv_values(in_working_folder))
    except (OSError, ValueError):
        return in_working_folder  # it cannot be read: reading the settings raises the error
    return in_working_folder if sets_any else ROOT / ".env"


ENV_FILE = _env_file()
"""The file of this process: that of the working folder at its start if it sets any setting, else the
checkout's. ``VLM_ASSETS_ENV_FILE`` names another, or /dev/null for none; children get the same by it."""
EXAMPLE = "example"
"""Name of the example's models in ``VLM_ASSETS_MODEL`` and ``VLM_ASSETS_EMBEDDING_MODEL``, and of the folder
of a home that holds the example."""
EXAMPLE_MODEL = CHECKOUT / "examples" / "model"
EXAMPLE_EMBEDDER = CHECKOUT / "examples" / "embedder"

Share = Annotated[float, Field(ge=0.0, le=1.0)]


def _absolute_path(path: Path) -> Path:
    absolute = path.expanduser().absolute()
    try:
        str(absolute).encode()
    except UnicodeEncodeError as error:
        raise ValueError("a path must be UTF-8; rename the folder, or set another") from error
    return absolute


def web_address(url: str, *, form: str) -> str:
    """The address without a slash at its end. Raises ValueError where it has not this form."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username is not None:
        raise ValueError(f"an address is of the form {form}, without a name or a password")
    return url.rstrip("/")


AbsolutePath = Annotated[Path, AfterValidator(_absolute_path)]
"""A path of a setting: a run's working folder is not the shell's."""

GROUPS: Final = {
    "home": "Everybody",
    "devices": "With a GPU, or another device or server of models",
    "store": "With a store on S3, or a database in Postgres",
}
"""Who needs which of the core's settings: the first of each group, and its title. The others follow in
``Settings``."""

_OF_EXTENSIONS: Final = {
    "ray_address": "vlm-assets-cluster",
    **dict.fromkeys(("truth", "guarantee", "guarantee_risk", "table", "table_catalog"), "vlm-assets-results"),
    "variants": "vlm-assets-training",
}
"""The distribution of each setting that an extension of this repository adds, where it is not installed."""

_DIVISORS_OF_60: Final = tuple(minutes for minutes in range(1, 61) if 60 % minutes == 0)


class SettingsError(ValueError):
    """A setting is unknown or has a value that cannot be used; the message names it and what would do."""


class Settings(BaseSettings):
    """The core's settings. Each can be set as ``VLM_ASSETS_`` and its name in capitals, or in ``.env``.

    ``vlm-assets settings`` shows the text below each. An extension declares its own in a subclass;
    ``load_settings`` gives all of them as one object.
    """

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        env_file=ENV_FILE,
        env_ignore_empty=True,
        extra="ignore",
        frozen=True,
        use_attribute_docstrings=True,
        hide_input_in_errors=True,  # some are secret; the errors of load_settings show the others
    )

    # Everybody.
    home: AbsolutePath = ROOT / "data"
    """Folder that holds the catalogue and all output."""
    source: Annotated[Path | S3Folder | None, NoDecode] = None
    """Your images: a folder tree ID/*.jpg, here or at s3://BUCKET/PREFIX, or a CSV, JSONL or parquet
    listing."""
    image_root: Annotated[Path | S3Folder | None, NoDecode] = None
    """Folder, here or at s3://BUCKET/PREFIX, that no image path may leave. Default: the source folder, or the
    listing's."""
    range_size: PositiveInt | None = None
    """Properties a partition: minutes to hours of work. Fixed for what is catalogued. Default: the
    catalogue's own, 1000 at first."""
    model: str | None = None
    """Vision-language model: a local folder, a hub id as OWNER/NAME or OWNER/NAME@REVISION (commit, tag or
    branch), or 'example'. Safetensors only. Default: none; the example model for a home with the rendered
    example."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Only for models whose code you read."""
    embedding_model: str | None = None
    """Text-embedding model, in the layout of sentence-transformers: a local folder, a hub id as
    OWNER/NAME or OWNER/NAME@REVISION, or 'example'. Default: none, so nothing is embedded; the example's
    embedder for a home with the rendered example."""
    description_schema: str = "vlm_assets.config.property_description:PropertyDescription"
    """Your own pydantic model as module:Class. It becomes prompt, grammar and columns. The module is
    installed, or a file in the working directory or the checkout."""
    prompt: str | None = None
    """Text of the question. Default: made from the schema."""
    questions: Annotated[QuestionsFile | None, NoDecode] = None
    """A YAML file of further question sets, each with a schema and an asset of its own; docs/questions.md
    shows one. Default: none."""
    max_new_tokens: PositiveInt = Field(512, le=100_000)
    """Tokens an answer may have in its first attempt."""
    max_images: PositiveInt = Field(12, le=500)
    """Images of a property shown to the model, at most."""
    max_pixels: int = Field(1_048_576, ge=4_096, le=100_000_000)
    """Pixels of an image that reach the model, at most, with every family of models; families that cut an
    image into tiles take fewer tiles."""
    image_tokens: PositiveInt | None = None
    """Tokens that all images of a property may cost together: their resolution is chosen so that all fit.
    Default: what the model's context holds beside prompt and answer."""
    processor_options: str = "{}"
    """Options of the model's own image processor as JSON, such as {"do_image_splitting": false};
    docs/models.md names them."""
    batch_size: PositiveInt = Field(256, le=10_000)
    """Properties described together, at most. A change keeps what is committed."""
    batch_images: Literal["auto"] | Annotated[int, Field(ge=1, le=100_000)] = "auto"
    """Images described together, at most; a property with more is a batch alone. auto: each partition
    measures its batches, and later ones take the size that was fastest on such a device, of 20 s or less, for
    a kill loses a batch; a run warns where it takes longer."""
    decode_workers: PositiveInt = Field(
        default_factory=lambda: max(1, min(8, (os.cpu_count() or 2) // 2)), le=256
    )
    """Processes that read and decode images and run the processor, ahead of the model."""
    commit_seconds: PositiveFloat = 30.0
    """Longest time a finished row stays uncommitted."""
    grace_seconds: PositiveFloat = 30.0
    """Seconds to commit what is finished when Dagster, or a stuck worker, is ended."""
    failed_share: Share = 0.20
    """Share of failed rows from which a partition is not published; from 1% on it warns. 1: it is published
    unless all failed, and no run stops because most answers are no descriptions."""
    retry_minutes: PositiveFloat = 10.0
    """Minutes before the first new attempt at a failed partition; doubled at each other. After five in a row
    without a new row it is given up."""
    run_new_ranges_after_hours: NonNegativeFloat | None = None
    """Run new partitions by themselves as soon as they are catalogued, and the last properties as a smaller
    partition when they waited so many hours for others. Default: only what a person launches."""
    price_per_hour: NonNegativeFloat | None = None
    """The price of one device for an hour, in any currency. With it `vlm-assets plan`, `status` and `run`
    say what work costs."""
    alert_targets: SecretStr | None = None
    """Whom to tell: apprise addresses (Slack, mail, webhook), separated by blanks. Secret."""
    ui_address: str | None = None
    """Address of the Dagster UI as you reach it, for links in alerts. Default: found."""
    allowed_hosts: str = ""
    """Host names, separated by blanks, under which the UI may be opened besides localhost: those of a proxy
    in front of it. A request with another Host is refused."""
    owners: str = ""
    """Who owns the assets in Dagster's catalogue: mail addresses and team:NAME, separated by blanks."""
    tags: str = ""
    """Tags of the assets in Dagster's catalogue, as NAME=VALUE, separated by blanks."""

    # With a GPU.
    devices: str = "auto"
    """auto, a list of GPU indexes or UUIDs ('0,1'), 'given' (by a cluster), or 'cpu:N' slots."""
    devices_per_model: PositiveInt = Field(1, le=64)
    """GPUs that work on one model together, for models that one does not hold; only with a server that is
    started (vLLM: tensor parallel). A run leases all of them or none."""
    devices_folder: AbsolutePath | None = None
    """Folder of the locks and model servers of this machine's devices, on a local disk. Homes that name the
    same one share the devices. Default: the home's own."""
    device_min_free_gib: NonNegativeFloat = 0.0
    """A GPU with less free memory, in GiB, is left to others."""
    device_wait_seconds: PositiveFloat = 600.0
    """Seconds that a run waits for a device before it ends by name; the time in which other runs work on the
    devices does not count."""
    stuck_seconds: PositiveFloat = 600.0
    """Seconds without a commit after which a worker is ended even if it knows no rhythm."""
    model_load_seconds: PositiveFloat = 1800.0
    """Seconds that a model may take to load, in the run or in a server that is started."""
    engine: Literal["auto", "transformers", "server"] = "auto"
    """What runs the model: transformers in the run, or a server (vLLM, SGLang). auto: a server if one is
    named; vLLM on a GPU where it is installed; else in the run. Chosen once a home."""
    server_command: str | None = None
    """Command that starts a server, with {model}, {revision}, {host}, {port} and others (docs/operations.md).
    Default: vLLM, of `make vllm` or in PATH."""
    server_url: str | None = None
    """A server that runs already, up to /v1. Default: one is started on each device."""
    server_key: SecretStr | None = None
    """Key of the server at the URL. Those that are started get random ones. Secret."""
    server_model: str | None = None
    """The model's name at the URL. Default: the model's, or the only one served there."""
    server_requests: PositiveInt = 128
    """Requests that a run has under way at once, at most; fewer where the server is slow."""
    server_token_seconds: PositiveFloat = 120.0
    """Seconds without a new token after which a server's answer is given up; a whole one may take 7.5
    times as long."""

    # With a store, or a database.
    store: Annotated[S3Folder | None, NoDecode] = None
    """s3://BUCKET/PREFIX that holds catalogue, work under way and finished partitions as the place of record
    of several machines; one home a prefix. Default: this machine's home alone."""
    state_url: SecretStr | None = None
    """Postgres that keeps the control state for several machines, one database a home:
    postgresql+psycopg2://USER:PASSWORD@HOST/DATABASE. Default: SQLite in the home. Secret."""

    @field_validator("source", "image_root", mode="before")
    @classmethod
    def _on_disk_or_s3(cls, place: object) -> object:
        return place_of(place) if isinstance(place, str) else place

    @field_validator("store", mode="before")
    @classmethod
    def _on_s3(cls, address: object) -> object:
        return S3Folder.parse(address) if isinstance(address, str) else address

    @field_validator("source", "image_root")
    @classmethod
    def _absolute(cls, place: Path | S3Folder | None) -> Path | S3Folder | None:
        return _absolute_path(place) if isinstance(place, Path) else place

    @field_validator("questions", mode="before")
    @classmethod
    def _read(cls, file: object) -> object:
        return QuestionsFile.read(_absolute_path(Path(file))) if isinstance(file, str | Path) else file

    @field_validator("model", "embedding_model")
    @classmethod
    def _local_folder_made_absolute(cls, model: str | None, field: ValidationInfo) -> str | None:
        # A run's working directory is not the shell's, so a relative folder is resolved here. A hub id
        # (owner/name@revision) stays as it is unless a folder of that name is there.
        if model is None:
            return None
        if model == EXAMPLE:
            if not EXAMPLE_MODEL.is_dir():
                raise ValueError("only a checkout has the example model; this is an installed package")
            return str(EXAMPLE_MODEL if field.field_name == "model" else EXAMPLE_EMBEDDER)
        folder = Path(model).expanduser()
        if folder.is_dir():
            return str(folder.absolute())
        if folder.is_absolute() or model.startswith((".", "~")):
            raise ValueError(
                f"there is no folder {model}; give a model's folder, or its hub id as owner/name"
            )
        if "@" in model and not re.fullmatch(r"[^@]+@[^@]+", model):
            raise ValueError("give a hub id as owner/name or owner/name@revision")
        return model

    @field_validator("state_url")
    @classmethod
    def _with_its_driver(cls, url: SecretStr | None) -> SecretStr | None:
        # Dagster reads the same variable, so it is not put right here for us alone.
        if url is not None and url.get_secret_value().startswith(("postgresql://", "postgres://")):
            raise ValueError("write it with its driver: postgresql+psycopg2://USER:PASSWORD@HOST/DATABASE")
        return url

    @field_validator("server_url")
    @classmethod
    def _an_address(cls, url: str | None) -> str | None:
        return None if url is None else web_address(url, form="http://HOST:PORT/v1")

    @field_validator("processor_options")
    @classmethod
    def _a_json_object(cls, text: str) -> str:
        try:
            options = json.loads(text)
        except ValueError:
            options = None
        if not isinstance(options, dict):
            raise ValueError('give a JSON object, such as {"do_image_splitting": false}')
        return json.dumps(options, sort_keys=True)

    @field_validator("allowed_hosts")
    @classmethod
    def _host_names(cls, hosts: str) -> str:
        for host in hosts.split():
            if not re.fullmatch(r"[A-Za-z0-9._-]+", host):
                raise ValueError(f"{host!r} is no host name; give names alone, without http:// and port")
        return hosts

    @field_validator("owners")
    @classmethod
    def _owners_as_dagster_takes_them(cls, owners: str) -> str:
        for owner in owners.split():
            if not re.fullmatch(r"team:.+|[\w.%+-]+@[A-Za-z0-9.-]+\.[A-Za-z]{2,7}", owner, re.ASCII):
                raise ValueError(f"{owner!r} is neither a mail address nor team:NAME")
        return owners

    @field_validator("tags")
    @classmethod
    def _tags_as_dagster_takes_them(cls, tags: str) -> str:
        for tag in tags.split():
            if not re.fullmatch(r"[A-Za-z0-9_.-]{1,63}=[A-Za-z0-9_.-]{0,63}", tag):
                raise ValueError(f"{tag!r} is no tag: write NAME=VALUE, of letters, digits, '_', '.' and '-'")
        return tags

    @property
    def owner_list(self) -> list[str]:
        """The owners, one by one."""
        return self.owners.split()

    @property
    def tag_values(self) -> dict[str, str]:
        """The tags by name."""
        return dict(tag.split("=", 1) for tag in self.tags.split())

    @property
    def hosts(self) -> list[str]:
        """The allowed hosts, one by one."""
        return self.allowed_hosts.split()

    @property
    def retry_every_minutes(self) -> int:
        """Minutes between two looks for partitions to try again: as near to ``retry_minutes`` as is possible.

        A divisor of 60, because the schedule's cron begins anew at every full hour: all intervals are equal.
        """
        return max(every for every in _DIVISORS_OF_60 if every <= max(1.0, self.retry_minutes))

    @classmethod
    def part_of(cls, settings: Settings) -> Self:
        """All settings, with those of an extension's class. Raises TypeError where they are the core's."""
        if not isinstance(settings, cls):
            raise TypeError(f"{type(settings).__name__} has no {cls.__name__}: load_settings reads them")
        return settings

    @property
    def names(self) -> DagsterNames:
        """How Dagster names what these settings define."""
        return UNPREFIXED

    @property
    def layout(self) -> Home:
        """The paths of all files of the home."""
        from vlm_catalog.catalog_copies import catalog_id_of

        return Home(self.home, catalog_id_of)

    @property
    def mirror(self) -> Mirror:
        """The store, or what stands for it where none is set."""
        return NO_MIRROR if self.store is None else self.store

    _describes: str = PrivateAttr(DESCRIPTIONS)
    _where: Where | None = PrivateAttr(None)

    @property
    def where(self) -> Where | None:
        """The condition that chooses the properties of a question set. None: it asks all of them."""
        return self._where

    @property
    def descriptions(self) -> AssetFolders:
        """The folders of the descriptions; of the settings of a question set, those of its answers."""
        return self.layout.asset(self._describes)

    @property
    def embeddings(self) -> AssetFolders:
        """The folders of the embeddings."""
        return self.layout.asset(EMBEDDINGS)

    def of_all(self) -> Settings:
        """These settings without a condition: a measurement needs no answers of other sets."""
        settings = self.model_copy()
        settings._where = None
        return settings

    @property
    def partitioned_assets(self) -> tuple[AssetFolders, ...]:
        """The folders of the assets that have a file for each range, upstream first."""
        sets = () if self.questions is None else self.questions.assets
        return (self.descriptions, self.embeddings, *map(self.layout.asset, sets))

    def name_in_commands(self) -> None:
        """Have the commands that this thread suggests name this home, where one Dagster has several."""
        if self.names.prefix:
            name_home(self.home)

    @property
    def computed_assets(self) -> tuple[str, ...]:
        """The assets that runs make, upstream first: without an embedding model no vectors."""
        return tuple(
            asset.name
            for asset in self.partitioned_assets
            if asset != self.embeddings or self.embedding_model is not None
        )

    def of_set(self, name: str, asked: AskedSet, where: Where | None = None) -> Settings:
        """The settings that make a set's rows: these, with what the set has for itself, and no other set.

        Raises SettingsError.
        """
        values = {name: getattr(self, name) for name in type(self).model_fields}
        given = {**values, "prompt": None, "questions": None, **asked.given(), "_env_file": None}
        keys = {own: field.alias or own for own, field in AskedSet.model_fields.items()}
        of_set = _validated(
            type(self),
            given,
            name_of=lambda own_name: f"{self.questions}, the set {name}, {keys.get(own_name, own_name)}",
        )
        of_set._describes = SET_PREFIX + name
        of_set._where = where
        return of_set

    @property
    def state_directory(self) -> Path:
        """High-water marks and leases; each file says whether it is truth or may be deleted."""
        return self.layout.state

    @property
    def devices_directory(self) -> Path:
        """The folder of the devices' locks, and of what keeps their model servers loaded."""
        return self.devices_folder or self.state_directory

    @property
    def dagster_home(self) -> Path:
        """The folder of Dagster's own state: in the home, but beside the checkout's ``data/``."""
        is_default = IS_CHECKOUT and self.home == CHECKOUT / "data"
        return CHECKOUT / "dagster_home" if is_default else self.home / "dagster"


class GivenSettings(Settings):
    """Settings that somebody hands over: neither the environment nor ``.env`` is read."""

    name_prefix: str
    """What the names begin with that Dagster has of all that these settings define."""

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """The arguments alone."""
        return (init_settings,)

    @field_validator("name_prefix")
    @classmethod
    def _a_name_for_dagster(cls, prefix: str) -> str:
        if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", prefix):
            raise ValueError("write letters, digits and '_', beginning with a letter, such as 'houses'")
        return prefix

    @property
    def names(self) -> DagsterNames:
        """The names that Dagster shows, with the prefix."""
        return DagsterNames(self.name_prefix)


def env_file_sentence(settings: Settings) -> str:
    """Which file the settings come from, besides the environment, for people."""
    if settings.names.prefix:
        return f"Settings are those of the component {settings.names.prefix}; secrets, of the environment."
    if ENV_FILE.is_file():
        return f"Settings are read from {ENV_FILE}; the environment goes before it."
    return f"No .env is read: {ENV_FILE} is not there. Settings are those of the environment."


def of_env_file() -> dict[str, str]:
    """What ``.env`` sets, for a process that is started in another folder; the environment goes before it."""
    values = dotenv_values(ENV_FILE)
    return {name: value for name, value in values.items() if name.startswith(PREFIX) and value}


def secret_names(settings: type[Settings]) -> set[str]:
    """Settings whose values are shown nowhere."""
    fields = settings.model_fields.items()
    return {name for name, field in fields if SecretStr in (field.annotation, *get_args(field.annotation))}


def _refuse_unknown_names(every: type[Settings]) -> None:
    # A misspelt setting that is silently ignored costs a run of weeks.
    setting_names = {PREFIX + name.upper() for name in (*every.model_fields, "env_file")}
    file = Path(str(Settings.model_config["env_file"]))
    try:
        of_file = dotenv_values(file)
    except (OSError, ValueError) as error:
        raise SettingsError(
            f"The settings in {file} cannot be read ({error}), so nothing was done. Put the file right, or"
            f" name another in {PREFIX}ENV_FILE (/dev/null for none)."
        ) from error
    for where, names in (("the environment", os.environ), (str(file), of_file)):
        for name in sorted(names):
            if name.upper().startswith(PREFIX) and name.upper() not in setting_names:
                raise SettingsError(
                    f"{name} is set in {where} but there is no such setting, or its extension is not"
                    f" installed. {_hint(name.upper(), setting_names)}"
                )


def _hint(name: str, names: Collection[str]) -> str:
    """What to do about a name that is none of these settings."""
    distribution = _OF_EXTENSIONS.get(name.removeprefix(PREFIX).lower())
    if distribution is not None:
        return f"Install {distribution}, which reads it, or unset it."
    near = difflib.get_close_matches(name, names, n=1)
    return (f"Did you mean {near[0]}? " if near else "") + f"{command('settings')} lists them all."


@cache
def loaded_extensions() -> tuple[Any, ...]:
    """An object of each installed extension, by name; ``extensions.py`` says what it hands over."""
    points = sorted(entry_points(group=EXTENSIONS), key=lambda point: point.name)
    return tuple(point.load()() for point in points)


def settings_class(core: type[Settings] = Settings) -> type[Settings]:
    """The core's settings with those of each extension. Raises SettingsError where two declare one name."""
    return _with_all(core, tuple(extension.settings for extension in loaded_extensions()))


@cache
def _with_all(core: type[Settings], classes: tuple[type[Settings], ...]) -> type[Settings]:
    names = Counter(name for each in classes for name in own_settings(each))
    twice = [name for name, times in names.items() if times > 1]
    if twice:
        raise SettingsError(f"Two extensions declare {PREFIX}{twice[0].upper()}: uninstall one of them.")
    # Pydantic lists fields from the last class to the first.
    classes = tuple(each for each in (core, *reversed(classes)) if each is not Settings)
    return create_model("EverySetting", __base__=classes) if classes else Settings


def own_settings(settings: type[Settings]) -> list[str]:
    """The names that a class adds to the core's."""
    return [name for name in settings.model_fields if name not in Settings.model_fields]


def settings_groups() -> dict[str, str]:
    """Who needs which settings: the first of each group, and its title."""
    added = [(own_settings(more.settings), more.settings_title) for more in loaded_extensions()]
    return GROUPS | {names[0]: title for names, title in added if names}


def load_settings(**overrides: object) -> Settings:
    """Read and validate the settings. Raises SettingsError, which names every setting that is wrong.

    A home on several devices is refused too, before anything works in it.
    """
    every = settings_class()
    _refuse_unknown_names(every)
    values = {"_env_file": Settings.model_config["env_file"], **overrides}
    settings = _validated(every, values, name_of=lambda name: f"{PREFIX}{name.upper()}")
    own_schema = settings.description_schema != Settings.model_fields["description_schema"].default
    if own_schema or settings.questions is not None:
        find_modules_beside(settings.questions)
    return _completed(settings)


def find_modules_beside(questions: QuestionsFile | None) -> None:
    """Have a schema's module found that is a file in the working directory, beside the questions, or beside
    the checkout's Makefile. All come last, so that they hide no installed module."""
    beside = [] if questions is None else [questions.path.parent]
    folders = map(str, (Path.cwd(), *beside, CHECKOUT))
    sys.path.extend(folder for folder in folders if folder not in sys.path)


def given_settings(**values: object) -> Settings:
    """Validate settings that are given by their names. Raises SettingsError, as ``load_settings``."""
    every = settings_class(GivenSettings)
    for name in values:
        if name not in every.model_fields:
            raise SettingsError(f"There is no setting {name}. {_hint(name, every.model_fields)}")
    return _completed(_validated(every, values, name_of=str))


def _validated(
    every: type[Settings], values: Mapping[str, object], *, name_of: Callable[[str], str]
) -> Settings:
    try:
        return every(**values)  # type: ignore[arg-type]  # pydantic validates what it is given
    except ValidationError as error:
        secret = secret_names(every)
        problems = "; ".join(
            f"{name_of('_'.join(map(str, item['loc'])))}"
            f"={'(secret)' if secret.intersection(item['loc']) else repr(item['input'])}: {item['msg']}"
            for item in error.errors()
        )
        raise SettingsError(f"{problems}. {command('settings')} lists all settings.") from error


def _completed(settings: Settings) -> Settings:
    """The settings with what follows from others. Raises SettingsError where they do not go together."""
    if (settings.home / EXAMPLE / "example.json").is_file() and EXAMPLE_MODEL.is_dir():
        of_example = {"model": str(EXAMPLE_MODEL), "embedding_model": str(EXAMPLE_EMBEDDER)}
        unset = {name: model for name, model in of_example.items() if getattr(settings, name) is None}
        settings = settings.model_copy(update=unset)
    if settings.engine == "auto" and (settings.server_url or settings.server_command):
        settings = settings.model_copy(update={"engine": "server"})
    _refuse_unused_server_settings(settings)
    try:
        settings.layout.refuse_unusable()
        settings.layout.close_to_others()
    except UnusableHomeError as error:
        raise SettingsError(f"{PREFIX}HOME: {error}") from error
    if settings.questions is not None:
        refuse_wrong_sets(settings, settings.questions)
    return settings


def refuse_wrong_sets(settings: Settings, file: QuestionsFile) -> None:
    """Raise SettingsError where a set cannot be asked, or asks for a field that another set has."""
    from vlm_assets.config.where import where_of
    from vlm_engine.schema import SchemaError, load_schema

    set_of, type_of = dict[str, str](), dict[str, object]()
    with suppress(SchemaError):  # a run says what is wrong with it
        type_of = {field.name: field.type for field in load_schema(settings.description_schema).arrow_type}
        set_of = dict.fromkeys(type_of, "descriptions")
    for name, asked in file.sets:
        if asked.model is not None and settings.server_url is not None:
            raise SettingsError(
                f"{file}: the set {name} names a model, and {PREFIX}SERVER_URL a server, which knows its own:"
                " unset one of them."
            )
        of_set = settings.of_set(name, asked)
        _refuse_unused_server_settings(of_set)
        try:
            fields = {field.name: field.type for field in load_schema(of_set.description_schema).arrow_type}
        except SchemaError as error:
            raise SettingsError(f"{file}: the set {name}: {error}") from error
        for field in asked.fills:
            if field not in fields or field not in set_of:
                lacking = f"the set {name}" if field not in fields else "no set above it"
                raise SettingsError(
                    f"{file}: the set {name}, fills: {field} is to be filled, and {lacking} asks for it."
                )
            if fields[field] != type_of[field]:
                raise SettingsError(
                    f"{file}: the set {name}, fills: {field} is of the type {fields[field]}, and of"
                    f" {type_of[field]} in the set {set_of[field]}: give both the same."
                )
        if double := next((field for field in fields if field in set_of and field not in asked.fills), None):
            raise SettingsError(
                f"{file}: the set {name} has the field {double}, and so has the set {set_of[double]}: two"
                " answers under one name would be mixed up. Rename it in the schema of one of them; or, where"
                f" {name} gives the better answer, write `fills: [{double}]`."
            )
        set_of = {**dict.fromkeys(fields, name), **set_of}
        type_of = {**fields, **type_of}
        try:
            where_of(file, name, settings.description_schema)
        except (ValueError, SchemaError) as error:
            raise SettingsError(f"{file}: the set {name}, where: {error}.") from error


def _refuse_unused_server_settings(settings: Settings) -> None:
    of_address = [name for name in ("server_key", "server_model") if getattr(settings, name) is not None]
    unused: list[str] = []
    of_images = {"image_tokens": None, "processor_options": "{}"}
    costs = [name for name, default in of_images.items() if getattr(settings, name) != default]
    command = settings.server_command
    if settings.engine == "transformers":
        of_server = ("server_url", "server_command")
        unused = [name for name in of_server if getattr(settings, name) is not None] + of_address
        unused += ["devices_per_model"] * (settings.devices_per_model > 1)
        why = f"is for the engine 'server', and {PREFIX}ENGINE is {settings.engine!r}"
    elif costs and settings.server_url is not None:
        unused = costs
        why = (
            "decides how a server is started, and the one at SERVER_URL runs already: its operator tells it"
            f" (vLLM: --mm-processor-kwargs), and it gets images of {PREFIX}MAX_PIXELS"
        )
    elif costs and command is not None and "{processor_options}" not in command:
        unused = costs
        why = (
            f"must reach the server, and {PREFIX}SERVER_COMMAND has no {{processor_options}}: add"
            " `--mm-processor-kwargs {processor_options} --max-model-len {context}` to it (vLLM)"
        )
    elif settings.devices_per_model > 1 and (
        settings.server_url is not None or (command is not None and "{devices}" not in command)
    ):
        unused = ["devices_per_model"]
        why = (
            f"decides how a server is started: {PREFIX}SERVER_COMMAND must pass it on (vLLM:"
            " `--tensor-parallel-size {devices}`), and the operator of one that runs already has decided it"
        )
    elif settings.server_url is None:
        unused = of_address
        why = f"is for a server that runs already, and {PREFIX}SERVER_URL is not set"
    elif command is not None:
        unused = ["server_command"]
        why = f"starts a server, and {PREFIX}SERVER_URL names one that runs already"
    if unused:
        raise SettingsError(f"{PREFIX}{unused[0].upper()} {why}; unset one of them.")


@cache
def current_settings() -> Settings:
    """The settings of this process, read once."""
    return load_settings()
