"""A folder of an S3 bucket: reading, listing and conditional puts, with an exception for each kind of error.

Credentials, region and endpoint come from the standard AWS environment alone (``AWS_ACCESS_KEY_ID``,
``AWS_ENDPOINT_URL`` …, or a role). Requests, and bodies that are cut short, are retried here: botocore's own
retries end within a second.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
import re
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import cache, partial
from pathlib import Path
from typing import Any, ClassVar, Final, Self, TypeVar

T = TypeVar("T")

PATIENCE_SECONDS = 30.0
"""How long a request is retried while the store is down; the last try may take its timeout longer."""

CONNECT_SECONDS: Final = 5.0
SILENCE_SECONDS: Final = 20.0
"""A store that sends nothing for so long counts as down."""

_ONE_OBJECT_SECONDS = 3.0
"""How long a single object is retried, before the store itself is probed."""

_FIRST_PAUSE, _LONGEST_PAUSE = 0.2, 5.0

CONNECTIONS: Final = 32

_DAMAGED_ATTEMPTS: Final = 3
_ADDRESS = re.compile(r"s3://(?P<bucket>[a-z0-9][a-z0-9.-]{1,61}[a-z0-9])(?:/(?P<prefix>.*))?", re.DOTALL)
_MISSING = frozenset({"NoSuchKey", "404"})
_CHANGED = frozenset({"PreconditionFailed", "412", "ConditionalRequestConflict"})
_WRONG_BYTES = frozenset({"BadDigest", "XAmzContentChecksumMismatch", "InvalidDigest"})
_THROTTLED = frozenset({"SlowDown", "Throttling", "ThrottlingException", "RequestTimeout"})
_DENIED = frozenset({"AccessDenied", "AllAccessDisabled", "InvalidObjectState"})


class StoreError(Exception):
    """The store did not do what it was asked."""


class StoreAwayError(StoreError):
    """The store is down, throttles, or refuses these credentials: an outage, and not an object's fault."""


class _MayPassError(StoreAwayError):
    """An outage that may be over soon: no answer, throttling, or an error of the server itself."""


class NoObjectError(StoreError):
    """There is no object of this name."""


class ObjectDeniedError(StoreError):
    """These credentials may not read this object, or it is archived."""


class ObjectTooLargeError(StoreError):
    """The object has more bytes than the caller accepts."""


class ObjectDamagedError(StoreError):
    """The object's bytes do not fit its checksum."""


class TakenError(StoreError):
    """Another writer put, replaced or removed the object since it was read. Nothing was changed."""


class UnfitStoreError(StoreError):
    """The store ignores conditions or checksums on which the order of writers depends."""


class BadAddressError(ValueError):
    """A text is no address of the form s3://BUCKET/PREFIX."""


@dataclass(frozen=True)
class StoredObject:
    """An object, from the answer to a HEAD. sha256: in hex; None where it was put without a checksum."""

    size: int
    etag: str
    sha256: str | None
    modified: datetime = field(compare=False)
    """The time of the last change, by the store's clock."""


@dataclass(frozen=True)
class ListedObject:
    """An object, from a listing. modified: by the store's clock."""

    name: str
    size: int
    modified: datetime
    etag: str

    @property
    def signature(self) -> str:
        """A text that changes when the object is put again."""
        return f"{self.etag} {self.size} {self.modified.timestamp():.3f}"


