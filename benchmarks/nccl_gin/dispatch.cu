// dispatch_between over GinLink; see gin_link.cuh.
#include "gin_link.cuh"
#include "kernels/dispatch_between/dispatch_between.cu"

namespace hybrid_ep {
namespace {

template __global__ void dispatch_between_kernel<GinLink>(const __grid_constant__ DispatchBetweenParams params);

}  // namespace
}  // namespace hybrid_ep
