"""Settings that are gone, and what is so now."""

from __future__ import annotations

_GONE = {
    "header-timeout body-timeout body-idle-timeout send-timeout keep-alive-timeout "
    "max-connections": (
        "the server waits 20 s for headers, 300 s for a body and 30 s for each part of it, 300 s "
        "for a client to read and 60 s on an idle connection, and has at most 8,192 connections"
    ),
    "max-image-size max-image-area max-images image-max-pixels image-min-pixels "
    "image-timeout image-cache-size image-processes max-encoder-patches": (
        "images have at most 20 MiB and 64 million pixels, a call at most 32 of them, each fetched "
        "in 10 s; the model says how they are resized"
    ),
    "max-stored-responses max-stored-response-size stored-response-age": (
        "4,096 responses or 256 MiB are kept for a day; store=false in a call keeps none"
    ),
    "heartbeat hang-timeout start-timeout max-restarts": (
        "a worker is killed after 60 s without a heartbeat (with videos 600 s) or 1,800 s without "
        "being ready, and started again five times in a row"
    ),
    "router-prefill-weight router-decode-weight router-events router-lifetime "
    "router-worker-blocks router-seed": (
        "the router of tokenmill serve knows what its workers cache; --router chooses its policy"
    ),
    "fused-kernels overlap": (
        "tokenmill serve has it on where it is faster; bench ladder measures it"
    ),
    "max-batch-tokens candidate-chunk latency-limit cache-rows": (
        "tokenmill serve makes batches of up to 160,000 rows that last at most 80 ms, and a GPU "
        "caches a tenth of a table in a folder"
    ),
    "max-video-jobs max-video-megapixels": "256 videos of at most 300 megapixels may wait",
    "schedule vae-tiles": "tokenmill serve makes videos by MLPerf's schedule and without tiles",
    "graph-memory graph-capture-time": (
        "CUDA graphs take at most 2 GiB and 30 s; --no-cuda-graphs turns them off"
    ),
    "rebalance-layers": "two layers move between two steps",
    "adp-batching-wait-iters": "prompts wait by --adp-timeout-iters alone",
    "latent-dir": "put the files into the folder latents of --video-dir",
    "max-body-memory": "long bodies and images of all calls share 512 MiB",
    "stream-interval": "each step's tokens are an event of a stream",
    "max-pending": "--max-concurrency and --max-queue limit what is taken",
    "open-metrics": "give Prometheus the control token as its credentials",
    "log-stats": "--log-level warning logs no throughput",
    "default-max-tokens": "send max_tokens in a call; else the context is the limit",
    "request-timeout": "a call runs until it ends or its client leaves",
    "kv-lease": "computed blocks wait 30 s for the worker that decodes",
    "max-migrations": "a request runs alone after two workers in a row died with it",
    "kv-events-replay": "give --kv-events tcp://*:5557,replay=tcp://*:5558",
    "weights-seed": "random weights are those of seed 0",
    "kv-cache-share": "use --gpu-memory-utilization or --kv-cache-memory",
    "chunked-prefill": "long prompts are always split over several steps",
    "policy": "use --client-priority for the priorities of clients",
    "mtp-adaptive": "fewer tokens are drafted where they cost more than they give",
    "record-size": "a record becomes FILE.old at 256 MiB",
    "ep-nodes": "use ParallelConfig(nodes=N) of the Python API",
}
_NOW = {key: now for keys, now in _GONE.items() for key in keys.split()}


def what_is_so_now(key: str) -> str:
    """A sentence about a setting that was removed; empty for any other name."""
    now = _NOW.get(key.removeprefix("no-"), "")
    return f"it is no setting any more: {now}" if now else ""
