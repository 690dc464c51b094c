"""Workers whose engine answers jobs, such as ranking and video: a pool, and the worker's loop."""
