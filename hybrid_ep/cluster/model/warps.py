"""How many warps of a CTA do what between domains, as the kernels have it; a test compares the numbers with csrc."""

from __future__ import annotations

# dispatch_between/dispatch_between.cu
SEND, FORWARD = 8, 8
# combine/send_runs.cuh and combine_between/combine_between.cu. Warps go on from pushing rows to the sums for each
# domain, and from these to the sums at home.
PUSH, DOMAIN, HOME = 2, 5, 4
# between/records.cuh: a warp takes so many records of a chunk at once.
RECORDS_OF_PART = 4
