"""HTTP itself: listening, TLS, bodies' bounds, and clients that go away.

The only room that knows connections.
"""
