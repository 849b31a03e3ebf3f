# The topology probe: /sys in `_C`, NVML in `_nvml`, libibverbs in `_verbs`.
#
# `_nvml` links an empty library with the name of libnvidia-ml.so.1, which is installed nowhere: a build host needs no
# driver, and the loader finds the driver's library where the module runs.
target_sources(_C PRIVATE topology/sysfs.cpp topology/distance.cpp bindings/topology.cpp)

# Whether a folder's nvml.h has all that the probe asks for: those before CUDA 12.8 do not.
function(hybrid_ep_check_nvml result folder)
  file(STRINGS ${folder}/nvml.h found REGEX nvmlPlatformInfo_v2 LIMIT_COUNT 1)
  if(NOT found)
    set(${result} FALSE PARENT_SCOPE)
  endif()
endfunction()

function(hybrid_ep_add_nvml)
  file(GLOB wheel_includes ${Python_SITEARCH}/nvidia/cu*/include ${Python_SITEARCH}/nvidia/nvml_dev/include)
  find_path(HYBRID_EP_NVML_INCLUDE nvml.h HINTS ENV CUDA_HOME ENV CUDA_PATH PATHS /usr/local/cuda ${wheel_includes}
            PATH_SUFFIXES include VALIDATOR hybrid_ep_check_nvml)
  if(NOT HYBRID_EP_NVML_INCLUDE)
    hybrid_ep_leave_out(_nvml ${HYBRID_EP_BUILD_NVML} "nvml.h of CUDA 12.8 or newer was not found: pip install nvidia-nvml-dev and build with \
--no-build-isolation, or set CUDA_HOME")
    return(PROPAGATE left_out)
  endif()
  file(CONFIGURE OUTPUT nvml_name.cpp CONTENT "")
  add_library(nvml_name SHARED ${CMAKE_CURRENT_BINARY_DIR}/nvml_name.cpp)
  set_target_properties(nvml_name PROPERTIES OUTPUT_NAME nvidia-ml SUFFIX .so.1 NO_SONAME ON
                        LINK_OPTIONS -Wl,-soname,libnvidia-ml.so.1
                        LIBRARY_OUTPUT_DIRECTORY ${CMAKE_CURRENT_BINARY_DIR}/stub)
  hybrid_ep_module(_nvml bindings/nvml.cpp topology/nvml_probe.cpp)
  target_include_directories(_nvml SYSTEM PRIVATE ${HYBRID_EP_NVML_INCLUDE})
  target_link_libraries(_nvml PRIVATE -Wl,--no-as-needed nvml_name)
  # No run path into the build folder: the module must find the driver's library, never the empty one.
  set_target_properties(_nvml PROPERTIES SKIP_BUILD_RPATH ON)
  return(PROPAGATE built)
endfunction()

function(hybrid_ep_add_verbs)
  set(home "$ENV{RDMA_CORE_HOME}")
  find_path(HYBRID_EP_VERBS_INCLUDE infiniband/verbs.h HINTS ${home} PATH_SUFFIXES include)
  find_library(HYBRID_EP_VERBS_LIBRARY ibverbs HINTS ${home} PATH_SUFFIXES lib lib64)
  if(NOT HYBRID_EP_VERBS_INCLUDE OR NOT HYBRID_EP_VERBS_LIBRARY)
    hybrid_ep_leave_out(_verbs ${HYBRID_EP_BUILD_VERBS} "libibverbs was not found: install libibverbs-dev or set RDMA_CORE_HOME")
    return(PROPAGATE left_out)
  endif()
  hybrid_ep_module(_verbs bindings/verbs.cpp topology/verbs_probe.cpp)
  target_include_directories(_verbs SYSTEM PRIVATE ${HYBRID_EP_VERBS_INCLUDE})
  target_link_libraries(_verbs PRIVATE ${HYBRID_EP_VERBS_LIBRARY})
  return(PROPAGATE built)
endfunction()

if(HYBRID_EP_BUILD_NVML STREQUAL "off")
  hybrid_ep_leave_out(_nvml auto "HYBRID_EP_BUILD_NVML=off")
else()
  hybrid_ep_add_nvml()
endif()
if(HYBRID_EP_BUILD_VERBS STREQUAL "off")
  hybrid_ep_leave_out(_verbs auto "HYBRID_EP_BUILD_VERBS=off")
else()
  hybrid_ep_add_verbs()
endif()
