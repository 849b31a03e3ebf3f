"""Links between domains: which network carries them, how ranks find each other, and errors of lost peers and NICs.

The connections and the thread that feeds them are C++ (csrc/transport). Here a transport is chosen, every rank's
address goes through the process group's store, and what the C++ side reports becomes a `TransportError` that names the
rank.
"""

from __future__ import annotations

from hybrid_ep.transport.choice import TransportChoice, TransportState, agree_on_transport, choose_transport, survey
from hybrid_ep.transport.domain_link import DomainLink, Ring, connect_link, open_link

__all__ = [
    "DomainLink",
    "Ring",
    "TransportChoice",
    "TransportState",
    "agree_on_transport",
    "choose_transport",
    "connect_link",
    "open_link",
    "survey",
]
