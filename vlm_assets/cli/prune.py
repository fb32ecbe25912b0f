"""``vlm-assets prune``: what takes space and is needed no more goes, after a question."""

from __future__ import annotations

from vlm_assets.cli.options import AsJson, Home, Yes, agreed, app, chosen_settings, say_as_json, say_list
from vlm_assets.operate.terminal import say

_EXAMPLES = """\b
vlm-assets prune            list it, then ask
vlm-assets prune --yes      remove it
vlm-assets prune --json     list it as JSON; nothing is removed without --yes"""


@app.command(epilog=_EXAMPLES)
def prune(home: Home = None, yes: Yes = False, as_json: AsJson = False) -> None:
    """List what takes space and is needed no more; then, if you say so, remove it.

    Earlier versions, journals that a publication superseded, quarantined files, abandoned temporaries.
    Only where the published file and its second copy are whole to the byte.
    """
    from vlm_assets.catalog.catalog import Catalog
    from vlm_assets.operate.prune import by_kind, plan_prune, remove

    current = chosen_settings(home)
    plan = plan_prune(current, Catalog.open(current.home))
    if as_json:
        said = list(remove(current, plan.removals)) if yes else []
        removals = [
            {"asset": one.asset, "what": one.what, "path": one.path, "bytes": one.bytes, "why": one.why}
            for one in plan.removals
        ]
        say_as_json({"removals": removals, "kept": plan.kept, "bytes": plan.bytes, "done": yes, "said": said})
        return
    say_list(plan.kept, "yellow")
    if not plan.removals:
        say("Nothing to prune.")
        return
    say_list([f"{one.what.value}: {one.path} ({one.bytes:,} bytes; {one.why})" for one in plan.removals])
    for what, (count, size) in by_kind(plan.removals).items():
        if count:
            say(f"{count} x {what.value}: {size / 1e6:,.1f} MB")
    if agreed(f"Remove these for good ({plan.bytes / 1e6:,.1f} MB)?", yes):
        for sentence in remove(current, plan.removals):
            say(sentence)
