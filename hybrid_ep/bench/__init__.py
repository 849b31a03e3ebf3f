"""`hybrid-ep bench`: dispatch and combine of any implementation, checked first, then timed.

command  options, progress, what is printed and written
   └► launch     starts ranks, or joins those of torchrun or mpirun
         └► measure    on every rank: one implementation through check, then timing ─► RankMeasurement
               ├► subjects             implementations behind one small interface
               ├► expected             what must arrive, made from the seed; compares, measures nothing
               └► timing               CUDA events or the CPU's clock; measures, asserts nothing
         └► wire       on every rank: the same rows by a kernel that only pushes, by the same timer ─► RankWire
   └► results    what all ranks measured, put together
   └► tables, figures   how it looks
"""
