"""What every other room of ctl may use: how commands print and take options, child processes,
ports, model folders. Imports no other room."""
