#include "transport/verbs_api.h"

#include <dlfcn.h>

#include <string>

#include "transport/link.h"

namespace hybrid_ep {
namespace {

template <typename Function>
void find(void* library, const char* name, Function* function, bool is_optional = false) {
  *function = reinterpret_cast<Function>(dlsym(library, name));
  if (*function == nullptr && !is_optional) throw LinkError(-1, std::string("libibverbs.so.1 has no ") + name);
}

VerbsApi load() {
  void* library = dlopen("libibverbs.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) throw LinkError(-1, std::string("libibverbs cannot be loaded: ") + dlerror());
  VerbsApi api{};
  find(library, "ibv_get_device_list", &api.get_device_list);
  find(library, "ibv_free_device_list", &api.free_device_list);
  find(library, "ibv_get_device_name", &api.get_device_name);
  find(library, "ibv_open_device", &api.open_device);
  find(library, "ibv_close_device", &api.close_device);
  find(library, "ibv_query_device", &api.query_device);
  find(library, "ibv_query_port", &api.query_port);
  find(library, "ibv_query_gid", &api.query_gid);
  find(library, "ibv_query_pkey", &api.query_pkey);
  find(library, "ibv_alloc_pd", &api.alloc_pd);
  find(library, "ibv_dealloc_pd", &api.dealloc_pd);
  find(library, "ibv_reg_mr", &api.reg_mr);
  find(library, "ibv_reg_mr_iova2", &api.reg_mr_iova2, true);
  find(library, "ibv_reg_dmabuf_mr", &api.reg_dmabuf_mr, true);
  find(library, "ibv_dereg_mr", &api.dereg_mr);
  find(library, "ibv_create_cq", &api.create_cq);
  find(library, "ibv_destroy_cq", &api.destroy_cq);
  find(library, "ibv_create_qp", &api.create_qp);
  find(library, "ibv_modify_qp", &api.modify_qp);
  find(library, "ibv_destroy_qp", &api.destroy_qp);
  find(library, "ibv_get_async_event", &api.get_async_event);
  find(library, "ibv_ack_async_event", &api.ack_async_event);
  find(library, "ibv_event_type_str", &api.event_type_str);
  find(library, "ibv_wc_status_str", &api.wc_status_str);
  // Memory that a NIC uses must stay where it is when the process forks, as data loaders do.
  decltype(&::ibv_fork_init) fork_init = nullptr;
  find(library, "ibv_fork_init", &fork_init);
  (void)fork_init();
  return api;
}

}  // namespace

const VerbsApi& verbs_api() {
  static const VerbsApi api = load();
  return api;
}

}  // namespace hybrid_ep
