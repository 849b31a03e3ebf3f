// libibverbs, loaded at run time. No module links it, so a node without rdma-core can run everything else. Inline
// functions of its header (post, poll) call through the device's own table and need no symbol.
#pragma once

#include <infiniband/verbs.h>

namespace hybrid_ep {

struct VerbsApi {
  decltype(&::ibv_get_device_list) get_device_list;
  decltype(&::ibv_free_device_list) free_device_list;
  decltype(&::ibv_get_device_name) get_device_name;
  decltype(&::ibv_open_device) open_device;
  decltype(&::ibv_close_device) close_device;
  decltype(&::ibv_query_device) query_device;
  int (*query_port)(ibv_context*, uint8_t, _compat_ibv_port_attr*);
  decltype(&::ibv_query_gid) query_gid;
  decltype(&::ibv_query_pkey) query_pkey;
  decltype(&::ibv_alloc_pd) alloc_pd;
  decltype(&::ibv_dealloc_pd) dealloc_pd;
  ibv_mr* (*reg_mr)(ibv_pd*, void*, size_t, int);
  ibv_mr* (*reg_mr_iova2)(ibv_pd*, void*, size_t, uint64_t, unsigned);      // of rdma-core 28; or nullptr
  ibv_mr* (*reg_dmabuf_mr)(ibv_pd*, uint64_t, size_t, uint64_t, int, int);  // of rdma-core 34; or nullptr
  decltype(&::ibv_dereg_mr) dereg_mr;
  decltype(&::ibv_create_cq) create_cq;
  decltype(&::ibv_destroy_cq) destroy_cq;
  decltype(&::ibv_create_qp) create_qp;
  decltype(&::ibv_modify_qp) modify_qp;
  decltype(&::ibv_destroy_qp) destroy_qp;
  decltype(&::ibv_get_async_event) get_async_event;
  decltype(&::ibv_ack_async_event) ack_async_event;
  decltype(&::ibv_event_type_str) event_type_str;
  decltype(&::ibv_wc_status_str) wc_status_str;
};

// Loads the library once. Throws LinkError with the loader's message where it is not there.
const VerbsApi& verbs_api();

}  // namespace hybrid_ep
