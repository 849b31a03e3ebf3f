#include "layout/link_layout.h"

#include "common/check.h"

namespace hybrid_ep {

LinkLayout arrange_link(int num_domains, int domain_idx, int num_near, const RingShape* rings, int num_rings) {
  LinkLayout layout{};
  layout.num_domains = num_domains;
  layout.domain_idx = domain_idx;
  layout.num_near = num_near;
  layout.num_rings = num_rings;
  for (int ring = 0; ring < num_rings; ++ring) {
    const RingShape& shape = layout.rings[ring] = rings[ring];
    layout.ring_begin[ring] = layout.window_bytes;
    layout.window_bytes += 2 * layout.ring_bytes(ring);
    layout.flags_begin[ring] = layout.num_words;
    layout.num_words += static_cast<uint32_t>(layout.num_peers()) * shape.num_slots;
    layout.credits_begin[ring] = layout.num_words;
    layout.num_words += static_cast<uint32_t>(layout.num_peers()) * shape.num_credits();
  }
  return layout;
}

LinkLayout make_link_layout(int num_domains, int domain_idx, int num_near, const RingShape* rings, int num_rings) {
  require(num_domains >= 2 && num_domains <= kMaxDomains, "num_domains", num_domains, "2 to 64");
  require(domain_idx >= 0 && domain_idx < num_domains, "domain_idx", domain_idx, "0 to num_domains − 1");
  require(num_near >= 1 && num_near < num_domains && num_domains % num_near == 0, "num_near", num_near,
          "divisors of num_domains, and less");
  require(num_rings >= 1 && num_rings <= kMaxRings, "num_rings", num_rings, "1 to 4");
  for (int ring = 0; ring < num_rings; ++ring) {
    const RingShape& shape = rings[ring];
    require(shape.slot_bytes > 0 && shape.slot_bytes % kSlotAlignBytes == 0, "slot_bytes", shape.slot_bytes,
            "positive multiples of 128");
    require(shape.num_slots >= 1 && shape.num_slots <= kMaxSlots, "num_slots", shape.num_slots, "1 to 65536");
    require(shape.slots_per_credit >= 1 && shape.num_slots % shape.slots_per_credit == 0, "slots_per_credit",
            shape.slots_per_credit, "divisors of num_slots");
  }
  return arrange_link(num_domains, domain_idx, num_near, rings, num_rings);
}

}  // namespace hybrid_ep
