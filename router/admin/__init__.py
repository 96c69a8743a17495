"""The operators' service: status, draining, settings, log levels, explained requests, experts.

From outside: `service.AdminService` and `processes.Processes`.
"""
