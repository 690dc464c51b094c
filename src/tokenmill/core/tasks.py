"""What other tasks than text ask for and give: rankings and videos.

Ids of rankings are int64, scores float32, both little-endian bytes: processes need not share their
libraries.
"""

from __future__ import annotations

import msgspec

from tokenmill.core.video import VideoParams

ID_BYTES = 8


class Rank(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """One user's history and the candidates to score."""

    user_id: int
    item_ids: bytes
    category_ids: bytes
    actions: bytes
    candidate_ids: bytes
    candidate_category_ids: bytes
    timestamps: bytes | None = None
    query_time: int = 1
    top_k: int | None = None

    @property
    def num_candidates(self) -> int:
        return len(self.candidate_ids) // ID_BYTES

    @property
    def num_units(self) -> int:
        """Items to compute, by which workers are compared."""
        return (len(self.item_ids) + len(self.candidate_ids)) // ID_BYTES


class Scores(msgspec.Struct, tag=True, kw_only=True):
    """The scores of one user's candidates, in their order or, of the best, in descending order."""

    scores: bytes  # [n, num_tasks]
    item_ids: bytes | None = None  # of the best
    num_tasks: int = 1
    num_tokens: int = 0  # the contextual token, history and candidates
    scaling_seqlen: int = 0  # what attention was divided by
    depends_on_batch: bool = False
    batch_size: int = 0  # requests of the step
    queue_ms: float = 0.0
    run_ms: float = 0.0


class Video(msgspec.Struct, tag=True, frozen=True):
    """A task: a video by a prompt."""

    prompt_token_ids: list[int]
    params: VideoParams

    @property
    def num_units(self) -> int:
        return 1


class VideoFrames(msgspec.Struct, tag=True, frozen=True):
    """Frames one after the other, and the seconds that each part of the work took."""

    width: int
    height: int
    fps: int
    num_frames: int
    data: bytes  # RGB, 8 bits each: [frames, height, width, 3]
    seconds: dict[str, float] = {}
    num_skipped: int = 0  # steps that the step cache left out

    def frame(self, index: int) -> bytes:
        num_bytes = 3 * self.width * self.height
        return self.data[index * num_bytes : (index + 1) * num_bytes]


class VideoFile(msgspec.Struct, tag=True, frozen=True):
    """A finished video as files."""

    video: bytes  # mp4
    picture: bytes  # PNG of the middle frame
    seconds: dict[str, float]  # by part


class TaskProgress(msgspec.Struct, tag=True, frozen=True):
    """How far a task is; where it begins anew at another worker, 0."""

    share: float  # of its steps
    step_s: float = 0.0
    is_denoising: bool = True  # otherwise frames are decoded
    picture: bytes = b""  # PNG of the latents, now and then
