"""One engine over several processes: the group, its messages, its models and its KV."""
