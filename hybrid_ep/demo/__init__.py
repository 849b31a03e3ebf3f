"""`hybrid-ep demo`: the main job on a virtual cluster, checked on every rank, and what it saves on the wire.

command  options, progress, exit code
   └► run        drives the cluster, one phase after another ─► results
         ├► paths     on every rank: dispatch → experts → combine, three ways
         ├► verify    on every rank: the float64 reference and the allowed error
         └► train     on every rank: a small MoE layer learns
   └► tables, figures, page   how the results look
"""
