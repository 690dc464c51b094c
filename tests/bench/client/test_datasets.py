"""Sessions: lengths, what is shared and what is not, files and their errors."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tokenmill.bench.client.datasets import Session, Synthetic, Trace, read_prompts, words
from tokenmill.bench.results.mooncake import TraceError, read_trace
from tokenmill.bench.workload import BenchError


def content(session: Session, turn: int = 0) -> str:
    found = session.turns[turn].content
    assert isinstance(found, str)
    return found


@pytest.mark.parametrize("count", [1, 3, 7, 8, 128, 100_000])
def test_words_are_as_many_as_asked_for(count: int) -> None:
    text = words("key", 5, count)
    assert len(text.split(" ")) == count
    assert text == words("key", 5, count)


def test_no_two_prompts_begin_alike() -> None:
    data = Synthetic(((32, 4),))
    heads = {" ".join(content(data.session(i)).split()[:7]) for i in range(3000)}
    heads |= {" ".join(content(data.warmup(i)).split()[:7]) for i in range(100)}
    assert len(heads) == 3100
    assert content(data.session(0)) != content(Synthetic(((32, 4),), seed=1).session(0))


def test_lengths_come_in_turn() -> None:
    data = Synthetic(((3, 5), (9, 2)))
    turns = [data.session(i).turns[0] for i in range(3)]
    assert [(len(str(t.content).split()), t.max_tokens) for t in turns] == [(3, 5), (9, 2), (3, 5)]


def test_shared_prefixes_and_turns() -> None:
    data = Synthetic(((8, 2),), num_turns=3, prefix_len=20, num_prefixes=2)
    first, second, third = (data.session(i) for i in range(3))
    assert first.system == third.system != second.system
    assert len(first.system.split()) == 20
    texts = {content(s, turn) for s in (first, second, third) for turn in range(3)}
    assert len(texts) == 9


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return path


def trace_row(timestamp: int, length: int, ids: list[int]) -> dict[str, Any]:
    return {"timestamp": timestamp, "input_length": length, "output_length": 3, "hash_ids": ids}


def test_trace_shares_what_its_hash_ids_share(tmp_path: Path) -> None:
    rows = [
        trace_row(0, 1100, [1, 2, 3]),
        trace_row(500, 1030, [1, 2, 4]),
        trace_row(2000, 600, [5, 2]),
    ]
    in_order = read_trace(write(tmp_path / "t.jsonl", rows), 512, speed=2.0)
    assert [row.arrival_ms for row in in_order] == [0.0, 250.0, 1000.0]
    assert read_trace(write(tmp_path / "t.jsonl", rows[::-1]), 512, speed=2.0) == in_order
    trace = Trace(tuple(in_order))
    one, two, three = (content(trace.session(i)).split() for i in range(3))
    assert (len(one), len(two), len(three)) == (1100, 1030, 600)
    assert one[:1024] == two[:1024]
    assert one[1024:1030] != two[1024:]
    assert one[:512] != three[:512] and one[512:600] == three[512:]
    assert trace.session(0).turns[0].max_tokens == 3 and trace.size == 3


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"timestamp": 1}], r"t.jsonl, line 1: 'input_length' is missing"),
        ([trace_row(0, 600, [1])], r"t.jsonl, line 1: input_length 600 needs 2 hash_ids of 512"),
        (
            [trace_row(5, 1, [1]), trace_row(-4, 1, [1])],
            "line 2: timestamp must be at least 0",
        ),
        ([], "no request in it"),
    ],
)
def test_bad_traces(tmp_path: Path, rows: list[Any], message: str) -> None:
    with pytest.raises(TraceError, match=message):
        read_trace(write(tmp_path / "t.jsonl", rows), 512)


def test_prompts(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hi"}]
    rows = [{"prompt": "a", "max_tokens": 4}, {"messages": messages, "output_len": 5}]
    path = write(tmp_path / "p.jsonl", rows)
    data = read_prompts(str(path))
    assert [data.session(i).turns[0].max_tokens for i in range(3)] == [4, 5, 4]
    assert data.session(1).turns[0].content == messages
    assert read_prompts(str(path), 9).session(0).turns[0].max_tokens == 9


@pytest.mark.parametrize("row", [{}, [], "x", {"prompt": 3}, {"prompt": "a", "max_tokens": "b"}])
def test_bad_prompts(tmp_path: Path, row: Any) -> None:
    with pytest.raises(BenchError, match=r"p.jsonl:1: expected"):
        read_prompts(str(write(tmp_path / "p.jsonl", [row])))


def test_not_json_and_not_there(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n{')
    with pytest.raises(BenchError, match=r"p.jsonl:2: not JSON"):
        read_prompts(str(tmp_path / "p.jsonl"))
    with pytest.raises(BenchError, match="cannot read"):
        read_prompts(str(tmp_path / "gone.jsonl"))


def talk(*turns: tuple[str, str]) -> dict[str, Any]:
    return {"id": "x", "conversations": [{"from": who, "value": said} for who, said in turns]}


TALKS = [
    talk(("human", "How deep is it?"), ("gpt", "b" * 41), ("human", "And now?"), ("gpt", "c")),
    talk(("gpt", "It begins with an answer."), ("human", "So?")),
    talk(("human", "Nobody answers.")),
    talk(),
]


def test_sharegpt_gives_first_questions(tmp_path: Path) -> None:
    """A token is about four characters of the answer; --output-len wins."""
    file = tmp_path / "ShareGPT_V3.json"
    file.write_text(json.dumps(TALKS, indent=1))
    assert [turn.content for turn in read_prompts(str(file)).turns] == ["How deep is it?"]
    assert read_prompts(str(file)).turns[0].max_tokens == 10
    assert read_prompts(str(file), 7).turns[0].max_tokens == 7
    file.write_text(json.dumps(TALKS[1:]))
    with pytest.raises(BenchError, match=r"V3.json: no conversation begins with a question"):
        read_prompts(str(file))
    file.write_text('[{"prompt": "a"}, 3]')
    with pytest.raises(BenchError, match=r"V3.json, entry 1: expected"):
        read_prompts(str(file))


def test_a_dataset_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load_dataset(name: str, split: str) -> list[dict[str, Any]]:
        asked.append((name, split))
        if name == "me/gone":
            raise FileNotFoundError("no such dataset")
        return TALKS

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    assert read_prompts("hf:me/talks").turns == read_prompts("hf:me/talks:test").turns
    assert asked == [("me/talks", "train"), ("me/talks", "test")]
    with pytest.raises(BenchError, match="hf:me/gone: cannot read: no such dataset"):
        read_prompts("hf:me/gone")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(BenchError, match="pip install datasets"):
        read_prompts("hf:me/talks")
