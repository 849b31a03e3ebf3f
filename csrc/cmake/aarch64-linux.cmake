# Cross-compiles for aarch64 Linux (Grace) with Debian's g++-aarch64-linux-gnu; ci/wheel.sh names this file in
# CMAKE_TOOLCHAIN_FILE. HYBRID_EP_TARGET_ROOT holds the target's libibverbs, its headers and those of libfabric, unless
# RDMA_CORE_HOME has them.
# NVSHMEM_HOME, if set, holds the target's NVSHMEM. A program is always the build machine's, a library never.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_C_COMPILER aarch64-linux-gnu-gcc)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
set(CMAKE_CUDA_HOST_COMPILER aarch64-linux-gnu-g++)
set(CMAKE_LIBRARY_ARCHITECTURE aarch64-linux-gnu)

set(target_root "$ENV{HYBRID_EP_TARGET_ROOT}")
if(NOT IS_DIRECTORY "${target_root}")
  message(FATAL_ERROR "HYBRID_EP_TARGET_ROOT='${target_root}' is not allowed; it takes a folder with the target's usr/")
endif()
set(CMAKE_FIND_ROOT_PATH "${target_root}" $ENV{RDMA_CORE_HOME} $ENV{NVSHMEM_HOME})
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_INCLUDE BOTH)  # nvml.h comes with the build machine's toolkit