@dataclass(frozen=True)
class S3Folder:
    """All objects below ``s3://bucket/prefix``. prefix: empty, or ends with a slash."""

    keeps_copies: ClassVar[bool] = True
    """See NoMirror."""

    bucket: str
    prefix: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """The folder of an address. Raises BadAddressError."""
        match = _ADDRESS.fullmatch(text)
        prefix = (match["prefix"] or "").strip("/") if match else ""
        if match is None or any(part in ("", ".", "..") for part in prefix.split("/") if prefix):
            raise BadAddressError(f"{text} is no address of the form s3://BUCKET/PREFIX")
        return cls(match["bucket"], f"{prefix}/" if prefix else "")

    def __str__(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}".rstrip("/")

    @property
    def name(self) -> str:
        """Its last part."""
        return self.prefix.rstrip("/").rpartition("/")[2] or self.bucket

    def address(self, name: str) -> str:
        """The full address of an object in it."""
        return f"s3://{self.bucket}/{self.prefix}{name}"

    def uri_of(self, path: Path, home: Path) -> str:
        """The address at which others read a file of a home that is copied here."""
        return self.address(str(path.relative_to(home)))

    def below(self, name: str) -> S3Folder:
        """The folder of this name in it."""
        return S3Folder(self.bucket, f"{self.prefix}{name}/")

    def get(self, name: str, *, most: int, patience: float | None = None) -> bytes:
        """The bytes of an object, their length and checksum verified.

        patience: seconds for which the request is retried; PATIENCE_SECONDS unless given.

        Raises NoObjectError, ObjectDeniedError, ObjectTooLargeError, ObjectDamagedError, StoreAwayError.
        """
        where = self.address(name)

        def read() -> bytes:
            answer = client().get_object(Bucket=self.bucket, Key=self.prefix + name)
            with closing(answer["Body"]) as body:
                if answer["ContentLength"] > most:
                    raise ObjectTooLargeError(
                        f"{where} is {answer['ContentLength']:,} bytes; more than {most:,} is not fetched"
                    )
                data: bytes = body.read()
                return data

        for _ in range(_DAMAGED_ATTEMPTS - 1):
            with contextlib.suppress(ObjectDamagedError):
                return _retried(where, read, patience=patience)
        return _retried(where, read, patience=patience)

    def get_whole(self, name: str, sha256: str, *, most: int) -> bytes:
        """The bytes of an object, which must have this digest.

        A store whose disk lost some bytes answers with an error of its own. So an object also counts as
        damaged if it cannot be read while the store can write and read another object. Raises as ``get``.
        """
        try:
            content = self.get(name, most=most, patience=_ONE_OBJECT_SECONDS)
        except StoreAwayError as error:
            _prove(self)
            raise ObjectDamagedError(
                f"{self.address(name)} cannot be read, though the store answers: {error}"
            ) from error
        if hashlib.sha256(content).hexdigest() != sha256:
            raise ObjectDamagedError(f"{self.address(name)} holds other bytes than were put there")
        return content

    def peek(self, name: str, count: int = 1) -> tuple[bytes, int]:
        """The first ``count`` bytes of an object, and its size. Raises as ``get`` does.

        A GET, not a HEAD: an answer to HEAD has no body that says why it was refused.
        """

        from botocore.exceptions import ClientError

        def read() -> tuple[bytes, int]:
            try:
                answer = client().get_object(
                    Bucket=self.bucket, Key=self.prefix + name, Range=f"bytes=0-{count - 1}"
                )
            except ClientError as error:
                if error.response["Error"]["Code"] == "InvalidRange":
                    return b"", 0
                raise
            with closing(answer["Body"]) as body:
                size = answer.get("ContentRange", "").rpartition("/")[2]
                return body.read(), int(size or answer["ContentLength"])

        return _retried(self.address(name), read)

    def head(self, name: str) -> StoredObject | None:
        """The object of a name; None where there is none. Raises ObjectDeniedError, StoreAwayError."""
        try:
            answer = _retried(
                self.address(name),
                lambda: client().head_object(
                    Bucket=self.bucket, Key=self.prefix + name, ChecksumMode="ENABLED"
                ),
            )
        except NoObjectError:
            return None
        checksum = answer.get("ChecksumSHA256")
        sha256 = base64.b64decode(checksum).hex() if checksum and "-" not in checksum else None
        return StoredObject(answer["ContentLength"], answer["ETag"], sha256, answer["LastModified"])

    def put(self, name: str, content: bytes, *, over: StoredObject | None) -> StoredObject:
        """Put an object in place of ``over``; None: the name must be free. The store checks the SHA-256.

        The put is read back by a HEAD, so a retry after a lost reply finds its own success. Raises
        TakenError, ObjectDamagedError, ObjectDeniedError, StoreAwayError.
        """
        where, digest = self.address(name), hashlib.sha256(content)
        condition = {"IfNoneMatch": "*"} if over is None else {"IfMatch": over.etag}
        taken_error = etag = None
        try:
            etag = _retried(
                where,
                lambda: client().put_object(
                    Bucket=self.bucket,
                    Key=self.prefix + name,
                    Body=content,
                    ChecksumSHA256=base64.b64encode(digest.digest()).decode(),
                    **condition,
                ),
            )["ETag"]
        except TakenError as error:
            taken_error = error
        stored = self.head(name)
        if stored is not None and stored.sha256 == digest.hexdigest() and stored.size == len(content):
            return stored
        if taken_error is not None:
            raise taken_error
        if stored is None or stored.etag != etag:
            raise TakenError(f"{where} was replaced or removed by another writer as soon as it was put")
        raise ObjectDamagedError(f"{where} does not hold the bytes that were put there; look at the store")

    def delete(self, name: str) -> None:
        """Remove an object, whether it exists or not. Raises ObjectDeniedError, StoreAwayError."""
        _retried(
            self.address(name),
            lambda: client().delete_object(Bucket=self.bucket, Key=self.prefix + name),
        )

    def prove(self) -> None:
        """Probe, once a process, that the store honours conditions and checksums and lists a put at once.

        Raises UnfitStoreError, which says what is missing, ObjectDeniedError and StoreAwayError.
        """
        if self not in _PROVED:
            _prove(self)
            _PROVED.add(self)

    def names(self, below: str = "") -> Iterator[tuple[str, int]]:
        """Each object below ``below`` in the order of the store, with its size. Raises StoreAwayError."""
        for listed_object in self.listed(below):
            yield listed_object.name, listed_object.size

    def listed(self, below: str = "") -> Iterator[ListedObject]:
        """Each object below ``below`` in the order of the store. Raises StoreAwayError."""
        for page in self._pages(below):
            for entry in page.get("Contents", ()):
                name = entry["Key"].removeprefix(self.prefix)
                yield ListedObject(name, entry["Size"], entry["LastModified"], entry["ETag"])

    def folders(self, beginning: str = "") -> Iterator[str]:
        """The names of the folders in it that begin so. Raises StoreAwayError."""
        for page in self._pages(beginning, Delimiter="/"):
            for entry in page.get("CommonPrefixes", ()):
                yield entry["Prefix"].removeprefix(self.prefix).rstrip("/")

    def _pages(self, below: str, **more: str) -> Iterator[dict[str, Any]]:
        parameters = {"Bucket": self.bucket, "Prefix": self.prefix + below, **more}
        while True:
            # Each page is retried by its token: botocore's paginator would end at the first error.
            page = _retried(
                self.address(below), partial(client().list_objects_v2, **parameters), listing=True
            )
            yield page
            if not page.get("IsTruncated"):
                return
            parameters["ContinuationToken"] = page["NextContinuationToken"]


