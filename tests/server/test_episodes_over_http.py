"""Claims, ends, aborts, clients and what they are refused, over the control routes."""

from __future__ import annotations

import asyncio
import json

import pytest

from swarmtune.gateway.auth import Capability
from swarmtune.journal import JournalError
from swarmtune.protocol import Code, EngineState
from swarmtune.testing import LocalServer


@pytest.fixture
async def local(local: LocalServer):
    await local.boot(batch_tasks=4)
    return local


async def post(local: LocalServer, path: str, body=None, *, raw: str | None = None, key: str | None = None):
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    data = raw if raw is not None else json.dumps(body if body is not None else {})
    async with local.http.post(path, data=data, headers=headers) as response:
        return response.status, await response.json()


async def boot_agreeing(local: LocalServer, **overrides) -> None:
    """Claims are free, and a step starts when `agree` says so."""
    await local.boot(**{"batching.policy": "any_client_agrees"} | overrides)
    await post(local, "/v1/clients", {"name": "one"})


async def fill_and_agree(local: LocalServer) -> None:
    for n in range(2):
        await local.run_episode("a", float(n))
    local.server.agree("one", local.server.status().step + 1)


async def test_a_grant_has_everything_an_agent_needs(local):
    status, grant = await post(local, "/v1/episodes", {"task_id": "t"})
    assert status == 200
    assert grant["base_url"] == f"{local.url}/v1" and grant["anthropic_base_url"] == local.url
    assert grant["step"] == 1 and grant["context_length"] == 2048 and len(grant["api_key"]) > 30


async def test_a_repeated_claim_id_gets_the_same_episode(local):
    body = {"task_id": "t", "claim_id": "once"}
    first, second = [(await post(local, "/v1/episodes", body))[1] for _ in range(2)]
    assert first == second


async def test_an_episode_whose_client_hung_up_during_the_claim_is_given_up_unless_claimed_again(local, monkeypatch):
    monkeypatch.setattr("swarmtune.server.UNTAKEN_GRACE_S", 0.3)
    journal = local.server.live_run().journal
    write, gate = journal.write, asyncio.Event()

    async def slow(*entries):
        await gate.wait()
        await write(*entries)

    monkeypatch.setattr(journal, "write", slow)
    bodies = [{"task_id": "t", "claim_id": name} for name in ("left", "fetched")]
    calls = [asyncio.create_task(local.http.post("/v1/episodes", json=body)) for body in bodies]
    await local.until(lambda: local.server.status().open_episodes == 2)
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    await asyncio.sleep(0.05)  # the server learns of the hang-ups
    gate.set()
    fetched = (await post(local, "/v1/episodes", bodies[1]))[1]["episode_id"]
    await local.until(lambda: local.server.status().open_episodes == 1)
    assert local.server.episode_view(fetched).state == "claimed"


async def test_end_twice_with_one_submission_gets_one_answer_and_with_another_a_conflict(local):
    grant = await local.claim()
    await local.chat(grant.api_key)
    path = f"/v1/episodes/{grant.episode_id}/end"
    first = await post(local, path, {"reward": 1, "submission_id": "a"})
    assert first[0] == 200 and first[1]["outcome"] == "admitted"
    assert await post(local, path, {"reward": 1, "submission_id": "a"}) == first
    status, body = await post(local, path, {"reward": 1, "submission_id": "b"})
    assert (status, body["error"]["code"]) == (409, "end_conflict")


async def test_ends_of_one_submission_at_once_get_one_answer(local):
    grant = await local.claim()
    await local.chat(grant.api_key)
    answers = await asyncio.gather(*(local.end(grant.episode_id, 1.0, "same") for _ in range(5)))
    assert all(a == answers[0] for a in answers)
    assert local.server.status().pooled_episodes == 1


@pytest.mark.parametrize("reward", ["NaN", "Infinity", "-Infinity", '"high"', "null", "true", "[1]", "1e400"])
async def test_a_reward_that_is_no_finite_number_is_refused_and_the_episode_stays_open(local, reward):
    grant = await local.claim()
    await local.chat(grant.api_key)
    path = f"/v1/episodes/{grant.episode_id}/end"
    status, body = await post(local, path, raw=f'{{"reward": {reward}, "submission_id": "x"}}')
    assert (status, body["error"]["code"]) == (400, "bad_reward")
    assert (await local.end(grant.episode_id, 0.5)).outcome == "admitted"


async def test_an_episode_without_a_model_call_is_rejected_with_its_reason(local):
    grant = await local.claim()
    result = await local.end(grant.episode_id)
    assert (result.outcome, result.code) == ("rejected", Code.NO_CALLS)


