"""Windows of sliding layers stay cached where a later request can start, and nowhere else."""

from __future__ import annotations

import pytest

from fake_runner import EOS, VOCAB, FakeRunner, digests, next_token
from scheduler_integrity import check_points, check_scheduler
from tokenmill.core.config import SchedulerConfig
from tokenmill.core.kv_groups import Sliding
from tokenmill.core.requests import Generate, Request
from tokenmill.core.types import SamplingParams
from tokenmill.sched.cache.blocks import BlockPool
from tokenmill.sched.cache.start_points import OWNERS, StartPoints
from tokenmill.sched.scheduler import Scheduler

SIZE, WINDOW = 2, Sliding(4, 2)


def text(first: int, num_tokens: int) -> list[int]:
    """Tokens that no other text shares, for the fake model's vocabulary is small."""
    return [100 * first + i for i in range(num_tokens)]


class Chats:
    """A scheduler over a fake model that notices what nobody wrote."""

    def __init__(self, num_blocks: int = 600) -> None:
        self.pool = BlockPool(num_blocks, SIZE, True, WINDOW)
        config = SchedulerConfig(max_num_batched_tokens=16, max_model_len=400)
        self.scheduler = Scheduler(config, self.pool, EOS)
        self.runner = FakeRunner(num_blocks, SIZE, sliding=WINDOW)
        self._num_asked = 0

    def ask(self, *prompts: list[int], answer: int = 3) -> list[int]:
        """Ask all at once, the first for the shortest answer; returns what each found."""
        first = self._num_asked
        for place, prompt in enumerate(prompts):
            sampling = SamplingParams(max_tokens=answer + 8 * place, ignore_eos=True)
            self.scheduler.add(Request(str(self._num_asked), Generate(list(prompt), sampling)))
            self._num_asked += 1
        found = {}
        while self.scheduler.has_work():
            batch = self.scheduler.schedule(0)
            for output in self.scheduler.update(batch, self.runner.run(batch)):
                found[int(output.request_id)] = output.num_cached_tokens
            check_scheduler(self.scheduler)
        return [found[first + place] for place in range(len(prompts))]


def answered(prompt: list[int], num_tokens: int) -> list[int]:
    """A prompt and the fake model's answer."""
    known = list(prompt)
    for _ in range(num_tokens):
        known.append(next_token(digests(known, "")[-1]))
    return known


def test_what_no_request_can_start_from_is_free_at_once() -> None:
    chats = Chats()
    chats.ask(text(1, 100))
    pool = chats.pool
    windows = [page for page in pool._evictable if pool._tokens[page] == ()]
    # Two blocks each: at its end, and 4, 8, 16, 32 and 64 tokens before that of its prompt.
    assert 0 < len(windows) <= WINDOW.num_groups * (4 + 5 * 2)
    assert pool.num_free == pool.num_blocks
    assert len(pool.cached_hashes()) == 51, "full layers keep all blocks"


def test_the_third_request_that_branches_finds_the_border() -> None:
    chats, shared = Chats(), text(1, 40)
    found = [chats.ask(shared + text(10 + i, 20))[0] for i in range(6)]
    assert found[0] == 0 and found[1] < 40 and found[2:] == [40] * 4
    assert chats.scheduler.stats().num_branch_points >= 1
    # Sessions that go on pass over it, and it stays for others.
    assert chats.ask(answered(shared + text(12, 20), 3) + text(30, 30)) == [62]
    assert chats.ask(shared + text(31, 20)) == [40]


def test_branches_at_two_levels() -> None:
    chats, prompt = Chats(), text(1, 40)
    documents = [prompt + text(2 + d, 30) for d in range(3)]
    found = [chats.ask(documents[i % 3] + text(10 + i, 10))[0] for i in range(12)]
    # The prompt is known as a border by the second request, each document by its second one.
    assert max(found[:2]) < 40 and min(found[2:6]) >= 40 and found[6:] == [70] * 6


def test_a_changed_end_of_a_prompt_costs_no_more_than_twice_what_is_new() -> None:
    """As where a client appends to its last message what it leaves out later."""
    for back in (1, 3, 6, 13, 31, 60):
        chats, prompt = Chats(num_blocks=2000), text(1, 131)
        chats.ask(prompt)
        (found,) = chats.ask(prompt[: 131 - back] + text(9, 20))
        assert 131 - 2 * back - WINDOW.window - SIZE <= found <= 131 - back


