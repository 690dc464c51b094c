"""A simulated worker: ranks that step together, each with a real scheduler of its own."""

from __future__ import annotations

from dataclasses import dataclass, field

from tokenmill.core.kv_events import EventPublisher
from tokenmill.core.requests import Request, RequestOutput
from tokenmill.plan.cluster.layout import WorkerPlace
from tokenmill.plan.cluster.rank import SimulatedRank
from tokenmill.plan.cluster.rank_work import RankWork, total_work
from tokenmill.plan.cluster.step_price import Priced, StepPrice
from tokenmill.routing.attention_dp import ContextPolicy, RankCaches, assign
from tokenmill.routing.router import Router
from tokenmill.routing.step_rates import StepSums
from tokenmill.sched.sequence import Sequence


@dataclass(slots=True)
class Tally:
    num_steps: int = 0
    num_held: int = 0
    busy_s: float = 0.0
    even_s: float = 0.0
    inside_s: float = 0.0
    between_s: float = 0.0
    balance: float = 0.0  # mean over max tokens of the ranks, times the time of the step
    num_output_tokens: int = 0
    num_prompt_tokens: int = 0
    num_waiting: float = 0.0  # times the time of the step
    most_waiting: int = 0
    num_running: float = 0.0
    # (seconds, sequences that decode) of every step
    gaps: list[tuple[float, int]] = field(default_factory=list)

    def count(self, works: list[RankWork], priced: Priced, held: bool, num_waiting: int) -> None:
        tokens = [work.num_tokens for work in works]
        sequences, seconds = sum(work.sequences for work in works), priced.seconds
        self.num_steps += 1
        self.num_held += held
        self.busy_s += seconds
        self.even_s += priced.even_s
        self.inside_s += priced.inside_s
        self.between_s += priced.between_s
        self.balance += sum(tokens) / len(tokens) / max(tokens) * seconds
        self.num_prompt_tokens += sum(work.prefill_tokens for work in works)
        self.num_running += sequences * seconds
        self.num_waiting += num_waiting * seconds
        self.most_waiting = max(self.most_waiting, num_waiting)
        self.gaps.append((seconds, sequences))


class Worker:
    """What a router may choose; alive while `generation` is the one that a step began in."""

    def __init__(
        self,
        place: WorkerPlace,
        ranks: list[SimulatedRank],
        price: StepPrice,
        policy: ContextPolicy,
        max_num_seqs: int,
    ) -> None:
        self.place, self.name, self.role = place, place.name, place.role
        self.ranks, self.price, self._policy = ranks, price, policy
        self._max_num_seqs = max_num_seqs
        pool = ranks[0].scheduler.pool
        self.caches = RankCaches(len(ranks), pool.block_size) if pool.prefix_cache else None
        self._journals = [r.scheduler.pool.record_events() for r in ranks] if self.caches else []
        self.publisher = EventPublisher(self.caches.record_events()) if self.caches else None
        self.rank_of: dict[str, int] = {}
        self._new: dict[str, Request] = {}
        self._works: list[RankWork] = []
        self.watched: set[str] = set()  # requests whose first output is to be told
        self.received: list[tuple[int, Sequence]] = []  # ranks and sequences whose KV has come
        self.last_end_ns = 0
        self.sums, self.tally = StepSums(), Tally()
        self.alive, self.running, self.generation = True, False, 0

    def submit(self, request: Request) -> None:
        """Take a request; it gets a rank when the next step begins."""
        self._new[request.request_id] = request

    def abort(self, request_id: str) -> None:
        self._new.pop(request_id, None)
        self.watched.discard(request_id)
        rank = self.rank_of.pop(request_id, None)
        if rank is not None:
            scheduler = self.ranks[rank].catch_up()
            scheduler.abort(request_id)
            scheduler.take_finished()

    def num_tokens_of(self, request_id: str) -> int:
        rank = self.rank_of.get(request_id)
        return 0 if rank is None else self.ranks[rank].catch_up().num_output_tokens(request_id)

    def start(self, now_ns: int) -> tuple[int | None, list[RequestOutput]]:
        """Choose a step: when it ends, None where there is nothing to do; and who was refused."""
        self._take_received()
        refused = self._hand_out()
        held = self._policy.hold([rank.outlook() for rank in self.ranks])
        self._works = [rank.choose(now_ns, held) for rank in self.ranks]
        if not any(work.num_tokens for work in self._works):
            return None, refused
        priced = self.price.price(self._works)
        total = total_work(self._works)
        self.sums.add(total.prefill_tokens, total.sequences, total.kv_tokens, 1e3 * priced.seconds)
        num_waiting = sum(rank.load()[0] for rank in self.ranks) - total.sequences
        self.tally.count(self._works, priced, held, max(0, num_waiting))
        self.running = True
        return now_ns + max(1, round(priced.seconds * 1e9)), refused

    def _take_received(self) -> None:
        received, self.received = self.received, []
        for index, seq in received:
            self.ranks[index].receive(seq)

    def _hand_out(self) -> list[RequestOutput]:
        """Give new requests to ranks by the rule that serves."""
        if not self._new:
            return []
        new, self._new = list(self._new.values()), {}
        lengths = [len(r.task.prompt_token_ids) + len(r.task.output_token_ids) for r in new]
        ranks = [0] * len(new)
        if len(self.ranks) > 1:
            loads = [rank.load() for rank in self.ranks]
            ranks = assign(loads, lengths, self._cached(new), self._max_num_seqs)
        refused: list[RequestOutput] = []
        for request, rank in zip(new, ranks, strict=True):
            self.rank_of[request.request_id] = rank
            refused += self.ranks[rank].add(request)
        return refused

    def _cached(self, new: list[Request]) -> list[dict[int, int]] | None:
        if self.caches is None:
            return None
        known = [request.task.prompt_token_ids + request.task.output_token_ids for request in new]
        return [self.caches.cached_tokens(token_ids) for token_ids in known]

    def finish(self, router: Router, now_ns: int) -> list[RequestOutput]:
        """End the step: the first outputs of requests, and the last ones."""
        self.running, self.last_end_ns = False, now_ns
        outputs: list[RequestOutput] = []
        for number, (rank, work) in enumerate(zip(self.ranks, self._works, strict=True)):
            own, chunks = rank.finish()
            num_tokens = sum(len(output.token_ids) for output in own)
            self.tally.num_output_tokens += num_tokens if own or chunks else work.sequences
            for request_id, num_new in chunks:
                router.prefill_progress(request_id, num_new)
            if self.caches is not None:
                self.caches.apply(number, self._journals[number].take())
            watched = self.watched
            for output in own:
                if output.finish_reason is not None or output.request_id in watched:
                    watched.discard(output.request_id)
                    outputs.append(output)
        self._report(router)
        return outputs

    def _report(self, router: Router) -> None:
        if self.publisher is None or self.caches is None or not router.config.events:
            return
        events = self.publisher.take()
        if events is not None and not router.apply(self.name, events):
            router.load(self.name, self.publisher.dump(self.caches.cached_hashes()))

    def die(self) -> None:
        for rank in self.ranks:
            rank.cancel()
        self.alive, self.running = False, False
        self.generation += 1
