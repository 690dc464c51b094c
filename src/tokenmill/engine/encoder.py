"""A vision encoder as an engine of its own: images in, features in blocks that others read.

A request is one image. It ends with a notice that says which blocks hold its features, or with one
ERROR or REJECT. The blocks are held until every request that had a notice of them is released; then
they stay, the least recently used first to go, until another image needs the room.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from tokenmill.core.config import ExecutionConfig, Setup
from tokenmill.core.images import ImageInput
from tokenmill.core.kv import KVAddress, KVEvents, KVNotice
from tokenmill.core.specs.vision import VisionSpec, patches_problem
from tokenmill.core.types import (
    End,
    EngineStats,
    FinishReason,
    ModelLoadError,
    Request,
    RequestOutput,
)
from tokenmill.engine.choices import available_bytes, set_mode, set_num_threads
from tokenmill.engine.graphs.capture import CaptureLimits, capture_all
from tokenmill.engine.images import GROUP_PATCHES, GroupEncoder
from tokenmill.kv.features import BLOCK_TOKENS, FeatureBlockPool
from tokenmill.layers.linear import activation_dtype
from tokenmill.models import family_of
from tokenmill.models.checkpoints.weights import open_checkpoint

_SHARE = 0.5  # of the memory that is free, for features
_MOST_BYTES = 2**34  # of features: 500 images of 1,024 x 1,024 pixels of the largest Qwen3-VL
_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Held:
    """Features in blocks, and the requests that keep them there."""

    block_ids: list[int]
    users: set[str] = field(default_factory=set)


class EncoderEngine:
    """An Engine whose requests are images; also the exchange by which others reach features."""

    def __init__(
        self,
        encode: GroupEncoder,
        vision: VisionSpec,
        pool: FeatureBlockPool,
        budget: int,
    ) -> None:
        self._encode, self._vision, self._pool, self._budget = encode, vision, pool, budget
        self._waiting: deque[Request] = deque()
        self._held: OrderedDict[bytes, _Held] = OrderedDict()  # by content, the oldest use first
        self._content: dict[str, bytes] = {}  # of requests that have had their notice
        self._notices: list[KVNotice] = []
        self._refused: list[RequestOutput] = []
        self._stats = EngineStats(num_kv_blocks=pool.num_blocks, num_gpus=1)
        self._began_s, self._busy_s = time.monotonic(), 0.0

    # The engine.

    def submit(self, request: Request) -> None:
        """Queue an image. Never raises for a bad one: the next step() yields its REJECT."""
        problem = f"images: an encoder takes one a request, got {len(request.images)}"
        if len(request.images) == 1:
            problem = patches_problem(request.images[0].image, self._vision) or ""
        if problem:
            end = End(FinishReason.REJECT, "invalid_request", problem)
            self._refused.append(end.output(request.request_id))
        else:
            self._waiting.append(request)

    def step(self) -> list[RequestOutput]:
        """Encode as many images as the budget has patches, or one that has more."""
        outputs, self._refused = self._refused, []
        requests, new = self._admit()
        spent_s, failed = self._encode_all(new)
        for request in requests:
            content = request.images[0].image.content_hash
            if content in failed:
                end = End(FinishReason.ERROR, "encoder", failed[content])
                outputs.append(end.output(request.request_id))
            else:
                self._give_notice(request, spent_s.pop(content, 0.0))
        return outputs

    def abort(self, request_id: str) -> None:
        """Forget an image, encoded or not; unknown ids are ignored."""
        self._waiting = deque(r for r in self._waiting if r.request_id != request_id)
        self.release(request_id)

    def has_work(self) -> bool:
        """True while a step() would do something."""
        return bool(self._refused) or bool(self._waiting and self._may_serve(self._waiting[0]))

    def stats(self) -> EngineStats:
        """Return counters since start, and gauges now."""
        stats, elapsed_s = self._stats, time.monotonic() - self._began_s
        stats.num_waiting = len(self._waiting)
        stats.num_kv_blocks_used = sum(len(h.block_ids) for h in self._held.values() if h.users)
        stats.gpu_s, stats.gpu_idle_s = elapsed_s, elapsed_s - self._busy_s
        return stats

    # The exchange.

    @property
    def address(self) -> KVAddress:
        return self._pool.address

    def connect(self, peer: KVAddress) -> str | None:
        return "an encoder reads nothing from others"

    def disconnect(self, engine_id: str) -> None:
        """Nothing is read from others."""

    def notice(self, notice: KVNotice) -> None:
        """Nothing is read from others."""

    def release(self, request_id: str) -> None:
        """A request needs its features no more; unknown ids are ignored."""
        held = self._held.get(self._content.pop(request_id, b""))
        if held is not None:
            held.users.discard(request_id)

    def take_events(self) -> KVEvents:
        """What was encoded since the last call."""
        notices, self._notices = self._notices, []
        return KVEvents(notices, [], [])

    def wait_ms(self) -> int | None:
        return None

    def close(self) -> None:
        for connector in self._pool.connectors:
            connector.close()

    # The images of a step.

    def _admit(self) -> tuple[list[Request], list[ImageInput]]:
        """The requests of a step, which have their blocks, and the images to encode for them."""
        requests: list[Request] = []
        new: list[ImageInput] = []
        left = self._budget
        while self._waiting:
            request, image = self._waiting[0], self._waiting[0].images[0].image
            held = self._held.get(image.content_hash)
            if held is None:
                if image.num_patches > left < self._budget or not self._may_serve(request):
                    break
                held = self._held[image.content_hash] = _Held(self._take(request))
                new.append(image)
                left -= image.num_patches
            else:
                self._stats.num_image_hits += 1
            held.users.add(request.request_id)  # others of this step do not take its blocks
            self._held.move_to_end(image.content_hash)
            requests.append(self._waiting.popleft())
        return requests, new

    def _encode_all(self, images: list[ImageInput]) -> tuple[dict[bytes, float], dict[bytes, str]]:
        """The seconds of each image, or why it was not encoded: then the others go on alone."""
        spent_s: dict[bytes, float] = {}
        failed: dict[bytes, str] = {}
        if not images:
            return spent_s, failed
        try:
            spent_s |= self._put(images)
        except Exception as error:
            if len(images) > 1:
                for image in images:
                    spent, problems = self._encode_all([image])
                    spent_s, failed = spent_s | spent, failed | problems
            else:
                _log.error("an image was not encoded", exc_info=error)
                message = f"the image was not encoded: {type(error).__name__}: {error}"
                self._drop(images[0].content_hash)
                failed[images[0].content_hash] = message
        return spent_s, failed

    @torch.inference_mode()
    def _put(self, images: list[ImageInput]) -> dict[bytes, float]:
        """Encode images into their blocks; the time is divided by their patches."""
        began_s = time.monotonic()
        for image, features in self._encode(images):
            self._pool.put(self._held[image.content_hash].block_ids, features)
        spent_s, total = time.monotonic() - began_s, sum(image.num_patches for image in images)
        self._busy_s += spent_s
        stats = self._stats
        stats.num_steps += 1
        stats.num_images_encoded += len(images)
        stats.num_patches_encoded += total
        return {image.content_hash: spent_s * image.num_patches / total for image in images}

    def _give_notice(self, request: Request, spent_s: float) -> None:
        content = request.images[0].image.content_hash
        self._content[request.request_id] = content
        notice = KVNotice(request.request_id, 0, list(self._held[content].block_ids))
        self._notices.append(replace(notice, spent_s=spent_s))

    def _num_blocks(self, request: Request) -> int:
        return -(-request.images[0].num_tokens // BLOCK_TOKENS)

    def _may_serve(self, request: Request) -> bool:
        """Whether an image is encoded, or finds its blocks once unused ones are dropped."""
        unused = sum(len(held.block_ids) for held in self._held.values() if not held.users)
        known = request.images[0].image.content_hash in self._held
        return known or self._num_blocks(request) <= self._pool.num_free + unused

    def _take(self, request: Request) -> list[int]:
        """Blocks for an image that _may_serve() allows, if need be of others that nobody uses."""
        for content in [content for content, held in self._held.items() if not held.users]:
            if self._pool.num_free >= self._num_blocks(request):
                break
            self._drop(content)
        block_ids = self._pool.take(request.images[0].num_tokens)
        assert block_ids is not None
        return block_ids

    def _drop(self, content: bytes) -> None:
        self._pool.free(self._held.pop(content).block_ids)


def build_encoder(
    setup: Setup, progress: Callable[[int, int], None] | None = None
) -> EncoderEngine:
    """Load the vision encoder of a model alone; the setup is what resolve_setup() has returned."""
    model, cache = setup.model, setup.cache
    set_mode(setup.execution)
    set_num_threads(model.num_threads or 1)
    path, device, dtype = Path(model.model), model.device, model.dtype
    checkpoint = open_checkpoint(path, random_weights=model.random_weights, seed=model.seed)
    spec = checkpoint.spec
    part, vision = family_of(spec).encoder, spec.vision
    assert dtype != "auto"
    if part is None or vision is None:
        raise ModelLoadError(f"--encoder: {spec.architecture} has no vision encoder")
    prefix = part.prefix
    tensors = checkpoint.tensors(progress, device, lambda name: name.startswith(prefix))
    loaded = part.load(spec, dict(tensors), dtype, device)
    encode = GroupEncoder(loaded, vision, torch.device(device))
    if device == "cuda":
        _prepare(encode, setup.execution)
    kind = activation_dtype(dtype)
    block_bytes = vision.num_features * BLOCK_TOKENS * vision.out_size * kind.itemsize
    num_blocks = cache.num_blocks or max(1, _feature_bytes(setup) // block_bytes)
    pool = FeatureBlockPool(cache.feature_connector, vision, num_blocks, kind, device)
    # One call a step: whoever waits for the first image does not wait for the next call's.
    budget = min(setup.scheduler.encoder_budget, GROUP_PATCHES)
    return EncoderEngine(encode, vision, pool, budget)


@torch.inference_mode()
def _prepare(encode: GroupEncoder, execution: ExecutionConfig) -> None:
    """Compile the kernels, and capture graphs where they are asked for."""
    encode.warm_up()
    if not (execution.cuda_graphs and execution.fused_kernels):
        return
    graphs = encode.add_graphs()
    limits = CaptureLimits(execution.graph_capture_s, execution.graph_memory_bytes)
    capture_all(graphs.jobs(torch.cuda.graph_pool_handle()), limits)
    graphs.start()


def _feature_bytes(setup: Setup) -> int:
    """Memory for features: what is asked for, or a share of what is free after loading."""
    if setup.cache.memory_bytes is not None:
        return setup.cache.memory_bytes
    on_gpu = setup.model.device == "cuda"
    free = torch.cuda.mem_get_info()[0] if on_gpu else available_bytes()
    return min(_MOST_BYTES, int(free * min(_SHARE, setup.cache.memory_share or _SHARE)))
