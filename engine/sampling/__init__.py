"""From logits to tokens: penalties, masks, filters, log-probabilities, seeded draws."""
