"""Makes Dagster's daemon look for backfills every two seconds instead of every 30 s.

Python imports this at the start of each process that has this folder in PYTHONPATH.
"""

import sys

if any(word.endswith("dagster-daemon") for word in sys.orig_argv):
    from dagster._daemon import controller

    controller.DEFAULT_DAEMON_INTERVAL_SECONDS = 2
