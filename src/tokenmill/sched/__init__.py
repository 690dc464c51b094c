"""Who runs in this step: the scheduler, its queues and the paged KV blocks."""
