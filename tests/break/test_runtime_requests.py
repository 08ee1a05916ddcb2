"""Requests that no honest client sends: each is refused in form, and none of them stops the training."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from swarmtune.config import ConfigError, TrainConfig
from swarmtune.testing import LocalServer, chatml_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(chatml_model(tmp_path_factory.mktemp("model") / "chatml"))


@pytest.fixture
async def local(model: str, tmp_path: Path):
    async with LocalServer(tmp_path / "data", model) as local:
        yield local


async def refusal(local: LocalServer, path: str, body: bytes) -> tuple[int, str, str]:
    """Status, code and sentence of what `body` is answered."""
    async with local.http.post(path, data=body, headers={"Content-Type": "application/json"}) as response:
        error = (await response.json())["error"]
        return response.status, error["code"], error["message"]


async def test_half_a_character_in_an_abort_is_refused_and_the_training_can_still_be_stopped(local: LocalServer):
    await local.boot()
    grant = await local.claim()
    status, code, message = await refusal(local, f"/v1/episodes/{grant.episode_id}/abort", rb'{"reason": "\ud800"}')
    assert (status, code) == (400, "bad_request") and "half a character" in message
    assert (await local.server.stop()).state == "offline"


async def test_half_a_character_in_a_metric_is_refused_before_the_episode_is_touched(local: LocalServer):
    await local.boot()
    grant = await local.claim()
    await local.chat(grant.api_key)
    body = rb'{"reward": 1, "submission_id": "s", "metrics": {"\udfff": 1}}'
    assert (await refusal(local, f"/v1/episodes/{grant.episode_id}/end", body))[:2] == (400, "bad_request")
    assert (await local.end(grant.episode_id)).outcome == "admitted"


@pytest.mark.parametrize("body", [b"[" * 100_000, b"[" * 5000 + b"]" * 5000, b'{"a":' * 5000 + b"1" + b"}" * 5000])
async def test_a_body_nested_beyond_reason_is_refused(local: LocalServer, body: bytes):
    status, code, message = await refusal(local, "/v1/start", body)
    assert (status, code) == (400, "bad_request") and "nested" in message


async def test_a_body_beyond_the_limit_is_refused_in_form(local: LocalServer):
    status, code, message = await refusal(local, "/v1/start", b'"' + b"x" * (65 << 20) + b'"')
    assert (status, code) == (413, "bad_request") and "67108864" in message


@pytest.mark.parametrize("after", ["inf", "1e400", "9" * 5000])
@pytest.mark.parametrize("path", ["/v1/steps", "/v1/events"])
async def test_a_number_larger_than_any_step_or_event_gets_an_empty_list(local: LocalServer, path: str, after: str):
    await local.boot()
    headers = {"Accept": "application/json"}
    async with local.http.get(path, params={"after": after}, headers=headers) as response:
        assert (response.status, await response.json()) == (200, [])


async def test_a_last_event_id_of_any_length_is_taken_or_passed_over(local: LocalServer):
    headers = {"Accept": "application/json", "Last-Event-ID": "9" * 5000}
    async with local.http.get("/v1/events", headers=headers) as response:
        assert response.status == 200


@pytest.mark.parametrize("name", ["", "~nobody-has-this-name/x", "a" * 10_000, "\0"])
async def test_what_cannot_be_a_model_is_refused_with_the_names_there_are(local: LocalServer, name: str):
    body = json.dumps({"config": {"model": name, "engine.kind": "scripted"}}).encode()
    status, code, message = await refusal(local, "/v1/start", body)
    assert (status, code) == (400, "unknown_model") and "smollm2-135m" in message


@pytest.mark.parametrize(
    "field", ['"lease_s": Infinity', '"lease_s": 1e300', '"claim_id": ""', f'"claim_id": "{"c" * 129}"']
)
async def test_a_claim_that_would_never_end_or_share_an_id_by_accident_is_refused(local: LocalServer, field: str):
    await local.boot()
    status, code, message = await refusal(local, "/v1/episodes", f'{{"task_id": "t", {field}}}'.encode())
    assert (status, code) == (400, "bad_request") and field.split('"')[1] in message


@pytest.mark.parametrize("key", ["optim.lr", "batching.drain_s", "batching.episode_lease_s", "algorithm.kl_coef"])
def test_an_infinite_number_is_no_setting(key: str):
    with pytest.raises(ConfigError, match=f"{key}: .*finite"):
        TrainConfig.from_dict({"model": "tiny", key: float("inf")})


def test_an_empty_stop_string_would_end_every_answer_at_once():
    with pytest.raises(ConfigError, match=r"sampling\.stop"):
        TrainConfig.from_dict({"model": "tiny", "sampling.stop": [""]})


async def test_a_long_reason_is_cut_not_refused(local: LocalServer):
    await local.boot()
    grant = await local.claim()
    body = json.dumps({"reason": "r" * 1_000_000}).encode()
    async with local.http.post(f"/v1/episodes/{grant.episode_id}/abort", data=body) as response:
        assert response.status == 200 and len((await response.json())["reason"]) == 1000


async def test_an_event_that_cannot_be_written_costs_itself_only(local: LocalServer):
    await local.boot()
    local.server.events.emit("client", name="\ud800")
    await local.until(lambda: local.server.events.lost > 0)
    local.server.events.emit("client", name="next")
    await local.server.stop()
    path = next((local.server._data_dir / "runs").glob("*/events.jsonl"))
    names = [json.loads(line)["data"].get("name") for line in path.read_text().splitlines()]
    assert "next" in names


async def test_leases_are_looked_at_again_after_a_fault(local: LocalServer, monkeypatch: pytest.MonkeyPatch):
    await local.boot()
    book = local.server.live_run().book
    looked = asyncio.Event()

    def fault() -> list:
        looked.set()
        monkeypatch.undo()
        raise RuntimeError("told to")

    monkeypatch.setattr(book, "expire_due", fault)
    grant = await local.claim(lease_s=0.1)
    await looked.wait()
    await local.until(lambda: book.get(grant.episode_id).state == "expired")


async def test_an_end_without_the_number_its_estimator_needs_is_refused_and_may_be_sent_again(local: LocalServer):
    await local.boot(**{"algorithm.advantage": "remax"})
    grant = await local.claim()
    await local.chat(grant.api_key)
    path = f"/v1/episodes/{grant.episode_id}/end"
    for metrics in (b"{}", b'{"reward_baseline": NaN}'):
        body = b'{"reward": 1, "submission_id": "s", "metrics": ' + metrics + b"}"
        status, code, message = await refusal(local, path, body)
        assert (status, code) == (400, "bad_request") and "reward_baseline" in message
    body = json.dumps({"reward": 1, "submission_id": "s", "metrics": {"reward_baseline": 0.5}})
    async with local.http.post(path, data=body) as response:
        assert (await response.json())["outcome"] == "admitted"
