"""The plan of one micro-batch: which experts get replicas in spare slots, and which copies of tokens go where.

A pure function of the matrix of counts, which all ranks have: every rank computes the same plan, and nothing is sent to
agree on it. It uses integers only, so that every device computes the same. The host never waits.

A plan has a wanted maximum, the most copies that a rank should receive. In each domain, ranks below the maximum take
copies, one rank after another, the rank with the fewest copies first. A rank above the maximum gives copies of its
largest experts, at most one expert for each spare slot of the taker, until the taker has the maximum. If several ranks
are above the maximum, the one that can give most is the giver. A giver may end below the maximum. Then it takes copies
itself in a later step. So each rank takes from one giver only.

With as many spare slots as experts, the maximum can be the mean. The argument is that of the alias method (source:
Walker, "An Efficient Method for Generating Discrete Random Variables with General Distributions", 1977). With fewer
spare slots the mean may be out of reach. So several maxima are tried at once, and the best plan is kept.

    S sources (all ranks)   E experts   R ranks   D domains   LE = E/R   B spare slots of a rank   V wanted maxima
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hybrid_ep.checks import require, require_int
from hybrid_ep.core import kernels
from hybrid_ep.core.checks import packed, require_expert_indices, require_tensor, require_traceable

_NUM_MAXIMA = 32
_MAX_TOLERANCE = 1e6


class OnlinePlan(NamedTuple):
    """The replicas of a micro-batch, and the copies that each rank gets.

    Attributes:
        spare: ``[R, B]`` int64: the expert in each spare slot, −1 where it is empty.
        quota: ``[E, R/D]`` int64: how many copies of each expert go to each rank of its domain.
        loads: ``[R]`` int64: copies that each rank receives.
    """

    spare: Tensor
    quota: Tensor
    loads: Tensor


def require_tolerance(tolerance: float) -> None:
    """Checks the argument `tolerance` of a plan.

    Raises:
        ConfigError: it is no number, or out of range.
    """
    is_number = isinstance(tolerance, float | int) and not isinstance(tolerance, bool)
    require(is_number and 0 <= tolerance <= _MAX_TOLERANCE, "tolerance", tolerance, f"0 … {_MAX_TOLERANCE:g}")


def plan_online(counts: Tensor, *, num_ranks_per_domain: int, num_spare: int, tolerance: float = 0.0) -> OnlinePlan:
    """Plans replicas for one micro-batch. Local, deterministic, and without a host sync.

    Args:
        counts: ``[R, E]`` int64: copies that each rank sends to each expert; fewer than 2³¹ for the experts of a
            domain.
        num_ranks_per_domain: divides R; replicas stay in the domain of their expert.
        num_spare: B, spare slots of each rank.
        tolerance: ε, 0 … 10⁶; a rank may receive (1 + ε) times the mean of its domain, which needs fewer replicas.

    Raises:
        ConfigError: an argument does not fit.
    """
    by_kernel = _require_counts(counts)
    num_ranks, num_experts = counts.shape
    require_int("num_ranks_per_domain", num_ranks_per_domain, minimum=1)
    require_int("ranks of counts", num_ranks, minimum=1, multiple_of=num_ranks_per_domain)
    require_int("experts of counts", num_experts, minimum=1, multiple_of=num_ranks)
    require_int("num_spare", num_spare, minimum=0)
    require_tolerance(tolerance)
    if by_kernel:
        sizes = {"num_ranks": num_ranks, "num_experts": num_experts, "num_spare": num_spare}
        if kernels.native.plan_fits(**sizes, ranks_per_domain=num_ranks_per_domain):
            return _plan_by_kernel(packed(counts), num_ranks_per_domain, num_spare, tolerance)
    num_local, num_domains = num_experts // num_ranks, num_ranks // num_ranks_per_domain
    home = counts.sum(0).view(num_domains, 1, num_ranks_per_domain, num_local)
    wanted = _wanted_maxima(home.sum(3).squeeze(1), tolerance)
    spare, given, home = _fill(home.expand(-1, _NUM_MAXIMA, -1, -1), wanted, num_spare)
    loads = home.sum(3) + given.sum(3)

    # The smallest maximum; of equal ones the plan with the fewest replicas.
    most = torch.maximum(loads.amax(2), wanted[:, :1])
    used = (spare >= 0).sum((2, 3))
    best = (most * (num_ranks_per_domain * num_spare + 1) + used).argmin(1).view(-1, 1, 1, 1)
    spare, given, home = (_pick(tensor, best) for tensor in (spare, given, home))

    hosts = torch.arange(num_ranks_per_domain, device=counts.device).view(1, -1, 1)
    quota = counts.new_zeros(num_domains, num_ranks_per_domain * num_local, num_ranks_per_domain)
    own = torch.arange(num_ranks_per_domain * num_local, device=counts.device).view(1, num_ranks_per_domain, num_local)
    flat = quota.flatten(1)
    flat.scatter_add_(1, (own * num_ranks_per_domain + hosts).expand(num_domains, -1, -1).flatten(1), home.flatten(1))
    flat.scatter_add_(1, (spare.clamp_min(0) * num_ranks_per_domain + hosts).flatten(1), given.flatten(1))
    first = torch.arange(num_domains, device=counts.device).view(-1, 1, 1) * num_ranks_per_domain * num_local
    return OnlinePlan(
        spare=torch.where(spare >= 0, spare + first, -1).view(num_ranks, num_spare),
        quota=quota.view(num_experts, num_ranks_per_domain),
        loads=(home.sum(2) + given.sum(2)).view(num_ranks),
    )


def _plan_by_kernel(counts: Tensor, num_ranks_per_domain: int, num_spare: int, tolerance: float) -> OnlinePlan:
    """Computes `plan_online` in one kernel."""
    num_ranks, num_experts = counts.shape
    plan = OnlinePlan(
        spare=counts.new_empty(num_ranks, num_spare),
        quota=counts.new_empty(num_experts, num_ranks_per_domain),
        loads=counts.new_empty(num_ranks),
    )
    kernels.native.plan_online(
        counts=counts.data_ptr(),
        spare=plan.spare.data_ptr(),
        quota=plan.quota.data_ptr(),
        loads=plan.loads.data_ptr(),
        num_ranks=num_ranks,
        num_experts=num_experts,
        ranks_per_domain=num_ranks_per_domain,
        num_spare=num_spare,
        tolerance_factor=1 + float(tolerance),
        **kernels.place_of(counts),
    )
    return plan


def map_online(plan: OnlinePlan, counts: Tensor, topk_idx: Tensor, rank: int) -> Tensor:
    """Maps this rank's copies to slots: home and spare slots of a rank in a row. Local, and without a host sync.

    Copies stay on their own rank as far as its quota goes. The rest of each expert's copies, in the order of ranks and
    tokens, is distributed over the rest of the quotas, in the order of ranks.

    On a GPU this is one kernel. There an index that is no expert becomes an index that is no slot, and the dispatch
    reports it.

    Args:
        plan: of `counts`.
        counts: ``[R, E]`` int64, as planned with.
        topk_idx: ``[T, K]`` int64, expert or −1: those that `counts[rank]` has counted.
        rank: this rank.

    Returns:
        ``[T, K]`` int64, slot or −1, for a dispatch with ``num_experts = R × (LE + B)``: slot s of rank r is
        r × (LE + B) + s, with the home experts first.

    Raises:
        ConfigError: an argument does not fit; on a CPU also an index outside −1 … E−1.
    """
    by_kernel = _require_counts(counts) and counts.shape[1] <= kernels.native.map_online_max_experts
    num_ranks, num_experts = counts.shape
    require_int("rank", rank, minimum=0, maximum=num_ranks - 1)
    for name, tensor, shape in (("spare", plan.spare, (num_ranks, None)), ("quota", plan.quota, (num_experts, None))):
        _require_ints(f"{name} of the plan", tensor, shape, counts.device, by_kernel)
    _require_ints("topk_idx", topk_idx, (None, None), counts.device, by_kernel)
    require_expert_indices(topk_idx, num_experts)
    if by_kernel:
        plan = plan._replace(spare=packed(plan.spare), quota=packed(plan.quota))
        return _map_by_kernel(plan, packed(counts), packed(topk_idx), rank)
    num_local, num_spare = num_experts // num_ranks, plan.spare.shape[1]
    per_domain = plan.quota.shape[1]
    upto = _share_of(plan, counts, rank).cumsum(1)

    expert = topk_idx.flatten()
    known = expert.clamp_min(0)
    # How many copies of the same expert come before each, among those of this rank.
    order = torch.where(expert >= 0, expert, num_experts).argsort(stable=True)
    begin = counts[rank].cumsum(0) - counts[rank]
    nth = torch.empty_like(expert).scatter_(0, order, torch.arange(expert.numel(), device=expert.device))
    nth = nth - begin[known]
    host = (nth.unsqueeze(1) >= upto[known]).sum(1).clamp_max(per_domain - 1)
    slot = _slots(plan, num_local)[known, host]
    host = host + known // (num_local * per_domain) * per_domain
    return torch.where(expert >= 0, host * (num_local + num_spare) + slot, expert).view(topk_idx.shape)


def _require_counts(counts: Tensor) -> bool:
    """Checks the matrix of counts, and returns whether kernels read it."""
    by_kernel = isinstance(counts, Tensor) and kernels.run_on(counts)
    _require_ints("counts", counts, (None, None), None, by_kernel)
    return by_kernel


def _require_ints(
    name: str, tensor: Tensor, shape: tuple[int | None, ...], device: torch.device | None, by_kernel: bool
) -> None:
    """Checks int64 of any strides; operators of torch take a tracer's, too, and kernels do not."""
    judge = require_tensor if by_kernel else require_traceable
    judge(name, tensor, dtypes=(torch.int64,), shape=shape, device=device)


