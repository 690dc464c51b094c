"""All messages between the owner of a pool and its fronts: msgpack of tagged structs.

1. A front connects and says FrontHello with the ticket that it was given; the owner answers Welcome
   or FrontRefused. A ticket is good for one front.
2. For each worker that it hears of, the front binds a socket and says Connect with its address. The
   owner has the worker connect there (messages.AddFront), at once or when the worker is back.
3. The front says Listening, and from then on Report and OpenCalls, which is also its heartbeat.
   The owner sends everyone the Totals, and what the others have open.
4. WorkerGone: the worker died, or only this link to it broke; the front says Connect again.
   WorkerLeaving: the front says Left once it has nothing there any more.
5. AskOwner is answered by one OwnerAnswer. AskTrial is answered by TrialGranted when no suspect of
   another front runs; EndTrial gives it back.
6. Announced: a front has sent a request to a worker; the owner passes it on to the others.
7. Sync is answered by Synced: what the front sent before it has come by then.
8. NewKeys: the operator has changed keys or certificates.
9. Drain: finish what is open and exit; the second one: exit now.
"""

from __future__ import annotations

import msgspec

from tokenmill.core.config import (
    PoolConfig,
    RouterConfig,
    RouterPolicy,
    ServerConfig,
)
from tokenmill.core.images import VisionConfig
from tokenmill.core.keys.key_ring import KeyRing
from tokenmill.core.types import EngineStats
from tokenmill.routing.load_report import Announcement
from tokenmill.workers.accounts import AccountsView
from tokenmill.workers.fronts.report import FrontReport
from tokenmill.workers.pool_view import FrontView, PoolView
from tokenmill.workers.slot import Role


class FrontSetup(msgspec.Struct, frozen=True):
    """All that a front has to know to serve as the others do."""

    version: str
    model: str  # the name that clients use
    path: str  # of the model's files
    fingerprint: str  # of its tokenizer
    server: ServerConfig  # without secrets
    keys: KeyRing
    pool: PoolConfig = PoolConfig()
    router: RouterConfig = RouterConfig()
    vision: VisionConfig = VisionConfig()
    link_host: str | None = None  # where workers reach fronts; None: by ipc


class FrontHello(msgspec.Struct, tag=True):
    ticket: str
    version: str
    pid: int = 0


class Connect(msgspec.Struct, tag=True):
    """A socket waits for this worker."""

    worker: str
    address: str


class Listening(msgspec.Struct, tag=True):
    """Clients can call."""

    url: str


class FrontFailed(msgspec.Struct, tag=True):
    """The front cannot start; the message is one sentence for the user."""

    message: str


class Left(msgspec.Struct, tag=True):
    """The front has nothing at a leaving worker any more."""

    worker: str


class Reported(msgspec.Struct, tag=True):
    report: FrontReport
    asked: bool = False  # by GiveReport


class OpenCalls(msgspec.Struct, tag=True):
    """What is open: choices in all and by who pays, and without a first token."""

    num_open: int = 0
    by_account: dict[str, int] = {}
    num_pending: int = 0


class KeepResponse(msgspec.Struct, tag=True):
    """Keep a response for later calls, at whichever front."""

    response_id: str
    account: str
    item_ids: list[str]
    payload: bytes


class Synced(msgspec.Struct, tag=True):
    """The answer to Sync."""

    number: int


class AskTrial(msgspec.Struct, tag=True):
    """A suspect wants to run (routing/suspects.py); one at a time does, over all fronts."""


class EndTrial(msgspec.Struct, tag=True):
    """The suspect has ended, or was not the cause."""


class Announced(msgspec.Struct, tag=True):
    """What a front has sent to a worker, for the routers of the others."""

    told: Announcement
    sent_s: float  # by the clock of their host


class Scale(msgspec.Struct, tag=True):
    num_workers: int
    role: Role


class DrainWorker(msgspec.Struct, tag=True):
    worker: str
    timeout_s: float


class RenewRouter(msgspec.Struct, tag=True):
    """Begin with new routers, at all fronts."""

    policy: RouterPolicy | None


class GetTotals(msgspec.Struct, tag=True):
    """The totals of now: every front is asked for its report."""


class GetResponse(msgspec.Struct, tag=True):
    """A response that was kept, if there is one."""

    response_id: str
    account: str


class FindItem(msgspec.Struct, tag=True):
    """A response that has this item, if there is one."""

    item_id: str
    account: str


class DeleteResponse(msgspec.Struct, tag=True):
    """Forget a response that was kept."""

    response_id: str
    account: str


AboutResponse = GetResponse | FindItem | DeleteResponse
Question = AboutResponse | Scale | DrainWorker | RenewRouter | GetTotals


class AskOwner(msgspec.Struct, tag=True):
    number: int
    question: Question


class Welcome(msgspec.Struct, tag=True):
    front: str  # its name, as status shows it
    link: str  # its name at the workers, and in their load reports
    setup: FrontSetup
    workers: dict[str, Role]


class FrontRefused(msgspec.Struct, tag=True):
    message: str


class WorkerAdded(msgspec.Struct, tag=True):
    worker: str
    role: Role


class WorkerGone(msgspec.Struct, tag=True):
    worker: str
    address: str  # of the link
    reason: str
    worker_lives: bool = False  # only the link broke


class WorkerLeaving(msgspec.Struct, tag=True):
    worker: str
    timeout_s: float


class GiveReport(msgspec.Struct, tag=True):
    """Answered by one Reported."""


class Sync(msgspec.Struct, tag=True):
    """Answered by one Synced, at once."""

    number: int


class Totals(msgspec.Struct, tag=True):
    """The sums over all fronts, those that are gone included, and what the owner knows."""

    report: FrontReport
    fronts: list[FrontView]
    stats: EngineStats
    pool: PoolView
    accounts: AccountsView  # all GPU time; what workers that died had computed counts as idle
    num_restarts: int
    stored: tuple[int, int] = (0, 0)  # responses, their bytes


class OthersOpen(msgspec.Struct, tag=True):
    """The sums over the other fronts."""

    calls: OpenCalls


class TrialGranted(msgspec.Struct, tag=True):
    """Run one suspect."""


class NewKeys(msgspec.Struct, tag=True):
    """Check calls by these keys from now on, and read certificates again."""

    keys: KeyRing


class NewRouter(msgspec.Struct, tag=True):
    policy: RouterPolicy | None


class OwnerAnswer(msgspec.Struct, tag=True):
    number: int
    error: str = ""
    error_kind: str = ""  # pool, start or internal
    totals: Totals | None = None
    response: bytes | None = None
    is_deleted: bool = False


class Drain(msgspec.Struct, tag=True):
    """Finish what is open and exit; the second one: exit now."""

    failure: str = ""  # why no worker will come back: what is open ends with it at once


FromFront = (
    FrontHello
    | Connect
    | Listening
    | FrontFailed
    | Left
    | Reported
    | OpenCalls
    | KeepResponse
    | Synced
    | AskTrial
    | EndTrial
    | Announced
    | AskOwner
)
ToFront = (
    Welcome
    | FrontRefused
    | WorkerAdded
    | WorkerGone
    | WorkerLeaving
    | GiveReport
    | Sync
    | Totals
    | OthersOpen
    | TrialGranted
    | Announced
    | NewKeys
    | NewRouter
    | OwnerAnswer
    | Drain
)

encode = msgspec.msgpack.Encoder().encode
decode_from_front = msgspec.msgpack.Decoder(FromFront).decode
decode_to_front = msgspec.msgpack.Decoder(ToFront).decode
