"""What operators see: metrics, traces, log lines and the dashboard."""
