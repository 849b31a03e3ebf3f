# The `_cuda` module: kernels, and the runtime that launches them.
#
# The CUDA runtime is linked statically, so that the module meets whatever version torch brings. With HYBRID_EP_STRICT
# register spills are errors: ptxas reports them where a kernel needs local memory.
if(HYBRID_EP_BUILD_CUDA STREQUAL "off")
  hybrid_ep_leave_out(_cuda auto "HYBRID_EP_BUILD_CUDA=off")
  return()
endif()
include(CheckLanguage)
if(NOT CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX})
  find_program(CMAKE_CUDA_COMPILER nvcc HINTS ENV CUDA_HOME PATHS /usr/local/cuda PATH_SUFFIXES bin)
  if(NOT CMAKE_CUDA_COMPILER)
    unset(CMAKE_CUDA_COMPILER CACHE)
  endif()
endif()
check_language(CUDA)
if(NOT CMAKE_CUDA_COMPILER)
  hybrid_ep_leave_out(_cuda ${HYBRID_EP_BUILD_CUDA} "nvcc was not found")
  return()
endif()
if(NOT CMAKE_CUDA_ARCHITECTURES)
  set(CMAKE_CUDA_ARCHITECTURES OFF)  # -gencode is written below, from the same list that torch's builds take
endif()
enable_language(CUDA)
string(REPLACE " " ";" arch_list "${HYBRID_EP_CUDA_ARCH_LIST}")
set(gencode "")
set(oldest_nvcc 12.4)  # the oldest that was tried
foreach(arch IN LISTS arch_list)
  if(NOT arch MATCHES "^([0-9]+)\\.([0-9])([af]?)(\\+PTX)?$")
    message(FATAL_ERROR "HYBRID_EP_CUDA_ARCH_LIST has ${arch}; allowed: compute capabilities as 9.0 or 10.0+PTX")
  endif()
  set(number ${CMAKE_MATCH_1}${CMAKE_MATCH_2})
  set(sm ${number}${CMAKE_MATCH_3})
  list(APPEND gencode "-gencode=arch=compute_${sm},code=sm_${sm}")
  if(CMAKE_MATCH_4)  # for the driver to compile on GPUs that are not in the list
    list(APPEND gencode "-gencode=arch=compute_${sm},code=compute_${sm}")
  endif()
  if(number GREATER_EQUAL 100)
    set(oldest_nvcc 12.8)  # the first that knows them
  endif()
endforeach()
if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS oldest_nvcc)
  hybrid_ep_leave_out(_cuda ${HYBRID_EP_BUILD_CUDA}
                      "nvcc is ${CMAKE_CUDA_COMPILER_VERSION}, below ${oldest_nvcc}, for ${HYBRID_EP_CUDA_ARCH_LIST}")
  return()
endif()
find_package(CUDAToolkit REQUIRED)

set(CMAKE_CUDA_STANDARD 17)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
# One function for both: nvcc does not know every warning flag of the host compiler.
file(GLOB cuda_kernels CONFIGURE_DEPENDS kernels/*/*.cu)
file(GLOB cuda_hosts CONFIGURE_DEPENDS bindings/cuda/*.cpp runtime/*.cpp)
hybrid_ep_module(_cuda ${cuda_kernels} ${cuda_hosts} bindings/sizes.cpp modules/cuda.cpp calls/domain.cpp
  calls/low_latency.cpp calls/plans.cpp calls/request.cpp calls/slots.cpp)
set(cuda_warnings -Xptxas=--warn-on-spills -Xcompiler=-Wall,-Wextra)
if(HYBRID_EP_STRICT)
  list(APPEND cuda_warnings -Werror=all-warnings -Xptxas=--warning-as-error -Xcompiler=-Werror)
endif()
target_compile_options(_cuda PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:${gencode} ${cuda_warnings}>)
target_link_libraries(_cuda PRIVATE CUDA::cudart_static)
hybrid_ep_add_transport(_cuda cuda)
