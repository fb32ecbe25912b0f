"""Objects read at a sixth of boto3's cost: images, hundreds a second, in the process that feeds the model.

What lives here: the quick way. What does not: errors, repeats and checksums. What the quick way does not get,
or cannot prove, is read the ordinary way (``S3Folder.get``), which says what is wrong.
"""

from __future__ import annotations

import hashlib
import logging
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

_log = logging.getLogger(__name__)


def get_quickly(folder: S3Folder, name: str, *, most: int) -> bytes:
    """The bytes of an object, verified. Raises what ``S3Folder.get`` does."""
    quick = _quick_bucket(client(), folder.bucket)
    content = quick.get(folder.prefix + name, most)
    if content is None:
        content = folder.get(name, most=most)
        quick.doubt(folder.address(name))
    else:
        quick.doubts = 0
    return content


class _QuickBucket:
    """A bucket by obstore. doubts: objects in a row that it did not get, and that were there."""

    def __init__(self, bucket: str) -> None:
        self.doubts = 0
        self._why = ""
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
        except Exception as error:  # whatever it is: the ordinary way says what is wrong with the object
            # Its text may quote a session's token.
            self._why = type(error).__name__
            return None
        if hashlib.md5(content, usedforsecurity=False).hexdigest() != etag:
            self._why = "its ETag is not its MD5"
            return None
        return content

    def doubt(self, where: str) -> None:
        """Count an object that was there after all; say once that this way is given up."""
        self.doubts += 1
        if self.doubts == MOST_DOUBTS:
            _log.warning("S3 images are read by boto3 alone from now on, slower: %s: %s", where, self._why)

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
        except (ValueError, BaseError) as error:  # no credentials, or an address that only boto3 takes
            self._why = type(error).__name__
            return None


@cache
def _quick_bucket(client: Any, bucket: str) -> _QuickBucket:
    # One for each client: a new one was made because the environment is another one.
    return _QuickBucket(bucket)
