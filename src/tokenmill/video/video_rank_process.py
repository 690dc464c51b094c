"""A rank that is not the first of those that make videos together.

python -m tokenmill.video.video_rank_process ADDRESS
"""

from __future__ import annotations

import sys
from multiprocessing.connection import Connection
from typing import NoReturn

from tokenmill.core.types import RanksLostError, TokenmillError
from tokenmill.engine.ranks.group import Inbox, call, join
from tokenmill.engine.ranks.rank_messages import CallOver, GroupPlace, LoadFailed, arrived, send
from tokenmill.parallel import RANK_GONE, all_or_none
from tokenmill.video.measure import measure_video
from tokenmill.video.pipeline import Pipeline, load_pipeline, open_pipeline
from tokenmill.video.video_engine import VideoEngine
from tokenmill.video.video_messages import (
    AbortVideo,
    MeasureVideo,
    StepVideo,
    SubmitVideo,
    VideoOrder,
    VideoStepOver,
)


def main(address: str) -> None:
    """Join rank 0, load the weights, and compute until rank 0 is gone."""
    connection = call(address)
    inbox = Inbox(connection, address)
    ranks = join(inbox.next_of(GroupPlace))
    order = inbox.next_of(VideoOrder)
    try:
        checkpoint = open_pipeline(order.model)
        pipeline = load_pipeline(
            checkpoint, order.model, order.offload, parallel=order.parallel, ranks=ranks
        )
    except TokenmillError as error:
        send(LoadFailed(str(error)), connection)
        inbox.next()  # until rank 0 ends
        return
    send(CallOver(), connection)
    try:
        with all_or_none():
            follow(pipeline, connection, inbox)
    except RanksLostError as error:
        if str(error) != RANK_GONE:
            raise
        sys.exit(1)  # what happened is for the one to tell that is gone


def follow(pipeline: Pipeline, connection: Connection, inbox: Inbox) -> NoReturn:
    """Compute this rank's part of what rank 0 does."""
    engine = VideoEngine(pipeline)
    while True:
        match inbox.next():
            case SubmitVideo(request):
                engine.submit(arrived(request))
            case AbortVideo(request_id):
                engine.abort(request_id)
            case StepVideo():
                engine.advance()
                send(VideoStepOver(engine.num_failed), connection)
            case MeasureVideo(request, num_steps):
                measure_video(pipeline, request, num_steps)
            case unknown:
                raise RanksLostError(f"rank 0 asks for {unknown!r}")


if __name__ == "__main__":
    main(sys.argv[1])
