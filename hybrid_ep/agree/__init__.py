"""What ranks tell each other outside of kernels: notes, meetings, fields of calls, refusals, losses and blame."""
