"""Surrogates: what fits, measures and stores the networks that predict KVzip's scores from the cache."""
