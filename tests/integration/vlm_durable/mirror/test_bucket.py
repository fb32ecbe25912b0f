"""A folder of a bucket: what the answers of a real server mean, and of one that is not well."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

from vlm_durable.mirror import bucket as module
from vlm_durable.mirror.bucket import (
    NoObjectError,
    ObjectTooLargeError,
    S3Folder,
    StoreAwayError,
    TakenError,
    client,
)


@pytest.fixture
def put(bucket, s3_server):
    """Puts an object into the folder."""
    own = s3_server.client()
    return lambda name, body: own.put_object(Bucket=bucket.bucket, Key=bucket.prefix + name, Body=body)


@pytest.fixture
def quick(monkeypatch):
    """An outage is noticed at the first request."""
    monkeypatch.setattr(module, "PATIENCE_SECONDS", 0.0)
    client.cache_clear()


def test_an_object_comes_whole_within_its_bound(bucket, put):
    """No image, however large, is taken into memory past the bound."""
    put("a/ü |.jpg", b"x" * 1000)
    assert bucket.get("a/ü |.jpg", most=1000) == b"x" * 1000
    with pytest.raises(ObjectTooLargeError, match="1,000 bytes"):
        bucket.get("a/ü |.jpg", most=999)
    assert bucket.peek("a/ü |.jpg", 3) == (b"xxx", 1000)


def test_what_is_missing_or_empty_is_said_so(bucket, put):
    """An object that is not there is its own fault, and a bucket that is not there an outage."""
    put("empty.jpg", b"")
    assert bucket.peek("empty.jpg") == (b"", 0)
    for ask in (bucket.peek, lambda name: bucket.get(name, most=9)):
        with pytest.raises(NoObjectError):
            ask("nothing.jpg")
    with pytest.raises(StoreAwayError, match="NoSuchBucket"):
        module.S3Folder("no-such-bucket", "").get("a.jpg", most=9)


def test_all_names_are_listed(bucket, put):
    """A listing goes on over its pages, of 1,000 objects each, and stays inside the folder."""
    names = [f"p/{number:04}.jpg" for number in range(1005)]
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda name: put(name, b"12"), names))
    assert list(bucket.names()) == [(name, 2) for name in names]


@pytest.mark.parametrize(
    ("status", "code"),
    [(503, "SlowDown"), (500, "InternalError"), (400, "ExpiredToken"), (403, "InvalidAccessKeyId")],
)
@pytest.mark.usefixtures("quick")
def test_throttling_and_bad_credentials_are_outages(bucket, put, s3_proxy, status, code):
    """Nothing that the store refuses to everybody costs an image."""
    put("a.jpg", b"12")
    s3_proxy.breaks(lambda passing: passing.answer(status, code))
    for ask in (
        lambda: bucket.get("a.jpg", most=9),
        lambda: bucket.peek("a.jpg"),
        lambda: list(bucket.names()),
    ):
        with pytest.raises(StoreAwayError, match=code) as raised:
            ask()
    assert module.client().meta.endpoint_url and "testsecret" not in str(raised.value)


@pytest.mark.usefixtures("quick")
def test_a_store_that_takes_a_call_and_says_nothing_is_an_outage(bucket, put, s3_proxy, monkeypatch):
    """It is told at the end of a time limit: no run, and no look at the store, hangs for ever."""
    monkeypatch.setattr(module, "SILENCE_SECONDS", 0.5)
    put("a.jpg", b"12")
    over = threading.Event()

    def say_nothing(passing):
        over.wait()
        return passing.hang_up()

    def stop_in_the_body(passing):
        passing.send_response(200)
        passing.send_header("Content-Length", "100")
        passing.end_headers()
        passing.wfile.write(b"x")
        passing.wfile.flush()
        return say_nothing(passing)

    try:
        for how, calls in (
            (
                say_nothing,
                [
                    lambda: bucket.get("a.jpg", most=9),
                    lambda: bucket.head("a.jpg"),
                    lambda: bucket.put("b.jpg", b"12", over=None),
                    lambda: list(bucket.names()),
                ],
            ),
            (stop_in_the_body, [lambda: bucket.get("a.jpg", most=999)]),
        ):
            s3_proxy.breaks(how)
            for call in calls:
                with pytest.raises(StoreAwayError):
                    call()
    finally:
        over.set()


@pytest.mark.usefixtures("quick")
def test_a_wrong_secret_is_an_outage(bucket, put, monkeypatch):
    """Credentials that a real server refuses cost no image."""
    put("a.jpg", b"12")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    client.cache_clear()
    with pytest.raises(StoreAwayError, match="SignatureDoesNotMatch"):
        bucket.get("a.jpg", most=9)


def test_a_hiccup_is_not_noticed(bucket, put, s3_proxy):
    """Requests that fail, and a body that is cut short once, are asked for again."""
    put("a.jpg", b"x" * 100_000)
    left = ["503", "hang up", "cut"]

    def breaks(passing):
        match left.pop(0) if left else "":
            case "503":
                return passing.answer(503, "SlowDown")
            case "hang up":
                return passing.hang_up()
            case "cut":
                answer = passing.forward()
                passing.send_response(200)
                passing.send_header("Content-Length", "100000")
                passing.end_headers()
                passing.wfile.write(answer.content[:500])
                return passing.hang_up()
        return False

    s3_proxy.breaks(breaks)
    assert bucket.get("a.jpg", most=1 << 20) == b"x" * 100_000
    assert not left


@pytest.mark.usefixtures("quick")
def test_a_put_that_is_cut_in_the_middle_of_its_body_changes_nothing(bucket, s3_proxy):
    """The old object stays whole under its name; a new name stays free; the put done again succeeds."""
    at = bucket.put("old", b"old", over=None)
    s3_proxy.breaks(lambda passing: passing.command == "PUT" and passing.cut())
    for name, over in (("old", at), ("new", None)):
        with pytest.raises(StoreAwayError):
            bucket.put(name, b"n" * 100_000, over=over)
    assert (bucket.get("old", most=9), bucket.head("new")) == (b"old", None)
    s3_proxy.heal()
    bucket.put("old", b"n" * 100_000, over=at)
    bucket.put("new", b"new", over=None)


@pytest.mark.parametrize("leaves", [b"another's", None])
def test_what_another_writer_replaces_or_removes_at_once_is_no_damage(bucket, monkeypatch, leaves):
    """Between a put and its reading back: what the other writer left stands, and nobody looks for damage."""
    head = S3Folder.head

    def after_another(folder, name):
        monkeypatch.setattr(S3Folder, "head", head)
        if leaves is None:
            folder.delete(name)
        else:
            folder.put(name, leaves, over=head(folder, name))
        return head(folder, name)

    monkeypatch.setattr(S3Folder, "head", after_another)
    with pytest.raises(TakenError, match="by another writer as soon as it was put"):
        bucket.put("name", b"mine", over=None)
    if leaves is not None:
        assert bucket.get("name", most=99) == leaves


@pytest.mark.usefixtures("quick")
def test_a_slow_store_that_answers_is_no_outage(bucket, put, s3_proxy, monkeypatch):
    """Only silence ends a request: a body may take longer than that in all."""
    monkeypatch.setattr(module, "SILENCE_SECONDS", 1.0)
    put("a.jpg", b"x" * 1000)
    began, pieces = time.monotonic(), threading.Event()

    def slowly(passing):
        body = passing.forward().content
        passing.send_response(200)
        passing.send_header("Content-Length", str(len(body)))
        passing.end_headers()
        for start in range(0, len(body), 250):
            pieces.wait(0.4)
            passing.wfile.write(body[start : start + 250])
            passing.wfile.flush()
        return True

    s3_proxy.breaks(slowly)
    assert bucket.get("a.jpg", most=1000) == b"x" * 1000
    assert time.monotonic() - began > module.SILENCE_SECONDS


def test_a_store_that_restarts_ends_no_request(bucket, put, s3_proxy):
    """No run ends for a store that is away for seconds: requests, listings and puts wait for it."""
    put("a.jpg", b"12")
    back = time.monotonic() + 3
    s3_proxy.breaks(lambda passing: time.monotonic() < back and passing.hang_up())
    assert bucket.get("a.jpg", most=9) == b"12"
    assert time.monotonic() > back
    lost = ["PUT", "GET"]

    def lose_the_reply(passing):
        if passing.command not in lost:
            return False
        lost.remove(passing.command)
        passing.forward()
        return passing.hang_up()

    s3_proxy.breaks(lose_the_reply)
    bucket.put("head", b"ours", over=None)
    assert sorted(bucket.names()) == [("a.jpg", 2), ("head", 4)]
    assert not lost


def test_probes_of_killed_processes_are_removed(bucket, put, monkeypatch):
    """A probe that was left goes at the next start; one that may be another machine's right now stays."""
    put(".state/probe-left", b"first")
    bucket.prove()
    assert [name for name, _ in bucket.names()] == [".state/probe-left"]
    monkeypatch.setattr(module, "_PROVED", set())
    monkeypatch.setattr(module, "_PROBE_LEFT_AFTER", timedelta(seconds=-1))
    bucket.prove()
    assert list(bucket.names()) == []
