"""The ranking engine as a worker has it: tasks in, scores out, figures by tier."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tiny_ranking import TINY, tiny_model, tiny_request
from tokenmill.core.requests import Request, RequestOutput
from tokenmill.core.tasks import Rank, Scores
from tokenmill.ranking.engine import RankingEngine
from tokenmill.ranking.policy import BatchLimits
from tokenmill.ranking.requests import RankRequest


def submit(
    jobs: RankingEngine, name: str, request: RankRequest, late: bool = False, **fields: object
) -> None:
    arrays = ("item_ids", "category_ids", "actions", "candidate_ids", "candidate_category_ids")
    ids = {name: getattr(request, name).astype("<i8").tobytes() for name in arrays}
    task = Rank(user_id=request.user_id, **ids, **fields)  # type: ignore[arg-type]
    jobs.submit(Request(name, task, deadline_ns=1 if late else None))


def run(jobs: RankingEngine) -> dict[str, RequestOutput]:
    found: dict[str, RequestOutput] = {}
    while jobs.has_work():
        for output in jobs.step():
            assert output.request_id not in found
            found[output.request_id] = output
    return found


def scores_of(output: RequestOutput) -> Scores:
    assert isinstance(output.delta, Scores), output.error
    return output.delta


REQUESTS = [tiny_request(30, 6), tiny_request(12, 4, user=2)]


def test_scores_are_the_models_to_the_last_bit() -> None:
    model = tiny_model()
    jobs = RankingEngine(model)
    for index, request in enumerate(REQUESTS):
        submit(jobs, str(index), request)
    outputs = run(jobs)
    for index, expected in enumerate(model.score(REQUESTS)):
        found = scores_of(outputs[str(index)])
        assert found.scores == expected.astype("<f4").tobytes()
        assert (found.batch_size, found.depends_on_batch) == (2, True)
        assert (found.scaling_seqlen, found.num_tokens) == (37, REQUESTS[index].num_tokens)


def test_a_fixed_normaliser_is_told_and_does_not_depend_on_the_batch() -> None:
    jobs = RankingEngine(tiny_model(replace(TINY, scaling_seqlen=64)))
    submit(jobs, "a", REQUESTS[0])
    found = scores_of(run(jobs)["a"])
    assert (found.scaling_seqlen, found.depends_on_batch) == (64, False)


def test_the_best_come_first_with_their_items() -> None:
    model = tiny_model()
    jobs = RankingEngine(model)
    submit(jobs, "a", REQUESTS[0], top_k=3)
    found = scores_of(run(jobs)["a"])
    (scores,) = model.score(REQUESTS[:1])
    best = np.argsort(-scores[:, 0], kind="stable")[:3]
    assert np.frombuffer(found.item_ids or b"", "<i8").tolist() == [
        REQUESTS[0].candidate_ids[index] for index in best
    ]
    assert np.frombuffer(found.scores, "<f4").tolist() == scores[best, 0].tolist()


def test_wrong_late_aborted_and_superfluous_jobs_fail_alone() -> None:
    jobs = RankingEngine(tiny_model(), BatchLimits(max_queue_requests=3))
    wrong = replace(REQUESTS[0], item_ids=np.full(30, 64))
    submit(jobs, "wrong", wrong)
    submit(jobs, "late", REQUESTS[0], late=True)
    submit(jobs, "left", REQUESTS[0])
    submit(jobs, "good", REQUESTS[0])
    submit(jobs, "more", REQUESTS[0])
    jobs.abort("left")
    outputs = run(jobs)
    kinds = {name: output.stop_reason or "" for name, output in outputs.items()}
    failed = {"wrong": "invalid", "late": "deadline", "left": "aborted", "more": "queue_full"}
    assert kinds == failed | {"good": ""}
    assert "history.item_ids[0]: 64 is unknown" in (outputs["wrong"].error or "")
    assert jobs.stats().figures["num_running"] == 0


def test_figures_tell_batches_and_keys_by_tier() -> None:
    engine = RankingEngine(tiny_model(), BatchLimits(max_batch_tokens=400))
    engine.warm_up()  # whose keys are nobody's
    jobs = engine
    for index, request in enumerate(REQUESTS):
        submit(jobs, str(index), request)
    assert jobs.stats().figures["num_waiting"] == 2
    run(jobs)
    stats = jobs.stats().figures
    assert (stats["num_waiting"], stats["steps_total"], stats["candidates_total"]) == (0, 1, 10)
    assert (stats["batch_requests_sum"], stats['batch_requests_bucket{le="1"}']) == (2, 0)
    assert stats['batch_requests_bucket{le="2"}'] == stats["batch_requests_count"] == 1
    assert stats["batch_tokens_sum"] == sum(request.num_tokens for request in REQUESTS)
    assert stats['embedding_keys_total{table="item",tier="device"}'] == 52
    assert stats['requests_total{finish="done"}'] == 2
