"""The EP group: how its ranks meet, talk, and notice that one is gone."""
