"""A worker's processes: settings, the front's link to its ranks, starting and ending them."""