async def test_end_after_expiry_is_410_with_its_code(local):
    grant = await local.claim(lease_s=0.01)
    await local.until(lambda: local.server.episode_view(grant.episode_id).state == "expired")
    status, body = await post(local, f"/v1/episodes/{grant.episode_id}/end", {"reward": 1, "submission_id": "x"})
    assert (status, body["error"]["code"]) == (410, "episode_expired")


async def test_an_unknown_episode_is_404(local):
    for route in ("end", "abort", "heartbeat"):
        body = {"reward": 1, "submission_id": "x"} if route == "end" else {}
        status, answer = await post(local, f"/v1/episodes/nope/{route}", body)
        assert (status, answer["error"]["code"]) == (404, "unknown_episode")


async def test_a_stale_episode_is_rejected_with_its_reason(model, tmp_path):
    async with LocalServer(tmp_path, model) as local:
        await boot_agreeing(local, **{"batching.max_staleness": 0})
        old = await local.claim("old")
        await local.chat(old.api_key)
        await fill_and_agree(local)
        await local.server.steps_after(0, wait_s=20)
        result = await local.end(old.episode_id)
        assert (result.outcome, result.code) == ("rejected", Code.STALE)


@pytest.mark.parametrize(
    ("path", "raw", "words"),
    [
        ("/v1/episodes", "{", "not JSON"),
        ("/v1/episodes", "{}", "task_id"),
        ("/v1/episodes", '{"task_id": "t", "sampling": {"temprature": 1}}', "did you mean 'temperature'"),
        ("/v1/episodes", '{"task_id": "t", "colour": 1}', "colour"),
        ("/v1/start", "[]", "StartRequest"),
        ("/v1/clients", '{"name": ""}', "name"),
    ],
)
async def test_a_malformed_control_body_is_400_and_says_what_is_wrong(local, path, raw, words):
    status, body = await post(local, path, raw=raw)
    assert (status, body["error"]["code"]) == (400, "bad_request")
    assert words in body["error"]["message"]


async def test_a_wrong_query_is_400(local):
    async with local.http.get("/v1/steps?after=soon") as response:
        assert (response.status, (await response.json())["error"]["code"]) == (400, "bad_request")


async def test_a_claim_waits_for_rolling_and_is_refused_with_retry_after_otherwise(model, tmp_path):
    async with LocalServer(tmp_path, model) as local:
        await boot_agreeing(local, **{"engine.script_update_s": 0.3})
        await fill_and_agree(local)
        await local.until(lambda: local.server.state is EngineState.WEIGHT_SYNCING)
        status, body = await post(local, "/v1/episodes", {"task_id": "b"})
        assert (status, body["error"]["code"]) == (503, "not_rolling") and body["error"]["retry_after_s"] > 0
        status, grant = await post(local, "/v1/episodes", {"task_id": "b", "wait_s": 10})
        assert (status, grant["weight_version"]) == (200, 1)


async def test_a_call_during_the_update_waits_and_is_answered_by_the_new_weights(model, tmp_path):
    async with LocalServer(tmp_path, model) as local:
        await boot_agreeing(local, **{"engine.script_update_s": 0.3})
        carried = await local.claim("carried")
        await fill_and_agree(local)
        await local.until(lambda: local.server.state is EngineState.WEIGHT_SYNCING)
        await local.chat(carried.api_key)
        await local.end(carried.episode_id)
        finished = next(iter(local.server.live_run().pool.episodes()))
        assert {v for v in finished.samples[0].weight_versions if v >= 0} == {1}


async def test_a_silent_stream_is_kept_alive_during_the_update(model, tmp_path, monkeypatch):
    monkeypatch.setattr("swarmtune.gateway.sse.KEEP_ALIVE_S", 0.02)
    monkeypatch.setattr("swarmtune.gateway.sse.KEEP_ALIVE_S", 0.02)
    async with LocalServer(tmp_path, model) as local:
        await boot_agreeing(local, **{"engine.script_update_s": 0.3})
        carried = await local.claim("carried")
        await fill_and_agree(local)
        await local.until(lambda: local.server.state is EngineState.WEIGHT_SYNCING)
        body = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
        headers = {"Authorization": f"Bearer {carried.api_key}"}
        async with local.http.post("/v1/chat/completions", json=body, headers=headers) as response:
            text = (await response.read()).decode()
        assert text.startswith(": keep-alive\n\n") and text.endswith("data: [DONE]\n\n")


