"""The pool of decode workers after its end."""

import os

from resources.images.decode_pool import DecodePool


def test_a_pool_that_has_ended_writes_into_nobodys_file(tmp_path):
    """Guards: descriptors are numbers that are used again: a late wake-up must not land in a segment."""
    pool = DecodePool(workers=1, max_pixels=100, image_seconds=60)
    pool.close()
    files = [os.open(tmp_path / str(number), os.O_CREAT | os.O_WRONLY) for number in range(32)]
    pool.submit([])
    for descriptor in files:
        assert os.fstat(descriptor).st_size == 0
        os.close(descriptor)
