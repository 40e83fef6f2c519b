"""``vericache simulate``: the scheduler's own code on a modelled GPU and link."""
