"""``make faults``: the fault campaign. ``python -m faults --help`` lists what can be asked of it."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path

from faults.ledger import PromiseBrokenError
from faults.parts import PARTS, part_named
from faults.results import Results
from faults.runner import places, run, run_case
from faults.storage import examine

SEED = 20240229
CHECKOUT = Path(__file__).resolve().parent.parent


def main(arguments: list[str]) -> int:
    """0: every promise held (or the storage can be trusted). 1: one was broken (or it cannot).

    1 too where the whole campaign was run and a branch of recovery was never reached.
    """
    options = _parser().parse_args(arguments)
    if options.home_dir is not None:
        verdict = examine(options.home_dir, seconds=60.0 * options.minutes if options.minutes else 20.0)
        print(verdict.sentences())
        return 0 if verdict.trusted else 1
    print(f"seed {options.seed} (--seed {options.seed} runs the same cases again)")
    if options.replay is not None:
        return _replay(options.replay, options.seed, options.directory)
    chosen = tuple(map(part_named, options.only)) if options.only else PARTS
    results = Results.load(options.results, options.seed)
    # A stop by the system is one like Ctrl-C: file systems are unmounted, counts kept.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        run(
            results,
            chosen,
            directory=options.directory,
            seconds=60.0 * options.minutes if options.minutes else None,
            scale=options.scale,
        )
    except KeyboardInterrupt:
        print("Stopped. The same command goes on from here.")
    results.save()
    print(results.table())
    print(f"As JSON: {os.path.relpath(options.results)}")
    never = bool(results.never_reached) and results.is_full(options.scale)
    if never:
        print(
            "The whole campaign was run, and some branches of recovery were never reached: a case is missing."
        )
    return 1 if results.failures or never else 0


def _replay(case: str, seed: int, directory: Path | None) -> int:
    name, _, number = case.rpartition(":")
    part = part_named(name)
    with places(directory) as where:
        try:
            print(f"held: {dict(run_case(part, int(number), seed, where.place_for(part)))}")
        except PromiseBrokenError as broken:
            print(f"BROKEN: {broken}")
            return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="make faults", description=__doc__)
    add = parser.add_argument
    add("--home-dir", type=Path, help="say whether this directory's storage can be trusted, and nothing else")
    add("--minutes", type=float, help="stop after so many; the next call goes on (default: run to the end)")
    add("--seed", type=int, default=int(os.environ.get("FAULTS_SEED", SEED)), help="seed of all cases")
    add("--only", nargs="+", metavar="PART", help=f"of {', '.join(part.name for part in PARTS)}")
    add("--scale", type=float, default=1.0, help="share of each part's target to run")
    add("--directory", type=Path, help="where to run (default: memory; power cuts mount images there)")
    add("--replay", metavar="PART:CASE", help="run one case again")
    add("--results", type=Path, default=CHECKOUT / "data" / "faults" / "results.json", help="results file")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
