"""Which workers there are: from the command line, from DNS or from Kubernetes.

From outside: `members`, and `choice.make_discovery`.
"""
