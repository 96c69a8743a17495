"""The gateway's side of a running request: routers, workers, failover in mid-stream."""
