"""What scores cost and say on the way from the embedded server: float16 rows, hidden states, temperatures."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distill.errors import ServerError, TeacherError
from distill.packing import CONTENT_TYPE, pack, unpack
from distill.protocols import ServerInfo
from distill.serving.client import ServerClient
from distill.serving.embedded.served import Limits
from distill.serving.packed import parse_packed, request_digest, to_half
from distill.serving.scoring import asked_for, packed_body
from distill.types import ScoreRequest, Signal, SignalSpec, Support, TeacherScores
from tests.builders_embedded import VOCAB, Server, prompt, reference, reference_rows, running_server, save_model

K, ROWS = 8, 20
INFO = ServerInfo("distill-embedded", "1", VOCAB, 128, "v0", packed=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("teacher"), tie_word_embeddings=False)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with running_server(folder) as running:
        yield running


def request(seed: int = 0, temperature: float = 1.0) -> ScoreRequest:
    ids = np.array(prompt(ROWS + 10, seed), np.int32)
    rng = np.random.default_rng(seed)
    own = np.stack([rng.permutation(VOCAB)[:K] for _ in range(ROWS)]).astype(np.int32)
    own[:, 0] = np.where((own[:, 1:] == ids[-ROWS:, None]).any(1), own[:, 0], ids[-ROWS:])  # the sampled id is in it
    return ScoreRequest(f"s{seed}", ids, ROWS, own, temperature=temperature)


async def scores(server: Server, spec: SignalSpec, *requests: ScoreRequest, half: bool = False) -> list[TeacherScores]:
    client = ServerClient(f"http://127.0.0.1:{server.port}", half=half)
    try:
        return await client.score(requests, spec, "t", "v0")
    finally:
        await client.close()


def specs() -> list[SignalSpec]:
    return [SignalSpec(Signal.TOPK, K, support) for support in Support]


@pytest.mark.parametrize("spec", specs(), ids=lambda spec: spec.support.value)
async def test_a_half_row_has_the_ids_and_the_tail_of_a_whole_one_and_its_values_rounded(
    server: Server, spec: SignalSpec
) -> None:
    (whole,) = await scores(server, spec, request())
    (half,) = await scores(server, spec, request(), half=True)
    assert whole.topk_ids is not None and half.topk_ids is not None
    assert whole.topk_logprobs is not None and half.topk_logprobs is not None
    assert half.topk_ids.tolist() == whole.topk_ids.tolist()
    assert half.logprobs.tolist() == whole.logprobs.tolist()
    assert half.log_tail is not None and whole.log_tail is not None
    assert half.log_tail.tolist() == whole.log_tail.tolist()
    assert half.topk_logprobs.dtype == np.float32
    assert half.topk_logprobs.tolist() == to_half(whole.topk_logprobs).astype(np.float32).tolist()
    assert (half.topk_logprobs != whole.topk_logprobs)[np.isfinite(whole.topk_logprobs)].any(), "it did travel as half"


@pytest.mark.parametrize("spec", specs(), ids=lambda spec: spec.support.value)
def test_a_half_row_costs_at_most_six_bytes_an_id_and_eight_more_both_ways_together(
    server: Server, spec: SignalSpec
) -> None:
    asked = asked_for([request(seed) for seed in range(3)], spec, INFO, "v0", half=True)
    sent = packed_body(asked, full=False)
    raw = sent if isinstance(sent, bytes) else pack(sent, {})
    status, reply, kind = server.call("POST", "/generate", raw, kind=CONTENT_TYPE)
    assert (status, kind) == (200, CONTENT_TYPE)
    arrays = [*unpack(raw)[1].values(), *unpack(reply)[1].values()]
    columns = 2 * K if spec.support is Support.UNION else K
    assert sum(array.nbytes for array in arrays) == 3 * ROWS * (6 * columns + 8)
    # what is not arrays is a header a request
    assert len(reply) - sum(array.nbytes for array in unpack(reply)[1].values()) < 3 * 150 + 250
    assert len(parse_packed(reply, asked, "t")) == 3


@given(st.lists(st.floats(-(2.0**100), 0.0, width=32, allow_subnormal=False) | st.just(-np.inf), min_size=1))
def test_half_keeps_what_is_impossible_apart_from_what_is_improbable(values: list[float]) -> None:
    exact = np.array(values, np.float32)
    half = to_half(exact)
    assert ((half == -np.inf) == (exact == -np.inf)).all()
    shown = (exact >= -65504) & (exact < -(2.0**-14))
    assert (np.abs(half[shown].astype(np.float64) - exact[shown]) <= np.abs(exact[shown]) * 2.0**-11).all()


def test_a_whole_row_is_no_answer_to_a_request_for_half_ones(server: Server) -> None:
    spec = SignalSpec(Signal.TOPK, K)
    asked = asked_for([request()], spec, INFO, "v0")
    sent = pack(packed_body(asked, full=False), {})
    _, reply, _ = server.call("POST", "/generate", sent, kind=CONTENT_TYPE)
    with pytest.raises(TeacherError, match=r"topk_logprobs is <f4 .*, <f2"):
        parse_packed(reply, asked_for([request()], spec, INFO, "v0", half=True), "t")


async def test_hidden_states_and_the_head_make_the_full_rows(server: Server, folder: Path) -> None:
    requests = [request(0), request(1)]
    hidden = await scores(server, SignalSpec(Signal.HIDDEN), *requests)
    full = await scores(server, SignalSpec(Signal.FULL), *requests)
    head = reference(folder).lm_head.weight.detach()
    for ours, theirs in zip(hidden, full, strict=True):
        assert ours.hidden is not None and ours.hidden.shape == (ROWS, 32) and ours.hidden.dtype == np.float32
        rows = (torch.from_numpy(np.array(ours.hidden)) @ head.T).log_softmax(-1).numpy()
        assert theirs.full_logprobs is not None
        np.testing.assert_allclose(rows, theirs.full_logprobs, atol=1e-5, rtol=0)
        assert ours.logprobs.tolist() == theirs.logprobs.tolist()
        assert ours.full_logprobs is None and theirs.hidden is None


async def test_a_bfloat16_teachers_hidden_states_come_unrounded_in_two_bytes(folder: Path) -> None:
    with running_server(folder, limits=Limits(torch.device("cpu"), torch.bfloat16)) as server:
        (found,) = await scores(server, SignalSpec(Signal.HIDDEN), request())
        model = server.engine.served
        assert model is not None
        with torch.inference_mode():
            ids = torch.from_numpy(request().input_ids.astype(np.int64))[None]
            own = model.hidden(ids)[0, -ROWS - 1 : -1]
    assert found.hidden is not None and found.hidden.dtype == np.int16
    assert torch.equal(torch.from_numpy(np.array(found.hidden)).view(torch.bfloat16), own)


@pytest.mark.parametrize("bits", [0x7F80, 0xFF80, 0x7FC0], ids=["inf", "-inf", "nan"])
def test_a_hidden_state_that_is_no_number_is_refused(bits: int) -> None:
    asked = asked_for([request()], SignalSpec(Signal.HIDDEN), INFO, "v0")
    item = {"id": "s0", "prompt_tokens": ROWS + 10, "rows": ROWS, "weight_version": "v0"}
    hidden = np.zeros((ROWS, 4), np.uint16)
    arrays = {"logprobs": np.full(ROWS, -1.0, np.float32), "hidden": hidden.view(np.int16)}
    meta = {"items": [item | {"digest": request_digest(asked[0].input_ids, None)}]}
    assert parse_packed(pack(meta, arrays), asked, "t", hidden=True)[0].hidden is not None
    hidden[3, 2] = bits
    with pytest.raises(TeacherError, match="hidden state is not finite"):
        parse_packed(pack(meta, arrays), asked, "t", hidden=True)


async def test_scores_are_those_of_the_logits_divided_by_the_temperature(server: Server, folder: Path) -> None:
    model = reference(folder)
    warm = [request(0, 0.5), request(1), request(2, 3.0)]
    full = await scores(server, SignalSpec(Signal.FULL), *warm)
    top = await scores(server, SignalSpec(Signal.TOPK, K), *warm)
    for asked, rows, few in zip(warm, full, top, strict=True):
        expected = reference_rows(model, asked.input_ids.tolist(), asked.temperature)[-ROWS:]
        assert rows.full_logprobs is not None and few.topk_logprobs is not None and few.log_tail is not None
        np.testing.assert_allclose(rows.full_logprobs, expected, atol=2e-5)
        np.testing.assert_allclose(few.topk_logprobs, -np.sort(-expected, axis=1)[:, :K], atol=2e-5)
        rest = np.exp(-np.sort(-expected, axis=1)[:, K:].astype(np.float64)).sum(1)
        np.testing.assert_allclose(np.exp(few.log_tail), rest, rtol=2e-3)


def test_a_reply_at_another_temperature_is_refused(server: Server) -> None:
    spec = SignalSpec(Signal.SAMPLED)
    sent = pack(packed_body(asked_for([request()], spec, INFO, "v0"), full=False), {})
    _, reply, _ = server.call("POST", "/generate", sent, kind=CONTENT_TYPE)
    with pytest.raises(TeacherError, match=r"at temperature 1, 0\.7 was asked for"):
        parse_packed(reply, asked_for([request(0, 0.7)], spec, INFO, "v0"), "t")


@pytest.mark.parametrize(
    ("spec", "temperature", "match"),
    [(SignalSpec(Signal.SAMPLED), 0.7, "temperature 0.7"), (SignalSpec(Signal.HIDDEN), 1.0, "hidden states")],
)
def test_a_server_that_would_answer_something_else_is_not_asked(
    spec: SignalSpec, temperature: float, match: str
) -> None:
    plain = ServerInfo("sglang", "0.5.23", VOCAB, 128, "v0", packed=False)
    with pytest.raises(ServerError, match=match):
        asked_for([request(0, temperature)], spec, plain, "v0")


@pytest.mark.parametrize(
    ("body", "match"),
    [
        ({"return_hidden_states": True}, "need return_packed"),
        ({"logprob_temperature": 0.5}, "need return_packed"),
        ({"topk_dtype": "float16"}, "need return_packed"),
        ({"topk_dtype": "bfloat16", "return_packed": True}, "float16 or float32"),
        ({"logprob_temperature": 0.0, "return_packed": True}, "logprob_temperature"),
        ({"logprob_temperature": [0.5, 0.5], "return_packed": True}, "2 entries for 1"),
    ],
)
def test_what_the_server_cannot_do_exactly_it_refuses(server: Server, body: dict[str, object], match: str) -> None:
    asked = {
        "input_ids": [prompt(8)],
        "sampling_params": {"max_new_tokens": 0},
        "return_logprob": True,
        "logprob_start_len": 3,
    }
    status, reply = server.post("/generate", asked | body)
    assert status == 400 and match in reply["error"]["message"]
