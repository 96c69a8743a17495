"""Moving experts' weights between ranks while tokens flow."""
