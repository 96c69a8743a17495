"""A worker's gRPC front: services, status, metrics, draining."""
