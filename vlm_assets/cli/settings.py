"""``vlm-assets settings``: every setting, its value and what it means."""

from __future__ import annotations

from vlm_assets.cli.options import AsJson, app, chosen_settings, say_as_json
from vlm_assets.operate.terminal import say
from vlm_assets.settings import PREFIX

_EXAMPLES = """\b
vlm-assets settings
vlm-assets settings --json"""


@app.command(epilog=_EXAMPLES)
def settings(as_json: AsJson = False) -> None:
    """List every setting, its value and what it means. Settings that you have set are bold.

    Secrets are never shown. A setting is set in the environment or in .env.
    """
    current = chosen_settings()
    listed = {}
    for name, field in type(current).model_fields.items():
        value = getattr(current, name)
        plain = value if isinstance(value, bool | int | float | None) else str(value)
        is_set = name in current.model_fields_set
        listed[f"{PREFIX}{name.upper()}"] = {"value": plain, "set": is_set, "meaning": field.description}
    if as_json:
        say_as_json(listed)
        return
    for name, told in listed.items():
        # Whole names and values, however narrow the terminal: they are copied and searched for.
        say(f"{name}={'' if told['value'] is None else told['value']}", bold=told["set"])
        say(f"    {told['meaning']}")
