"""Channel arguments that both ends of every connection of the cluster use."""

MAX_MESSAGE_BYTES = 64 * 2**20

# A peer whose machine vanished, or that is frozen, is noticed after KEEPALIVE + TIMEOUT at the
# latest: a stream that it carried is to go on elsewhere within 5 s.
KEEPALIVE_MILLISECONDS = 1000
KEEPALIVE_TIMEOUT_MILLISECONDS = 2500

_SHARED: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_MILLISECONDS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MILLISECONDS),
    # NOTE: this one decides when a ping stays unanswered; its default is a minute.
    ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT_MILLISECONDS),
    ("grpc.http2.max_pings_without_data", 0),
)

# A connection that does not come to speak HTTP/2.
HANDSHAKE_MILLISECONDS = 5000
# More than the workers of the largest cluster, less than the files a process may open.
MAX_CONNECTIONS = 16384
MAX_METADATA_BYTES = 16 * 2**10

SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    *_SHARED,
    ("grpc.server_handshake_timeout_ms", HANDSHAKE_MILLISECONDS),
    ("grpc.http2.settings_timeout", HANDSHAKE_MILLISECONDS),
    ("grpc.max_allowed_incoming_connections", MAX_CONNECTIONS),
    ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
    # Without this a second process binds the same port and silently takes half the calls.
    ("grpc.so_reuseport", 0),
    # Our own clients ping this often; never answer them with GOAWAY.
    ("grpc.http2.min_recv_ping_interval_without_data_ms", KEEPALIVE_MILLISECONDS // 2),
    ("grpc.http2.max_ping_strikes", 0),
)

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    *_SHARED,
    ("grpc.keepalive_permit_without_calls", 1),
    # A restarted peer is to be found again at once.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 500),
    # A channel does not inherit the back-off of an earlier one to the same address.
    ("grpc.use_local_subchannel_pool", 1),
    # Peers are always inside the cluster, whatever http_proxy says.
    ("grpc.enable_http_proxy", 0),
)
