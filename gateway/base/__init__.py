"""What every other room of the gateway may use: settings, metrics, and errors in OpenAI's form.

Imports no other room. From outside: `settings`, `metrics`.
"""
