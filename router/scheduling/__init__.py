"""From a request to a pair of workers: filters, scores, the queue for room, records of it all.

Does no I/O. From outside: everything but `filters` and `scorers`.
"""
