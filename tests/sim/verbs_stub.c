// libibverbs.so.1 of a node whose NICs are an EFA interface and a RoCE card, both with an active port. It answers what
// looks for devices; whatever would use one ends the process.
#include <infiniband/verbs.h>
#include <stdlib.h>
#include <string.h>

#undef ibv_query_port
#undef ibv_reg_mr

static struct ibv_device efa = {
    .node_type = IBV_NODE_UNSPECIFIED, .transport_type = IBV_TRANSPORT_UNSPECIFIED, .name = "rdmap0s6"};
static struct ibv_device roce = {.node_type = IBV_NODE_CA, .transport_type = IBV_TRANSPORT_IB, .name = "mlx5_0"};
static struct ibv_device* devices[] = {&efa, &roce, NULL};

struct ibv_device** ibv_get_device_list(int* num) {
  *num = getenv("VERBS_STUB_ONLY_EFA") != NULL ? 1 : 2;
  return devices;
}
void ibv_free_device_list(struct ibv_device** list) { (void)list; }
const char* ibv_get_device_name(struct ibv_device* device) { return device->name; }
struct ibv_context* ibv_open_device(struct ibv_device* device) {
  struct ibv_context* context = calloc(1, sizeof(*context));
  context->device = device;
  return context;
}
int ibv_close_device(struct ibv_context* context) {
  free(context);
  return 0;
}
int ibv_query_port(struct ibv_context* context, uint8_t port, struct _compat_ibv_port_attr* attributes) {
  (void)context, (void)port;
  ((struct ibv_port_attr*)attributes)->state = IBV_PORT_ACTIVE;
  return 0;
}
int ibv_fork_init(void) { return 0; }

#define UNUSED(name)                       \
  void unused_##name(void) __asm__(#name); \
  void unused_##name(void) { abort(); }
UNUSED(ibv_query_device)
UNUSED(ibv_query_gid)
UNUSED(ibv_alloc_pd)
UNUSED(ibv_dealloc_pd)
UNUSED(ibv_reg_mr)
UNUSED(ibv_dereg_mr)
UNUSED(ibv_create_cq)
UNUSED(ibv_destroy_cq)
UNUSED(ibv_create_qp)
UNUSED(ibv_modify_qp)
UNUSED(ibv_destroy_qp)
UNUSED(ibv_get_async_event)
UNUSED(ibv_ack_async_event)
UNUSED(ibv_event_type_str)
UNUSED(ibv_wc_status_str)
