"""No point meets its own cache: fresh prompts and salts, hits that the data explain, and doubts."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from bench.scripted_server import TEMPLATE_TOKENS, ScriptedServer
from tokenmill.__main__ import run
from tokenmill.bench.client.datasets import (
    Dataset,
    Prompts,
    PromptTurn,
    Shuffled,
    Synthetic,
    Trace,
    find_cuts,
    first_text,
    fresh,
)
from tokenmill.bench.client.prefix_hits import (
    DIFFER,
    UNEXPLAINED,
    explained_tokens,
    hit_doubts,
    note_differences,
    prefix_hits,
)
from tokenmill.bench.client.records import LoadRecord
from tokenmill.bench.results.mooncake import TraceRequest
from tokenmill.bench.results.reports import HitsReport, PointReport

pytestmark = pytest.mark.usefixtures("clean_folder")
SYSTEM = "You are a helpful assistant that answers in one short sentence and never asks back. " * 3


def text_of(dataset: Dataset, index: int) -> str:
    session = dataset.session(index)
    return f"{session.system} {first_text(session.turns[0].content)}".strip()


def shared_words(one: str, other: str) -> int:
    pairs = zip(one.split(), other.split(), strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), 10**6)


def datasets() -> list[Dataset]:
    turns = tuple(PromptTurn(f"{SYSTEM} What is {i} plus {i}?", 4) for i in range(6))
    rows = tuple(TraceRequest(0.0, 1000, 2, (1, 2 + i)) for i in range(6))
    prompts = Prompts(turns)
    synthetic = Synthetic(((40, 4),), prefix_len=30, num_prefixes=2)
    return [synthetic, Synthetic(((40, 4),)), prompts, Shuffled(prompts, 6, 3), Trace(rows)]


@pytest.mark.parametrize("dataset", datasets(), ids=lambda d: type(d).__name__)
def test_seeds_share_nothing_and_reproduce(dataset: Dataset) -> None:
    one, other, again = fresh(dataset, 1), fresh(dataset, 2), fresh(dataset, 1)
    for index in range(6):
        assert text_of(one, index) == text_of(again, index)
        assert all(shared_words(text_of(one, index), text_of(other, i)) < 4 for i in range(6))
        warm = first_text(one.warmup(index).turns[0].content)
        assert warm != first_text(other.warmup(index).turns[0].content)


@pytest.mark.parametrize("dataset", datasets(), ids=lambda d: type(d).__name__)
def test_what_data_share_they_share_within_a_seed(dataset: Dataset) -> None:
    salted = fresh(dataset, 7)
    for one in range(4):
        for other in range(one):
            before = shared_words(text_of(dataset, one), text_of(dataset, other))
            after = shared_words(text_of(salted, one), text_of(salted, other))
            assert after - before in (0, 4) or before < 4 > after  # a salt is four words


def test_a_pass_is_not_the_one_before() -> None:
    for dataset in (fresh(d, 1) for d in datasets() if d.size):
        first = {text_of(dataset, i) for i in range(6)}
        assert len(first) == 6
        second = [text_of(dataset, i) for i in range(6, 12)]
        assert all(shared_words(a, b) < 4 for a in first for b in second)


def count_tokens(text: str) -> int:
    """Words and signs, a blank with the word behind it; long words are two tokens."""
    return sum(1 + (len(t.strip()) > 9) for t in re.findall(r"\s?\w+|[^\w\s]|\s", text))


def test_a_salt_stands_before_an_image_that_begins_a_prompt() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:,x"}}
    seen = [{"role": "user", "content": [image]}]
    turns = (PromptTurn("What is on the image?", 4, ("data:,x",)), PromptTurn(seen, 4))
    cuts = find_cuts(turns, count_tokens)
    for data in (Prompts(turns, 5), Prompts(turns, 5, cuts)):
        for index, rest in enumerate(([{"type": "text", "text": "What is on the image?"}], [])):
            (turn,) = data.session(index).turns
            assert isinstance(turn.content, list) and not turn.images
            salt, *others = turn.content[0]["content"]
            assert len(salt["text"].split()) == 4 and others == [image, *rest]


def test_a_salt_changes_no_length_where_a_tokenizer_is_known() -> None:
    contents: list[Any] = [
        "Summarize the following article: it is a long one.",
        "Internationalization, standardization and so on are the words of this text.",
        [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Hello"}],
        [{"role": "user", "content": [{"type": "text", "text": "What is on the image here?"}]}],
    ]
    turns = tuple(PromptTurn(content, 4) for content in contents)
    cuts = find_cuts(turns, count_tokens)
    assert all(cut.num_chars for cut in cuts)
    data = Prompts(turns, 5, cuts)
    for index, turn in enumerate(turns):
        salted, plain = data.session(index).turns[0].content, turn.content
        assert first_text(salted) != first_text(plain)
        assert count_tokens(first_text(salted)) == count_tokens(first_text(plain))
        if isinstance(plain, list):
            assert isinstance(salted, list) and salted[1:] == plain[1:]
            assert salted[0]["role"] == plain[0]["role"]
    short = find_cuts((PromptTurn("Hi"),), count_tokens)  # no room: the salt is put before
    assert (
        len(first_text(Prompts((PromptTurn("Hi"),), 5, short).session(0).turns[0].content).split())
        == 5
    )
    assert find_cuts(turns, len) == ()  # a tokenizer of characters


def record(session: int, tokens: int, cached: int | None = 0, turn: int = 0) -> LoadRecord:
    return LoadRecord(
        session, turn, 0, prompt_tokens=tokens, completion_tokens=5, cached_tokens=cached
    )


def test_unique_prompts_explain_the_template_alone() -> None:
    data = Synthetic(((90, 5),))
    assert explained_tokens(data, [record(i, 100) for i in range(3)]) == [10, 10, 10]


def test_a_shared_prefix_is_explained_from_its_second_request_on() -> None:
    data = Synthetic(((20, 5),), prefix_len=70, num_prefixes=2)
    records = [record(i, 100) for i in range(4)]
    most = explained_tokens(data, records)
    assert most == pytest.approx([10, 10, 10 + 90 * 70 / 90, 80])
    warm = [record(-1, 100) for _ in range(2)]  # its prefixes are those of the point
    assert explained_tokens(data, records, warm) == pytest.approx([80, 80, 80, 80])


def test_a_turn_explains_the_next_one() -> None:
    data = Synthetic(((20, 5),), num_turns=2)
    records = [record(0, 30), record(1, 30), record(0, 60, turn=1), record(1, 58, turn=1)]
    assert explained_tokens(data, records) == [10, 10, 35, 35]


def test_blocks_of_a_trace_are_explained_where_it_repeats_them() -> None:
    data = Trace((TraceRequest(0, 1100, 2, (1, 2, 3)), TraceRequest(0, 1100, 2, (1, 2, 4))))
    records = [record(i, 1100) for i in range(3)]  # the last one is a second pass
    assert explained_tokens(data, records) == pytest.approx([0, 1024, 0])


def test_given_prompts_explain_what_they_have_in_common() -> None:
    turns = tuple(PromptTurn("s" * 640 + chr(97 + i) * 640, 4) for i in range(2))
    records = [record(i, 320, cached=300) for i in range(4)]
    plain, salted = Prompts(turns), Prompts(turns, 1)
    warm = [record(-1, 64)]
    assert explained_tokens(plain, records, warm) == pytest.approx([0, 160, 320, 320])
    assert explained_tokens(salted, records, warm) == pytest.approx([0, 160, 0, 160])
    hits = prefix_hits(salted, records, warm)
    assert hits is not None and hits.share == pytest.approx(300 / 320)
    assert hits.num_unexplained == 4 and set(hit_doubts(hits)) == {UNEXPLAINED}


def test_tokens_of_images_are_no_part_of_the_template() -> None:
    """The file of an image in a prompt has more characters than the image has tokens."""
    records = [record(i, 100) for i in range(2)]
    for found in records:
        found.image_tokens = 60
    made = Synthetic(((30, 5),), num_images=1, image_size=(64, 64))
    assert explained_tokens(made, records) == [10, 10]
    given = Prompts(tuple(PromptTurn("What?", 4, (f"data:{i}" + "A" * 9000,)) for i in range(2)), 1)
    assert explained_tokens(given, records, [record(-1, 74)]) == [10, 10]


def test_who_tells_of_hits() -> None:
    data = Synthetic(((90, 5),))
    silent = [record(i, 100, None) for i in range(3)]
    by_server = prefix_hits(data, silent, (), 0.5)
    assert by_server is not None and by_server.by == "server" and by_server.share == 0.5
    assert hit_doubts(by_server)[UNEXPLAINED].count == 1
    nobody = prefix_hits(data, silent)
    assert nobody is not None and nobody.share is None and hit_doubts(nobody) == {}
    assert prefix_hits(data, [replace_tokens(record(0, 1))]) is None


def replace_tokens(found: LoadRecord) -> LoadRecord:
    found.prompt_tokens = None
    return found


def point(load: str, share: float, explained: float) -> PointReport:
    hits = HitsReport(share=share, explained=explained, by=None, num_unexplained=None)
    return PointReport(load=load, num_completed=1, prefix_hits=hits)


def test_points_with_different_hits_are_doubted() -> None:
    points = [point("a", 0.1, 0.12), point("b", 0.88, 0.9), point("c", 0.5, 0.12)]
    note_differences(points)
    note_differences(points)
    assert [set(p.doubts) for p in points] == [set(), set(), {DIFFER}]
    text = points[2].doubts[DIFFER].first
    assert "50%" in text and "10% at a" in text


def bench(capsys: pytest.CaptureFixture[str], command: str, *flags: str) -> dict[str, Any]:
    assert run(["bench", command, *flags, "--json"]) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return report


def flags_of(server: ScriptedServer, *more: str) -> tuple[str, ...]:
    common = ("--no-audit", "--no-server-metrics", "--warmup-requests", "2")
    return ("--url", server.url, "--model", "prefix-cache", *common, *more)


def write_prompts() -> tuple[str, ...]:
    rows = [{"prompt": " ".join(f"w{i}x{j}" for j in range(60))} for i in range(12)]
    Path("p.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    return ("--prompts", "p.jsonl")


def hits_of(report: dict[str, Any]) -> list[float]:
    return [found["prefix_hits"]["share"] for found in report["points"]]


def test_the_same_run_twice_meets_no_cache(
    server: ScriptedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = flags_of(server, "--num-requests", "12", "--concurrency", "3", "--input-len", "80")
    reports = [bench(capsys, "endpoint", *flags, "--output-dir", name) for name in ("a", "b")]
    for report in reports:
        assert hits_of(report)[0] <= TEMPLATE_TOKENS / (TEMPLATE_TOKENS + 80)
        assert report["points"][0]["doubts"] == {} and report["prompts"]["seed_drawn"]
        assert report["settings"]["seed"] == report["prompts"]["seed"]
    assert reports[0]["prompts"]["seed"] != reports[1]["prompts"]["seed"]
    manifest = json.loads(Path("a/manifest.json").read_text())
    assert manifest["configuration"]["seed"] == reports[0]["prompts"]["seed"]
    compared = bench(capsys, "compare", "a", "b")["comparisons"][0]
    assert compared["doubts"] == [] and "doubt" not in compared["verdict"]


def test_a_seed_given_repeats_a_run_and_the_cache_is_named(
    server: ScriptedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = flags_of(server, "--num-requests", "40", "--concurrency", "8", "--input-len", "80")
    before = len(server.seen)
    reports = [
        bench(capsys, "endpoint", *flags, "--seed", "5", "--output-dir", name)
        for name in ("a", "b")
    ]
    sent = [str(seen.body["messages"]) for seen in server.seen[before:]]
    assert sorted(sent[:42]) == sorted(sent[42:]) and len(sent) == 84
    assert reports[0]["points"][0]["doubts"] == {}
    assert reports[1]["points"][0]["doubts"][UNEXPLAINED]["count"] == 40
    assert run(["bench", "compare", "a", "b"]) == 0
    out = capsys.readouterr().out
    compared = json.loads(out.splitlines()[-1])["comparisons"][0]
    assert compared["verdict"].endswith(", in doubt") and len(compared["doubts"]) == 1
    assert re.search(r"B against A: .*, in doubt: prefix-cache hits \d+% -> \d+%", out)
    assert "note: 40 x prefix_hits_unexplained" in out


def test_a_sweep_over_given_prompts_meets_no_cache(
    server: ScriptedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = flags_of(server, *write_prompts(), "--concurrency", "2,4")
    report = bench(capsys, "endpoint", *flags)
    assert all(share <= 16 / 74 for share in hits_of(report))  # the template and the salt
    assert all(found["doubts"] == {} for found in report["points"])
    assert report["prompts"]["salt"].startswith("4 words before each prompt")
    same = bench(capsys, "endpoint", *flags, "--same-prompts", "--output-dir", "same")
    assert hits_of(same)[1] > 0.8 and same["prompts"]["same_at_every_point"]
    assert set(same["points"][1]["doubts"]) == {UNEXPLAINED, DIFFER}
    assert "--same-prompts" in Path("same/report.html").read_text()


def test_saturation_and_campaign_meet_no_cache(
    server: ScriptedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = flags_of(server, *write_prompts())
    search = ("--saturate", "--num-requests", "8", "--goodput", "ttft:9000")
    report = bench(capsys, "endpoint", *flags, *search)
    assert report["saturation"]["doubts"] == [] and max(hits_of(report)) < 0.3
    curve = ("--quick", "--duration", "0.1", "--max-concurrency", "33")
    reports = [
        bench(capsys, "campaign", *flags, *curve, *more) for more in ((), ("--same-prompts",))
    ]
    told = [[r for r in report["not_valid_because"] if "prefix" in r] for report in reports]
    assert told[0] == [] and max(hits_of(reports[0])) < 0.3
    assert any("data of this point explain" in reason for reason in told[1])
