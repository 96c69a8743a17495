"""Multi-head latent attention of a layer in both forms, and what all layers share in a pass.

From outside: `attention` (layers), `plan`, `rotation` (models), `form`.
"""
