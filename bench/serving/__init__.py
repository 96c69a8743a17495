"""Whole clusters, their stand-ins and their peers: what benches that talk HTTP start, ask and read.
Programs of `bench` and tests may import all of it."""
