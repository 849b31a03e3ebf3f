"""How many warps of a CTA do what between domains, as the kernels have it; a test compares the numbers with csrc."""

from __future__ import annotations

__all__ = [
    "DISPATCH_FORWARD_WARPS",
    "DISPATCH_SEND_WARPS",
    "DISPATCH_THREADS",
    "DOMAIN_WARPS",
    "HOME_WARPS",
    "PUSH_WARPS",
    "RECORDS_OF_PART",
]

# dispatch_between/dispatch_between.cu
DISPATCH_SEND_WARPS, DISPATCH_FORWARD_WARPS = 8, 8
DISPATCH_THREADS = 32 * (DISPATCH_SEND_WARPS + DISPATCH_FORWARD_WARPS)
# combine/send_runs.cuh and combine_between/combine_between.cu. Warps go on from pushing rows to the sums for each
# domain, and from these to the sums at home.
PUSH_WARPS, DOMAIN_WARPS, HOME_WARPS = 2, 5, 4
# between/records.cuh: a warp takes so many records of a chunk at once.
RECORDS_OF_PART = 4
