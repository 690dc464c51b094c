"""A system of many GPUs in virtual time, over the schedulers, routers and rules that serve."""