async def test_stragglers_are_carried_or_expired_at_the_drain_deadline(model, tmp_path):
    for policy, state in (("carry", "claimed"), ("expire", "expired")):
        async with LocalServer(tmp_path / policy, model) as local:
            await boot_agreeing(local, **{"batching.stragglers": policy, "batching.drain_s": 0.05})
            slow = await local.claim("slow")
            judge = await local.claim("judge", kind="evaluate")
            await fill_and_agree(local)
            await local.server.steps_after(0, wait_s=20)
            assert local.server.episode_view(slow.episode_id).state == state
            assert local.server.episode_view(judge.episode_id).state == "claimed"


async def test_the_drain_lets_a_running_episode_finish_and_grants_no_new_one(model, tmp_path):
    async with LocalServer(tmp_path, model) as local:
        await boot_agreeing(local, **{"batching.drain_s": 30.0})
        slow = await local.claim("slow")
        await fill_and_agree(local)
        await local.server.status_when(leaves="rolling", wait_s=10)
        assert local.server.state is EngineState.ROLLING_POST
        status, body = await post(local, "/v1/episodes", {"task_id": "b"})
        assert (status, body["error"]["code"]) == (503, "not_rolling")
        await local.chat(slow.api_key)
        await local.end(slow.episode_id)
        assert (await local.server.steps_after(0, wait_s=20))[0].step == 1


async def test_evaluation_episodes_never_enter_the_pool(local):
    result = await local.run_episode(kind="evaluate")
    assert (result.outcome, local.server.status().pooled_episodes) == ("evaluated", 0)


async def test_a_client_that_hangs_up_cancels_its_generation_and_the_turn_never_trains(model, tmp_path):
    async with LocalServer(tmp_path, model) as local:
        await local.boot(**{"engine.script_tokens_per_s": 20.0})
        grant = await local.claim()
        headers = {"Authorization": f"Bearer {grant.api_key}"}
        for stream in (True, False):
            body = {"messages": [{"role": "user", "content": "a long answer please"}], "stream": stream}
            call = asyncio.create_task(local.http.post("/v1/chat/completions", json=body, headers=headers))
            await local.until(lambda: local.backend.in_flight > 0)
            if stream:
                (await call).close()
            else:
                call.cancel()
            await local.until(lambda: local.backend.in_flight == 0)
        assert local.backend.cancelled == 2
        result = await local.end(grant.episode_id)
        assert (result.outcome, result.code, result.sampled_tokens) == ("rejected", Code.NO_CALLS, 0)


async def test_a_call_whose_engine_is_lost_before_anything_was_told_is_answered_after_its_return(model, tmp_path):
    async with LocalServer(tmp_path, model) as local:
        await local.boot(**{"engine.script_tokens_per_s": 50.0})
        grant = await local.claim()
        call = asyncio.create_task(local.chat(grant.api_key, "hello"))
        await local.until(lambda: local.backend.in_flight > 0)
        local.backend.lose("killed")
        assert (await call)["choices"][0]["message"]["content"] == "hello"
        result = await local.end(grant.episode_id)
        assert result.sampled_tokens == len("hello") + 1


async def test_a_stream_whose_engine_is_lost_in_the_middle_ends_with_the_error_event(model, tmp_path):
    async with LocalServer(tmp_path, model) as local:
        await local.boot(**{"engine.script_tokens_per_s": 50.0})
        grant = await local.claim()
        body = {"messages": [{"role": "user", "content": "a long answer please"}], "stream": True}
        headers = {"Authorization": f"Bearer {grant.api_key}"}
        async with local.http.post("/v1/chat/completions", json=body, headers=headers) as response:
            text = b""
            while text.count(b"data: ") < 4:
                text += await response.content.readany()
            local.backend.lose("killed")
            text += await response.read()
        last = json.loads(text.decode().strip().rsplit("data: ", 1)[1])
        assert last["error"]["code"] == "engine_lost" and b"[DONE]" not in text
        await local.until(lambda: local.server.state is EngineState.ROLLING)
        assert (await local.end(grant.episode_id)).code is Code.NO_CALLS


async def test_a_journal_without_space_refuses_claims_and_ends_and_loses_nothing(local, monkeypatch):
    grant = await local.claim()
    await local.chat(grant.api_key)
    journal = local.server.live_run().journal
    write = journal.write

    async def full(*entries):
        raise JournalError(Code.NO_SPACE, "no space left; free some")

    monkeypatch.setattr(journal, "write", full)
    status, body = await post(local, "/v1/episodes", {"task_id": "t"})
    assert (status, body["error"]["code"]) == (507, "no_space") and body["error"]["retry_after_s"]
    path, end = f"/v1/episodes/{grant.episode_id}/end", {"reward": 1, "submission_id": "x"}
    status, body = await post(local, path, end)
    assert (status, body["error"]["code"]) == (507, "no_space")
    monkeypatch.setattr(journal, "write", write)
    status, body = await post(local, path, end)
    assert (status, body["outcome"]) == (200, "admitted")
    assert local.server.status().open_episodes == 0


