"""KV pages of a rank: who owns them, the prefix tree over them, their memory."""
