"""Incremental text against tokenizer.decode, and stop strings."""

from __future__ import annotations

import json
import sys
import tracemalloc
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, pre_tokenizers
from tokenizers.models import WordPiece

from tiny_tokenizers import byte_fallback, byte_level, save_folder
from tokenmill.text.detokenize import Detokenizer, StopTable
from tokenmill.text.tokenizer import Tokenizer, load_tokenizer

MANY = settings(max_examples=150, deadline=None, derandomize=True)
EMOJI = "a😀 👍🏽é数\n\ufffd字 "


@pytest.fixture(scope="module")
def tokenizers(
    smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Tokenizer]:
    folder = tmp_path_factory.mktemp("tokenizers")
    return {
        "smollm2": load_tokenizer(smollm2_path),
        "byte_level": load_tokenizer(save_folder(byte_level(), folder / "byte_level")),
        "byte_fallback": load_tokenizer(
            save_folder(byte_fallback(), folder / "byte_fallback", bos_token="<s>")
        ),
    }


def random_ids(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    """Any ids, with the pieces of multi-byte characters, byte tokens and special tokens often."""
    pieces = sorted({*tokenizer.encode(EMOJI * 2), *tokenizer.special_token_ids})
    fragments = [i for i, p in enumerate(tokenizer.pieces(True)) if isinstance(p, bytes)]
    some = st.sampled_from(pieces) | st.sampled_from(fragments)
    return st.lists(some | st.integers(0, tokenizer.vocab_size - 1), max_size=24)


@pytest.mark.parametrize("name", ["smollm2", "byte_level", "byte_fallback"])
@pytest.mark.parametrize("skip", [True, False])
def test_json_of_a_token_is_what_it_adds_while_nothing_is_held_back(
    tokenizers: dict[str, Tokenizer], name: str, skip: bool
) -> None:
    tokenizer = tokenizers[name]
    num_compared = 0

    @MANY
    @given(random_ids(tokenizer))
    def check(ids: list[int]) -> None:
        nonlocal num_compared
        stream = Detokenizer(tokenizer, skip_special_tokens=skip).stream
        for token_id in ids:
            pieces, is_free = stream.json_pieces, not stream.held
            text = stream.push([token_id])
            if is_free and pieces is not None and pieces[token_id]:
                assert json.loads(pieces[token_id]) == text
                num_compared += 1

    check()
    assert num_compared > 10


@pytest.mark.parametrize("kind", ["smollm2", "byte_level", "byte_fallback"])
@pytest.mark.parametrize("skip", [True, False])
def test_deltas_join_to_the_decoded_text(
    tokenizers: dict[str, Tokenizer], kind: str, skip: bool
) -> None:
    tokenizer = tokenizers[kind]

    @MANY
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        ids = data.draw(random_ids(tokenizer))
        expected = tokenizer.decode(ids, skip_special_tokens=skip)
        stop = data.draw(st.sampled_from([(), ("never found in there",)]))
        detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip, stop=StopTable.of(stop))
        cuts = sorted(data.draw(st.sets(st.integers(0, len(ids)))) | {0, len(ids)})
        text = ""
        for start, end in pairwise(cuts):
            text += detokenizer.push(ids[start:end])
            assert expected.startswith(text)
        assert text + detokenizer.finish() == expected
        assert detokenizer.num_tokens == len(ids)
        assert detokenizer.stop_reason is None

    check()


