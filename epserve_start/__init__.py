"""What a process does before it imports any other package of ours. Nobody else has this name."""
