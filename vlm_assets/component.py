"""A component: with a few lines of defs.yaml, a Dagster project has descriptions of its images, never lost.

Settings come from the file alone. Every process reads it: a run loads the definitions as the pages do.
"""

# No postponed annotations here: Dagster reads the fields of a component from their real ones.

import re
from pathlib import Path
from typing import Annotated, Any

import dagster as dg
from pydantic import BaseModel, Field

from vlm_assets.config.component_settings import keep_settings
from vlm_assets.config.settings import Settings, SettingsError, given_settings
from vlm_assets.home_definitions import build_defs, check_dagster_home, claim_control_state
from vlm_durable.mirror.bucket import S3Folder, place_of

DATA = "data"
"""Folder of a project that holds the homes of its components and the locks of their devices."""

DEVICES = ".devices"


class ScaffoldParams(BaseModel):
    """What ``dg scaffold defs`` takes for a new defs.yaml."""

    images: str = Field("images", description="Folder of ID/*.jpg, or a CSV, JSONL or parquet listing.")
    model: str = Field("HuggingFaceTB/SmolVLM-500M-Instruct", description="Folder or hub id of the model.")
    range_size: int = Field(1000, description="Properties a partition.")


class PropertyDescriptionsScaffolder(dg.Scaffolder[ScaffoldParams]):
    """Writes a defs.yaml that is complete but for your own images and model."""

    @classmethod
    def get_scaffold_params(cls) -> type[ScaffoldParams]:
        """The options of the command."""
        return ScaffoldParams

    def scaffold(self, request: dg.ScaffoldRequest[ScaffoldParams]) -> None:
        """Write the file."""
        dg.scaffold_component(request, (request.params or ScaffoldParams()).model_dump())


@dg.scaffold_with(PropertyDescriptionsScaffolder)
class PropertyDescriptionsComponent(dg.Component, dg.Model, dg.Resolvable):
    """One structured description a property, made from its images by a vision-language model, never lost.

    Brings the assets property_catalog, property_descriptions, property_embeddings, dataset_progress,
    dataset_audit and dataset_plan, with their checks, sensors and schedule. Relative paths begin in the
    project's folder.
    """

    images: str = Field(
        description="Folder tree ID/*.jpg, or a CSV, JSONL or parquet listing, here or at s3://BUCKET/PREFIX."
    )
    # Not `model`, as in the file: a method of Resolvable has that name. Resolver.default would drop it.
    describing_model: Annotated[str, dg.Resolver(lambda _, text: text, model_field_name="model")] = Field(
        description="Vision-language model: a folder, or a hub id as OWNER/NAME@REVISION."
    )
    description_schema: str | None = Field(
        None, description="Your pydantic model as module:Class. It becomes prompt, grammar and columns."
    )
    embedding_model: str | None = Field(
        None, description="Text-embedding model: a folder or a hub id. Default: nothing is embedded."
    )
    range_size: int | None = Field(None, description="Properties a partition: minutes to hours of work.")
    home: str | None = Field(
        None, description="Folder that holds the catalogue and all output. Default: data/NAME_PREFIX."
    )
    name_prefix: str | None = Field(
        None, description="What all names in Dagster begin with. Default: the name of the component's folder."
    )
    settings: dict[str, Any] = Field(
        default_factory=dict, description="Any other setting by its name in small letters."
    )

    def build_defs(self, context: dg.ComponentLoadContext) -> dg.Definitions:
        """All definitions of the home. Raises SettingsError, which names every field that is wrong."""
        settings = self.to_settings(context.project_root, name=context.path.stem)
        settings.name_in_commands()
        keep_settings(settings, context.project_root)
        check_dagster_home(settings)
        claim_control_state(settings)
        return build_defs(settings)

    def to_settings(self, project: Path, *, name: str) -> Settings:
        """The settings of these fields. project: the project's folder; name: of the component's.

        Raises SettingsError.
        """
        prefix = self.name_prefix or re.sub(r"\W", "_", name)
        fields = {
            "source": _below(project, self.images),
            "model": _folder_below(project, self.describing_model),
            "embedding_model": _folder_below(project, self.embedding_model),
            "description_schema": self.description_schema,
            "range_size": self.range_size,
        }
        twice = sorted({"home", "name_prefix", *fields} & self.settings.keys())
        if twice:
            raise SettingsError(
                f"{', '.join(twice)}: no entry of `settings`. Write it beside `images` in the defs.yaml"
                " (`source` is `images` there)."
            )
        return given_settings(
            **{
                "devices_folder": project / DATA / DEVICES,
                **self.settings,
                **{field: value for field, value in fields.items() if value is not None},
                "home": _below(project, self.home or f"{DATA}/{prefix}"),
                "name_prefix": prefix,
            }
        )


def _below(project: Path, text: str) -> Path | S3Folder:
    place = place_of(text)
    return project / place.expanduser() if isinstance(place, Path) else place


def _folder_below(project: Path, model: str | None) -> str | None:
    """A model's folder in the project; whatever is none there is a hub id, or a folder elsewhere."""
    return str(project / model) if model and (project / model).is_dir() else model
