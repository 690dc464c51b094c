"""The worker pool behind a server: slots, placement, restart, migration and handover."""
