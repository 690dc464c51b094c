"""The table of figures: what /metrics calls each of them, and where its value is found.

A `source` is an attribute, a path of attributes or something `derived` of the metrics that are
rendered: a number, a mapping by label values, a Histogram, or None for nothing to tell. Of several
fronts, counters are added up by their labels and histograms by their buckets.
"""

from __future__ import annotations

from typing import NamedTuple


class Figure(NamedTuple):
    kind: str  # gauge, counter or histogram
    name: str  # after tokenmill_
    labels: tuple[str, ...]  # beside model_name
    source: str
    vllm: str  # what vLLM calls it, after vllm:, where it means the same; else ""
    text: str


def _table(rows: str) -> tuple[Figure, ...]:
    """One figure a line, `-` for none; a line that begins with a blank continues a text."""
    figures = []
    for row in rows.strip().replace("\n ", " ").splitlines():
        kind, name, labels, source, vllm, text = row.split(None, 5)
        named = tuple(labels.split(",")) if labels != "-" else ()
        figures.append(Figure(kind, name, named, source, vllm.strip("-"), " ".join(text.split())))
    return tuple(figures)


# Of a language model's server.
ENGINE = _table("""
gauge num_requests_running - stats.num_running num_requests_running Requests in the running batch.
gauge num_requests_waiting - stats.num_waiting num_requests_waiting Requests waiting to run.
gauge num_requests_receiving - stats.num_receiving - Requests whose KV is on its way.
gauge num_requests_loading - stats.num_loading - Requests whose KV comes from a tier.
gauge kv_leases - stats.num_leases - Prompts whose KV is held for another engine.
gauge kv_cache_usage - kv_cache_usage kv_cache_usage_perc
    Share of KV blocks held by running requests, 0 to 1.
gauge prefix_cache_hit_rate - prefix_cache_hit_rate - Prompt tokens found in the cache / looked up.
gauge rank_imbalance - stats.rank_imbalance - Busiest rank / mean of experts' rows; 0: not counted.
gauge rank_imbalance_before - stats.rank_imbalance_before - The same before experts were last moved.
gauge mtp_acceptance_length - acceptance_length - Tokens of a step that verified drafts; 0: none.
gauge kv_branch_points - stats.num_branch_points - Kept starts inside cached prefixes.
gauge stored_responses - num_stored - Responses kept for later calls.
gauge stored_response_bytes - num_stored_bytes - Their size, contexts included.
counter prefix_cache_queries - stats.prefix_query_tokens prefix_cache_queries
    Prompt tokens looked up.
counter prefix_cache_hits - stats.prefix_hit_tokens prefix_cache_hits
    Prompt tokens found in the cache.
counter num_preemptions - stats.num_preemptions num_preemptions Preemptions.
counter kv_blocks_received - stats.num_kv_blocks_received - KV blocks from other engines.
counter kv_read_seconds - stats.kv_read_s - Time in which these were copied.
counter kv_blocks_slid - stats.num_kv_blocks_slid - KV blocks freed behind a window.
counter kv_leases_expired - stats.num_leases_expired - Leases that nobody released.
counter engine_steps - stats.num_steps - Steps the engine ran.
counter mtp_runs - num_draft_runs spec_decode_num_drafts Runs of drafts verified.
counter mtp_drafted_tokens position drafted - Drafts verified, by position.
counter mtp_accepted_tokens position accepted - Drafts accepted, by position.
counter expert_rebalances - stats.num_rebalances - Times that experts were moved.
counter expert_bytes_moved - stats.num_expert_bytes_moved - Bytes of experts moved between ranks.
counter expert_rebalance_seconds - stats.rebalance_s - Time that steps waited for experts.
counter thinking_budgets_spent - stats.num_budgets_spent - Answers that ran out of reasoning.
counter loops_ended - stats.num_loops_ended - Answers that a repetition ended.
counter worker_restarts - num_worker_restarts - Times a worker was restarted.
gauge kv_tier_blocks tier tier_blocks - KV blocks in a tier.
counter kv_tier_hit_tokens tier tier_hits - Prompt tokens from a tier.
counter kv_tier_bytes way tier_bytes - Bytes of KV that were copied.
counter kv_tier_copy_seconds way tier_seconds - Time that copies took.
counter kv_tier_lost_blocks why tier_lost - Blocks that tiers lost.
counter images - images.images - Images of calls.
counter image_cache_hits - images.cached - Images that were ready or being made.
counter images_fetched - images.fetched - Images fetched over the network.
counter images_decoded - images.decoded - Images decoded and resized.
counter image_tokens - images.tokens - Tokens of prompts that are images.
counter images_encoded - images.encoded - Images that a vision encoder ran on.
counter image_patches - images.patches - Patches of these.
counter encoder_cache_hits - images.encoder_hits - Images whose features were there.
counter images_refused stage images.refused - Images that were not taken.
counter gpu_wall_seconds - accounts.gpu_s - Time that passed, times GPUs.
counter gpu_idle_seconds - accounts.idle_s - Of it, without a request.
counter gpu_seconds key,part gpu_seconds - GPU time by API key and part.
counter gpu_saved_seconds key gpu_saved - What cached tokens would have taken.
counter gpu_usd key gpu_usd - Dollars of GPU time, where there is a price.
counter key_requests key key_requests - Requests that ended, by API key.
""")
# Of every server.
CALLS = _table("""
counter requests endpoint,status calls - HTTP calls by status.
counter requests_rejected reason rejected - HTTP calls refused, by error code.
""")
# Counted by the front, or the router.
ANSWERS = _table("""
counter prompt_tokens - num_prompt_tokens prompt_tokens Prompt tokens of begun answers.
counter generation_tokens - num_output_tokens generation_tokens Tokens sent to clients.
counter request_success finished_reason successes request_success Whole answers by finish reason.
counter request_failure finished_reason failures - Requests without a whole answer.
""")
LATENCIES = _table("""
histogram time_to_first_token_seconds - ttft_s time_to_first_token_seconds Arrival to first token.
histogram inter_token_latency_seconds - inter_token_s inter_token_latency_seconds
    Gap between successive outputs.
histogram request_time_per_output_token_seconds - tpot_s - Mean per token after the first.
histogram e2e_request_latency_seconds - e2e_s e2e_request_latency_seconds Arrival to last token.
histogram request_queue_time_seconds - queue_s request_queue_time_seconds Arrival to first step.
histogram request_prompt_tokens - prompt_tokens - Prompt tokens of whole answers.
histogram request_generation_tokens - generation_tokens - Tokens of whole answers.
""")
# Of a pool of workers or backends.
POOL = _table("""
counter request_migrations - pool.migrations - Times a request went on at another worker.
counter kv_transfers result transfers -
    Prompts that a prefill worker computed, by what became of their KV.
counter kv_transfer_bytes - pool.transferred_bytes - Bytes of KV that moved.
""")
# Of each worker's view.
WORKERS = _table("""
gauge worker_up - up - 1 while the worker takes requests.
gauge worker_requests - num_requests - Requests routed there that have not ended.
gauge worker_queued_tokens - queued_tokens - Tokens of prompts that wait for prefill there.
gauge worker_busy - busy - Share of the last minute with something to compute.
gauge worker_tokens_per_second - tokens_per_s - Tokens sent by the worker, over ten seconds.
gauge worker_prompt_tokens_per_second - prompt_tokens_per_s -
    Prompt tokens computed there, over ten seconds.
gauge worker_cached_blocks - cached_blocks - KV blocks that it has cached, by its events.
counter worker_routed_requests - routed - Requests routed there.
counter worker_routed_tokens - routed_tokens - Tokens of the prompts routed there.
counter worker_overlap_tokens - overlap_tokens - Of these, tokens that the router knew to be cached.
counter worker_output_tokens - output_tokens - Tokens sent by the worker.
counter worker_failures - failures - Times that it died, hung or could not be reached.
""")
# Of `tokenmill route`.
BACKENDS = _table("""
counter backend_attempts worker,result attempts -
    Calls sent to a backend by the status of its answer, unreachable, unreadable or cut.
counter backend_event_batches worker,result event_batches -
    Batches of KV cache events: received (replayed ones too), replayed, lost.
""")
# Of a server of jobs.
JOBS = _table("""
gauge jobs_open - pool.num_open - Jobs that have not ended.
gauge jobs_held - pool.num_held - Of these, jobs that wait for a worker.
counter request_migrations - pool.num_migrations - Times a job went on elsewhere.
counter worker_restarts - pool.num_restarts - Times a worker was restarted.
""")
# Their names follow that of the task.
JOB_LATENCIES = _table("""
histogram call_seconds - call_s - A call, to its answer.
histogram queue_seconds - queue_s - A request, to its first step.
""")
# Of the views of its workers.
JOB_WORKERS = _table("""
gauge worker_up - up - 1 while the worker takes jobs.
gauge worker_open - num_open - Jobs that it has.
gauge worker_busy - busy - Share of the last minute with something to compute.
counter worker_routed - routed - Jobs that were sent to it.
counter worker_failures - failures - Times that it died or hung.
""")
# Of `serve --task video`.
VIDEOS = _table("""
gauge video_jobs state jobs - Jobs by state.
gauge video_steps state steps - Denoising steps of jobs that have not ended, done or left.
gauge video_storage_bytes - num_stored_bytes - Size of finished videos.
counter videos result ended - Jobs that ended, by how.
histogram video_step_seconds - step_s - Denoising steps.
histogram video_job_seconds - job_s - Asked for to ended.
counter worker_restarts - num_worker_restarts - Times a worker was restarted.
counter request_migrations - num_migrations - Times a request went on at another worker.
""")
# Of the views of its workers.
VIDEO_WORKERS = _table("""
gauge worker_up - up - 1 while the worker takes requests.
gauge worker_requests - num_open - Requests routed there that have not ended.
gauge worker_busy - busy - Share of the last minute with something to compute.
""")