@pytest.mark.parametrize("kind", ["smollm2", "byte_level", "byte_fallback"])
def test_characters_come_whole(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = tokenizers[kind]
    text = "Hi 😀👍🏽 é 数字."
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert any(isinstance(tokenizer.pieces(True)[token_id], bytes) for token_id in ids)
    detokenizer = Detokenizer(tokenizer)
    deltas = [detokenizer.push([token_id]) for token_id in ids] + [detokenizer.finish()]
    assert "".join(deltas) == text
    assert not any("\ufffd" in delta for delta in deltas)


def test_an_unfinished_character_is_flushed_as_decode_does(
    tokenizers: dict[str, Tokenizer],
) -> None:
    for tokenizer in tokenizers.values():
        ids = tokenizer.encode("x😀", add_special_tokens=False)[:-1]
        detokenizer = Detokenizer(tokenizer)
        assert detokenizer.push(ids) == "x"
        assert "x" + detokenizer.finish() == tokenizer.decode(ids)


def test_a_continued_text_keeps_its_leading_space(tokenizers: dict[str, Tokenizer]) -> None:
    for tokenizer in tokenizers.values():
        prompt = tokenizer.encode("the quick", add_special_tokens=False)
        ids = tokenizer.encode("the quick brown dog", add_special_tokens=False)
        assert ids[: len(prompt)] == prompt
        detokenizer = Detokenizer(tokenizer, continues=True)
        text = detokenizer.push(ids[len(prompt) :]) + detokenizer.finish()
        assert tokenizer.decode(prompt) + text == tokenizer.decode(ids) == "the quick brown dog"


def test_ids_beyond_the_vocabulary_have_no_text(tokenizers: dict[str, Tokenizer]) -> None:
    for tokenizer in tokenizers.values():
        ids = tokenizer.encode("a b", add_special_tokens=False)
        detokenizer = Detokenizer(tokenizer)
        padded = [ids[0], tokenizer.vocab_size + 7, *ids[1:]]
        assert detokenizer.push(padded) + detokenizer.finish() == "a b"


def test_other_decoders_are_followed_by_decoding_again(tmp_path: Path) -> None:
    words = ["[UNK]", "play", "##ing", "##s", "the", "game"]
    backend = Backend(WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece()
    tokenizer = load_tokenizer(save_folder(backend, tmp_path, unk_token="[UNK]"))
    ids = tokenizer.encode("playing the games")
    detokenizer = Detokenizer(tokenizer, stop=StopTable(("zzz",)))
    assert [detokenizer.push([i]) for i in ids] == ["play", "ing", " the", " game", "s"]
    assert detokenizer.finish() == ""


class TestStop:
    @pytest.fixture
    def smollm2(self, tokenizers: dict[str, Tokenizer]) -> Tokenizer:
        return tokenizers["smollm2"]

    @pytest.mark.parametrize("include", [False, True])
    def test_cuts_the_text_and_counts_the_tokens(self, smollm2: Tokenizer, include: bool) -> None:
        ids = smollm2.encode("One two three\n\nUser: four five")
        detokenizer = Detokenizer(
            smollm2, stop=StopTable(("\n\nUser:", "xyz")), include_stop_str=include
        )
        deltas = [detokenizer.push([token_id]) for token_id in ids]
        assert "".join(deltas) == "One two three" + ("\n\nUser:" if include else "")
        assert detokenizer.stop_reason == "\n\nUser:"
        assert smollm2.decode(ids[: detokenizer.num_tokens]) == "One two three\n\nUser:"
        assert detokenizer.push(ids) == detokenizer.finish() == ""

    def test_several_tokens_at_once_are_consumed_up_to_the_stop(self, smollm2: Tokenizer) -> None:
        ids = smollm2.encode("One two three four five")
        detokenizer = Detokenizer(smollm2, stop=StopTable(("three",)))
        assert detokenizer.push(ids) == "One two "
        assert detokenizer.num_tokens == 3

    def test_a_beginning_that_comes_to_nothing_is_released(self, smollm2: Tokenizer) -> None:
        ids = smollm2.encode("a\n\nUs and them")
        detokenizer = Detokenizer(smollm2, stop=StopTable(("\n\nUser:",)))
        deltas = [detokenizer.push([token_id]) for token_id in ids]
        assert "".join(deltas) == "a\n\nUs and them"
        assert deltas[1] == ""
        held = Detokenizer(smollm2, stop=StopTable(("\n\nUser:",)))
        assert held.push(smollm2.encode("a\n\nUs")) == "a"
        assert held.finish() == "\n\nUs"

    def test_of_two_stops_the_first_to_end_wins_then_the_longer(self, smollm2: Tokenizer) -> None:
        ids = smollm2.encode("abcdef")
        for stops, before, reason in (
            (("def", "c"), "ab", "c"),
            (("c", "abc"), "", "abc"),
            (("bcdefg", "cd"), "ab", "cd"),
        ):
            detokenizer = Detokenizer(smollm2, stop=StopTable(stops))
            assert detokenizer.push(ids) + detokenizer.finish() == before
            assert detokenizer.stop_reason == reason

    def test_min_tokens_lets_early_stops_pass(self, smollm2: Tokenizer) -> None:
        ids = smollm2.encode("stop one stop two")
        detokenizer = Detokenizer(smollm2, stop=StopTable(("stop",)), min_tokens=1)
        assert detokenizer.push(ids) == "stop one "
        assert detokenizer.num_tokens == 3

    def test_a_stop_may_be_split_over_characters_and_tokens(self, smollm2: Tokenizer) -> None:
        ids = smollm2.encode("x 😀😀 y")
        detokenizer = Detokenizer(smollm2, stop=StopTable(("😀😀",)))
        assert "".join(detokenizer.push([i]) for i in ids) == "x "
        assert detokenizer.stop_reason == "😀😀"

    def test_byte_tokens_stop_at_once(self, tokenizers: dict[str, Tokenizer]) -> None:
        tokenizer = tokenizers["byte_fallback"]
        ids = tokenizer.encode("the dog\u00fbthe", add_special_tokens=False)
        detokenizer = Detokenizer(tokenizer, stop=StopTable(("\u00fb",)))
        text = ""
        for token_id in ids:
            text += detokenizer.push([token_id])
        assert text == "the dog"
        assert tokenizer.decode(ids[: detokenizer.num_tokens]) == "the dog\u00fb"

    def test_as_finding_in_the_whole_text(self, tokenizers: dict[str, Tokenizer]) -> None:
        tokenizer = tokenizers["byte_level"]
        letters = [tokenizer.encode(letter)[0] for letter in "abc\n"]

        @MANY
        @given(
            ids=st.lists(st.sampled_from(letters), max_size=30),
            stops=st.lists(st.text("abc\n", min_size=1, max_size=4), min_size=1, max_size=3),
        )
        def check(ids: list[int], stops: list[str]) -> None:
            whole = tokenizer.decode(ids)
            found = [(whole.find(s) + len(s), whole.find(s), s) for s in stops if s in whole]
            detokenizer = Detokenizer(tokenizer, stop=StopTable(stops))
            text = "".join([*(detokenizer.push([i]) for i in ids), detokenizer.finish()])
            if not found:
                assert (text, detokenizer.stop_reason) == (whole, None)
                return
            end, start, stop = min(found)
            assert (text, detokenizer.stop_reason) == (whole[:start], stop)
            assert detokenizer.num_tokens == end

        check()

    def test_the_cost_of_a_long_stop_is_linear(self, tokenizers: dict[str, Tokenizer]) -> None:
        """Lines of detokenize.py that run and bytes that it keeps, for stops of 512 and 1024."""
        tokenizer = tokenizers["byte_level"]
        (letter,) = tokenizer.encode("a")
        lines, kept = [], []
        for size in (512, 1024):

            def begin_the_stop_for_ever(size: int = size) -> Detokenizer:
                table = StopTable(["a" * (size - 1) + "b", "a" * (size // 2) + "c"])
                detokenizer = Detokenizer(tokenizer, stop=table)
                detokenizer.push([letter] * 2 * size)
                return detokenizer

            lines.append(count_lines(begin_the_stop_for_ever))
            tracemalloc.start()
            begin_the_stop_for_ever()
            kept.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
        assert lines[1] < 2.2 * lines[0] and lines[1] < 100 * 1024
        assert kept[1] < 2.5 * kept[0] and kept[1] < 400 * 1024


def count_lines(action: Callable[[], object]) -> int:
    """The lines that run in the module under test."""
    count = 0

    def trace(frame: Any, event: str, _: object) -> Any:
        nonlocal count
        if not frame.f_code.co_filename.endswith("detokenize.py"):
            return None
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
    finally:
        sys.settrace(before)
    return count
