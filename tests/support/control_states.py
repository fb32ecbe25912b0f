"""What tests of the control state in both databases share."""

import threading
from concurrent.futures import ThreadPoolExecutor

import sqlalchemy as sa

from vlm_durable.state import tables

THREADS, ROUNDS = 8, 12


def count_by_threads(opened):
    """Count on one row with many threads, which all begin at once; gives what it counted to.

    More of them than sensors of a daemon, each opens it, beats, reads and copies as they do.
    """
    begin = threading.Barrier(THREADS)

    def work(number):
        begin.wait()
        for _ in range(ROUNDS):
            state = opened()
            state.write(count, copy=number == 0)
            state.beat(lambda connection: connection.execute(tables.workers.delete()))
            state.read_beats(lambda connection: connection.execute(sa.select(tables.workers)).all())
            state.copy_if_due()

    def count(connection):
        at = connection.execute(sa.select(tables.pause.c.since)).scalar()
        connection.execute(tables.pause.delete())
        connection.execute(tables.pause.insert().values(id=1, since=(at or 0) + 1, reason="because"))

    with ThreadPoolExecutor(THREADS) as pool:
        for done in [pool.submit(work, number) for number in range(THREADS)]:
            done.result(60)
    return opened().read(lambda connection: connection.execute(sa.select(tables.pause.c.since)).scalar())


def with_version(version):
    """What has a control state name another version of its schema."""
    row = tables.meta.update().where(tables.meta.c.name == "version").values(value=str(version))
    return lambda connection: connection.execute(row)
