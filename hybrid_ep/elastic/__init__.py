"""Jobs that outlive a rank: survivors agree on who is left and go on; ranks come back, or new ones join."""

from hybrid_ep.elastic.attempt import Recovered, Report
from hybrid_ep.elastic.group import job_of
from hybrid_ep.elastic.service import join, recover, waiting

__all__ = ["Recovered", "Report", "job_of", "join", "recover", "waiting"]
