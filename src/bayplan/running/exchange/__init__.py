"""Sums over ranks: which way they take, by which ranks share a host."""
