"""Reports of a worker to a router about its cached blocks: events, numbered batches and dumps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from tokenmill.core.kv import DEVICE

Hash = int


@dataclass(slots=True)
class Stored:
    """A run of blocks is cached; each hash's parent is the one before it."""

    parent: Hash | None  # of the first; the salt's seed at a root, None where it is not known
    hashes: list[Hash]
    tier: str = DEVICE
    # Where a journal records tokens: those of the blocks, and the salt where they begin a prompt.
    token_ids: list[int] = field(default_factory=list)
    salt: str | None = None


@dataclass(slots=True)
class Removed:
    """Blocks are no longer cached, or no longer in a tier behind the device."""

    hashes: list[Hash]
    tier: str = DEVICE


@dataclass(slots=True)
class Cleared:
    """Nothing is cached any more."""


Event = Stored | Removed | Cleared


# On every wire between our processes: kind and tier, hashes, parent, tokens, salt.
PackedEvent = tuple[str, list[Hash], Hash | None, list[int], str | None]


def pack_events(events: Iterable[Event]) -> list[PackedEvent]:
    return [_pack(event) for event in events]


def _pack(event: Event) -> PackedEvent:
    match event:
        case Stored(hashes=hashes, tier=tier):
            return _kind("stored", tier), hashes, event.parent, event.token_ids, event.salt
        case Removed(hashes=hashes, tier=tier):
            return _kind("removed", tier), hashes, None, [], None
        case Cleared():
            return "cleared", [], None, [], None


def _kind(kind: str, tier: str) -> str:
    return kind if tier == DEVICE else f"{kind} {tier}"


def unpack_events(packed: Iterable[PackedEvent]) -> list[Event]:
    return [_unpack(*event) for event in packed]


def _unpack(
    kind: str, hashes: list[Hash], parent: Hash | None, token_ids: list[int], salt: str | None
) -> Event:
    kind, _, tier = kind.partition(" ")
    if kind == "stored":
        return Stored(parent, hashes, tier or DEVICE, token_ids, salt)
    return Removed(hashes, tier or DEVICE) if kind == "removed" else Cleared()


@dataclass(slots=True)
class EventBatch:
    """The events of a step or more, in order; a publisher numbers its batches from 1."""

    sequence: int
    events: list[Event] = field(default_factory=list)


@dataclass(slots=True)
class Dump:
    """All cached blocks, at least as new as the batch of this number."""

    sequence: int
    hashes: list[Hash]
    # The same of tiers behind the device, and how long a token takes to come back from each.
    tiers: dict[str, list[Hash]] = field(default_factory=dict)
    token_ms: dict[str, float] = field(default_factory=dict)


class EventJournal:
    """Collects the events of a block pool until they are taken."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self.with_tokens = False  # for those who know blocks by their tokens

    def stored(
        self,
        parent: Hash | None,
        block_hash: Hash,
        tier: str = DEVICE,
        tokens: Iterable[int] = (),
        salt: str | None = None,
    ) -> None:
        last = self._events[-1] if self._events else None
        follows = isinstance(last, Stored) and (tier != DEVICE or last.hashes[-1] == parent)
        if isinstance(last, Stored) and follows and last.tier == tier:
            last.hashes.append(block_hash)
        else:
            last = Stored(parent, [block_hash], tier, salt=salt if self.with_tokens else None)
            self._events.append(last)
        if self.with_tokens:
            last.token_ids.extend(tokens)

    def removed(self, block_hash: Hash, tier: str = DEVICE) -> None:
        last = self._events[-1] if self._events else None
        if isinstance(last, Removed) and last.tier == tier:
            last.hashes.append(block_hash)
        else:
            self._events.append(Removed([block_hash], tier))

    def cleared(self) -> None:
        """Whatever came before no longer matters."""
        self._events = [Cleared()]

    def take(self) -> list[Event]:
        events, self._events = self._events, []
        return events


class EventPublisher:
    """Numbers the batches of one journal."""

    def __init__(self, journal: EventJournal) -> None:
        self._journal = journal
        self._sequence = 0

    def record_tokens(self) -> None:
        """Tell the tokens of blocks, too, from now on."""
        self._journal.with_tokens = True

    def take(self) -> EventBatch | None:
        """What happened since the last call, None for nothing."""
        events = self._journal.take()
        if not events:
            return None
        self._sequence += 1
        return EventBatch(self._sequence, events)

    def dump(
        self,
        hashes: Iterable[Hash],
        tiers: dict[str, list[Hash]] | None = None,
        token_ms: dict[str, float] | None = None,
    ) -> Dump:
        """The pool's state now. Events not taken yet are in it too; to apply them again is safe."""
        return Dump(self._sequence, list(hashes), tiers or {}, token_ms or {})
