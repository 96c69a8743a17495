"""Messages between a worker's front and its ranks, and the ZeroMQ sockets they travel on.

Imports neither torch nor gRPC, nor any other room.
"""
