# The `_nvshmem` module: the kernels between domains with NVSHMEM's link, and what joins its world.
#
# Its device library is linked in; that of the host is loaded from NVIDIA's wheel when the module is imported, so the
# module has no run path to it. NVSHMEM's code has a licence of its own, which is why no other module has it.
set(HYBRID_EP_BUILD_NVSHMEM "auto" CACHE STRING "auto, on or off")

function(hybrid_ep_add_nvshmem)
  if(NOT TARGET _cuda)
    hybrid_ep_leave_out(_nvshmem ${HYBRID_EP_BUILD_NVSHMEM} "_cuda is not built")
    return(PROPAGATE left_out)
  endif()
  set(wheel nvidia-nvshmem-cu${CUDAToolkit_VERSION_MAJOR})
  # The wheels for other releases of CUDA have the same folder, and their device code cannot be linked.
  string(REPLACE "-" "_" stem ${wheel})
  file(GLOB metadata "${Python_SITELIB}/${stem}-*.dist-info" "${Python_SITEARCH}/${stem}-*.dist-info")
  set(homes "$ENV{NVSHMEM_HOME}")
  foreach(folder IN LISTS metadata)
    cmake_path(GET folder PARENT_PATH site)
    list(APPEND homes "${site}/nvidia/nvshmem")
  endforeach()
  find_path(HYBRID_EP_NVSHMEM_INCLUDE nvshmemx.h HINTS ${homes} PATH_SUFFIXES include NO_DEFAULT_PATH)
  find_library(HYBRID_EP_NVSHMEM_DEVICE NAMES libnvshmem_device.a HINTS ${homes} PATH_SUFFIXES lib NO_DEFAULT_PATH)
  find_library(HYBRID_EP_NVSHMEM_HOST NAMES libnvshmem_host.so.3 HINTS ${homes} PATH_SUFFIXES lib NO_DEFAULT_PATH)
  if(NOT HYBRID_EP_NVSHMEM_INCLUDE OR NOT HYBRID_EP_NVSHMEM_DEVICE OR NOT HYBRID_EP_NVSHMEM_HOST)
    hybrid_ep_leave_out(_nvshmem ${HYBRID_EP_BUILD_NVSHMEM}
                        "NVSHMEM was not found: pip install ${wheel} and build with --no-build-isolation, or set \
NVSHMEM_HOME")
    return(PROPAGATE left_out)
  endif()
  # Without LTO, which drops what the device code is registered by.
  hybrid_ep_module(_nvshmem NO_EXTRAS bindings/nvshmem/module.cpp runtime/nvshmem/world.cu
                   kernels/dispatch_between/dispatch_between.cu kernels/combine_between/combine_between.cu
                   kernels/between/stream_chunks.cu kernels/low_latency_between/dispatch.cu
                   kernels/low_latency_between/combine.cu)
  set_target_properties(_nvshmem PROPERTIES CUDA_SEPARABLE_COMPILATION ON CUDA_RESOLVE_DEVICE_SYMBOLS ON
                                            SKIP_BUILD_RPATH ON)
  target_compile_definitions(_nvshmem PRIVATE HYBRID_EP_NVSHMEM)
  target_include_directories(_nvshmem SYSTEM PRIVATE ${HYBRID_EP_NVSHMEM_INCLUDE})
  # No errors of spills: NVSHMEM's own functions have some, and a kernel saves registers where it calls them.
  list(FILTER cuda_warnings EXCLUDE REGEX "^-Xptxas=")
  target_compile_options(_nvshmem PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:${gencode} ${cuda_warnings}>)
  # Its symbols stay in the module: torch has a device library of its own.
  string(REPLACE "," "$<COMMA>" linked_archs "${gencode}")
  target_link_options(_nvshmem PRIVATE $<DEVICE_LINK:${linked_archs}> LINKER:--exclude-libs,ALL)
  target_link_libraries(_nvshmem PRIVATE ${HYBRID_EP_NVSHMEM_DEVICE} ${HYBRID_EP_NVSHMEM_HOST} CUDA::cudart_static)
  return(PROPAGATE built)
endfunction()

if(HYBRID_EP_BUILD_NVSHMEM STREQUAL "off")
  hybrid_ep_leave_out(_nvshmem auto "HYBRID_EP_BUILD_NVSHMEM=off")
else()
  hybrid_ep_add_nvshmem()
endif()
