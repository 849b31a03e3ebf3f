// Replaces verbs_*.cpp if the headers of libibverbs are missing.
#include "transport/verbs_link.h"

namespace hybrid_ep {
namespace {

[[noreturn]] void refuse() { throw LinkError(-1, "verbs: built without the headers of libibverbs"); }

}  // namespace

const bool kHasVerbs = false;

std::vector<std::string> active_verbs_devices(int) { refuse(); }
VerbsRetries retries_of(double) { refuse(); }
std::unique_ptr<Link> make_verbs_link(const LinkLayout&, const VerbsOptions&) { refuse(); }

}  // namespace hybrid_ep
