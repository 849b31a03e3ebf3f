// libibverbs.so.1 of a node whose NICs are an EFA interface and a RoCE card, both with an active port. It answers what
// looks for devices and makes queue pairs, and prints their partition and flow label; whatever would use one ends the
// process. VERBS_STUB_PKEYS has the port's table of partition keys, in hexadecimal.
#include <arpa/inet.h>
#include <infiniband/verbs.h>
#include <stdio.h>
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
static int poll_nothing(struct ibv_cq* queue, int num, struct ibv_wc* completions) {
  (void)queue, (void)num, (void)completions;
  return 0;
}
struct ibv_context* ibv_open_device(struct ibv_device* device) {
  struct ibv_context* context = calloc(1, sizeof(*context));
  context->device = device;
  context->ops.poll_cq = poll_nothing;
  return context;
}
int ibv_close_device(struct ibv_context* context) {
  free(context);
  return 0;
}
int ibv_query_port(struct ibv_context* context, uint8_t port, struct _compat_ibv_port_attr* attributes) {
  (void)context, (void)port;
  struct ibv_port_attr* found = (struct ibv_port_attr*)attributes;
  found->state = IBV_PORT_ACTIVE;
  found->link_layer = IBV_LINK_LAYER_ETHERNET;
  found->gid_tbl_len = 1;
  found->pkey_tbl_len = 8;
  found->active_mtu = IBV_MTU_4096;
  return 0;
}
int ibv_query_gid(struct ibv_context* context, uint8_t port, int idx, union ibv_gid* gid) {
  (void)context, (void)port, (void)idx;
  memset(gid, 1, sizeof(*gid));
  return 0;
}
int ibv_query_pkey(struct ibv_context* context, uint8_t port, int idx, __be16* pkey) {
  (void)context, (void)port;
  char* text = getenv("VERBS_STUB_PKEYS");
  unsigned long key = 0;
  for (; idx >= 0; --idx) key = strtoul(text, &text, 16);  // 0 behind the last one
  *pkey = htons((uint16_t)key);
  return 0;
}
struct ibv_pd* ibv_alloc_pd(struct ibv_context* context) {
  (void)context;
  return calloc(1, sizeof(struct ibv_pd));
}
struct ibv_mr* ibv_reg_mr(struct ibv_pd* domain, void* memory, size_t length, int access) {
  (void)domain, (void)memory, (void)length, (void)access;
  return calloc(1, sizeof(struct ibv_mr));
}
struct ibv_cq* ibv_create_cq(struct ibv_context* context, int num, void* own, struct ibv_comp_channel* channel,
                             int at) {
  (void)num, (void)own, (void)channel, (void)at;
  struct ibv_cq* queue = calloc(1, sizeof(*queue));
  queue->context = context;
  return queue;
}
struct ibv_qp* ibv_create_qp(struct ibv_pd* domain, struct ibv_qp_init_attr* attributes) {
  (void)domain, (void)attributes;
  return calloc(1, sizeof(struct ibv_qp));
}
int ibv_modify_qp(struct ibv_qp* pair, struct ibv_qp_attr* attributes, int mask) {
  (void)pair;
  if (mask & IBV_QP_PKEY_INDEX) printf("pkey_index %d\n", attributes->pkey_index);
  if (mask & IBV_QP_AV) printf("flow_label %u\n", attributes->ah_attr.grh.flow_label);
  fflush(stdout);
  return 0;
}
int ibv_dereg_mr(struct ibv_mr* region) { return free(region), 0; }
int ibv_dealloc_pd(struct ibv_pd* domain) { return free(domain), 0; }
int ibv_destroy_cq(struct ibv_cq* queue) { return free(queue), 0; }
int ibv_destroy_qp(struct ibv_qp* pair) { return free(pair), 0; }
int ibv_get_async_event(struct ibv_context* context, struct ibv_async_event* event) {
  (void)context, (void)event;
  return -1;
}
int ibv_fork_init(void) { return 0; }

#define UNUSED(name)                       \
  void unused_##name(void) __asm__(#name); \
  void unused_##name(void) { abort(); }
UNUSED(ibv_query_device)
UNUSED(ibv_ack_async_event)
UNUSED(ibv_event_type_str)
UNUSED(ibv_wc_status_str)
