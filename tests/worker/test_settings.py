"""Settings of workers."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from splitserve.worker.settings import DecodeSettings, FlexibleSettings, PrefillSettings


@pytest.mark.parametrize(
    ("asked", "on_a_cpu", "on_a_gpu"),
    [({}, 512, 2048), ({"max_batch_tokens": 96}, 96, 96)],
    ids=["default", "96"],
)
def test_the_chunk_budget(asked: dict[str, int], on_a_cpu: int, on_a_gpu: int) -> None:
    settings = PrefillSettings.model_validate({"model": ".", "insecure": True, **asked})
    assert (settings.chunk_budget("cpu"), settings.chunk_budget("cuda")) == (on_a_cpu, on_a_gpu)


@pytest.mark.parametrize("host", ["", "192.0.2.7", "node-7.example", "fd00::1", "::1", "fe80::1%eth0"])
def test_a_host_that_can_be_connected_to_is_advertised(host: str) -> None:
    settings = DecodeSettings.model_validate({"model": ".", "insecure": True, "advertise_host": host})
    assert settings.advertise_host == host


@pytest.mark.parametrize("host", ["tcp://192.0.2.7", "192.0.2.7:7740", "[fd00::1]", "node 7", "a" * 256])
def test_what_is_no_host_is_not_advertised(host: str) -> None:
    with pytest.raises(ValidationError, match="advertise_host"):
        DecodeSettings.model_validate({"model": ".", "insecure": True, "advertise_host": host})


def test_a_worker_of_both_roles_has_two_ports_for_each() -> None:
    asked = {"listen": "tcp://[::1]:7710", "data_listen": "tcp://0.0.0.0:*"}
    settings = FlexibleSettings.model_validate({"model": ".", "insecure": True, "name": "w", **asked})
    decode, prefill = settings.in_role("decode"), settings.in_role("prefill")
    assert (decode.worker_id, decode.listen) == ("w:decode", "tcp://[::1]:7710")
    assert (prefill.worker_id, prefill.listen) == ("w:prefill", "tcp://[::1]:7712")
    assert prefill.data_listen == "tcp://0.0.0.0:*"


@pytest.mark.parametrize("url", ["s3://blocks", "s3://blocks/team/kv/", "gs://b.c_d/x", "az://blocks/x"])
def test_a_bucket_has_no_size(url: str) -> None:
    asked = {"model": ".", "insecure": True, "kv_store": url}
    assert DecodeSettings.model_validate(asked).kv_store == url
    with pytest.raises(ValidationError, match=r"--kv-store-gib: .* set a lifecycle rule on the bucket"):
        DecodeSettings.model_validate({**asked, "kv_store_gib": 10})
    assert (
        DecodeSettings.model_validate({**asked, "kv_store": "blocks", "kv_store_gib": 10}).kv_store_gib == 10
    )


@pytest.mark.parametrize(
    "url",
    [
        "ftp://blocks/x",
        "s3://",
        "s3:///x",
        "https://blocks.example/x",
        "s3://key:secret@blocks/x",
        "s3://b/x?y",
        "s3:/b",
        "s3:b",
        "gs:/b/x",
        "https:/blocks.example/x",
    ],
)
def test_other_urls_are_no_kv_store(url: str) -> None:
    with pytest.raises(ValidationError, match=r"--kv-store: of URLs only s3://BUCKET/PREFIX, gs://BUCKET"):
        DecodeSettings.model_validate({"model": ".", "insecure": True, "kv_store": url})


@pytest.mark.parametrize("folder", ["./s3:/b", "/mnt/s3:b", "s3", "a:b"])
def test_a_folder_may_have_a_colon(folder: str) -> None:
    asked = {"model": ".", "insecure": True, "kv_store": folder, "kv_store_gib": 10}
    assert DecodeSettings.model_validate(asked).kv_store == folder
