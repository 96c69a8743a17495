"""How the checkpoint was trained and is judged; not part of the distribution."""