async def test_a_conservation_violation_rejects_the_episode_and_training_goes_on(local, monkeypatch):
    from swarmtune.merger import ConservationViolated

    def violated(*args, **kwargs):
        raise ConservationViolated("call 1: token 3 has another logprob")

    with monkeypatch.context() as patch:
        patch.setattr("swarmtune.run.check_conservation", violated)
        result = await local.run_episode()
    assert (result.outcome, result.code) == ("rejected", Code.CONSERVATION)
    assert "token 3" in result.message
    assert (await local.run_episode()).outcome == "admitted"


async def test_clients_register_beat_agree_and_leave(model, tmp_path):
    async with LocalServer(tmp_path, model) as local:
        await local.boot(**{"batching.policy": "all_clients_agree"})
        await post(local, "/v1/clients", {"name": "one"})
        assert (await post(local, "/v1/clients/one/heartbeat"))[1]["alive"]
        status, body = await post(local, "/v1/clients/two/heartbeat")
        assert (status, body["error"]["code"]) == (404, "unknown_client")
        await local.run_episode("a", 1.0, client="one")
        await local.run_episode("a", 0.0, client="one")
        async with local.http.get("/v1/pool") as response:
            assert not (await response.json())["ready"]
        status, body = await post(local, "/v1/clients/one/agree", {"step": 7})
        assert (status, body["error"]["code"]) == (409, "step_mismatch")
        assert (await post(local, "/v1/clients/one/agree", {"step": 1}))[0] == 200
        assert (await local.server.steps_after(0, wait_s=20))[0].step == 1
        async with local.http.delete("/v1/clients/one") as response:
            assert response.status == 200
        assert local.server.client_views() == []


async def test_events_are_streamed_in_order_with_their_numbers(local):
    async with local.http.get("/v1/events", params={"after": "1"}) as response:
        assert response.content_type == "text/event-stream"
        first = (await response.content.readuntil(b"\n\n")).decode()
        assert first.startswith("id: 2\nevent: ") and json.loads(first.split("data: ")[1])["seq"] == 2
        await local.run_episode()
        text = ""
        while "admitted" not in text:
            text += (await response.content.readuntil(b"\n\n")).decode()


async def test_steps_are_a_long_poll_on_the_step_number(local):
    async with local.http.get("/v1/steps", params={"after": "0", "wait_s": "0.05"}) as response:
        assert await response.json() == []


KEYS = {
    "observer-observer": {Capability.OBSERVE},
    "roller-roller-rol": {Capability.ROLLOUT},
    "judge-judge-judge": {Capability.EVALUATE},
    "control-control-c": set(Capability),
}


async def test_a_key_may_do_what_its_capabilities_say_and_nothing_else(model, tmp_path):
    observer, roller, judge, control = KEYS
    async with LocalServer(tmp_path, model, keys=KEYS) as local:
        start = {"config": local.config()}
        assert (await post(local, "/v1/start", start))[0] == 401
        assert (await post(local, "/v1/start", start, key="unknown-unknown-u"))[1]["error"]["code"] == "unauthorized"
        for key in (observer, roller, judge):
            assert (await post(local, "/v1/start", start, key=key))[1]["error"]["code"] == "forbidden"
        assert (await post(local, "/v1/start", start, key=control))[0] == 200
        await local.server.status_when(leaves="booting", wait_s=30)
        for kind, may in (("train", roller), ("evaluate", judge)):
            for key in (observer, roller, judge, control):
                status, _ = await post(local, "/v1/episodes", {"task_id": "t", "kind": kind}, key=key)
                assert (status == 200) == (key in (may, control)), (kind, key)
        async with local.http.get("/v1/status", headers={"x-api-key": observer}) as response:
            assert response.status == 200
        async with local.http.get("/v1/status") as response:
            assert response.status == 401


async def test_a_page_of_another_site_may_not_use_the_server(local):
    async with local.http.post("/v1/shutdown", headers={"Origin": "http://evil.example"}) as response:
        assert (response.status, (await response.json())["error"]["code"]) == (403, "forbidden")
    async with local.http.get("/v1/status", headers={"Origin": local.url}) as response:
        assert response.status == 200


async def test_the_status_page_is_one_self_contained_file(local):
    async with local.http.get("/") as response:
        page = await response.text()
    assert response.status == 200 and "swarm server" in page
    assert "http://" not in page.replace("http://www.w3.org/2000/svg", "") and "src=" not in page
