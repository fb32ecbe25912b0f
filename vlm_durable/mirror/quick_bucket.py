"""Reading many objects of a store, hundreds a second, at a sixth of what ``S3Folder.get`` costs.

It is done with obstore. An object that obstore does not get, or that cannot be verified, is read by
``S3Folder.get``, which names the fault. Why there are two clients: docs/decisions/11-two-s3-clients.md.
"""

from __future__ import annotations

import hashlib
import logging
from datetime import timedelta
from functools import cache
from typing import Any, Final

from vlm_durable.mirror.bucket import CONNECT_SECONDS, S3Folder, client, endpoint, session

MOST_DOUBTS: Final = 20
"""The quick way is given up after so many objects in a row that only the ordinary way got. In such a bucket
an ETag is no MD5 (KMS keys, parts), or the store needs settings that only boto3 has (a proxy, a certificate,
a redirect)."""

_SECONDS: Final = 10.0
_CREDENTIALS_SECONDS: Final = 300.0
"""botocore returns no credentials that expire sooner."""

_log = logging.getLogger(__name__)


def get_quickly(folder: S3Folder, name: str, *, most: int) -> bytes:
    """The bytes of an object, verified. Raises the errors of ``S3Folder.get``."""
    quick = _quick_bucket(client(), folder.bucket)
    content = quick.get(folder.prefix + name, most=most)
    if content is None:
        content = folder.get(name, most=most)
        quick.doubt(folder.address(name))
    else:
        quick.doubts = 0
    return content


class _QuickBucket:
    """A bucket by obstore. doubts: objects in a row that it did not get, and that boto3 got."""

    def __init__(self, bucket: str) -> None:
        self.doubts = 0
        self._why = ""
        self._bucket = bucket
        self._store = self._opened()

    def get(self, key: str, *, most: int) -> bytes | None:
        """The bytes, where their MD5 is the object's ETag; else None."""
        if self._store is None or self.doubts >= MOST_DOUBTS:
            return None
        try:
            answer = self._store.get(key)
            if answer.meta["size"] > most:
                return None
            content = bytes(answer.bytes())
            etag = str(answer.meta["e_tag"]).strip('"')
        except Exception as error:  # Whatever it is: the ordinary way names the object's fault.
            # Its text may quote a session's token.
            self._why = type(error).__name__
            return None
        if hashlib.md5(content, usedforsecurity=False).hexdigest() != etag:
            self._why = "its ETag is not its MD5"
            return None
        return content

    def doubt(self, address: str) -> None:
        """Count an object that boto3 got after all; log once that this way is given up."""
        self.doubts += 1
        if self.doubts == MOST_DOUBTS:
            _log.warning("S3 images are read by boto3 alone from now on, slower: %s: %s", address, self._why)

    def _opened(self) -> Any:
        from obstore.auth.boto3 import Boto3CredentialProvider
        from obstore.exceptions import BaseError
        from obstore.store import S3Store

        address, environment = endpoint(), session()
        try:
            return S3Store(
                self._bucket,
                endpoint=address,
                region=environment.region_name or "us-east-1",
                credential_provider=Boto3CredentialProvider(
                    environment, ttl=timedelta(seconds=_CREDENTIALS_SECONDS)
                ),
                client_options={
                    "allow_http": (address or "").startswith("http://"),
                    "connect_timeout": timedelta(seconds=CONNECT_SECONDS),
                    "timeout": timedelta(seconds=_SECONDS),
                },
                retry_config={"max_retries": 0},
            )
        except (ValueError, BaseError) as error:  # No credentials, or an address that only boto3 accepts.
            self._why = type(error).__name__
            return None


@cache
def _quick_bucket(client: Any, bucket: str) -> _QuickBucket:
    # One for each client: a new client means that the environment has changed.
    return _QuickBucket(bucket)
