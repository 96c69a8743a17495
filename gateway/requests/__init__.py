"""Bodies of requests: their fields, validated; what is refused by name.

Nothing here knows the cluster. The HTTP edge hands bodies in and gets typed requests.
"""
