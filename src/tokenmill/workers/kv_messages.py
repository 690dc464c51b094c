"""The messages that let a prefill worker and a decode worker share a request, in order.

1. Once per pair: the front sends ConnectKV with the prefill worker's address (ModelFacts.kv) to the
   decode worker, which answers KVConnected; its `error` says why the two do not go together.
2. Submit to the prefill worker with Request.hold_kv_s. It answers with KVNotices, chunk by chunk,
   and with one Outputs: the first token. Only if its stop_reason is "prefilled" is there more to
   come; the lease then runs for hold_kv_s.
3. On the first notice of a request: Submit to the decode worker with Request.kv_from, then
   KVNotices with each notice as it came. The decode worker reads the blocks, says KVReceived and
   sends the outputs from the second token on.
4. On KVReceived, or when the decode worker ends the request: ReleaseKV to the prefill worker.
   LeasesExpired tells of leases that nobody released in time.

Whatever ends a request early is Abort to both. A dead prefill worker is DisconnectKV to its decode
workers: requests that wait for its KV end in ERROR with stop_reason "kv_transfer", as they do when
no notice comes for half a lease. A dead decode worker is Abort or ReleaseKV to the prefill worker.
"""

from __future__ import annotations

import msgspec

from tokenmill.core.kv import KVAddress, KVNotice


class ConnectKV(msgspec.Struct, tag=True):
    """Be ready to read from a peer; answered by one KVConnected."""

    peer: KVAddress


class KVConnected(msgspec.Struct, tag=True):
    engine_id: str
    error: str | None = None


class DisconnectKV(msgspec.Struct, tag=True):
    """A peer is gone; requests that wait for its KV end in ERROR."""

    engine_id: str


class KVNotices(msgspec.Struct, tag=True):
    """From the worker that computes a prompt, to be passed on to the one that decodes."""

    notices: list[KVNotice]


class KVReceived(msgspec.Struct, tag=True):
    """The KV of these requests is here; their leases can be released."""

    request_ids: list[str]


class ReleaseKV(msgspec.Struct, tag=True):
    """End leases; unknown ids are ignored."""

    request_ids: list[str]


class LeasesExpired(msgspec.Struct, tag=True):
    """Nobody released these leases in time; their blocks are free."""

    request_ids: list[str]
