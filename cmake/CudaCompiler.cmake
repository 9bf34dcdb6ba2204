# Decides whether to build for CUDA, and says why not where that was left open.

set(CUTLASS_BN_MINIMUM_CUDA 12.8)  # the first toolkit with sm_100

# Sets `result` to whether to build; then CMAKE_CUDA_COMPILER is set as well.
function(cutlass_bn_find_cuda_compiler wanted result)
  set(${result} OFF PARENT_SCOPE)
  if(wanted STREQUAL "AUTO" OR wanted STREQUAL "")
    set(required OFF)
  elseif(wanted)
    set(required ON)
  else()
    message(STATUS "cutlass_bn: CUTLASS_BN_CUDA=${wanted}: CPU-only, no library is built")
    return()
  endif()

  if(NOT CMAKE_CUDA_COMPILER)
    find_program(CUTLASS_BN_NVCC nvcc HINTS ENV CUDACXX ENV CUDA_HOME ENV CUDA_PATH PATHS /usr/local/cuda PATH_SUFFIXES bin)
    if(DEFINED ENV{CUDACXX})
      set(CMAKE_CUDA_COMPILER "$ENV{CUDACXX}")
    elseif(CUTLASS_BN_NVCC)
      set(CMAKE_CUDA_COMPILER "${CUTLASS_BN_NVCC}")
    endif()
  endif()
  if(NOT CMAKE_CUDA_COMPILER)
    if(required)
      message(FATAL_ERROR "cutlass_bn: CUTLASS_BN_CUDA=${wanted}, but there is no CUDA compiler (nvcc) on PATH, in CUDA_HOME or in "
                          "/usr/local/cuda. Install the CUDA toolkit ${CUTLASS_BN_MINIMUM_CUDA} or newer, or set CUDACXX to nvcc.")
    endif()
    message(NOTICE "cutlass_bn: no CUDA compiler (nvcc) found: this is a CPU-only build without the compiled library. CUDA tensors "
                   "will raise an error that says how to rebuild. CUTLASS_BN_CUDA=ON makes a missing compiler an error.")
    return()
  endif()

  execute_process(COMMAND "${CMAKE_CUDA_COMPILER}" --version OUTPUT_VARIABLE output ERROR_VARIABLE output RESULT_VARIABLE status)
  if(NOT output MATCHES "release ([0-9]+\\.[0-9]+)")
    message(FATAL_ERROR "cutlass_bn: ${CMAKE_CUDA_COMPILER} --version names no CUDA release (${status}): ${output}")
  endif()
  set(version "${CMAKE_MATCH_1}")
  if(version VERSION_LESS CUTLASS_BN_MINIMUM_CUDA)
    message(FATAL_ERROR "cutlass_bn: CUDA ${CUTLASS_BN_MINIMUM_CUDA} or newer is needed, and ${CMAKE_CUDA_COMPILER} is ${version}. "
                        "Set CUDACXX to a newer nvcc, or CUTLASS_BN_CUDA=OFF for a CPU-only build.")
  endif()
  set(CMAKE_CUDA_COMPILER "${CMAKE_CUDA_COMPILER}" CACHE FILEPATH "The CUDA compiler")
  set(${result} ON PARENT_SCOPE)
endfunction()
