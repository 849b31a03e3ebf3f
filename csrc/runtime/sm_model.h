// How many SMs, warps and stages a call gets. The figures behind the model are in docs/reasons.md.
#pragma once

namespace hybrid_ep {

struct LaunchShape {
  int num_sms;
  int num_send_warps;  // of a CTA
  int num_stages;      // of a sending warp's ring
  int rings_begin;     // in a CTA's shared memory
  bool rings_overlap;  // the counters
  int shared_bytes;
};

// `asked` is the caller's number of SMs; 0: the default. More than the device has counts as all of them. The rings lie
// behind a CTA's counters if both fit.
LaunchShape dispatch_shape(int row_bytes, int counter_bytes, int asked, int num_ranks, bool is_hopper,
                           int num_device_sms);
int dispatch_sms(int asked, int num_ranks, bool is_hopper, int num_device_sms);
int combine_sms(int asked, int num_ranks, int num_device_sms);
// SMs that copy experts.
int copy_sms(int asked, int num_device_sms);
// SMs of a call between domains. The network is slower than NVLink, which 8 to 16 SMs fill.
int between_sms(int asked, int num_device_sms);
// Bytes of stores that fill the wire while they are on it; 0 if that is not known.
int window_bytes(bool is_hopper);
// SMs that a combine from experts takes besides, to sum rows of up to num_topk experts a token.
int expert_sms(int asked, int num_combine_sms, int num_topk, int num_ranks, int num_device_sms);

}  // namespace hybrid_ep
