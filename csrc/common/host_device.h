// Functions that both the host and kernels call.
#pragma once

#if defined(__CUDACC__)
#define HYBRID_EP_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define HYBRID_EP_HOST_DEVICE inline
#endif
