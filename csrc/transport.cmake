# The transports between domains. Their host code is compiled twice: into `_C`, where memory is the host's, and into
# `_cuda`, where kernels write the commands. `verbs` needs the headers of libibverbs, and `libfabric` its own; they load
# the libraries when they run.
find_package(Threads REQUIRED)
set(HYBRID_EP_BUILD_FABRIC "auto" CACHE STRING "auto, on or off")
find_path(HYBRID_EP_FABRIC_INCLUDE rdma/fi_rma.h HINTS ENV LIBFABRIC_HOME PATHS /opt/amazon/efa /opt/cray/libfabric
          PATH_SUFFIXES include)
if(HYBRID_EP_BUILD_FABRIC STREQUAL "off")
  hybrid_ep_leave_out("transport libfabric" auto "HYBRID_EP_BUILD_FABRIC=off")
elseif(NOT HYBRID_EP_FABRIC_INCLUDE)
  hybrid_ep_leave_out("transport libfabric" ${HYBRID_EP_BUILD_FABRIC}
                      "the headers of libfabric were not found: install libfabric-dev or set LIBFABRIC_HOME")
endif()

# memory: host or cuda, the suffix of the files that allocate and copy.
function(hybrid_ep_add_transport module memory)
  set(others host cuda)
  list(REMOVE_ITEM others ${memory})
  file(GLOB sources CONFIGURE_DEPENDS transport/*.cpp)
  list(FILTER sources EXCLUDE REGEX "_${others}\\.cpp$")
  if(HYBRID_EP_BUILD_VERBS STREQUAL "off" OR NOT HYBRID_EP_VERBS_INCLUDE)
    list(FILTER sources EXCLUDE REGEX "verbs_(api|device|link)\\.cpp$")
  else()
    list(FILTER sources EXCLUDE REGEX "verbs_absent\\.cpp$")
    target_include_directories(${module} SYSTEM PRIVATE ${HYBRID_EP_VERBS_INCLUDE})
  endif()
  if(HYBRID_EP_BUILD_FABRIC STREQUAL "off" OR NOT HYBRID_EP_FABRIC_INCLUDE)
    list(FILTER sources EXCLUDE REGEX "fabric_(device|link)\\.cpp$")
  else()
    list(FILTER sources EXCLUDE REGEX "fabric_absent\\.cpp$")
    target_include_directories(${module} SYSTEM PRIVATE ${HYBRID_EP_FABRIC_INCLUDE})
  endif()
  target_sources(${module} PRIVATE ${sources} layout/link_layout.cpp bindings/transport.cpp)
  target_link_libraries(${module} PRIVATE Threads::Threads ${CMAKE_DL_LIBS})
endfunction()

hybrid_ep_add_transport(_C host)
