"""The command ``questions``: shows the question sets, and adds one."""

from __future__ import annotations

from typing import Annotated

import typer

from vlm_assets.commands.terminal import AsJson, Home, app, chosen_settings, say, say_as_json
from vlm_assets.config.question_sets import question_sets
from vlm_assets.config.settings import ENV_FILE
from vlm_assets.services.further_questions import add_questions, lines_to_set
from vlm_durable.commands import command
from vlm_engine.schema import load_schema

_EXAMPLES = """\b
vlm-assets questions                  the sets, and what each asks for
vlm-assets questions --json           the same as JSON"""

_ADD_EXAMPLES = """\b
vlm-assets questions add access                               ask for the new fields of your schema alone
vlm-assets questions add access --schema my_schema:Access     ask for the fields of another class"""

questions = typer.Typer(
    help="Show what is asked of each property; ask one more question.",
    epilog=_EXAMPLES,
    invoke_without_command=True,
)
app.add_typer(questions, name="questions")


@questions.callback()
def questions_command(context: typer.Context, home: Home = None, as_json: AsJson = False) -> None:
    """Show what is asked of each property; ask one more question.

    Each set of fields has an asset of its own; `add` writes another into the questions file.
    """
    if context.invoked_subcommand is not None:
        return
    sets = {
        asked: list(load_schema(asked.settings.description_schema).json_schema["properties"])
        for asked in question_sets(chosen_settings(home))
    }
    if as_json:
        say_as_json({asked.asset.name: fields for asked, fields in sets.items()})
        return
    for asked, fields in sets.items():
        say(f"{asked.asset.name}: {', '.join(fields)}")
        if asked.settings.where is not None:
            say(f"  asked where {asked.settings.where.text}")
        if asked.fills:
            say(f"  gives the better answer of {', '.join(asked.fills)}")


@questions.command("add", epilog=_ADD_EXAMPLES)
def add_command(
    name: Annotated[str, typer.Argument(help="Of the set; its asset is property_NAME.")],
    home: Home = None,
    schema: Annotated[
        str | None,
        typer.Option(
            help="Its fields: module:Class, or module:Class[field,field]. Default: the fields that the"
            " descriptions' schema has and the published rows have not."
        ),
    ] = None,
    prompt: Annotated[str | None, typer.Option(help="Text of the question; default: of the schema.")] = None,
    model: Annotated[str | None, typer.Option(help="Another model; default: that of the home.")] = None,
) -> None:
    """Write one more question set into the questions file. No published row is touched."""
    added = add_questions(chosen_settings(home), name, schema=schema, prompt=prompt, model=model)
    say(
        f"The set {name} is in {added.file}; its asset is {added.asset}. It asks for:"
        f" {', '.join(added.fields)}."
    )
    if lines := lines_to_set(added.unset):
        say(f"Set this in {ENV_FILE}, in place of what it has under these names:")
        for line in lines:
            say(f"  {line}")
    say(f"Then {command('run')} asks it of every partition, and leaves all other answers as they are.")
    say(f"What that takes: {command('plan', '--set', name)} measures and says it.")