def _map_by_kernel(plan: OnlinePlan, counts: Tensor, topk_idx: Tensor, rank: int) -> Tensor:
    """Computes `map_online` in one kernel."""
    slots = torch.empty_like(topk_idx)
    kernels.native.map_online(
        counts=counts.data_ptr(),
        spare=plan.spare.data_ptr(),
        quota=plan.quota.data_ptr(),
        topk_idx=topk_idx.data_ptr(),
        slots=slots.data_ptr(),
        num_copies=topk_idx.numel(),
        num_ranks=counts.shape[0],
        num_experts=counts.shape[1],
        ranks_per_domain=plan.quota.shape[1],
        num_spare=plan.spare.shape[1],
        rank=rank,
        **kernels.place_of(counts),
    )
    return slots


def _wanted_maxima(loads: Tensor, tolerance: float) -> Tensor:
    """``[D, Rd]`` loads → ``[D, V]`` maxima to try, from the mean up to the present maximum, denser near the mean."""
    num_ranks = loads.shape[1]
    mean = (loads.sum(1, keepdim=True) + num_ranks - 1) // num_ranks
    if tolerance:
        mean = (mean.double() * (1 + tolerance)).ceil().long()
    steps = torch.arange(_NUM_MAXIMA, device=loads.device)
    return mean + (loads.amax(1, keepdim=True) - mean).clamp_min(0) * steps * steps // _NUM_MAXIMA**2


