"""Objects read at a sixth of boto3's cost: images, hundreds a second, in the process that feeds the model.

What lives here: the quick way. What does not: errors, repeats and checksums. What the quick way does not get,
or cannot prove, is read the ordinary way (``S3Folder.get``), which says what is wrong.
"""

from __future__ import annotations

import hashlib
from datetime import timedelta
from functools import cache
from typing import Any, Final

from resources.store.bucket import CONNECT_SECONDS, S3Folder, client, endpoint

MOST_DOUBTS: Final = 20
"""Objects in a row that only the ordinary way got: from then on it is the only way. In such a bucket an ETag
is no MD5 (KMS keys, parts), or the store wants what only boto3 knows (a proxy, a certificate, a redirect)."""

_SECONDS: Final = 10.0
_CREDENTIALS_SECONDS: Final = 300.0
"""botocore hands out none that expire sooner."""


def get_quickly(folder: S3Folder, name: str, *, most: int) -> bytes:
    """The bytes of an object, verified. Raises what ``S3Folder.get`` does."""
    quick = _quick_bucket(client(), folder.bucket)
    content = quick.get(folder.prefix + name, most)
    if content is None:
        content = folder.get(name, most=most)
        quick.doubts += 1
    else:
        quick.doubts = 0
    return content


class _QuickBucket:
    """A bucket by obstore. doubts: objects in a row that it did not get, and that were there."""

    def __init__(self, bucket: str) -> None:
        self.doubts = 0
        self._bucket = bucket
        self._store = self._opened()

    def get(self, key: str, most: int) -> bytes | None:
        """The bytes, where their MD5 is the object's ETag; None for whatever else there may be."""
        if self._store is None or self.doubts >= MOST_DOUBTS:
            return None
        try:
            answer = self._store.get(key)
            if answer.meta["size"] > most:
                return None
            content = bytes(answer.bytes())
            etag = str(answer.meta["e_tag"]).strip('"')
        except Exception:
            return None  # The ordinary way says what it is.
        return content if hashlib.md5(content, usedforsecurity=False).hexdigest() == etag else None

    def _opened(self) -> Any:
        import boto3
        from obstore.auth.boto3 import Boto3CredentialProvider
        from obstore.exceptions import BaseError
        from obstore.store import S3Store

        session, at = boto3.session.Session(), endpoint()
        try:
            return S3Store(
                self._bucket,
                endpoint=at,
                region=session.region_name or "us-east-1",
                credential_provider=Boto3CredentialProvider(
                    session, ttl=timedelta(seconds=_CREDENTIALS_SECONDS)
                ),
                client_options={
                    "allow_http": (at or "").startswith("http://"),
                    "connect_timeout": timedelta(seconds=CONNECT_SECONDS),
                    "timeout": timedelta(seconds=_SECONDS),
                },
                retry_config={"max_retries": 0},
            )
        except (ValueError, BaseError):
            return None  # No credentials, or an address that only boto3 takes.


@cache
def _quick_bucket(client: Any, bucket: str) -> _QuickBucket:
    # One for each client: a new one was made because the environment is another one.
    return _QuickBucket(bucket)