def test_guesses_go_before_any_prefix() -> None:
    chats = Chats(num_blocks=146)
    prompts = [text(1, 61), text(2, 61), text(3, 61)]
    for prompt in prompts:
        chats.ask(prompt)
    guesses = set(chats.pool.points._stale[0])
    chats.ask(text(4, 21))
    assert guesses - set(chats.pool.points._stale[0]), "memory was scarce"
    assert [chats.ask([*answered(prompt, 3), 99])[0] for prompt in prompts] == [62] * 3


def test_requests_at_once_with_one_prompt_leave_each_end() -> None:
    """As with n > 1: who ends first keeps its window though the others run on from it."""
    chats, prompt = Chats(), text(1, 41)
    assert chats.ask(prompt, prompt, prompt) == [0, 40, 40]
    for length in (3, 11, 19):
        turn = answered(prompt, length)
        (found,) = chats.ask([*turn, 99, 98])
        assert found == (len(turn) - 1) // SIZE * SIZE
    assert chats.ask(prompt) == [40], "the end of the prompt"


def test_an_answer_that_the_next_turn_leaves_out() -> None:
    """As with reasoning, which clients leave out: the next turn starts at the end of the prompt."""
    chats, history = Chats(), text(1, 41)
    for turn in range(5):
        (found,) = chats.ask(history, answer=60)
        assert found == (0 if not turn else (len(history) - 20 - 1) // SIZE * SIZE)
        history += text(10 + turn, 20)


def test_a_session_that_is_preempted_finds_its_own_end() -> None:
    chats = Chats(num_blocks=90)
    prompts = [text(1, 31), text(2, 31)]
    chats.ask(*prompts, answer=60)
    stats = chats.scheduler.stats()
    assert stats.num_preemptions > 0
    assert chats.ask([*answered(prompts[1], 68), 99]) == [98], "it ran last"
    assert chats.scheduler.stats().num_kv_blocks_used == 0


def identity(number: int, owner: int = 0) -> int:
    return number << 20 | owner


def test_points_that_were_passed_go_first() -> None:
    points = StartPoints(most=4)
    first, second = ([identity(n), identity(n + 1)] for n in (1, 11))
    assert points.add_inside(first) == []
    assert points.add_inside(second) == []
    assert points.passes(second) == ([], [])  # it has been used once: what is newer goes first
    assert points.add_inside([identity(21)]) == second
    check_points(points, {*first, identity(21)})
    for _ in range(2):
        points.starts(first[-1])
    assert points.passes(first) == (first, []), "two requests have started there"
    points.add_inside([identity(31)])
    assert points.add_inside([identity(41)]) == [identity(21)]
    assert points.num_inside_blocks == 4 and first[-1] in points


def test_an_end_takes_no_room_of_points_inside_until_it_is_passed() -> None:
    points = StartPoints(most=2)
    ends = [[identity(10 * n + i) for i in range(2)] for n in range(4)]
    for window in ends:
        assert points.add_end(window) == []
    assert points.num_inside_blocks == points.num_inside == 0
    assert points.passes(ends[0]) == ([], [])
    assert points.passes(ends[1]) == ([], ends[0])
    assert points.num_inside == 1 and all(points.keeps(w[0]) for w in ends[1:])
    assert points.lose(ends[1][0]) == [ends[1][1]] or not points.keeps(ends[1][1])
    assert points.add_inside([identity(100 + i) for i in range(3)], branches=True) == [
        identity(100 + i) for i in range(3)
    ], "a window of more than all may keep"


def test_an_owner_with_many_points_leaves_those_of_others() -> None:
    points = StartPoints(most=40)
    quiet = [identity(n, owner=1) for n in range(2)]
    points.add_inside(quiet, branches=True)
    for number in range(10, 400, 2):
        points.add_inside([identity(number, 2), identity(number + 1, 2)], branches=True)
    assert quiet[-1] & OWNERS == 1 and quiet[-1] in points
    assert points.num_inside_blocks <= 40


@pytest.mark.parametrize("num_blocks", [40, 100, 600])
def test_points_inside_keep_a_tenth_at_most(num_blocks: int) -> None:
    chats, most = Chats(num_blocks), 0
    for number in range(40):
        chats.ask(text(number % 3, 20) + text(10 + number % 7, 9) + [VOCAB + number] * 5)
        most = max(most, chats.pool.points.num_inside_blocks)
    assert 0 < most * WINDOW.num_groups <= num_blocks / 10