def _fill(home: Tensor, wanted: Tensor, num_spare: int) -> tuple[Tensor, Tensor, Tensor]:
    """Fills spare slots.

    Args:
        home: ``[D, V, Rd, LE]``: copies for each expert of each rank.
        wanted: ``[D, V]``.
        num_spare: B.

    Returns:
        ``[D, V, Rd, B]`` the expert in each spare slot, counted within the domain, or −1; the copies that it takes; and
        what is left of `home`.
    """
    num_domains, num_maxima, num_ranks, num_local = home.shape
    loads = home.sum(3)
    ranks = torch.arange(num_ranks, device=home.device)
    is_filled = torch.zeros_like(loads, dtype=torch.bool)
    spare = home.new_full((num_domains, num_maxima, num_ranks, num_spare), -1)
    given = torch.zeros_like(spare)
    if num_spare == 0:
        return spare, given, home
    width = min(num_spare, num_local)
    above_loads = loads.sum(2, keepdim=True) + 1
    for _ in range(num_ranks - 1):
        # The emptiest rank that may still take, and among the ranks above the maximum the one that can give it most.
        may = ~is_filled & (loads < wanted.unsqueeze(2))
        least, taker = torch.where(may, loads, torch.iinfo(loads.dtype).max).min(2, keepdim=True)
        is_over = loads > wanted.unsqueeze(2)
        lacks = torch.where(is_over.any(2, keepdim=True) & may.any(2, keepdim=True), wanted.unsqueeze(2) - least, 0)
        largest, expert = home.sort(dim=3, descending=True, stable=True)
        largest, expert = largest[..., :width], expert[..., :width]
        gain = torch.minimum(largest.sum(3), lacks) * above_loads + loads
        giver = torch.where(is_over, gain, -1).argmax(2, keepdim=True)
        of_giver = giver.unsqueeze(3).expand(-1, -1, 1, width)
        largest, expert = (tensor.gather(2, of_giver).squeeze(2) for tensor in (largest, expert))
        before = largest.cumsum(2) - largest
        gift = torch.minimum((lacks - before).clamp_min(0), largest)

        is_giver, is_taker = ranks == giver, (ranks == taker) & (lacks > 0)
        taken = home.new_zeros(num_domains, num_maxima, num_local).scatter_(2, expert, gift).unsqueeze(2)
        home = home - torch.where(is_giver.unsqueeze(3), taken, 0)
        moved = gift.sum(2, keepdim=True)
        loads = loads + torch.where(is_taker, moved, 0) - torch.where(is_giver, moved, 0)
        is_filled |= is_taker
        named = torch.where(gift > 0, giver * num_local + expert, -1)
        here = is_taker.unsqueeze(3)
        spare[..., :width] = torch.where(here, named.unsqueeze(2), spare[..., :width])
        given[..., :width] = torch.where(here, gift.unsqueeze(2), given[..., :width])
    return spare, given, home


