"""Receipts as clients and operators read them: GPU-seconds, and dollars where there is a price."""

from __future__ import annotations

from msgspec import UNSET, UnsetType

from tokenmill.api.protocol.answers import AnswerSchema, UsageReceipt
from tokenmill.core.cost import Cost, usd_of
from tokenmill.workers.accounts import AccountsView

DIGITS = 9  # of seconds: nanoseconds
USD_DIGITS = 12


class KeyReceipt(AnswerSchema, kw_only=True):
    """What the requests of one API key took, those that run included."""

    key: str  # the hash that log lines show, never the key
    num_requests: int  # that have ended
    receipt: UsageReceipt


class RequestReceipt(AnswerSchema, kw_only=True):
    request_id: str
    key: str
    receipt: UsageReceipt


class Receipts(AnswerSchema, kw_only=True):
    """The answer to GET /workers/receipts: the keys' gpu_seconds, idle and untold are all."""

    price_per_gpu_hour: float | None
    num_gpus: int  # on CPU: processes that compute
    gpu_seconds: float  # that have passed, times GPUs
    idle_gpu_seconds: float
    untold_gpu_seconds: float  # of running requests, since workers last told
    usd: float | UnsetType = UNSET  # of all GPU-seconds
    keys: list[KeyReceipt]
    requests: list[RequestReceipt]  # the latest that have ended, the oldest first


def receipt_of(cost: Cost, price: float | None) -> UsageReceipt:
    return UsageReceipt(
        gpu_seconds=round(cost.spent_s, DIGITS),
        prefill_gpu_seconds=round(cost.prefill_s, DIGITS),
        decode_gpu_seconds=round(cost.decode_s, DIGITS),
        drafts_gpu_seconds=round(cost.drafts_s, DIGITS),
        saved_gpu_seconds=round(cost.saved_s, DIGITS),
        usd=UNSET if price is None else round(usd_of(cost.spent_s, price), USD_DIGITS),
    )


def receipts_of(view: AccountsView, price: float | None) -> Receipts:
    return Receipts(
        price_per_gpu_hour=price,
        num_gpus=view.num_gpus,
        gpu_seconds=round(view.gpu_s, DIGITS),
        idle_gpu_seconds=round(view.idle_s, DIGITS),
        untold_gpu_seconds=round(view.untold_s, DIGITS) + 0.0,  # not -0.0
        usd=UNSET if price is None else round(usd_of(view.gpu_s, price), USD_DIGITS),
        keys=[
            KeyReceipt(
                key=account.name,
                num_requests=account.num_requests,
                receipt=receipt_of(account.cost, price),
            )
            for account in view.accounts
        ],
        requests=[
            RequestReceipt(
                request_id=each.request_id,
                key=each.account,
                receipt=receipt_of(each.cost, price),
            )
            for each in view.latest
        ],
    )