Place = Path | S3Folder
"""A folder on disk or on S3."""


def place_of(text: str) -> Place:
    """Parse a folder's path or S3 address. Raises BadAddressError."""
    return S3Folder.parse(text) if text[:5].lower() == "s3://" else Path(text)


_PROBES = ".state/probe-"
_PROBE_LEFT_AFTER = timedelta(hours=1)

_PROVED: set[S3Folder] = set()


def _prove(folder: S3Folder) -> None:
    name = f"{_PROBES}{uuid.uuid4().hex}"
    missing = []
    try:
        first = folder.put(name, b"first", over=None)
        if not _raises(TakenError, lambda: folder.put(name, b"second", over=None)):
            missing.append("a put whose name must be free (If-None-Match)")
        current = folder.head(name) or first
        folder.put(name, b"third", over=current)
        if not _raises(TakenError, lambda: folder.put(name, b"fourth", over=current)):
            missing.append("a put in place of what was read (If-Match)")
        if not _raises(ObjectDamagedError, lambda: _put_with_wrong_checksum(folder, name)):
            missing.append("the SHA-256 that comes with a put")
        modified_at = {probe.name: probe.modified for probe in folder.listed(_PROBES)}
        if folder.get(name, most=100) not in (b"third", b"fourth") or name not in modified_at:
            missing.append("that what was put is read and listed at once")
        else:
            for probe, modified in modified_at.items():
                # The probe of a killed process, by the store's clock.
                if modified_at[name] - modified > _PROBE_LEFT_AFTER:
                    folder.delete(probe)
    except ObjectDamagedError:
        missing.append("the SHA-256 of an object in the answer to a HEAD")
    finally:
        with contextlib.suppress(StoreError):
            folder.delete(name)
    if missing:
        raise UnfitStoreError(
            f"{folder} cannot be the place of record, and nothing was put there: the store does not honour"
            f" {', nor '.join(missing)}. Without that a machine that was cut off could overwrite another"
            " one's work. Take a store that does (Amazon S3, SeaweedFS, MinIO), or unset VLM_ASSETS_STORE."
        )


