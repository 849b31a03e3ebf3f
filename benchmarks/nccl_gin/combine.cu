// combine_between over GinLink; see gin_link.cuh.
#include "gin_link.cuh"
#include "kernels/combine_between/combine_between.cu"

namespace hybrid_ep {
namespace {

template __global__ void combine_between_kernel<GinLink, 1, false>(const __grid_constant__ CombineBetweenParams params);

}  // namespace
}  // namespace hybrid_ep
