"""Operations of a row at a time: norms, activation, quantisation, combination."""
