"""The KV store in an object store: a block comes back as it was written, or not at all."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from e2e.cluster import free_port
from msgspec.structs import replace
from support.kv_store_rig import HASHES, KEY, MODEL, NUM_BLOCKS, Reader, Rig, in_bucket
from support.played_bucket import PlayedBucket
from support.s3_server import s3_server

from splitserve.engine.errors import KVStoreError
from splitserve.worker import kv_bucket
from splitserve.worker.kv_bucket import KVBucket

BUCKET, URL = "blocks", "s3://blocks/team/kv"


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    with s3_server(monkeypatch, BUCKET) as client:
        yield client


def name_of(s3: Any, block: int) -> str:
    names = [found["Key"] for found in s3.list_objects_v2(Bucket=BUCKET)["Contents"]]
    (name,) = (name for name in names if name.endswith(HASHES[block].hex()))
    assert name.startswith("team/kv/kv-")
    return name


def test_blocks_come_back_also_to_another_worker_and_after_a_restart(s3: Any, rig: Rig) -> None:
    store = rig.store()
    rig.write(store, 0, 1, 3)
    assert rig.read(store, 0, 1, 2, 3) == rig.written[:2]
    assert rig.read(rig.store(), 0, 1) == rig.written[:2]
    store.close()
    assert rig.read(rig.store(), 3) == rig.written[3:4]
    assert store.counters == {"saved_blocks": 3}
    assert len(s3.list_objects_v2(Bucket=BUCKET)["Contents"]) == 3, "no other objects are left"


@pytest.mark.parametrize("damage", ["a bit", "cut short", "empty", "another block", "longer"])
def test_a_damaged_object_is_a_miss_and_is_removed(
    s3: Any, rig: Rig, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = rig.store()
    rig.write(store, 0, 1)
    name, other = name_of(s3, 0), name_of(s3, 1)
    sealed = s3.get_object(Bucket=BUCKET, Key=name)["Body"].read()
    changed = {
        "a bit": sealed[:500] + bytes([sealed[500] ^ 1]) + sealed[501:],
        "cut short": sealed[:500],
        "empty": b"",
        "another block": s3.get_object(Bucket=BUCKET, Key=other)["Body"].read(),
        "longer": sealed + b"x",
    }
    s3.put_object(Bucket=BUCKET, Key=name, Body=changed[damage])
    assert rig.read(store, 0) == []
    assert f"s3://{BUCKET}/{name} is damaged: it is removed" in caplog.text
    assert [found["Key"] for found in s3.list_objects_v2(Bucket=BUCKET)["Contents"]] == [other]
    rig.write(store, 0)
    assert rig.read(store, 0) == rig.written[:1]


def test_another_key_or_model_reads_nothing(s3: Any, rig: Rig) -> None:
    rig.pool[0] = 65
    rig.write(rig.store(), 0)
    assert rig.read(rig.store(model=replace(MODEL, kv_name="n")), 0) == []
    assert rig.read(rig.store(secret=b"another"), 0) == []
    assert rig.read(rig.store(), 0) == [rig.pool[0].tobytes()]
    assert b"AAAA" not in s3.get_object(Bucket=BUCKET, Key=name_of(s3, 0))["Body"].read()


def test_each_cloud_is_asked_for_the_objects_under_the_prefix(bucket: PlayedBucket) -> None:
    for url, root in (
        ("s3://blocks/team", "/blocks/team"),
        ("gs://blocks/team", "/blocks/team"),
        ("az://blocks/team", "/account/blocks/team"),
        ("s3://blocks", "/blocks"),
    ):
        bucket.objects.clear()
        rig = in_bucket(url)
        store = rig.store()
        rig.write(store, 0, 1)
        digits = HASHES[0].hex()
        (name,) = (name for name in bucket.objects if name.endswith(digits))
        assert name == f"{root}/{store._folder}/{digits[:2]}/{digits}"
        assert rig.read(store, 0, 1) == rig.written[:2]
        bucket.objects[name] = b"x"
        assert rig.read(store, 0) == []
        assert [other[-32:] for other in bucket.objects] == [HASHES[1].hex()]
        rig.close()


def test_a_block_that_is_there_is_not_sent_again(bucket: PlayedBucket, rig: Rig) -> None:
    rig.write(rig.store(), 0, 1)
    other = rig.store()
    bucket.asked.clear()
    rig.write(other, 0, 1, 2)
    assert [asked.partition(" ")[0] for asked in bucket.asked] == ["HEAD", "HEAD", "HEAD", "PUT"]
    assert other.counters == {"saved_blocks": 1}


def test_many_blocks_are_read_and_written_at_a_time(bucket: PlayedBucket, rig: Rig) -> None:
    store, reader = rig.store(), Reader(rig)
    assert (store.group, store.ahead) == (1, 32)
    bucket.most_open = 0
    bucket.gate.clear()
    for block in range(NUM_BLOCKS):
        if store.takes_writes:
            store.write(HASHES[block : block + 1], [block])
    let_in(bucket, KVBucket.num_writers)
    rig.wait_written(store)
    assert bucket.most_open == KVBucket.num_writers
    bucket.gate.clear()
    for block in range(NUM_BLOCKS):
        store.read(KEY, HASHES[block : block + 1])
    let_in(bucket, KVBucket.num_readers)
    while len(reader.found) < KVBucket.num_writers:
        assert rig.woken.wait(20)
        rig.woken.clear()
        store.report(reader)
    assert [found for _, found in reader.found] == [[block] for block in rig.written[:16]], "in their order"
    assert bucket.most_open == KVBucket.num_readers


def let_in(bucket: PlayedBucket, count: int) -> None:
    """Open the gate once this many requests wait there."""
    while len(bucket.held) < count:
        time.sleep(0.01)
    bucket.gate.set()


@pytest.mark.parametrize("url", ["gs://blocks/kv", "az://blocks/kv", URL])
def test_workers_that_start_at_a_time_do_not_disturb_each_other(bucket: PlayedBucket, url: str) -> None:
    """Google refuses to remove an object that another worker has removed, and to write one twice a second."""
    bucket.delay_s = 0.1
    buckets = [KVBucket(url) for _ in range(4)]
    with ThreadPoolExecutor(len(buckets)) as pool:
        for opened in [pool.submit(each.open, "kv-1") for each in buckets]:
            opened.result()
    written = [asked for asked in bucket.asked if asked.startswith("PUT")]
    assert len(set(written)) == len(buckets)
    assert bucket.objects == {}
    for each in buckets:
        each.remove("kv-1/none")
        each.close()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TIMEOUT", "CONNECT_TIMEOUT"):
        monkeypatch.setattr(kv_bucket, name, timedelta(seconds=0.5))


def refusal(url: str) -> str:
    with pytest.raises(KVStoreError) as error:
        in_bucket(url).store()
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_bucket_that_is_not_there_is_refused_at_the_start(s3: Any) -> None:
    assert refusal("s3://others/kv").startswith(
        "--kv-store s3://others/kv: there is no such bucket: create it, or check its name, and AWS_ACCESS_"
    )


@pytest.mark.parametrize(("status", "code"), [(403, "InvalidAccessKeyId"), (401, "Unauthorized")])
def test_credentials_that_fail_are_refused_at_the_start(bucket: PlayedBucket, status: int, code: str) -> None:
    bucket.failure = status, f"<Error><Code>{code}</Code></Error>".encode()
    message = refusal(URL)
    assert message.startswith(f"--kv-store {URL}: the credentials may not write objects there (")
    assert code in message
    assert message.endswith("check them, and " + kv_bucket.VARIABLES["s3"])


def test_a_bucket_that_may_not_be_listed_is_refused_at_the_start(bucket: PlayedBucket) -> None:
    bucket.lists = False
    assert "the credentials may not read and list objects there (" in refusal(URL)


@pytest.mark.parametrize("url", [URL, "gs://blocks/kv", "az://blocks/kv"])
def test_a_server_that_hangs_is_refused_at_the_start(bucket: PlayedBucket, impatient: None, url: str) -> None:
    bucket.gate.clear()
    assert "cannot write objects there (" in refusal(url)


def test_a_server_that_is_not_there_is_refused_at_the_start(
    bucket: PlayedBucket, impatient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_port()}")
    assert "cannot write objects there (" in refusal(URL)


def test_an_account_that_is_not_named_is_refused_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    message = refusal("az://blocks/kv")
    assert "Account must be specified" in message
    assert "check AZURE_STORAGE_ACCOUNT_NAME" in message