def _pick(tensor: Tensor, best: Tensor) -> Tensor:
    """``[D, V, …]`` → ``[D, …]``: the best of V."""
    return tensor.gather(1, best.expand(-1, 1, *tensor.shape[2:])).squeeze(1)


def _share_of(plan: OnlinePlan, counts: Tensor, rank: int) -> Tensor:
    """``[E, Rd]``: how many copies of each expert this rank sends to each rank of the expert's domain."""
    num_ranks, num_experts = counts.shape
    per_domain = plan.quota.shape[1]
    num_domains, of_domain = num_ranks // per_domain, num_experts // (num_ranks // per_domain)
    # Copies that stay: of rank h of a domain for the experts of that domain.
    blocks = counts.view(num_domains, per_domain, num_domains, of_domain).diagonal(dim1=0, dim2=2)  # [Rd, E/D, D]
    stay = torch.minimum(blocks.permute(2, 1, 0).reshape(num_experts, per_domain), plan.quota)
    stays_here = stay.view(num_domains, of_domain, per_domain).permute(0, 2, 1)  # [D, Rd, E/D]
    kept = torch.zeros_like(counts).view(num_domains, per_domain, num_domains, of_domain)
    kept.diagonal(dim1=0, dim2=2).copy_(stays_here.permute(1, 2, 0))
    rest = counts - kept.view(num_ranks, num_experts)
    end = rest.cumsum(0)[rank].unsqueeze(1)
    begin = end - rest[rank].unsqueeze(1)
    left = plan.quota - stay
    left_end = left.cumsum(1)
    overlap = (torch.minimum(end, left_end) - torch.maximum(begin, left_end - left)).clamp_min(0)
    here = torch.arange(per_domain, device=counts.device) == rank % per_domain
    mine = torch.arange(num_experts, device=counts.device) // of_domain == rank // per_domain
    return overlap + torch.where(here & mine.unsqueeze(1), stay, 0)


def _slots(plan: OnlinePlan, num_local: int) -> Tensor:
    """``[E, Rd]``: the slot of each expert on each rank of its domain; any number where it has none."""
    num_experts, per_domain = plan.quota.shape
    num_ranks, num_spare = plan.spare.shape
    device = plan.quota.device
    experts, ranks = torch.arange(num_experts, device=device), torch.arange(num_ranks, device=device)
    # One column more takes what is written for empty slots.
    slots_of = plan.quota.new_zeros(num_experts * per_domain + 1)
    spare_at = torch.where(
        plan.spare >= 0, plan.spare * per_domain + (ranks % per_domain).unsqueeze(1), slots_of.numel() - 1
    )
    spare_slots = torch.arange(num_local, num_local + num_spare, device=device).expand(num_ranks, -1)
    slots_of.scatter_(0, spare_at.flatten(), spare_slots.flatten())
    slots_of.scatter_(0, experts * per_domain + experts // num_local % per_domain, experts % num_local)
    return slots_of[:-1].view(num_experts, per_domain)