def _raises(kind: type[StoreError], request: Callable[[], object]) -> bool:
    try:
        request()
    except kind:
        return True
    return False


def _put_with_wrong_checksum(folder: S3Folder, name: str) -> None:
    wrong = base64.b64encode(hashlib.sha256(b"other").digest()).decode()
    _retried(
        folder.address(name),
        lambda: client().put_object(
            Bucket=folder.bucket, Key=f"{folder.prefix}{name}", Body=b"bytes", ChecksumSHA256=wrong
        ),
    )


@cache
def client() -> Any:
    """The client of this process, for any thread. It sends nothing before the first request."""
    from botocore.config import Config

    return session().client(
        "s3",
        config=Config(
            retries={"mode": "standard", "total_max_attempts": 1},
            connect_timeout=CONNECT_SECONDS,
            read_timeout=SILENCE_SECONDS,
            max_pool_connections=CONNECTIONS,
            # Few servers besides Amazon's answer under BUCKET.HOST.
            s3={"addressing_style": "path"} if endpoint() else {},
        ),
    )


def session() -> Any:
    """A new session of boto3: credentials and region as the environment has them now."""
    import boto3

    return boto3.session.Session()


def endpoint() -> str | None:
    """The address of a store that is not Amazon's."""
    return os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")


def _retried(
    where: str, request: Callable[[], T], *, listing: bool = False, patience: float | None = None
) -> T:
    """Send a request and return its answer; retry with back-off while the store is down or throttles."""
    seconds = PATIENCE_SECONDS if patience is None else patience
    until, pause = time.monotonic() + seconds, _FIRST_PAUSE
    while True:
        try:
            with _named_errors(where, listing=listing):
                return request()
        except _MayPassError:
            if time.monotonic() + pause > until:
                raise
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)


@contextmanager
def _named_errors(where: str, *, listing: bool = False) -> Iterator[None]:
    """Turn botocore's errors into this module's. An error that is not an object's fault is an outage."""
    from botocore import exceptions
    from botocore.exceptions import BotoCoreError, ClientError, FlexibleChecksumError

    try:
        yield
    except ClientError as error:
        details = error.response.get("Error", {})
        code = details.get("Code", "")
        why = f"{code}: {details.get('Message', '')}".rstrip(": ")
        if code in _CHANGED:
            raise TakenError(f"{where} was changed by another writer ({why})") from error
        if code in _WRONG_BYTES:
            raise ObjectDamagedError(f"{where} did not reach the store as it was sent ({why})") from error
        if code in _MISSING and not listing:
            raise NoObjectError(f"{where} is not there ({why})") from error
        if code in _DENIED and not listing:
            raise ObjectDeniedError(f"{where} is denied to these credentials ({why})") from error
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        may_pass = status >= 500 or status == 429 or code in _THROTTLED
        raise _away_error(where, why, may_pass=may_pass) from error
    except RecursionError as error:  # botocore follows each redirection from within the last one.
        why = "it redirects each request to an address that redirects it again"
        raise _away_error(where, why) from error
    except FlexibleChecksumError as error:
        raise ObjectDamagedError(f"{where} is not what its checksum says: {error}") from error
    except BotoCoreError as error:
        cut = exceptions.ConnectionError | exceptions.HTTPClientError | exceptions.IncompleteReadError
        raise _away_error(where, str(error), may_pass=isinstance(error, cut)) from error


def _away_error(where: str, why: str, *, may_pass: bool = False) -> StoreAwayError:
    return (_MayPassError if may_pass else StoreAwayError)(
        f"The S3 store cannot be used for {where}: {why.rstrip('.')}. No property counts as failed for that,"
        " and what is committed stays. Look at the store, the bucket, AWS_ENDPOINT_URL, the credentials in"
        " the environment and what they allow (deploy/s3/policy.json)."
    )
