"""Certified decode (VerKV): attention from a random sample of the cache, with a bound on its error.

A sample keeps token i with a known probability ``r_i`` (``compressors.poisson``). From it the sums of a query's
attention, ``D = sum w_i`` and ``N = sum w_i v_i``, are estimated (``estimator``), and how far off they are is bounded
before anything of the sample is looked at (``certificate``). Where the bound is too wide, the tokens that widen it most
are fetched from the full cache (``fetch``). What is not resident is judged from a small sketch of all keys
(``sketch``).

Notation, for one query, all tensors ``[..., n]`` over the n tokens of its KV head:

* ``w = exp(s - m)``: weight; s is the logit, m any number that all tokens of a query share (``Weights.shift``).
* ``r``: inclusion probability, in (0, 1]. Tokens with r = 1 (forced, saturated, generated, fetched) are *certain*: in
  the paper H, with what was fetched H'. The others are *sampled*: L. To fetch a token is to set its r to 1.
* ``Z``: whether a sampled token is resident. Nothing but ``estimate`` may look at it: the bound holds for sets that are
  chosen from queries, weights and probabilities alone. Where the output is certified, ``|N^|`` picks one of a fixed row
  of such sets, and the bound holds for all of them at once (``attention.LEVELS``).

What is exact and what is estimated:

=========================================  =========================================================================
w, v of certain tokens                     exact
w, v of sampled tokens that are resident   exact in the estimated sums; from the sketch in all that decides (Z-blind)
w of tokens that are not resident          from the sketch
norms of v of all tokens                   rounded up to float16
D below the relative bound                 estimated; exact with a perfect sketch
N below the relative bound                 at least the norm of its estimate less the bound
guarantee                                  per query, for a fixed query, a sketch within its radius, and independent
                                           draws; it says nothing across layers or steps, nor of tokens
=========================================  =========================================================================
"""
