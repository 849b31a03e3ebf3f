// stream_chunks over GinLink; see gin_link.cuh.
#include "gin_link.cuh"
#include "kernels/between/stream_chunks.cu"

namespace hybrid_ep {
namespace {

template __global__ void stream_chunks_kernel<GinLink>(const __grid_constant__ StreamChunksParams params);

}  // namespace
}  // namespace hybrid_ep
