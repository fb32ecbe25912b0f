"""The program of a rank: ``python -P -m vlm_training.rank FOLDER …``, started by ``rank_processes``.

Here are its arguments, signals, events and exit codes. The training is in ``loop.py``. The program dies with
the process that started it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from vlm_durable.files.files import DurableWriteError
from vlm_durable.files.processes import die_with
from vlm_durable.files.sealed_json import FormatVersionError
from vlm_durable.mirror.bucket import StoreAwayError
from vlm_engine.protocol import EngineError

STOPPED: Final = 75
"""Exit code: it was asked to stop, and its checkpoint is written."""
PEER_LOST: Final = 76
"""Exit code: another rank is gone; the last finished step is written."""
REFUSED: Final = 77
"""Exit code: a new start would end in the same way; its last event says why."""
STORE_AWAY: Final = 78
"""Exit code: the store of the images is down; its last line of text says so."""

PLAN = "plan.json"
LOST_SECONDS: Final = 600.0


def main() -> None:
    """Train, and end with a code that says how."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    for name in ("export", "history", "quarantine", "meeting"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    for name in ("rank", "world", "events", "parent"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    arguments = parser.parse_args()
    die_with(arguments.parent)
    stop_signals: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: stop_signals.append(number))
    events = os.fdopen(arguments.events, "w", encoding="utf-8", buffering=1)

    def say(event: str, values: Mapping[str, Any]) -> None:
        # While the run is being ended, nobody reads events, and the checkpoint must still be written.
        with contextlib.suppress(BrokenPipeError):
            events.write(json.dumps({"event": event, **values}) + "\n")

    from vlm_training.loop import Training, TrainingStoppedError
    from vlm_training.order import OrderChangedError
    from vlm_training.ranks import Ranks, RanksLostError
    from vlm_training.training_plan import TrainingError, TrainingPlan

    code = 0
    try:
        plan = TrainingPlan.read(arguments.folder / PLAN)
        ranks = Ranks.join(arguments.rank, arguments.world, arguments.meeting, seconds=LOST_SECONDS)
        Training(
            plan,
            arguments.folder,
            arguments.quarantine,
            ranks,
            device=arguments.device,
            history=arguments.history,
            say=say,
            stopping=lambda: bool(stop_signals),
        ).run(arguments.export)
    except TrainingStoppedError:
        code = STOPPED
    except RanksLostError:
        code = PEER_LOST
    except StoreAwayError as error:
        sys.stderr.write(f"{error}\n")
        code = STORE_AWAY
    except (TrainingError, EngineError, OrderChangedError, DurableWriteError, FormatVersionError) as error:
        say("refused", {"message": str(error)})
        code = REFUSED
    except Exception:
        traceback.print_exc()
        code = 1
    with contextlib.suppress(BrokenPipeError):
        events.close()
    sys.stdout.flush()
    sys.stderr.flush()
    # A normal exit would wait for the loader's processes and gloo's threads, which complain at each other's
    # end.
    os._exit(code)


if __name__ == "__main__":
    main()
