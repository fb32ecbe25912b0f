"""What is read the quick way is what the ordinary way reads, and whatever is odd is read the ordinary way."""

import pytest

from vlm_durable.mirror import quick_bucket
from vlm_durable.mirror.bucket import NoObjectError, ObjectTooLargeError
from vlm_durable.mirror.quick_bucket import get_quickly

MOST = 100_000
NAMES = [
    "a b.jpg",
    "50%.jpg",
    "%41.jpg",
    "ü é.jpg",
    "a+b.jpg",
    "a#b?c=d.jpg",
    "a//b.jpg",
    ".x/~y.jpg",
    "(1)&'!*.jpg",
]


def put(folder, s3_server, name, content):
    s3_server.client().put_object(Bucket=folder.bucket, Key=folder.prefix + name, Body=content)


def asked(s3_proxy):
    return [method for method, _ in s3_proxy.requests]


def test_any_name_is_that_object(bucket, s3_server):
    """No name that a listing may have is read as another one's."""
    own = s3_server.client()
    for number, name in enumerate(NAMES):
        own.put_object(Bucket=bucket.bucket, Key=bucket.prefix + name, Body=b"content %d" % number)
    for number, name in enumerate(NAMES):
        assert get_quickly(bucket, name, most=MOST) == b"content %d" % number


def test_an_image_costs_one_request(bucket, s3_server, s3_proxy):
    """Nothing is asked for twice."""
    put(bucket, s3_server, "1.jpg", b"x" * 100_000)
    assert get_quickly(bucket, "1.jpg", most=MOST) == b"x" * 100_000
    assert asked(s3_proxy) == ["GET"]


def test_bytes_that_are_not_proved_are_read_again(bucket, s3_server, s3_proxy):
    """A bit that flips on the way never reaches the model."""
    put(bucket, s3_server, "1.jpg", b"right")

    def wrong_once(passing):
        if len(s3_proxy.requests) > 1:
            return False
        return passing.pass_on(passing.forward(), b"wrong")

    s3_proxy.breaks(wrong_once)
    assert get_quickly(bucket, "1.jpg", most=MOST) == b"right"
    assert asked(s3_proxy) == ["GET", "GET"]


def test_errors_are_those_of_the_ordinary_way(bucket, s3_server):
    """A missing image is missing, and a huge one is not loaded."""
    put(bucket, s3_server, "1.jpg", b"x" * 100)
    with pytest.raises(NoObjectError):
        get_quickly(bucket, "2.jpg", most=MOST)
    with pytest.raises(ObjectTooLargeError):
        get_quickly(bucket, "1.jpg", most=99)


def test_a_bucket_whose_etags_prove_nothing_is_asked_once(bucket, s3_server, s3_proxy, monkeypatch, caplog):
    """Where the quick way never helps it is given up, and that is said: objects are not fetched twice."""
    monkeypatch.setattr(quick_bucket, "MOST_DOUBTS", 2)
    put(bucket, s3_server, "1.jpg", b"x")

    def other_etag(passing):
        answer = passing.forward()
        answer.headers["etag"] = '"0123456789abcdef0123456789abcdef"'
        return passing.pass_on(answer)

    s3_proxy.breaks(other_etag)
    for _ in range(4):
        assert get_quickly(bucket, "1.jpg", most=MOST) == b"x"
    assert len(s3_proxy.requests) == 2 + 2 + 1 + 1
    (said,) = caplog.messages
    assert "by boto3 alone" in said
    assert "its ETag is not its MD5" in said
